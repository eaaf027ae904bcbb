"""Placements of a computation that no rule knows, found by computing.

Three rows of the batch are computed together, and in parts, by two partitions: two rows of one part
may depend on each other, or be sorted by chance, but not both those of one partition and those of
the other. A placement has to fit both of them.

What no rule knows is never assumed to compute each row by itself. It is tried, on rows of the first
batch and in inference, and counts as ``Mixed`` where that does not show it. Three rows fit
anywhere.
"""

from typing import Any, Callable, List, Sequence, Tuple

from .merging import NUMPY, merge
from .placements import REPLICATED, Mixed, Partial, Placement, Replicated, Sharded, Unknown

#: Numbers of rows.
Rows = Tuple[int, ...]

#: The rows that are computed together, and in parts. One row alone might fit by chance.
WHOLE: Rows = (0, 1, 2)
PARTS: "Tuple[Rows, ...]" = ((0, 1), (2,))
#: Another partition, in which no two rows are together that are so in the first one. Its order is
#: not that of the batch, and the second row of the whole is the first one of a part.
OTHER_PARTS: "Tuple[Rows, ...]" = ((2, 0), (1,))
#: The number of rows of each part, which is the same in both partitions.
SIZES = tuple(len(part) for part in PARTS)

#: How far two values may be apart that only rounding tells apart, by the bits of a number.
TOLERANCES = {16: 2e-2, 32: 1e-4, 64: 1e-8}


def tried(compute: "Callable[[Rows], List[Any]]") -> "List[Placement]":
    """Return the placement of each value that a function computes.

    Arguments:
        compute: takes the numbers of rows, which may be more than the batch has, and returns a list
            of arrays of numpy's. It has no side effects.

    Returns:
        A list of placements: ``Mixed`` where the parts make up the whole in no way, ``Unknown``
        where the values are random.
    """
    whole, again, *runs = map(compute, (WHOLE, WHOLE) + PARTS + OTHER_PARTS)
    if len({len(values) for values in [whole] + runs}) > 1:
        return [Mixed()] * len(whole)
    results = []
    for value, same, *values in zip(whole, again, *runs):
        parts, others = values[: len(PARTS)], values[len(PARTS) :]
        fitting = (
            placement
            for placement in placements(parts, value)
            if fits_others(others, value, placement, parts)
        )
        is_random = not close(value, same)
        results.append(Unknown() if is_random else next(fitting, Mixed()))
    return results


def fits_others(
    others: "Sequence[Any]", whole: "Any", placement: Placement, parts: "Sequence[Any]"
) -> bool:
    """Return whether the arrays of ``OTHER_PARTS``, too, make up the whole by a placement.

    Arguments:
        others: the arrays of ``OTHER_PARTS``.
        whole: the array of all rows.
        placement: how it depends on them.
        parts: the arrays of ``PARTS``, which do.
    """
    has_dimensions = all(part.ndim == whole.ndim for part in others)
    return has_dimensions and fits(others, reordered(whole, placement, others, parts), placement)


def reordered(
    whole: "Any", placement: Placement, others: "Sequence[Any]", parts: "Sequence[Any]"
) -> "Any":
    """Return an array of the whole with its rows, if it has any, in the order of ``OTHER_PARTS``.

    Arguments:
        whole: the array of all rows.
        placement: how it depends on them.
        others: the arrays of ``OTHER_PARTS``.
        parts: the arrays of ``PARTS``.
    """
    import numpy as np

    order = [row for part in OTHER_PARTS for row in part]
    if not isinstance(placement, Sharded):
        return whole
    if placement.even:
        return chosen(whole, placement, order)
    # The second row is a part by itself there, and the first two are one here.
    axis = placement.axis
    end, length = parts[0].shape[axis], others[1].shape[axis]
    rows = np.split(whole, [end - length, end], axis)
    return np.concatenate([rows[row] for row in order], axis)


