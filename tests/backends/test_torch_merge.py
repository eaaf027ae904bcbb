"""torch: losses, state and results that are not rows, from three devices as from one."""

import collections
import copy

import pytest

import compat
from compat.testing import DEVICES

from .test_torch import devices  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 13


def agree(module, *args, steps=2, atol=1e-12, **kwargs):
    """Run ``module`` plain and on three devices: results, gradients and buffers are the same."""
    import torch

    module = module.double()
    plain, parallel = copy.deepcopy(module), compat.parallelize(module)
    for step in range(steps):
        torch.manual_seed(step)
        expected = plain(*args, **kwargs)
        torch.manual_seed(step)
        found = parallel(*args, **kwargs)
        same(expected, found, atol)
        for each, result in ((plain, expected), (parallel, found)):
            backward(each, result)
        for (name, one), other in zip(plain.named_parameters(), parallel.parameters()):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=atol, msg=name)
        for (name, one), other in zip(plain.named_buffers(), parallel.buffers()):
            torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=name)
    assert replicas(lambda: parallel(*args, **kwargs)) == DEVICES
    return parallel, found


def replicas(step):
    """How many devices compute in ``step()``."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.no_grad():
            step()
    return len({e.name for e in profile.events() if e.name.startswith("replica on ")})


def same(expected, found, atol):
    import torch

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


def backward(module, result):
    import torch

    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    tensors = [t for t in tensors if t.requires_grad]
    if tensors:
        module.zero_grad()
        sum((tensor * tensor).sum() for tensor in tensors).backward()


def computing(function, **buffers):
    """A module with a layer of 5 features from 4, and a function of its own."""
    import torch

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


def rows(*shape):
    import torch

    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


def targets(ignored=()):
    import torch

    labels = torch.arange(ROWS) % 5
    labels[list(ignored)] = -100
    return labels


# Losses ---------------------------------------------------------------------------------------


def losses():
    import torch

    F = torch.nn.functional
    weight = torch.linspace(0.1, 2.0, 5, dtype=torch.float64)
    return {
        "mean": lambda m, y, t: F.cross_entropy(y, t),
        "ignored": lambda m, y, t: F.cross_entropy(y, t, ignore_index=1),
        "class weights": lambda m, y, t: (F.cross_entropy(y, t, weight=weight), y),
        "nll": lambda m, y, t: F.nll_loss(F.log_softmax(y, 1), t, weight, ignore_index=2),
        "smoothed": lambda m, y, t: F.cross_entropy(y, t, label_smoothing=0.1, ignore_index=3),
        "sum": lambda m, y, t: F.cross_entropy(y, t, reduction="sum"),
        "squares": lambda m, y, t: (F.mse_loss(y, y * 0), F.mse_loss(y, y * 0, reduction="sum")),
        "divergence": lambda m, y, t: F.kl_div(
            F.log_softmax(y, 1), F.softmax(y * 2, 1), reduction="batchmean"
        ),
        "bce": lambda m, y, t: F.binary_cross_entropy_with_logits(y, y.detach().sigmoid()),
        "total": lambda m, y, t: y.sum(),
        "by rows": lambda m, y, t: y.pow(2).sum() / y.shape[0],
        "by rows and not": lambda m, y, t: y.pow(2).sum() / len(y) + 0.1 * y.sum(),
        "inverse": lambda m, y, t: y.pow(2).sum() * (1.0 / len(y)),
        "by elements": lambda m, y, t: y.pow(2).sum() / y.numel(),
        "by a mask": lambda m, y, t: (y.sum(1) * (t > 1)).sum() / (t > 1).sum().clamp(min=1),
        "selected": lambda m, y, t: y[t > 1].pow(2).mean(),
        "combined": lambda m, y, t: 0.5 * y.mean() + 2 * y.sum() + m.layer.weight.norm(),
        "in place": lambda m, y, t: torch.zeros((), dtype=y.dtype).add_(y.sum()).mul_(2),
        "not linear": lambda m, y, t: y.mean().exp() * y.pow(2).mean().sqrt() + y.norm(),
        "vectors": lambda m, y, t: (y.mean(0), y.sum(0, keepdim=True), y.amax(0), y.max()),
        "covariance": lambda m, y, t: (y.T @ y / len(y)).pow(2).sum(),
        "dot": lambda m, y, t: torch.einsum("bi,bi->", y, y),
        "of weights": lambda m, y, t: m.layer.weight.pow(2).sum(),
        "sequences": lambda m, y, t: F.cross_entropy(
            y[:, None].expand(-1, 3, -1).reshape(-1, 5), t[:, None].expand(-1, 3).reshape(-1)
        ),
        "numbers": lambda m, y, t: {"y": y, "n": len(y), "one": 1.5, "name": "x"},
    }


@pytest.mark.parametrize("name", [
    "mean", "ignored", "class weights", "nll", "smoothed", "sum", "squares", "divergence", "bce",
    "total", "by rows", "by rows and not", "inverse", "by elements", "by a mask", "selected",
    "combined", "in place", "not linear", "vectors", "covariance", "dot", "of weights",
    "sequences", "numbers",
])  # fmt: skip
@pytest.mark.parametrize("count", [ROWS, 12, 2])
def test_losses_that_forward_returns(name, count):
    agree(computing(losses()[name]), rows(ROWS, 4)[:count], targets()[:count])


def test_targets_that_are_ignored_on_a_whole_device():
    import torch

    module = computing(lambda m, y, t: torch.nn.functional.cross_entropy(y, t))
    agree(module, rows(ROWS, 4), targets(ignored=[0, 1, 2, 3, 6, 9]))


def test_item():
    """Of a loss that a few rows alone do not tell how to put together."""
    import torch

    def forward(m, y, t):
        return y, y.sum().item(), torch.nn.functional.cross_entropy(y, t).item(), len(y) * 2.0

    agree(computing(forward), rows(ROWS, 4), targets(ignored=[5, 6, 7]))


def test_losses_beside_dropout_and_batch_normalization():
    """Their numbers differ between devices, and do not hide how a loss was made."""
    import torch

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
            )

        def forward(self, x):
            y = self.layers(x)
            return y, y.sum(), y.sum() / len(y), y.mean()

    module = compat.parallelize(Mine().double())
    for _ in range(3):
        y, total, by_rows, mean = module(rows(ROWS, 4))
        torch.testing.assert_close(total, y.sum())
        torch.testing.assert_close(by_rows, y.sum() / ROWS)
        torch.testing.assert_close(mean, y.mean())
    assert module.layers[1].num_batches_tracked == 3


def refusal(what, why):
    return (
        "{} cannot be put together from the parts of a batch that several devices compute: {}. "
        "Compute it outside of the model that is parallelized, from values for each row (or the "
        "logits) that the model returns, or run the model on one device: parallelize(model, "
        "gpus=1).".format(what, why)
    )


def several_rows(function):
    return "Result 0 of Mine", function + "() computes it from several rows"


def turns(y):
    """Whether the first row, of which each replica has another one, is above the middle."""
    return y[0].sum() > 0.5


REFUSED = {
    "std": (lambda m, y: y.std(), several_rows("std")),
    "argmax": (lambda m, y: y.max(0)[1], several_rows("argmax")),
    "item": (lambda m, y: (y, y.std().item()), ("Result 1 of Mine", "it is a number")),
    "similarity": (
        lambda m, y: (y @ y.T).softmax(1).diagonal().log().mean(), several_rows("matmul"),
    ),
    "centred": (lambda m, y: y - y.mean(0), several_rows("sub")),
    "first row": (lambda m, y: y - y[0], several_rows("__getitem__")),
    "order": (lambda m, y: y.softmax(0), several_rows("softmax")),
    "squared": (
        lambda m, y: y.sum() / len(y) ** 2,
        (
            "Result 0 of Mine",
            "it depends on a number that is 4 for two rows, 1 for another one and 9 for the three "
            "together",
        ),
    ),
    "other totals": (
        lambda m, y: y.mean() if turns(y) else y.sum(),
        ("Result 0 of Mine", "the replicas took different paths through the model"),
    ),
    "other functions": (
        lambda m, y: y.mean().exp() if turns(y) else y.mean().sqrt(),
        ("Result 0 of Mine", "the replicas took different paths through the model"),
    ),
    "more results": (
        lambda m, y: (y,) if turns(y) else (y, y),
        ("The result of Mine", "the replicas took different paths through the model"),
    ),
    "in place": (
        lambda m, y: _changed_afterwards(y),
        ("Result 0 of Mine", "a tensor it was computed from was changed in place"),
    ),
}  # fmt: skip


def _changed_afterwards(y):
    import torch

    factor = torch.ones((), dtype=y.dtype)
    total = y.sum().exp() * factor
    factor.mul_(2)
    return total


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_takes_the_whole_batch_is_refused(name):
    function, why = REFUSED[name]
    module = compat.parallelize(computing(function).double())
    with pytest.raises(compat.UnsupportedError) as error:
        module(rows(ROWS, 4))
    assert str(error.value) == refusal(*why)


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


def _histogram(self, y):
    import torch

    self.counts.index_add_(0, y.argmax(1), torch.ones(len(y), dtype=y.dtype))
    return y


def _attributes(self, y):
    self.calls = getattr(self, "calls", 0) + 1
    self.rows_seen = getattr(self, "rows_seen", 0) + len(y)
    self.loss = y.pow(2).mean()
    self.features = y
    return y


class TestState:
    def test_counters_and_sums(self):
        module = computing(_counters, steps=0, calls=0.0, seen=0, total=0.0)
        agree(module, rows(ROWS, 4), steps=4)
        agree(computing(_counters, steps=0, calls=0.0, seen=0, total=0.0), rows(12, 4))

    def test_averages_of_the_users(self):
        agree(computing(_averages, mean=[0.0] * 5, power=[0.0] * 5), rows(ROWS, 4))

    def test_histogram(self):
        agree(computing(_histogram, counts=[0.0] * 5), rows(ROWS, 4))

    def test_attributes(self):
        module, _ = agree(computing(_attributes), rows(ROWS, 4), steps=3)
        found = module.calls, module.rows_seen, module.loss, module.features
        plain = computing(_attributes).double()
        for _ in range(4 + 0):
            plain(rows(ROWS, 4))
        same((plain.calls, plain.rows_seen, plain.loss, plain.features), found, 1e-12)

    def test_buffers_that_do_not_change(self):
        module = computing(lambda m, y: (y * m.scale)[:, m.order], scale=[2.0] * 5, order=[1, 0])
        agree(module, rows(ROWS, 4))

    @pytest.mark.parametrize("count", [ROWS, 12])
    def test_memory_of_rows_is_refused(self, count):
        def remember(self, y):
            self.memory = y.detach()
            return y

        module = compat.parallelize(computing(remember, memory=[0.0]).double())
        with pytest.raises(compat.UnsupportedError) as error:
            module(rows(count, 4))
        assert str(error.value) == refusal(
            "The state 'memory' of Mine", "it keeps values for each row"
        )


# Containers -----------------------------------------------------------------------------------


class Output(dict):
    """Like a ModelOutput: a dict of its own class."""


Pair = collections.namedtuple("Pair", "x scale")


def test_containers():
    import dataclasses

    @dataclasses.dataclass
    class Result:
        y: object
        loss: object = None

    def forward(self, y, pair):
        return Result(y * pair.x, Output(total=y.sum(), pair=Pair(y, [y.mean()])))

    agree(computing(forward), rows(ROWS, 4), Pair(rows(ROWS, 5), None))
    agree(computing(lambda m, y, given: y * given["x"]), rows(ROWS, 4), Output(x=rows(ROWS, 5)))


# What is watched --------------------------------------------------------------------------------


def test_only_the_first_call_of_common_models_is_watched(monkeypatch):
    import torch

    from compat._backends.torch import watch

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

    import torch

    plain = computing(forward, total=0.0).double()
    module = compat.parallelize(copy.deepcopy(plain))
    for kind in (0, 1, 0, 2, 3, 0, 1):
        with torch.no_grad():
            same(plain(rows(ROWS, 4), kind), module(rows(ROWS, 4), kind), 1e-12)
        same(plain.total, module.total, 1e-12)
