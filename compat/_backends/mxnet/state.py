"""State of a Gluon block: copies of parameters for the replicas, and running statistics.

A parameter stays on the first context, with one gradient. Within a replica on another context its
data are a copy there, made from the copy on the context before. Autograd records the copying, so
the backward pass adds each replica's gradients to those of its neighbour, and in the end to the
first one's: code that reads or changes them gets those of the batch.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx

from ... import errors
from ..._rows import Fallback, Reason
from ..._runtime import patching
from . import rules
from .arrays import are_equal, context_of, is_numpy, leaves
from .comparison import differing
from .synchronization import wait_for_copies

_running = threading.local()  # ``replica``: its ``Copies`` and its number

#: By running statistic that replicas have changed separately: a function that unites them.
pending: "weakref.WeakKeyDictionary[Any, Callable[[], None]]" = weakref.WeakKeyDictionary()

_passes = [0]  # backward passes that this process has begun


class _Sent:
    """Values of a parameter that copies of it have.

    Arguments:
        held: the parameter's array, of which a copy is kept beside it.

    Attributes:
        replicas: the numbers of the replicas whose copy has them.
    """

    def __init__(self, held):
        self.values, self.replicas = held.copy(), set()


class Copies:
    """The copies of parameters on all contexts, of the replicas of one block.

    Where gradients are recorded, or where the replicas may set a parameter, it is copied in each
    call. Other calls copy it only if its values are not those that were copied last: all that a
    script can do to a parameter changes its values.

    Arguments:
        contexts: the replicas'; parameters stay on the first one.
    """

    def __init__(self, contexts):
        self.contexts = contexts
        # By parameter, and by replica: the memory of its copy.
        self._buffers: "Any" = weakref.WeakKeyDictionary()
        self._sent: "Any" = weakref.WeakKeyDictionary()  # by parameter whose copies are kept
        self.begin()

    def __reduce__(self):  # a copy of the block has other parameters
        return Copies, (self.contexts,)

    def begin(self, states=(), replicas=(), statistics=()):
        """Begin a call with the current values.

        Arguments:
            states: the parameters that the replicas may set.
            replicas: the numbers of the replicas that run.
            statistics: the parameters that the backward pass sets.
        """
        self.recording, self.training = mx.autograd.is_recording(), mx.autograd.is_training()
        self._arrays: "Dict[Tuple[Any, int], Any]" = {}  # by parameter and replica
        self.before: "Dict[Any, Any]" = {}  # by parameter that is set: its value before the call
        self._after: "Dict[Any, Any]" = {}  # likewise after it
        self._guarded: "Dict[Any, Any]" = {}  # values of parameters that should not be set
        if replicas and not self.recording:
            self._discard_changed()
        for parameter in states:
            self.keep(parameter)
        for parameter in dict.fromkeys([*statistics, *self._buffers]) if replicas else ():
            # Before any replica runs, so that none begins with values that another has set.
            for index in replicas if parameter._data is not None else ():
                self.array(parameter, index)
        if replicas and self.recording:
            wait_for_copies([self.array(parameter, replicas[-1]) for parameter in statistics])

    def _discard_changed(self):
        """Discard what was sent of parameters that have other values now."""
        sent = [(p, sent) for p, sent in self._sent.items() if p._data is not None]
        pairs = [(parameter._data[0], sent.values) for parameter, sent in sent]
        for number in differing(pairs):
            del self._sent[sent[number][0]]

    def array(self, parameter: "Any", index: int) -> "Any":
        """Return a parameter's array for a replica."""
        held = parameter._data[0]
        if context_of(held) == self.contexts[index]:
            return held
        key = parameter, index
        if key not in self._arrays:
            self._arrays[key] = self._copied(parameter, index, held)
        return self._arrays[key]

    def _copied(self, parameter, index, held):
        buffers = self._buffers.setdefault(parameter, {})
        buffer = buffers.get(index)
        if buffer is None or buffer.shape != held.shape or buffer.dtype != held.dtype:
            context = self.contexts[index]
            buffer = mx.nd.zeros(held.shape, context, held.dtype, stype=held.stype)
            buffers[index] = buffer
        array = buffer.detach()  # the same memory, which autograd has not recorded yet
        if self._is_constant(parameter):
            if parameter not in self._sent:
                self._sent[parameter] = _Sent(held)
            replicas = self._sent[parameter].replicas
        else:
            self._sent.pop(parameter, None)
            replicas = set()
        if index not in replicas:
            self._receive(parameter, index, array)
            replicas.add(index)
        return array.as_np_ndarray() if is_numpy(held) else array

    def _is_constant(self, parameter):
        """Return whether replicas only read a parameter in this call, without a gradient."""
        is_set = parameter in self.before or (parameter.grad_req == "null" and self.training)
        return not (self.recording or is_set) and parameter._data[0].stype == "default"

    def _receive(self, parameter, index, array):
        """Copy a parameter to an array of a replica, from the neighbour's."""
        held = parameter._data[0]
        source = self.array(parameter, index - 1) if index else held
        is_trained = parameter.grad_req != "null"
        # The backward pass of a copy to another context would overwrite the gradient.
        is_added = parameter.grad_req == "add" and source is held
        with mx.autograd._RecordingStateScope(self.recording and is_trained, None):
            source = source.as_nd_ndarray() if is_numpy(source) else source
            source = mx.nd.identity(source) if is_added else source
            mx.nd._internal._copyto(source, out=array)

    def keep(self, parameter):
        """Keep a parameter's value before a replica sets it."""
        if parameter not in self.before and parameter._data is not None:
            self._sent.pop(parameter, None)
            self.before[parameter] = parameter._data[0].copy()
            for index in range(len(self.contexts)):
                self.array(parameter, index)

    def guard(self, parameters):
        """Have ``united()`` and ``restore()`` check parameters that should not be set."""
        for parameter in parameters:
            if parameter._data is not None and parameter not in self.before:
                self._guarded[parameter] = parameter._data[0].copy()

    @contextlib.contextmanager
    def replica(self, index):
        """Have parameters return the copies of a replica within a block."""
        before = getattr(_running, "replica", None)
        _running.replica = self, index
        try:
            yield
        finally:
            _running.replica = before

    def united(self, replicas: "List[int]") -> "Optional[Fallback]":
        """Set parameters to the values that all of these replicas have set.

        Returns:
            A ``Fallback`` if they have set different values, of which only the user knows whether
            they are to be summed or averaged; or None.
        """
        for parameter, value in self._guarded.items():
            if parameter not in self.before and not are_equal([value, parameter._data[0]]):
                return _sets(parameter)
        for parameter in self.before:
            arrays = [self.array(parameter, index) for index in replicas]
            if not are_equal(arrays):
                return _sets(parameter)
            if arrays[0] is not parameter._data[0]:
                with mx.autograd.pause():
                    arrays[0].copyto(parameter._data[0])
            self._after[parameter] = arrays[0].copy()
        return None

    def restore(self) -> None:
        """Restore the parameters' values from before the call."""
        self._sent.clear()  # replicas may have changed their copies, too
        with mx.autograd.pause():
            for parameter, value in list(self._guarded.items()) + list(self.before.items()):
                value.copyto(parameter._data[0])

    def arrays_of(self, parameter: "Any") -> "Dict[int, Any]":
        """Return the parameter's array and its copies, by replica."""
        first = parameter._data[0]
        arrays = {0: first}
        for index, array in self._buffers.get(parameter, {}).items():
            # After cast() a copy has another type.
            arrays[index] = array if array.dtype == first.dtype else array.astype(first.dtype)
        return arrays

    def is_set_since(self, parameter, sizes):
        """Return whether replicas have set a parameter to different values in the backward pass."""
        arrays = self.arrays_of(parameter)
        used = [arrays[index] for index, size in enumerate(sizes) if size and index in arrays]
        after = self._after.get(parameter)
        if after is None or all(are_equal([after, array]) for array in used[1:]):
            return False  # the script sets the first one alone
        return not are_equal(used)


