"""Numbers of rows: sizes that grow with the batch, whose comparisons with others are noted."""

from torch.utils import _pytree as tree

#: The comparison by which any two numbers of rows differ: Python was given one of them as any
#: other number, and what it does by it is not seen.
AS_ANY = int.__sub__


class RowCount(int):
    """A size that grows with the batch: the placement ``Count``, as a number.

    Arguments:
        per: its part for each row.
        propagation: has ``rows``, and takes note of comparisons.
    """

    constant = False  # as of a ``ComputedTotal``

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

    def plain(self):
        self.propagation.compare(AS_ANY, 1, 0)
        return int(self)

    def __reduce__(self):
        return int, (int(self),)

    __hash__ = int.__hash__


def _is_plain(number):
    return isinstance(number, int) and not isinstance(number, RowCount)


def _given(name):
    return lambda self, other: getattr(self.plain(), name)(other)


def _compared(name):
    plain = getattr(int, name)

    def compared(self, other):
        if _is_plain(other):
            self.propagation.compare(plain, self.per, other)
        return plain(self, other)

    return compared


for _name in "add radd sub rsub mod pow truediv rtruediv".split():
    setattr(RowCount, f"__{_name}__", _given(f"__{_name}__"))


for _name in "eq ne lt le gt ge".split():
    setattr(RowCount, f"__{_name}__", _compared(f"__{_name}__"))


def differs(operator, per, number, sizes, total):
    """Return whether a comparison has another result for some of the rows than for all."""
    return any(operator(per * size, number) != operator(per * total, number) for size in sizes)


def has_count(*values):
    return any(isinstance(leaf, RowCount) for leaf in tree.tree_leaves(values))


def counted(sizes):
    """Return the place of the one size that grows with the batch, or None."""
    places = [place for place, size in enumerate(sizes) if isinstance(size, RowCount)]
    return places[0] if len(places) == 1 else None
