"""TensorFlow 1: what operations of a graph wait for, write, and have in loops."""

import pytest
import tensorflow as tf

from .row_models import (  # noqa: F401  # the fixture
    assert_runs_unsplit,
    layer_of,
    model_with,
    one_and_three,
    three_devices,
    train_both,
    trained,
)


def layer_that_waits(keras, value):
    """Return a layer that outputs its input once a variable has grown by a value."""

    def call(layer, x):
        with tf.control_dependencies([keras.backend.update_add(layer.state, value(x))]):
            return tf.identity(x)

    return layer_of(keras, "waiting", call, state=())


@pytest.mark.parametrize("what", ["steps", "sum"])
def test_write_that_a_call_waits_for_runs_once(keras, what):
    value = {"steps": lambda x: 1.0, "sum": keras.backend.sum}[what]
    models = one_and_three(lambda: model_with(keras, layer_that_waits(keras, value)))
    assert train_both(models) <= 1e-5


def test_write_of_a_call_that_depends_on_rows_runs_unsplit(keras):
    def value(x):
        return tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0))

    models = one_and_three(lambda: model_with(keras, layer_that_waits(keras, value)))
    difference, texts = trained(models)
    assert difference <= 1e-5
    assert_runs_unsplit(texts, models[1], r"waiting\S*", "waiting")


def test_what_a_loss_takes_of_a_loop_is_of_the_whole_batch(keras):
    def call(layer, x):
        def step(count, total, rows):
            return count + 1, total + tf.reduce_sum(rows), 0.5 * rows

        _, total, rows = tf.while_loop(lambda count, *_: count < 3, step, [0, 0.0, x])
        layer.add_loss(0.01 * tf.square(total))
        return rows

    models = one_and_three(lambda: model_with(keras, layer_of(keras, "looping", call)))
    assert train_both(models) <= 1e-5
