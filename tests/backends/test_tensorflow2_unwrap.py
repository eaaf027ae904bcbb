"""Files of wrapped models on TensorFlow 2; ``COMPAT_TEST_KERAS`` chooses the Keras."""

from .test_tensorflow2 import KERAS3

if not KERAS3:  # whose files are others, and which had no multi_gpu_model
    from .unwrapping import Unwrapping

    class TestUnwrap(Unwrapping):
        pass
