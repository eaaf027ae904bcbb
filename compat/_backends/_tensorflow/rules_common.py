"""Parts that rules of all kinds of operations share."""

from ... import _rows
from ..._rows import REPLICATED, Mixed, Sharded, Unknown
from .graph import known_numbers


class Positions(Mixed):
    """Positions of rows, counted within each device's part: to look rows up with, nothing else.

    Arguments:
        rows: the placement of what they are positions in.
    """

    __slots__ = ("rows",)

    def __init__(self, rows):
        super().__init__("positions are counted within each part")
        self.rows = rows

    def _said(self):
        return type(self), self.rows

    def looked_up(self, value):
        """Return the elements of ``value`` at these positions."""
        placement = value.placement
        same = isinstance(placement, Sharded) and placement == self.rows
        return placement.replace(inner=None, even=False) if same else Mixed()


class NotKnown(Exception):
    """A rule needs numbers that are not known before a run."""


def known(value):
    """What may be None, where nothing can be told without it."""
    if value is None:
        raise NotKnown
    return value


def numbers(tensor):
    return known(known_numbers(tensor))


def of_values(rule, *arguments):
    """Return a rule of all inputs, without attributes."""
    return lambda op, values: rule(values, *arguments)


def of_first(rule):
    """Return a rule of operations whose other inputs, sizes and axes for example, are fixed."""

    def applied(op, values):
        others = _rows.without_rows([value.placement for value in values[1:]])
        if others == REPLICATED:
            return rule(op, values)
        return Unknown("what it does depends on the number of rows") if others else Mixed()

    return applied


def by_numbers(rule, place=1):
    """A rule of the first input by the numbers in another one, where all others are fixed."""
    return of_first(lambda op, values: rule(values[0], numbers(op.inputs[place])))
