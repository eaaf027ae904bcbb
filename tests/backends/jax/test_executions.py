"""Keras 3 on JAX: whether all devices were used, as JAX itself reports it."""

import jax
import numpy as np
import pytest

import compat
from compat._backends.jax import backend, executions, programs
from compat._backends.jax.replicas import ReplicatedCall, variables_of
from compat.testing import DEVICES, initialise, keras_under_test, span

from .. import hooks
from ..messages import told
from . import test_contract

ROWS = np.random.RandomState(0).normal(size=(11, 8)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def dense(keras, kind=None, **options):
    layers = keras.layers
    parts = [layers.Input((8,)), layers.Dense(5, activation="tanh"), layers.Dense(4)]
    model = initialise((kind or keras.Sequential)(parts))
    model.compile("sgd", "mse", **options)
    return model


def loops(model, rows):
    model.fit(ROWS[:rows], TARGETS[:rows], batch_size=6, epochs=2, verbose=0)
    model.evaluate(ROWS[:rows], TARGETS[:rows], batch_size=6, verbose=0)
    model.predict(ROWS[:rows], batch_size=6, verbose=0)


def batches(model, rows):
    model.train_on_batch(ROWS[:rows], TARGETS[:rows])
    model.test_on_batch(ROWS[:rows], TARGETS[:rows])
    model.predict_on_batch(ROWS[:rows])


def executed(model, run):
    with backend.executed(model) as found:
        run()
    return found


@span
@pytest.mark.parametrize("rows", [11, 6])
def test_a_step_is_executed_on_all_devices(keras, rows):
    """Of batches that divide, and of others."""
    model = compat.parallelize(dense(keras))
    for run in (
        lambda: model.train_on_batch(ROWS[:rows], TARGETS[:rows]),
        lambda: model.test_on_batch(ROWS[:rows], TARGETS[:rows]),
        lambda: model.predict_on_batch(ROWS[:rows]),
    ):
        found = executed(model, run)
        assert found.is_known and list(found) == ["cpu:0", "cpu:1", "cpu:2"]
        assert len(set(found.values())) == 1 and found["cpu:0"] > 3
        assert not executed(model, lambda: None).is_known  # nothing ran


def test_a_program_that_does_the_same_on_each_device_is_one_devices(keras):
    """All devices run it, since the weights are on all, and none has rows of its own."""
    model = compat.parallelize(dense(keras))
    call = ReplicatedCall.of(model)
    with programs.compiled() as compiled, executions.executed(
        call.names, lambda: variables_of(model)
    ) as found:
        call.place(model)

        @jax.jit
        def train_step(weights, rows):
            return [weight + (rows @ weights[0]).sum() for weight in weights]

        train_step([weight.value for weight in model.weights], ROWS)
    (devices,) = [each for program, each in compiled if program.name == "jit_train_step"]
    assert len(devices) == DEVICES
    assert found["cpu:0"] > 0 and not found["cpu:1"] and not found["cpu:2"]


@pytest.mark.parametrize("rows, used", [(6, 3), (1, 3)])
def test_eager_steps_are_known_by_the_arrays_that_they_compute(keras, rows, used):
    model = compat.parallelize(dense(keras, run_eagerly=True))
    model.train_on_batch(ROWS[:rows], TARGETS[:rows])
    found = executed(model, lambda: model.train_on_batch(ROWS[:rows], TARGETS[:rows]))
    assert found.is_known and sum(map(bool, found.values())) == used


def test_eager_batches_that_do_not_divide_run_unsplit(keras):
    model = compat.parallelize(dense(keras))
    with told() as texts:
        model(ROWS[:1])  # nothing to split
        model(ROWS[:6])
    assert not texts
    with told() as texts:
        model(ROWS)
        model(ROWS)
    assert texts == [
        f"Model {model.name!r} runs eagerly, where a batch is split only if its size is a multiple "
        "of the number of devices. The model runs unsplit on every device."
    ]


def test_steps_after_the_first_are_not_looked_at(keras, monkeypatch):
    looks = []
    by_device = executions.executed

    def looked_at(*given):
        looks.append(given)
        return by_device(*given)

    monkeypatch.setattr(executions, "executed", looked_at)
    model = compat.parallelize(dense(keras))
    for _ in range(3):
        batches(model, 11)
    assert len(looks) == 3
    model.compile("sgd", "mse")
    batches(model, 11)
    assert len(looks) == 6


class CallsLayers:
    def outputs(self, variables, rows):
        for layer in self.layers:
            own = [variables.pop(0) for _ in layer.trainable_variables]
            rows, _ = layer.stateless_call(own, [], rows)
        return rows


class Steps(CallsLayers):
    """Steps that call a model's layers."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state

        def loss(weights):
            return ((self.outputs(list(weights), data[0]) - data[1]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, others, slots, metrics)

    def test_step(self, state, data):
        return {"loss": ((self.outputs(list(state[0]), data[0]) - data[1]) ** 2).mean()}, state

    def predict_step(self, state, data):
        return self.outputs(list(state[0]), data[0]), state[1]


class Loss(CallsLayers):
    """A loss that calls them, under Keras' steps."""

    def compute_loss_and_updates(self, trainable, others, metrics, x, y, *_, **options):
        outputs = self.outputs(list(trainable), x)
        loss = ((outputs - y) ** 2).mean()
        return loss, (loss, outputs, others, metrics)


# Each two of the three in one case at least.
@pytest.mark.parametrize(
    "run, steps, eagerly",
    [
        (loops, None, False),
        (batches, None, True),
        (loops, Steps, True),
        (batches, Steps, False),
        (loops, Loss, False),
        (batches, Loss, True),
    ],
)
def test_hooks_are_missed(keras, run, steps, eagerly):
    """In loops of Keras and by batches, with steps of Keras and of the model's own."""
    redundant = ["model.call"] if steps is Steps else []
    kind = steps and type("Model", (steps, keras.Sequential), {})

    def program():
        model = dense(keras, kind, run_eagerly=eagerly)
        run(compat.parallelize(model), 6 if eagerly else 11)

    with told() as texts:
        program()  # what is replaced once for the process stays
    assert not texts
    exempt = dict(
        test_contract.TestJAX.exempt_hooks, **dict.fromkeys(redundant, "these steps do not call it")
    )
    found = hooks.left_out_one_by_one(program, exempt)
    print("\n".join(f"{name}: {text}" for name, text in found.items()))
    assert len(found) > 1 and not [name for name, text in found.items() if text is None]
