"""TensorFlow 2: models that ``MirroredStrategy`` replicates."""

import sys

import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2.configuration import short_name
from compat.testing import (
    DEVICES,
    keras_under_test,
    largest_difference,
    span,
)

from .test_contract import (
    KERAS3,
    ROWS,
    TARGETS,
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    yield keras
    # After fit() under a strategy, TensorFlow 2.0 goes on in the training phase.
    keras.backend.clear_session()


def small(keras):
    layers = keras.layers
    model = keras.models.Sequential(
        [layers.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def is_averaged(keras):
    """Return whether losses are scaled by a strategy's number of replicas: not in Keras 3.0-3.7."""
    module = sys.modules[keras.losses.Loss.__module__]
    return not KERAS3 or hasattr(module, "scale_loss_for_distribution")


def check_refused(keras):
    with pytest.raises(compat.UnsupportedError) as refused:
        compat.parallelize(lambda: small(keras), strategy="mirrored")
    assert str(refused.value) == (
        'tensorflow2 cannot train by strategy="mirrored" with keras {}, which does not '
        "average losses and outputs over the replicas of a strategy. Use Keras 3.8 or later, or "
        "parallelize(model) without a strategy.".format(keras.__version__)
    )


def mirrored_pair(keras):
    def build():
        return small(keras)

    plain, mirrored = build(), compat.parallelize(build, strategy="mirrored")
    mirrored.set_weights(plain.get_weights())
    return plain, mirrored


@pytest.mark.row('strategy="mirrored"')
@span
def test_mirrored_even_batches_train_to_the_numbers_of_one_device(keras):
    if not is_averaged(keras):
        return check_refused(keras)
    models = mirrored_pair(keras)
    for model in models:
        model.fit(ROWS, TARGETS, batch_size=15, shuffle=False, verbose=0)
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-6
    # TensorFlow 2.0's has another name.
    strategy = getattr(models[1], "distribute_strategy", None) or models[1]._distribution_strategy
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    values = models[1].weights[0]
    values = strategy.experimental_local_results(
        getattr(values, "value", values) if KERAS3 else values
    )
    assert {short_name(value.device) for value in values} == {"/cpu:0", "/cpu:1", "/cpu:2"}


@pytest.mark.row('strategy="mirrored"')
def test_mirrored_function_that_builds_no_model(keras):
    with pytest.raises(compat.NotAModelError):
        compat.parallelize(lambda: None, strategy="mirrored")


@span
@pytest.mark.row('strategy="mirrored"')
def test_mirrored_is_refused_where_keras_does_not_average_over_replicas(keras, monkeypatch):
    module = sys.modules[keras.losses.Loss.__module__]
    monkeypatch.delattr(module, "scale_loss_for_distribution", raising=False)
    check_refused(keras)


if not KERAS3:  # tf.keras averages over replicas
    del test_mirrored_is_refused_where_keras_does_not_average_over_replicas
