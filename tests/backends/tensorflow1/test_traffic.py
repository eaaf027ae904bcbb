"""TensorFlow 1: bytes that devices send to each other, counted from what sessions executed."""

import importlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow.graph import v1_names
from compat.testing import initialise, largest_difference, span

from ..conftest import ROOT
from .row_models import three_devices  # noqa: F401  # the fixture

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
counted = importlib.import_module("bytes_tensorflow1")
del sys.path[0]
v1 = v1_names(tf)


@span
def test_no_device_sends_more_than_the_weights_and_their_gradients():
    """On two, four and eight devices, which need a process of their own."""
    command = [sys.executable, "benchmarks/bytes_tensorflow1.py", "--devices", "2", "4", "8"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(counted.MARK)]
    for devices, steps in json.loads(line[len(counted.MARK) :]).items():
        for kind, most in (("train", 2.1), ("predict, first", 1.1), ("evaluate, first", 1.1)):
            for link in ("sent", "received"):
                assert steps[kind][link] <= most * steps["weights"], (devices, kind)


def recurrent(keras):
    layers = keras.layers
    inputs = layers.Input(shape=(3, 4))
    hidden = layers.Dense(128)(layers.LSTM(128)(inputs))
    return keras.models.Model(inputs, layers.Dense(2)(hidden)), np.ones((6, 3, 4), "float32")


def table(keras):
    """Return a model whose gradients are slices of a table that replicas read as a whole."""

    class Table(keras.layers.Layer):
        def build(self, input_shape):
            options = {"name": "table", "shape": (2000, 8), "trainable": True}
            self.table = self.add_weight(initializer="uniform", **options)
            super().build(input_shape)

        def call(self, rows):
            return tf.gather(tf.identity(self.table), tf.cast(rows, tf.int32))

        def compute_output_shape(self, input_shape):
            return (input_shape[0], input_shape[1], 8)

    layers = keras.layers
    inputs = layers.Input(shape=(3,))
    hidden = layers.Flatten()(Table()(inputs))
    model = keras.models.Model(inputs, layers.Dense(2)(hidden))
    return model, np.arange(18).reshape(6, 3).astype("float32")


@span
@pytest.mark.parametrize("build, most", [(recurrent, 2.15), (table, 1.05)])
def test_gradients_take_the_way_of_the_weights(keras, build, most):
    """Those of weights that a loop takes in, and slices of a table, which stay slices."""
    models = [initialise(build(keras)[0]) for _ in range(2)]
    compat.parallelize(models[1])
    inputs = build(keras)[1]
    for model in models:
        model.compile("sgd", "mse")
        model.train_on_batch(inputs, inputs[:, :2].reshape(6, -1)[:, :2])
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-5
    step = counted.measured(lambda: models[1].train_on_batch(inputs, np.ones((6, 2))))
    weights = 4 * models[1].count_params()
    assert max(step["sent"], step["received"]) <= most * weights
