"""Rules about rows of shapes and sizes, and what TensorFlow's rules have in common.

A rule is a function of the operation, the ``Value``s of its inputs, and of the function that tells
the value of a tensor known before any run. It returns one placement for all outputs, or a list.
"""

import functools

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Sharded, Unknown

#: Of a single number: it depends on the number of rows, and does not grow in proportion.
NOT_IN_PROPORTION = Count([])


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
        same = isinstance(placement, Sharded) and placement.replace(per=None) == self.rows
        return placement.replace(inner=None, even=False) if same else Mixed()


#: The coordinates of what is in a sparse tensor of rows.
COORDINATES = Positions(Sharded(0))


def attribute(op, name, default=None):
    # Before 1.8 asking for one that is not there adds it to a dictionary.
    return op.get_attr(name) if name in op.node_def.attr else default


class NotKnown(Exception):
    """A rule needs numbers that are not known before a run."""


def known_numbers(tensor, constant):
    """The numbers in a tensor that are known before any run, as a list, or None."""
    value = constant(tensor)
    return None if value is None else value.ravel().tolist()


def numbers(tensor, constant):
    """As ``known_numbers``, where nothing can be told without them."""
    found = known_numbers(tensor, constant)
    if found is None:
        raise NotKnown(tensor)
    return found


def sizes_of(tensor):
    return None if tensor.shape.ndims is None else tensor.shape.as_list()


def of_first(rule):
    """A rule of operations whose other inputs, sizes and axes for example, are fixed."""

    @functools.wraps(rule)
    def applied(op, values, constant):
        others = _rows.without_rows([value.placement for value in values[1:]])
        if others is None:
            return Mixed()
        if others == REPLICATED:
            return rule(op, values, constant)
        return Unknown("what it does depends on the number of rows")

    return applied


def shape(op, values, constant):
    return [_rows.shape_of(value) for value in values]


def size(op, values, constant):
    return _rows.size_of(values[0])


def rank(op, values, constant):
    placement = values[0].placement
    return placement if isinstance(placement, Unknown) else REPLICATED


# What becomes of sizes, where nothing has rows --------------------------------------------------


def picked(op, values, constant):
    """Elements of a vector of sizes, such as a shape."""
    import numpy as np

    sizes, shape = values[0].placement, values[0].shape
    arguments = [constant(tensor) for tensor in op.inputs[1:]]
    if not isinstance(sizes, Count) or sizes.places is None:
        return Count()
    if values[0].rank != 1 or shape[0] is None:
        return Count()
    places = np.arange(shape[0])
    if op.type == "Unpack":
        return [_rows.counted(sizes, int(place)) for place in places]
    if any(argument is None for argument in arguments):
        return Count()
    if op.type == "Slice":
        begin, count = int(arguments[0][0]), int(arguments[1][0])
        places = places[begin : begin + count if count >= 0 else None]
    elif op.type in ("Gather", "GatherV2"):
        places = places[arguments[0]]
    elif op.get_attr("shrink_axis_mask"):
        places = places[int(arguments[0][0])]
    elif len(arguments[0]) == 1:
        begin, end, step = [int(argument[0]) for argument in arguments]
        begin = None if op.get_attr("begin_mask") else begin
        places = places[begin : None if op.get_attr("end_mask") else end : step]
    else:
        return Count()
    return _rows.counted(sizes, places.tolist())


def calculated(op, values, constant):
    """What arithmetic makes of sizes, each in proportion to the rows or not."""
    counts = [v.placement for v in values if isinstance(v.placement, Count)]
    if not op.outputs[0].dtype.is_integer:
        return Count()
    kept = len(counts) == 1 and (len(values) == 1 or op.type == "Mul")
    # The larger of two that are in proportion to the rows is so, too, whatever the number of rows.
    if op.type in ("Maximum", "Minimum") and len(counts) == len(values):
        kept = all(count == Count() for count in counts)
    if op.outputs[0].shape.ndims == 0:
        return counts[0] if kept else NOT_IN_PROPORTION
    return counts[0] if kept and all(v.rank in (0, 1) for v in values) else Count()


def joined(op, values, constant):
    """A vector of sizes put together from numbers, or from such vectors."""
    values, rank = without_axis(op, values), 0 if op.type == "Pack" else 1
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


def without_axis(op, values):
    """What is put together: ``Concat`` takes the axis first, ``ConcatV2`` last."""
    return {"Concat": values[1:], "ConcatV2": values[:-1]}.get(op.type, values)
