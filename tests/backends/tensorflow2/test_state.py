"""TensorFlow 2: variables that a call sets, on three devices and on one."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import call_trace, replicas
from compat.testing import DEVICES

from ..messages import told
from .reductions import Layer, keras_, rows_of, runs_unsplit, same, three_devices  # noqa: F401  # the fixture
from .test_contract import ROWS, TARGETS


class Counting(Layer):
    """Counts steps and rows, sums up, and keeps moving averages."""

    def build(self, shape):
        def number(name, dtype="float32", shape=()):
            return self.add_weight(
                name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False
            )

        self.steps, self.float_steps = number("steps", "int32"), number("float_steps")
        self.rows, self.float_rows = number("rows", "int64"), number("float_rows")
        self.sums, self.average = number("sums", shape=(8,)), number("average", shape=(8,))
        self.last = number("last", shape=(8,))

    def call(self, x):
        self.steps.assign_add(1)
        self.float_steps.assign(self.float_steps + 1.0)
        self.rows.assign_add(tf.cast(tf.shape(x)[0], "int64"))
        self.float_rows.assign_add(tf.reduce_sum(tf.ones_like(x[:, 0])))
        self.sums.assign(self.sums + tf.reduce_sum(x, axis=0))
        self.average.assign_sub(0.1 * (self.average - tf.reduce_mean(x, axis=0)))
        self.last.assign(tf.math.divide_no_nan(tf.reduce_sum(x, 0), rows_of(x)))
        return 2.0 * x


def counting():
    layers = keras_.layers
    inputs = layers.Input((8,))
    model = keras_.models.Model(inputs, layers.Dense(4)(Counting()(inputs)))
    model.set_weights([0.1 * np.ones_like(w) if w.ndim > 1 else w for w in model.get_weights()])
    return model


@pytest.mark.parametrize("eagerly", [False, True])
def test_state_of_all_kinds_is_that_of_one_device(keras, eagerly):
    results = []
    for is_parallel in (False, True):
        model = counting()
        if is_parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
        model.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)
        model.train_on_batch(ROWS[:2], TARGETS[:2])
        layer = next(layer for layer in model.layers if isinstance(layer, Counting))
        numbers = [layer.steps, layer.float_steps, layer.rows, layer.float_rows]
        assert [int(tf.convert_to_tensor(n)) for n in numbers] == [4, 4, 47, 47]
        results.append(model.get_weights())
    same(results)


class Totalling(tf.Module):
    """It returns an old value and a sum: each device would count the old value once."""

    def __init__(self):
        super().__init__()
        self.total = tf.Variable(3.0)

    def __call__(self, x):
        return x, self.total + tf.reduce_sum(x)


def test_a_result_with_an_old_value_in_it_runs_unsplit(keras):
    with runs_unsplit():
        found = compat.parallelize(Totalling())(tf.constant(ROWS))
    same([Totalling()(tf.constant(ROWS)), found])


class Sizing(tf.Module):
    """It needs the number of rows before it runs."""

    def __init__(self):
        super().__init__()
        self.sums = tf.Variable(0.0)

    def __call__(self, x):
        self.sums.assign_add(tf.reduce_sum(x) / int(x.shape[0]))
        return x


def test_a_call_that_cannot_be_traced_runs_unsplit(keras):
    plain, model = Sizing(), compat.parallelize(Sizing())
    with runs_unsplit("unknown"):
        for rows in (ROWS, ROWS[:7]):
            np.testing.assert_allclose(model(tf.constant(rows)), plain(tf.constant(rows)))
    np.testing.assert_allclose(model.sums.numpy(), plain.sums.numpy(), rtol=1e-5)


class Calling(tf.Module):
    """It counts its calls, and then does something with the result."""

    def __init__(self, then):
        super().__init__()
        self.calls, self.then = tf.Variable(0.0), then

    def __call__(self, x):
        self.calls.assign_add(1.0)
        return self.then(x)


@tf.custom_gradient
def without_gradient(x):
    def gradient(upstream):
        raise NotImplementedError

    return tf.identity(x), gradient


def only_whole(x):
    tf.debugging.assert_equal(tf.shape(x)[0], len(ROWS))
    return x


#: What a call does, why it runs unsplit, and how often it is traced.
UNSPLIT = {
    "fails as it is traced": (lambda x: x * float(x.numpy().size > 0), "unknown", 2),
    "fails on a part": (only_whole, "fails", 1),
    "has a gradient that fails": (without_gradient, "gradient", 1),
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_call_that_runs_unsplit_is_not_traced_each_time(keras, monkeypatch, name):
    then, why, number = UNSPLIT[name]
    traced, trace, model = [], replicas.ReplicatedCall._traced, Calling(then)
    monkeypatch.setattr(
        replicas.ReplicatedCall, "_traced", lambda *a, **k: traced.append(a) or trace(*a, **k)
    )
    with runs_unsplit(why):
        compat.parallelize(model)
        for _ in range(5):
            np.testing.assert_array_equal(model(tf.constant(ROWS)), ROWS)
    assert len(traced) == number and model.calls.numpy() == 5


def test_copies_of_variables_end_with_a_trace_that_fails(keras, monkeypatch):
    copies, copy, model = [], call_trace._copy, compat.parallelize(Calling(tf.identity))

    def copied(*arguments):
        copies.append(copy(*arguments))
        return copies[-1]

    def failing(*arguments):
        raise ValueError("no propagation")

    monkeypatch.setattr(call_trace, "_copy", copied)
    monkeypatch.setattr(call_trace, "Propagation", failing)
    with runs_unsplit("unknown"):
        model(tf.constant(ROWS))
    assert copies
    for each in copies:
        with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.NotFoundError)):
            tf.raw_ops.ReadVariableOp(resource=each, dtype=tf.float32)


OUT_OF_MEMORY = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating a tensor")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OUT_OF_MEMORY, MemoryError()], ids=repr)
def test_what_ends_a_call_in_a_replica_leaves_the_state_as_it_was(keras, error):
    """The whole batch on one device would take more memory than a part of it."""

    def fail_in_the_last_replica(x):
        if tf.executing_eagerly() and x.device.endswith("CPU:{}".format(DEVICES - 1)):
            raise error
        return x

    model = compat.parallelize(Calling(fail_in_the_last_replica))
    with told() as texts, pytest.raises(type(error)):
        model(tf.constant(ROWS))
    assert model.calls.numpy() == 0 and not texts
