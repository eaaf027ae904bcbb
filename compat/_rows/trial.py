"""Asking a computation itself: three rows together, against two of them and the third.

And against the other two and the first, and the three in another order, since some of them may
belong together, or be sorted, by chance.

What no rule knows is never assumed to compute each row by itself. It is tried, on rows of the first
batch and in inference, and counts as ``Mixed`` where that does not tell. Three rows fit anywhere.
"""

from .placements import REPLICATED, Mixed, Partial, Sharded, Unknown

#: The rows that are computed together, and in parts. One row alone might fit by chance.
WHOLE, PARTS = (0, 1, 2), ((0, 1), (2,))
SIZES = tuple(len(part) for part in PARTS)
#: Other parts: what two rows have in common may hide that each depends on the other.
OTHER_PARTS, OTHER_SIZES = ((0,), (1, 2)), (1, 2)

#: How far two values may be apart that only rounding tells apart, by the bits of a number.
TOLERANCES = {16: 2e-2, 32: 1e-4, 64: 1e-8}


def tried(compute):
    """Return the placement of each value that ``compute`` gives.

    Arguments:
        compute: takes the numbers of rows, which may be more than the batch has, and returns a list
            of arrays of numpy's. It leaves no trace.

    Returns:
        A list of placements: ``Mixed`` where the parts make up the whole in no way, ``Unknown``
        where the values are random.
    """
    whole, again, turned = map(compute, (WHOLE, WHOLE, WHOLE[::-1]))
    parts, others = list(map(compute, PARTS)), list(map(compute, OTHER_PARTS))
    if len({len(values) for values in [whole, turned] + parts + others}) > 1:
        return [Mixed()] * len(whole)
    found = []
    for value, same, other, *values in zip(whole, again, turned, *parts, *others):
        fitting = (
            each
            for each in placements(values[:2], value)
            if fits(values[2:], value, each, OTHER_SIZES) and is_turned(value, other, each)
        )
        is_random = not close(value, same)
        found.append(Unknown() if is_random else next(fitting, Mixed()))
    return found


def placements(parts, whole, sizes=SIZES):
    """Return all placements by which the parts of an array make up the whole, the likeliest first.

    Arguments:
        parts: the arrays that ``sizes`` rows of the batch give.
        whole: the array that all rows give.
    """
    import numpy as np

    parts, whole, rows = [np.asarray(part) for part in parts], np.asarray(whole), sum(sizes)
    candidates = []  # type: list
    for axis, length in enumerate(whole.shape):
        each = length // rows  # elements of a row, in all copies
        candidates += [
            Sharded(axis, each // copies, copies)
            for copies in range(1, each + 1)
            if each * rows == length and each % copies == 0
        ]
        if any(len(part.shape) <= axis or part.shape[axis] * rows != length * size
               for part, size in zip(parts, sizes)):  # fmt: skip
            candidates.append(Sharded(axis, inner=None, even=False))
    candidates += [REPLICATED] + [Partial(how) for how in ("sum", "mean", "max", "min")]
    return [each for each in candidates if fits(parts, whole, each, sizes)]


def is_turned(whole, turned, placement):
    """Return whether three rows in reverse order give the same result by a placement."""
    if not isinstance(placement, Sharded):
        return close(turned, whole)
    return not placement.even or close(turned, chosen(whole, placement, WHOLE[::-1]))


def chosen(whole, placement, rows):
    """Return some of three rows, from an array that has them by a placement."""
    axis, copies, shape = placement.axis, placement.copies, list(whole.shape)
    each = shape[axis] // (len(WHOLE) * copies)  # elements of a row, in one copy
    apart = whole.reshape(shape[:axis] + [copies, len(WHOLE), each] + shape[axis + 1 :])
    shape[axis] = copies * len(rows) * each
    return apart.take(rows, axis + 1).reshape(shape)


def fits(parts, whole, placement, sizes=SIZES):
    """Return whether the parts of an array make up the whole by a placement."""
    if any(part.ndim != whole.ndim or part.dtype != whole.dtype for part in parts):
        return False
    if isinstance(placement, Sharded):
        return _are_rows(parts, whole, placement, sizes)
    if any(part.shape != whole.shape for part in parts):
        return False
    if isinstance(placement, Partial):
        return _add_up(parts, whole, placement.how, sizes)
    return all(close(part, whole) for part in parts)


def _are_rows(parts, whole, placement, sizes):
    import numpy as np

    axis, copies, rows = placement.axis, placement.copies, sum(sizes)
    besides = {each.shape[:axis] + each.shape[axis + 1 :] for each in list(parts) + [whole]}
    if axis >= whole.ndim or len(besides) > 1:
        return False
    length = whole.shape[axis]
    if placement.inner is not None and length != placement.inner * copies * rows:
        return False
    lengths = [part.shape[axis] * rows for part in parts]
    if placement.even and (length % (rows * copies) or lengths != [length * n for n in sizes]):
        return False
    split = [np.split(part, copies, axis) for part in parts]
    return close(np.concatenate([piece for each in zip(*split) for piece in each], axis), whole)


def _add_up(parts, whole, how, sizes):
    import numpy as np

    if whole.dtype.kind not in {"sum": "iufc", "mean": "fc"}.get(how, "biuf"):
        return False
    if how in ("max", "min"):
        return close(getattr(np, how + "imum").reduce(parts), whole)
    weights = [size / float(sum(sizes)) if how == "mean" else 1 for size in sizes]
    total = sum(part * weight for part, weight in zip(parts, weights))
    return close(np.asarray(total, whole.dtype), whole)  # NumPy 1 makes float64 of some numbers


def is_fault(error):
    """Return whether an error is this library's own.

    Nothing that runs whole instead may hide it.
    """
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = innermost.tb_frame.f_globals.get("__name__") or ""
    kinds = (AttributeError, LookupError, NameError, TypeError)
    return isinstance(error, kinds) and module.split(".")[0] == __name__.split(".")[0]


def cut(whole, placement, parts=PARTS):
    """Return the parts of an array of three rows that devices have, by a placement with rows."""
    return [chosen(whole, placement, rows) for rows in parts]


def close(value, other):
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
    return np.allclose(
        value, other, rtol=tolerance, atol=tolerance / 10 * (finite.max() if finite.size else 1.0),
        equal_nan=True,
    )  # fmt: skip