def _sets(parameter):
    return Fallback(Reason.CROSS_BATCH, f"that sets the parameter {parameter.name!r}")


def follow_replicas():
    """Patch ``mx.gluon.Parameter`` so that its methods use the copies of the running replica."""
    kind = mx.gluon.Parameter
    if patching.find(kind, "_check_and_get") is not None:
        return
    check_and_get, set_data = kind._check_and_get, kind.set_data

    def of_replica(parameter, arrays, ctx):
        replica = getattr(_running, "replica", None)
        if replica is None and parameter in pending:
            pending[parameter]()
        if replica is None or arrays is None or arrays is not parameter._data:
            return check_and_get(parameter, arrays, ctx)
        copies, index = replica
        array = copies.array(parameter, index)
        return [array] if ctx is list else array

    def set_by_replica(parameter, data):
        replica = getattr(_running, "replica", None)
        if replica is not None:
            replica[0].keep(parameter)
        set_data(parameter, data)

    patching.Patch(kind, "_check_and_get", of_replica)
    patching.Patch(kind, "set_data", set_by_replica)


def count_backward_passes():
    """Patch MXNet's library, which computes gradients by whatever function a script calls."""
    library = mx.base._LIB
    for name in ("MXAutogradBackward", "MXAutogradBackwardEx"):
        if patching.find(library, name) is None:
            plain = getattr(library, name)
            patching.WatchingPatch(library, name, functools.partial(_counted, plain))


