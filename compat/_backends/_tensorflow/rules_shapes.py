"""Rules of operations that change the shape or the order of elements, or make new ones."""

import numpy as np

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import known_numbers, sizes_of
from .rules_common import NotKnown, numbers, of_first, required


def _of_shape(rule):
    """Return a rule of rows whose other inputs, such as a new shape, are replicated or sizes."""

    def applied(op, values):
        placement = values[0].placement
        others = _rows.without_rows([value.placement for value in values[1:]])
        if isinstance(placement, Sharded) and others is not None:
            return rule(op, values)
        return placement if isinstance(placement, Partial) and others == REPLICATED else Mixed()

    return applied


@_of_shape
def reshape(op, values):
    sizes, after = values[1].placement, required(sizes_of(op.outputs[0]))
    if isinstance(sizes, Count):
        places = required(sizes.places)
    else:
        places = [i for i, size in enumerate(required(_partly(op.inputs[1]))) if size == -1]
    after = [None if place in places else size for place, size in enumerate(after)]
    if after.count(None) > 1:
        raise NotKnown
    return _rows.reshaped(values[0], after)


def _partly(tensor):
    """Return the ``known_numbers``; of a packed vector, with None for those that are not known."""
    numbers = known_numbers(tensor)
    if numbers is None and tensor.op.type == "Pack":
        packed = [known_numbers(scalar) for scalar in tensor.op.inputs]
        return [scalar[0] if scalar else None for scalar in packed]
    return numbers


@_of_shape
def strided_slice(op, values):
    """Return the placement of ``x[:, 0]``; a dimension taken whole needs no known numbers."""
    value, (count,) = values[0], required(sizes_of(op.inputs[3]))
    begin, end, step = [known_numbers(tensor) for tensor in op.inputs[1:4]]

    def masked(name):
        mask = op.get_attr(name + "_mask")
        return {i for i in range(required(count)) if mask >> i & 1}

    ellipsis, new, one = masked("ellipsis"), masked("new_axis"), masked("shrink_axis")
    from_first, to_last = masked("begin"), masked("end")
    taken = []  # of each dimension, old or new, in order
    for i in range(count):
        axis = len(taken) - taken.count("new")
        if i in ellipsis:
            taken += ["all"] * (value.rank - count + len(ellipsis | new))
        elif i in new | one:
            taken.append("new" if i in new else "one")
        else:
            starts = i in from_first or begin is not None and begin[i] == 0
            stops = i in to_last or end is not None and end[i] == value.shape[axis]
            is_all = starts and stops and step is not None and step[i] == 1
            taken.append("all" if is_all else "part")
    old = [part for part in taken if part != "new"]
    if None in (begin, end) and old[value.axis : value.axis + 1] == ["part"]:
        # A number of the rows is the same on each device, whatever a trial of three may show.
        if all(isinstance(v.placement, Replicated) for v in values[1:]):
            return Mixed()
        raise NotKnown
    result = _rows.sliced(value, {i: part for i, part in enumerate(old) if part != "all"})
    left = [part for part in taken if part != "one"]
    new_axes = [place for place, part in enumerate(left) if part == "new"]
    return _rows.expanded(Value(result, [None] * (value.rank - old.count("one"))), new_axes)


@of_first
def tile(op, values):
    return _rows.tiled(values[0], _partly(op.inputs[1]))


@_of_shape
def broadcast_to(op, values):
    value, sizes, rank = values[0], values[1].placement, required(op.outputs[0].shape.ndims)
    if isinstance(sizes, Replicated):
        return Mixed()  # as many rows on each device
    if sizes.places != {value.axis + rank - value.rank}:
        raise NotKnown
    return _rows.broadcast(value, rank)


def with_sizes(op, values):
    """Return the placement of a value whose sizes are checked: that of rows differs by device."""
    axis, sizes = values[0].axis, op.get_attr("shape")
    fixed = axis is not None and not sizes.unknown_rank and sizes.dim[axis].size >= 0
    return Mixed() if fixed else values[0].placement


def squeeze(op, values):
    axes = list(op.get_attr("squeeze_dims"))
    if not axes and values[0].axis is not None and op.outputs[0].shape.ndims is not None:
        axes = [i for i, size in enumerate(values[0].shape) if size == 1]
        if values[0].rank - len(axes) != op.outputs[0].shape.ndims:
            return Unknown()  # the axes are not known
    return _rows.squeezed(values[0], axes or None)


def split_along(op, values):
    """Return the placement of parts: ``Split`` takes the axis first, ``SplitV`` last."""
    data, axis = (1, 0) if op.type == "Split" else (0, 2)
    return _rows.sliced(values[data], {numbers(op.inputs[axis])[0]: "part"})


@of_first
def slice_of(op, values):
    """Return the placement of ``tf.slice``, of which a size of -1 takes all the rest."""
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


def _rows_and_numbers(values):
    """Return ``Unknown`` for rows beside their numbers, by which they are gathered; else None."""
    kinds = {type(value.placement) for value in values}
    beside = kinds >= {Count, Sharded} and kinds <= {Count, Sharded, Replicated}
    return Unknown() if beside else None  # rows beside their numbers


def pack(op, values):
    return _rows_and_numbers(values) or _rows.stacked(values, op.get_attr("axis"))


def unpack(op, values):
    return _rows.sliced(values[0], {op.get_attr("axis"): "one"})


def concat(op, values):
    values, (axis,) = values[:-1], numbers(op.inputs[-1])
    return _rows_and_numbers(values) or _rows.concatenated(values, axis)


def made(op, values):
    """Return the placement of a new value of a shape, or of one repeated to have it."""
    others = [value.placement for value in values]
    sizes = others.pop(1 if op.type in ("BroadcastTo", "Tile") else 0)
    if not all(isinstance(placement, Replicated) for placement in others):
        return _rows.without_rows([sizes] + others) or Mixed()
    return _rows.made(sizes, op.outputs[0].shape.ndims)


@of_first
def space_to_batch(op, values):
    """Return the placement of blocks side by side along the first dimension, or the reverse."""
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
