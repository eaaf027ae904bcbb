"""Rules about the rows of a batch for those operations of MXNet that take more than a line."""

import ast
import collections
import itertools
import string

from ... import _rows
from ..._rows import Mixed, Partial, Replicated, Sharded, Unknown, Value
from ..._rows.values import listed


class SymbolNode(collections.namedtuple("SymbolNode", "attributes values result grows")):
    """A node of a graph.

    Attributes:
        attributes: as they are in JSON.
        values: a ``Value`` for each input.
        result: the sizes of the first output, None for what grows with the batch or is not known.
        grows: the dimensions of it that grow with the batch, or None.
    """

    def get(self, name, default=None):
        text = self.attributes.get(name)
        try:
            return default if text is None else ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text

    @property
    def value(self):
        return self.values[0]


def rowwise(values, axes, result=0, inner=1):
    """A function of each row by itself.

    Arguments:
        axes: for each value, the dimension where the operation has the batch; None for weights.
        result: the dimension where the result has it, and ``inner`` elements of each row.
    """

    first = [  # with the batch in the first dimension, for ``_rows.by_row``
        value
        if value.axis is None or axis is None
        else Value(value.placement.replace(axis=value.axis - axis), value.shape)
        for value, axis in zip(values, axes)
    ]
    found = _rows.by_row(first, [None if axis is None else 0 for axis in axes])
    if not isinstance(found, Sharded):
        return found
    return found.replace(axis=result, inner=found.inner and found.inner * inner)


def by_row(*axes):
    """As above; the last of ``axes`` holds for all further inputs, too."""
    return lambda op: rowwise(op.values, axes + axes[-1:] * len(op.values))


def reduction(op, how, default=None):
    axes = op.get("axis", default)
    axes = None if axes == () else axes
    if op.get("exclude", False):
        axes = sorted(set(range(op.value.rank)) - listed(axes, op.value.rank))
    return _rows.reduced(op.value, axes, how, op.get("keepdims", False))


def along(op, default):
    """Along a dimension; what is given besides, such as LayerNorm's weights, has no rows."""
    fixed = all(isinstance(value.placement, Replicated) for value in op.values[1:])
    return _rows.along(op.value, op.get("axis", default)) if fixed else Mixed()


def softmax(op):
    if op.get("use_length", False):
        axis = op.get("axis", -1) % op.value.rank
        return rowwise(op.values, [0 if axis else -1, 0])
    return along(op, -1)


def by_mode(op):
    """What goes along the dimensions that ``mode`` names."""
    axes = list(range(op.value.rank))
    modes = {"instance": axes[1:], "channel": axes[1:2], "spatial": axes[2:]}
    return _rows.along(op.value, modes[op.get("mode", "instance")])


def where(op):
    condition, rest = op.value, op.values[1:]
    if condition.rank == 1 and rest[0].rank > 1:  # an element for each of the first dimension
        condition = Value(condition.placement, condition.shape + (1,) * (rest[0].rank - 1))
    return _rows.pointwise([condition] + rest)


def normalized(op):
    """BatchNorm. Its other results are the statistics of a device's own rows."""
    channel = op.get("axis", 1) % op.value.rank
    axis = -1 if op.value.axis == channel else op.value.axis
    return [rowwise(op.values, [axis] + [None] * 4, result=axis)] + [Mixed()] * 2


def fully_connected(op):
    if op.get("flatten", True):
        return rowwise(op.values, [0, None, None])
    return product(op, transposed=(False, True))


def product(op, transposed=None):
    if op.get("axis", -2) != -2:
        return Unknown("a product of other dimensions")
    if transposed is None:
        transposed = op.get("transpose_a", False), op.get("transpose_b", False)
    found = _rows.product(op.values[:2], *transposed)
    return _rows.added([Value(found, op.result)] + op.values[2:])


def dot(op):
    letters, count = string.ascii_lowercase, op.value.rank
    left, right = letters[:count], letters[count : count + op.values[1].rank]
    summed = left[0 if op.get("transpose_a", False) else -1]
    right = right.replace(right[-1 if op.get("transpose_b", False) else 0], summed)
    result = (left + right).replace(summed, "")
    return _rows.contracted(op.values, [left, right], result)


def swapped(op):
    order = list(range(op.value.rank))
    first, second = op.get("dim1", 0), op.get("dim2", 0)
    order[first], order[second] = order[second], order[first]
    return _rows.transposed(op.value, order)


def slice(op):
    ranges = itertools.zip_longest(op.get("begin"), op.get("end"), op.get("step") or ())
    parts = {
        axis: "part"
        for axis, (begin, end, step) in enumerate(ranges)
        if begin not in (None, 0) or end is not None or step not in (None, 1)
    }
    return _rows.sliced(op.value, parts)


def slice_axis(op):
    whole = op.get("begin") == 0 and op.get("end") is None
    return _rows.sliced(op.value, {} if whole else {op.get("axis"): "part"})


def split(op):
    part = "one" if op.get("squeeze_axis", False) else "part"
    return _rows.sliced(op.value, {op.get("axis", 1): part})


def slice_like(op):
    value, like = op.values
    axes = listed(op.get("axes") or None, like.rank)
    if like.axis in axes:
        # As long as the batch: of all rows nothing is cut off, of anything else its beginning.
        return value.placement if value.placement == like.placement else Mixed()
    if not isinstance(like.placement, (Replicated, Sharded)):
        return Mixed()
    return _rows.sliced(value, {axis: "part" for axis in axes})


def pad(op):
    widths = op.get("pad_width")
    return _rows.resized(op.value, [i // 2 for i, width in enumerate(widths) if width])


def pick(op):
    value, index = op.values
    axis = op.get("axis", -1) % value.rank
    if index.rank < value.rank:
        shape = index.shape[:axis] + (1,) + index.shape[axis:]
        index = Value(_rows.expanded(index, [axis]), shape)
    rows = Value(_rows.pointwise([value, index]), value.shape)
    kept = op.get("keepdims", False)
    return _rows.along(rows, [axis]) if kept else _rows.sliced(rows, {axis: "one"})


def of_sequences(op, alike, keeps=True):
    """By each row's length, with the rows next to the time; or for all lengths alike.

    Arguments:
        alike: the placement for the latter.
        keeps: whether the result has the dimension of the time.
    """
    if not op.get("use_sequence_length", False):
        return alike
    batch = 1 - op.get("axis", 0)
    return rowwise(op.values, [batch, 0], batch if keeps else 0)


def rnn(op):
    axes = [1, None] + [1] * (len(op.values) - 2)
    if op.get("use_sequence_length", False):
        axes[-1] = 0
    return rowwise(op.values, axes, 1)


def loss(op, found):
    """A loss whose gradient is each row's own, unless it is divided by their number."""
    return found if op.get("normalization", "null") == "null" else Mixed()


def cross_entropy(op):
    found = rowwise(op.values, [0, 0])
    return Partial("sum") if isinstance(found, Sharded) else found


def leaky(op):
    return _rows.pointwise(op.values) if len(op.values) == 1 else rowwise(op.values, [0, None])


def attention_values(op):
    heads, rows = op.get("heads"), op.values[1].placement
    if isinstance(rows, Sharded) and rows.axis == 0 and rows.inner and rows.inner % heads == 0:
        rows = rows.replace(inner=rows.inner // heads)
    return rowwise([op.value, Value(rows, op.values[1].shape)], [1, 0], 1)
