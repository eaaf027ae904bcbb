"""Proof of use: which devices execute operations, as the functions that Theano calls tell.

All of Theano's functions are called through one method. While a step is recorded it notes which
they are. On GPUs the values that a function holds and returns tell where it ran; simulated devices
are all the CPU, and have functions of their own.
"""

import contextlib
import threading
from _thread import get_ident

from theano.compile.function_module import Function

from ..._runtime import patching

_lock = threading.Lock()
_recorders = []  # type: list  # those of all threads
_patches = []  # type: list  # one, while there are any

# Which of a compiled function's operations are the products of layers; a loop has its own. On GPUs
# their names begin with Gpu.
PRODUCTS = (
    "Dot", "Dot22", "Dot22Scalar", "Gemm", "Gemv", "CGemv", "Ger", "CGer", "Scan",
    "CorrMM", "CorrMM_gradWeights", "CorrMM_gradInputs", "AbstractConv2d",
    "AbstractConv2d_gradWeights", "AbstractConv2d_gradInputs",
    "DnnConv", "DnnConvGradW", "DnnConvGradI",
)  # fmt: skip


class CallRecorder:
    """Counts of the operations that each device executes in this thread, in the first step.

    Arguments:
        replicas: the model's ``Replicas``.
    """

    def __init__(self, replicas):
        self.replicas, self.thread = replicas, get_ident()
        self.counts = dict.fromkeys([device.name for device in replicas.devices], 0)
        self._called = set()  # type: set  # what a step calls once

    def note(self, function, results):
        """Note a call, of whatever function of Theano's."""
        home, *others = self.replicas.devices
        device = next((each for each in others if function in each.functions), home)
        # Trials call what goes forward on the first device.
        if device is not home or function in self.replicas.heads:
            if function in self._called:
                return self.end()  # the second step
            self._called.add(function)
        for name in _gpus(function, results) or [device.name]:
            if name in self.counts:
                self.counts[name] += len(function.maker.fgraph.apply_nodes)

    def begin(self):
        with _lock:
            if not _recorders:
                _patches.append(patching.Patch(Function, "__call__", _recording(Function.__call__)))
            _recorders.append(self)

    def end(self):
        with _lock:
            if self in _recorders:
                _recorders.remove(self)
                if not _recorders:
                    _patches.pop().take_back()


def _recording(call):
    """Return a replacement of the method by which all functions are called."""

    def calling(function, *args, **kwargs):
        results = call(function, *args, **kwargs)
        for recorder in [each for each in _recorders if each.thread == get_ident()]:
            recorder.note(function, results)
        return results

    return calling


def _gpus(function, results):
    """Return the GPUs on which a function's own values lie, and what it has returned."""
    values = [container.storage[0] for container in function.input_storage]
    values += results if isinstance(results, list) else [results]
    return {value.context.dev for value in values if hasattr(value, "context")}


@contextlib.contextmanager
def executed(replicas):
    """Record the first step within a block; give the numbers of operations, by device."""
    recorder = CallRecorder(replicas)
    recorder.begin()
    try:
        yield recorder.counts
    finally:
        recorder.end()


def products(function):
    """Return the nodes of a compiled function's graph that are products of layers."""
    nodes = function.maker.fgraph.apply_nodes
    return [node for node in nodes if type(node.op).__name__.replace("Gpu", "") in PRODUCTS]
