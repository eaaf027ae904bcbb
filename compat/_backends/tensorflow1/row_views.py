"""Rules about rows of TensorFlow's operations that move elements without looking at them."""

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .row_sizes import numbers, of_first, sizes_of, without_axis


def reshape(op, values, constant):
    value, sizes = values[0], values[1].placement
    if isinstance(value.placement, Partial) and isinstance(sizes, Replicated):
        return value.placement
    if not isinstance(value.placement, Sharded):
        return Mixed()
    after, wanted = sizes_of(op.outputs[0]), numbers(op.inputs[1], constant)
    if wanted is None:
        wanted = _partly(op.inputs[1], constant)
    if isinstance(sizes, Count):
        places = sizes.places
    elif isinstance(sizes, Replicated):
        places = None if wanted is None else [i for i, each in enumerate(wanted) if each == -1]
    else:
        return Mixed()
    if places is None or after is None:
        return Unknown("the new shape is not known")
    for place, each in enumerate(wanted or ()):
        if each not in (None, -1):
            after[place] = each
    after = [None if place in places else each for place, each in enumerate(after)]
    if after.count(None) > 1:
        return Unknown("the new shape is not known")
    return _rows.reshaped(value, after)


def with_sizes(op, values, constant):
    """``Reshape`` to a shape that has rows, of what has none."""
    if isinstance(values[0].placement, Replicated):
        return Unknown("an input without rows takes a shape with them")
    return Count()


def _partly(tensor, constant):
    """The numbers in a vector that is packed of some that are known; None for the others."""
    op = tensor.op
    if op.type != "Pack":
        return None
    found = [numbers(each, constant) for each in op.inputs]
    return [each[0] if each else None for each in found]


@of_first
def transpose(op, values, constant):
    order = numbers(op.inputs[1], constant)
    if order is None:
        return Unknown("the order of dimensions is not known")
    return _rows.transposed(values[0], order)


@of_first
def expand_dims(op, values, constant):
    axis = numbers(op.inputs[1], constant)
    return Unknown("the axis is not known") if axis is None else _rows.expanded(values[0], axis[0])


def squeeze(op, values, constant):
    axes = list(op.get_attr("squeeze_dims"))
    if not axes and values[0].axis is not None and op.outputs[0].shape.ndims is not None:
        axes = [i for i, each in enumerate(values[0].shape) if each == 1]
        if values[0].rank - len(axes) != op.outputs[0].shape.ndims:
            return Unknown("the axes are not known")
    return _rows.squeezed(values[0], axes or None)


def split_along(op, values, constant):
    """``Split`` takes the axis first, ``SplitV`` last."""
    data = values[1] if op.type == "Split" else values[0]
    axis = numbers(op.inputs[0 if op.type == "Split" else 2], constant)
    if axis is None:
        return Unknown("the axis is not known")
    return _rows.sliced(data, {axis[0]: "part"})


@of_first
def slice_of(op, values, constant):
    """``tf.slice``, which takes all that there is from 0 by a size of -1."""
    begin, count = [numbers(tensor, constant) for tensor in op.inputs[1:]]
    if begin is None or count is None:
        return Unknown("the sizes are not known")
    before = values[0].shape
    parts = {
        axis: "part"
        for axis, (start, size) in enumerate(zip(begin, count))
        if start != 0 or size not in (-1, before[axis])
    }
    return _rows.sliced(values[0], parts)


def strided_slice(op, values, constant):
    """``x[:, 0]``; of a dimension taken whole no numbers need be known."""
    value = values[0]
    others = _rows.without_rows([each.placement for each in values[1:]])
    if isinstance(value.placement, Partial) and others == REPLICATED:
        return value.placement
    if not isinstance(value.placement, Sharded) or others is None:
        return Mixed()
    begin, end, step = [numbers(tensor, constant) for tensor in op.inputs[1:4]]
    count = sizes_of(op.inputs[3])
    if not count or count[0] is None:
        return Unknown("what is taken is not known")
    masks = {
        name: op.get_attr(name + "_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    used = sum(1 for i in range(count[0]) if not (masks["new_axis"] | masks["ellipsis"]) >> i & 1)
    parts, new, axis, made = {}, [], 0, 0
    for i in range(count[0]):
        has = {name for name, mask in masks.items() if mask >> i & 1}
        if "ellipsis" in has:
            made += value.rank - used
            axis += value.rank - used
            continue
        if "new_axis" in has:
            new.append(made)
            made += 1
            continue
        if "shrink_axis" in has:
            parts[axis] = "one"
        else:
            made += 1
            starts = "begin" in has or begin is not None and begin[i] == 0
            stops = "end" in has or end is not None and end[i] == value.shape[axis]
            if not (starts and stops and step is not None and step[i] == 1):
                parts[axis] = "part"
            if axis == value.axis and axis in parts and (begin is None or end is None):
                return Unknown("what is taken is not known")
        axis += 1
    result = _rows.sliced(value, parts)
    if new and isinstance(result, Sharded):
        gone = sum(each == "one" for each in parts.values())
        return _rows.expanded(Value(result, [None] * (value.rank - gone)), new)
    return result


@of_first
def tile(op, values, constant):
    times = numbers(op.inputs[1], constant)
    if times is None:
        times = _partly(op.inputs[1], constant)
    axis = values[0].axis
    if times is not None and axis is not None and times[axis] is not None:
        times = [times[axis] if i == axis else 1 for i in range(len(times))]
    return _rows.tiled(values[0], times)


def broadcast_to(op, values, constant):
    value, sizes = values[0], values[1].placement
    rank = op.outputs[0].shape.ndims
    if rank is None:
        return Unknown("the new shape is not known")
    if isinstance(value.placement, Partial) and isinstance(sizes, Replicated):
        return value.placement
    if not isinstance(value.placement, Sharded) or not isinstance(sizes, Count):
        return Mixed()  # as many rows on each device
    if sizes.places != {value.axis + rank - value.rank}:
        return Unknown("the new shape is not known")
    return _rows.broadcast(value, rank)


@of_first
def pad(op, values, constant):
    pads = constant(op.inputs[1])
    if pads is None:
        return Unknown("the padding is not known")
    return _rows.resized(values[0], [axis for axis, pair in enumerate(pads) if any(pair)])


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
    axis = numbers(op.inputs[0 if op.type == "Concat" else -1], constant)
    if axis is None:
        return Unknown("the axis is not known")
    if _of_rows_and_counts(without_axis(op, values)):
        return Unknown("rows beside their numbers")
    return _rows.concatenated(without_axis(op, values), axis[0])
