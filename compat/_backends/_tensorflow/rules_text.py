"""Rules of operations on text and on ragged rows.

A text that is split becomes one vector with the words of all rows, one row after the other, and a
row partition: the row of each word, or the positions at which each row begins and ends. Each device
counts these from its own first row, so that the partitions of shards are not shards of the whole
partition; but words and partition of one device belong together, and so results have its rows.
"""

from ..._rows import Count, Mixed, Replicated, Sharded, Value
from .graph import attribute, constant, known_numbers, sizes_of
from .rules_common import Positions

#: The placement of elements of ragged rows, one row after the other.
_ELEMENTS = Sharded(0, inner=None, even=False)


class _Partition(Mixed):
    """The placement of a row partition, counted within each shard."""

    __slots__ = ()


class Splits(_Partition):
    """The placement of row splits: where each row begins, and where the last one ends."""

    __slots__ = ()


class Ends(_Partition):
    """The placement of row limits: where each row ends."""

    __slots__ = ()


class SplitShape(_Partition):
    """The placement of a pair: the number of rows, and the length of the longest one."""

    __slots__ = ()


class NumberOfRows(Count):
    """The placement of the number of rows itself; ``Count()`` is that of a multiple of it."""

    __slots__ = ()

    def __init__(self):
        super().__init__()

    def _key(self):
        return Count, self.places


def placements(op, values):
    """Return the placements of an operation's outputs, or None if no rule here applies."""
    rule = _RULES.get(op.type)
    return None if rule is None else rule(op, [value.placement for value in values], values)


def without_numbers_of_rows(values):
    """Return values as all other rules expect them."""
    return [
        Value(Count(), value.shape) if isinstance(value.placement, NumberOfRows) else value
        for value in values
    ]


def _kept(op, inputs, values):
    """Return the placement of the first input, which such operations pass on."""
    return [inputs[0]] if isinstance(inputs[0], (_Partition, Positions, NumberOfRows)) else None


def _are_replicated(*placements):
    return all(isinstance(placement, Replicated) for placement in placements)


def _split(op, inputs, values):
    """Return the placements of words of texts: row and place of each, the words, and the shape."""
    if inputs[0] != Sharded(0) or values[0].rank != 1 or not _are_replicated(*inputs[1:]):
        return None
    return [Positions(inputs[0]), _ELEMENTS, SplitShape()]


def _decoded(op, inputs, values):
    """Return the placements of characters of texts: row splits, characters, and their offsets."""
    if inputs[0] != Sharded(0) or values[0].rank != 1:
        return None
    return [Splits()] + [_ELEMENTS] * (len(op.outputs) - 1)


def _sliced(op, inputs, values):
    """Return the placement of the row of each element, or of the number of rows."""
    begin = constant(op.inputs[1])
    masks = [op.get_attr(name + "_mask") for name in ("begin", "end", "shrink_axis", "new_axis")]
    if begin is None or constant(op.inputs[3]) is None or op.get_attr("ellipsis_mask"):
        return None
    if isinstance(inputs[0], Positions) and values[0].rank == 2 and list(begin) == [0, 0]:
        rows = masks == [1, 1, 2, 0] and list(constant(op.inputs[3])) == [1, 1]
        return [inputs[0]] if rows else None
    first = list(begin) == [0] and masks[2:] == [1, 0]
    return [NumberOfRows()] if isinstance(inputs[0], SplitShape) and first else None


def _flattened(op, inputs, values):
    kept = isinstance(inputs[0], (_Partition, Positions)) and values[0].rank == 1
    return [inputs[0]] if kept and known_numbers(op.inputs[1]) in ([-1], (-1,)) else None


