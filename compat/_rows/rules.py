"""Rules by kind of operation: placements of results from the placements of inputs.

A rule is a function of ``Value``s, the placements and shapes of an operation's inputs, and of the
operation's attributes. It returns the placement of the result. A backend has a table from its own
operations to rules; ``tests/row_proof.py`` proves each line of it by computing.

A rule may always return ``Mixed``, which is slower but never wrong, and does so where it is not
sure.
"""

import functools
import operator
import string
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, Union

from .placements import (
    REPLICATED,
    Axes,
    Count,
    Mixed,
    Partial,
    Placement,
    Replicated,
    Sharded,
    Unknown,
    Value,
    have_own_rows,
    listed,
    rule,
    shared,
    without_rows,
)

#: Reductions over the rows of which the devices' results can be put together. On booleans "any" is
#: a maximum, and "all" a minimum.
PARTIAL = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "any": "max", "all": "min"}


# Element by element.


def _meeting(values: "Sequence[Value]", letters: "Sequence[Sequence[Any]]") -> "Optional[Any]":
    """Return the rows of values whose dimensions of one letter meet, of an axis that is a letter.

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
def pointwise(values: "Sequence[Value]") -> Placement:
    """Any function of the elements at the same place, dimensions matched from the last one on."""
    ranks = [value.rank for value in values]
    if None in ranks or any(isinstance(value.placement, (Partial, Count)) for value in values):
        return Mixed()  # what a device has of a sum or a number is not that of all rows
    rank = max(ranks)
    return _meeting(values, [range(rank - each, rank) for each in ranks]) or Mixed()


def selected(values: "Sequence[Value]") -> Placement:
    """Of two values, by a condition; a vector of conditions selects along the first dimension."""
    condition, *rest = values
    if condition.rank == 1 and rest[0].rank not in (None, 1):
        condition = Value(condition.placement, condition.shape + (1,) * (rest[0].rank - 1))
    return pointwise([condition] + rest)


def _is_linear(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.how in ("sum", "mean")


@rule
def added(values: "Sequence[Value]") -> Placement:
    """Return a sum or a difference, which are linear: also of sums over the rows."""
    kinds = {value.placement for value in values}
    kind, *others = kinds - {REPLICATED}
    if others or not _is_linear(kind):
        return pointwise(values)
    # A constant is in each device's value: right for a mean by the rows, not for a sum, nor for a
    # mean whose weights need not add up, such as sums plus one.
    return kind if len(kinds) == 1 or kind == Partial("mean") else Mixed()


@rule
def multiplied(values: "Sequence[Value]") -> Placement:
    """Return a product, which is linear in each factor."""
    kind, *others = [value.placement for value in values if value.placement != REPLICATED]
    return kind if not others and _is_linear(kind) else pointwise(values)


@rule
def extreme(values: "Sequence[Value]", how: str) -> Placement:
    """Return the larger ("max") or the smaller ("min") of the elements at the same place."""
    kinds = {value.placement for value in values} - {REPLICATED}
    return Partial(how) if kinds == {Partial(how)} else pointwise(values)


def divided(values: "Sequence[Value]") -> Placement:
    """Return a quotient of two values, which is linear in the first one."""
    if isinstance(values[1].placement, Replicated):
        return multiplied(values)
    return pointwise(values)


# Reductions and what goes along dimensions.


@rule
def reduced(
    value: Value, axes: "Axes", how: str, keepdims: bool = False, denominator: "Any" = None
) -> Placement:
    """Return a reduction along some dimensions.

    Arguments:
        value: what is reduced.
        axes: the dimensions; None for all.
        how: "sum", "mean", "max", "min", "any", "all", or any other reduction.
        keepdims: whether the dimensions stay, with one element.
        denominator: the backend's name for the number of elements along the rows, where not each
            row has as many.
    """
    placement: Sharded = value.placement
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
def along(value: Value, axes: "Axes") -> Placement:
    """Return what goes along ``axes``, None for all, and keeps them.

    Softmax, cumsum, sort, reverse.
    """
    own = have_own_rows([value]) and value.axis not in listed(axes, value.rank)
    return value.placement if own else Mixed()


@rule
def contracted(values: "Sequence[Value]", letters: "Sequence[str]", result: str) -> Placement:
    """Return a product summed over dimensions, written with the letters of einsum.

    Arguments:
        values: the factors.
        letters: for each value, a letter for each of its dimensions.
        result: the letters of the result; what is not among them is summed over.
    """
    placements: "List[Placement]" = [v.placement for v in values if v.placement != REPLICATED]
    if len(placements) == 1 and _is_linear(placements[0]):
        return placements[0]
    rows = _meeting(values, letters) if have_own_rows(values) else None
    if rows is None or not rows.even and len(placements) > 1:
        return Mixed()
    if rows.axis in result:
        placement: Sharded = rows.replace(axis=result.index(rows.axis))
        return placement
    return Partial("sum")


def product(
    values: "Sequence[Value]", transpose_first: bool = False, transpose_second: bool = False
) -> Placement:
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


# Moving elements without looking at them.

#: More or fewer elements along some dimensions, of what is there: padding, windows, pooling.
resized = along


def view(function: "Callable[..., Placement]") -> "Callable[..., Placement]":
    """Return a rule of what a part of a sum, mean or extreme over the rows remains one after."""

    @rule
    @functools.wraps(function)
    def applied(value: Value, *args: "Any", **kwargs: "Any") -> Placement:
        if isinstance(value.placement, Partial):
            return value.placement
        return function(value, *args, **kwargs)

    return applied


@view
def transposed(value: Value, order: "Sequence[int]") -> Placement:
    """Dimension i of the result is dimension ``order[i]``."""
    placement: Sharded = value.placement
    return placement.replace(axis=[int(axis) % value.rank for axis in order].index(placement.axis))


@view
def expanded(value: Value, axes: "Any") -> Placement:
    """Return new dimensions of size 1 at these places of the result."""
    placement: Sharded = value.placement
    axes = axes if isinstance(axes, (list, tuple, set)) else [axes]
    rank = value.rank + len(axes)
    new = listed(axes, rank)
    return placement.replace(axis=[a for a in range(rank) if a not in new][placement.axis])


@view
def squeezed(value: Value, axes: "Axes") -> Placement:
    """Return a value without dimensions of size 1; None: all that have it, also that of a row."""
    return sliced(value, dict.fromkeys(listed(axes, value.rank), "one"))


@view
def reshaped(value: Value, after: "Optional[Sequence[Optional[int]]]") -> Placement:
    """Return the same elements, in order, in the dimensions ``after``.

    Arguments:
        value: what is reshaped.
        after: the sizes of the result; None for the one that grows with the batch.
    """
    placement: Sharded = value.placement
    axis, before = placement.axis, value.shape
    if after is None or list(after).count(None) != 1 or not placement.even:
        return Mixed()
    place = list(after).index(None)
    inner, trailing, wanted = placement.inner, before[axis + 1 :], _product(after[place + 1 :])
    leading = before[:axis]
    if leading == tuple(after[:place]):  # whatever is not known of these stays as it is
        copies = placement.copies
    elif None in leading:
        return Unknown()  # the sizes of an input are not known
    elif placement.copies * _product(leading) % _product(after[:place]):
        return Mixed()  # a dimension of the result is filled by parts of several rows
    else:
        copies = placement.copies * _product(leading) // _product(after[:place])
    # Each row has to fill whole places along the dimension that grows.
    if trailing == tuple(after[place + 1 :]):
        return placement.replace(axis=place, copies=copies)
    elements = (inner or 1) * _product(size for size in trailing if size is not None)
    exact = inner is not None and None not in trailing
    if not wanted or elements % wanted:
        return Mixed() if exact else Unknown()  # the sizes of an input are not known
    return placement.replace(axis=place, inner=elements // wanted if exact else None, copies=copies)


def _product(sizes: "Iterable[Any]") -> int:
    return functools.reduce(operator.mul, sizes, 1)


@rule
def concatenated(values: "Sequence[Value]", axis: int) -> Placement:
    """Return one after the other along a dimension."""
    placements = [value.placement for value in values]
    if not all(isinstance(each, Sharded) for each in placements):
        # Parts of sums; something without rows would have to be cut, too.
        return placements[0] if len(set(placements)) == 1 else Mixed()
    axis = int(axis) % values[0].rank
    if placements[0].axis != axis:
        return shared(placements) or Mixed()
    rows = shared([each.replace(copies=1) for each in placements])
    if rows is None or not rows.even or (rows.inner is None and len(values) > 1):
        return Mixed()
    return rows.replace(copies=sum(each.copies for each in placements))


@rule
def stacked(values: "Sequence[Value]", axis: int) -> Placement:
    """Side by side, in a new dimension."""
    return concatenated([Value(expanded(v, axis), (v.shape or ()) + (1,)) for v in values], axis)


@view
def sliced(value: Value, parts: "Mapping[int, str]") -> Placement:
    """Return a value with parts of some dimensions.

    Arguments:
        value: what is sliced.
        parts: by dimension, "part" for some of its elements, "one" for a single one, which takes
            the dimension away. All others are taken whole.
    """
    placement: Sharded = value.placement
    parts = {int(axis) % value.rank: part for axis, part in parts.items()}
    if placement.axis in parts:
        return Mixed()
    gone = sum(part == "one" and axis < placement.axis for axis, part in parts.items())
    return placement.replace(axis=placement.axis - gone)


@view
def tiled(value: Value, times: "Optional[Sequence[Optional[int]]]") -> Placement:
    """Return all of it so many times along each dimension; more dimensions are put in front."""
    placement: Sharded = value.placement
    axis = placement.axis + len(times or ()) - value.rank
    if times is None or len(times) < value.rank or times[axis] is None:
        return Unknown()  # how often an input is repeated is not known
    if not placement.even and times[axis] != 1:
        return Mixed()
    return placement.replace(axis=axis, copies=placement.copies * int(times[axis]))


@view
def repeated(
    value: Value, axis: "Optional[int]" = None, times: "Optional[int]" = None
) -> Placement:
    """Return each element several times along a dimension.

    Arguments:
        value: what has the elements.
        axis: the dimension; None: all of them become one.
        times: how often, where that is the same for all of them and known.
    """
    placement: Sharded = value.placement
    if axis is None:
        return repeated(Value(reshaped(value, [None]), [None]), 0, times)
    if placement.axis != int(axis) % value.rank:
        return placement
    if times is None:
        return Mixed()
    inner = None if placement.inner is None else placement.inner * int(times)
    return placement.replace(inner=inner)


@view
def broadcast(value: Value, rank: int) -> Placement:
    """Repeated in dimensions of size 1, and in new ones before the others."""
    placement: Sharded = value.placement
    return placement.replace(axis=placement.axis + rank - value.rank)


# Looking up and sorting in, layers.


@rule
def gathered(values: "Sequence[Value]", axis: int, batch_dims: int = 0) -> Placement:
    """Return elements of the first value along a dimension, by indices in the second."""
    data, numbers = values
    if not have_own_rows(values):
        return Mixed()
    if any(value.rank is None for value in values):
        return Unknown()  # the number of dimensions of an input is not known
    axis = int(axis) % data.rank
    if batch_dims:
        both = [value.placement for value in values if value.axis is not None]
        rows = shared(both) if len(both) == 2 else None
        return rows if rows is not None and rows.axis < batch_dims else Mixed()
    if isinstance(data.placement, Replicated):
        placement: Sharded = numbers.placement
        return placement.replace(axis=axis + numbers.axis)
    if data.axis == axis or not isinstance(numbers.placement, Replicated):
        return Mixed()
    new = 0 if data.axis < axis else numbers.rank - 1
    placement = data.placement
    return placement.replace(axis=data.axis + new)


@rule
def scattered(values: "Sequence[Value]", how: str = "sum") -> Placement:
    """Return rows added up, or compared, at places by indices: segment sums, histograms.

    Arguments:
        values: the numbers, then what is sorted in by them, if anything is.
        how: "sum", "max" or "min".
    """
    alike = have_own_rows(values) and len({value.axis for value in values}) == 1
    return Partial(how) if alike and how in ("sum", "max", "min") else Mixed()


@rule
def by_row(
    values: "Sequence[Value]", axes: "Sequence[Optional[int]]", result: "Optional[int]" = None
) -> Placement:
    """Return a function of each row by itself, such as a convolution.

    Arguments:
        values: the function's arguments.
        axes: for each value, the dimension where the function has its batch; None for what is the
            same for all rows, such as weights, as is all beyond ``axes``.
        result: the dimension where the result has it; by default that of the first with rows.
    """
    axes = list(axes) + [None] * (len(values) - len(axes))
    if not have_own_rows(values) or [value.axis for value in values] != axes[: len(values)]:
        return Mixed()
    rows = [value.placement for value in values if value.axis is not None]
    axis = rows[0].axis if result is None else result
    return shared([placement.replace(axis=axis) for placement in rows]) or Mixed()


# Sizes, what is made by them, and branches.


def made(sizes: Placement, rank: "Optional[int]") -> Placement:
    """Return new values of a shape, each of them drawn or filled in without looking at the others.

    Arguments:
        sizes: the placement of the shape.
        rank: how many dimensions it has, or None.
    """
    if isinstance(sizes, Count):
        if sizes.places is None or rank is None:
            return Unknown()  # where a new value has its rows is not known
        axes = list(sizes.places)
        return Sharded(axes[0], inner=None) if len(axes) == 1 else Mixed()
    return without_rows([sizes]) or Mixed()


def shape_of(value: Value) -> Placement:
    """Return the sizes of a value."""
    placement: Sharded = value.placement
    if isinstance(placement, (Mixed, Unknown)):
        return placement
    if isinstance(placement, Sharded):
        return Count([placement.axis]) if placement.even else Mixed()
    # A vector of sizes is as long for any batch; what else depends on the rows' number may not be.
    fixed = not isinstance(placement, Count) or placement.places is not None or value.rank == 0
    return REPLICATED if fixed else Count()


def size_of(value: Value) -> Placement:
    """Return the number of a value's elements."""
    return Partial("sum") if isinstance(value.placement, Sharded) else shape_of(value)


def counted(sizes: Placement, chosen: "Union[int, Sequence[int]]") -> Placement:
    """Return some elements of a vector of sizes, as a vector, or one of them, as a number."""
    if not isinstance(sizes, Count) or sizes.places is None:
        return sizes
    if not isinstance(chosen, (list, tuple)):
        return Count() if chosen in sizes.places else REPLICATED
    places = [place for place, old in enumerate(chosen) if old in sizes.places]
    return Count(places) if places else REPLICATED


def chosen(condition: Placement, branches: "Sequence[Placement]") -> Placement:
    """Return what one of several branches gives, by a condition that is the same for all rows."""
    result = without_rows([condition] + list(branches))
    if result is not None and not isinstance(result, Count):
        return result
    if not isinstance(condition, Replicated):
        return Mixed()  # each device would choose for itself
    sharded = [branch for branch in branches if isinstance(branch, Sharded)]
    if len(sharded) == len(branches):
        return shared(sharded) or Mixed()
    return branches[0] if len(set(branches)) == 1 else Mixed()
