"""Rules about rows of shapes and sizes, and what TensorFlow's rules have in common.

A rule is a function of the operation and the ``Value``s of its inputs. It returns one placement for
all outputs, or a list.
"""

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
        same = isinstance(placement, Sharded) and placement == self.rows
        return placement.replace(inner=None, even=False) if same else Mixed()


class NotKnown(Exception):
    """A rule needs numbers that are not known before a run."""


def constant(tensor):
    """The value of a tensor that is known before any run, as an array, or None."""
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.op.type == "Sub":  # the order of tf.transpose(x)
        first, second = map(constant, tensor.op.inputs)
        return None if first is None or second is None else first - second
    return value


def known_numbers(tensor):
    """The numbers in a tensor that are known before any run, as a list, or None."""
    value = constant(tensor)
    return None if value is None else value.ravel().tolist()


def numbers(tensor):
    """As ``known_numbers``, where nothing can be told without them."""
    found = known_numbers(tensor)
    if found is None:
        raise NotKnown(tensor)
    return found


def sizes_of(tensor):
    return None if tensor.shape.ndims is None else tensor.shape.as_list()


def of_first(rule):
    """A rule of operations whose other inputs, sizes and axes for example, are fixed."""

    def applied(op, values):
        others = _rows.without_rows([value.placement for value in values[1:]])
        if others == REPLICATED:
            return rule(op, values)
        return Unknown("what it does depends on the number of rows") if others else Mixed()

    return applied


def shape(op, values):
    return [_rows.shape_of(value) for value in values]


def size(op, values):
    return _rows.size_of(values[0])


def rank(op, values):
    placement = values[0].placement
    return placement if isinstance(placement, Unknown) else REPLICATED


# What becomes of sizes, where nothing has rows --------------------------------------------------


def picked(op, values):
    """Elements of a vector of sizes, such as a shape."""
    import numpy as np

    sizes, arguments = values[0].placement, [constant(tensor) for tensor in op.inputs[1:]]
    known = isinstance(sizes, Count) and sizes.places is not None and values[0].rank == 1
    if not known or values[0].shape[0] is None or any(each is None for each in arguments):
        return _not_told(op)
    places = np.arange(values[0].shape[0])
    if op.type == "Unpack":
        return [_rows.counted(sizes, int(place)) for place in places]
    if op.type in ("Gather", "GatherV2"):
        chosen = arguments[0]
    elif len(arguments[0]) != 1:
        return _not_told(op)
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


def _not_told(op):
    """Results that depend on the number of rows: a single number may grow in any way."""
    return [NOT_IN_PROPORTION if t.shape.ndims == 0 else Count() for t in op.outputs]


def single(op, values):
    """The product of a vector of sizes, or its only element."""
    sizes = values[0].placement
    if values[0].rank == 0:
        return sizes
    return Count() if len(getattr(sizes, "places", None) or ()) == 1 else _not_told(op)


def cast(op, values):
    rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    return _not_told(op) if rounds else values[0].placement


def calculated(op, values):
    """What arithmetic makes of sizes, each in proportion to the rows or not."""
    counted = [value for value in values if isinstance(value.placement, Count)]
    first, after = counted[0], sizes_of(op.outputs[0])
    kept = len(counted) == 1 and op.type in ("Mul", "Neg")
    if op.type in ("Maximum", "Minimum"):
        # The larger of two that are in proportion to the rows is so, too, whatever the number of
        # rows; so is the larger one of a number of rows, which is at least 1, and 1.
        others = [constant(t) for t, v in zip(op.inputs, values) if v not in counted]
        is_one = op.type == "Maximum" and all(o is not None and o.max() <= 1 for o in others)
        kept = all(each.placement == Count() for each in counted) and (not others or is_one)
    if after == []:
        return first.placement if kept else NOT_IN_PROPORTION
    if not kept or after is None or any(value.rank not in (0, 1) for value in values):
        return Count()
    if first.rank == 0 and first.placement == Count() and after[0]:
        return Count(range(after[0]))  # multiples of one number
    return first.placement


def joined(op, values):
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
