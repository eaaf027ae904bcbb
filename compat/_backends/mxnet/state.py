"""Parameters of Gluon blocks, as the replicas of a block have them.

A parameter stays as the script has it: on the first context, with one gradient. Within a replica on
another context it gives a copy there. Autograd records the copying, so the backward pass sums the
replicas' gradients where the parameter is: whatever reads or changes them, has those of the batch.
"""

import contextlib
import threading
import weakref

import mxnet as mx

from ... import _rows
from ..._runtime import patching
from .merging import are_equal, context_of, is_numpy

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
        """A parameter's array for a replica."""
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
        """Within, parameters are those of a replica."""
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
        """The parameter's array, and the copies of it that there are, by replica."""
        first = parameter._data[0]
        arrays = {0: first}
        for index, array in self._buffers.get(parameter, {}).items():
            # After cast() in another type.
            arrays[index] = array if array.dtype == first.dtype else array.astype(first.dtype)
        return arrays

    def is_set_since(self, parameter, sizes):
        """Whether replicas have set a parameter to different values since, in the backward pass."""
        arrays = self.arrays_of(parameter)
        used = [arrays[index] for index, size in enumerate(sizes) if size and index in arrays]
        after = self._after.get(parameter)
        if after is None or all(are_equal([after, array]) for array in used[1:]):
            return False  # what the script sets is the first one alone
        return not are_equal(used)


def _sets(parameter):
    return _rows.Across(f"that sets the parameter {parameter.name!r}")


# What replicas reach ------------------------------------------------------------------------------


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
