"""Proof of use: which devices executed operations, by the functions that Theano has called.

All of Theano's functions are called through one method, which records them while a step is
recorded. On GPUs the values that a function holds and returns show where it ran; simulated devices
are all the CPU, and are distinguished by their functions.
"""

import contextlib
import threading
from _thread import get_ident
from typing import Any, Dict, Iterator, List, Set

from theano.compile.function_module import Function

from ..._runtime import patching

_lock = threading.Lock()
_recorders: "List[CallRecorder]" = []  # of all threads
_patches: "List[patching.Patch]" = []  # one, while there are any

# Operations of a compiled function that are products of layers, or loops, which contain products.
# On GPUs their names begin with Gpu.
PRODUCTS = (
    "Dot", "Dot22", "Dot22Scalar", "Gemm", "Gemv", "CGemv", "Ger", "CGer", "Scan",
    "CorrMM", "CorrMM_gradWeights", "CorrMM_gradInputs", "AbstractConv2d",
    "AbstractConv2d_gradWeights", "AbstractConv2d_gradInputs",
    "DnnConv", "DnnConvGradW", "DnnConvGradI",
)  # fmt: skip


class CallRecorder:
    """Counter of the operations that each device executes in this thread, in the first step.

    Arguments:
        replicas: the model's ``Replicas``.
    """

    def __init__(self, replicas):
        self.replicas, self.thread = replicas, get_ident()
        self.counts = dict.fromkeys([device.name for device in replicas.devices], 0)
        self._called: "Set[Any]" = set()  # functions that a step calls once

    def note(self, function: "Any", results: "Any") -> None:
        """Count the operations of a call, of whichever function of Theano."""
        home, *others = self.replicas.devices
        device = next((other for other in others if function in other.functions), home)
        # Trials call the first device's functions of the forward pass.
        if device is not home or function in self.replicas.heads:
            if function in self._called:
                return self.end()  # the second step
            self._called.add(function)
        for name in _gpus(function, results) or [device.name]:
            if name in self.counts:
                self.counts[name] += len(function.maker.fgraph.apply_nodes)

    def begin(self) -> None:
        """Start to record."""
        with _lock:
            if not _recorders:
                _patches.append(patching.Patch(Function, "__call__", _recording(Function.__call__)))
            _recorders.append(self)

    def end(self) -> None:
        """Stop recording, if it has not stopped."""
        with _lock:
            if self in _recorders:
                _recorders.remove(self)
                if not _recorders:
                    _patches.pop().take_back()


def _recording(call):
    """Return a replacement of the method by which all functions are called."""

    def calling(function, *args, **kwargs):
        results = call(function, *args, **kwargs)
        for recorder in [r for r in _recorders if r.thread == get_ident()]:
            recorder.note(function, results)
        return results

    return calling


def _gpus(function, results):
    """Return the GPUs on which the values lie that a function holds and has returned."""
    values = [container.storage[0] for container in function.input_storage]
    values += results if isinstance(results, list) else [results]
    return {value.context.dev for value in values if hasattr(value, "context")}


@contextlib.contextmanager
def executed(replicas: "Any") -> "Iterator[Dict[str, int]]":
    """Record the first step within a block; yield the numbers of operations by device."""
    recorder = CallRecorder(replicas)
    recorder.begin()
    try:
        yield recorder.counts
    finally:
        recorder.end()


def products(function: "Any") -> "List[Any]":
    """Return the nodes of a compiled function's graph that are products of layers."""
    nodes = function.maker.fgraph.apply_nodes
    return [node for node in nodes if type(node.op).__name__.replace("Gpu", "") in PRODUCTS]
