"""Copies of weights that devices keep as long as the weights have the same values."""

import contextlib
import uuid
from typing import Any, Dict, List, Tuple

from .._tensorflow.graph import v1_names
from . import graph
from .weight_copies import WeightChain

# Bytes of the smallest weight that is kept: a smaller one is sent as fast as it is compared.
_SMALLEST = 2**16


def _is_large(weight):
    """Return whether a weight is worth keeping; before 1.5 TensorFlow has no mutex for that."""
    elements = weight.shape.num_elements() if weight.shape.is_fully_defined() else 0
    has_mutex = hasattr(_operations(), "mutex_lock")
    return has_mutex and weight.dtype.is_floating and elements * weight.dtype.size >= _SMALLEST


def _can_keep(value):
    """Return whether devices keep a tensor: the value of a resource variable."""
    return value.op.type == "ReadVariableOp" and graph.is_shared(value.op) and _is_large(value)


def can_keep_any(weights: "List[Any]") -> bool:
    """Return whether devices keep the value of any of these variables."""
    return any(hasattr(weight, "handle") and _is_large(weight) for weight in weights)


class Storage:
    """Variables of a model's copies, and of the values that were sent last, as handles.

    They are in none of the collections of their graph, where savers would find them.
    """

    def __init__(self) -> None:
        self._name = f"kept_weights_{uuid.uuid4().hex}"  # sessions of a server share variables
        self._handles: "Dict[Tuple[Any, str], Any]" = {}
        self._deletions: "List[Any]" = []
        self._mutex: "Any" = None

    def handle(self, value: "Any", device: str, key: "Any") -> "Any":
        """Return the handle of a variable on a device, for tensors like this one, by a key."""
        key = key, device
        if key not in self._handles:
            name = f"{self._name}_{len(self._handles)}"
            with v1_names().device(device):
                handle = _operations().var_handle_op(value.dtype, value.shape, shared_name=name)
                delete = _operations().destroy_resource_op(handle, ignore_lookup_error=True)
            self._handles[key] = handle
            self._deletions.append(delete)
        return self._handles[key]

    def lock(self) -> "Any":
        """Return a tensor that exists in one run of a session at a time."""
        with v1_names().device("/cpu:0"):
            if self._mutex is None:
                self._mutex = _operations().mutex_v2(shared_name=self._name)
            return _operations().mutex_lock(self._mutex)

    def delete(self, sessions: "List[Any]") -> None:
        """Free the memory of all copies in sessions."""
        for session in sessions:
            if self._deletions and session.graph is self._deletions[0].graph:
                with contextlib.suppress(v1_names().errors.OpError):  # it may lack devices
                    session.run(self._deletions)


class KeptWeights(WeightChain):
    """Values of weights that each device keeps, for replicas whose gradients are not computed.

    TensorFlow has no version of a variable that every write changes. So the device of a weight
    compares it, bit by bit, with the values that were sent last, and sends it if they differ. All
    of this is done by operations of the graph, in whatever session they run.

    One run at a time compares and sends. Of two at once, with a write between them, one could be
    the last to store a copy and the other one the values that were sent.

    Arguments:
        devices: those of the replicas, in order.
        storage: the variables of the model's copies.
    """

    def __init__(self, devices, storage):
        super().__init__(devices)
        self._storage, self._lock = storage, None
        self._stored: "List[Any]" = []

    def stored(self, operation: "Any") -> "Any":
        """Return an operation that runs another one, and has the devices keep what was sent."""
        if self._lock is None:
            return operation
        tf = v1_names()
        with tf.device("/cpu:0"), tf.control_dependencies(self._stored):
            unlock = _operations().consume_mutex_lock(self._lock)
        return tf.group(operation, unlock)

    def _chain(self, value):
        if not _can_keep(value):
            return super()._chain(value)
        tf = v1_names()
        if self._lock is None:
            self._lock = self._storage.lock()
        # Operations without a device run on the first one of all.
        home = value.device or self.devices[0].rpartition(":")[0] + ":0"
        with tf.name_scope("weights"), tf.device(value.device):
            bits = _bits(value)
            last = self._storage.handle(bits, value.device, (value, "bits"))
            is_same, is_changed = self._compared(bits, last)
            with tf.control_dependencies([is_changed]):
                sent = tf.identity(value)
                # A run that fails may store some copies only.
                begin = _operations().destroy_resource_op(last, ignore_lookup_error=True)
            copies, stores = [], []
            for device in self.devices:
                copies.append(value)
                if device != home:
                    handle = self._storage.handle(value, device, value)
                    with tf.device(device):
                        sent = tf.identity(sent)
                        with tf.control_dependencies([begin]):
                            stores.append(_operations().assign_variable_op(handle, sent))
                        with tf.control_dependencies([is_same]):
                            copies[-1] = _merged(sent, _read(handle, value))
            with tf.control_dependencies(stores):
                end = _operations().assign_variable_op(last, bits)
            with tf.control_dependencies([end]):
                self._stored.append(_merged(tf.identity(is_changed), is_same))
        return copies

    def _compared(self, bits, last):
        """Return two tensors: only one of them is computed, with all that waits for it.

        The first one is, if the bits of a weight are those that were sent last; else the second.
        """
        tf = v1_names()
        with tf.control_dependencies([self._lock]):
            exists = _operations().var_is_initialized_op(last)
        is_new, is_known = _switched(tf.logical_not(exists), exists)
        with tf.control_dependencies([is_known]):
            differs = tf.reduce_any(tf.not_equal(bits, _read(last, bits)))
        differs = _merged(differs, is_new)
        return _switched(differs, differs)


def _operations():
    from tensorflow.python.ops import gen_resource_variable_ops

    return gen_resource_variable_ops


def _read(handle, value):
    """Return the value of a variable that keeps another value."""
    kept = _operations().read_variable_op(handle, value.dtype)
    kept.set_shape(value.shape)
    return kept


def _switched(tensor, condition):
    """Return a tensor twice: computed only if a condition is false, and only if it is true."""
    from tensorflow.python.ops import control_flow_ops

    # Operations wait for one of the two only if it is the result of an operation of its own.
    return list(map(v1_names().identity, control_flow_ops.switch(tensor, condition)))


def _merged(*tensors):
    """Return the one of some tensors that is computed."""
    from tensorflow.python.ops import control_flow_ops

    return control_flow_ops.merge(tensors)[0]


def _bits(value):
    """Return the bits of a tensor as integers, since 0 equals -0, and no NaN equals another."""
    tf = v1_names()
    size = value.dtype.size
    if value.shape.num_elements() * size % 8:
        return tf.bitcast(tf.reshape(value, [-1]), tf.int16)
    # GPUs compare integers of 32 bits on the CPU.
    return tf.bitcast(tf.reshape(value, [-1, 8 // size]), tf.int64)
