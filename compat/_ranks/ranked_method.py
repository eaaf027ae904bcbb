"""What all methods of a Keras model that is one of several ranks have in common."""

from .._runtime import patching


class RankedMethod(patching.InstanceMethod):
    """A method of a model that is one of several ranks."""

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine


def named(kind, *names):
    """Subclasses of a kind of method that does the same under each of these names."""
    return tuple(type(kind.__name__, (kind,), {"method": name}) for name in names)


def install(model, engine, kinds):
    """Give a model those of these methods that its class has. A second time changes nothing."""
    for kind in kinds:
        if hasattr(type(model), kind.method) and kind.of(model) is None:
            kind(engine).install(model)
