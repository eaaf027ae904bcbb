"""What MirroredStrategy and keras.distribution make of batches that do not divide evenly.

    .tox/py311-tensorflow/bin/python tests/peers/uneven.py MirroredStrategy
    .tox/py311-jax/bin/python tests/peers/uneven.py keras.distribution

For a loss that is a mean over rows, and for one that is computed across the batch: how far the
weights after one step on three devices are from those after one step on one. The first table of
docs/choosing.md that names other libraries says what these are.
"""

import contextlib
import os
import sys

import numpy as np

DEVICES = 3
BATCHES = 60, 61, 4, 2
X = np.random.RandomState(0).normal(size=(61, 4)).astype("float32")
Y = X[:, :1] ** 2


def mirrored_strategy():
    """Return Keras, its function of a standard deviation, and the scope of several devices."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    devices = ["/cpu:{}".format(index) for index in range(DEVICES)]
    return tf.keras, tf.math.reduce_std, tf.distribute.MirroredStrategy(devices).scope


def keras_distribution():
    """Return Keras, its function of a standard deviation, and the scope of several devices."""
    os.environ.update(KERAS_BACKEND="jax", NPROC=str(3 * DEVICES))
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={}".format(DEVICES)
    import keras

    devices = ["cpu:{}".format(index) for index in range(DEVICES)]
    return keras, keras.ops.std, keras.distribution.DataParallel(devices=devices).scope


def weights(keras, scope, loss, rows):
    """Return the weights after one step with a batch of so many rows."""
    with scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.layers.InputLayer((4,)), layer])
        model.compile(keras.optimizers.SGD(0.1), loss)
        model.fit(X[:rows], Y[:rows], batch_size=rows, verbose=0, shuffle=False)
        return np.concatenate([np.ravel(value) for value in model.get_weights()])


def main(peer):
    peers = {"MirroredStrategy": mirrored_strategy, "keras.distribution": keras_distribution}
    keras, std, scope = peers[peer]()
    for name, loss in (("mse", "mse"), ("across", lambda true, predicted: std(true - predicted))):
        for rows in BATCHES:
            one = weights(keras, contextlib.nullcontext, loss, rows)
            try:
                found = "{:.2g}".format(abs(one - weights(keras, scope, loss, rows)).max())
            except Exception as error:
                found = "{}: {:.60}".format(type(error).__name__, str(error))
            print("{:6}  {} rows: {}".format(name, rows, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
