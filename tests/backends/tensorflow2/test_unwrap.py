"""Files of wrapped models on TensorFlow 2; ``COMPAT_TEST_KERAS`` chooses the Keras."""

from ..unwrapping import Unwrapping


class TestUnwrap(Unwrapping):
    pass
