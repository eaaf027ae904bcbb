"""TensorFlow 1: values of the whole batch that replicas need on the way are reduced over them."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1.merging import Merging
from compat._backends.tensorflow1.profiler import partitions, products
from compat._rows import Partial
from compat.testing import in_span, initialise, largest_difference, optimizer, span

from .row_models import (
    layer_of,
    model_with,
    rows_of,
    three_devices,  # noqa: F401  # the fixture
    warned,
)
from .test_contract import record

v1 = v1_names(tf)
STEPS = (61, 14, 2, 61, 14)


def results_of(model, optimizer):
    """Return weights, losses and predictions of a model that is trained."""
    model.compile(optimizer, "mse")
    shape = tuple(size for size in model.inputs[0].shape.as_list()[1:])
    width = model.outputs[0].shape.as_list()[1]
    losses = []
    for count in STEPS:
        random = np.random.RandomState(count)
        batch = random.normal(size=(count,) + shape), random.normal(size=(count, width))
        losses.append(np.array(model.train_on_batch(*batch)))
    return model.get_weights() + losses + [model.predict_on_batch(batch[0])]


def trained(build, optimize, **options):
    """Return the results of a model on one device and on three, and the second model."""
    models = [initialise(build()) for _ in range(2)]
    compat.parallelize(models[1], **options)
    return [results_of(model, optimize()) for model in models], models[1]


def reductions(model):
    """Return the numbers of tensors that replicas reduce in training."""
    functions = vars(model)["_compat_functions"]
    return len(functions.replicas_now(training=True).reductions.merged)


def number_of_rows(K, x):
    return K.cast(K.shape(x)[0], K.floatx())


#: Layers, and how many values they reduce.
LAYERS = {
    "mean": (lambda K, x: x - K.mean(x, axis=0, keepdims=True), 1),
    "sum of all": (lambda K, x: x / K.sum(K.exp(x)), 1),
    "standardized": (lambda K, x: (x - K.mean(x, axis=0)) / (K.std(x, axis=0) + 0.1), 3),
    "softmax": (lambda K, x: K.transpose(K.softmax(K.transpose(x))), 2),
    "log of softmax": (lambda K, x: K.transpose(tf.nn.log_softmax(K.transpose(x))), 2),
    # Of what relu() gives many elements are equal, which share the gradient.
    "extremes": (lambda K, x: x * K.max(K.relu(x), axis=0, keepdims=True) + K.min(0 * x + x), 2),
    "covariance": (lambda K, x: K.dot(x, K.dot(K.transpose(x), x) / 100), 1),
    "divided by the number of rows": (lambda K, x: x / number_of_rows(K, x), 1),
    "unbiased": (
        lambda K, x: x * K.sum(K.square(x), axis=0) / (number_of_rows(K, x) - 1),
        2,
    ),
    "in training alone": (lambda K, x: K.in_train_phase(lambda: x - K.mean(x, 0), lambda: x), 1),
    "one after the other": (
        lambda K, x: (x - K.mean(x, axis=0)) * K.mean(K.square(x - K.mean(x, axis=0)), axis=0),
        3,
    ),
}


@pytest.mark.parametrize("name", in_span(sorted(LAYERS), ["softmax", "in training alone"]))
def test_layers_that_need_values_of_the_whole_batch_are_split(keras, name):
    """Three of uneven shards, one of them without rows, have the numbers of one device."""
    function, count = LAYERS[name]

    def build():
        return model_with(keras, keras.layers.Lambda(lambda x: function(keras.backend, x)))

    found = []
    texts = warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    (results, model) = found[0]
    assert not texts
    assert largest_difference(*results) <= 1e-5
    assert reductions(model) == count
    ran = products(partitions(record(model, rows_of(13), rows_of(13, 2))))
    assert len(ran) == 3 and len(set(ran.values())) == 1


def test_losses_and_updates_take_the_reduced_value(keras):
    """It stands in the graph once."""
    K = keras.backend

    def call(layer, x):
        mean = K.mean(x, axis=0)
        layer.add_update([K.update(layer.mean, 0.5 * layer.mean + mean)], x)
        layer.add_loss(K.sum(K.square(mean)), x)
        return x - mean

    def build():
        return model_with(keras, layer_of(keras, "centred", call, mean=(3,)))

    results, model = trained(build, lambda: optimizer(keras, "sgd"))
    assert largest_difference(*results) <= 1e-5
    assert reductions(model) == 1
    ran = partitions(record(model, rows_of(13), rows_of(13, 2)))
    means = [node.name for nodes in ran.values() for node in nodes if node.op == "Mean"]
    means = [name for name in means if "centred" in name]
    assert len(means) == 3 and all("replica_" in name for name in means)


def test_what_is_reduced_is_tried(keras):
    """Rows that depend on each other in a way that no rule finds: the mean is computed once."""
    K, layers = keras.backend, keras.layers

    def build():
        inputs = layers.Input(shape=(4,))
        hidden = layers.Dense(3, activation="tanh")(inputs)
        added = layers.Lambda(lambda x: tf.scan(lambda a, b: a + b, x))(hidden)
        both = layers.Lambda(lambda xy: xy[0] + 0.01 * K.mean(xy[1], axis=0), output_shape=(3,))
        return keras.models.Model(inputs, layers.Dense(2)(both([hidden, added])))

    found = []
    texts = warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    assert largest_difference(*found[0][0]) <= 1e-5
    assert not texts  # all products are split


def recomputed(K, x):
    recompute = getattr(tf, "recompute_grad", None) or tf.contrib.layers.recompute_grad
    with v1.variable_scope("recomputed", reuse=v1.AUTO_REUSE, use_resource=True):
        return recompute(lambda x: x - K.mean(x, axis=0))(x)


def fraction(K, x):
    return x / K.maximum(0.1 * number_of_rows(K, x), 1.0)


@pytest.mark.parametrize("function", [recomputed, fraction])
def test_what_cannot_be_reduced_has_the_numbers_of_one_device(keras, function):
    """A function that the backward pass calls again, and what is not in proportion to the rows."""

    def build():
        layer = keras.layers.Lambda(lambda x: function(keras.backend, x), output_shape=(3,))
        return model_with(keras, layer)

    found = []
    warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    assert largest_difference(*found[0][0]) <= 1e-5


def test_large_values_are_not_reduced(keras):
    """The layer runs unsplit, as one that compares all rows with all others."""
    K = keras.backend

    def build():
        inputs = keras.layers.Input(shape=(1100,))
        large = keras.layers.Lambda(lambda x: K.dot(x, K.dot(K.transpose(x), x)))(inputs)
        return keras.models.Model(inputs, keras.layers.Dense(2)(large))

    model = compat.parallelize(initialise(build()))
    model.compile("sgd", "mse")
    (text,) = warned(model._make_predict_function)
    assert "needs the whole batch" in text


def test_gradient_of_a_reduced_value_that_is_no_sum(keras):
    """It is that of all replicas together, so that the mean is computed once."""
    if not hasattr(tf, "custom_gradient"):
        return  # before 1.7
    K = keras.backend

    def unit(gradient):
        return gradient / tf.sqrt(tf.reduce_sum(tf.square(gradient)) + 1e-6)

    def call(x):
        mean = tf.custom_gradient(lambda y: (tf.identity(y), unit))(K.mean(x, axis=0))
        return x - mean

    def build():
        return model_with(keras, keras.layers.Lambda(call))

    found = []
    texts = warned(lambda: found.append(trained(build, lambda: optimizer(keras, "sgd"))))
    assert largest_difference(*found[0][0]) <= 1e-5
    assert not texts


@span
def test_a_replica_without_rows_of_its_own_is_not_reduced():
    """What it has computed of another one's row does not count."""
    with tf.Graph().as_default(), v1.Session() as session:
        merging = Merging(["/cpu:0"] * 3, [tf.constant(size) for size in (0, 1, 3)])
        values = [tf.constant(v) for v in ([9.0, 9.0], [1.0, 2.0], [3.0, 6.0])]
        found = [merging.reduced(Partial(how), values) for how in ("sum", "mean")]
        shape = merging.shape([tf.zeros((n, 7)) for n in (1, 1, 3)], tf.int32)
        total, mean, sizes = session.run(found + [shape])
    assert total.tolist() == [4.0, 8.0]
    assert mean.tolist() == [2.5, 5.0]
    assert sizes.tolist() == [4, 7]
