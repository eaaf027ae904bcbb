"""TensorFlow 1: values of the whole batch are gathered, and split again where they have rows."""

import re

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow1.profiler import partitions, products
from compat.testing import in_span, initialise, largest_difference, optimizer

from .row_models import (
    layer_of,
    model_with,
    rows_of,
    three_devices,  # noqa: F401  # the fixture
    warned,
)
from .test_contract import record
from .test_reductions import trained


def attention(K, x):
    return K.dot(K.softmax(K.dot(x, K.transpose(x))), x)


def squared(K, x):
    return tf.matmul(tf.matmul(x, x, transpose_b=True), 0.01 * x)


def in_training(K, x):
    return K.in_train_phase(lambda: x + 0.02 * K.cumsum(x, axis=0), lambda: x)


def twice(K, x):
    """Return what is split in between, and mixed again."""
    product = K.dot(tf.reverse(x, [0]), K.constant(np.eye(3)))
    return tf.reverse(product, [0]) + 0.02 * K.cumsum(x, axis=0)


def first_row(K, x):
    return tf.reverse(x + x[:1], [0]) + x[:1]


#: Layers; how many values they gather or split again, and how many products each device computes.
LAYERS = {
    "reversed": (lambda K, x: 0.7 * x + 0.3 * tf.reverse(x, [0]), 1, 2),
    "first row": (first_row, 2, 2),
    "attention": (attention, 2, 4),
    "one tensor with itself": (squared, 2, 4),
    "of means": (lambda K, x: tf.reverse(x - K.mean(x, axis=0), [0]), 1, 2),
    "in training alone": (in_training, 1, 2),
    "twice": (twice, 3, 3),
}


def gathered(model):
    """Return the number of tensors that replicas gather, or split again, in training."""
    functions = vars(model)["_compat_functions"]
    return len(functions.replicas_now(training=True).gathered)


@pytest.mark.parametrize("name", in_span(sorted(LAYERS), ["attention", "reversed"]))
def test_what_follows_an_operation_on_all_rows_is_split(keras, name):
    """Three of uneven shards, one of them without rows, have the numbers of one device."""
    function, count, costly = LAYERS[name]

    def build():
        return model_with(keras, keras.layers.Lambda(lambda x: function(keras.backend, x)))

    found = []
    texts = warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    ((results, model),) = found
    assert not texts
    assert largest_difference(*results) <= 1e-5
    assert gathered(model) == count
    ran = products(partitions(record(model, rows_of(13), rows_of(13, 2))))
    assert len(ran) == 3 and len(set(ran.values())) == 1
    assert next(iter(ran.values()))[0] == costly


def test_inputs_are_mixed_themselves(keras):
    """In a layer without others before it, of which a loss and an update need values, too."""
    K = keras.backend

    def call(layer, x):
        layer.add_update([K.update(layer.mean, K.mean(tf.reverse(x, [0])[:2], axis=0))], x)
        layer.add_loss(0.01 * K.sum(K.dot(x, K.transpose(x))), x)
        return attention(K, x) + tf.reverse(x, [0])

    def build():
        inputs = keras.layers.Input(shape=(4,))
        mixed = layer_of(keras, "mixing", call, mean=(4,))(inputs)
        return keras.models.Model(inputs, keras.layers.Dense(2)(mixed))

    found = []
    texts = warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    ((results, _),) = found
    assert not texts
    assert largest_difference(*results) <= 1e-5


def test_rows_that_are_not_those_of_the_batch_for_any_size_are_refused(keras):
    """In a run, where no number of rows for which sizes were inferred shows it."""
    K = keras.backend

    def build():
        return model_with(keras, keras.layers.Lambda(lambda x: tf.reverse(x[:100000], [0])))

    model = compat.parallelize(initialise(build()))
    model.compile("sgd", "mse")
    assert len(model.predict_on_batch(rows_of(7))) == 7
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.predict_on_batch(rows_of(100001))
    assert re.search(
        r"lambda\S* does not have one row for each sample of this batch, as it has for others\. "
        r"Use one device: parallelize\(model, gpus=1\)\. Rows and samples:",
        raised.value.message,
    )
    assert K.int_shape(model.outputs[0]) == (None, 2)


def test_nothing_is_split_again_that_costs_nothing(keras):
    K = keras.backend

    def build():
        inputs = keras.layers.Input(shape=(4,))
        hidden = keras.layers.Dense(3, activation="tanh")(inputs)
        last = keras.layers.Lambda(lambda x: 0.02 * K.cumsum(x, axis=0))(hidden)
        return keras.models.Model(inputs, last)

    results, model = trained(build, lambda: optimizer(keras, "sgd"))
    assert largest_difference(*results) <= 1e-5
    assert gathered(model) == 0
