"""torch: which devices executed operations is checked, whatever stands in place of ``forward``."""

import copy
import functools
import io
import pickle
import warnings

import numpy as np
import pytest
import torch

import compat
from compat._runtime import work
from compat._runtime.process import process
from compat._runtime.unsplit_models import UnsplitModels
from compat.testing import CASES, keras_under_test

from .. import hooks
from .test_contract import devices as three_devices
from .test_merging import rows

pytestmark = pytest.mark.usefixtures("devices", "forgotten")
devices = three_devices
ROWS = 11

NOT_REACHED = (
    "In the first {} of model 'Sequential' (forward()) no batch was split over cpu:0, cpu:1, "
    "cpu:2. {} Another library has replaced it, or this version of the framework takes another "
    "way: call parallelize() after such libraries have changed the model, and report it with the "
    "output of `python -m compat env` if there is none."
)
SOMETHING_ELSE = "Something else runs the model in place of what parallelize() set up."


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows(ROWS, 8).float()).pow(2).mean().backward()
        optimizer.step()


def told(action):
    """Return the warnings of compat during an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if each.category is compat.CompatWarning]


def modes():
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture
def forgotten(monkeypatch):
    """Keep the problems found here out of the reports of other tests."""
    for name, empty in (("unused", {}), ("idle_devices", set()), ("unsplit", UnsplitModels())):
        monkeypatch.setattr(process, name, empty)


@pytest.fixture
def keras(devices):
    return keras_under_test()


@pytest.fixture
def keras_model(keras):
    model = CASES["dense"].build(keras)
    compat.parallelize(model)
    model.compile("sgd", "mse")
    return model


# Modules ------------------------------------------------------------------------------------------


def test_a_hook_that_is_not_reached_is_never_silent():
    def program():
        model = compat.parallelize(network())
        train(model)
        with torch.no_grad():
            model.eval()(rows(ROWS, 8).float())

    found = hooks.left_out_one_by_one(program, {})
    assert found == {
        "model.forward": NOT_REACHED.format(
            "training step", "What parallelize() put in place of model.forward() was not called."
        )
    }


@pytest.mark.parametrize("steps", [0, 2])
def test_a_forward_that_is_replaced_afterwards_is_noticed(steps):
    """At once, and after steps that were right; each of these was split, without a word."""
    model = compat.parallelize(network())
    assert told(functools.partial(train, model, steps)) == []
    plain = type(model).forward
    model.forward = lambda x: plain(model, x)
    assert told(functools.partial(train, model, 2)) == [
        NOT_REACHED.format("training step", SOMETHING_ELSE)
    ]
    with torch.no_grad():
        model.eval()
        assert told(lambda: model(rows(ROWS, 8).float())) == [
            NOT_REACHED.format("prediction", SOMETHING_ELSE)
        ]
    assert "Sequential" in process.unused


def test_a_forward_that_calls_what_it_replaced_is_right():
    """As accelerate's hooks do."""
    model = compat.parallelize(network())
    split = model.forward
    model.forward = lambda x: split(x)
    assert told(functools.partial(train, model, 2)) == []


def test_strict_makes_it_an_error(monkeypatch):
    monkeypatch.setattr(process.configuration.settings, "strict", True)
    model = compat.parallelize(network())
    model.forward = functools.partial(type(model).forward, model)
    with pytest.raises(compat.DevicesNotUsedError, match="no batch was split"):
        train(model)


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_is_not_checked_and_leaves_nothing_on(raised):
    def fail(module, args):
        raise raised("by a hook")

    model = compat.parallelize(network())
    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(raised):
        train(model)
    handle.remove()
    assert told(functools.partial(train, model)) == []
    assert modes() == 0


def test_hooks_are_not_copied_saved_or_left_behind():
    model = compat.parallelize(network())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.forward = functools.partial(type(other).forward, other)
        assert told(functools.partial(train, other)) == []
    file = io.BytesIO()
    torch.save(model, file)
    assert b"compat" not in file.getvalue().replace(b"_compat", b"")
    compat.parallelize(model, gpus=1)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_modules_that_torch_compiles_are_checked():
    model = compat.parallelize(network())
    compiled = torch.compile(model, backend="eager")
    assert told(functools.partial(train, compiled, 2)) == []
    torch.compiler.reset()
    other = compat.parallelize(network())
    other.forward = torch.compile(functools.partial(type(other).forward, other), backend="eager")
    assert told(functools.partial(train, other, 2)) == [
        NOT_REACHED.format("training step", SOMETHING_ELSE)
    ]


# Keras --------------------------------------------------------------------------------------------


def own_steps(keras):
    """Return a model with a custom training step, which trains a model within it."""

    class Trained(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = CASES["dense"].build(keras)

        def call(self, x):
            return self.part(x)

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            loss = self.loss(keras.ops.convert_to_tensor(y), self.part(x, training=True))
            loss.backward()
            weights = self.part.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"loss": loss}

    return Trained()


def by_batches(model, x, y):
    model.train_on_batch(x, y)
    model.test_on_batch(x, y)
    model.predict_on_batch(x)


def by_fit(model, x, y):
    model.fit(x, y, batch_size=4, verbose=0, validation_data=(x, y))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)


@pytest.mark.parametrize("build", [CASES["dense"].build, own_steps])
@pytest.mark.parametrize("train", [by_batches, by_fit])
def test_keras_hooks_that_are_not_reached_are_never_silent(keras, build, train):
    data = CASES["dense"].data(ROWS)

    def program():
        model = build(keras)
        compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
        train(model, *data)

    found = hooks.left_out_one_by_one(program, {})
    assert len(found) >= 1 and None not in found.values(), found


@pytest.mark.parametrize("kind", ["module", "keras"])
def test_a_batch_that_has_rows_for_one_replica_is_no_fault(kind):
    """A replica needs two rows where batch normalization trains."""
    if kind == "keras":
        layers = keras_under_test().layers
        norm = layers.BatchNormalization()
        model = keras_under_test().Sequential([layers.Input((8,)), norm, layers.Dense(2)])
        model.compile("sgd", "mse")
        step = functools.partial(model.train_on_batch, np.ones((3, 8)), np.ones((3, 2)))
    else:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        step = functools.partial(lambda: model(rows(3, 8).float()).sum().backward())
    compat.parallelize(model)
    before = work.batches()
    assert told(step) == []
    key = ("cpu:0",), (3,), True
    counts = work.batches().get(key, 0) - before.get(key, 0)
    assert counts == (kind == "module")  # Keras normalizes a single row, too
