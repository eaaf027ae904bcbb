"""TensorFlow 1: gradients that a script defines, by which rows may mix."""

import pytest
import tensorflow as tf

from compat._backends._tensorflow.graph import v1_names
from compat._rows import IN_BETWEEN

from .row_models import assert_runs_unsplit, model_with, one_and_three, three_devices, trained  # noqa: F401  # the fixture

v1 = v1_names(tf)


@pytest.mark.parametrize("kind", ["apart", "mixing", "costly"])
def test_gradients_that_replace_tensorflows(keras, kind):
    """By ``gradient_override_map``, as before there was ``tf.custom_gradient``.

    One that mixes rows is computed once, with its operation; if that is costly, a warning says so.
    """
    name = "CompatTestsReplaced{}".format(kind)

    def gradient(op, upstream):
        result = -0.5 * upstream if kind == "apart" else upstream / (tf.norm(upstream) + 1e-3)
        return [result, None] if kind == "costly" else result

    v1.RegisterGradient(name)(gradient)

    def replaced(x):
        overridden = {"MatMul" if kind == "costly" else "Identity": name}
        with v1.get_default_graph().gradient_override_map(overridden):
            return tf.matmul(x, tf.eye(3)) if kind == "costly" else tf.identity(x)

    def build():
        layer = keras.layers.Lambda(replaced, output_shape=(3,), name="replaced")
        return model_with(keras, layer)

    models = one_and_three(build)
    difference, texts = trained(models)
    assert difference <= 1e-5
    why = (
        "has a custom gradient that needs, or may need, the whole batch, but each device sees only "
        "its shard."
    )
    if kind == "costly":
        assert_runs_unsplit(texts, models[1], r"replaced\S*", "replaced", why, IN_BETWEEN)
    else:
        assert texts == []
