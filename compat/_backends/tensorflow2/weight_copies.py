"""Copies of weights on the devices, each made from that of the device before it.

Gradients take the same way back: see ``gradient_sums``. Where there are none, copies are kept from
call to call: see ``kept_weights``.
"""

import weakref
from typing import Any, Dict, List, Sequence

import tensorflow as tf

from .configuration import short_name
from .graph import CONDITIONS, LOOPS, bodies_of, captures, eager, may_be_set
from .variable_reads import Copies


def weights_of(graph: "Any") -> "List[weakref.ref[tf.Variable]]":
    """Return the variables that a traced graph reads as a whole and does not set."""
    handles = {id(eager(external)): internal for internal, external in captures(graph)}
    return [
        weakref.ref(variable)
        for variable in graph.variables
        if id(variable.handle) in handles and _is_weight(variable, handles[id(variable.handle)])
    ]


def _is_weight(variable, handle):
    dtype = variable.dtype
    is_number = dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool
    return is_number and _is_read(handle) and not may_be_set(handle)


def _is_read(handle):
    for op in handle.consumers():
        if op.type == "ReadVariableOp":
            return True
        if op.type in CONDITIONS | LOOPS:
            first = int(op.type in CONDITIONS)
            places = [n - first for n, tensor in enumerate(op.inputs) if tensor is handle]
            bodies = bodies_of(op)
            if any(_is_read(body.inputs[place]) for body in bodies for place in places):
                return True
    return False


def hops_of(variable: "tf.Variable", devices: "Sequence[str]") -> "List[str]":
    """Return the devices to which a variable is sent, one after the other.

    The first one may read it where it is.
    """
    return list(devices[short_name(variable.device) == devices[0] :])


def send(variables: "Sequence[tf.Variable]", devices: "Sequence[str]") -> "List[Copies]":
    """Return copies of variables on each device, made for this call; a tape records them."""
    present = [(id(v.handle), v.value(), hops_of(v, devices)) for v in variables]
    values = {key: value for key, value, _ in present}
    tensors: "List[Dict[int, tf.Tensor]]" = []
    for device in devices:  # entered once: it takes as long as an operation
        with tf.device(device):
            for key, _, hops in present:
                if device in hops:
                    values[key] = tf.raw_ops.Identity(input=values[key])
        tensors.append(dict(values))
    return list(map(Copies, tensors))
