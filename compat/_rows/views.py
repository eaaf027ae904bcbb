"""Rules of what moves elements without looking at them."""

import functools
import operator

from .arithmetic import along
from .placements import Mixed, Partial, Sharded, Unknown
from .values import Value, listed, rule, shared

#: More or fewer elements along some dimensions, of what is there: padding, windows, pooling.
resized = along


def view(function):
    """A rule of what a part of a sum, mean or extreme over the rows remains one after."""

    @rule
    @functools.wraps(function)
    def applied(value, *args, **kwargs):
        if isinstance(value.placement, Partial):
            return value.placement
        return function(value, *args, **kwargs)

    return applied


@view
def transposed(value, order):
    """Dimension i of the result is dimension ``order[i]``."""
    placement = value.placement
    return placement.replace(axis=[int(each) % value.rank for each in order].index(placement.axis))


@view
def expanded(value, axes):
    """New dimensions of size 1 at these places of the result."""
    placement = value.placement
    axes = axes if isinstance(axes, (list, tuple, set)) else [axes]
    rank = value.rank + len(axes)
    new = listed(axes, rank)
    return placement.replace(axis=[a for a in range(rank) if a not in new][placement.axis])


@view
def squeezed(value, axes):
    """Dimensions of size 1 taken away; None takes all that have it, also that of a single row."""
    return sliced(value, dict.fromkeys(listed(axes, value.rank), "one"))


@view
def reshaped(value, after):
    """The same elements, in order, in the dimensions ``after``.

    Arguments:
        after: the sizes of the result; None for the one that grows with the batch.
    """
    placement = value.placement
    axis, before = placement.axis, value.shape
    if after is None or list(after).count(None) != 1 or not placement.even:
        return Mixed()
    place = list(after).index(None)
    inner, trailing, wanted = placement.inner, before[axis + 1 :], _product(after[place + 1 :])
    leading = before[:axis]
    if leading == tuple(after[:place]):  # whatever is not known of these stays as it is
        copies = placement.copies
    elif None in leading:
        return Unknown("the sizes of an input are not known")
    elif placement.copies * _product(leading) % _product(after[:place]):
        return Mixed()  # a dimension of the result is filled by parts of several rows
    else:
        copies = placement.copies * _product(leading) // _product(after[:place])
    # Each row has to fill whole places along the dimension that grows.
    if trailing == tuple(after[place + 1 :]):
        return placement.replace(axis=place, copies=copies)
    known = (inner or 1) * _product(size for size in trailing if size is not None)
    exact = inner is not None and None not in trailing
    if not wanted or known % wanted:
        return Mixed() if exact else Unknown("the sizes of an input are not known")
    return placement.replace(axis=place, inner=known // wanted if exact else None, copies=copies)


def _product(sizes):
    return functools.reduce(operator.mul, sizes, 1)


@rule
def concatenated(values, axis):
    """One after the other along a dimension."""
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
def stacked(values, axis):
    """Side by side, in a new dimension."""
    return concatenated([Value(expanded(v, axis), (v.shape or ()) + (1,)) for v in values], axis)


@view
def sliced(value, parts):
    """Parts of some dimensions.

    Arguments:
        parts: by dimension, "part" for some of its elements, "one" for a single one, which takes
            the dimension away. All others are taken whole.
    """
    placement = value.placement
    parts = {int(axis) % value.rank: part for axis, part in parts.items()}
    if placement.axis in parts:
        return Mixed()
    gone = sum(part == "one" and axis < placement.axis for axis, part in parts.items())
    return placement.replace(axis=placement.axis - gone)


@view
def tiled(value, times):
    """All of it so many times along each dimension; more dimensions are put in front."""
    placement = value.placement
    if times is None or len(times) < value.rank or None in times:
        return Unknown("how often an input is repeated is not known")
    axis = placement.axis + len(times) - value.rank
    if not placement.even and times[axis] != 1:
        return Mixed()
    return placement.replace(axis=axis, copies=placement.copies * int(times[axis]))


@view
def repeated(value, axis=None, times=None):
    """Each element several times along a dimension; for None all of them become one dimension.

    Arguments:
        times: how often, where that is the same for all of them and known.
    """
    placement = value.placement
    if axis is None:
        return repeated(Value(reshaped(value, [None]), [None]), 0, times)
    if placement.axis != int(axis) % value.rank:
        return placement
    if times is None:
        return Mixed()
    inner = None if placement.inner is None else placement.inner * int(times)
    return placement.replace(inner=inner)


@view
def broadcast(value, rank):
    """Repeated in dimensions of size 1, and in new ones before the others."""
    placement = value.placement
    return placement.replace(axis=placement.axis + rank - value.rank)
