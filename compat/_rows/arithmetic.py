"""Rules of what computes with elements: functions of each, products, reductions.

A rule is a function of ``Value``s, the placements and shapes of an operation's inputs, and of the
operation's attributes. It returns the placement of the result. A backend has a table from its own
operations to rules; ``tests/row_proof.py`` proves each line of it by computing.

A rule may always say ``Mixed``: that is slower, never wrong. So it does where it is not sure.
"""

import string

from .placements import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown
from .values import Value, have_own_rows, listed, rule, shared, without_rows

#: Reductions over the rows of which the devices' results can be put together. On booleans "any" is
#: a maximum, and "all" a minimum.
PARTIAL = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "any": "max", "all": "min"}


# Element by element ---------------------------------------------------------------------------


def _meeting(values, letters):
    """The rows of values whose dimensions of one letter meet, of an axis that is a letter.

    None where two inputs' rows meet other dimensions, so that all pairs of rows are computed.
    """
    pairs = list(zip(values, letters))
    moving = [pair for pair in pairs if isinstance(pair[0].placement, Sharded)]
    rows = shared([v.placement.replace(axis=names[v.axis]) for v, names in moving])
    for value, names in pairs:
        if rows is None or names.count(rows.axis) > 1:
            return None
        if rows.axis in names and not isinstance(value.placement, Sharded):
            # Something of the same length without rows would have to be cut, too.
            if value.rank is None or value.shape[names.index(rows.axis)] != 1:
                return None
    return rows


@rule
def pointwise(values):
    """Any function of the elements at the same place, dimensions matched from the last one on."""
    ranks = [value.rank for value in values]
    if None in ranks or any(isinstance(value.placement, (Partial, Count)) for value in values):
        return Mixed()  # what a device has of a sum or a number is not that of all rows
    rank = max(ranks)
    return _meeting(values, [range(rank - each, rank) for each in ranks]) or Mixed()


def selected(values):
    """Of two values, by a condition; a vector of conditions selects along the first dimension."""
    condition, *rest = values
    if condition.rank == 1 and rest[0].rank not in (None, 1):
        condition = Value(condition.placement, condition.shape + (1,) * (rest[0].rank - 1))
    return pointwise([condition] + rest)


@rule
def added(values):
    """Sums and differences, which are linear: also those of sums over the rows."""
    placements = [value.placement for value in values]
    moving = [each for each in placements if not isinstance(each, Replicated)]
    if not all(isinstance(each, Partial) for each in moving):
        return pointwise(values)
    kind = moving[0]
    if len(set(moving)) > 1 or kind.how not in ("sum", "mean"):
        return kind if len(placements) == 1 else Mixed()
    # A constant is in each device's value: right for a mean by the rows, not for a sum, nor for a
    # mean whose weights need not add up, such as sums plus one.
    by_rows = kind.how == "mean" and kind.denominator is None
    return kind if by_rows or len(moving) == len(placements) else Mixed()


@rule
def multiplied(values):
    """Products, which are linear in each factor."""
    moving = [v.placement for v in values if not isinstance(v.placement, Replicated)]
    if len(moving) > 1:
        return pointwise(values)
    if isinstance(moving[0], Partial):
        return moving[0] if moving[0].how in ("sum", "mean") else Mixed()
    return pointwise(values)


@rule
def extreme(values, how):
    """The larger ("max") or the smaller ("min") of the elements at the same place."""
    moving = {v.placement for v in values if not isinstance(v.placement, Replicated)}
    return Partial(how) if moving == {Partial(how)} else pointwise(values)


def divided(values):
    """Quotients of two values, which are linear in the first one."""
    if isinstance(values[1].placement, Replicated):
        return multiplied(values)
    return pointwise(values)


# Reductions and what goes along dimensions ------------------------------------------------------


@rule
def reduced(value, axes, how, keepdims=False, denominator=None):
    """A reduction along ``axes``, None for all: "sum", "mean", "max", "min", "any", "all", other.

    Arguments:
        denominator: the backend's name for the number of elements along the rows, where not each
            row has as many.
    """
    placement = value.placement
    if isinstance(placement, Partial):
        same = {PARTIAL.get(how), placement.how}
        return placement if len(same) == 1 or same == {"sum", "mean"} else Mixed()
    axes = listed(axes, value.rank)
    if placement.axis not in axes:
        if keepdims:
            return placement
        return placement.replace(axis=placement.axis - sum(a < placement.axis for a in axes))
    if how not in PARTIAL:
        return Mixed()
    if how == "mean" and not placement.even:
        return Mixed() if denominator is None else Partial("mean", denominator)
    return Partial(PARTIAL[how])


@rule
def along(value, axes):
    """What goes along ``axes``, None for all, and keeps them: softmax, cumsum, sort, reverse."""
    own = have_own_rows([value]) and value.axis not in listed(axes, value.rank)
    return value.placement if own else Mixed()


@rule
def contracted(values, letters, result):
    """A product summed over dimensions, written with the letters of einsum.

    Arguments:
        letters: for each value, a letter for each of its dimensions.
        result: the letters of the result; what is not among them is summed over.
    """
    placements = [value.placement for value in values if value.placement != REPLICATED]
    if not all(isinstance(each, Sharded) for each in placements):
        linear = isinstance(placements[0], Partial) and placements[0].how in ("sum", "mean")
        return placements[0] if linear and len(placements) == 1 else Mixed()
    rows = _meeting(values, letters)
    if rows is None or not rows.even and len(placements) > 1:
        return Mixed()
    if rows.axis in result:
        return rows.replace(axis=result.index(rows.axis))
    return Partial("sum")


def product(values, transpose_first=False, transpose_second=False):
    """Matrix products, of the last two dimensions; those before are matched from the last one on.

    Of a value of one dimension the one that is summed over is the only one.
    """
    ranks = [value.rank for value in values]
    if None in ranks:
        return without_rows([value.placement for value in values]) or Unknown()
    common = string.ascii_lowercase[: max(*ranks, 2) - 2]
    matrices = "ZY" if transpose_first else "YZ", "XZ" if transpose_second else "ZX"
    letters = [
        "Z" if rank == 1 else common[len(common) + 2 - rank :] + last
        for rank, last in zip(ranks, matrices)
    ]
    kept = [name for name, rank in zip("YX", ranks) if rank > 1]
    return contracted(values, letters, common + "".join(kept))
