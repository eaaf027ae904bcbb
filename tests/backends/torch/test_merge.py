"""torch: losses, state and results that are not rows, from three devices as from one."""

import collections
import copy
import dataclasses
import os
import types
import warnings
from unittest import mock

import numpy
import pytest
import torch

import compat
from compat._backends.torch import timeline, watch
from compat.testing import DEVICES

from .test_contract import devices  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 13


def agree(module, *args, steps=2, atol=1e-12, whole=(), **kwargs):
    """Run ``module`` plain and on three devices: results, gradients and buffers are the same.

    Arguments:
        whole: the texts of warnings, where it runs with the whole batch on one device.
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


#: Why a model runs whole.
MIXED = "computes across the rows of a batch, of which each device has a part."
UNKNOWN = (
    "may compute across the rows of a batch, of which each device has a part: compat has no rule "
    "for it, and cannot try it."
)
TRIED = (
    "gives other numbers for three rows of a batch together than for two of them and the third, "
    "and each device has a part of the batch."
)
FAILS = "fails on a part of a batch, of which each device has one."
DIVERGED = "takes another path on a part of a batch, of which each device has one."


def whole(operation, function, why=MIXED, name="Mine"):
    """The warning about an operation in a function of a test's, or about all of a module."""
    found = "Model {!r}".format(name)
    if operation is not None:
        code = function if isinstance(function, types.CodeType) else function.__code__
        line = "{}, line {}".format(os.path.basename(code.co_filename), code.co_firstlineno)
        found = "The operation {} ({}) of {!r}".format(operation, line, name)
    return ["{} {} The model runs on cpu:0 with the whole batch.".format(found, why)]


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
    """A module with a layer of 5 features from 4, and a function of its own."""

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
    "item": (lambda m, y: (y, y.std().item()), "std", MIXED),
    "similarity": (lambda m, y: (y @ y.T).softmax(1).diagonal().log().mean(), "matmul", MIXED),
    "centred": (lambda m, y: y - y.mean(0), "sub", MIXED),
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


def test_a_call_without_arguments_is_that_of_the_plain_module():
    class Constant(torch.nn.Module):
        def forward(self):
            return 3

    assert compat.parallelize(Constant())() == 3


def _changed_afterwards(y):
    factor = torch.ones((), dtype=y.dtype)
    total = y.detach().sum().exp() * factor
    factor.mul_(2)
    return total


@pytest.mark.parametrize(
    "name, count", [(name, ROWS) for name in sorted(WHOLE)] + [("centred", 2), ("fft", 2)]
)
def test_what_takes_the_whole_batch_runs_whole(name, count):
    function, operation, why = WHOLE[name]
    agree(computing(function), rows(count, 4), whole=whole(operation, function, why))


PATHS = {
    "other totals": lambda m, y: y.mean() if turns(y) else y.sum(),
    "other functions": lambda m, y: y.mean().exp() if turns(y) else y.mean().sqrt(),
    "more results": lambda m, y: (y,) if turns(y) else (y, y),
}


@pytest.mark.parametrize("name", sorted(PATHS))
def test_what_chooses_its_path_by_the_rows_runs_whole(name):
    plain, module = pair(PATHS[name])
    with pytest.warns(compat.CompatWarning, match="The model runs on cpu:0 with the whole batch"):
        found = module(rows(ROWS, 4))
    torch.manual_seed(0)
    same(plain(rows(ROWS, 4)), found, 1e-12)


#: What depends on how many of the batch's values are like this.
NUMBERS = {
    "distinct": lambda y, seen: y * len(seen.round().unique()),
    "which": lambda y, seen: y + torch.unique(seen.round(), return_inverse=True)[1],
    "found": lambda y, seen: y * len((seen[:, 0] > 0.3).nonzero()),
    "rare": lambda y, seen: y * (1 + seen[seen > 1.2].numel()),
    "selected": lambda y, seen: y * (1 + seen.masked_select(seen > 1.2).shape[0]),
    "a mean by their number": lambda y, seen: y[seen > 1].sum() / max(1, len(y[seen > 1])),
    "for numpy": lambda y, seen: y * len(numpy.unique(seen.round().numpy())),
    "for Python": lambda y, seen: y * max(seen[:, 0].tolist()),
    "rows": lambda y, _: y - y.mean(0) if len(y) > 5 else y,
    "rows but one": lambda y, _: y - y.mean(0) if y.shape[0] - 1 > 5 else y,
    "elements": lambda y, _: y - y.mean(0) if y.numel() > 25 else y,
    "each row": lambda y, _: torch.stack([row * place for place, row in enumerate(y)]),
}


