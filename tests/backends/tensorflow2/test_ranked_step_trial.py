"""TensorFlow 2: the trial of a step of a rank, by itself."""

import types

import numpy as np
import pytest

import compat
from compat._backends.tensorflow2 import ranked_step_trial
from compat.testing import DEVICES, keras_under_test

from .test_contract import ROWS, TRAIN_STEP


@pytest.mark.skipif(not TRAIN_STEP, reason="ranks train by the model's train_step")
def test_a_step_that_fails_in_a_trial_leaves_no_trace():
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    model = keras.models.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    before = model.get_weights()

    class Step:
        engine = types.SimpleNamespace(noting=None, called=None)

        def invoke(self, model, data):
            model.set_weights([weight + 1 for weight in before])
            raise RuntimeError("a half is not enough")

    with pytest.raises(RuntimeError):
        ranked_step_trial._exchanged(Step(), model, (ROWS, None), slice(4), 0.5)
    for weight, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, other)
