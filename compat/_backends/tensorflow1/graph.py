"""Queries on a static graph of TensorFlow 1: its loops, dependencies and variables."""

import collections

from .._tensorflow.graph import v1_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Container, Dict, Iterable, List, Set, Tuple


def _loops(op):
    """Yield the contexts of the loops around an operation, the innermost first."""
    context = op._get_control_flow_context()
    while context is not None:
        if is_loop(context):
            yield context
        context = context.outer_context


def loop_of(op: "Any") -> "Any":
    """Return the context of the innermost loop around an operation, or None."""
    return next(_loops(op), None)


def outermost_loop(op: "Any") -> "Any":
    """Return the context of the outermost loop that an operation is in, or enters, or None."""
    entered = op.outputs[0].consumers() if op.type in ("Enter", "RefEnter") else ()
    return next((loop for o in [op, *entered] for loop in list(_loops(o))[-1:]), None)


def is_loop(context: "Any") -> bool:
    """Return whether a control flow context, or None, is that of a loop."""
    return hasattr(context, "loop_exits")


def is_outermost(op: "Any") -> bool:
    """Return whether an operation runs unconditionally: outside of loops and conditions."""
    context = op._get_control_flow_context()
    if context is not None and op.type in ("Exit", "RefExit"):
        context = context.outer_context
    return context is None


def whole_loops(operations: "Iterable[Any]", among: "Iterable[Any]") -> "List[Any]":
    """Return those ``among`` operations that are in the same loops as some, or enter these."""
    loops = {loop for op in operations for loop in list(_loops(op))[-1:]}  # the outermost
    return [op for op in among if outermost_loop(op) in loops]


_WRITES = ("Assign", "Scatter", "Apply", "SparseApply")  # maybe after "Resource"


def dense_parts(*tensors: "Any") -> "List[Any]":
    """Return the dense tensors in tensors: a sparse one has indices, values and a shape."""
    parts = []
    for tensor in tensors:
        sparse = hasattr(tensor, "dense_shape")
        parts += [tensor.indices, tensor.values, tensor.dense_shape] if sparse else [tensor]
    return parts


def ancestors(
    fetches: "Iterable[Any]",
    stop: "Container[Any]",
    cut: "Callable[[Any], bool]" = lambda source: False,
) -> "Tuple[List[Any], Dict[Any, List[Any]]]":
    """Return the operations that fetches need, and their consumers.

    Arguments:
        fetches: tensors and operations.
        stop: operations that are left out, with what only they need.
        cut: returns whether not to follow an operation's input, a tensor or an operation to wait
            for.

    Returns:
        The operations; and by operation those that consume its results or wait for it. An input
        that is cut is itself a key there, in place of its operation.
    """
    pending = [getattr(fetch, "op", fetch) for fetch in fetches]
    needed: "Dict[Any, None]" = {}
    consumers: "Any" = collections.defaultdict(list)
    while pending:
        op = pending.pop()
        if op in needed or op in stop:
            continue
        needed[op] = None
        for source in list(op.inputs) + op.control_inputs:
            is_cut = cut(source)
            key = source if is_cut else getattr(source, "op", source)
            consumers[key].append(op)
            if not is_cut:
                pending.append(key)
        context = op._get_control_flow_context()
        if is_loop(context):
            # A loop's gradient needs all its variables, also those whose result is not used.
            pending.extend(tensor.op for tensor in context.loop_exits)
    return list(needed), consumers


def reached(starts: "Iterable[Any]", consumers: "Dict[Any, List[Any]]") -> "Set[Any]":
    """Return the operations that depend on ``starts``, and these."""
    dependent, pending = set(), list(starts)
    while pending:
        op = pending.pop()
        if op not in dependent:
            dependent.add(op)
            pending.extend(consumers.get(op, ()))
    return dependent


def is_shared(op: "Any") -> bool:
    """Return whether all replicas use an operation itself: a variable, its value, a placeholder."""
    if op.type.startswith(("Placeholder", "VarHandle", "Variable")):
        return True
    reads = op.type in ("ReadVariableOp", "Identity") and not op.control_inputs
    return reads and op.inputs[0].op.type.startswith(("VarHandle", "Variable"))


def handles(op: "Any") -> "List[Any]":
    """Return the variables and arrays among an operation's inputs, which fix its device."""
    return list(filter(is_handle, op.inputs))


def is_handle(tensor: "Any") -> bool:
    """Return whether a tensor is a variable or an array, not a value."""
    return tensor.dtype._is_ref_dtype or tensor.dtype.name == "resource"


def value_of(variable: "Any") -> "Any":
    """Return the value of a variable's handle: one tensor, which goes to each device once."""
    from tensorflow.python.ops import gen_resource_variable_ops

    for op in variable.consumers():
        reads = op.type == "ReadVariableOp" and not op.control_inputs
        if reads and op._get_control_flow_context() is None:
            return op.outputs[0]
    dtype = variable.op.get_attr("dtype")
    return gen_resource_variable_ops.read_variable_op(variable, dtype)


def writes(op: "Any") -> bool:
    """Return whether an operation writes a variable."""
    return op.type.replace("Resource", "").startswith(_WRITES) and bool(handles(op))


def source_of(handle: "Any") -> "Any":
    """Return the variable's operation of a handle, which may be in a condition for example."""
    source = handle.op
    while source.type in ("Switch", "RefSwitch", "Enter", "RefEnter", "Identity"):
        source = source.inputs[0].op
    return source


def variables_written(updates: "Iterable[Any]", others: "Iterable[Any]" = ()) -> "Set[Any]":
    """Return the variables that are written when updates are run.

    Arguments:
        updates: tensors and operations.
        others: variables that the graph does not list.
    """
    return variables_of([op for op in ancestors(updates, ())[0] if writes(op)], others)


def variables_of(operations: "Iterable[Any]", others: "Iterable[Any]" = ()) -> "Set[Any]":
    """Return the variables that operations write.

    Arguments:
        operations: the operations.
        others: variables that the graph does not list.
    """
    keys = v1_names().GraphKeys
    # An optimizer's operation (ResourceApplyAdam) writes its state, too.
    written = {source_of(handle) for op in operations for handle in handles(op)}
    variables = list(others)
    for graph in {op.graph for op in operations}:
        variables += graph.get_collection(keys.GLOBAL_VARIABLES)
        variables += graph.get_collection(keys.LOCAL_VARIABLES)
    return {
        variable for variable in variables if getattr(variable, "handle", variable).op in written
    }
