"""torch: calls of replicas, and first calls of many threads."""

import threading
import warnings

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch import profiler
from compat.testing import CASES, DEVICES, keras_under_test

from .test_contract import devices as three_devices
from .test_merging import computing, pair, replicas, rows, same

pytestmark = pytest.mark.usefixtures("devices")
devices = three_devices
ROWS = 7


@pytest.fixture
def keras(devices):
    return keras_under_test()


@pytest.mark.row("torch nn.Module")
def test_a_call_without_arguments_is_that_of_the_plain_module():
    class Constant(torch.nn.Module):
        def forward(self):
            return 3

    assert compat.parallelize(Constant())() == 3


@pytest.mark.row("torch nn.Module")
def test_a_model_that_fails_says_what_it_says_on_one_device():
    def forward(m, y):
        raise ValueError("not today")

    module = compat.parallelize(computing(forward).double())
    with pytest.raises(ValueError) as caught:
        module(rows(ROWS, 4))
    assert str(caught.value) == "not today"


@pytest.mark.row("torch nn.Module")
def test_replicas_without_rows_of_their_own_get_gradients():
    module, x = compat.parallelize(torch.nn.Linear(4, 5).double()), rows(2, 4)
    module(x)
    placed = profiler.products(lambda: module(x).sum().backward())
    assert len(placed) == DEVICES and len(set(placed.values())) == 1, placed


# Inference mode, in which torch does not count changes in place ----------------------------------


def counts(m, y):
    m.calls = getattr(m, "calls", 0) + 1
    m.number += 1
    m.sums += y.sum(0)
    return y * m.calls


def keeps(m, y):
    m.last = y + m.last if hasattr(m, "last") else y
    return m.last


def in_container(m, y, values):
    values["result"] = values["x"] * y
    return values


def in_place(m, y, other):
    other += 1
    return y * other


INFERENCE = {
    "rows": lambda m, y: y.relu(),
    "totals": lambda m, y: (y, y.sum(), y.mean(0) * 2, (y > 0).any()),
    "state": counts,
    "kept rows": keeps,
    "a container": in_container,
    "an argument in place": in_place,
}


@pytest.mark.row("torch nn.Module")
@pytest.mark.parametrize("name", list(INFERENCE))
def test_inference_mode(name):
    plain, module = pair(INFERENCE[name], number=0, sums=[0.0] * 5)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        for _ in range(3):
            others = [rows(ROWS, 5), rows(ROWS, 5)]
            if name == "a container":
                others = [{"x": other} for other in others]
            count = 1 if name in ("a container", "an argument in place") else 0
            expected = plain(rows(ROWS, 4), *others[:1][:count])
            same(expected, module(rows(ROWS, 4), *others[1:][:count]), 1e-12)
            same(*others, 1e-12)
    same(dict(plain.named_buffers()), dict(module.named_buffers()), 1e-12)
    if name == "rows":
        with torch.inference_mode():
            assert replicas(lambda: module(rows(ROWS, 4))) == DEVICES
        assert module(rows(ROWS, 4)).requires_grad


# First calls of eight threads ---------------------------------------------------------------------


def in_threads(call, count=8):
    """Return a function's results in threads that begin at once, by their numbers."""
    results, barrier = {}, threading.Barrier(count)

    def run(number):
        barrier.wait()
        try:
            results[number] = call(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(count)]


@pytest.mark.parametrize("mixes", [False, True])
def test_first_calls_of_eight_threads(keras, mixes):
    inputs = [CASES["dense"].data(11 + number)[0] for number in range(8)]
    models = {
        "keras": CASES["dense"].build(keras),
        "module": torch.nn.Sequential(
            torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
        ),
    }
    if mixes:
        models = {"module": Centred()}
    for model in models.values():
        call = (
            model if isinstance(model, torch.nn.Module) and not hasattr(model, "predict") else None
        )
        call = (lambda x, m=model: m(torch.as_tensor(x)).detach()) if call is not None else (
            lambda x, m=model: m.predict_on_batch(x)
        )  # fmt: skip
        expected = [call(each) for each in inputs]
        compat.parallelize(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = in_threads(lambda number, call=call: call(inputs[number]))
        for one, other in zip(expected, found):
            assert not isinstance(other, Exception), other
            np.testing.assert_allclose(one, other, atol=1e-5)


class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        return y - y.mean(0)


def test_counts_of_eight_threads():
    model = compat.parallelize(Counting())
    outputs = in_threads(lambda number: model(torch.ones(ROWS + number, 8)).detach())
    assert model.calls == 8 and model.rows == sum(range(ROWS, ROWS + 8))
    assert sorted(len(each) for each in outputs) == list(range(ROWS, ROWS + 8))


class Counting(Centred):
    rows = 0

    def forward(self, x):
        self.calls += 1
        self.rows += len(x)
        return self.layer(x)
