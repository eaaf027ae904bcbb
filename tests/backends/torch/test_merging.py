"""torch: losses, state and results that are not rows, from three devices as from one."""

import collections
import copy
import dataclasses
import gc
import os
import types
import warnings
from unittest import mock

import pytest
import torch

import compat
from compat._backends.torch import expressions
from compat.testing import DEVICES

from .test_contract import devices  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 13


def agree(module, *args, steps=2, atol=1e-12, whole=(), **kwargs):
    """Check that a module's results, gradients and buffers are the same on three devices.

    Arguments:
        module: a plain one.
        *args: those of its calls.
        steps: the number of calls.
        atol: the tolerance.
        **kwargs: keyword arguments of its calls.
        whole: the texts of warnings, where it runs unsplit.
    """
    module = module.double()
    plain, parallel = copy.deepcopy(module), compat.parallelize(module)
    told = []
    for step in range(steps):
        torch.manual_seed(step)
        expected = plain(*args, **kwargs)
        torch.manual_seed(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", compat.CompatWarning)
            found = parallel(*args, **kwargs)
        told += [str(w.message) for w in caught if isinstance(w.message, compat.CompatWarning)]
        same(expected, found, atol)
        for each, result in ((plain, expected), (parallel, found)):
            backward(each, result)
        same_gradients(plain, parallel, atol)
        for (name, one), other in zip(plain.named_buffers(), parallel.buffers()):
            torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=name)
    assert told == list(whole)
    assert replicas(lambda: parallel(*args, **kwargs)) == (0 if whole else DEVICES)
    return parallel, found


#: Why a model runs unsplit.
MIXED = "needs the whole batch, but each device sees only its shard."
UNKNOWN = (
    "may need the whole batch, but each device sees only its shard: compat has no rule for it, and "
    "cannot try it."
)
TRIED = (
    "gives different results for three samples at once than for two of them and the third, but "
    "each device sees only its shard."
)
FAILS = "fails on a shard of the batch, which is all that each device sees."
DIVERGED = "takes another code path on a shard of the batch, which is all that each device sees."


def whole(operation, function, why=MIXED, name="Mine"):
    """Return the warning about an operation in a function of a test, or in all of a module."""
    found = "Model {!r}".format(name)
    if operation is not None:
        code = function if isinstance(function, types.CodeType) else function.__code__
        line = "{}, line {}".format(os.path.basename(code.co_filename), code.co_firstlineno)
        found = "The operation {} ({}) of {!r}".format(operation, line, name)
    return ["{} {} The model runs unsplit on cpu:0.".format(found, why)]


def replicas(step):
    """How many devices compute in ``step()``."""
    record = torch.profiler.record_function
    with mock.patch.object(torch.profiler, "record_function", wraps=record) as recorded:
        step()
    names = {call[0][0] for call in recorded.call_args_list}
    return len([name for name in names if name.startswith("replica on ")])


def same(expected, found, atol):
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(expected, found, rtol=0, atol=atol, equal_nan=True)
    elif hasattr(expected, "__dict__") and not isinstance(expected, tuple):
        same(vars(expected), vars(found), atol)
    elif isinstance(expected, dict):
        assert list(expected) == list(found)
        same(list(expected.values()), list(found.values()), atol)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for one, other in zip(expected, found):
            same(one, other, atol)
    else:
        assert expected == pytest.approx(found, abs=atol)


def same_gradients(plain, parallel, atol=1e-12):
    for (name, one), other in zip(plain.named_parameters(), parallel.parameters()):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=atol, msg=name)


def backward(module, result):
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    tensors = [t for t in tensors if t.requires_grad]
    if tensors:
        module.zero_grad()
        sum((tensor * tensor).sum() for tensor in tensors).backward()


def computing(function, **buffers):
    """Return a module with a layer of 5 features from 4, and a custom function."""

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 5)
            for name, value in buffers.items():
                self.register_buffer(name, torch.tensor(value))

        def forward(self, x, *args, **kwargs):
            return function(self, self.layer(x), *args, **kwargs)

    return Mine()


def pair(function, **buffers):
    """Such a module on one device, and on three."""
    plain = computing(function, **buffers).double()
    return plain, compat.parallelize(copy.deepcopy(plain))


