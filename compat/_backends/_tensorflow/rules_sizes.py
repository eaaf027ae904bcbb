"""Rules of operations on numbers that depend on the number of rows alone, such as shapes."""

import numpy as np

from ... import _rows
from ..._rows import REPLICATED, Count, Replicated, Unknown
from .graph import constant, sizes_of

#: The placement of a number that depends on the number of rows, and is not proportional to it.
NOT_IN_PROPORTION = Count([])


def shape(op, values):
    return list(map(_rows.shape_of, values))


def size(op, values):
    return _rows.size_of(values[0])


def rank(op, values):
    placement = values[0].placement
    return placement if isinstance(placement, Unknown) else REPLICATED


def with_sizes(op, values):
    """Return the placement of a value without rows, reshaped to a shape with rows."""
    if isinstance(values[0].placement, Replicated):
        return Unknown()  # an input without rows takes a shape with them
    return single(op, values)


def picked(op, values):
    """Return the placements of elements of a vector of sizes, such as a shape."""
    sizes, arguments = values[0].placement, [constant(tensor) for tensor in op.inputs[1:]]
    is_vector = isinstance(sizes, Count) and sizes.places is not None and values[0].rank == 1
    if not is_vector or values[0].shape[0] is None or any(array is None for array in arguments):
        return _dependent(op)
    places = np.arange(values[0].shape[0])
    if op.type == "Unpack":
        return [_rows.counted(sizes, int(place)) for place in places]
    if op.type in ("Gather", "GatherV2"):
        chosen = arguments[0]
    elif len(arguments[0]) != 1:
        return _dependent(op)
    elif op.type == "Slice":
        begin, count = [argument.item() for argument in arguments]
        chosen = slice(begin, begin + count if count >= 0 else None)
    elif op.get_attr("shrink_axis_mask"):
        chosen = arguments[0].item()
    else:
        begin, end, step = [argument.item() for argument in arguments]
        begin = None if op.get_attr("begin_mask") else begin
        chosen = slice(begin, None if op.get_attr("end_mask") else end, step)
    return _rows.counted(sizes, places[chosen].tolist())


def _dependent(op):
    """Return the placements of results that depend on the number of rows in an unknown way."""
    return [NOT_IN_PROPORTION if t.shape.ndims == 0 else Count() for t in op.outputs]


def single(op, values):
    """Return the placement of a vector's product of sizes, or of its only element."""
    sizes = values[0].placement
    if values[0].rank == 0:
        return sizes
    return Count() if len(getattr(sizes, "places", None) or ()) == 1 else _dependent(op)


def cast_sizes(op, values):
    rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    return _dependent(op) if rounds else values[0].placement


def calculated(op, values):
    """Return the placement of arithmetic on sizes, proportional to the number of rows or not."""
    counted = [value for value in values if isinstance(value.placement, Count)]
    first, after = counted[0], sizes_of(op.outputs[0])
    kept = len(counted) == 1 and op.type in ("Mul", "Neg")
    if op.type in ("Maximum", "Minimum"):
        # The larger of two numbers that are proportional to the number of rows is so, too. So is
        # the larger one of a number of rows, which is at least 1, and 1; not that of a tenth of it.
        others = [constant(t) for t, v in zip(op.inputs, values) if v not in counted]
        is_one = op.type == "Maximum" and all(o is not None and o.max() <= 1 for o in others)
        pairs = zip(op.inputs, values)
        is_one = is_one and all(_is_integer(t) for t, v in pairs if v in counted)
        kept = all(value.placement == Count() for value in counted) and (not others or is_one)
    if after == []:
        return first.placement if kept else NOT_IN_PROPORTION
    if not kept or after is None or any(value.rank not in (0, 1) for value in values):
        return Count()
    if first.rank == 0 and first.placement == Count() and after[0]:
        return Count(range(after[0]))  # multiples of one number
    return first.placement


def _is_integer(tensor):
    """Return whether a number is an integer, maybe cast to another type."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype.is_integer


def joined_sizes(op, values):
    """Return the placement of a vector of sizes made of numbers, or of such vectors."""
    values, rank = (values, 0) if op.type == "Pack" else (values[:-1], 1)
    if any(value.rank != rank or None in value.shape for value in values):
        return Count()
    places, start = [], 0
    for value in values:
        placement = value.placement
        if isinstance(placement, Count):
            if rank and placement.places is None or placement == NOT_IN_PROPORTION:
                return Count()
            places += [start + place for place in (placement.places if rank else [0])]
        start += value.shape[0] if rank else 1
    return Count(places)
