"""Proof of use: on which contexts MXNet has executed operations, as it reports them of the results.

Nothing here depends on the methods that ``parallelize()`` replaces on a model.
"""

import contextlib
import ctypes
import threading
from _thread import get_ident

import mxnet as mx

from ..._rows import split_rows
from ..._runtime import patching
from .merging import context_of

_lock = threading.Lock()


class ContextCounter:
    """Counts the operations that each context executes in one thread.

    Arguments:
        devices: the names of the contexts.
        listener: reports them.
    """

    def __init__(self, devices, listener):
        self.counts = dict.fromkeys(devices, 0)
        self._listener = listener
        self._thread = get_ident()
        self._executors = {}  # type: dict  # by id: those that have run

    def note(self, arrays):
        """Count an operation that has these results."""
        if get_ident() == self._thread:
            for name in {str(context_of(array)) for array in arrays}:
                if name in self.counts:
                    self.counts[name] += 1

    def note_graph(self, executor):
        """Count a run of an executor. Where one runs again, the first step is over."""
        if get_ident() == self._thread:
            if id(executor) in self._executors and all(self.counts.values()):
                self._listener.remove(self)
            else:
                self._executors[id(executor)] = executor
                self.note(executor.outputs)


class _Listener:
    """Methods of MXNet's own that report what they do to counters, as long as there are any."""

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
            self.counters = [each for each in self.counters if each is not counter]
            while self._patches and not self.counters:
                self._patches.pop().take_back()


@contextlib.contextmanager
def executed(model, devices):
    """What ``MXNet.executed()`` returns, for the devices of a model."""
    listener = _OPERATIONS if isinstance(model, mx.gluon.Block) else _EXECUTORS
    counter = ContextCounter(devices, listener)
    listener.add(counter)
    try:
        yield counter.counts
    finally:
        listener.remove(counter)


def _operations(listener):
    """Of Gluon: operations that run one by one, and blocks that are compiled."""
    register, cached = mx.nd.register, mx.nd.CachedOp
    invoke, call, copy = register._imperative_invoke, cached.__call__, _handle("_copyto")

    def note(result):
        for counter in listener.counters:
            counter.note(result if isinstance(result, (list, tuple)) else [result])

    def invoked(handle, inputs, *args, **kwargs):
        result = invoke(handle, inputs, *args, **kwargs)
        if inputs and handle != copy:  # what only makes an array, or brings one, is no proof
            note(result)
        return result

    def called(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        note(result)
        return result

    return [
        patching.Patch(register, "_imperative_invoke", invoked),
        patching.Patch(cached, "__call__", called),
    ]


def _executors(listener):
    """Of keras-mxnet and ``Module``: executors of graphs."""
    forward = mx.executor.Executor.forward

    def run(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        for counter in listener.counters:
            counter.note_graph(self)
        return result

    return [patching.Patch(mx.executor.Executor, "forward", run)]


_OPERATIONS, _EXECUTORS = _Listener(_operations), _Listener(_executors)


def _handle(operation):
    """The number by which MXNet knows an operation."""
    handle = ctypes.c_void_p()
    name = mx.base.c_str(operation)
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(name, ctypes.byref(handle)))
    return handle.value


# Calls of models that are no Keras models ---------------------------------------------------------


class WatchedBlock:
    """Has the calls of a block checked, from hooks of Gluon's own.

    Arguments:
        check: a ``UsageCheck``.
    """

    running = threading.local()  # ``step``: the one that is checked in this thread

    def __init__(self, check):
        self.check = check

    @classmethod
    def install_on(cls, block, check):
        """Take the present hooks away; unless ``check`` is None, register others."""
        for handle in vars(block).pop("_compat_watched", ()):
            handle.detach()
        if check is not None:
            calls = cls(check)
            vars(block)["_compat_watched"] = (
                block.register_forward_pre_hook(calls.begin),
                block.register_forward_hook(calls.end),
            )

    def begin(self, block, args):
        if split_rows.runs_undivided() or isinstance(args[0] if args else None, mx.sym.Symbol):
            return  # within another block; or it is being exported
        kind = "train" if mx.autograd.is_training() else "predict"
        self.abandon()
        step = self.check.step(kind, lambda: vars(block).get("forward"), "forward")
        self.running.step = step
        step.__enter__()

    def end(self, block, args, result):
        if not split_rows.runs_undivided():
            self._close(None, None, None)

    @classmethod
    def abandon(cls):
        """End the check of a call that has ended with an error: then Gluon calls no hook."""
        cls._close(GeneratorExit, GeneratorExit(), None)

    @classmethod
    def _close(cls, *raised):
        step = getattr(cls.running, "step", None)
        if step is not None:
            cls.running.step = None
            with contextlib.suppress(GeneratorExit):
                step.__exit__(*raised)


class WatchedForward(patching.InstanceMethod):
    """A module's ``forward``, which a ``UsageCheck`` checks."""

    method, watches = "forward", True

    def __init__(self, check):
        super().__init__([])
        self.check = check

    def invoke(self, module, data_batch, is_train=None):
        training = module.for_training if is_train is None else is_train
        group = getattr(module, "_exec_group", None)
        with self.check.step("train" if training else "predict", lambda: group, "forward"):
            return self.plain(module)(data_batch, is_train)
