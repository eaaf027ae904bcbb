"""torch: values of the whole batch, reduced over replicas while they run."""

import _thread
import contextlib
import contextvars
import copy
import os
import threading
import time
import warnings
from unittest import mock

import pytest
import torch

import compat
from compat._rows import replica_threads

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import agree, computing, pair, replicas, rows, same_gradients
from .test_verification import interrupted as interrupted_at

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


@pytest.mark.parametrize("count", [61, 14, 2])
def test_a_mean_of_the_batch_is_reduced(count):
    agree(computing(lambda m, y: y - y.mean(0)), rows(count, 4))


F = torch.nn.functional


def sinkhorn(m, y):
    p = y.exp()
    for _ in range(3):
        p = p / p.sum(0, keepdim=True)
        p = p / p.sum(1, keepdim=True)
    return p


def deviation(m, y):
    """Return rows and their minibatch deviation, as in StyleGAN."""
    spread = y.sub(y.mean(0)).square().mean(0).add(1e-8).sqrt().mean()
    return torch.cat([y, spread.expand(y.shape[0], 1)], 1)


def decorrelated(m, y):
    centred = y - y.mean(0)
    return y, (centred.T @ centred / y.shape[0]).square().sum()


def standardized(m, y):
    return (y - y.mean(0)) / (y.std(0) + 1e-5)


def weighted(m, y):
    weights = y[:, :1].softmax(0)
    return y, (weights * y).sum(0)


def attributes(m, y):
    m.seen = y.detach().sum(0)
    m.mean = y.mean(0)
    m.calls = getattr(m, "calls", 0) + 1
    return y - m.mean * m.calls


SPLIT = {
    "centred": lambda m, y: y - y.mean(0),
    "centred by a sum": lambda m, y: y * y.sum(0).tanh(),
    "scaled by the largest": lambda m, y: y / y.abs().amax(0),
    "between extremes": lambda m, y: (y - y.min(0).values) / (y.max(0)[0] - y.min(0).values + 1),
    "softmax": lambda m, y: y.softmax(0),
    "softmax by name": lambda m, y: F.softmax(input=y, dim=0),
    "log_softmax": lambda m, y: F.log_softmax(y, 0) * y,
    "logsumexp": lambda m, y: y - y.logsumexp(0, keepdim=True),
    "logsumexp of all": lambda m, y: y - y.logsumexp((0, 1)),
    "var": lambda m, y: y * torch.var(y, 0, unbiased=False),
    "std of all": lambda m, y: y * y.std(),
    "std_mean": lambda m, y: (y - torch.std_mean(y, 0)[1]) * torch.std_mean(y, 0, correction=0)[0],
    "item": lambda m, y: (y, y.std().item()),
    "sinkhorn": sinkhorn,
    "deviation": deviation,
    "decorrelated": decorrelated,
    "standardized": standardized,
    "weighted": weighted,
    "attributes": attributes,
    "unit": lambda m, y: y / y.square().sum().sqrt(),
    "prototypes": lambda m, y: y @ (y.detach().T @ y) / 100,
    "in place": lambda m, y: y.clone().sub_(y.mean(0)),
    "by the number of rows": lambda m, y: y / y.shape[0] + y.shape[0],
    "a mean by hand": lambda m, y: y - y.sum(0) / y.shape[0],
    "branch": lambda m, y: y * 2 if y.mean() > 0.1 else y * 3,
    "branch on a sum": lambda m, y: y - y.mean(0) if float(y.detach().sum()) > 2 else y.sigmoid(),
    "dropout": lambda m, y: F.dropout(y, 0.0) - y.mean(0),
}


@pytest.mark.parametrize("name", list(SPLIT))
def test_whole_values_are_reduced(name):
    for count in (13, 2):
        agree(computing(SPLIT[name]), rows(count, 4))


