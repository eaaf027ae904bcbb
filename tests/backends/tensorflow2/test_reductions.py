"""Replicas that take turns: what they leave where one fails, and their gradients."""

import _thread
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._rows.replica_threads import current_turn
from compat._runtime import patching
from compat.testing import DEVICES, keras_under_test

from ..messages import refusal


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


class Failing(keras_under_test().layers.Layer):
    """Calls a function as the second replica comes, after a layer of batch normalization."""

    function = None

    def call(self, x):
        turn = current_turn()
        if self.function is not None and turn is not None and turn.index == 1:
            self.function()
        return x * 1.0


def failing(keras):
    layers = keras.layers
    inputs = layers.Input((6,))
    x = keras.layers.BatchNormalization()(inputs)
    x = Failing(name="failing")(x)
    return keras.models.Model(inputs, layers.Dense(2)(keras.layers.BatchNormalization()(x)))


def _out_of_memory():
    raise MemoryError("in the second replica")


@pytest.mark.parametrize(
    "kind, function", [(MemoryError, _out_of_memory), (KeyboardInterrupt, _thread.interrupt_main)]
)
def test_a_failing_replica_ends_all_and_changes_nothing(keras, kind, function):
    model = compat.parallelize(failing(keras), sync_batch_norm=True)
    x = tf.random.normal((14, 6))
    layer = model.get_layer("failing")
    model(x, training=True)
    before, attributes = model.get_weights(), {n: dict(vars(n)) for n in model.layers}
    patching.attach(layer, "function", function)
    with pytest.raises(kind):
        model(x, training=True)
    patching.detach(layer, "function")
    assert not _replica_threads()
    for weight, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(weight, other)
    for each, values in attributes.items():
        changed = {k for k, v in vars(each).items() if values.get(k, v) is not v}
        assert not changed & {"_moments", "_assign_moving_average", "fused"}
    model(x, training=True)
    assert not _replica_threads()


def _replica_threads():
    return [t for t in threading.enumerate() if t.name.startswith("compat replica")]


NOT_DIFFERENTIABLE = (
    "A gradient of a gradient, or of one output of a model by another one, is taken of a model "
    "that uses values of the whole batch on several devices, as synchronized batch "
    "normalization does. compat computes none. If it is only that a tf.GradientTape still "
    "records, call tape.gradient() outside of its block. Otherwise run the model on one "
    "device: compat.parallelize(model, gpus=1)."
)


def test_gradients_of_gradients_are_refused(keras):
    model = compat.parallelize(failing(keras), sync_batch_norm=True)
    x = tf.random.normal((14, 6))

    def penalty():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.square(model(x, training=True)))
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        return outer.gradient(penalty, model.trainable_variables)

    for function in penalty, tf.function(penalty):
        assert NOT_DIFFERENTIABLE in refusal(compat.UnsupportedError, function)


def test_a_tape_around_a_function_gets_its_gradients(keras):
    gradients = []
    for sync in (None, True):
        model = failing(keras)
        model.set_weights(
            [np.linspace(0.2, 1, w.size).reshape(w.shape) for w in model.get_weights()]
        )
        if sync:
            compat.parallelize(model, sync_batch_norm=True)
        x = tf.constant(np.random.RandomState(0).normal(size=(14, 6)), tf.float32)
        function = tf.function(functools.partial(model, training=True))
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 3)
        gradients.append(tape.gradient(loss, [x] + model.trainable_variables))
    for gradient, other in zip(*gradients):
        np.testing.assert_allclose(gradient, other, rtol=1e-3, atol=1e-3)