def _counted(backward, *args):
    _passes[0] += 1
    return backward(*args)


def backward_passes() -> int:
    """Return how many backward passes this process has begun."""
    return _passes[0]


def blocks(block):
    """Yield a block and all blocks within."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def kept_blocks(block):
    """Yield the blocks that user-defined ones within a block keep in containers, beside Gluon's."""
    for part in blocks(block):
        if not type(part).__module__.startswith("mxnet."):
            for kept in leaves(list(vars(part).values()), mx.gluon.Block):
                yield from blocks(kept)


def parameters_of(block):
    """Return all parameters of a block and of those within, each once."""
    return list(dict.fromkeys(p for part in blocks(block) for p in part.params.values()))


def states_of(block, operations):
    """Return the parameters that a block sets by itself, as far as they are made.

    Arguments:
        block: the block.
        operations: by name of a parameter that an operation of MXNet writes: the operation.

    Returns:
        Running statistics, which are means over rows; and states of custom blocks.
    """
    layers = mx.gluon.nn.basic_layers
    batch_norm = getattr(layers, "_BatchNorm", layers.BatchNorm)  # the former from MXNet 1.7 on
    parts: "Dict[Any, Any]" = {}  # by parameter: the block within that has it
    for part in itertools.chain(blocks(block), kept_blocks(block)):
        for parameter in list(part.params.values()) + list(part._reg_params.values()):
            is_state = parameter.grad_req == "null" and parameter._data is not None
            if is_state and not isinstance(parameter, mx.gluon.Constant):
                parts.setdefault(parameter, part)
    means, others = [], []
    for parameter, part in parts.items():
        if operations.get(parameter.name) in rules.MEANS or isinstance(part, batch_norm):
            means.append(parameter)
        elif parameter.name in operations or not type(part).__module__.startswith("mxnet.gluon"):
            others.append(parameter)
    return means, others


def check_equal(block, differing):
    """Check that the replicas have not set states to different values in the backward pass.

    Raises:
        UnsupportedError: they have.
    """
    for parameter in differing:
        raise errors.UnsupportedError(
            f"The replicas of the block {block.name!r} set its parameter {parameter.name!r} to "
            "different values, each from its own rows, and whether these are to be added up or "
            "averaged only the block knows. Set it outside of the block, from results for the "
            "whole batch; or run the block on one device: parallelize(block, gpus=1)."
        )
