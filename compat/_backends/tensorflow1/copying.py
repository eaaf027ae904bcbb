"""Copies of parts of a static graph, in the same graph."""

import copy
import itertools
from typing import Any, Dict

from ... import errors
from .._tensorflow.graph import v1_names
from . import graph


def _only_lets_a_variable_in(op):
    """Return whether an operation brings a variable into a loop, which only reads it there.

    The variable may as well be read before: else the loop runs on two devices, and sends the
    variable from one to the other at each of its steps.
    """
    return (
        op.type == "Enter"
        and op.inputs[0].op.type == "VarHandleOp"
        and all(consumer.type == "ReadVariableOp" for consumer in op.outputs[0].consumers())
    )


class Copy:
    """Copies of operations in their graph.

    Arguments:
        operations: the copies, by the operations that they were made of.
        replaced: tensors, by those in whose place the copies take them.
    """

    def __init__(self, operations: "Dict[Any, Any]", replaced: "Dict[Any, Any]") -> None:
        self.operations = operations
        self.replaced = replaced

    def tensor(self, tensor: "Any") -> "Any":
        """Return a tensor's replacement, or else its copy, or else the tensor itself."""
        if tensor in self.replaced or tensor.op not in self.operations:
            return self.replaced.get(tensor, tensor)
        return self.operations[tensor.op].outputs[tensor.value_index]


def copy_operations(
    operations,
    replaced,
    scope,
    device,
    seed=0,
    controls=lambda op: [],
    fixed_batch=None,
    local=lambda tensor: tensor,
    gathered=None,
):
    """Copy operations into their own graph, and return the ``Copy``.

    Arguments:
        operations: the operations; of loops and conditions all or none.
        replaced: tensors of other operations, and the ones to use in their place; variables that
            the copies read before a loop are added.
        scope: a name to put before those of the operations.
        device: a device function for the copies; None: as the originals.
        seed: a number by which the random numbers of several copies differ.
        controls: a function from an operation that is not copied to those to wait for instead.
        fixed_batch: the number of rows the originals were made for, where it is fixed; the
            copies compute other numbers.
        local: a function from another tensor of other operations to the one to use in its place.
        gathered: by operations, a position among their inputs and the tensor to use there.
    """
    copies = Copy({}, replaced)
    # Before 1.8 TensorFlow infers shapes as it imports, so inputs have to come first.
    operations = sorted(operations, key=lambda op: op._id)
    if not operations:
        return copies
    tf, within = v1_names(), operations[0].graph
    copied, prefix = set(operations), within.unique_name(scope) + "/"
    definition = tf.GraphDef()
    definition.versions.CopyFrom(within.graph_def_versions)
    outside, waiting = {}, []
    entering = {op for op in operations if _only_lets_a_variable_in(op)}
    for op in operations:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop("_class", None)  # colocated with originals
        if op in entering:
            replaced[op.inputs[0]] = value = local(graph.value_of(op.inputs[0]))
            node.attr["T"].type = value.dtype.as_datatype_enum
        elif op.type == "ReadVariableOp" and op.inputs[0].op in entering:
            node.op = "Identity"
            node.attr["T"].type = node.attr["dtype"].type
            del node.attr["dtype"]
        if device is not None:
            node.device = ""
        place, whole = (gathered or {}).get(op, (None, None))
        for index, tensor in enumerate(op.inputs):
            if index == place:
                node.input[index] = f"gathered_{len(outside)}"
                outside[node.input[index] + ":0"] = whole
            elif tensor.op not in copied or tensor in replaced:
                is_read = tensor.op.type == "ReadVariableOp" and graph.is_shared(tensor.op)
                inside = graph.value_of(tensor.op.inputs[0]) if is_read else tensor
                known = inside in replaced
                outside[tensor.name] = replaced[inside] if known else local(inside)
        for other in op.control_inputs:
            if other not in copied:
                node.input.remove("^" + other.name)
                waiting.append((op, other))
        gradient = node.attr["_gradient_op_type"].s if "_gradient_op_type" in node.attr else b""
        if gradient.startswith(b"CustomGradient"):
            node.attr["_gradient_op_type"].s = _gradient_of_copy(op, copies)
        _set_apart(node, prefix, seed)
    # TensorFlow 1.7 fails to import operations where others are colocated.
    uncolocated = within.colocate_with(None, ignore_existing=True)
    with within.as_default(), uncolocated, tf.device(None), tf.device(device):
        results = tf.import_graph_def(
            definition, outside, [op.name for op in operations], name=prefix
        )
    copies.operations.update(zip(operations, results))
    for op in set(operations) - entering:
        _set_shapes(op.outputs, copies.operations[op].outputs, fixed_batch)
    for op, other in waiting:
        copies.operations[op]._add_control_inputs(controls(other))
    _copy_contexts(copies, prefix)
    return copies


