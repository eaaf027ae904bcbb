"""Methods of a Keras model that is one of several ranks."""

from typing import Tuple

from .. import errors
from .._runtime import patching


class RankedMethod(patching.InstanceMethod):
    """A method of a model that is one of several ranks.

    Attributes:
        steps: the kinds of steps that have to call it, of ``usage.KINDS``.
        is_of_keras_steps: whether a custom step may leave it out.
        one_of: the name of a group of methods of which such a step calls one; empty for none.
        is_optional: whether the classes of some versions of Keras have no such method.
    """

    steps: Tuple[str, ...] = ()
    is_of_keras_steps = False
    one_of = ""
    is_optional = False

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine


def named(kind, *names):
    """Return subclasses of a ``RankedMethod`` that do the same under several names."""
    return tuple(type(kind.__name__, (kind,), {"method": name}) for name in names)


def install(model, engine, kinds):
    """Give a model these methods. A second time changes nothing.

    Raises:
        UnsupportedError: its class has no method of such a name, and training depends on it.
    """
    for kind in kinds:
        if hasattr(type(model), kind.method):
            if kind.of(model) is None:
                kind(engine).install(model)
        elif not kind.is_optional:
            raise errors.unsupported(
                "compat",
                f"make a {type(model).__name__} one of several ranks: it has no method "
                f"{kind.method}(), which they depend on",
                "Use a version of Keras that compat is tested with, or one process: "
                "COMPAT_ALONE=1.",
            )
