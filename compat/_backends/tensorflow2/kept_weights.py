"""Copies of weights on the devices, kept from call to call where gradients are not needed."""

import threading
import uuid
import weakref
from typing import Dict, List, Sequence, Tuple

import tensorflow as tf

from .variable_reads import Copies
from .weight_copies import hops_of, send

#: The types of weights whose bits can be compared.
_COMPARABLE = {
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "int16",
    "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
}  # fmt: skip

#: The largest number of bytes of a weight that is compared together with others.
SMALL = 2**16


def are_kept() -> bool:
    """Return whether copies are kept: from TensorFlow 2.4, to which this class belongs.

    In TensorFlow 2.3 the caller of a function that only reads variables does not wait for it before
    assigning to them; 2.4 has repaired that (``auto_control_deps.py``). Kept copies are compared by
    such functions.
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
        self._groups: "Dict[Tuple[int, ...], _KeptGroup]" = {}  # by the ids of handles
        self._sets: "Dict[Tuple[int, ...], _KeptSet]" = {}  # likewise
        self._lock = threading.RLock()

    def send(self, variables: "Sequence[tf.Variable]") -> "List[Copies]":
        """Return copies of variables on each device, sent now if one of them has changed."""
        kept = list(filter(_is_comparable, variables)) if are_kept() else []
        ids = set(map(id, kept))
        sent = send([v for v in variables if id(v) not in ids], self._devices)
        if kept:
            with self._lock:
                tensors = self._set(kept).copies(kept)
            for copies, of_device in zip(sent, tensors):
                copies.tensors.update(of_device)
        return sent

    def _set(self, variables):
        key = _key(variables)
        if key not in self._sets:
            groups = [self._group(group) for group in _groups(variables)]
            self._sets[key] = _KeptSet(groups, self._devices, self._mutex)
        return self._sets[key]

    def _group(self, variables):
        key = _key(variables)
        if key not in self._groups:
            self._groups[key] = _KeptGroup(variables, self._devices)
            for variable in variables:
                finalizer = weakref.finalize(variable, _forget, weakref.ref(self), key)
                finalizer.atexit = False
        return self._groups[key]

    def forget(self, key: "Tuple[int, ...]") -> None:
        """Free the copies of a group, one of whose variables is gone, by the ids of handles."""
        with self._lock:
            if key in self._groups:
                group = self._groups.pop(key)
                _destroy(group.resources)
                self._sets = {k: each for k, each in self._sets.items() if group not in each.groups}

    def free(self) -> None:
        """Free all copies."""
        with self._lock:
            for group in self._groups.values():
                _destroy(group.resources)
            self._groups, self._sets = {}, {}


def _name():
    """Return the name of a resource; functions may be saved, and run in other processes."""
    return f"compat_weights_{uuid.uuid4().hex}"


def _key(variables):
    return tuple(id(variable.handle) for variable in variables)


def _is_comparable(variable):
    shape = variable.shape
    return variable.dtype.name in _COMPARABLE and shape.is_fully_defined() and shape.num_elements()


def _groups(variables):
    """Return lists of variables that are compared, and sent, together.

    To compare a small weight by itself, its operations would take longer than its bytes. Large
    weights are groups of one, whose values need no concatenation.
    """
    groups = {}
    for variable in variables:
        is_small = variable.shape.num_elements() * variable.dtype.size <= SMALL
        key = (variable.dtype, variable.device) if is_small else id(variable)
        groups.setdefault(key, []).append(variable)
    return list(groups.values())


def _forget(kept, key):
    if kept() is not None:
        kept().forget(key)


def _destroy(resources):
    with tf.init_scope():
        for resource in resources:
            tf.raw_ops.DestroyResourceOp(resource=resource, ignore_lookup_error=True)


class _KeptGroup:
    """Weights of one type and device, the resource with their bits as sent, and their copies.

    Arguments:
        variables: the weights, which are not held.
        devices: those of the replicas.
    """

    def __init__(self, variables, devices):
        self.keys = _key(variables)
        self.shapes = [variable.shape for variable in variables]
        self.dtype, self.device = variables[0].dtype, variables[0].device
        self.hops = hops_of(variables[0], devices)
        self.name = _name()
        with tf.init_scope():  # the bits first: copies without them are not used
            copies = [copy for device in self.hops for copy in self.copies(device)]
            self.resources = [self.sent(), *copies]
        weakref.finalize(self, _destroy, self.resources).atexit = False

    def values(self, handles):
        """Return the present values, from the handles of the variables by their keys."""
        with tf.device(self.device):
            return [_read(handles[key], self.dtype) for key in self.keys]

    def sent(self):
        """Return the handle of the bits that were sent."""
        return self._resource("sent", tf.int64, None, self.device)

    def copies(self, device):
        """Return the handles of the copies on a device."""
        return [
            self._resource(place, self.dtype, shape, device)
            for place, shape in enumerate(self.shapes)
        ]

    def _resource(self, name, dtype, shape, device):
        with tf.device(device):
            shared_name = f"{self.name}_{name}"
            return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=shared_name)

    def read(self, device):
        """Return the copies on a device."""
        with tf.device(device):
            return [_read(copy, self.dtype) for copy in self.copies(device)]

    def bits(self, values):
        """Return the bits of values as integers of 8 bytes."""
        with tf.device(self.device):
            values = [tf.reshape(value, [-1]) for value in values]
            if self.dtype.is_bool:
                values = [tf.cast(value, tf.uint8) for value in values]
            size = values[0].dtype.size
            rest = -sum(shape.num_elements() for shape in self.shapes) * size % 8
            if rest:
                values.append(tf.zeros(rest // size, values[0].dtype))
            bits = values[0] if len(values) == 1 else tf.concat(values, 0)
            if size < 8:
                bits = tf.reshape(bits, [-1, 8 // size])
            bits = bits if bits.dtype == tf.int64 else tf.bitcast(bits, tf.int64)
            return tf.reshape(bits, [-1]) if size > 8 else bits

    def _values(self, bits):
        """Return the values of which these are the bits."""
        dtype = tf.uint8 if self.dtype.is_bool else self.dtype
        bits = tf.reshape(bits, [-1, dtype.size // 8]) if dtype.size > 8 else bits
        values = bits if dtype == tf.int64 else tf.bitcast(bits, dtype)
        sizes = [shape.num_elements() for shape in self.shapes]
        values = tf.split(tf.reshape(values, [-1])[: sum(sizes)], sizes)
        values = list(map(tf.reshape, values, self.shapes))
        return [tf.cast(value, tf.bool) for value in values] if self.dtype.is_bool else values

    def differs(self, bits):
        """Return whether the bits are not those that were sent."""
        with tf.device(self.device):
            return tf.reduce_any(tf.not_equal(bits, _read(self.sent(), tf.int64)), axis=0)

    def send(self, bits):
        """Send the bits from device to device; return the last operation."""
        with tf.device(self.device):  # a copy, for the weight may share its memory with an array
            sent = tf.raw_ops.DeepCopy(x=bits)
        bits, copied = sent, []
        for device in self.hops:
            with tf.device(device):
                bits = tf.identity(bits)
                for copy, value in zip(self.copies(device), self._values(bits)):
                    copied.append(tf.raw_ops.AssignVariableOp(resource=copy, value=value))
        # Last, so that copies of other values are never taken for those of this one.
        with tf.device(self.device), tf.control_dependencies(copied):
            return tf.raw_ops.AssignVariableOp(resource=self.sent(), value=sent)


def _read(resource, dtype):
    return tf.raw_ops.ReadVariableOp(resource=resource, dtype=dtype)


class _KeptSet:
    """The weights that a call reads.

    Arguments:
        groups: their ``_KeptGroup`` objects.
        devices: those of the replicas.
        mutex: the name of what one call at a time holds.
    """

    def __init__(self, groups, devices, mutex):
        self.groups, self._devices, self._mutex = list(groups), devices, mutex
        self._function = None

    def copies(self, variables):
        """Return the copies of the weights, which are these variables: a dictionary by device."""
        if self._function is None:
            types = [tf.TensorSpec(shape, g.dtype) for g in self.groups for shape in g.shapes]
            with tf.init_scope():
                self._function = tf.compat.v1.wrap_function(self._sent_and_read, types)
        is_eager = tf.executing_eagerly()
        if not is_eager:
            self._hold()
        handles = {id(variable.handle): variable.handle for variable in variables}
        of_groups = [group.values(handles) for group in self.groups]
        sent = self._function(*tf.nest.flatten(of_groups))
        copies = [{} for _ in self._devices]
        for group, values, of_hops in zip(self.groups, of_groups, sent):
            for place, (key, value) in enumerate(zip(group.keys, values)):
                of_weight = [of_hop[place] for of_hop in of_hops]
                if not is_eager:
                    of_weight = _differentiable(value, group.device, of_weight, group.hops)
                if len(of_weight) < len(copies):  # the first replica may read it where it is
                    of_weight.insert(0, value)
                for of_device, copy in zip(copies, of_weight):
                    of_device[key] = copy
        return copies

    def _hold(self):
        """Let the graphs that are being made hold the copies."""
        graph = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):
            graph._compat_kept_weights = getattr(graph, "_compat_kept_weights", ()) + (self,)
            graph = graph.outer_graph

    def _sent_and_read(self, *values):
        """Send the weights if one has changed, then read; no other call sends meanwhile."""
        with tf.device("/cpu:0"):
            mutex = tf.raw_ops.MutexV2(shared_name=self._mutex)
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            are_set = [tf.raw_ops.VarIsInitializedOp(resource=g.sent()) for g in self.groups]
            values = tf.nest.pack_sequence_as([group.shapes for group in self.groups], values)
            bits = [group.bits(each) for group, each in zip(self.groups, values)]
            is_set = tf.reduce_all(are_set)
            changed = tf.cond(is_set, lambda: self._differ(bits), lambda: tf.constant(True))
            is_sent = tf.cond(changed, lambda: self._send(*bits), lambda: tf.constant(False))
        results = [[] for _ in self.groups]
        for device in self._devices:  # one edge from device to device, not one for each read
            with tf.device(device), tf.control_dependencies([is_sent]):
                after = tf.no_op()
            with tf.control_dependencies([after]):
                for group, of_group in zip(self.groups, results):
                    if device in group.hops:
                        of_group.append(group.read(device))
        done = tf.group(*tf.nest.flatten(results))
        with tf.device("/cpu:0"), tf.control_dependencies([done]):
            unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        tf.compat.v1.get_default_graph().control_outputs.append(unlocked)
        return results

    def _differ(self, bits):
        return tf.reduce_any([group.differs(each) for group, each in zip(self.groups, bits)])

    def _send(self, *bits):
        with tf.control_dependencies([g.send(each) for g, each in zip(self.groups, bits)]):
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


def _differentiable(value, place, copies, devices):
    """Return copies whose gradients are those of the value on a device.

    A function that was traced without a tape may be called, and differentiated, with one. A scalar
    beside the value stands for it on the devices, for which its shape has to be unknown.
    """
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return copies
    with tf.device(place):
        zero = tf.zeros((), value.dtype)
        source = _paired(tf.compat.v1.placeholder_with_default(zero, None), value)
    linked = []
    for device, copy in zip(devices, copies):
        with tf.device(device):
            linked.append(_paired(copy, source))
    return linked