def _set_apart(node, prefix, seed):
    """Separate a copy from its original: in loops, in fixed sizes and in random numbers."""
    if node.op in ("Enter", "RefEnter"):  # loops with one name would run as one
        node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
    if "element_shape" in node.attr and node.attr["element_shape"].shape.dim:
        node.attr["element_shape"].shape.dim[0].size = -1  # of a loop's array: a fixed batch
    if seed and "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
        node.attr["seed2"].i = (node.attr["seed2"].i + seed * 104729) % 2**31


def _set_shapes(originals, copies, fixed_batch):
    """Give copies the shapes that TensorFlow does not infer, such as those that Keras has set."""
    for tensor, copied in zip(originals, copies):
        if tensor.shape.ndims is not None:
            shape = [None if size == fixed_batch else size for size in tensor.shape.as_list()]
            if fixed_batch and shape and shape[0] and shape[0] % fixed_batch == 0:
                shape[0] = None  # as many rows for each row of the batch: steps, for example
            copied.set_shape(shape)


_numbers = itertools.count()


def _gradient_of_copy(op, copies):
    """Register a gradient for the copy of an operation, and return its name.

    The user-defined function holds tensors of the original. The operations that compute with them
    are copied, to compute with the copies.
    """
    from tensorflow.python.framework import ops

    if graph.loop_of(op) is not None:
        raise errors.unsupported(
            "tensorflow",
            f"run {op.name} on several devices: it is in a loop and has a gradient by "
            "tf.custom_gradient, which is bound to the whole batch",
            "Use one device: gpus=1, or give the operation TensorFlow's own gradient.",
        )

    gradient = ops.get_gradient_function(op)
    name = f"CustomGradientOfCopy{next(_numbers)}"

    @ops.RegisterGradient(name)
    def gradient_of_copy(_, *upstream):
        results = gradient(op, *upstream)
        tensors = [result for result in results if result is not None]
        starts = set(copies.operations) | {tensor.op for tensor in copies.replaced}
        # Whole numbers get no gradient.
        sources = {tensor.op for tensor in upstream if tensor is not None}
        _, consumers = graph.ancestors(tensors, starts | sources)
        moving = graph.reached(starts, consumers) - starts
        boundary = {
            tensor: copies.tensor(tensor)
            for source in moving
            for tensor in source.inputs
            if tensor.op not in moving
        }
        with op.graph.name_scope(None), ops.control_dependencies(None):
            moved = copy_operations(moving, boundary, "gradient", None)
        return [None if result is None else moved.tensor(result) for result in results]

    return name.encode()


def _copy_contexts(copies, prefix):
    """Copy the contexts of loops and conditions, which gradients need, for the copies."""
    from tensorflow.python.ops.control_flow_ops import ControlFlowContext

    tf = v1_names()
    contexts: "Dict[Any, Any]" = {}
    new_names = {
        tensor.name: copies.tensor(tensor).name for op in copies.operations for tensor in op.outputs
    }

    def convert(value):
        if isinstance(value, tf.Tensor):
            return copies.tensor(value)
        if isinstance(value, tf.Operation):
            return copies.operations.get(value, value)
        if isinstance(value, ControlFlowContext):
            return context_of(value)
        if isinstance(value, set):
            return {new_names.get(name, name) for name in value}
        if isinstance(value, dict):
            return {new_names.get(name, name): convert(item) for name, item in value.items()}
        if isinstance(value, list):
            return [convert(v) for v in value if getattr(v, "op", None) in copies.operations]
        return value

    def context_of(context):
        if context not in contexts:
            contexts[context] = result = copy.copy(context)
            vars(result).update((name, convert(value)) for name, value in vars(context).items())
            # Of a gradient's loop it keeps _grad_state, by which TensorFlow refuses second ones.
            result._name = prefix + context._name
        return contexts[context]

    for op, copied in copies.operations.items():
        context = op._get_control_flow_context()
        if context is not None:
            copied._set_control_flow_context(context_of(context))
