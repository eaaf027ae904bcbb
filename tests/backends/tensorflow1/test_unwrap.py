"""Files of wrapped models on TensorFlow 1; ``COMPAT_TEST_KERAS`` chooses the Keras."""

from ..unwrapping import Unwrapping


class TestUnwrap(Unwrapping):
    damaged = 10  # by the same code as on TensorFlow 2
