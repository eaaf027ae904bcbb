"""TensorFlow 1: functions of a model on several devices, what they are fed, and their errors."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow.graph import v1_names
from compat.testing import slow, span

from .. import graph_cases
from .row_models import one_and_three, rows_of, three_devices, warned  # noqa: F401  # the fixture

v1 = v1_names(tf)


@pytest.mark.parametrize(
    "kind",
    ["function", pytest.param("object", marks=slow), pytest.param("partial", marks=slow)],
)
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "tensorflow1", kind)


@span
def test_inputs_that_are_variables_stay_on_one_device(keras):
    try:
        inputs = keras.layers.Input(tensor=keras.backend.variable(rows_of(3)))
    except (AttributeError, TypeError, ValueError):
        return  # by Keras itself
    model = keras.models.Model(inputs, keras.layers.Dense(2)(inputs))
    if isinstance(model.inputs[0], tf.Tensor):
        return  # Keras has taken its value
    assert warned(lambda: compat.parallelize(model)) == [
        "parallelize() leaves model {!r} on /device:CPU:0: an input of it is a variable, so its "
        "batches cannot be split. The results are those of one device, and so is the speed.".format(
            model.name
        )
    ]
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(None, rows_of(3, 2)))


@span
def test_errors_of_tensorflow_tell_of_the_divided_batch(keras):
    """What takes a whole batch of 13 rows alone fails on a part of it."""

    def checked(x):
        whole = v1.Assert(tf.equal(tf.shape(x)[0] % 13, 0), ["not 13 rows"])
        with tf.control_dependencies([whole]):
            return tf.identity(x)

    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    model = keras.models.Model(inputs, layers.Lambda(checked, output_shape=(4,))(inputs))
    model = compat.parallelize(model)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.predict_on_batch(rows_of(13))
    assert "replica_" in str(raised.value)
    assert (
        str(raised.value)
        .rstrip()
        .endswith(
            "\n\nparallelize() runs the operations named replica_... on a shard of the batch. An "
            "operation that needs the whole batch, or its size, fails there: use sizes of its "
            "inputs, such as K.shape(x)[0], or one device: parallelize(model, gpus=1)."
        )
    )
    assert isinstance(raised.value.__cause__, tf.errors.InvalidArgumentError)
    with pytest.raises(Exception) as raised:
        model.predict_on_batch(rows_of(13, 5))
    assert "parallelize" not in str(raised.value)
