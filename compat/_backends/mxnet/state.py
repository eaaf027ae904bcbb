"""A model's state: parameters as replicas have and set them, and running statistics.

A parameter of a Gluon block stays as the script has it: on the first context, with one gradient.
Within a replica on another context it gives a copy there. Autograd records the copying, so the
backward pass sums the replicas' gradients where the parameter is: whatever reads or changes them,
has those of the batch.
"""

import contextlib
import threading
import weakref

import mxnet as mx

from ... import errors
from ..._rows import Fallback, Reason
from ..._runtime import patching
from . import rules
from .arrays import are_equal, context_of, is_numpy
from .synchronization import wait_for_updates

_running = threading.local()  # ``replica``: its ``Copies`` and its number

#: Running statistics that the replicas have changed, each by itself: what makes them one.
pending = weakref.WeakKeyDictionary()  # type: weakref.WeakKeyDictionary


class Copies:
    """The copies of parameters on all contexts, of the replicas of one block.

    Arguments:
        contexts: the replicas'; parameters stay on the first one.
    """

    def __init__(self, contexts):
        self.contexts = contexts
        self._buffers = {}  # type: dict  # by parameter, and by replica: the memory of its copy
        self.begin()

    def begin(self, states=()):
        """Begin a call with the present values.

        Arguments:
            states: the parameters that the replicas may set.
        """
        self.recording = mx.autograd.is_recording()
        self._arrays = {}  # type: dict  # by parameter and replica
        self.before = {}  # type: dict  # by parameter that is set: its value before the call
        self._after = {}  # type: dict  # and after it
        self._guarded = {}  # type: dict  # of those that nothing is known to set
        for parameter in states:
            self.keep(parameter)
        for parameter, buffers in self._buffers.items():
            # Before any replica runs, so that what one sets is not what another begins with.
            for index in buffers if parameter._data is not None else ():
                self.array(parameter, index)

    def array(self, parameter, index):
        """Return a parameter's array for a replica."""
        held = parameter._data[0]
        context = self.contexts[index]
        if context_of(held) == context:
            return held
        key = parameter, index
        if key not in self._arrays:
            self._arrays[key] = self._copied(key, held, context)
        return self._arrays[key]

    def _copied(self, key, held, context):
        parameter, index = key
        buffer = self._buffers.setdefault(parameter, {}).get(index)
        if buffer is None or buffer.shape != held.shape or buffer.dtype != held.dtype:
            buffer = mx.nd.zeros(held.shape, context, held.dtype, stype=held.stype)
            self._buffers[parameter][index] = buffer
        array = buffer.detach()  # the same memory; autograd knows nothing of it as yet
        is_trained = parameter.grad_req != "null"
        with mx.autograd._RecordingStateScope(self.recording and is_trained, None):
            source = held.as_nd_ndarray() if is_numpy(held) else held
            # The backward pass of a copy to another context overwrites what it is to be added to.
            source = mx.nd.identity(source) if parameter.grad_req == "add" else source
            mx.nd._internal._copyto(source, out=array)
            return array.as_np_ndarray() if is_numpy(held) else array

    def keep(self, parameter):
        """Take note that a replica sets a parameter, before it does."""
        if parameter not in self.before and parameter._data is not None:
            self.before[parameter] = parameter._data[0].copy()
            for index in range(len(self.contexts)):
                self.array(parameter, index)

    def guard(self, parameters):
        """Have ``united()`` and ``restore()`` look at parameters that nothing is known to set."""
        for parameter in parameters:
            if parameter._data is not None and parameter not in self.before:
                self._guarded[parameter] = parameter._data[0].copy()

    @contextlib.contextmanager
    def replica(self, index):
        """Have parameters be those of a replica."""
        before = getattr(_running, "replica", None)
        _running.replica = self, index
        try:
            yield
        finally:
            _running.replica = before

    def united(self, replicas):
        """Give parameters what all of these replicas have set, the same.

        Returns:
            What sets different values, by the rows: only the user knows whether they are to be
            added up or averaged. Or None.
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

    def restore(self):
        """Give parameters the values from before the call."""
        with mx.autograd.pause():
            for parameter, value in list(self._guarded.items()) + list(self.before.items()):
                value.copyto(parameter._data[0])

    def arrays_of(self, parameter):
        """Return the parameter's array, and the copies of it that there are, by replica."""
        first = parameter._data[0]
        arrays = {0: first}
        for index, array in self._buffers.get(parameter, {}).items():
            # After cast() in another type.
            arrays[index] = array if array.dtype == first.dtype else array.astype(first.dtype)
        return arrays

    def is_set_since(self, parameter, sizes):
        """Return whether replicas have set a parameter to different values in the backward pass."""
        arrays = self.arrays_of(parameter)
        used = [arrays[index] for index, size in enumerate(sizes) if size and index in arrays]
        after = self._after.get(parameter)
        if after is None or all(are_equal([after, array]) for array in used[1:]):
            return False  # what the script sets is the first one alone
        return not are_equal(used)


def _sets(parameter):
    return Fallback(Reason.CROSS_BATCH, f"that sets the parameter {parameter.name!r}")


def follow_replicas():
    """Have the methods of ``mx.gluon.Parameter`` look for the replica that is running."""
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


def blocks(block):
    """Yield a block and all that are within."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def parameters_of(block):
    """Return all parameters of a block and of those within, each once."""
    return list(dict.fromkeys(p for part in blocks(block) for p in part.params.values()))


def states_of(block, operations):
    """Return the parameters that a block sets by itself, as far as they are made.

    Arguments:
        operations: of those known to be written by operations of MXNet, the operation by name.

    Returns:
        Running statistics, which are means over rows; and those of which only the user's own
        block knows what they are.
    """
    layers = mx.gluon.nn.basic_layers
    batch_norm = getattr(layers, "_BatchNorm", layers.BatchNorm)  # the former from MXNet 1.7 on
    parts = {}  # type: dict  # by parameter: the block within that has it
    for part in blocks(block):
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
    """Check that no replica has set a state of its own since, in its backward pass."""
    for parameter in differing:
        raise errors.UnsupportedError(
            f"The replicas of the block {block.name!r} set its parameter {parameter.name!r} to "
            "different values, each from its own rows, and whether these are to be added up or "
            "averaged only the block knows. Set it outside of the block, from results for the "
            "whole batch; or run the block on one device: parallelize(block, gpus=1)."
        )


def unite(statistics, sizes):
    """Give the replicas one value each: the mean, weighted by shard size.

    What is the same in all replicas stays exactly so.

    Arguments:
        statistics: for each statistic, a list of the replicas' arrays, which are set.
        sizes: the numbers of rows that the replicas computed.
    """
    if statistics:
        wait_for_updates()
    for arrays in statistics:
        first = arrays[0]
        first += sum(
            (array.as_in_context(first.context) - first) * (float(size) / sum(sizes))
            for array, size in zip(arrays, sizes)
        )
        for array in arrays[1:]:
            first.copyto(array)
