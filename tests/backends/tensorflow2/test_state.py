"""TensorFlow 2: variables that a call sets, on three devices and on one."""

import numpy as np
import pytest
import tensorflow as tf

import compat

from .reductions import Layer, keras_, rows_of, runs_whole, same, three_devices  # noqa: F401  # the fixture
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


def test_a_result_with_an_old_value_in_it_runs_whole(keras):
    with runs_whole():
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


def test_a_call_that_cannot_be_traced_runs_whole(keras):
    plain, model = Sizing(), compat.parallelize(Sizing())
    with runs_whole("unknown"):
        for rows in (ROWS, ROWS[:7]):
            np.testing.assert_allclose(model(tf.constant(rows)), plain(tf.constant(rows)))
    np.testing.assert_allclose(model.sums.numpy(), plain.sums.numpy(), rtol=1e-5)
