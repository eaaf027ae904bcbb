"""Rules about rows of TensorFlow's operations that compute, look up and make values.

They find out an operation's attributes for the rules of ``_rows``.
"""

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import attribute
from .row_sizes import Positions, known_numbers, numbers, of_first, sizes_of

# Element by element ---------------------------------------------------------------------------


def _of_values(rule):
    def applied(op, values):
        return rule(values)

    return applied


pointwise = _of_values(_rows.pointwise)
added = _of_values(_rows.added)
multiplied = _of_values(_rows.multiplied)
selected = _of_values(_rows.selected)


def extreme(op, values):
    return _rows.extreme(values, op.type[:3].lower())


def divided(op, values):
    rule = _rows.pointwise if op.outputs[0].dtype.is_integer else _rows.divided
    return rule(values)


def same(op, values):
    return [value.placement for value in values[: len(op.outputs)]]


def with_sizes(op, values):
    """It checks the sizes, of which that of the rows is another one on each device."""
    axis, sizes = values[0].axis, op.get_attr("shape")
    fixed = axis is not None and not sizes.unknown_rank and sizes.dim[axis].size >= 0
    return Mixed() if fixed else values[0].placement


def cast(op, values):
    before, after = op.inputs[0].dtype, op.outputs[0].dtype
    exact = after.is_floating or after.is_complex or before.is_integer and after.is_integer
    return values[0].placement if exact or before == after else _rows.pointwise(values)


def bias(op, values):
    """A vector along the channels."""
    value, bias = values
    if value.rank is None:
        return Unknown("a rank is not known")
    axis = _channels(op, value)
    shape = [1] * axis + list(bias.shape) + [1] * (value.rank - 1 - axis)
    placement = _rows.expanded(bias, set(range(value.rank)) - {axis})
    return _rows.added([value, Value(placement, shape)])


def _channels(op, value):
    return 1 if attribute(op, "data_format") == b"NCHW" else value.rank - 1


# Reductions and what goes along dimensions ------------------------------------------------------


@of_first
def reduced(op, values):
    how, axes = op.type.lower(), known_numbers(op.inputs[1])
    kept = bool(attribute(op, "keep_dims"))
    if how == "mean" and op.outputs[0].dtype.is_integer:
        how = "rounded mean"
    known = axes is not None or not kept and op.outputs[0].shape.ndims == 0
    if not known and not isinstance(values[0].placement, Partial):
        return Unknown("the axes are not known")
    return _rows.reduced(values[0], axes, how, kept)


def half_of_squares(op, values):
    return _rows.reduced(Value(_rows.pointwise(values), values[0].shape), None, "sum")


def all_but_channels(op, values):
    """The gradient of a bias."""
    value = values[0]
    return _rows.reduced(value, set(range(value.rank)) - {_channels(op, value)}, "sum")


@of_first
def along(op, values):
    axes = numbers(op.inputs[2 if op.type == "Roll" else 1])
    if op.type == "Reverse":
        axes = [axis for axis, reversed_ in enumerate(axes) if reversed_]
    return _rows.along(values[0], axes)


def along_last(*counts):
    """What goes along the last dimensions, so many for each input: the others are a batch's.

    Inputs beyond ``counts`` are the same for all rows.
    """

    def applied(op, values):
        pairs = list(zip(values, counts))
        if any(v.axis is None or v.axis >= v.rank - count for v, count in pairs):
            return Mixed()
        return by_row(*[values[0].axis] * len(pairs))(op, values)

    return applied


# Products ---------------------------------------------------------------------------------------


def product(op, values):
    names = ("transpose_a", "transpose_b", "adj_x", "adj_y")
    return _rows.product(values, *[op.get_attr(n) for n in names if n in op.node_def.attr])


def einsum(op, values):
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        return Unknown("its letters")
    letters, result = equation.split("->")
    return _rows.contracted(values, letters.split(","), result)


def sparse_product(op, values):
    """A sparse matrix, whose shape tells where it has rows, times a dense one."""
    positions, found, shape, dense = [value.placement for value in values]
    if not isinstance(positions, Positions) or shape != Count([0]):
        return Mixed()
    rows = isinstance(found, Sharded) and isinstance(dense, Replicated)
    return Sharded(0) if rows and not op.get_attr("adjoint_a") else Mixed()


# Looking up and sorting in ----------------------------------------------------------------------


def gathered(op, values):
    data, places = values[:2]
    if op.type == "ResourceGather":  # of a variable, by its handle
        ranks = op.outputs[0].shape.ndims, places.rank
        shape = None if None in ranks else [None] * (ranks[0] - ranks[1] + 1)
        data = Value(data.placement, shape)
    axis = numbers(op.inputs[2]) if len(values) > 2 else [0]
    if isinstance(places.placement, Positions):
        whole = axis == [data.axis] and (places.rank == 1 or places.shape[-1:] == (1,))
        return places.placement.looked_up(data) if whole else Mixed()
    return _rows.gathered([data, places], axis[0], attribute(op, "batch_dims", 0))


def gathered_by_coordinates(op, values):
    data, places = values[:2]
    if isinstance(places.placement, Positions):
        return places.placement.looked_up(data)
    if not _rows.have_own_rows([data, places]):
        return Mixed()
    if isinstance(data.placement, Replicated):
        return places.placement if places.axis != places.rank - 1 else Mixed()
    depth = None if places.rank is None else places.shape[-1]
    if not isinstance(places.placement, Replicated) or depth is None or data.axis < depth:
        return Mixed()
    return data.placement.replace(axis=data.axis - depth + places.rank - 1)


