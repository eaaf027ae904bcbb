"""Keras 2.3 on TensorFlow 2: it is configured, runs on one device, and says so for several.

Its models lie in a graph of its own, from which TensorFlow lifts what each function needs.
"""

import numpy as np
import pytest

import compat
from compat.testing import CASES, BackendContract, span

from ..messages import refusal


class TestKeras23(BackendContract):
    backend = "tensorflow2"

    @span
    @pytest.mark.row("multi_gpu_model and make_parallel: a clear error")
    def test_several_devices_are_refused(self, keras):
        model = self.compiled(keras, "dense")
        before = set(vars(model))
        for call in (compat.parallelize, compat.multi_gpu_model, compat.make_parallel):
            assert refusal(compat.UnsupportedError, call, model, 3) == (
                "tensorflow2 cannot run a model of keras 2.3.1 on several devices. Use tf.keras, "
                "or Keras 3, or train on one device, with parallelize(model, gpus=1)."
            )
        assert set(vars(model)) == before

    @span
    def test_one_device_leaves_the_model_alone(self, keras):
        plain, model = self.compiled(keras, "dense"), self.compiled(keras, "dense")
        assert compat.parallelize(model, gpus=1) is model
        inputs, targets = CASES["dense"].data(45)
        for each in (plain, model):
            each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
        for expected, found in zip(plain.get_weights(), model.get_weights()):
            np.testing.assert_array_equal(expected, found)
