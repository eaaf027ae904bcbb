"""Numbers of rows: sizes that grow with the batch, whose comparisons with others are noted."""

from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

from torch.utils import _pytree as tree


class CountComparison(NamedTuple):
    """A comparison of a number of rows with another number, by which Python may choose its way.

    Arguments:
        operator: a function of two numbers, such as ``int.__lt__``; None: Python was given the
            number as a plain one, and what it does by it is not seen.
        per: how many each row counts for.
        number: the other number.
    """

    operator: "Optional[Callable[[int, int], bool]]"
    per: int = 1
    number: int = 0

    def differs(self, sizes: "Iterable[int]", total: int) -> bool:
        """Return whether its result for any of these numbers of rows is not that for all rows."""
        if self.operator is None:
            return any(size != total for size in sizes)
        result = self.operator(self.per * total, self.number)
        return any(self.operator(self.per * size, self.number) != result for size in sizes)


#: The use of a number of rows as a plain number.
PLAIN_USE = CountComparison(None)


class RowCount(int):
    """A size that grows with the batch: the placement ``Count``, as a number.

    Arguments:
        per: how many each row counts for.
        propagation: the ``Propagation``, which notes comparisons.
    """

    constant = False  # as of a ``ComputedTotal``

    per: int
    propagation: Any

    def __new__(cls, per, propagation):
        self = super().__new__(cls, per * propagation.rows)
        self.per, self.propagation = per, propagation
        return self

    def __mul__(self, other):
        return (
            RowCount(self.per * other, self.propagation)
            if _is_plain(other)
            else self.plain() * other
        )

    __rmul__ = __mul__

    def __floordiv__(self, other):
        if _is_plain(other) and other > 0 and self.per % other == 0:
            return RowCount(self.per // other, self.propagation)
        return self.plain() // other

    def plain(self) -> int:
        """Return a plain number, of whose use nothing is seen."""
        self.propagation.compare(PLAIN_USE)
        return int(self)

    def __reduce__(self):
        return int, (int(self),)

    __hash__ = int.__hash__


def _is_plain(number):
    return isinstance(number, int) and not isinstance(number, RowCount)


def _of_plain(name):
    return lambda self, other: getattr(self.plain(), name)(other)


def _compared(name):
    plain = getattr(int, name)

    def compared(self, other):
        if _is_plain(other):
            self.propagation.compare(CountComparison(plain, self.per, other))
        return plain(self, other)

    return compared


for _name in "add radd sub rsub mod pow truediv rtruediv".split():
    setattr(RowCount, f"__{_name}__", _of_plain(f"__{_name}__"))


for _name in "eq ne lt le gt ge".split():
    setattr(RowCount, f"__{_name}__", _compared(f"__{_name}__"))


def has_count(*values: Any) -> bool:
    """Return whether a ``RowCount`` is among nested values."""
    return any(isinstance(leaf, RowCount) for leaf in tree.tree_leaves(values))


def counted(sizes: "Sequence[int]") -> "Optional[int]":
    """Return the place of the one size that grows with the batch, or None."""
    places = [place for place, size in enumerate(sizes) if isinstance(size, RowCount)]
    return places[0] if len(places) == 1 else None
