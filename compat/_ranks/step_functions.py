"""Functions that a step has to call in place of a framework's, for as long as it runs."""

import contextlib
import functools
import types

from .._runtime import patching


@contextlib.contextmanager
def replaced(engine, owner, is_due=bool, **functions):
    """Within, which is a step, attributes of ``owner`` are these functions.

    What the step has to call and has not goes to ``engine.unreached``, for a ``RanksCheck``.

    Arguments:
        is_due: called with the names of the functions that the step has called; returns whether it
            has to call all of them. By default that is so if it calls any.
    """
    called = {}  # type: dict

    def noting(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            called[name] = None
            return function(*args, **kwargs)

        return call

    with patching.replaced(owner, **{name: noting(name, f) for name, f in functions.items()}):
        yield
    if engine is not None and is_due(called):
        kind = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
        missed = [name for name in functions if name not in called]
        engine.unreached.update((f"{kind.__name__}.{name}", None) for name in missed)


def always(called):
    """Return True: for functions that each step has to call."""
    return True
