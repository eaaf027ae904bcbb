"""Rules of operations that gather elements by their positions, or scatter them to these."""

from ... import _rows
from ..._rows import Mixed, Replicated, Sharded, Unknown, Value
from .graph import attribute, sizes_of
from .rules_common import Positions, numbers, of_first


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
        return Unknown()  # how many segments
    beyond = data.axis is not None and places.rank is not None
    if beyond and isinstance(places.placement, Replicated):
        if data.axis < places.rank:
            return Mixed()
        return data.placement.replace(axis=data.axis - places.rank + 1)
    return _rows.scattered([places, data], op.type[len("UnsortedSegment") :].lower())


def scattered(op, values):
    places, data, sizes = values
    if not isinstance(sizes.placement, Replicated):
        return Unknown()  # the sizes
    if places.rank is None or places.axis == places.rank - 1:
        return Mixed()
    return _rows.scattered([places, data])


def counted_in(op, values):
    """Return the placement of a histogram with a fixed number of bins."""
    data, count, weights = values
    counted = [data] if sizes_of(op.inputs[2]) == [0] else [data, weights]
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
        # The lengths along the dimension `batch_dim`.
        return _rows.along(values[0], [rows, along])
    return _rows.by_row(values, [rows, 0]) if rows != along else Mixed()


@of_first
def one_hot(op, values):
    placement, axis = values[0].placement, op.get_attr("axis")
    if not isinstance(placement, Sharded):
        return Mixed()
    return placement.replace(axis=placement.axis + (0 <= axis <= placement.axis))
