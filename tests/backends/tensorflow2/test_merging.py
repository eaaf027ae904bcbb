"""TensorFlow 2: sums, means and other losses, on three devices and on one."""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow import reductions
from compat._backends.tensorflow2.call_reductions import can_count
from compat.testing import DEVICES, contract_of, initialise, slow, span

from .reductions import (  # noqa: F401  # the fixture
    Layer,
    adding,
    is_divided,
    keras_,
    rows_of,
    runs_unsplit,
    same,
    three_devices,
    trained,
)
from .test_contract import KERAS3, ROWS, TARGETS


@tf.function(input_signature=[tf.TensorSpec(None)])
def half_sum_of_squares(x):
    """As models saved by TensorFlow 2.0 have activity regularizers: the rank is unknown."""
    return 0.5 * tf.reduce_sum(x**2)


LOSSES = {
    "sum": lambda x: 0.01 * tf.reduce_sum(x**2),
    "mean": lambda x: tf.reduce_mean(x**2),
    "mean by hand, rank unknown": lambda x: half_sum_of_squares(x) / rows_of(x),
    "of products": lambda x: 0.01 * tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    "largest": lambda x: tf.reduce_max(x),
    "keras mean": lambda x: keras_.losses.MeanSquaredError()(tf.zeros_like(x), x),
}


@pytest.mark.parametrize(
    "eagerly",
    [pytest.param(False, marks=span if KERAS3 else slow), pytest.param(True, marks=slow)],
)
def test_losses_have_the_value_of_one_device(keras, eagerly, pytestconfig):
    names = ["mean", "of products"]
    if not eagerly and contract_of(pytestconfig) != "span":
        # How values depend on rows is found alike for Keras 3.
        names = ["keras mean", "sum"] if KERAS3 else sorted(LOSSES)
    with is_divided():
        same(trained(lambda: adding(*map(LOSSES.get, names)), eagerly=eagerly))


def test_fewer_rows_than_devices_add_nothing_twice(keras):
    losses = LOSSES["sum"], LOSSES["mean"]
    same(trained(lambda: adding(*losses), ROWS[:2], TARGETS[:2]))


#: Besides what tests/idioms and the proof of placements have.
WHOLE = {
    "variance": lambda x: tf.math.reduce_variance(x),
    "two kinds": lambda x: tf.reduce_sum(x) + tf.reduce_mean(x),
    "masked": lambda x: tf.reduce_sum(x**2 * tf.sigmoid(9 * x)) / tf.reduce_sum(tf.sigmoid(9 * x)),
    "chosen": lambda x: tf.reduce_mean(tf.boolean_mask(x**2, x > 0.3)),
}


@pytest.mark.parametrize(
    "name", ["variance", "chosen"] + [pytest.param(n, marks=slow) for n in ("two kinds", "masked")]
)
def test_losses_of_the_whole_batch_are_reduced_or_run_unsplit(keras, name):
    with runs_unsplit() if name == "chosen" or not can_count() else is_divided():
        same(trained(lambda: adding(WHOLE[name])))


@slow
def test_normalization_is_divided(keras):
    """tf.keras computes that of layers by that of fused batches, where each row is a channel."""

    def build(normalized):
        inputs = keras.layers.Input((8,))
        hidden = normalized()(keras.layers.Dense(5)(inputs))
        return keras.models.Model(inputs, keras.layers.Dense(4)(hidden))

    with is_divided():
        same(trained(lambda: build(keras.layers.LayerNormalization)))
        trained(lambda: build(keras.layers.BatchNormalization), parallel=[True])


def test_one_other_device_computes_whatever_the_model_does(keras):
    results = []
    for gpus in (1, [1]):
        model = compat.parallelize(initialise(adding(WHOLE["variance"])), gpus=gpus)
        model.compile(keras_.optimizers.SGD(0.01), "mse")
        model.train_on_batch(ROWS[:16], TARGETS[:16])
        results.append(model.get_weights())
    same(results)


def test_a_model_is_traced_once_more(keras):
    traced = itertools.count()  # replicas merge what they add to a list, but not its steps

    class Noting(Layer):
        def call(self, x):
            next(traced)
            return x

    layers = keras.layers
    inputs = layers.Input((8,))
    hidden = layers.BatchNormalization()(layers.Dropout(0.5)(Noting()(inputs)))
    model = compat.parallelize(keras.models.Model(inputs, layers.Dense(4)(hidden)))
    step = tf.function(lambda rows: model(rows, training=True))
    before = next(traced)
    step.get_concrete_function(tf.TensorSpec((None, 8)))
    assert next(traced) - before - 1 == DEVICES + 1


@pytest.mark.skipif(not hasattr(keras_.layers.Dense, "quantize"), reason="Keras 3 quantizes")
def test_float8_has_the_largest_values_of_the_whole_batch(keras):
    """Keras 3 sets its history of them to its gradient."""

    def build():
        layers = keras.layers
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16), layers.Dense(4)])
        initialise(model)
        model.layers[0].quantize("float8")
        return model

    results = []
    with runs_unsplit("different"):
        for is_parallel in (False, True):
            model = build()
            if is_parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.01), "mse")
            for _ in range(2):
                model.train_on_batch(ROWS[:16], TARGETS[:16])
            results.append(model.get_weights())
    same(results)


def test_what_divides_by_the_number_of_rows_is_named(keras, monkeypatch):
    """Where that is not reduced. Not the layer after it, in which that first makes a difference."""
    monkeypatch.setattr(reductions, "LARGEST", 0)
    inputs = keras.layers.Input((8,))
    shares = keras.layers.Lambda(lambda x: x / rows_of(x), output_shape=(8,), name="shares")
    model = keras.models.Model(inputs, keras.layers.Dense(4)(shares(inputs)))
    expected = model(ROWS).numpy()
    compat.parallelize(model)
    with runs_unsplit() as texts:
        found = model(ROWS).numpy()
    assert re.match(r"The operation shares\S* \(RealDiv\)", texts[0]), texts
    np.testing.assert_allclose(found, expected, atol=1e-6)
