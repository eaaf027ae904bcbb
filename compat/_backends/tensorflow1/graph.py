"""Queries on a static graph of TensorFlow 1: its loops, dependencies and variables."""

import collections

from .._tensorflow.graph import v1_names


def _loops(op):
    """Yield the contexts of the loops that ``op`` is in, the innermost first."""
    context = op._get_control_flow_context()
    while context is not None:
        if is_loop(context):
            yield context
        context = context.outer_context


def loop_of(op):
    """Return the context of the innermost loop that ``op`` is in, or None."""
    return next(_loops(op), None)


def is_loop(context):
    return hasattr(context, "loop_exits")


def is_outermost(op):
    """Return whether the results of ``op`` are there however loops and conditions go."""
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


_WRITES = ("Assign", "Scatter", "Apply", "SparseApply")  # maybe after "Resource"


def dense_parts(*tensors):
    """The dense tensors that tensors consist of: a sparse one of indices, values and shape."""
    parts = []
    for tensor in tensors:
        sparse = hasattr(tensor, "dense_shape")
        parts += [tensor.indices, tensor.values, tensor.dense_shape] if sparse else [tensor]
    return parts


def ancestors(fetches, stop, cut=lambda source: False):
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
            is_cut = cut(source)
            needed = source if is_cut else getattr(source, "op", source)
            consumers[needed].append(op)
            if not is_cut:
                pending.append(needed)
        context = op._get_control_flow_context()
        if is_loop(context):
            # A loop's gradient needs all its variables, also those whose result is not used.
            pending.extend(tensor.op for tensor in context.loop_exits)
    return list(found), consumers


def reached(starts, consumers):
    """Return the operations that depend on ``starts``, themselves left in."""
    found, pending = set(), list(starts)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending.extend(consumers.get(op, ()))
    return found


def is_shared(op):
    """Return whether all replicas use this very operation: variables, their values, what is fed."""
    if op.type.startswith(("Placeholder", "VarHandle", "Variable")):
        return True
    reads = op.type in ("ReadVariableOp", "Identity") and not op.control_inputs
    return reads and op.inputs[0].op.type.startswith(("VarHandle", "Variable"))


def handles(op):
    """The variables and arrays among the inputs of ``op``, on whose device TensorFlow wants it."""
    return [t for t in op.inputs if t.dtype._is_ref_dtype or t.dtype.name == "resource"]


def value_of(variable):
    """Return the value of a variable's handle: one tensor, so that it goes to each device once."""
    from tensorflow.python.ops import gen_resource_variable_ops

    for op in variable.consumers():
        reads = op.type == "ReadVariableOp" and not op.control_inputs
        if reads and op._get_control_flow_context() is None:
            return op.outputs[0]
    dtype = variable.op.get_attr("dtype")
    return gen_resource_variable_ops.read_variable_op(variable, dtype)


def writes(op):
    """Return whether ``op`` writes a variable."""
    return op.type.replace("Resource", "").startswith(_WRITES) and bool(handles(op))


def source_of(handle):
    """The operation that is the variable of a handle, which may be in a condition for example."""
    source = handle.op
    while source.type in ("Switch", "RefSwitch", "Enter", "RefEnter", "Identity"):
        source = source.inputs[0].op
    return source


def variables_written(updates, others=()):
    """Return the variables that are written when ``updates`` are run."""
    return variables_of([op for op in ancestors(updates, ())[0] if writes(op)], others)


def variables_of(operations, others=()):
    """Return the variables that operations write."""
    keys = v1_names().GraphKeys
    # An optimizer's operation (ResourceApplyAdam) writes its state, too.
    written = {source_of(handle) for op in operations for handle in handles(op)}
    found = list(others)
    for graph in {op.graph for op in operations}:
        found += graph.get_collection(keys.GLOBAL_VARIABLES)
        found += graph.get_collection(keys.LOCAL_VARIABLES)
    return {variable for variable in found if getattr(variable, "handle", variable).op in written}
