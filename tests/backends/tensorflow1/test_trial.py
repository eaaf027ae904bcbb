"""TensorFlow 1: what no rule knows is tried on three rows."""

import numpy as np
import pytest
import tensorflow as tf

from compat._backends._tensorflow.graph import v1_names

from .row_models import model_with, one_and_three, three_devices, trained  # noqa: F401  # the fixture

v1 = v1_names(tf)


def paired(x):
    pairs = tf.range(tf.shape(x)[0]) // 2
    return tf.gather(tf.segment_mean(x, pairs), pairs)


def of_numpy(x):
    result = v1.py_func(lambda x: np.float32(np.eye(len(x))[::-1]), [x], "float32")
    return tf.matmul(tf.stop_gradient(tf.reshape(result, (tf.shape(x)[0],) * 2)), x)


@pytest.mark.parametrize("function", [of_numpy, paired])
def test_what_no_rule_knows_is_tried(keras, function):
    """What costs little is computed once, and the layer after it split."""
    name = function.__name__

    def across(x):
        result = function(x)
        result.set_shape((None, 3))
        return result

    models = one_and_three(lambda: model_with(keras, keras.layers.Lambda(across, name=name)))
    difference, texts = trained(models)
    assert difference <= 1e-5
    if function is paired:
        assert not texts
        return
    (text,) = texts
    assert " in {} (test_trial.py, line ".format(name) in text
    assert "runs unsplit on /device:CPU:0" in text


@pytest.mark.parametrize("mixes", [False, True])
def test_fixed_number_of_rows_is_tried(keras, mixes):
    """With all of its rows: a loop over time, and one over rows, which no rule tells."""

    def totals(x):
        if mixes:
            return tf.scan(lambda total, row: total + row, x)
        return tf.transpose(tf.scan(lambda total, step: total + step, tf.transpose(x)))

    def build():
        layers = keras.layers
        inputs = layers.Input(batch_shape=(7, 4))
        hidden = layers.Lambda(totals, output_shape=(4,))(inputs)
        return keras.models.Model(inputs, layers.Dense(2)(hidden))

    difference, texts = trained(one_and_three(build), steps=(7, 7))
    assert difference <= 1e-5
    assert len(texts) == mixes and all("runs unsplit on " in text for text in texts)


def test_the_length_of_the_longest_text_is_that_of_the_batch(keras):
    def lengths(x):
        words = v1.string_split(tf.as_string(x[:, 0]), delimiter=".")
        return x * tf.cast(words.dense_shape[1], "float32")

    models = one_and_three(lambda: model_with(keras, keras.layers.Lambda(lengths)))
    difference, (text,) = trained(models)
    assert difference <= 1e-5
    assert "StringSplit" in text and "runs unsplit on /device:CPU:0" in text
