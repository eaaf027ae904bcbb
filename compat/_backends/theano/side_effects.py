"""Side effects of operations that run user-defined Python code.

A list that grows, a counter, NumPy's random numbers: each device's call would change it again, and
so would a trial. So each call is checked. What it has changed is restored, and from then on the
operation runs once, with the whole batch.
"""

import contextlib
import random
from typing import Any, Dict, Iterable, Iterator, Set

import numpy as np
from theano.gof import Op, graph

from ..._runtime.effects import Effects
from .graph import is_custom


class HasEffectsError(Exception):
    """An operation has had side effects, which were undone."""


class PythonOperations:
    """User-defined operations in graphs of a model.

    Attributes:
        changing: those that have had side effects.
    """

    def __init__(self):
        self.changing: "Set[Any]" = set()
        self._effects: "Dict[Any, Any]" = {}

    def follow(self, outputs: "Iterable[Any]") -> None:
        """Add those in the graph of some variables."""
        generators = [np.random.mtrand._rand, random._inst]
        for outer, op in _operations(graph.io_toposort([], list(outputs))):
            if is_custom(op) and op not in self._effects:
                self._effects[op] = outer, Effects([op] + generators, _is_value)

    @contextlib.contextmanager
    def unchanged(self) -> "Iterator[None]":
        """Check that they have no side effects in a block, and undo those that they have.

        Raises:
            HasEffectsError: there were some.
        """
        watched = [pair for pair in self._effects.values() if pair[0] not in self.changing]
        for _, effects in watched:
            effects.note()
        changing = set()
        try:
            yield
            changing = {op for op, effects in watched if effects.has_drawn() or effects.changes()}
        finally:
            for _, effects in watched:
                effects.restore(randoms=effects.has_drawn())
        self.changing |= changing
        if changing:
            raise HasEffectsError


def _operations(nodes):
    """Yield pairs of an operation and one within it, for loops, or itself."""
    for node in nodes:
        yield node.op, node.op
        inner = getattr(node.op, "outputs", None) or ()  # of a loop
        for _, op in _operations(graph.io_toposort([], inner)):
            yield node.op, op


def _is_value(value):
    """Return whether a value is a part of Theano's graph or types, which no call changes."""
    if isinstance(value, Op):
        return False
    return any(kind.__module__.partition(".")[0] == "theano" for kind in type(value).__mro__)
