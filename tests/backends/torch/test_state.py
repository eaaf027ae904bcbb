"""torch: state that calls set, from three devices as from one."""

import warnings

import pytest
import torch

from compat._backends.torch import propagation

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import MIXED, ROWS, agree, computing, pair, rows, same

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


def _counters(self, y):
    self.steps += 1
    self.calls += 1.0
    self.seen += y.shape[0]
    self.total += y.detach().sum()
    return y


def _averages(self, y):
    self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
    self.power.mul_(0.5).add_(y.detach().pow(2).sum(0), alpha=0.5)
    return y


def _extremes(self, y):
    scaled = y * (self.most - self.least)
    self.least = self.least.minimum(y.detach().amin(0))
    self.most.copy_(self.most.maximum(y.detach().amax(0)))
    return scaled


def _attributes(self, y):
    self.calls = getattr(self, "calls", 0) + 1
    self.rows_seen = getattr(self, "rows_seen", 0) + len(y)
    self.loss = y.pow(2).mean()
    self.features = y
    return y


STATES = {
    "counters": (_counters, {"steps": 0, "calls": 0.0, "seen": 0, "total": 0.0}),
    "averages of the user's": (_averages, {"mean": [0.0] * 5, "power": [0.0] * 5}),
    "extremes": (_extremes, {"least": [0.1] * 5, "most": [-0.1] * 5}),
    "unchanged": (lambda m, y: (y * m.scale)[:, m.order], {"scale": [2.0] * 5, "order": [1, 0]}),
}


class TestState:
    @pytest.mark.parametrize("name", list(STATES))
    def test_buffers(self, name):
        function, buffers = STATES[name]
        agree(computing(function, **buffers), rows(ROWS, 4), steps=4)

    def test_averages_of_a_normalization(self):
        agree(torch.nn.InstanceNorm1d(3, track_running_stats=True), rows(ROWS, 3, 4))

    def test_attributes(self):
        module, _ = agree(computing(_attributes), rows(ROWS, 4), steps=3)
        found = module.calls, module.rows_seen, module.loss, module.features
        plain = computing(_attributes).double()
        for _ in range(4):
            plain(rows(ROWS, 4))
        same((plain.calls, plain.rows_seen, plain.loss, plain.features), found, 1e-12)

    def test_a_number_of_rows_in_an_attribute(self, monkeypatch):
        """It is that of the batch, whatever an earlier batch has left there."""

        def forward(self, y):
            self.batch = y.shape[0]
            return y, 2 * y.shape[0]

        plain, module = pair(forward)
        for number in (6, 6, 9, 3, 9, 27, 13):
            same(plain(rows(number, 4)), module(rows(number, 4)), 1e-12)
            assert module.batch == plain.batch == number
        # Fails where it is used.
        monkeypatch.setattr(propagation.Propagation, "__torch_function__", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(rows(12, 4))
        assert module.batch == 12

    def test_memory_of_rows_runs_unsplit(self):
        """All parts of 12 rows have as many, so that their mean would have a shape that fits."""

        def remember(self, y):
            self.memory = y.detach()
            return y

        told = [
            "The operation that sets the state 'memory' of 'Mine' {} The model runs unsplit on "
            "cpu:0.".format(MIXED)
        ]
        agree(computing(remember, memory=[0.0]), rows(12, 4), whole=told)


@pytest.mark.parametrize("kind", [torch.nn.utils.parametrizations, torch.nn.utils])
def test_spectral_normalization(kind):
    """Its vectors are turned once in a step, as on one device. The older one is a hook."""
    torch.manual_seed(0)
    layers = kind.spectral_norm(torch.nn.Linear(4, 6)), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    agree(torch.nn.Sequential(*layers), rows(ROWS, 4), steps=4)
