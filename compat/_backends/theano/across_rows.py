"""Which operations of a graph of Theano's compute across the rows of a batch.

Followed from the inputs on, whose first axis has the rows, by the operations that Keras and its
users' Lambda layers are made of. Of an operation that is not known here, nor is the axis, until
the next layer of Keras gives its output: those have their rows first.
"""

UNKNOWN = object()  # what depends on the batch, and has its rows along an unknown axis


def mixed_rows(sharded, wanted):
    """The variables on the way to ``wanted`` that need rows of other shards.

    Arguments:
        sharded: variables whose first axis is split.
        wanted: the variables computed from them.

    Returns:
        Those that are the first to do so, in the order in which they are computed.
    """
    from theano.gof import graph

    axes, found, after = dict.fromkeys(sharded, 0), [], set()
    needed = set(graph.ancestors(wanted))
    for node in graph.io_toposort([], wanted):
        given = [axes.get(variable) for variable in node.inputs]
        if after.intersection(node.inputs):
            after.update(node.outputs)
        elif any(axis is not None for axis in given):
            for variable, axis in zip(node.outputs, _axes_after(node, given)):
                if axis is _MIXED and variable in needed:
                    found.append(variable)
                    after.add(variable)
                elif axis is UNKNOWN and hasattr(variable, "_keras_history"):
                    axes[variable] = 0 if variable.ndim else UNKNOWN
                else:
                    axes[variable] = axis
    return found


_MIXED = object()


def _axes_after(node, given):
    """For each output of ``node``, the axis of its rows, None, ``UNKNOWN`` or ``_MIXED``.

    Arguments:
        given: the same for each input; one of them is no None.
    """
    outputs = len(node.outputs)
    for operation in type(node.op).__mro__:
        rule = _RULES.get(operation.__name__)
        if rule is not None:
            known = [axis for axis in given if axis is not None]
            if all(axis is UNKNOWN for axis in known):
                return [UNKNOWN] * outputs
            axis = rule(node, given)
            return axis if isinstance(axis, list) else [axis] * outputs
    return [UNKNOWN] * outputs


def _elementwise(node, given):
    known = {axis for axis in given if axis is not None and axis is not UNKNOWN}
    return known.pop() if len(known) == 1 else _MIXED  # all pairs of rows


def _dimshuffle(node, given):
    order = node.op.new_order
    return order.index(given[0]) if given[0] in order else UNKNOWN


def _reduction(node, given):
    axis = node.op.axis
    along = range(node.inputs[0].ndim) if axis is None else _listed(axis)
    if given[0] in along:
        return _MIXED
    return given[0] - sum(reduced < given[0] for reduced in along)


def _listed(axis):
    return list(axis) if isinstance(axis, (list, tuple)) else [axis]


def _along(node, given):
    """An operation along ``op.axis``, or along an axis that is its second input."""
    axis = getattr(node.op, "axis", None)
    if len(node.inputs) > 1:
        axis = getattr(node.inputs[1], "data", None)
    if axis is None:
        return _MIXED
    return _MIXED if int(axis) % node.inputs[0].ndim == given[0] else given[0]


def _of_rows(node, given):
    """Softmax of each row of a matrix."""
    return _MIXED if given[0] == 1 else given[0]


def _dot(node, given):
    first, second = given
    if first is not None and second is not None:
        return UNKNOWN if UNKNOWN in given else _MIXED
    if second is None:
        return _MIXED if first == node.inputs[0].ndim - 1 else first
    if second == max(node.inputs[1].ndim - 2, 0):
        return _MIXED
    return node.inputs[0].ndim - 1


def _batched_dot(node, given):
    return 0 if set(given) <= {0, UNKNOWN} else _MIXED


def _reshape(node, given):
    if given[0] != 0:
        return UNKNOWN
    return UNKNOWN if node.outputs[0].broadcastable[:1] == (True,) else 0


def _indexed(node, given, first=0):
    """An index or a slice for each of the first axes of ``node.inputs[first]``."""
    axis = given[first]
    if axis is None or axis is UNKNOWN:
        return UNKNOWN
    indices = node.op.idx_list
    if axis < len(indices) and indices[axis] != slice(None):
        return _MIXED
    return axis - sum(not isinstance(index, slice) for index in indices[:axis])


def _assigned(node, given):
    """``set_subtensor``: the whole has the same axes as before."""
    indices = node.op.idx_list
    axis = given[0]
    if axis is None or axis is UNKNOWN:
        axis = given[1]
        if axis is None or axis is UNKNOWN or node.inputs[0].ndim != node.inputs[1].ndim:
            return UNKNOWN
    whole = axis >= len(indices) or indices[axis] == slice(None)
    return axis if whole else _MIXED


def _looked_up(node, given):
    """Rows of the first input by the numbers in the second."""
    return given[1] if given[0] is None else _MIXED


def _joined(node, given):
    known = {axis for axis in given[1:] if axis is not None and axis is not UNKNOWN}
    along = getattr(node.inputs[0], "data", None)
    if along is None or len(known) != 1:
        return UNKNOWN
    axis = known.pop()
    return _MIXED if int(along) % node.outputs[0].ndim == axis else axis


def _normalised(node, given):
    """Batch normalization: each device by its own rows, as everywhere; its statistics are not."""
    return [given[0]] + [_MIXED] * (len(node.outputs) - 1)


def _loop(node, given):
    """From row to row, if that hands something on, as K.foldl does."""
    operation = node.op
    handed_on = operation.n_mit_mot + operation.n_mit_sot + operation.n_sit_sot
    return _MIXED if handed_on and 0 in given[1 : 1 + operation.n_seqs] else UNKNOWN


def _first(node, given):
    return given[0] if given[0] == 0 else UNKNOWN


# By the names of the classes of operations, or of their parents.
_RULES = {
    "Elemwise": _elementwise,
    "DimShuffle": _dimshuffle,
    "CAReduce": _reduction,
    "MaxAndArgmax": _reduction,
    "Argmax": _reduction,
    "CumOp": _along,
    "SortOp": _along,
    "ArgSortOp": _along,
    "Softmax": _of_rows,
    "LogSoftmax": _of_rows,
    "Dot": _dot,
    "BatchedDot": _batched_dot,
    "Reshape": _reshape,
    "Subtensor": _indexed,
    "IncSubtensor": _assigned,
    "AdvancedSubtensor1": _looked_up,
    "Join": _joined,
    "Scan": _loop,
    "AbstractBatchNormTrain": _normalised,
    "AbstractBatchNormInference": _first,
    "BaseAbstractConv": _first,
    "Pool": _first,
}
