"""Calls of Gluon blocks and of Modules, each of which a usage check observes.

Nothing here depends on the methods that ``parallelize()`` replaces on a model.
"""

import contextlib
import threading

import mxnet as mx

from ..._rows.splitting import unsplit
from ..._runtime import patching


class WatchedBlock:
    """Checks the calls of a block by Gluon's hooks.

    Arguments:
        check: a ``UsageCheck``.
    """

    running = threading.local()  # ``step``: the check of a call in this thread

    def __init__(self, check):
        self.check = check

    @classmethod
    def install_on(cls, block, check):
        """Remove the present hooks; unless ``check`` is None, register others."""
        if "_compat_watched" in vars(block):
            for handle in patching.detach(block, "_compat_watched"):
                handle.detach()
        if check is not None:
            calls = cls(check)
            before = block.register_forward_pre_hook(calls.begin)
            after = block.register_forward_hook(calls.end)
            patching.attach(block, "_compat_watched", (before, after))

    def begin(self, block, args):
        """Begin the check of a call."""
        if unsplit.here() or isinstance(args[0] if args else None, mx.sym.Symbol):
            return  # within another block; or it is being exported
        kind = "train" if mx.autograd.is_training() else "predict"
        self.abandon()
        step = self.check.step(kind, lambda: vars(block).get("forward"), "forward")
        self.running.step = step
        step.__enter__()

    def end(self, block, args, result):
        """End the check of a call."""
        if not unsplit.here():
            self._close(None, None, None)

    @classmethod
    def abandon(cls):
        """End the check of a call that raised an error, after which Gluon calls no hook."""
        cls._close(GeneratorExit, GeneratorExit(), None)

    @classmethod
    def _close(cls, *raised):
        step = getattr(cls.running, "step", None)
        if step is not None:
            cls.running.step = None
            with contextlib.suppress(GeneratorExit):
                step.__exit__(*raised)


class WatchedForward(patching.InstanceMethod):
    """A module's ``forward``, whose calls a ``UsageCheck`` checks."""

    method, watches = "forward", True

    def __init__(self, check):
        super().__init__([])
        self.check = check

    def invoke(self, module, data_batch, is_train=None):
        """Run the module, and check the call."""
        training = module.for_training if is_train is None else is_train
        group = getattr(module, "_exec_group", None)
        with self.check.step("train" if training else "predict", lambda: group, "forward"):
            return self.plain(module)(data_batch, is_train)
