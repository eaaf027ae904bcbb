"""Rules of operations on text and on rows of different lengths.

A text that is split becomes one vector of words, of all rows one after the other, and numbers that
say which words are whose: the row of each word, or where each row's words begin and end. Devices
count these from their own first row, so that their parts do not make up those of the whole batch;
but words and numbers of one device belong together, and so what is made of them has its rows.
"""

from ..._rows import Count, Mixed, Replicated, Sharded, Value
from .graph import attribute, constant, known_numbers, sizes_of
from .rules_common import Positions

#: Elements of rows of different lengths, one row after the other.
_ELEMENTS = Sharded(0, inner=None, even=False)


class _Partition(Mixed):
    """Numbers that say which elements are whose, counted within each part."""

    __slots__ = ()

    def __init__(self):
        super().__init__("positions are counted within each part")


class Splits(_Partition):
    """Where the elements of each row begin, and where the last ones end."""

    __slots__ = ()


class Ends(_Partition):
    """Where the elements of each row end."""

    __slots__ = ()


class SplitShape(_Partition):
    """The number of rows, and that of the longest one's elements."""

    __slots__ = ()


class NumberOfRows(Count):
    """The number of rows itself, where ``Count()`` is anything in proportion to it."""

    __slots__ = ()

    def __init__(self):
        super().__init__()

    def _said(self):
        return Count, self.places


def placements(op, values):
    """Return the placements of an operation's outputs, or None: no rule here applies."""
    rule = _RULES.get(op.type)
    return None if rule is None else rule(op, [value.placement for value in values], values)


def without_numbers_of_rows(values):
    """Values as all other rules take them."""
    return [
        Value(Count(), value.shape) if isinstance(value.placement, NumberOfRows) else value
        for value in values
    ]


def _kept(op, given, values):
    """Return the placement of the first input, which such operations pass on."""
    return [given[0]] if isinstance(given[0], (_Partition, Positions, NumberOfRows)) else None


def _is_fixed(*given):
    return all(isinstance(each, Replicated) for each in given)


def _split(op, given, values):
    """Words of texts: the row and the place of each, the words, and ``SplitShape``."""
    if given[0] != Sharded(0) or values[0].rank != 1 or not _is_fixed(*given[1:]):
        return None
    return [Positions(given[0]), _ELEMENTS, SplitShape()]


def _decoded(op, given, values):
    """Characters of texts: ``Splits``, and then the characters and where each begins."""
    if given[0] != Sharded(0) or values[0].rank != 1:
        return None
    return [Splits()] + [_ELEMENTS] * (len(op.outputs) - 1)


def _sliced(op, given, values):
    """Return the placement of the row of each element, or of the number of rows."""
    begin = constant(op.inputs[1])
    masks = [op.get_attr(name + "_mask") for name in ("begin", "end", "shrink_axis", "new_axis")]
    if begin is None or constant(op.inputs[3]) is None or op.get_attr("ellipsis_mask"):
        return None
    if isinstance(given[0], Positions) and values[0].rank == 2 and list(begin) == [0, 0]:
        rows = masks == [1, 1, 2, 0] and list(constant(op.inputs[3])) == [1, 1]
        return [given[0]] if rows else None
    first = list(begin) == [0] and masks[2:] == [1, 0]
    return [NumberOfRows()] if isinstance(given[0], SplitShape) and first else None


def _flattened(op, given, values):
    kept = isinstance(given[0], (_Partition, Positions)) and values[0].rank == 1
    return [given[0]] if kept and known_numbers(op.inputs[1]) in ([-1], (-1,)) else None


def _absorbed(op, given, values):
    """The smaller one of a number and of the larger one of it and another, or the reverse."""
    other = {"Minimum": "Maximum", "Maximum": "Minimum"}[op.type]
    for place in (0, 1):
        number, limited = op.inputs[place], op.inputs[1 - place]
        if limited.op.type == other and sizes_of(limited) == sizes_of(number) == []:
            if any(_are_equal(number, each) for each in limited.op.inputs):
                return [given[place]]
    return None


def _are_equal(tensor, other):
    if tensor is other or tensor.name == other.name:
        return True
    values = [constant(each) for each in (tensor, other)]
    return values[0] is not None and values[1] is not None and values[0] == values[1]


def _counted_by_row(op, given, values):
    """Return the placement of the numbers of elements, one for each row."""
    places, number, _ = given
    by_row = isinstance(places, Positions) and places.rows == Sharded(0) and values[0].rank == 1
    unweighted = sizes_of(op.inputs[2]) == [0] and not attribute(op, "binary_output", False)
    return [Sharded(0)] if by_row and unweighted and isinstance(number, NumberOfRows) else None


def _added_up(op, given, values):
    """Return the placement of the ends of rows of these lengths."""
    plain = not (op.get_attr("reverse") or op.get_attr("exclusive"))
    lengths = given[0] == Sharded(0) and values[0].rank == 1 and op.inputs[0].dtype.is_integer
    return [Ends()] if plain and lengths else None


def _joined(op, given, values):
    """Return the placement of the starts of rows: zero, and where others end."""
    if len(given) != 3 or not isinstance(given[1], Ends):
        return None
    return [Splits()] if known_numbers(op.inputs[0]) in ([0], (0,)) else None


def _padded(op, given, values):
    """Rows of one length, made of rows of different ones."""
    sizes, elements, default, *partition = given
    kinds = op.get_attr("row_partition_types")
    by_splits = kinds == [b"ROW_SPLITS"] and isinstance(partition[0], Splits)
    by_rows = kinds == [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"] and (
        isinstance(partition[0], NumberOfRows) and isinstance(partition[1], Positions)
    )
    if elements != _ELEMENTS or not _is_fixed(sizes, default) or not (by_splits or by_rows):
        return None
    lengths = constant(op.inputs[0])
    fixed = lengths is not None and lengths.ndim == 1 and lengths[0] == -1 and all(lengths[1:] >= 0)
    return [Sharded(0)] if fixed else None  # else as long as the longest row of the batch


def _counted_of_rows(op, given, values):
    """Return the placement of how often each number is among the elements of each row."""
    splits, elements, number, _ = given
    unweighted = sizes_of(op.inputs[3]) == [0] and _is_fixed(number)
    fits = isinstance(splits, Splits) and elements == _ELEMENTS
    return [Sharded(0)] if fits and unweighted else None


def _grams(op, given, values):
    return [_ELEMENTS, Splits()] if given[0] == _ELEMENTS and isinstance(given[1], Splits) else None


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
