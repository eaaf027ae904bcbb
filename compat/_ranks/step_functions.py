"""Functions that replace a framework's while a step runs, and that the step has to call."""

import contextlib
import functools
import types
from typing import Dict

from .._runtime import patching


@contextlib.contextmanager
def replaced(engine, owner, is_due=bool, **functions):
    """Replace attributes of ``owner`` by functions while a step runs within.

    Those that the step has to call and does not call are put into ``engine.unreached``, for a
    ``RanksCheck``.

    Arguments:
        engine: that of the ranks, or None.
        owner: a module, a class or an instance.
        is_due: a function of the names of the functions that the step has called, which returns
            whether it has to call all of them. By default it has if it calls any.
        **functions: by the names of the attributes.
    """
    called: Dict[str, None] = {}

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
    """Return True, the ``is_due`` of functions that each step has to call."""
    return True
