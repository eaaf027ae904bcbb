"""TensorFlow 2 in v1 mode, after ``tf.compat.v1.disable_v2_behavior()``: what TensorFlow 1 passes.

Only these tests are collected where ``COMPAT_TEST_KERAS`` is the Keras of that mode.
"""

import pytest

from .test_tensorflow1 import TestTensorFlow1 as GraphContract


@pytest.mark.row("TensorFlow 2 in v1 mode")
class TestV1Mode(GraphContract):
    backend = "tensorflow2"
    # TensorFlow 2.15 writes what ends in ".weights.h5" in Keras 3's way, which fails in v1 mode.
    weights_extension = ".h5"
    prelude = "import tensorflow\ntensorflow.compat.v1.disable_v2_behavior()\n"

    def name(self, device):
        """/device:CPU:1 is /cpu:1."""
        return "/" + device[len("/device:") :].lower()


del GraphContract  # its own tests are TensorFlow 1's
