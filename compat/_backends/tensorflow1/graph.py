"""Walking through a static graph of TensorFlow 1, and copying parts of it."""

import collections
import copy
import itertools
import sys

from ... import errors


def v1_names(tensorflow=None):
    """TensorFlow under its 1.x names, which late versions of it call deprecated elsewhere."""
    tensorflow = tensorflow or sys.modules["tensorflow"]
    return getattr(tensorflow.compat, "v1", tensorflow)


def _loops(op):
    """The contexts of the loops that ``op`` is in, the innermost first."""
    context = op._get_control_flow_context()
    while context is not None:
        if is_loop(context):
            yield context
        context = context.outer_context


def loop_of(op):
    """The context of the innermost loop that ``op`` is in, or None."""
    return next(_loops(op), None)


def is_loop(context):
    return hasattr(context, "loop_exits")


def is_outermost(op):
    """Whether the results of ``op`` are there however loops and conditions go."""
    context = op._get_control_flow_context()
    if context is not None and op.type in ("Exit", "RefExit"):
        context = context.outer_context
    return context is None


def whole_loops(operations, among):
    """Those ``among`` operations that are in the same loops as some, and what enters these."""
    loops = {loop for op in operations for loop in list(_loops(op))[-1:]}  # the outermost

    def is_in(op):
        return not loops.isdisjoint(_loops(op))

    return [
        op
        for op in among
        if is_in(op)
        or op.type in ("Enter", "RefEnter")
        and any(map(is_in, op.outputs[0].consumers()))
    ]


# Graphs ---------------------------------------------------------------------------------------

_WRITES = ("Assign", "Scatter", "Apply", "SparseApply")  # maybe after "Resource"


def dense_parts(*tensors):
    """The dense tensors that tensors consist of: a sparse one of indices, values and shape."""
    parts = []
    for tensor in tensors:
        sparse = hasattr(tensor, "dense_shape")
        parts += [tensor.indices, tensor.values, tensor.dense_shape] if sparse else [tensor]
    return parts


def ancestors(fetches, stop, cut=None):
    """The operations that ``fetches`` need, those in ``stop`` left out, and who consumes what.

    Arguments:
        cut: whether not to follow an operation's input, a tensor or an operation to wait for; such
            an input is itself a key of who consumes what, in place of its operation.
    """
    pending = [getattr(fetch, "op", fetch) for fetch in fetches]
    found, consumers = {}, collections.defaultdict(list)  # type: Any, Any
    while pending:
        op = pending.pop()
        if op in found or op in stop:
            continue
        found[op] = None
        for source in list(op.inputs) + op.control_inputs:
            if cut is not None and cut(source):
                consumers[source].append(op)
            else:
                needed = getattr(source, "op", source)
                consumers[needed].append(op)
                pending.append(needed)
        context = op._get_control_flow_context()
        if is_loop(context):
            # A loop's gradient needs all its variables, also those whose result is not used.
            pending.extend(tensor.op for tensor in context.loop_exits)
    return list(found), consumers


def reached(starts, consumers):
    """The operations that depend on ``starts``, themselves left in."""
    found, pending = set(), list(starts)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending.extend(consumers.get(op, ()))
    return found


def is_shared(op):
    """Whether all replicas use this very operation: variables, their values, what is fed."""
    if op.type.startswith(("Placeholder", "VarHandle", "Variable")):
        return True
    reads = op.type in ("ReadVariableOp", "Identity") and not op.control_inputs
    return reads and op.inputs[0].op.type.startswith(("VarHandle", "Variable"))


def handles(op):
    """The variables and arrays among the inputs of ``op``, on whose device TensorFlow wants it."""
    return [t for t in op.inputs if t.dtype._is_ref_dtype or t.dtype.name == "resource"]


def value_of(variable):
    """The value of a variable's handle: one tensor, so that it goes to each device once."""
    from tensorflow.python.ops import gen_resource_variable_ops

    for op in variable.consumers():
        reads = op.type == "ReadVariableOp" and not op.control_inputs
        if reads and op._get_control_flow_context() is None:
            return op.outputs[0]
    dtype = variable.op.get_attr("dtype")
    return gen_resource_variable_ops.read_variable_op(variable, dtype)


