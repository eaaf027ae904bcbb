"""TensorFlow 1: batch normalization by the statistics of the whole batch."""

import contextlib

import numpy as np
import pytest

import compat
from compat._backends.tensorflow1.profiler import partitions, products
from compat._configuration import registry
from compat.testing import initialise, largest_difference, slow, span

from ..verification_cases import verified
from .row_models import three_devices, warned  # noqa: F401  # the fixture
from .test_contract import record
from .test_reductions import reductions, results_of, trained


def dense(keras):
    layers = keras.layers
    inputs = layers.Input(shape=(6,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    hidden = layers.BatchNormalization(momentum=0.9)(hidden)
    hidden = layers.Dense(5, activation="relu")(hidden)
    hidden = layers.BatchNormalization(momentum=0.9, scale=False)(hidden)
    return keras.models.Model(inputs, layers.Dense(2)(hidden))


def small(keras, layer=None):
    inputs = keras.layers.Input(shape=(6,))
    return keras.models.Model(inputs, (layer or keras.layers.BatchNormalization())(inputs))


def convolutional(keras, **options):
    layers = keras.layers
    inputs = layers.Input(shape=(6, 5, 3))
    hidden = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    hidden = layers.BatchNormalization(momentum=0.9, **options)(hidden)
    hidden = layers.Conv2D(4, 3, padding="same")(hidden)
    hidden = layers.BatchNormalization(momentum=0.9, center=False, **options)(hidden)
    hidden = layers.GlobalAveragePooling2D()(layers.Activation("relu")(hidden))
    return keras.models.Model(inputs, layers.Dense(2)(hidden))


def images(keras):
    """Normalize images, by a fused operation where this Keras has one."""
    layers = keras.layers
    inputs = layers.Input(shape=(6, 5, 3))
    hidden = layers.BatchNormalization(momentum=0.9)(inputs)
    hidden = layers.GlobalAveragePooling2D()(layers.Activation("relu")(hidden))
    return keras.models.Model(inputs, layers.Dense(2)(hidden))


def along_height(keras):
    """Normalize along an axis for which there is no fused operation."""
    return convolutional(keras, axis=2)


def momentum(keras):
    return keras.optimizers.SGD(0.1, momentum=0.9)


@contextlib.contextmanager
def float64_where_possible(keras):
    """Build models in float64 within a block, if this Keras can train them so on one device.

    Yields the tolerance of the results.
    """
    floatx = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    try:
        model, tolerance = initialise(dense(keras)), 1e-12
        model.compile(momentum(keras), "mse")
        model.train_on_batch(np.ones((13, 6)), np.ones((13, 2)))
    except (TypeError, ValueError):
        keras.backend.set_floatx(floatx)
        tolerance = 1e-5
    try:
        yield tolerance
    finally:
        keras.backend.set_floatx(floatx)


def test_dense_model_has_the_numbers_of_one_device(keras):
    """In loss, weights, moving averages and predictions, with 61, 14 and 2 samples."""
    with float64_where_possible(keras) as tolerance:
        check(keras, dense, tolerance)


@pytest.mark.parametrize("build", [convolutional, pytest.param(along_height, marks=slow)])
def test_convolutional_model_has_the_numbers_of_one_device(keras, build):
    check(keras, build, 1e-5)


@span
def test_images_are_normalized_as_on_one_device(keras):
    """On each version of Keras, whose operations differ; the contract has the other kind."""
    results, model = trained(lambda: images(keras), lambda: momentum(keras), sync_batch_norm=True)
    assert largest_difference(*results) <= 1e-5
    assert reductions(model) in (2, 3)


def check(keras, build, tolerance):
    """Check that training equals that of one device, and that it does not without the option."""
    results, model = trained(lambda: build(keras), lambda: momentum(keras), sync_batch_norm=True)
    # Of each of two layers mean and variance; a fused operation needs the number of rows.
    assert reductions(model) in (4, 6)
    check_devices(model)
    assert largest_difference(*results) <= tolerance
    without = compat.parallelize(initialise(build(keras)), sync_batch_norm=False)
    assert largest_difference(results[0], results_of(without, momentum(keras))) > 1e-3


def check_devices(model):
    """Each device has done a third of the products, forward and backward."""
    shape = (13,) + tuple(model.inputs[0].shape.as_list()[1:])
    ran = products(partitions(record(model, np.ones(shape), np.ones((13, 2)))))
    assert len(ran) == 3 and len(set(ran.values())) == 1
    assert min(ran["/device:CPU:0"]) > 0


@span
def test_a_layer_asks_by_its_class(keras):
    class SyncBatchNormalization(keras.layers.BatchNormalization):
        """As later versions of Keras name theirs."""

    def build():
        return small(keras, SyncBatchNormalization(momentum=0.9))

    results, model = trained(build, lambda: momentum(keras))
    assert largest_difference(*results) <= 1e-5
    assert reductions(model) > 0


def test_predictions_and_evaluation_are_by_the_moving_averages(keras):
    """These stay as they are."""
    model = initialise(convolutional(keras))
    model.set_weights([abs(weight) for weight in model.get_weights()])  # a variance is positive
    before, batch = model.get_weights(), np.random.RandomState(0).normal(size=(2, 6, 5, 3))
    expected = model.predict_on_batch(batch)
    compat.parallelize(model, sync_batch_norm=True)
    model.compile(momentum(keras), "mse")
    assert largest_difference([expected], [model.predict_on_batch(batch)]) <= 1e-6
    model.test_on_batch(batch, np.ones((2, 2)))
    assert largest_difference(before, model.get_weights()) == 0


def test_it_can_be_switched_on_and_off(keras):
    models = [initialise(small(keras)) for _ in range(2)]
    random = np.random.RandomState(0)
    batch = random.normal(size=(14, 6)), random.normal(size=(14, 6))
    losses = []
    for is_synchronized in (None, False, True):
        for model in models[1:] if is_synchronized is not None else models[:1]:
            if is_synchronized is not None:
                compat.parallelize(model, sync_batch_norm=is_synchronized)
            model.compile(keras.optimizers.SGD(0.0), "mse")
            losses.append(float(model.train_on_batch(*batch)))
    assert abs(losses[0] - losses[1]) > 1e-4
    assert abs(losses[0] - losses[2]) <= 1e-6


def test_training_steps_are_verified(keras):
    """As they are not where each device uses the statistics of its own samples."""
    random = np.random.RandomState(0)
    batch = random.normal(size=(14, 6)), random.normal(size=(14, 6))
    records = []
    for is_synchronized in (True, False):
        model = compat.parallelize(initialise(small(keras)), sync_batch_norm=is_synchronized)
        model.compile(momentum(keras), "mse")
        records.append(verified(registry.find("tensorflow1"), model))
        model.train_on_batch(*batch)
    assert [record.steps["train"] for record in records] == [1, 0]
    assert [list(record.uncompared) for record in records] == [[], ["train"]]


def test_fused_operation_in_a_layer_of_other_kinds(keras):
    """It is that of the whole batch, without being asked: it is no layer of Keras."""
    import tensorflow as tf

    def normalize(x):
        ones, zeros = tf.ones([3]), tf.zeros([3])
        return tf.nn.fused_batch_norm(x, ones, zeros, epsilon=0.01)[0]

    def build():
        layers = keras.layers
        inputs = layers.Input(shape=(4, 4, 3))
        hidden = layers.Lambda(normalize)(layers.Conv2D(3, 3, padding="same")(inputs))
        return keras.models.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))

    found = []
    assert not warned(lambda: found.append(trained(build, lambda: momentum(keras))))
    assert largest_difference(*found[0][0]) <= 1e-5
