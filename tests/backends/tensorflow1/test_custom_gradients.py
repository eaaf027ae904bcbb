"""TensorFlow 1: gradients that a script defines, by which rows may mix."""

import pytest
import tensorflow as tf

from compat._backends._tensorflow.graph import v1_names

from .row_models import assert_runs_unsplit, model_with, one_and_three, three_devices, trained  # noqa: F401  # the fixture

v1 = v1_names(tf)


@pytest.mark.parametrize("mixes", [True, False])
def test_gradients_that_replace_tensorflows(keras, mixes):
    """By ``gradient_override_map``, as before there was ``tf.custom_gradient``."""
    name = "CompatTestsReplaced{}".format(mixes)
    v1.RegisterGradient(name)(lambda op, g: g / (tf.norm(g) + 1e-3) if mixes else -0.5 * g)

    def identity(x):
        with v1.get_default_graph().gradient_override_map({"Identity": name}):
            return tf.identity(x)

    def build():
        layer = keras.layers.Lambda(identity, output_shape=(3,), name="replaced")
        return model_with(keras, layer)

    models = one_and_three(build)
    difference, texts = trained(models)
    assert difference <= 1e-5
    why = (
        "has a custom gradient that needs, or may need, the whole batch, but each device sees only "
        "its shard."
    )
    if mixes:
        assert_runs_unsplit(texts, models[1], r"replaced\S*", "replaced", why)
    else:
        assert texts == []