def segments(op, values):
    data, places, count = values
    if not isinstance(count.placement, Replicated):
        return Unknown("how many segments")
    beyond = data.axis is not None and places.rank is not None
    if beyond and isinstance(places.placement, Replicated):
        if data.axis < places.rank:
            return Mixed()
        return data.placement.replace(axis=data.axis - places.rank + 1)
    return _rows.scattered([places, data], op.type[len("UnsortedSegment") :].lower())


def counted_in(op, values):
    """Histograms of a fixed number of places."""
    if op.type == "HistogramFixedWidth":
        counted, fixed = values[:1], values[1:]
    else:
        counted, fixed = [values[0]] + list(values[2:]), values[1:2]
    if sizes_of(op.inputs[-1]) == [0]:  # no weights
        counted = counted[:1]
    if not all(isinstance(each.placement, Replicated) for each in fixed):
        return Mixed()
    if op.type == "DenseBincount" and values[0].rank != 1:
        two = values[0].rank == 2 and values[0].axis == 0
        return _rows.by_row(counted, [0] * len(counted)) if two else Mixed()
    binary = attribute(op, "binary_output", False)
    return _rows.scattered(counted, "max" if binary else "sum")


def scattered(op, values):
    places, data, sizes = values
    if not isinstance(sizes.placement, Replicated):
        return Unknown("the sizes")
    if places.rank is None or places.axis == places.rank - 1:
        return Mixed()
    return _rows.scattered([places, data])


def where(op, values):
    placement = values[0].placement
    first = values[0].axis == 0 and placement.even
    return Positions(placement) if first else Mixed()


def sequences_reversed(op, values):
    rows, along = attribute(op, "batch_dim", 0), op.get_attr("seq_dim")
    if isinstance(values[1].placement, Replicated):
        # The lengths of what is at each place of the dimension `batch_dim`.
        return _rows.along(values[0], [rows, along])
    return _rows.by_row(values, [rows, 0]) if rows != along else Mixed()


# Layers, new values, branches -------------------------------------------------------------------


def by_row(*axes):
    """A function of each row by itself; inputs beyond ``axes`` are the same for all rows."""

    def applied(op, values):
        return _rows.by_row(values, axes)

    return applied


def of_sizes_and_rows(op, values):
    """A gradient by an input: the sizes of that, a convolution's kernel, rows."""
    if isinstance(values[0].placement, Count):
        values = [Value(REPLICATED, values[0].shape)] + list(values[1:])
    return _rows.by_row(values, [None] * (len(values) - 1) + [0])


def of_kernel(op, values):
    """A convolution's gradient by its kernel, which is a sum over the rows."""
    placement = _rows.by_row(values, [0, None, 0])
    return Partial("sum") if isinstance(placement, Sharded) else placement


def normalized(op, values):
    training, others = op.get_attr("is_training"), len(op.outputs) - 1
    channels = op.get_attr("data_format").index(b"C")
    if values[0].axis != channels:
        rows = _rows.by_row(values, [0])
        if not isinstance(rows, Sharded):
            return rows
        # By each device's own rows, as documented.
        return [rows] + [Partial("mean") if training else REPLICATED] * others
    # Each row is a channel, as in tf.keras' LayerNormalization; only inference gets statistics.
    given = values[: 3 if training else 5]
    if not _rows.have_own_rows(given) or any(value.axis != 0 for value in given[1:]):
        return Mixed()
    rows = _rows.shared([value.placement.replace(axis=0) for value in given])
    return [rows.replace(axis=channels)] + [rows] * others if rows else Mixed()


def one_hot(op, values):
    placement, axis = values[0].placement, op.get_attr("axis")
    fixed = all(isinstance(each.placement, Replicated) for each in values[1:])
    if not fixed or not _rows.have_own_rows(values[:1]):
        return Mixed()
    return placement.replace(axis=placement.axis + (0 <= axis <= placement.axis))


def made(op, values):
    """A new value of a shape, or one without rows that is repeated to have it."""
    others = [value.placement for value in values]
    sizes = others.pop(1 if op.type in ("BroadcastTo", "Tile") else 0)
    if not all(isinstance(each, Replicated) for each in others):
        return _rows.without_rows([sizes] + others) or Mixed()
    return _rows.made(sizes, op.outputs[0].shape.ndims)


def joined(op, values):
    """The end of a condition: what one of its branches gave, and which."""
    kinds = [value.placement for value in values]
    which = Mixed() if any(isinstance(kind, Mixed) for kind in kinds) else REPLICATED
    return [_rows.chosen(REPLICATED, kinds), which]


def switched(op, values):
    condition = values[1].placement
    if isinstance(condition, Replicated):
        return values[0].placement
    return condition if isinstance(condition, Unknown) else Mixed()


@of_first
def space_to_batch(op, values):
    """Blocks side by side along the first dimension, or back."""
    import numpy as np

    placement = values[0].placement
    if not isinstance(placement, Sharded):
        return Mixed()
    if op.type.endswith("ND"):
        sizes = numbers(op.inputs[1])
    else:
        sizes = [op.get_attr("block_size")] * 2
    blocks, inner = int(np.prod(sizes)), len(sizes)
    if placement.axis:
        return placement if placement.axis > inner else Mixed()
    if op.type.startswith("Space"):
        return placement.replace(copies=placement.copies * blocks)
    if placement.copies % blocks:
        return Mixed()
    return placement.replace(copies=placement.copies // blocks)