def _only_lets_a_variable_in(op):
    """Whether ``op`` brings a variable into a loop, which only reads it there.

    The variable may as well be read before: else the loop runs on two devices, and sends the
    variable from one to the other at each of its steps.
    """
    return (
        op.type == "Enter"
        and op.inputs[0].op.type == "VarHandleOp"
        and all(consumer.type == "ReadVariableOp" for consumer in op.outputs[0].consumers())
    )


def writes(op):
    """Whether ``op`` writes a variable."""
    return op.type.replace("Resource", "").startswith(_WRITES) and bool(handles(op))


def source_of(handle):
    """The operation that is the variable of a handle, which may be in a condition for example."""
    source = handle.op
    while source.type in ("Switch", "RefSwitch", "Enter", "RefEnter", "Identity"):
        source = source.inputs[0].op
    return source


def variables_written(updates, others=()):
    """The variables that are written when ``updates`` are run."""
    return variables_of([op for op in ancestors(updates, ())[0] if writes(op)], others)


def variables_of(operations, others=()):
    """The variables that operations write."""
    keys = v1_names().GraphKeys
    # An optimizer's operation (ResourceApplyAdam) writes its state, too.
    written = {source_of(handle) for op in operations for handle in handles(op)}
    found = list(others)
    for graph in {op.graph for op in operations}:
        found += graph.get_collection(keys.GLOBAL_VARIABLES)
        found += graph.get_collection(keys.LOCAL_VARIABLES)
    return {variable for variable in found if getattr(variable, "handle", variable).op in written}


class Copy:
    """Copied operations by the operations they were copied from, and what replaces tensors."""

    def __init__(self, operations, replaced):
        self.operations = operations
        self.replaced = replaced

    def tensor(self, tensor):
        """What was put in the place of a tensor, or its copy, or itself."""
        if tensor in self.replaced or tensor.op not in self.operations:
            return self.replaced.get(tensor, tensor)
        return self.operations[tensor.op].outputs[tensor.value_index]


def copy_operations(
    operations, replaced, scope, device, seed=0, controls=lambda op: [], fixed_batch=None
):
    """Copy operations into their own graph.

    Arguments:
        operations: what to copy; may hold loops and conditions, if whole.
        replaced: tensors of other operations, and the ones to use in their place.
        scope: a name to put before those of the operations.
        device: a device function for the copies; None: as the originals.
        seed: a number that sets apart the random numbers of several copies.
        controls: a function from an operation that is not copied to those to wait for instead.
        fixed_batch: the number of rows the originals were made for, where it is fixed; the
            copies compute other numbers.
    """
    copies = Copy({}, replaced)
    # Before 1.8 TensorFlow infers shapes as it imports, so inputs have to come first.
    operations = sorted(operations, key=lambda op: op._id)
    if not operations:
        return copies
    tf, graph = v1_names(), operations[0].graph
    copied, prefix = set(operations), graph.unique_name(scope) + "/"
    definition = tf.GraphDef()
    definition.versions.CopyFrom(graph.graph_def_versions)
    outside, waiting = {}, []
    entering = {op for op in operations if _only_lets_a_variable_in(op)}
    for op in operations:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop("_class", None)  # colocated with originals
        if op in entering:
            replaced[op.inputs[0]] = value = value_of(op.inputs[0])
            node.attr["T"].type = value.dtype.as_datatype_enum
        elif op.type == "ReadVariableOp" and op.inputs[0].op in entering:
            node.op = "Identity"
            node.attr["T"].type = node.attr["dtype"].type
            del node.attr["dtype"]
        if device is not None:
            node.device = ""
        for tensor in op.inputs:
            if tensor.op not in copied or tensor in replaced:
                is_read = tensor.op.type == "ReadVariableOp" and is_shared(tensor.op)
                inside = value_of(tensor.op.inputs[0]) if is_read else tensor
                outside[tensor.name] = replaced.get(inside, inside)
        for other in op.control_inputs:
            if other not in copied:
                node.input.remove("^" + other.name)
                waiting.append((op, other))
        if has_custom_gradient(op):
            node.attr["_gradient_op_type"].s = _gradient_of_copy(op, copies)
        _set_apart(node, prefix, seed)
    with graph.as_default(), tf.device(None), tf.device(device):
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
    """Have a copy do nothing together with its original, and not be made for a fixed batch."""
    if node.op in ("Enter", "RefEnter"):  # loops with one name would run as one
        node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
    if "element_shape" in node.attr and node.attr["element_shape"].shape.dim:
        node.attr["element_shape"].shape.dim[0].size = -1  # of a loop's array: a fixed batch
    if seed and "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
        node.attr["seed2"].i = (node.attr["seed2"].i + seed * 104729) % 2**31


