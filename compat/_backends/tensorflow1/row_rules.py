"""Rules about rows of TensorFlow's operations that compute, look up and make values.

A rule is a function of the operation and the ``Value``s of its inputs. It returns one placement for
all outputs, or a list. Here are those that find out an operation's attributes for ``_rows``.
"""

import numpy as np

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import attribute, known_numbers, sizes_of


class Positions(Mixed):
    """Positions of rows, counted within each device's part: to look rows up with, nothing else.

    Arguments:
        rows: the placement of what they are positions in.
    """

    __slots__ = ("rows",)

    def __init__(self, rows):
        super().__init__("positions are counted within each part")
        self.rows = rows

    def _said(self):
        return type(self), self.rows

    def looked_up(self, value):
        """The elements of ``value`` at these positions."""
        placement = value.placement
        same = isinstance(placement, Sharded) and placement == self.rows
        return placement.replace(inner=None, even=False) if same else Mixed()


class NotKnown(Exception):
    """A rule needs numbers that are not known before a run."""


def known(value):
    """What may be None, where nothing can be told without it."""
    if value is None:
        raise NotKnown
    return value


def numbers(tensor):
    return known(known_numbers(tensor))


def of_values(rule, *arguments):
    """A rule of all inputs, without attributes."""
    return lambda op, values: rule(values, *arguments)


def of_first(rule):
    """A rule of operations whose other inputs, sizes and axes for example, are fixed."""

    def applied(op, values):
        others = _rows.without_rows([value.placement for value in values[1:]])
        if others == REPLICATED:
            return rule(op, values)
        return Unknown("what it does depends on the number of rows") if others else Mixed()

    return applied


def by_numbers(rule, place=1):
    """A rule of the first input by the numbers in another one, where all others are fixed."""
    return of_first(lambda op, values: rule(values[0], numbers(op.inputs[place])))


# Element by element ---------------------------------------------------------------------------


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
    axis, rank = _channels(op, value), known(value.rank)
    shape = [1] * axis + list(known(bias.shape)) + [1] * (rank - 1 - axis)
    placement = _rows.expanded(bias, set(range(rank)) - {axis})
    return _rows.added([value, Value(placement, shape)])


def _channels(op, value):
    return 1 if attribute(op, "data_format") == b"NCHW" else known(value.rank) - 1


# Reductions and what goes along dimensions ------------------------------------------------------


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
    """The gradient of a bias."""
    value = values[0]
    return _rows.reduced(value, set(range(value.rank)) - {_channels(op, value)}, "sum")


def along_last(*counts):
    """What goes along the last dimensions, so many for each input: the others are a batch's.

    Inputs beyond ``counts`` are the same for all rows.
    """

    def applied(op, values):
        pairs = list(zip(values, counts))
        if any(v.axis is None or v.axis >= v.rank - count for v, count in pairs):
            return Mixed()
        return _rows.by_row(values, [values[0].axis] * len(pairs))

    return applied


# Products ---------------------------------------------------------------------------------------


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
    """A sparse matrix, whose shape tells where it has rows, times a dense one."""
    positions, found, shape, dense = [value.placement for value in values]
    if not isinstance(positions, Positions) or shape != Count([0]):
        return Mixed()
    rows = isinstance(found, Sharded) and isinstance(dense, Replicated)
    return Sharded(0) if rows and not op.get_attr("adjoint_a") else Mixed()


# Moving elements without looking at them --------------------------------------------------------


def squeeze(op, values):
    axes = list(op.get_attr("squeeze_dims"))
    if not axes and values[0].axis is not None and op.outputs[0].shape.ndims is not None:
        axes = [i for i, each in enumerate(values[0].shape) if each == 1]
        if values[0].rank - len(axes) != op.outputs[0].shape.ndims:
            return Unknown("the axes are not known")
    return _rows.squeezed(values[0], axes or None)


def split_along(op, values):
    """``Split`` takes the axis first, ``SplitV`` last."""
    data, axis = (1, 0) if op.type == "Split" else (0, 2)
    return _rows.sliced(values[data], {numbers(op.inputs[axis])[0]: "part"})


@of_first
def slice_of(op, values):
    """``tf.slice``, which takes all that there is from 0 by a size of -1."""
    begin, count = [numbers(tensor) for tensor in op.inputs[1:]]
    parts = {
        axis: "part"
        for axis, (start, size, length) in enumerate(zip(begin, count, values[0].shape))
        if start != 0 or size not in (-1, length)
    }
    return _rows.sliced(values[0], parts)


@of_first
def pad(op, values):
    pads = numbers(op.inputs[1])  # before and after each dimension
    return _rows.resized(values[0], [place // 2 for place, size in enumerate(pads) if size])


def _best_asked(values):
    """``Unknown`` where there are rows beside their numbers, to look them up with; else None."""
    kinds = {type(value.placement) for value in values}
    beside = kinds >= {Count, Sharded} and kinds <= {Count, Sharded, Replicated}
    return Unknown("rows beside their numbers") if beside else None


def pack(op, values):
    return _best_asked(values) or _rows.stacked(values, op.get_attr("axis"))


def unpack(op, values):
    return _rows.sliced(values[0], {op.get_attr("axis"): "one"})


def concat(op, values):
    values, (axis,) = values[:-1], numbers(op.inputs[-1])
    return _best_asked(values) or _rows.concatenated(values, axis)


# Looking up and sorting in ----------------------------------------------------------------------


def gathered(op, values):
    data, places = values[:2]
    if op.type == "ResourceGather":  # of the first dimension of a variable, by its handle
        data = Value(data.placement, [None])
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


def scattered(op, values):
    places, data, sizes = values
    if not isinstance(sizes.placement, Replicated):
        return Unknown("the sizes")
    if places.rank is None or places.axis == places.rank - 1:
        return Mixed()
    return _rows.scattered([places, data])


def counted_in(op, values):
    """Histograms of a fixed number of places."""
    counted, count, weights = values
    counted = [counted] if sizes_of(op.inputs[2]) == [0] else [counted, weights]
    if not isinstance(count.placement, Replicated):
        return Mixed()
    if op.type == "DenseBincount" and values[0].rank != 1:
        two = values[0].rank == 2 and values[0].axis == 0
        return _rows.by_row(counted, [0] * len(counted)) if two else Mixed()
    binary = attribute(op, "binary_output", False)
    return _rows.scattered(counted, "max" if binary else "sum")


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


@of_first
def one_hot(op, values):
    placement, axis = values[0].placement, op.get_attr("axis")
    if not isinstance(placement, Sharded):
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
    placement = values[0].placement
    if not isinstance(placement, Sharded):
        return Mixed()
    sizes = numbers(op.inputs[1])
    blocks = int(np.prod(sizes))
    if placement.axis:
        return placement if placement.axis > len(sizes) else Mixed()
    if op.type.startswith("Space"):
        return placement.replace(copies=placement.copies * blocks)
    if placement.copies % blocks:
        return Mixed()
    return placement.replace(copies=placement.copies // blocks)
