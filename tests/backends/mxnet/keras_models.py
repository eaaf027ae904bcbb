"""Keras models that tests run on several contexts, and what compat says of them."""

import pytest

import compat
from compat import _keras
from compat.testing import keras_under_test


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=3)
    return keras_under_test()


def replicas_of(model):
    """Return the replicas of a model, or of the one inside a Sequential before Keras 2.2."""
    return _keras.inner_model(model)._compat_replicas


def lambda_model(keras, function, name=None):
    """Return a model with an operation of MXNet's own between two layers."""
    from keras.backend import mxnet_backend

    @mxnet_backend.keras_mxnet_symbol
    def wrapped(x):
        return mxnet_backend.KerasSymbol(function(x.symbol))

    layers = keras.layers
    first = layers.Input(shape=(8,))
    x = layers.Lambda(wrapped, output_shape=(5,))(layers.Dense(5)(first))
    return keras.models.Model(first, layers.Dense(4)(x), name=name)


def convolutional(keras):
    layers = keras.layers
    first = layers.Conv2D(3, 2, padding="same", activation="relu", input_shape=(5, 5, 2))
    return keras.models.Sequential([first, layers.Flatten(), layers.Dense(1)])


WHOLE = (
    "Model {!r} {} the whole batch, but each device sees only its shard{} The model runs unsplit "
    "on cpu(0)."
)


def unknown(name):
    return WHOLE.format(name, "may need", ": compat has no rule for it, and cannot try it.")
