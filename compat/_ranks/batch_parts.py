"""A batch and two parts of it: a mean over samples is the weighted mean of those of the parts."""

from typing import Any, Iterable, NamedTuple, Optional, Tuple


class SomeRows(NamedTuple):
    """Some rows of a batch.

    Attributes:
        rows: their places.
        share: how many there are, as a fraction of the batch's.
    """

    rows: slice
    share: float


WHOLE = SomeRows(slice(None), 1.0)


def in_two(rows: int, first: int) -> "Tuple[SomeRows, SomeRows]":
    """Return the first rows of a batch, so many, and the others."""
    share = first / float(rows)
    return SomeRows(slice(first), share), SomeRows(slice(first, None), 1 - share)


def rows_of(arrays: "Iterable[Any]") -> "Optional[int]":
    """Return the number of rows of the arrays of a batch; None where it is not the same for all."""
    rows = {array.shape[0] if getattr(array, "shape", None) else None for array in arrays}
    return rows.pop() if len(rows) == 1 else None
