"""Rules about rows of TensorFlow's operations that move elements without looking at them."""

import functools

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .row_sizes import known_numbers, numbers, of_first, sizes_of, without_axis


def _of_shape(rule):
    """A rule of rows whose other inputs, such as a new shape, are the same for all or sizes."""

    @functools.wraps(rule)
    def applied(op, values, constant):
        placement = values[0].placement
        others = _rows.without_rows([value.placement for value in values[1:]])
        if isinstance(placement, Sharded) and others is not None:
            return rule(op, values, constant)
        return placement if isinstance(placement, Partial) and others == REPLICATED else Mixed()

    return applied


@_of_shape
def reshape(op, values, constant):
    sizes, after = values[1].placement, sizes_of(op.outputs[0])
    wanted = _partly(op.inputs[1], constant)
    if isinstance(sizes, Count):
        places = sizes.places
    else:
        places = None if wanted is None else [i for i, each in enumerate(wanted) if each == -1]
    if places is None or after is None:
        return Unknown("the new shape is not known")
    after = [None if place in places else each for place, each in enumerate(after)]
    if after.count(None) > 1:
        return Unknown("the new shape is not known")
    return _rows.reshaped(values[0], after)


def with_sizes(op, values, constant):
    """``Reshape`` to a shape that has rows, of what has none."""
    if isinstance(values[0].placement, Replicated):
        return Unknown("an input without rows takes a shape with them")
    return Count()


def _partly(tensor, constant):
    """As ``known_numbers``; of a vector packed of some, None for those that are not known."""
    found = known_numbers(tensor, constant)
    if found is None and tensor.op.type == "Pack":
        packed = [known_numbers(each, constant) for each in tensor.op.inputs]
        return [each[0] if each else None for each in packed]
    return found


@of_first
def transpose(op, values, constant):
    return _rows.transposed(values[0], numbers(op.inputs[1], constant))


@of_first
def expand_dims(op, values, constant):
    return _rows.expanded(values[0], numbers(op.inputs[1], constant)[0])


def squeeze(op, values, constant):
    axes = list(op.get_attr("squeeze_dims"))
    if not axes and values[0].axis is not None and op.outputs[0].shape.ndims is not None:
        axes = [i for i, each in enumerate(values[0].shape) if each == 1]
        if values[0].rank - len(axes) != op.outputs[0].shape.ndims:
            return Unknown("the axes are not known")
    return _rows.squeezed(values[0], axes or None)


def split_along(op, values, constant):
    """``Split`` takes the axis first, ``SplitV`` last."""
    data, axis = (1, 0) if op.type == "Split" else (0, 2)
    return _rows.sliced(values[data], {numbers(op.inputs[axis], constant)[0]: "part"})


@of_first
def slice_of(op, values, constant):
    """``tf.slice``, which takes all that there is from 0 by a size of -1."""
    begin, count = [numbers(tensor, constant) for tensor in op.inputs[1:]]
    parts = {
        axis: "part"
        for axis, (start, size, length) in enumerate(zip(begin, count, values[0].shape))
        if start != 0 or size not in (-1, length)
    }
    return _rows.sliced(values[0], parts)


@_of_shape
def strided_slice(op, values, constant):
    """``x[:, 0]``; of a dimension taken whole no numbers need be known."""
    value = values[0]
    begin, end, step = [known_numbers(tensor, constant) for tensor in op.inputs[1:4]]
    count = sizes_of(op.inputs[3])
    if not count or count[0] is None:
        return Unknown("what is taken is not known")

    def masked(name):
        mask = op.get_attr(name + "_mask")
        return {i for i in range(count[0]) if mask >> i & 1}

    ellipsis, new, one = masked("ellipsis"), masked("new_axis"), masked("shrink_axis")
    from_first, to_last = masked("begin"), masked("end")
    rest = value.rank - (count[0] - len(ellipsis | new))
    taken = []  # what becomes of each dimension, and where there are new ones
    for i in range(count[0]):
        axis = len(taken) - taken.count("new")
        if i in ellipsis:
            taken += ["whole"] * rest
        elif i in new:
            taken.append("new")
        elif i in one:
            taken.append("one")
        else:
            starts = i in from_first or begin is not None and begin[i] == 0
            stops = i in to_last or end is not None and end[i] == value.shape[axis]
            whole = starts and stops and step is not None and step[i] == 1
            taken.append("whole" if whole else "part")
    parts = dict(enumerate(each for each in taken if each != "new"))
    if parts.get(value.axis) == "part" and (begin is None or end is None):
        return Unknown("what is taken is not known")
    result = _rows.sliced(value, {axis: part for axis, part in parts.items() if part != "whole"})
    left = [each for each in taken if each != "one"]
    new_axes = [axis for axis, each in enumerate(left) if each == "new"]
    return _rows.expanded(Value(result, [None] * (value.rank - taken.count("one"))), new_axes)


@of_first
def tile(op, values, constant):
    times, axis = _partly(op.inputs[1], constant), values[0].axis
    if times is not None and axis is not None and times[axis] is not None:
        times = [times[axis] if i == axis else 1 for i in range(len(times))]
    return _rows.tiled(values[0], times)


@_of_shape
def broadcast_to(op, values, constant):
    value, sizes, rank = values[0], values[1].placement, op.outputs[0].shape.ndims
    if isinstance(sizes, Replicated):
        return Mixed()  # as many rows on each device
    if rank is None or sizes.places != {value.axis + rank - value.rank}:
        return Unknown("the new shape is not known")
    return _rows.broadcast(value, rank)


@of_first
def pad(op, values, constant):
    pads = numbers(op.inputs[1], constant)  # before and after each dimension
    return _rows.resized(values[0], [place // 2 for place, size in enumerate(pads) if size])


# What is put together ---------------------------------------------------------------------------


def _of_rows_and_counts(values):
    """Rows beside their numbers, to look them up with, are best asked."""
    kinds = {type(value.placement) for value in values}
    return kinds >= {Count, Sharded} and kinds <= {Count, Sharded, Replicated}


def pack(op, values, constant):
    if _of_rows_and_counts(values):
        return Unknown("rows beside their numbers")
    return _rows.stacked(values, op.get_attr("axis"))


def unpack(op, values, constant):
    return _rows.sliced(values[0], {op.get_attr("axis"): "one"})


def concat(op, values, constant):
    axis = numbers(op.inputs[0 if op.type == "Concat" else -1], constant)[0]
    values = without_axis(op, values)
    if _of_rows_and_counts(values):
        return Unknown("rows beside their numbers")
    return _rows.concatenated(values, axis)
