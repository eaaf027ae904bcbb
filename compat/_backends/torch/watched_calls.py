"""Calls of torch modules, checked by hooks of torch's own.

Nothing here depends on the methods that ``parallelize()`` replaces on a model.
"""

import contextlib
import functools
import sys
import threading

import torch

from ..._rows.splitting import unsplit
from . import tracing


class _Hook:
    """A hook of one of torch's modules, which copies and pickles of the module do without."""

    def __init__(self, function):
        self.function = function

    @torch.compiler.disable
    def __call__(self, *given):
        self.function(*given)

    def __reduce__(self):
        # What does nothing, and needs no compat.
        return getattr, (contextlib.nullcontext(), "__exit__")  # novm


class WatchedCalls:
    """Checks of the calls of a module, from hooks of torch's own.

    Arguments:
        check: a ``UsageCheck``.
    """

    _watched = torch.utils.weak.WeakIdKeyDictionary()  # module -> its hooks' handles

    def __init__(self, check):
        self.check = check
        self.running = threading.local()  # ``step``: the one that is checked in this thread

    @classmethod
    def install_on(cls, module, check):
        """Take the present hooks away; unless ``check`` is None, register others."""
        for handle in cls._watched.pop(module, ()):
            handle.remove()
        if check is not None:
            calls = cls(check)
            cls._watched[module] = (
                module.register_forward_pre_hook(_Hook(calls.begin), prepend=True),
                module.register_forward_hook(_Hook(calls.end), always_call=True),
            )

    def begin(self, module, args):
        if unsplit.here() or tracing.is_traced():
            return
        self.close((GeneratorExit, GeneratorExit(), None))  # an interruption has left it
        kind = "train" if module.training and torch.is_grad_enabled() else "predict"
        step = self.check.step(kind, functools.partial(vars(module).get, "forward"), "forward")
        self.running.step, self.running.raised = step, sys.exc_info()[1]
        step.__enter__()

    def end(self, module, args, result):
        if unsplit.here() or tracing.is_traced():
            return
        raised = sys.exc_info()
        self.close((None, None, None) if raised[1] is self.running.raised else raised)

    def close(self, raised):
        step = getattr(self.running, "step", None)
        if step is not None:
            self.running.step = None
            step.__exit__(*raised)
