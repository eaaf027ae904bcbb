"""Models for the tests of verification, of Keras 3 if nothing else is said."""

import numpy as np

import compat
from compat import _verification
from compat._configuration.settings import Every
from compat.testing import initialise


def verified(backend, model, steps=1):
    """Have the model's steps verified: the record of what was."""
    verification = _verification.Verification(model.name, backend.devices(), steps)
    backend.verify(model, verification)
    return verification.record


def mixes_rows_from_a_later_batch(keras, parallel):
    """A model that subtracts the mean over its rows once one of them is above 5."""

    class Centred(keras.layers.Layer):
        def call(self, x):
            is_large = keras.ops.max(x) > 5
            return x - keras.ops.where(is_large, keras.ops.mean(x, axis=0, keepdims=True), 0.0)

    layers = [keras.layers.Input((4,)), Centred(), keras.layers.Dense(2)]
    model = initialise(keras.models.Sequential(layers))
    if parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def batches():
    """Six batches; rows mix in the last three."""
    random = np.random.RandomState(0)
    inputs = random.uniform(-1, 1, size=(6, 12, 4)).astype("float32")
    inputs[3:, :, 0] += 6
    return list(zip(inputs, random.normal(size=(6, 12, 2)).astype("float32")))


def weights_until_found(backend, keras):
    """Train on those batches, with every second step verified.

    Returns:
        Weights on one device and on several; or the error of what was found, and the step's number.
    """
    models = [mixes_rows_from_a_later_batch(keras, parallel) for parallel in (False, True)]
    verified(backend, models[1], Every(2))
    for number, batch in enumerate(batches()):
        for model in models:
            try:
                model.train_on_batch(*batch)
            except compat.ResultsDifferError as error:
                return error, number
    return [model.get_weights() for model in models]
