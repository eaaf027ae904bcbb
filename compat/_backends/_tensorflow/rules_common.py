"""Parts that rules of all kinds of operations share."""

from typing import Any, Callable, List

from ... import _rows
from ..._rows import REPLICATED, Mixed, Sharded, Unknown
from .graph import known_numbers


class Positions(Mixed):
    """The placement of positions of rows, counted within each shard: indices of rows, nothing else.

    Arguments:
        rows: the placement of the values that they are positions in.
    """

    __slots__ = ("rows",)

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def _key(self):
        return type(self), self.rows

    def looked_up(self, value):
        """Return the elements of ``value`` at these positions."""
        placement = value.placement
        same = isinstance(placement, Sharded) and placement == self.rows
        return placement.replace(inner=None, even=False) if same else Mixed()


#: A function of an operation and the ``Value``s of its inputs; see ``rules_values``.
Rule = Callable[[Any, Any], Any]


class NotKnown(Exception):
    """A rule needs numbers that are not constant."""


def required(value: "Any") -> "Any":
    """Return a value that is not None; else raise ``NotKnown``."""
    if value is None:
        raise NotKnown
    return value


def numbers(tensor: "Any") -> "List[Any]":
    """Return the numbers in a constant tensor; else raise ``NotKnown``."""
    return required(known_numbers(tensor))


def of_values(rule: "Callable[..., Any]", *arguments: "Any") -> "Rule":
    """Return a rule of all inputs, without attributes."""
    return lambda op, values: rule(values, *arguments)


def of_first(rule: "Rule") -> "Rule":
    """Return a rule of operations whose other inputs, such as sizes, must be replicated."""

    def applied(op, values):
        others = _rows.without_rows([value.placement for value in values[1:]])
        if others == REPLICATED:
            return rule(op, values)
        return Unknown() if others else Mixed()  # what it does depends on the number of rows

    return applied


def by_numbers(rule: "Callable[..., Any]", place: int = 1) -> "Rule":
    """Return a rule of the first input and the numbers in another one, all others replicated."""
    return of_first(lambda op, values: rule(values[0], numbers(op.inputs[place])))