class Queue(torch.nn.Module):
    """Compares each row with the batch and with those of earlier batches."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("held", torch.ones(16, 3) * 0.1)

    def forward(self, x):
        y = self.layer(x)
        scores = y @ torch.cat([y, self.held], dim=0).T
        self.held = torch.cat(tensors=[y.detach(), self.held])[:16]
        return scores.logsumexp(1)


def test_a_queue_takes_in_the_rows_of_all_devices_in_order():
    """Rows that are joined to a buffer are gathered, and go on with it on each device."""
    torch.manual_seed(0)
    model = Queue().double()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        compat.parallelize(model)
        for count in (13, 2, 20, 1, 13):
            x, found = rows(count, 4), []
            for each in (model, plain):
                each.zero_grad()
                results = each(x)
                results.square().mean().backward()
                found.append([results, each.held, each.layer.weight.grad])
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert replicas(lambda: model(rows(13, 4))) == 3


def test_a_mean_costs_one_reduction():
    """Also where it is used more than once."""
    module = compat.parallelize(computing(lambda m, y: (y - y.mean(0)) * y.mean(0)).double())
    again = compat.parallelize(computing(lambda m, y: centred_twice(y, y.mean(0))).double())
    for model, expected in ((module, 2), (again, 1)):
        for _ in range(2):
            model(rows(13, 4))
        with mock.patch.object(replica_threads.ReplicaTurn, "meet", autospec=True) as meet:
            meet.side_effect = lambda turn, key, value, merge: value
            model(rows(13, 4))
        assert meet.call_count == 3 * expected


def centred_twice(y, mean):
    return (y - mean) * mean


# Threads ---------------------------------------------------------------------------------------


#: What functions of these modules note, or do once: compat sees nothing of it.
NOTED, TODO = contextvars.ContextVar("noted"), contextvars.ContextVar("todo")


@pytest.fixture(autouse=True)
def noted():
    NOTED.set([]), TODO.set([])


class Net(torch.nn.Module):
    """A module whose function runs between two reductions."""

    def __init__(self, between=lambda module, y: None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = torch.nn.Linear(4, 5), torch.nn.SyncBatchNorm(5)
        self.between, self.seen, self.calls = between, [], 0.0

    def forward(self, x):
        self.calls += 1.0
        y = self.norm(self.layer(x))
        self.seen.append(x.shape[0])
        self.between(self, y)
        return y - y.mean(0)


def state(module):
    values = {k: v.clone() for k, v in module.state_dict().items()}
    return values, list(module.seen), module.calls, module.layer.weight, module.norm.running_mean


def same_state(before, after):
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert after[1:3] == before[1:3] and after[3] is before[3] and after[4] is before[4]


def fails_in_the_last_replica(module, y):
    if y.shape[0] == 5 and TODO.get():
        TODO.get().pop()()


class Failure(Exception):
    pass


def prepared(between):
    """Return a parallelized module after two calls, its state, and the number of threads."""
    module = compat.parallelize(Net(between))
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        for _ in range(2):
            module(rows(13, 4).float())
    return module, state(module), threading.active_count()


def test_a_failure_between_reductions_is_that_of_the_model():
    def between(module, y):
        if TODO.get():
            raise Failure("mine")

    module, before, count = prepared(between)
    TODO.get().append("fail")
    with pytest.raises(Failure, match="mine"):
        module(rows(13, 4).float())
    assert threading.active_count() == count
    assert module.layer.weight is before[3] and module.norm.running_mean is before[4]


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupt", [_thread.interrupt_main, interrupted])
def test_ctrl_c_between_reductions(interrupt):
    """In the caller's thread, which waits; or as if it were in a replica's."""
    module, before, count = prepared(fails_in_the_last_replica)
    TODO.get().append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(rows(13, 4).float())
        time.sleep(1)
    assert not TODO.get() and threading.active_count() == count
    same_state(before, state(module))
    assert torch.overrides._get_current_function_mode_stack() == []
    plain = Net()
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(rows(13, 4).float()), plain(rows(13, 4).float()))


def test_no_thread_is_left_over():
    module = compat.parallelize(torch.nn.SyncBatchNorm(2).double())
    x = rows(5, 2)
    count, memory = threading.active_count(), []
    for _ in range(1000):
        module(x)
        memory.append(threading.active_count())
    assert set(memory) == {count}


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_threads_have_the_callers_state():
    variable = contextvars.ContextVar("variable")

    def between(module, y):
        NOTED.get().append((
            threading.current_thread() is not threading.main_thread(), variable.get(),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"), torch.zeros(1).device,
            [type(m) for m in torch.overrides._get_current_function_mode_stack()][:2],
        ))  # fmt: skip

    variable.set("mine")
    module = compat.parallelize(Net(between))
    with torch.no_grad(), torch.autocast("cpu", torch.float16), Mode(), torch.device("cpu"):
        for _ in range(2):
            NOTED.set([])
            module(rows(13, 4).float())
    modes = [Mode, torch.utils._device.DeviceContext]
    assert (
        NOTED.get() == [(True, "mine", False, True, torch.float16, torch.device("cpu"), modes)] * 3
    )


def test_each_replica_has_its_own_attributes_between_reductions():
    def between(module, y):
        NOTED.get().append((y.shape[0], module.seen[-1], module.calls))

    module = compat.parallelize(Net(between))
    for _ in range(3):
        NOTED.set([])
        module(rows(13, 4).float())
    assert NOTED.get() == [(4, 4, 3.0), (4, 4, 3.0), (5, 5, 3.0)]
    assert module.calls == 3.0 and module.seen == [13] * 3


def test_dropout_draws_one_mask_for_each_replica():
    def forward(m, y):
        return F.dropout(y - y.mean(0), 0.5, m.training)

    module = compat.parallelize(computing(forward).double())
    for _ in range(3):
        result = module(rows(1, 4).expand(60, 4) + rows(60, 4) * 1e-3)
        kept = [part != 0 for part in result.chunk(3)]
        assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


def test_another_way_through_the_model_is_learned(monkeypatch):
    """Which the kind of call does not show."""

    def forward(m, y):
        way = os.environ["COMPAT_TEST_WAY"]
        y = y * 2 if way == "doubled" else y
        return y - (y.amax(0) if way == "largest" else y.mean(0))

    plain, parallel = pair(forward)
    for way in ("", "", "doubled", "doubled", "", "largest", "largest", ""):
        monkeypatch.setenv("COMPAT_TEST_WAY", way)
        torch.testing.assert_close(parallel(rows(13, 4)), plain(rows(13, 4)), rtol=0, atol=1e-12)


def test_a_call_interrupted_anywhere_leaves_nothing_behind():
    module, before, count = prepared(lambda module, y: None)
    calls = interrupted_at(lambda: module(rows(13, 4).float()), lambda calls: False)
    before = state(module)
    for place in range(1, calls, calls // 20):
        with contextlib.suppress(KeyboardInterrupt):
            interrupted_at(
                lambda: module(rows(13, 4).float()), lambda calls, n=place: len(calls) == n
            )
            before = state(module)
        assert threading.active_count() == count
        assert torch.is_grad_enabled() and torch._C._len_torch_function_stack() == 0
        same_state(before, state(module))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    plain, parallel = pair(standardized)
    with mode():
        for count in (13, 2, 13):
            x = rows(count, 4)
            torch.testing.assert_close(parallel(x), plain(x), rtol=0, atol=1e-12)


def test_gradients_of_gradients():
    plain, parallel = pair(lambda m, y: F.batch_norm(y.sigmoid(), None, None, training=True))
    compat.parallelize(parallel, sync_batch_norm=True)
    for _ in range(2):
        for model in (plain, parallel):
            x = rows(13, 4).requires_grad_()
            model.zero_grad()
            result = model(x)
            (gradient,) = torch.autograd.grad((result**3).sum(), x, create_graph=True)
            (gradient.square().sum() + result.square().sum()).backward()
        same_gradients(plain, parallel, 1e-9)


def test_modules_within_that_are_parallelized_or_compiled():
    inner = compat.parallelize(computing(lambda m, y: y - y.mean(0)))
    compiled = torch.compile(torch.nn.Linear(5, 5), backend="eager")
    module = torch.nn.Sequential(inner, compiled, torch.nn.SyncBatchNorm(5))
    agree(module, rows(13, 4))
