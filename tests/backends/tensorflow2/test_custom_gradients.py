"""TensorFlow 2: user-defined gradients that mix rows."""

import pytest
import tensorflow as tf

from compat.testing import slow

from .reductions import Layer, is_divided, runs_unsplit, same, three_devices, trained  # noqa: F401  # the fixture
from .test_contract import KERAS3


@tf.custom_gradient
def clipped(x):
    """All that comes back is one vector, whose length has a limit."""
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.01)


@tf.custom_gradient
def clipped_each(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01)


def in_a_loop(function):
    """Twice, in a loop that no trace unrolls."""

    def looped(x):
        def body(i, x):
            return i + 1, function(x)

        return tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), x])[1]

    return looped


OWN_GRADIENTS = {
    "all": (clipped, True),
    "in a function": (tf.function(clipped), True),
    "in a loop": (in_a_loop(clipped), True),
    "each row": (lambda x: in_a_loop(clipped_each)(tf.recompute_grad(tf.sin)(3 * x)), False),
}


@pytest.mark.parametrize(
    "name",
    ["all", pytest.param("in a loop", marks=slow)]
    + [pytest.param(name, marks=slow) for name in ("each row", "in a function")] * (not KERAS3),
)
def test_own_gradients_that_mix_rows_run_unsplit(keras, name):
    function, mixes = OWN_GRADIENTS[name]
    layers = keras.layers

    class Own(Layer):
        def call(self, x):
            return function(x)

    def build():
        inputs = layers.Input((8,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        return keras.models.Model(inputs, layers.Dense(4)(Own(name="own")(hidden)), name="net")

    with runs_unsplit("gradient") if mixes else is_divided():
        same(trained(build))
