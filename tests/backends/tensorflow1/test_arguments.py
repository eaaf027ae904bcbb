"""TensorFlow 1: inputs of a model on several devices whose numbers of rows differ."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import initialise, largest_difference

from .row_models import one_and_three, rows_of, three_devices  # noqa: F401  # the fixture


def model_of_two(keras, function, second=None):
    layers = keras.layers
    first = layers.Input(shape=(4,))
    second = layers.Input(shape=(4,)) if second is None else layers.Input(tensor=second)
    hidden = [layers.Dense(4)(tensor) for tensor in (first, second)]
    model = keras.models.Model([first, second], layers.Lambda(function)(hidden))
    return compat.parallelize(initialise(model))


def test_inputs_of_different_rows(keras):
    """Refused where each replica would take a part of both, right where it does not."""
    K = keras.backend
    model = model_of_two(keras, lambda ab: ab[0] + 0 * ab[1])
    with pytest.raises(compat.UnsupportedError) as raised:
        model.predict_on_batch([rows_of(6), rows_of(3)])
    names = [tensor.name for tensor in model.inputs]
    assert str(raised.value) == (
        "parallelize() splits each input of model {!r} along its first dimension, but their sizes "
        "there differ: {}. Give each input one row for each sample, or use one device: "
        "parallelize(model, gpus=1).".format(
            model.name,
            ", ".join(sorted(map("{} has {}".format, names, (6, 3)))),
        )
    )

    def build():
        nodes, edges = keras.layers.Input(shape=(4,)), keras.layers.Input(batch_shape=(None, None))
        hidden = keras.layers.Dense(3, activation="tanh")(nodes)
        hidden = keras.layers.Lambda(lambda ab: K.dot(ab[0], ab[1]))([edges, hidden])
        return keras.models.Model([nodes, edges], keras.layers.Dense(2)(hidden))

    found = []
    for model in one_and_three(build):
        batch = [rows_of(13), rows_of(13, 13)]
        losses = [model.train_on_batch(batch, rows_of(13, 2)) for _ in range(2)]
        rectangular = [rows_of(13), rows_of(5, 13)]
        found.append([np.array(losses), model.predict_on_batch(rectangular)] + model.get_weights())
    assert found[1][1].shape == (5, 2)
    assert largest_difference(*found) <= 1e-5


def test_inputs_that_are_tensors_of_different_rows(keras):
    three = tf.identity(keras.backend.variable(rows_of(3)))
    model = model_of_two(keras, lambda ab: ab[0] + 0 * ab[1], three)
    np.testing.assert_equal(model.predict_on_batch(rows_of(3)).shape, (3, 4))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.predict_on_batch(rows_of(6))
    text = (
        "parallelize() splits each input of model {!r} along its first dimension, but their sizes "
        "there differ. Give each input one row for each sample, or use one device: "
        "parallelize(model, gpus=1). Rows:] [6] [3]".format(model.name)
    )
    assert text in str(raised.value).replace("\\'", "'")
