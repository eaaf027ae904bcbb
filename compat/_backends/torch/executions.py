"""Proof of use: which devices execute operations, as torch's dispatcher reports them.

Nothing here depends on the methods that ``parallelize()`` replaces on a model.
"""

import contextlib
import os
import threading
from typing import Any, ContextManager, Dict, Iterator, List

import torch
from torch.utils import _python_dispatch

from . import profiler
from .graph import call_tensors

_recorders = threading.local()  # ``counters``: see ``_counters``

_BEGINS = torch.ops.profiler._record_function_enter_new.default
_ENDS = torch.ops.profiler._record_function_exit._RecordFunction


class OperationCounter(_python_dispatch.TorchDispatchMode):
    """Counter of the operations that each device executes in this thread.

    The tensors that an operation returns show its GPU. Simulated devices are all the CPU: there, an
    operation belongs to the range that replicas mark for torch's profiler, which the dispatcher
    reports, too.

    Arguments:
        devices: their names.
    """

    def __init__(self, devices):
        super().__init__()
        self.counts = dict.fromkeys(devices, 0)
        self.home = devices[0]
        self.is_simulated = devices[0].startswith("cpu")
        self.calls = 0  # of replicated models
        self._ranges = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: code from torch.compile() runs as compiled."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is _BEGINS:
            self._ranges.append(args[0])
        elif func is _ENDS:
            del self._ranges[-1:]
        else:
            first = next(call_tensors(result), None)
            if first is not None and not first.is_meta:
                self._count(first.device)
        return result

    def _count(self, device):
        name = str(device)
        if self.is_simulated:
            marks = [mark for mark in self._ranges if mark.startswith(profiler.REPLICA)]
            name = marks[-1][len(profiler.REPLICA) :] if marks else self.home
        if name in self.counts:
            self.counts[name] += 1

    def leave(self) -> None:
        """Leave torch's stack of modes, on which others may lie above this one."""
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        places = [place for place, mode in enumerate(stack) if mode is self]
        base = _python_dispatch.TorchDispatchMode
        above = stack[places[0] + 1 :] if places else []
        for mode in above[::-1] + ([self] if places else []):
            base.__exit__(mode, None, None, None)
        for mode in above:
            base.__enter__(mode)


@contextlib.contextmanager
def executed(devices: "List[str]") -> "Iterator[Dict[str, int]]":
    """Return the context of ``Torch.executed()``, for the devices of a model."""
    recorder, counters = OperationCounter(devices), _counters()
    counters.append(recorder)
    recorder.__enter__()
    try:
        yield recorder.counts
    finally:
        counters.remove(recorder)
        recorder.leave()


def _counters():
    """Return the counters of this thread, the innermost last."""
    if not hasattr(_recorders, "counters"):
        _recorders.counters = []
    return _recorders.counters


def begin_call() -> None:
    """Note a call of a replicated model; the second one ends the recording of the first step."""
    for recorder in _counters():
        recorder.calls += 1
        if recorder.calls > 1:
            recorder.leave()


def recorded(devices: "List[str]") -> "ContextManager[Any]":
    """Return a context that counts again, if devices have executed nothing in the first step.

    Arguments:
        devices: those that are about to compute rows.
    """
    for counter in _counters()[-1:]:
        if counter.calls > 1 and not all(counter.counts.get(name) for name in devices):
            return counter
    return contextlib.ExitStack()


def _forget():
    """Record nothing in a process that was forked: a loader's worker, say."""
    for recorder in _counters():
        recorder.leave()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)  # novm
