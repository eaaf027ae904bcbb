"""What rules are given, and what all of them have in common."""

import functools

from .placements import REPLICATED, Count, Mixed, Replicated, Sharded, Unknown


class Value:
    """An input of an operation.

    Arguments:
        placement: how it depends on the rows.
        shape: its sizes, None for those that are not known or that grow with the batch; or None
            where not even their number is known.
    """

    __slots__ = ("placement", "shape", "rank")

    def __init__(self, placement, shape):
        self.placement = placement
        self.shape = None if shape is None else tuple(shape)
        self.rank = None if shape is None else len(tuple(shape))

    def __repr__(self):
        return f"Value({self.placement!r}, {self.shape!r})"

    @property
    def axis(self):
        """The dimension of the rows, or None."""
        return getattr(self.placement, "axis", None)


def without_rows(placements):
    """The result of any operation none of whose inputs is ``Sharded`` or ``Partial``, or None."""
    untold = [each for kind in (Mixed, Unknown) for each in placements if isinstance(each, kind)]
    if untold:
        return untold[0]
    if all(isinstance(each, Replicated) for each in placements):
        return REPLICATED
    if all(isinstance(each, (Replicated, Count)) for each in placements):
        return Count()
    return None


def settled(placements, ranks):
    """What any rule says that is asked only of values with rows, or parts of sums; or None."""
    result = without_rows(placements)
    if result is None and any(
        rank is None and not isinstance(placement, (Replicated, Count))
        for placement, rank in zip(placements, ranks)
    ):
        return Unknown("the number of dimensions of an input is not known")
    return result


def rule(function):
    """A rule that is asked only where an input is ``Sharded`` or ``Partial``, and all are known."""

    @functools.wraps(function)
    def applied(given, *args, **kwargs):
        values = given if isinstance(given, (list, tuple)) else [given]
        result = settled([value.placement for value in values], [value.rank for value in values])
        return function(given, *args, **kwargs) if result is None else result

    return applied


def have_own_rows(values):
    """Whether values with rows have them as they are, no parts of sums, and none is a size."""
    return all(isinstance(value.placement, (Replicated, Sharded)) for value in values)


def listed(axes, rank):
    """Axes counted from the front; all of them for None."""
    if axes is None:
        return set(range(rank))
    axes = axes if isinstance(axes, (list, tuple, set, frozenset)) else [axes]
    return {int(axis) % rank for axis in axes} if rank else set()


def shared(placements):
    """The one ``Sharded`` placement that all of these are, or None."""
    first, inner = placements[0], {each.inner for each in placements} - {None}
    if len({(each.axis, each.copies) for each in placements}) > 1 or len(inner) > 1:
        return None
    return first.replace(
        inner=inner.pop() if inner else None, even=all(each.even for each in placements)
    )
