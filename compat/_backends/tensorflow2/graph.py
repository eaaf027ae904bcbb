"""Queries on a traced graph, on its functions, and on the trace or the tape around a call."""

import re
from typing import Any, Dict, Iterable, List, Optional, Tuple

import tensorflow as tf

from ... import _keras

# TensorFlow's module for the gradient tapes of a thread, private to it.
try:
    from tensorflow.python.eager import record as tapes
except ImportError:  # up to TensorFlow 2.12
    from tensorflow.python.eager import tape as tapes


#: Returns whether a gradient tape is recording.
recording = tapes.could_possibly_record
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
CONDITIONS = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}

#: Operations on a variable, or on a table of a lookup layer, that do not change it.
READS = {
    "LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather",
    "ResourceGatherNd", "VariableShape",
}  # fmt: skip

_RANDOM = re.compile("Multinomial|Normal|Random|Rng|Uniform")

# The attributes that name the functions an operation calls.
_BODIES = dict.fromkeys(CALLS, ["f"])
_BODIES.update(dict.fromkeys(CONDITIONS, ["then_branch", "else_branch"]))
_BODIES.update(dict.fromkeys(LOOPS, ["cond", "body"]))


def bodies_of(op: "tf.Operation") -> "List[Any]":
    """Return the graphs of the functions that an operation calls; None for a hidden one."""
    names = [op.get_attr(attribute).name for attribute in _BODIES.get(op.type, ())]
    return [getattr(op.graph._get_function(name), "graph", None) for name in names]


def is_random(op: "tf.Operation") -> bool:
    """Return whether an operation makes random numbers, or advances a generator of them."""
    return _RANDOM.search(op.type) is not None


def is_resource(tensor: "tf.Tensor") -> bool:
    """Return whether a tensor is a handle, or another object without elements."""
    return tensor.dtype.name in ("resource", "variant")


def captures(graph: "Any") -> "List[Tuple[tf.Tensor, tf.Tensor]]":
    """Return the captured inputs of a graph: pairs of the tensor within and the one outside."""
    return [(internal, external) for external, internal in graph.captures]


def carried(
    values: "Dict[str, Any]", tensors: "Iterable[tf.Tensor]", others: "Iterable[tf.Tensor]"
) -> "Dict[str, Any]":
    """Return the values of tensors by the names of the corresponding tensors of another graph."""
    pairs = zip(tensors, others)
    return {other.name: values[tensor.name] for tensor, other in pairs if tensor.name in values}


def eager(tensor: "tf.Tensor") -> "Optional[tf.Tensor]":
    """Return the eager tensor that a function being traced has captured, or None."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        pairs = captures(tensor.graph) if hasattr(tensor.graph, "captures") else []
        tensor = next((external for internal, external in pairs if internal is tensor), None)
    return tensor


def may_be_set(handle: "tf.Tensor") -> bool:
    """Return whether a handle's graph, or a function that it calls, may set the variable."""
    for op in handle.consumers():
        bodies, first = bodies_of(op), int(op.type in CONDITIONS)  # whose first input decides
        if None in bodies or not bodies and op.type not in READS:
            return True
        places = [n - first for n, tensor in enumerate(op.inputs) if tensor is handle]
        if any(may_be_set(body.inputs[place]) for body in bodies for place in places):
            return True
    return False


#: The name of the graph in which compat traces a call.
TRACE = "compat_trace"

# Graphs of branches and loops. Those of functions are kept for other calls.
_INLINE = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def is_within(name: str) -> bool:
    """Return whether the present graph is of that name, or a branch or loop in such a graph."""
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in _INLINE:
        graph = graph.outer_graph
    return getattr(graph, "name", None) == name


def is_for_xla() -> bool:
    """Return whether the present graph is that of a function with ``jit_compile=True``.

    All of it runs on one device, and XLA has no resources that are referred to by name.
    """
    # This query is not public.
    from tensorflow.python.ops import control_flow_util

    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


# Graphs that Keras traces for shapes or for saving. Nothing is computed in them here, and saved
# ones must not name this machine's devices. (``__call__`` is the one that Keras 3 exports;
# ``tf.function(model)`` has another name.)
_TRACES = (
    "scratch_graph", "build_graph",
    "_layer_call_fn", "_conditional_losses", "_wrapped_model", "__call__", "serving_default",
)  # fmt: skip


def only_traced(model: "Any") -> bool:
    """Return whether a call of a model now is traced for shapes or for saving alone."""
    keras = _keras.keras_of(model) or (_keras.is_layer(model) and tf.keras)
    graph = tf.compat.v1.get_default_graph() if keras and not tf.executing_eagerly() else None
    while graph is not None:
        if any(mark in getattr(graph, "name", "") for mark in _TRACES):
            return True
        graph = getattr(graph, "outer_graph", None)
    # A Keras 3 model as a pure function: the caller's scope holds its state.
    return _keras.in_stateless_scope(keras)
