"""What all methods of a Keras model that is one of several ranks have in common."""

from .. import _patching


class RankedMethod(_patching.InstanceMethod):
    """A method of a model that is one of several ranks."""

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine
