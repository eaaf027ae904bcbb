"""How a value depends on the rows of a batch: the words of all backends.

As in torch's DTensor, a placement tells how the values that the devices have, each of its own rows,
are related to the value of the whole batch. A ``Value`` is what rules are given.
"""

import functools
from typing import Any, Callable, Collection, Iterable, Optional, Sequence, Set, Tuple, Union

from .fallback import Fallback


class Placement:
    """Relation of a value to the batch. Placements are equal if their attributes are."""

    __slots__: "Tuple[str, ...]" = ()

    def _key(self) -> "Tuple[Any, ...]":
        return (type(self),) + tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        first = [getattr(self, name) for name in self.__slots__[:1]]
        usual = type(self)(*first)
        arguments = list(map(repr, first)) + [
            f"{name}={getattr(self, name)!r}"
            for name in self.__slots__[1:]
            if getattr(self, name) != getattr(usual, name)
        ]
        return "{}({})".format(type(self).__name__, ", ".join(arguments))


class Replicated(Placement):
    """The same on every device: it does not depend on the batch."""

    __slots__ = ()


class Sharded(Placement):
    """Each device has the values of its own rows.

    Arguments:
        axis: the dimension that the rows are along.
        inner: how many neighbouring elements each row has there, None where that is not known:
            (rows, time) reshaped to one dimension has ``time`` of them.
        copies: how often the batch is there, one copy after the other: (time, rows) reshaped to
            one dimension has ``time`` copies.
        even: whether each row has as many elements as any other.
    """

    __slots__ = ("axis", "inner", "copies", "even")

    def __init__(
        self, axis: int, inner: "Optional[int]" = 1, copies: int = 1, even: bool = True
    ) -> None:
        self.axis, self.inner, self.copies, self.even = axis, inner, copies, even

    def replace(self, **changes: "Any") -> "Sharded":
        """Return the placement with some attributes changed."""
        return Sharded(*[changes.get(name, getattr(self, name)) for name in self.__slots__])


class Partial(Placement):
    """The value of the whole batch is a sum, mean, maximum or minimum of the devices' values.

    Arguments:
        how: "sum", "mean", "max" or "min".
        denominator: what a mean is weighted by, as the backend names it; None: the rows.
    """

    __slots__ = ("how", "denominator")

    def __init__(self, how: str, denominator: "Any" = None) -> None:
        self.how, self.denominator = how, denominator


class Count(Placement):
    """It depends on the number of rows alone, which is another one on each device.

    Arguments:
        places: of a vector of sizes, such as a shape, the elements that grow with the batch; None
            where that is not known, or for a single number.
    """

    __slots__ = ("places",)

    def __init__(self, places: "Optional[Iterable[int]]" = None) -> None:
        self.places = None if places is None else frozenset(places)


class _Unsplit(Placement):
    """Computed from the whole batch, on one device.

    Arguments:
        fallback: why, and by which operation; None where a rule leaves that to its caller.
    """

    __slots__ = ("fallback",)

    def __init__(self, fallback: "Optional[Fallback]" = None) -> None:
        self.fallback = fallback

    def _key(self) -> "Tuple[Any, ...]":
        return (type(self),)  # for whatever reason


class Mixed(_Unsplit):
    """It may depend on several rows at once: it is right only where the whole batch is."""

    __slots__ = ()


class Unknown(_Unsplit):
    """No rule tells. It is tried (see ``trial``), and else treated as ``Mixed``."""

    __slots__ = ()


REPLICATED = Replicated()

#: A dimension, several of them, or None for all.
Axes = Union[None, int, Collection[int]]


class Value:
    """An input of an operation.

    Arguments:
        placement: how it depends on the rows.
        shape: its sizes, None for those that are not known or that grow with the batch; or None
            where not even their number is known.
    """

    __slots__ = ("placement", "shape", "rank")

    def __init__(self, placement: Placement, shape: "Optional[Iterable[Optional[int]]]") -> None:
        # Rules handle None, and kinds of placements, before they compute with one.
        self.placement: "Any" = placement
        sizes: "Any" = None if shape is None else tuple(shape)
        self.shape = sizes
        self.rank: "Any" = None if shape is None else len(sizes)

    @property
    def axis(self) -> "Any":
        """The dimension of the rows, or None."""
        return getattr(self.placement, "axis", None)


#: The inputs that a rule takes: one, or a list of them.
Values = Union[Value, Sequence[Value]]


def without_rows(placements: "Sequence[Placement]") -> "Optional[Placement]":
    """Return an operation's result where no input is ``Sharded`` or ``Partial``, else None."""
    for kind in (Mixed, Unknown):
        for placement in placements:
            if isinstance(placement, kind):
                return placement
    if all(isinstance(placement, Replicated) for placement in placements):
        return REPLICATED
    if all(isinstance(placement, (Replicated, Count)) for placement in placements):
        return Count()
    return None


def settled(values: "Sequence[Value]") -> "Optional[Placement]":
    """Return the placement of any operation's result where it does not depend on the operation.

    None where an input is ``Sharded`` or ``Partial``, and all are known.
    """
    result = without_rows([value.placement for value in values])
    moving = [value for value in values if isinstance(value.placement, (Sharded, Partial))]
    if result is None and any(value.rank is None for value in moving):
        return Unknown()  # the number of dimensions of an input is not known
    return result


def rule(function: "Callable[..., Placement]") -> "Callable[..., Placement]":
    """Decorate a rule that takes only known inputs, one of them ``Sharded`` or ``Partial``."""

    @functools.wraps(function)
    def applied(values: "Values", *args: "Any", **kwargs: "Any") -> Placement:
        result = settled([values] if isinstance(values, Value) else values)
        return function(values, *args, **kwargs) if result is None else result

    return applied


def have_own_rows(values: "Iterable[Value]") -> bool:
    """Return whether values with rows are ``Sharded``, none ``Partial``, and none a size."""
    return all(isinstance(value.placement, (Replicated, Sharded)) for value in values)


def listed(axes: "Axes", rank: int) -> "Set[int]":
    """Return axes counted from the front; all of them for None."""
    if axes is None:
        return set(range(rank))
    several: "Any" = axes if isinstance(axes, (list, tuple, set, frozenset)) else [axes]
    return {int(axis) % rank for axis in several} if rank else set()


def shared(placements: "Sequence[Sharded]") -> "Optional[Sharded]":
    """Return the one ``Sharded`` placement that all of these are, or None."""
    first, inner = placements[0], {rows.inner for rows in placements} - {None}
    if len({(rows.axis, rows.copies) for rows in placements}) > 1 or len(inner) > 1:
        return None
    return first.replace(
        inner=inner.pop() if inner else None, even=all(rows.even for rows in placements)
    )
