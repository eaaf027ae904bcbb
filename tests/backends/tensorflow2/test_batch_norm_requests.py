"""Layers that ask for the statistics of the whole batch are never silently without."""

import pytest
import tensorflow as tf

import compat
from compat.testing import DEVICES, keras_under_test

from ..batch_norm_requests import check_said


@pytest.fixture(scope="module")
def layer():
    """Return a layer that asks for it, as the Keras of each version has it."""
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    try:
        return keras.layers.BatchNormalization(synchronized=True, name="norm")
    except TypeError:
        layers = getattr(keras.layers, "experimental", None)
    kind = getattr(layers, "SyncBatchNormalization", None)  # from TensorFlow 2.2 on
    return kind and kind(name="norm")


def test_a_layer_of_keras_is_synchronized_or_warned_about(layer):
    keras = keras_under_test()
    if layer is None:
        assert not hasattr(keras.layers, "SyncBatchNormalization")
        return
    inputs = keras.layers.Input((4,))
    model = keras.models.Model(inputs, layer(inputs))
    check_said("tensorflow2", lambda: compat.parallelize(model), "'norm'")


def test_a_layer_within_a_module_is_synchronized_or_warned_about(layer):
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.norm = layer
            self.weight = tf.Variable(1.0)

        def __call__(self, x):
            return self.norm(x, training=True) * self.weight

    if layer is not None:
        check_said("tensorflow2", lambda: compat.parallelize(Net()), "'norm'")
        net = Net()
        function = tf.function(lambda x: net(x))
        check_said("tensorflow2", lambda: compat.parallelize(function), "'norm'")
