"""TensorFlow 2: the trial of a step of a rank, by itself."""

import types

import numpy as np
import pytest

import compat
from compat._backends.tensorflow2 import ranked_step_trial
from compat._ranks import batch_parts
from compat.testing import DEVICES, keras_under_test

from ..messages import told
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

    half, _ = batch_parts.in_two(len(ROWS), 4)
    with pytest.raises(RuntimeError):
        ranked_step_trial._exchanged(Step(), model, (ROWS, None), half)
    for weight, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize("lines", [(), ("script.py, line 1",)])
def test_gradients_that_overflow_prove_nothing(monkeypatch, lines):
    """As those of float16 do in the first steps of a LossScaleOptimizer."""
    exchanged = [[np.array([np.inf, 1.0])]]
    monkeypatch.setattr(ranked_step_trial, "_exchanged", lambda *arguments: exchanged)
    step = types.SimpleNamespace(unproven=lines, lines=lines)
    with told() as texts:
        ranked_step_trial.check(step, types.SimpleNamespace(name="model"), (ROWS, None))
    assert not texts
