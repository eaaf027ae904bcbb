"""Copies of weights on the devices, kept from call to call where gradients are not needed."""

import threading
import uuid
import weakref
from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from .variable_reads import Copies
from .weight_copies import hops_of, send

#: The types of weights whose bits can be compared.
_COMPARABLE = {
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "int16",
    "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
}  # fmt: skip


def are_kept() -> bool:
    """Return whether copies are kept: from TensorFlow 2.4, to which this class belongs.

    In a function that changes weights between two calls of a model, TensorFlow 2.3 sometimes
    computes with copies of the values from before.
    """
    return hasattr(tf.distribute, "MultiWorkerMirroredStrategy")


class KeptWeights:
    """Copies of a model's weights, sent again where a weight has changed.

    No way to change a weight is missed: each call compares it, on its own device, with the bits
    that were sent last. Both are resources of the devices, which operations refer to by name. So
    no graph captures them, a function that has them is saved like any other, and one that runs
    after they were freed makes them again.

    Arguments:
        devices: those of the replicas.
    """

    def __init__(self, devices: "Sequence[str]") -> None:
        self._devices = list(devices)
        self._mutex = _name()
        self._weights: "Dict[int, _KeptWeight]" = {}  # by the ids of handles
        self._sets: "Dict[Tuple[int, ...], _KeptSet]" = {}
        self._lock = threading.RLock()

    def send(self, variables: "Sequence[tf.Variable]") -> "List[Copies]":
        """Return copies of variables on each device, sent now if one of them has changed."""
        kept = _worth_keeping(variables)
        ids = set(map(id, kept))
        sent = send([v for v in variables if id(v) not in ids], self._devices)
        if kept:
            with self._lock:
                tensors = self._set(kept).copies(kept)
            for copies, of_device in zip(sent, tensors):
                copies.tensors.update(of_device)
        return sent

    def _set(self, variables):
        key = tuple(id(variable.handle) for variable in variables)
        if key not in self._sets:
            self._sets[key] = _KeptSet(map(self._weight, variables), self._devices, self._mutex)
        return self._sets[key]

    def _weight(self, variable):
        key = id(variable.handle)
        if key not in self._weights:
            self._weights[key] = _KeptWeight(variable, self._devices)
            weakref.finalize(variable, _forget, weakref.ref(self), key).atexit = False
        return self._weights[key]

    def forget(self, key: int) -> None:
        """Free the copies of a variable that is gone, by the id of its handle."""
        with self._lock:
            if key in self._weights:
                _destroy(self._weights.pop(key).resources)
            self._sets = {keys: each for keys, each in self._sets.items() if key not in keys}

    def free(self) -> None:
        """Free all copies."""
        with self._lock:
            for weight in self._weights.values():
                _destroy(weight.resources)
            self._weights, self._sets = {}, {}


def _name():
    """Return the name of a resource; functions may be saved, and run in other processes."""
    return f"compat_weights_{uuid.uuid4().hex}"


def _worth_keeping(variables):
    """Return the variables whose copies are kept.

    Not the smallest ones, which have a fiftieth of all bytes: to compare them takes longer than to
    send them.
    """
    comparable = list(filter(_is_comparable, variables)) if are_kept() else []
    sizes = sorted((v.shape.num_elements() * v.dtype.size, id(v)) for v in comparable)
    limit, small = sum(size for size, _ in sizes) / 50, set()
    for size, key in sizes:
        limit -= size
        if limit < 0:
            break
        small.add(key)
    return [v for v in comparable if id(v) not in small]


def _is_comparable(variable):
    shape = variable.shape
    return variable.dtype.name in _COMPARABLE and shape.is_fully_defined() and shape.num_elements()


def _forget(kept, key):
    if kept() is not None:
        kept().forget(key)


def _destroy(resources):
    with tf.init_scope():
        for resource in resources:
            tf.raw_ops.DestroyResourceOp(resource=resource, ignore_lookup_error=True)