@pytest.mark.parametrize("name", list(NUMBERS))
def test_what_depends_on_a_number_of_values(name):
    """A few rows have the same number by chance, and a later batch another one."""
    plain, module = pair(lambda m, y: NUMBERS[name](y, y.detach()))
    for count in (ROWS, 3, 12, ROWS, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.CompatWarning)
            same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)


def test_a_number_of_rows_that_changes_nothing():
    """Each number of rows is tried once, and later calls are not traced."""
    plain, module = pair(lambda m, y: y.view(len(y), -1, 1) * 2)
    for count in (ROWS, 7, ROWS, 7):
        same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)
        (known,) = module.forward.__func__.made_by.known.values()
        assert not known.watch
    assert known.totals == {ROWS, 7}


def test_rows_that_mix_from_a_later_step_on():
    """By a counter, or by the number of rows; state is that of one device, too."""

    def by_steps(m, y):
        m.steps = getattr(m, "steps", 0) + 1
        return y - y.mean(0) if m.steps > 2 else y

    def by_rows(m, y):
        return y - y.mean(0) if y.shape[0] == 12 else y

    for function in (by_steps, by_rows):
        plain, module = pair(function)
        for step, count in enumerate((ROWS, 11, 12, ROWS)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)
            assert len(caught) == (step == 2)


def test_a_choice_that_makes_no_difference_is_taken():
    """As where masks are left out if they hide nothing, in some parts of the batch."""

    def forward(m, y, mask):
        return (
            y.relu()
            if bool(mask.all())
            else (y * mask[:, None]).relu() + (y * ~mask[:, None]).relu()
        )

    mask = torch.arange(ROWS) != 2
    agree(computing(forward), rows(ROWS, 4), mask)


@pytest.mark.parametrize("kind", [torch.nn.utils.parametrizations, torch.nn.utils])
def test_spectral_normalization(kind):
    """Its vectors are turned once in a step, as on one device. The older one is a hook."""
    torch.manual_seed(0)
    layers = kind.spectral_norm(torch.nn.Linear(4, 6)), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    agree(torch.nn.Sequential(*layers), rows(ROWS, 4), steps=4)


def test_a_model_that_fails_says_what_it_says_on_one_device():
    def forward(m, y):
        raise ValueError("not today")

    module = compat.parallelize(computing(forward).double())
    with pytest.raises(ValueError) as caught:
        module(rows(ROWS, 4))
    assert str(caught.value) == "not today"


# State ----------------------------------------------------------------------------------------


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
        monkeypatch.setattr(watch.Watch, "__torch_function__", None)  # fails where it is used
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(rows(12, 4))
        assert module.batch == 12

    def test_memory_of_rows_runs_whole(self):
        """All parts of 12 rows have as many, so that their mean would have a shape that fits."""

        def remember(self, y):
            self.memory = y.detach()
            return y

        told = [
            "The operation that sets the state 'memory' of 'Mine' {} The model runs on cpu:0 with "
            "the whole batch.".format(MIXED)
        ]
        agree(computing(remember, memory=[0.0]), rows(12, 4), whole=told)


@pytest.mark.parametrize("first", [lambda y: y.sum() / y.shape[0], lambda y: y.sum() / 2.0])
def test_another_way_to_a_loss_later(first):
    """A number of rows that replicas share is not that of the batch."""
    module, x = compat.parallelize(computing(lambda m, y: m.loss(y)).double()), rows(12, 4)
    module.loss = first
    module(x)
    module.loss = lambda y: y.sum() / len(y)
    with pytest.warns(compat.CompatWarning, match="takes another path on a part of a batch"):
        found = module(x)
    same(module.layer(x).sum() / 12, found, 1e-12)


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


def test_replicas_without_rows_of_their_own_get_gradients():
    module, x = compat.parallelize(torch.nn.Linear(4, 5).double()), rows(2, 4)
    module(x)
    placed = timeline.products(lambda: module(x).sum().backward())
    assert len(placed) == DEVICES and len(set(placed.values())) == 1, placed


# What is watched --------------------------------------------------------------------------------


def test_only_the_first_call_of_common_models_is_watched(monkeypatch):
    nn = torch.nn
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 2))
    loss = computing(lambda m, y: (y, nn.functional.mse_loss(y, y * 0), y.sum()))
    state = computing(lambda m, y: (m.steps.add_(1), y)[1], steps=0)
    modules = [compat.parallelize(module.double()) for module in (norm, loss, state)]
    for module in modules:
        module(rows(ROWS, 4))
    monkeypatch.setattr(watch.Watch, "__torch_function__", None)  # fails where it is used
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