def placements(
    parts: "Sequence[Any]", whole: "Any", sizes: "Sequence[int]" = SIZES
) -> "List[Placement]":
    """Return all placements by which the parts of an array make up the whole, the likeliest first.

    Arguments:
        parts: the arrays that shards of the batch give.
        whole: the array that all rows give.
        sizes: the numbers of rows of the shards.
    """
    import numpy as np

    parts, whole, rows = [np.asarray(part) for part in parts], np.asarray(whole), sum(sizes)
    candidates: "List[Placement]" = []
    for axis, length in enumerate(whole.shape):
        count = length // rows  # elements of a row, in all copies
        candidates += [
            Sharded(axis, count // copies, copies)
            for copies in range(1, count + 1)
            if count * rows == length and count % copies == 0
        ]
        if any(len(part.shape) <= axis or part.shape[axis] * rows != length * size
               for part, size in zip(parts, sizes)):  # fmt: skip
            candidates.append(Sharded(axis, inner=None, even=False))
    candidates += [REPLICATED] + [Partial(how) for how in ("sum", "mean", "max", "min")]
    return [placement for placement in candidates if fits(parts, whole, placement, sizes)]


def chosen(whole: "Any", placement: Sharded, rows: "Sequence[int]") -> "Any":
    """Return some of three rows, from an array that has them by a placement."""
    axis, copies, shape = placement.axis, placement.copies, list(whole.shape)
    count = shape[axis] // (len(WHOLE) * copies)  # elements of a row, in one copy
    apart = whole.reshape(shape[:axis] + [copies, len(WHOLE), count] + shape[axis + 1 :])
    shape[axis] = copies * len(rows) * count
    return apart.take(rows, axis + 1).reshape(shape)


def fits(
    parts: "Sequence[Any]", whole: "Any", placement: Placement, sizes: "Sequence[int]" = SIZES
) -> bool:
    """Return whether the parts of an array make up the whole by a placement."""
    import numpy as np

    if any(part.ndim != whole.ndim or part.dtype != whole.dtype for part in parts):
        return False
    if isinstance(placement, Sharded):
        is_possible = _are_rows(parts, whole, placement, sizes)
    else:
        is_possible = all(part.shape == whole.shape for part in parts)
    if isinstance(placement, Replicated):
        return is_possible and all(close(part, whole) for part in parts)
    if isinstance(placement, Partial):
        # Sums of booleans are none, and means of whole numbers would be rounded.
        kinds = {"sum": "iufc", "mean": "fc"}.get(placement.how, "biuf")
        is_possible = is_possible and whole.dtype.kind in kinds
    if not is_possible:
        return False
    merged = merge(placement, parts, sizes, NUMPY)
    return close(np.asarray(merged, whole.dtype), whole)  # NumPy 1 makes float64 of some numbers


def _are_rows(
    parts: "Sequence[Any]", whole: "Any", placement: Sharded, sizes: "Sequence[int]"
) -> bool:
    """Return whether arrays have the shapes of rows."""
    axis, copies, rows = placement.axis, placement.copies, sum(sizes)
    besides = {array.shape[:axis] + array.shape[axis + 1 :] for array in list(parts) + [whole]}
    if axis >= whole.ndim or len(besides) > 1:
        return False
    length = whole.shape[axis]
    if placement.inner is not None and length != placement.inner * copies * rows:
        return False
    if not placement.even:
        return True
    lengths = [part.shape[axis] * rows for part in parts]
    return length % (rows * copies) == 0 and lengths == [length * size for size in sizes]


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of this library.

    Running unsplit instead must not hide it.
    """
    innermost: "Any" = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = innermost.tb_frame.f_globals.get("__name__") or ""
    kinds = (AttributeError, LookupError, NameError, TypeError)
    return isinstance(error, kinds) and module.split(".")[0] == __name__.split(".")[0]


def cut(whole: "Any", placement: Sharded, parts: "Sequence[Sequence[int]]" = PARTS) -> "List[Any]":
    """Return the parts of an array of three rows that devices have, by a placement with rows."""
    return [chosen(whole, placement, rows) for rows in parts]


def close(value: "Any", other: "Any") -> bool:
    """Return whether two arrays are the same, but for rounding."""
    import numpy as np

    value, other = np.asarray(value), np.asarray(other)
    if value.shape != other.shape:
        return False
    if value.dtype.kind not in "fc":
        return bool((value == other).all())
    bits = value.dtype.itemsize * (4 if value.dtype.kind == "c" else 8)
    tolerance = TOLERANCES[min(64, max(16, bits))]
    finite = np.abs(other[np.isfinite(other)])
    return bool(np.allclose(
        value, other, rtol=tolerance, atol=tolerance / 10 * (finite.max() if finite.size else 1.0),
        equal_nan=True,
    ))  # fmt: skip
