"""Models with layers that depend on several rows of a batch, on one device and on three."""

import re
import warnings

import numpy as np
import pytest

import compat
from compat._rows import DOWNSTREAM
from compat.testing import DEVICES, initialise, keras_under_test, largest_difference

#: Rows of steps: even, uneven, fewer than devices.
STEPS = (12, 13, 2)


@pytest.fixture(name="keras")
def three_devices():
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    yield keras
    keras.backend.clear_session()


def rows_of(count, columns=4, seed=0):
    return np.random.RandomState(seed + count).normal(size=(count, columns)).astype("float32")


def one_and_three(build, loss="mse"):
    """Two models with the same weights, compiled, the second one on three devices."""
    plain, parallel = initialise(build()), compat.parallelize(initialise(build()))
    for model in (plain, parallel):
        model.compile("sgd", loss)
    return plain, parallel


def train_both(models, steps=STEPS, columns=2):
    """Return the largest difference between the models' weights and losses after some steps."""
    results = []
    for model in models:
        losses = [model.train_on_batch(rows_of(n), rows_of(n, columns, seed=7)) for n in steps]
        results.append(model.get_weights() + [np.array(losses)])
    return largest_difference(*results)


def warned(function):
    """Return the texts of compat's warnings while a function runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]


def trained(models, **options):
    """Return the largest difference of ``train_both()``, and the texts of compat's warnings."""
    differences = []
    texts = warned(lambda: differences.append(train_both(models, **options)))
    return differences[0], texts


MIXED = "needs the whole batch, but each device sees only its shard."


def assert_runs_unsplit(texts, model, operation, layer, why=MIXED, scope=DOWNSTREAM):
    """There is one warning, which names the operation, the layer and the line of the test."""
    (text,) = texts
    assert re.fullmatch(
        r"The operation {} \(\w+\) in {} \(test_\w+\.py, line \d+\) of '{}' {} {} runs unsplit on "
        r"/device:CPU:0\.".format(operation, layer, model.name, re.escape(why), scope),
        text,
    )


def layer_of(keras, name, call, **state):
    """Return a layer whose outputs have the shape of its inputs.

    Arguments:
        keras: the Keras under test.
        name: that of the layer.
        call: a function of the layer and the inputs that returns the outputs.
        **state: name of a variable -> its shape.
    """

    class Own(keras.layers.Layer):
        def build(self, input_shape):
            for each, shape in sorted(state.items()):
                options = {"initializer": "zeros", "trainable": False}
                setattr(self, each, self.add_weight(name=each, shape=shape, **options))
            super().build(input_shape)

        def call(self, inputs):
            return call(self, inputs)

        def compute_output_shape(self, input_shape):
            return input_shape

    return Own(name=name)


def model_with(keras, layer):
    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    return keras.models.Model(inputs, layers.Dense(2)(layer(hidden)))
