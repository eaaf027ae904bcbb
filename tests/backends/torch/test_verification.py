"""Verification on torch: what is found later, and what is left as it was."""

import contextlib
import copy
import functools
import warnings

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch import side_effects
from compat._configuration import registry
from compat._rows import splitting
from compat._runtime import work
from compat._verification import verification

from .. import verification_cases
from ..interruptions import interrupted
from ..verification_cases import verified
from .test_contract import devices  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("devices")
backend = registry.find("torch")
verified_module = functools.partial(verified, backend)


def test_rows_that_mix_in_a_later_batch_are_right_or_found():
    import keras

    verification_cases.check_rows_that_mix_in_a_later_batch(keras, backend)


def test_an_optional_input_that_is_not_given():
    import keras

    verification_cases.check_an_optional_input_that_is_not_given(keras, backend)


def test_the_users_error_is_the_one_that_is_raised():
    import keras

    verification_cases.check_the_users_error_is_the_one_that_is_raised(keras, backend)


class Net(torch.nn.Module):
    """With dropout, a buffer that every call changes in place before its use, and a counter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)
        self.dropout = torch.nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.scale.mul_(0.9)
        return self.second(self.dropout(torch.tanh(self.first(x)))) * self.scale


def test_a_module_is_trained_as_without_verification():
    trained = []
    for steps in (0, 2):
        torch.manual_seed(0)
        net = Net()
        compat.parallelize(net)
        if steps:
            record = verified_module(net, steps)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(7, 4)).square().mean().backward()
            optimizer.step()
        trained.append([p.detach().numpy() for p in net.parameters()])
        trained[-1] += [net.scale.numpy(), np.asarray(net.calls), torch.get_rng_state().numpy()]
    assert record.uncompared["train"] == {
        "steps": 2,
        "reason": "module 'dropout' draws random numbers",
        "remedy": "set the p of 'dropout' to 0",
        "instead": 2,
    }
    for first, second in zip(*trained):
        np.testing.assert_array_equal(first, second)


def test_an_interrupted_step_leaves_the_module_as_it_was():
    """Ctrl-C on several devices, within torch.no_grad(): an exit that is not made."""

    class Interrupted(Net):
        def forward(self, x):
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt

    net = Interrupted()
    compat.parallelize(net)
    verified_module(net, 1)
    before = [p.detach().clone() for p in net.parameters()]
    try:
        with pytest.raises(KeyboardInterrupt):
            net(torch.randn(7, 4))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters()))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_interrupted_anywhere_leaves_nothing_behind(steps):
    """Also where torch has taken what watches the batch off its stack of modes for a function."""
    rows, plain = torch.randn(7, 4), torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())
    ends = contextlib._GeneratorContextManager.__exit__.__code__

    def made():
        net = compat.parallelize(copy.deepcopy(plain))
        verified_module(net, steps)
        return net

    count = interrupted(functools.partial(made(), rows), lambda calls: False)
    points = [lambda calls, n=n: len(calls) == n for n in range(1, count, count // 6)]
    points += [
        lambda calls, n=n: calls[-1] is ends and calls.count(ends) == n for n in range(1, 40, 6)
    ]
    for point in points:
        net = made()
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(functools.partial(net, rows), point)
        assert torch.is_grad_enabled()
        pairs = zip(plain.parameters(), net.parameters())
        assert all(torch.equal(*pair) for pair in pairs)
        torch.testing.assert_close(net(rows), plain(rows))
        assert torch._C._len_torch_function_stack() == 0
        assert not any([splitting.unsplit, work.uncounted, verification.suspended])


# What calls leave outside -------------------------------------------------------------------------


class Keeping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.rows = torch.nn.Linear(4, 3), [], 0

    def forward(self, x):
        self.last = y = self.layer(x)
        self.seen.append(y.detach())
        self.rows += len(x)
        return y * 2


def test_verified_calls_leave_outside_what_others_do():
    model = compat.parallelize(Keeping())
    record = verified_module(model, 2)
    for _ in range(3):
        model(torch.ones(7, 4)).sum().backward()
    assert record.steps["train"] == 2
    assert model.rows == 21 and [len(each) for each in model.seen] == [7, 7, 7]
    assert model.last.shape == (7, 3)


def test_what_is_kept_is_compared(monkeypatch):
    """A shard in place of the whole batch."""
    finish = side_effects.CallEffects.finish

    def wrong(effects, merged):
        merged = {
            k: v * 1.1
            if k[0] == "effect" and v is not merged["result", 0] and hasattr(v, "dim")
            else v
            for k, v in merged.items()
        }
        return finish(effects, merged)

    monkeypatch.setattr(side_effects.CallEffects, "finish", wrong)
    model = compat.parallelize(Keeping())
    verified_module(model, 1)
    with warnings.catch_warnings(), pytest.raises(compat.ResultsDifferError) as caught:
        warnings.simplefilter("error", compat.CompatWarning)  # unsplit, nothing would be wrong
        model(torch.ones(7, 4))
    assert "is output kept as attribute 'last' of Keeping" in str(caught.value)
    assert model.seen == [] and model.rows == 0 and not hasattr(model, "last")
