"""Rules of ``tensor[index]``: torch indexes stand-ins without memory, which show their rows."""

import torch

from ... import _rows
from .graph import Call
from .row_counts import RowCount

# How many rows stand-ins have, which are shapes without memory: no index asks for so many.
_MANY = 2**31 - 1


def indexed(call, values):
    """Index a tensor: torch shows where a stand-in of its shape has the rows then."""
    tensor, index = call.args[:2]
    value = values[0]
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.as_tensor(part) if isinstance(part, list) else part for part in parts]
    rest = tensor.dim() - sum(map(_dimensions, parts))
    axis, dim, looked_up, stand_ins = value.axis, 0, [], []
    for part in parts:
        count = rest if part is Ellipsis else _dimensions(part)
        is_of_rows = value.axis in range(dim, dim + count)
        if isinstance(part, torch.Tensor):
            looked_up.append(_looked_up(call, part, value, dim if is_of_rows else None))
            axis = None if is_of_rows else axis  # they are in what is looked up
        elif is_of_rows and isinstance(part, slice) and isinstance(part.stop, RowCount):
            if int(part.stop) == tensor.shape[dim]:
                part = slice(part.start, _MANY, part.step)
        stand_ins.append(part)
        dim += count
    numbers_of_rows = _rows.pointwise(looked_up)
    if axis is None and not isinstance(numbers_of_rows, _rows.Sharded):
        return numbers_of_rows
    if axis is not None and numbers_of_rows != _rows.REPLICATED:
        return _rows.Mixed()
    if any(_is_mask(part) and not part.dim() for part in stand_ins):
        return _rows.Mixed()  # a new dimension, of one element or of none
    rank = max([numbers.rank for numbers in looked_up], default=0)
    numbers = stand_in([1] * rank, getattr(numbers_of_rows, "axis", None)) if rank else 0
    index = []
    for part in stand_ins:
        index += [numbers] * _dimensions(part) if isinstance(part, torch.Tensor) else [part]
    placement = numbers_of_rows if axis is None else value.placement
    return moved(placement, stand_in(tensor.shape, axis)[tuple(index)])


def _dimensions(part):
    """Return how many dimensions a part of an index is for; the rest is for an ellipsis."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if _is_mask(part) else 1


def _is_mask(part):
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _looked_up(call, part, value, dim):
    """Return the ``Value`` of the numbers that a tensor in an index stands for.

    Arguments:
        call: the call.
        part: the tensor.
        value: that of the tensor that is indexed.
        dim: where it begins, if it is for the dimension of the rows; else None.
    """
    numbers, placement, shape = call.value(part), _rows.Mixed(), list(part.shape)
    if _is_mask(part):  # it leaves another number of elements to each row
        shape = [None]
        if dim is None and numbers.placement == _rows.REPLICATED:
            placement = _rows.REPLICATED
        elif dim is not None and dim == value.axis and numbers.axis == 0:
            placement = _rows.Sharded(0, inner=None, even=False)
    elif dim is None:
        return numbers
    elif shape and value.placement == _rows.Sharded(value.axis):
        # x[range(rows), numbers]; of one row any dimension may be that of the rows.
        if part.numel() == call.rows and part.flatten().tolist() == list(range(call.rows)):
            placement = _rows.Sharded(shape.index(max(shape)))
    return _rows.Value(placement, shape)


def indexed_and_set(call, values):
    """Set a part of a tensor, which keeps its placement or is mixed."""
    tensor, index, value = call.args
    whole = values[0].placement
    getting = Call(torch.Tensor.__getitem__, (tensor, index), {}, call.rows)
    part = indexed(getting, getting.values)
    is_tensor = isinstance(value, torch.Tensor)
    new = call.value(value) if is_tensor else _rows.Value(_rows.REPLICATED, [])
    result = _rows.pointwise([_rows.Value(part, tensor[index].shape), new])
    return whole if result == part and isinstance(part, type(whole)) else _rows.Mixed()


def moved(placement, stand_in):
    """Return the placement of rows where a view of a stand-in has them, if it has all of them."""
    sizes = list(stand_in.shape)
    return placement.replace(axis=sizes.index(_MANY)) if _MANY in sizes else _rows.Mixed()


def stand_in(shape, axis):
    """Return a tensor of a shape, without memory, that has ``_MANY`` rows along an axis."""
    sizes = [_MANY if place == axis else size for place, size in enumerate(shape)]
    return torch.empty(sizes, dtype=torch.int64, device="meta")