def rows(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


def targets(ignored=()):
    labels = torch.arange(ROWS) % 5
    labels[list(ignored)] = -100
    return labels


# Losses ---------------------------------------------------------------------------------------


F = torch.nn.functional
LOSSES = {
    "by rows": lambda m, y, t: y.pow(2).sum() / y.shape[0],
    "by a mask": lambda m, y, t: (y.sum(1) * (t > 1)).sum() / (t > 1).sum().clamp(min=1),
    "selected": lambda m, y, t: y[t > 1].pow(2).mean(),
    "combined": lambda m, y, t: 0.5 * y.mean() + 2 * y.sum() + m.layer.weight.norm(),
    "in place": lambda m, y, t: torch.zeros((), dtype=y.dtype).add_(y.sum()).mul_(2),
    "a total in place": lambda m, y, t: y.sum().mul_(2),
    "not linear": lambda m, y, t: y.mean().exp() * y.pow(2).mean().sqrt() + y.sum().tanh(),
    "vectors": lambda m, y, t: (y.mean(0), y.sum(0, keepdim=True), y.amax(0), y.max()),
    "sequences": lambda m, y, t: F.cross_entropy(
        y[:, None].expand(-1, 3, -1).reshape(-1, 5), t[:, None].expand(-1, 3).reshape(-1)
    ),
    "all rows": lambda m, y, t: y[: len(y)],
    "numbers": lambda m, y, t: {"y": y, "n": len(y), "one": 1.5, "name": "x"},
}


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("count", [ROWS, 2])
def test_losses_that_forward_returns(name, count):
    agree(computing(LOSSES[name]), rows(ROWS, 4)[:count], targets()[:count])


def test_targets_that_are_ignored_on_a_whole_device():
    module = computing(lambda m, y, t: F.cross_entropy(y, t))
    agree(module, rows(ROWS, 4), targets(ignored=[0, 1, 2, 3, 6, 9]))


def test_item():
    """Of a loss that a few rows alone do not tell how to put together."""

    def forward(m, y, t):
        return y, y.sum().item(), F.cross_entropy(y, t).item(), len(y) * 2.0

    agree(computing(forward), rows(ROWS, 4), targets(ignored=[5, 6, 7]))


def test_totals_are_freed_without_the_garbage_collector():
    """A tag that refers to its tensor would keep it, and autograd's graph, until that runs."""
    module = compat.parallelize(computing(lambda m, y: (y, y.pow(2).sum().sqrt() + y.mean())))
    gc.collect()
    gc.disable()
    try:
        module(torch.randn(ROWS, 4))
        assert [each for each in gc.get_objects() if isinstance(each, expressions.Total)] == []
    finally:
        gc.enable()


def test_losses_beside_dropout_and_batch_normalization():
    """Their numbers differ between devices, and do not hide how a loss was made."""

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
            )

        def forward(self, x):
            y = self.layers(x)
            return y, y.sum(), y.sum() / y.shape[0], y.mean()

    module = compat.parallelize(Mine().double())
    for _ in range(3):
        y, total, by_rows, mean = module(rows(ROWS, 4))
        torch.testing.assert_close(total, y.sum())
        torch.testing.assert_close(by_rows, y.sum() / ROWS)
        torch.testing.assert_close(mean, y.mean())
    assert module.layers[1].num_batches_tracked == 3


def turns(y):
    """Whether the first row, of which each replica has another one, is above the middle."""
    return y[0].sum() > 0.5


ZEROS = torch.zeros(2, 5, dtype=torch.float64)
WHOLE = {
    "item": (lambda m, y: (y, y.median().item()), "median", MIXED),
    "similarity": (lambda m, y: (y @ y.T).softmax(1).diagonal().log().mean(), "matmul", MIXED),
    "reversed": (lambda m, y: y - y.flip(0), "flip", MIXED),
    "first row": (lambda m, y: y - y[0], "__getitem__", MIXED),
    "by their number": (lambda m, y: y.sum() * (1.0 / len(y)), None, DIVERGED),
    "by a larger number": (lambda m, y: y.sum() / max(len(y), 2), None, DIVERGED),
    "norm": (lambda m, y: y.norm(), "norm", MIXED),
    "in place": (lambda m, y: _changed_afterwards(y), None, DIVERGED),
    "distances": (lambda m, y: torch.cdist(y, y + 1), "cdist", TRIED),
    "fft": (lambda m, y: torch.fft.fft(y, dim=0).real, "fft_fft", TRIED),
    "renorm": (lambda m, y: y.renorm(2, 1, 0.5), "renorm", TRIED),
    "by numpy": (lambda m, y: y - torch.from_numpy(y.detach().numpy().mean(0)), None, TRIED),
    "by number": (lambda m, y: y / len(y), None, TRIED),
    "by place": (lambda m, y: y + torch.arange(len(y))[:, None], "arange", TRIED),
    "sorted in": (lambda m, y: ZEROS.clone().index_add_(0, (y[:, 0] > 0).long(), y), "index_add_",
                  UNKNOWN),
}  # fmt: skip


def _changed_afterwards(y):
    factor = torch.ones((), dtype=y.dtype)
    total = y.detach().sum().exp() * factor
    factor.mul_(2)
    return total


@pytest.mark.parametrize(
    "name, count", [(name, ROWS) for name in sorted(WHOLE)] + [("reversed", 2), ("fft", 2)]
)
def test_what_takes_the_whole_batch_runs_unsplit(name, count):
    function, operation, why = WHOLE[name]
    agree(computing(function), rows(count, 4), whole=whole(operation, function, why))


# Containers -----------------------------------------------------------------------------------


class Output(dict):
    """Like a ModelOutput: a dict of its own class."""


Pair = collections.namedtuple("Pair", "x scale")


def test_containers():
    @dataclasses.dataclass
    class Result:
        y: object
        loss: object = None

    def forward(self, y, pair):
        return Result(y * pair.x, Output(total=y.sum(), pair=Pair(y, [y.mean()])))

    given = rows(ROWS, 4), Pair(rows(ROWS, 5), None)
    module, _ = agree(computing(forward), *given)
    calls = []
    module.register_forward_hook(lambda *_: calls.append("hook"))
    module(*given)
    assert calls == ["hook"]
    agree(computing(lambda m, y, given: y * given["x"]), rows(ROWS, 4), Output(x=rows(ROWS, 5)))
