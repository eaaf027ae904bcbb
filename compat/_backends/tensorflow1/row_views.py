"""Rules about rows of TensorFlow's operations that move elements without looking at them."""

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .row_sizes import known_numbers, numbers, of_first, single, sizes_of, without_axis


def _of_shape(rule):
    """A rule of rows whose other inputs, such as a new shape, are the same for all or sizes."""

    def applied(op, values):
        placement = values[0].placement
        others = _rows.without_rows([value.placement for value in values[1:]])
        if isinstance(placement, Sharded) and others is not None:
            return rule(op, values)
        return placement if isinstance(placement, Partial) and others == REPLICATED else Mixed()

    return applied


@_of_shape
def reshape(op, values):
    sizes, after = values[1].placement, sizes_of(op.outputs[0])
    wanted = _partly(op.inputs[1])
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


def with_sizes(op, values):
    """``Reshape`` to a shape that has rows, of what has none."""
    if isinstance(values[0].placement, Replicated):
        return Unknown("an input without rows takes a shape with them")
    return single(op, values)


def _partly(tensor):
    """As ``known_numbers``; of a vector packed of some, None for those that are not known."""
    found = known_numbers(tensor)
    if found is None and tensor.op.type == "Pack":
        packed = [known_numbers(each) for each in tensor.op.inputs]
        return [each[0] if each else None for each in packed]
    return found


@of_first
def transpose(op, values):
    return _rows.transposed(values[0], numbers(op.inputs[1]))


@of_first
def expand_dims(op, values):
    return _rows.expanded(values[0], numbers(op.inputs[1])[0])


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


@_of_shape
def strided_slice(op, values):
    """``x[:, 0]``; of a dimension taken whole no numbers need be known."""
    value = values[0]
    begin, end, step = [known_numbers(tensor) for tensor in op.inputs[1:4]]
    count = sizes_of(op.inputs[3])
    if not count or count[0] is None:
        return Unknown("what is taken is not known")

    def masked(name):
        mask = op.get_attr(name + "_mask")
        return {i for i in range(count[0]) if mask >> i & 1}

    ellipsis, new, one = masked("ellipsis"), masked("new_axis"), masked("shrink_axis")
    from_first, to_last = masked("begin"), masked("end")
    axis, parts, new_axes, left = 0, {}, [], 0  # of the dimensions looked at, so many are left
    for i in range(count[0]):
        if i in new:
            new_axes.append(left)
        elif i in one:
            parts[axis] = "one"
        elif i not in ellipsis:
            starts = i in from_first or begin is not None and begin[i] == 0
            stops = i in to_last or end is not None and end[i] == value.shape[axis]
            if not (starts and stops and step is not None and step[i] == 1):
                parts[axis] = "part"
        rest = value.rank - count[0] + len(ellipsis | new) if i in ellipsis else 1
        axis += 0 if i in new else rest
        left += 0 if i in one else rest
    if parts.get(value.axis) == "part" and (begin is None or end is None):
        return Unknown("what is taken is not known")
    result = _rows.sliced(value, parts)
    return _rows.expanded(Value(result, [None] * (value.rank - len(one))), new_axes)


@of_first
def tile(op, values):
    times, axis = _partly(op.inputs[1]), values[0].axis
    if times is not None and axis is not None and times[axis] is not None:
        times = [times[axis] if i == axis else 1 for i in range(len(times))]
    return _rows.tiled(values[0], times)


@_of_shape
def broadcast_to(op, values):
    value, sizes, rank = values[0], values[1].placement, op.outputs[0].shape.ndims
    if isinstance(sizes, Replicated):
        return Mixed()  # as many rows on each device
    if rank is None or sizes.places != {value.axis + rank - value.rank}:
        return Unknown("the new shape is not known")
    return _rows.broadcast(value, rank)


@of_first
def pad(op, values):
    pads = numbers(op.inputs[1])  # before and after each dimension
    return _rows.resized(values[0], [place // 2 for place, size in enumerate(pads) if size])


# What is put together ---------------------------------------------------------------------------


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
    axis = numbers(op.inputs[0 if op.type == "Concat" else -1])[0]
    values = without_axis(op, values)
    return _best_asked(values) or _rows.concatenated(values, axis)
