"""Checks of the calls of torch modules, by torch's hooks.

Nothing here depends on the methods that ``parallelize()`` replaces on a model.
"""

import contextlib
import functools
import sys
import threading
from typing import Any

import torch

from ..._rows.splitting import unsplit
from . import tracing


class _Hook:
    """A hook of a module, which its copies and pickles do not have."""

    def __init__(self, function):
        self.function = function

    @torch.compiler.disable
    def __call__(self, *args):
        self.function(*args)

    def __reduce__(self):
        # A function that does nothing, and does not need compat.
        return getattr, (contextlib.nullcontext(), "__exit__")  # novm


class WatchedCalls:
    """Hooks that check the calls of a module.

    Arguments:
        check: a ``UsageCheck``.
    """

    _watched = torch.utils.weak.WeakIdKeyDictionary()  # module -> the handles of its hooks

    def __init__(self, check):
        self.check = check
        self.running = threading.local()  # ``step``: the one under way in this thread

    @classmethod
    def install_on(cls, module: torch.nn.Module, check: Any) -> None:
        """Remove the present hooks; unless ``check`` is None, register others."""
        for handle in cls._watched.pop(module, ()):
            handle.remove()
        if check is not None:
            calls = cls(check)
            cls._watched[module] = (
                module.register_forward_pre_hook(_Hook(calls.begin), prepend=True),
                module.register_forward_hook(_Hook(calls.end), always_call=True),
            )

    def begin(self, module: torch.nn.Module, args: Any) -> None:
        """Begin the check of a call."""
        if unsplit.here() or tracing.is_traced():
            return
        self.close((GeneratorExit, GeneratorExit(), None))  # an interruption has left it
        kind = "train" if module.training and torch.is_grad_enabled() else "predict"
        step = self.check.step(kind, functools.partial(vars(module).get, "forward"), "forward")
        self.running.step, self.running.raised = step, sys.exc_info()[1]
        step.__enter__()

    def end(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """End the check of a call, which may have raised."""
        if unsplit.here() or tracing.is_traced():
            return
        raised = sys.exc_info()
        self.close((None, None, None) if raised[1] is self.running.raised else raised)

    def close(self, raised: Any) -> None:
        """End the step under way, if there is one, with what ``sys.exc_info()`` returns."""
        step = getattr(self.running, "step", None)
        if step is not None:
            self.running.step = None
            step.__exit__(*raised)