def _set_shapes(originals, copies, fixed_batch):
    """Keras sets shapes that TensorFlow does not infer, of RNNs for example."""
    for tensor, copied in zip(originals, copies):
        if tensor.shape.ndims is not None:
            shape = [None if size == fixed_batch else size for size in tensor.shape.as_list()]
            if fixed_batch and shape and shape[0] and shape[0] % fixed_batch == 0:
                shape[0] = None  # as many rows for each row of the batch: steps, for example
            copied.set_shape(shape)


def attribute(op, name, default=None):
    """An attribute of an operation, which need not have it."""
    # Before 1.8 asking for one that is not there adds it to a dictionary.
    return op.get_attr(name) if name in op.node_def.attr else default


def has_custom_gradient(op):
    """Whether the gradient of ``op`` is a function of the user's, by ``tf.custom_gradient``."""
    return attribute(op, "_gradient_op_type", b"").startswith(b"CustomGradient")


_numbers = itertools.count()


def _gradient_of_copy(op, copies):
    """Register a gradient for the copy of ``op``, and return its name.

    The user's function holds tensors of the original. What it computes of them is copied, to be
    computed of the copies.
    """
    from tensorflow.python.framework import ops

    if loop_of(op) is not None:
        raise errors.unsupported(
            "tensorflow",
            f"run {op.name} on several devices: it is in a loop and has a gradient by "
            "tf.custom_gradient, which is bound to the undivided batch",
            "Use one device: gpus=1, or give the operation TensorFlow's own gradient.",
        )

    gradient = ops.get_gradient_function(op)
    name = f"CustomGradientOfCopy{next(_numbers)}"

    @ops.RegisterGradient(name)
    def gradient_of_copy(_, *upstream):
        results = gradient(op, *upstream)
        tensors = [result for result in results if result is not None]
        starts = set(copies.operations) | {tensor.op for tensor in copies.replaced}
        given = {tensor.op for tensor in upstream if tensor is not None}  # whole numbers get none
        _, consumers = ancestors(tensors, starts | given)
        moving = reached([start for start in starts if start in consumers], consumers) - starts
        boundary = {
            tensor: copies.tensor(tensor)
            for each in moving
            for tensor in each.inputs
            if tensor.op not in moving
        }
        with op.graph.name_scope(None), ops.control_dependencies(None):
            moved = copy_operations(moving, boundary, "gradient", None)
        return [None if result is None else moved.tensor(result) for result in results]

    return name.encode()


def _copy_contexts(copies, prefix):
    """Give copies of loops and conditions contexts of their own, which gradients need."""
    from tensorflow.python.ops.control_flow_ops import ControlFlowContext

    tf, contexts = v1_names(), {}  # type: Any, Dict[Any, Any]
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
            vars(result).update((name, convert(each)) for name, each in vars(context).items())
            result._name = prefix + context._name
            if is_loop(context):
                result._grad_state = None
        return contexts[context]

    for op, copied in copies.operations.items():
        context = op._get_control_flow_context()
        if context is not None:
            copied._set_control_flow_context(context_of(context))
