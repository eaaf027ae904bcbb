"""TensorFlow 1: what a script has the functions of a model compute besides, as ``fetches``."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _keras
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1 import profiler
from compat._configuration import registry
from compat.testing import in_span, initialise, span

from ..verification_cases import verified
from .row_models import rows_of, three_devices  # noqa: F401  # the fixture
from .test_trial import paired

v1 = v1_names(tf)
ROWS = 13


def dropped(keras):
    """Return a model whose outputs are random in training."""
    layers = keras.layers
    return initialise(
        keras.models.Sequential(
            [layers.Dense(6, input_shape=(4,)), layers.Dropout(0.5), layers.Dense(2)]
        )
    )


def has_fetches(keras):
    K = keras.backend
    return hasattr(K.function([keras.layers.Input((1,))], [K.constant(1.0)]), "fetches")


def kept_by(keras, tensor):
    """Return a variable, and the operation that keeps a batch of a tensor in it."""
    kept = keras.backend.variable(np.zeros((ROWS, 2)))
    return kept, tf.identity(v1.assign(kept, tf.reshape(tensor, (ROWS, 2))))


@pytest.mark.parametrize(
    "way, verify",
    in_span(
        [("compile", 1), ("appended", 0), ("assigned", 1), ("metrics", 0), ("outputs", 1)],
        [("assigned", 1), ("metrics", 0), ("outputs", 1)],
    ),
)
def test_predictions_fetched_in_a_step_are_those_of_its_loss(keras, way, verify):
    """And no device runs the whole batch besides."""
    if way in ("compile", "appended", "assigned") and not has_fetches(keras):
        return
    model = compat.parallelize(dropped(keras))
    kept, keep = kept_by(keras, model.output)
    options = {"fetches": [keep]} if way == "compile" else {}
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    inner = _keras.inner_model(model)
    if way == "metrics":
        if not hasattr(inner, "metrics_tensors"):
            return
        inner.metrics_tensors.append(keep)
        inner.metrics_names.append("kept")
    verified(registry.find("tensorflow1"), model, verify)
    inner._make_train_function()
    function = inner.train_function
    if way == "appended":
        function.fetches.append(keep)
    elif way == "assigned":
        function.fetches = function.fetches + [keep]
    elif way == "outputs":
        if hasattr(function, "_outputs_structure"):
            return  # tf.keras and keras 2.3 themselves take no more outputs
        function.outputs.append(keep)
    for _ in range(2):  # the first one is verified
        with profiler.recorded(v1, output_partition_graphs=True) as runs:
            results = model.train_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
        loss = results[0] if isinstance(results, list) else results
        apart = keras.backend.get_value(kept) - rows_of(ROWS, 2)
        np.testing.assert_allclose(loss, np.mean(np.square(apart)), rtol=1e-5)
    ran = max(runs, key=v1.RunMetadata.ByteSize)
    products = profiler.products(profiler.partitions(ran)).values()
    assert [forward for forward, _ in products] == [2, 2, 2]


@span
def test_fetch_that_is_added_after_the_first_step_and_taken_out_again(keras):
    """As the TensorBoard callback of tf.keras does."""
    model = compat.parallelize(dropped(keras))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    inner = _keras.inner_model(model)
    model.test_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
    function = inner.test_function
    if not hasattr(function, "fetch_callbacks"):
        return
    fetch, values = tf.identity(model.output), []
    function.fetches.append(fetch)
    function.fetch_callbacks[fetch] = values.append
    model.test_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
    function.fetches.remove(fetch)
    function.fetch_callbacks.pop(fetch)
    model.test_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
    (value,) = values
    np.testing.assert_allclose(value, model.predict(rows_of(ROWS)), rtol=1e-5)


@pytest.mark.parametrize("way", ["before", "after"])
def test_fetch_across_rows_is_of_the_whole_batch(keras, way):
    """Also where a trial has the functions made anew."""
    if not has_fetches(keras):
        return
    layer = keras.layers.Lambda(paired, output_shape=(6,), name="pairs")
    inputs = keras.layers.Input(shape=(4,))
    outputs = keras.layers.Dense(2)(layer(keras.layers.Dense(6)(inputs)))
    model = compat.parallelize(keras.models.Model(inputs, outputs))
    kept, keep = kept_by(keras, model.output)
    model.compile("sgd", "mse", fetches=[keep] if way == "before" else [])
    model._make_test_function()
    model._make_train_function()
    if way == "after":
        model.train_function.fetches.append(keep)
    before = model.predict(rows_of(ROWS))
    model.train_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
    np.testing.assert_allclose(keras.backend.get_value(kept), before, rtol=1e-5)
