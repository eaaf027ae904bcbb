"""Counts of the operations that MXNet executed on each context, by the contexts of results.

They prove that contexts are used: nothing here depends on the methods that ``parallelize()``
replaces on a model.
"""

import contextlib
import threading
from typing import Any, Dict

import mxnet as mx

from ..._runtime import patching
from .arrays import context_of
from .invocations import Interception, handle_of
from .thread_state import caller

_lock = threading.Lock()


class ContextCounter:
    """Counts the operations that each context executes in one thread, and in those of replicas.

    Arguments:
        devices: the names of the contexts.
        listener: the ``_Listener`` that reports operations to this counter.
    """

    def __init__(self, devices, listener):
        self.counts = dict.fromkeys(devices, 0)
        self._listener = listener
        self._thread = caller()
        self._executors: "Dict[int, Any]" = {}  # by id: those that have run

    def note(self, arrays):
        """Count an operation that has these results."""
        if caller() == self._thread:
            for name in {str(context_of(array)) for array in arrays}:
                if name in self.counts:
                    self.counts[name] += 1

    def note_graph(self, executor):
        """Count a run of an executor. Where one runs again, the first step is over."""
        if caller() == self._thread:
            if id(executor) in self._executors and all(self.counts.values()):
                self._listener.remove(self)
            else:
                self._executors[id(executor)] = executor
                self.note(executor.outputs)


class _Listener:
    """Patches of MXNet that report operations to counters, as long as there are any."""

    def __init__(self, listen):
        self.listen = listen
        self.counters, self._patches = [], []

    def add(self, counter):
        with _lock:
            self.counters = self.counters + [counter]
            if not self._patches:
                self._patches = self.listen(self)

    def remove(self, counter):
        with _lock:
            self.counters = [other for other in self.counters if other is not counter]
            while self._patches and not self.counters:
                self._patches.pop().take_back()


@contextlib.contextmanager
def executed(model, devices):
    """Count the operations that each device executes, as ``MXNet.executed()`` has it."""
    listener = _OPERATIONS if isinstance(model, mx.gluon.Block) else _EXECUTORS
    counter = ContextCounter(devices, listener)
    listener.add(counter)
    try:
        yield counter.counts
    finally:
        listener.remove(counter)


def _operations(listener):
    """Return patches that report Gluon's imperative operations and compiled blocks."""
    cached, copy = mx.nd.CachedOp, handle_of("_copyto")
    call = cached.__call__

    def note(result):
        for counter in listener.counters:
            counter.note(result if isinstance(result, (list, tuple)) else [result])

    def invoked(invoke, handle, inputs, *args, **kwargs):
        result = invoke(handle, inputs, *args, **kwargs)
        if inputs and handle != copy:  # creating or copying an array proves nothing
            note(result)
        return result

    def called(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        note(result)
        return result

    return [Interception(invoked), patching.Patch(cached, "__call__", called)]


def _executors(listener):
    """Return patches that report executors of graphs, of keras-mxnet and ``Module``."""
    forward = mx.executor.Executor.forward

    def run(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        for counter in listener.counters:
            counter.note_graph(self)
        return result

    return [patching.Patch(mx.executor.Executor, "forward", run)]


_OPERATIONS, _EXECUTORS = _Listener(_operations), _Listener(_executors)
