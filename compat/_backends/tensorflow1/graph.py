"""Walking through a static graph of TensorFlow 1, and gradients of the user's own in it."""

import collections
import sys

from ... import errors
from ..._rows import Mixed, Partial, Replicated, Sharded


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


def attribute(op, name, default=None):
    """An attribute of an operation, which need not have it."""
    # Before 1.8 asking for one that is not there adds it to a dictionary.
    return op.get_attr(name) if name in op.node_def.attr else default


def line_of(op):
    """Where the user's code made an operation, as "file.py, line 12", or None."""
    frames = [(frame[0], frame[1]) for frame in op.traceback or ()]
    # What autograph makes of the user's functions is in files of its own.
    return errors.innermost_line([f for f in frames if "__autograph_generated_file" not in f[0]])


def constant(tensor):
    """The value of a tensor that is known before any run, as an array, or None."""
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.op.type == "Sub":  # the order of tf.transpose(x)
        first, second = map(constant, tensor.op.inputs)
        return None if first is None or second is None else first - second
    return value


def known_numbers(tensor):
    """The numbers in a tensor that are known before any run, as a list, or None."""
    value = constant(tensor)
    return None if value is None else value.ravel().tolist()


def sizes_of(tensor):
    return None if tensor.shape.ndims is None else tensor.shape.as_list()


# Gradients of the user's own ------------------------------------------------------------------

# They come by ``tf.custom_gradient`` and ``Graph.gradient_override_map``, and may compute across
# rows whatever their operation does. What such a function makes of what comes back to the operation
# is a part of the graph as any other, and is followed as that.


def has_own_gradient(op):
    """Whether an operation's gradient is not TensorFlow's."""
    from tensorflow.python.framework import ops

    if not op.inputs or not attribute(op, "_gradient_op_type"):
        return False
    try:
        function = ops.get_gradient_function(op)
    except LookupError:  # none is known by this name
        return False
    # What tf.custom_gradient registers calls the function that it was given. Those of TensorFlow
    # and Keras themselves are gradients of what they belong to, as in tf.recompute_grad.
    for name in ("tape_grad_fn", "grad_fn"):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if name in names:
            function = function.__closure__[names.index(name)].cell_contents
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package not in ("tensorflow", "tensorflow_core", "keras", "tf_keras")


class OwnGradient:
    """What an operation's gradient computes, in the operation's graph.

    Arguments:
        results: the placements of its outputs.

    Attributes:
        upstream: for each of its outputs a placeholder for what comes back to it, and how that
            depends on the rows.
        operations: those that compute the gradients of its inputs, in order.
        downstream: these gradients, None where there is none.
    """

    def __init__(self, op, results):
        from tensorflow.python.framework import ops

        tf = v1_names()
        with op.graph.as_default(), ops.control_dependencies(None):
            upstream = [tf.placeholder(each.dtype, each.shape) for each in op.outputs]
            before = len(op.graph.get_operations())
            found = ops.get_gradient_function(op)(op, *upstream)
            found = found if isinstance(found, (list, tuple)) else [found]
            self.downstream = [g if g is None else tf.convert_to_tensor(g) for g in found]
            self.operations = op.graph.get_operations()[before:]
        kinds = [Partial("sum") if isinstance(each, Replicated) else each for each in results]
        self.upstream = list(zip(upstream, kinds))

    def mixes(self, given, placement):
        """Whether the devices' gradients are not those of the whole batch.

        Arguments:
            given: the placements of the operation's inputs.
            placement: a function that tells that of a tensor.
        """
        return not all(
            gradient is None or not gradient.dtype.is_floating or _fits(before, placement(gradient))
            for before, gradient in zip(given, self.downstream)
        )


def _fits(before, after):
    if isinstance(before, Sharded):
        return isinstance(after, Sharded) and after.replace(inner=before.inner) == before
    if isinstance(before, Replicated):
        return after == Partial("sum")
    return not isinstance(after, Mixed)