def _absorbed(op, inputs, values):
    """Return the placement of ``x`` for ``min(x, max(x, y))``, or the reverse."""
    other = {"Minimum": "Maximum", "Maximum": "Minimum"}[op.type]
    for place in (0, 1):
        number, limited = op.inputs[place], op.inputs[1 - place]
        if limited.op.type == other and sizes_of(limited) == sizes_of(number) == []:
            if any(_are_equal(number, limit) for limit in limited.op.inputs):
                return [inputs[place]]
    return None


def _are_equal(tensor, other):
    if tensor is other or tensor.name == other.name:
        return True
    values = [constant(tensor), constant(other)]
    return values[0] is not None and values[1] is not None and values[0] == values[1]


def _counted_by_row(op, inputs, values):
    """Return the placement of the numbers of elements, one for each row."""
    places, number, _ = inputs
    by_row = isinstance(places, Positions) and places.rows == Sharded(0) and values[0].rank == 1
    unweighted = sizes_of(op.inputs[2]) == [0] and not attribute(op, "binary_output", False)
    return [Sharded(0)] if by_row and unweighted and isinstance(number, NumberOfRows) else None


def _added_up(op, inputs, values):
    """Return the placement of row limits, from row lengths."""
    plain = not (op.get_attr("reverse") or op.get_attr("exclusive"))
    lengths = inputs[0] == Sharded(0) and values[0].rank == 1 and op.inputs[0].dtype.is_integer
    return [Ends()] if plain and lengths else None


def _joined(op, inputs, values):
    """Return the placement of row splits: zero, and the row limits."""
    if len(inputs) != 3 or not isinstance(inputs[1], Ends):
        return None
    return [Splits()] if known_numbers(op.inputs[0]) in ([0], (0,)) else None


def _padded(op, inputs, values):
    """Return the placement of ragged rows, padded to one length."""
    sizes, elements, default, *partition = inputs
    kinds = op.get_attr("row_partition_types")
    by_splits = kinds == [b"ROW_SPLITS"] and isinstance(partition[0], Splits)
    by_rows = kinds == [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"] and (
        isinstance(partition[0], NumberOfRows) and isinstance(partition[1], Positions)
    )
    if elements != _ELEMENTS or not _are_replicated(sizes, default) or not (by_splits or by_rows):
        return None
    lengths = constant(op.inputs[0])
    fixed = lengths is not None and lengths.ndim == 1 and lengths[0] == -1 and all(lengths[1:] >= 0)
    return [Sharded(0)] if fixed else None  # else they are as long as the longest row of the batch


def _counted_of_rows(op, inputs, values):
    """Return the placement of histograms of ragged rows."""
    splits, elements, number, _ = inputs
    unweighted = sizes_of(op.inputs[3]) == [0] and _are_replicated(number)
    fits = isinstance(splits, Splits) and elements == _ELEMENTS
    return [Sharded(0)] if fits and unweighted else None


def _grams(op, inputs, values):
    return (
        [_ELEMENTS, Splits()] if inputs[0] == _ELEMENTS and isinstance(inputs[1], Splits) else None
    )


_RULES = {
    "Bincount": _counted_by_row,
    "Cast": _kept,
    "ConcatV2": _joined,
    "Cumsum": _added_up,
    "DenseBincount": _counted_by_row,
    "Identity": _kept,
    "Maximum": _absorbed,
    "Minimum": _absorbed,
    "RaggedBincount": _counted_of_rows,
    "RaggedTensorToTensor": _padded,
    "Reshape": _flattened,
    "StridedSlice": _sliced,
    "StringNGrams": _grams,
    "StringSplit": _split,
    "StringSplitV2": _split,
    "UnicodeDecode": _decoded,
    "UnicodeDecodeWithOffsets": _decoded,
}

#: Operations on texts, each by itself.
ON_TEXTS = (
    "AsString DecodeBase64 EncodeBase64 RegexFullMatch RegexReplace StaticRegexFullMatch "
    "StaticRegexReplace StringJoin StringLength StringLower StringStrip StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Substr "
    "UnicodeScript UnicodeTranscode"
)