class _KeptWeight:
    """A weight, the resource with the bits that were sent, and those of its copies.

    Arguments:
        variable: the weight, which is not held.
        devices: those of the replicas.
    """

    def __init__(self, variable, devices):
        self.handle, self.dtype, self.shape = variable.handle, variable.dtype, variable.shape
        self.device, self.hops = variable.device, hops_of(variable, devices)
        self.name = _name()
        with tf.init_scope():  # the bits first: copies without them are not used
            self.resources = [self.sent(), *map(self.copy, self.hops)]
        weakref.finalize(self, _destroy, self.resources).atexit = False

    def value(self):
        """Return the present value of the weight."""
        with tf.device(self.device):
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def sent(self):
        """Return the handle of the bits that were sent."""
        dtype = tf.int64 if self._has_words() else tf.uint8
        with tf.device(self.device):
            return tf.raw_ops.VarHandleOp(dtype=dtype, shape=None, shared_name=self.name + "_sent")

    def copy(self, device):
        """Return the handle of the copy on a device."""
        with tf.device(device):
            return tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape, shared_name=self.name)

    def read(self, resource, device):
        """Return the copy on a device, by its handle."""
        with tf.device(device):
            return tf.raw_ops.ReadVariableOp(resource=resource, dtype=self.dtype)

    def differs(self):
        """Return whether the value is not the one that was sent."""
        bits, sent = self._bits(self.value()), self.sent()
        with tf.device(self.device):
            sent_bits = tf.raw_ops.ReadVariableOp(resource=sent, dtype=bits.dtype)
            return tf.reduce_any(tf.not_equal(bits, sent_bits), axis=0)

    def send(self):
        """Send the value from device to device; return the last operation."""
        with tf.device(self.device):  # a copy, for the weight may share its memory with an array
            value = sent = tf.raw_ops.DeepCopy(x=self.value())
        copied = []
        for device in self.hops:
            resource = self.copy(device)
            copied.append(tf.raw_ops.AssignVariableOp(resource=resource, value=value))
            with tf.control_dependencies(copied[-1:]):
                value = self.read(resource, device)
        # Last, so that copies of other values are never taken for those of this one.
        with tf.device(self.device), tf.control_dependencies(copied):
            return tf.raw_ops.AssignVariableOp(resource=self.sent(), value=self._bits(sent))

    def _size(self):
        return 1 if self.dtype.is_bool else self.dtype.size

    def _has_words(self):
        return self.shape.num_elements() * self._size() % 8 == 0

    def _bits(self, value):
        """Return the bits of a value as integers of 8 bytes, or of one."""
        size = self._size()
        with tf.device(self.device):
            if self.dtype.is_bool:
                value = tf.cast(value, tf.uint8)
            kind, length = (tf.int64, 8) if self._has_words() else (tf.uint8, 1)
            value = tf.reshape(value, [-1, length // size] if size < length else [-1])
            bits = value if value.dtype == kind else tf.bitcast(value, kind)
            return tf.reshape(bits, [-1])


class _KeptSet:
    """The weights that a call reads.

    Arguments:
        weights: a ``_KeptWeight`` of each.
        devices: those of the replicas.
        mutex: the name of what one call at a time holds.
    """

    def __init__(self, weights, devices, mutex):
        self._weights, self._devices, self._mutex = list(weights), devices, mutex
        self._functions: "Dict[str, Any]" = {}

    def copies(self, variables):
        """Return the copies of the weights, which are these variables: a dictionary by device."""
        copies = [{} for _ in self._devices]
        if tf.executing_eagerly():
            self._call(self._sent)
            values = [
                list(map(weight.read, weight.resources[1:], weight.hops))
                for weight in self._weights
            ]
        else:
            self._hold()
            values = self._call(self._sent_and_read)
            values = map(_differentiable, variables, self._weights, values)
        for weight, of_weight in zip(self._weights, values):
            first = len(self._devices) - len(weight.hops)
            for of_device, value in zip(copies[first:], of_weight):
                of_device[id(weight.handle)] = value
        return copies

    def _call(self, compute):
        """Call a method as one function, between operations that change the weights."""
        name = compute.__name__
        if name not in self._functions:
            with tf.init_scope():
                self._functions[name] = tf.compat.v1.wrap_function(compute, [])
        return self._functions[name]()

    def _hold(self):
        """Let the graphs that are being made hold the copies."""
        graph = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):
            graph._compat_kept_weights = getattr(graph, "_compat_kept_weights", ()) + (self,)
            graph = graph.outer_graph

    def _sent_and_read(self):
        return self._locked(lambda after: [self._read(w, after) for w in self._weights])

    def _sent(self):
        self._locked(lambda after: after)

    def _read(self, weight, after):
        copies = []
        for device in weight.hops:
            with tf.control_dependencies([after[device]]):
                copies.append(weight.read(weight.copy(device), device))
        return copies

    def _locked(self, read):
        """Send the weights if one has changed, then read; no other call sends meanwhile."""
        with tf.device("/cpu:0"):
            mutex = tf.raw_ops.MutexV2(shared_name=self._mutex)
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            are_set = [tf.raw_ops.VarIsInitializedOp(resource=w.sent()) for w in self._weights]
            changed = tf.cond(tf.reduce_all(are_set), self._differ, lambda: tf.constant(True))
            is_sent = tf.cond(changed, self._send, lambda: tf.constant(False))
            after = {}
            for device in self._devices:  # one edge from device to device, not one for each read
                with tf.device(device), tf.control_dependencies([is_sent]):
                    after[device] = tf.no_op()
        results = read(after)
        done = tf.group(*tf.nest.flatten(results))
        with tf.device("/cpu:0"), tf.control_dependencies([done]):
            unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        tf.compat.v1.get_default_graph().control_outputs.append(unlocked)
        return results

    def _differ(self):
        return tf.reduce_any([weight.differs() for weight in self._weights])

    def _send(self):
        with tf.control_dependencies([weight.send() for weight in self._weights]):
            return tf.constant(True)


_GRADIENT = "CompatKeptWeight"


@tf.RegisterGradient(_GRADIENT)
def _gradient_of_pair(op, first, second):
    """Return the gradient of the first output as that of the second input."""
    return None, first


def _paired(value, source):
    """Return a value whose gradient is that of a source, of which it needs nothing else."""
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": _GRADIENT}):
        return tf.identity_n([value, source])[0]


def _differentiable(variable, weight, copies):
    """Return copies whose gradients are those of the variable.

    A function that was traced without a tape may be called, and differentiated, with one. A scalar
    beside the variable stands for it on the devices, for which its shape has to be unknown.
    """
    if not (weight.dtype.is_floating or weight.dtype.is_complex):
        return copies
    with tf.device(weight.device):
        zero = tf.zeros((), weight.dtype)
        source = _paired(tf.compat.v1.placeholder_with_default(zero, None), variable.value())
    linked = []
    for device, copy in zip(weight.hops, copies):
        with tf.device(device):
            linked.append(_paired(copy, source))
    return linked
