"""TensorFlow 1: which variables are resource variables, and what these are in losses."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow.graph import v1_names
from compat._configuration import registry
from compat.testing import CASES, in_span, initialise, span

from ..verification_cases import verified
from .row_models import rows_of, three_devices  # noqa: F401  # the fixture

v1 = v1_names(tf)

#: How variables are made whose shape may change, each with the one argument for it.
MADE = {
    "by name": lambda value: v1.Variable(value, validate_shape=False, trainable=False),
    "by place": lambda value: v1.Variable(value, False, None, False),
    "get_variable": lambda value: v1.get_variable(
        "seen", initializer=value, validate_shape=False, trainable=False
    ),
}


@pytest.mark.parametrize(
    "made, verify",
    in_span(
        itertools.product(sorted(MADE), [0, 1]),
        [("by name", 1), ("by place", 1), ("get_variable", 0)],
    ),
)
def test_metric_that_keeps_all_rows(keras, made, verify):
    """Its variable grows by the rows of each batch."""

    def metric_of(name):
        def seen(expected, found):
            with v1.variable_scope(None, name):  # tf.keras 1.13 calls it twice
                kept = MADE[made](tf.zeros([0, 2]))
            keras.backend.get_session().run(kept.initializer)
            rows = tf.concat([kept.value(), found], 0)
            rows.set_shape([None, 2])
            grown = v1.assign(kept, rows, validate_shape=False)
            return tf.reduce_mean(tf.square(grown)) + tf.cast(tf.shape(grown)[0], tf.float32)

        return seen

    results = []
    for devices in (1, 3):
        model = initialise(keras.models.Sequential([keras.layers.Dense(2, input_shape=(4,))]))
        if devices > 1:
            compat.parallelize(model)
        model.compile("sgd", "mse", metrics=[metric_of(f"kept_{devices}")])
        verified(registry.find("tensorflow1"), model, verify if devices > 1 else 0)
        results.append([model.train_on_batch(rows_of(n), rows_of(n, 2)) for n in (7, 5)])
    np.testing.assert_allclose(*results, rtol=1e-5)
    assert [int(value) for _, value in results[1]] == [7, 12]


def test_resource_variables_where_the_shape_stays_or_a_script_says_so(keras):
    def is_resource(variable):
        return hasattr(variable, "handle")

    assert is_resource(v1.Variable(0.0)) and is_resource(v1.get_variable("plain", shape=[2]))
    assert not is_resource(v1.Variable(0.0, validate_shape=False))
    if hasattr(v1, "enable_resource_variables"):
        asked = v1.Variable(0.0, validate_shape=False, use_resource=True)
        with v1.variable_scope("asked", use_resource=True):
            within = v1.get_variable("within", initializer=0.0, validate_shape=False)
        assert is_resource(asked) and is_resource(within)


@span
def test_losses_that_begin_as_a_variable(keras):
    """As in Keras' examples deep_dream and neural_style_transfer."""
    K = keras.backend
    model = initialise(CASES["dense"].build(keras))
    loss, coefficient = K.variable(0.0), K.variable(3.0)
    before = loss
    loss += K.sum(K.square(model.output))
    loss -= 1.0
    loss *= coefficient
    loss /= 2.0
    assert loss is not before and isinstance(loss, tf.Tensor)
    gradients = K.gradients(loss, model.input)
    function = K.function([model.input], [loss] + gradients)
    batch, _ = CASES["dense"].data(13)
    outputs = model.predict(batch)
    value, gradient = function([batch])
    np.testing.assert_allclose(value, 1.5 * (np.square(outputs).sum() - 1), rtol=1e-5)
    assert np.shape(gradient) == batch.shape and np.abs(gradient).max() > 1e-4
    assert K.get_value(before) == 0.0
