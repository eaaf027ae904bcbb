"""torch: which calls are watched, and which are not any more."""

import pytest
import torch

import compat
from compat._backends.torch import propagation

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import ROWS, computing, pair, rows, same

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


def test_a_number_of_rows_that_changes_nothing():
    """Each number of rows is tried once, and later calls are not traced."""
    plain, module = pair(lambda m, y: y.view(len(y), -1, 1) * 2)
    for count in (ROWS, 7, ROWS, 7):
        same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)
        (plan,) = module.forward.__func__.made_by.plans.values()
        assert not plan.watch
    assert plan.totals == {ROWS, 7}


def test_only_the_first_call_of_common_models_is_watched(monkeypatch):
    nn = torch.nn
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 2))
    loss = computing(lambda m, y: (y, nn.functional.mse_loss(y, y * 0), y.sum()))
    state = computing(lambda m, y: (m.steps.add_(1), y)[1], steps=0)
    modules = [compat.parallelize(module.double()) for module in (norm, loss, state)]
    for module in modules:
        module(rows(ROWS, 4))
    # Fails where it is used.
    monkeypatch.setattr(propagation.Propagation, "__torch_function__", None)
    for module in modules:
        module(rows(ROWS, 4))
        module(rows(2, 4))


def test_a_call_that_turns_out_different_is_watched():
    def forward(m, y, kind):
        if kind > 2:
            m.total += y.sum()
        return y if kind == 0 else y.mean(0) if kind == 1 else (y, y.sum())

    plain, module = pair(forward, total=0.0)
    for kind in (0, 1, 0, 2, 3, 0, 1):
        with torch.no_grad():
            same(plain(rows(ROWS, 4), kind), module(rows(ROWS, 4), kind), 1e-12)
        same(plain.total, module.total, 1e-12)


@pytest.mark.parametrize("first", [lambda y: y.sum() / y.shape[0], lambda y: y.sum() / 2.0])
def test_another_way_to_a_loss_later(first):
    """A number of rows that replicas share is not that of the batch."""
    module, x = compat.parallelize(computing(lambda m, y: m.loss(y)).double()), rows(12, 4)
    module.loss = first
    module(x)
    module.loss = lambda y: y.sum() / len(y)
    with pytest.warns(
        compat.CompatWarning, match="takes another code path on a shard of the batch"
    ):
        found = module(x)
    same(module.layer(x).sum() / 12, found, 1e-12)
