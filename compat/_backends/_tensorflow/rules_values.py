"""Rules of operations that compute new values, or select among values.

A rule is a function of the operation and the ``Value``s of its inputs. It returns one placement for
all outputs, or a list.
"""

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import attribute, known_numbers
from .rules_common import NotKnown, Positions, of_first, of_values, required

pointwise = of_values(_rows.pointwise)
added = of_values(_rows.added)
multiplied = of_values(_rows.multiplied)
selected = of_values(_rows.selected)


def extreme(op, values):
    return _rows.extreme(values, op.type[:3].lower())


def divided(op, values):
    rule = _rows.pointwise if op.outputs[0].dtype.is_integer else _rows.divided
    return rule(values)


def same(op, values):
    return [value.placement for value in values[: len(op.outputs)]]


def cast(op, values):
    before, after = op.inputs[0].dtype, op.outputs[0].dtype
    exact = after.is_floating or after.is_complex or before.is_integer and after.is_integer
    return values[0].placement if exact or before == after else _rows.pointwise(values)


def bias(op, values):
    """Return the placement of a vector added along the channels."""
    value, bias = values
    axis, rank = _channels(op, value), required(value.rank)
    shape = [1] * axis + list(required(bias.shape)) + [1] * (rank - 1 - axis)
    placement = _rows.expanded(bias, set(range(rank)) - {axis})
    return _rows.added([value, Value(placement, shape)])


def _channels(op, value):
    return 1 if attribute(op, "data_format") == b"NCHW" else required(value.rank) - 1


@of_first
def reduced(op, values):
    how, axes = op.type.lower(), known_numbers(op.inputs[1])
    kept = bool(attribute(op, "keep_dims"))
    if how == "mean" and op.outputs[0].dtype.is_integer:
        how = "rounded mean"
    of_all = op.outputs[0].shape.ndims == 0 and not kept
    if axes is None and not of_all and not isinstance(values[0].placement, Partial):
        raise NotKnown
    return _rows.reduced(values[0], axes, how, kept)


def half_of_squares(op, values):
    return _rows.reduced(Value(_rows.pointwise(values), values[0].shape), None, "sum")


def all_but_channels(op, values):
    """Return the placement of a bias' gradient."""
    value = values[0]
    return _rows.reduced(value, set(range(value.rank)) - {_channels(op, value)}, "sum")


def along_last(*counts):
    """Return a rule of operations along the last dimensions; the others are batch dimensions.

    Arguments:
        counts: the number of these dimensions, for each input. Further inputs are replicated.
    """

    def applied(op, values):
        pairs = list(zip(values, counts))
        if any(v.axis is None or v.axis >= v.rank - count for v, count in pairs):
            return Mixed()
        return _rows.by_row(values, [values[0].axis] * len(pairs))

    return applied


def product(op, values):
    names = ("transpose_a", "transpose_b", "adj_x", "adj_y")
    return _rows.product(values, *[op.get_attr(n) for n in names if n in op.node_def.attr])


def einsum(op, values):
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        raise NotKnown
    letters, result = equation.split("->")
    return _rows.contracted(values, letters.split(","), result)


def sparse_product(op, values):
    """Return the placement of a sparse matrix, whose shape shows its rows, times a dense one."""
    positions, elements, shape, dense = [value.placement for value in values]
    if not isinstance(positions, Positions) or shape != Count([0]):
        return Mixed()
    rows = isinstance(elements, Sharded) and isinstance(dense, Replicated)
    return Sharded(0) if rows and not op.get_attr("adjoint_a") else Mixed()


def of_sizes_and_rows(op, values):
    """Return the placement of a gradient by an input: of its sizes, a kernel and rows."""
    if isinstance(values[0].placement, Count):
        values = [Value(REPLICATED, values[0].shape)] + list(values[1:])
    return _rows.by_row(values, [None] * (len(values) - 1) + [0])


def of_kernel(op, values):
    """Return the placement of a convolution's gradient by its kernel: a sum over the rows."""
    placement = _rows.by_row(values, [0, None, 0])
    return Partial("sum") if isinstance(placement, Sharded) else placement


def normalized(op, values):
    training, others = op.get_attr("is_training"), len(op.outputs) - 1
    channels = op.get_attr("data_format").index(b"C")
    if values[0].axis != channels:
        rows = _rows.by_row(values, [0])
        if not isinstance(rows, Sharded):
            return rows
        # By the statistics of each device's shard, as documented.
        return [rows] + [Partial("mean") if training else REPLICATED] * others
    # Each row is a channel, as in tf.keras' LayerNormalization; only inference gets statistics.
    values = values[: 3 if training else 5]
    if not _rows.have_own_rows(values) or any(value.axis != 0 for value in values[1:]):
        return Mixed()
    rows = _rows.shared([value.placement.replace(axis=0) for value in values])
    return [rows.replace(axis=channels)] + [rows] * others if rows else Mixed()


def joined(op, values):
    """Return the placements of a condition's end: the result of a branch, and its index."""
    placements = [value.placement for value in values]
    index = Mixed() if any(isinstance(p, Mixed) for p in placements) else REPLICATED
    return [_rows.chosen(REPLICATED, placements), index]


def switched(op, values):
    condition = values[1].placement
    if isinstance(condition, Replicated):
        return values[0].placement
    return condition if isinstance(condition, Unknown) else Mixed()
