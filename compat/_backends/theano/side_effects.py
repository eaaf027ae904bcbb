"""Operations that run the user's Python code, and may change more than they return.

A list that grows, a counter, random numbers of numpy's: each device's call would change it again,
and so would a trial. So each call is looked at. What it has changed is put back, and from then on
the operation runs once, with the whole batch.
"""

import contextlib
import random

import numpy as np
from theano.gof import Op, graph

from ..._runtime.effects import Effects
from .graph import is_custom


class HasEffectsError(Exception):
    """An operation has changed what it can reach; that was put back."""


class PythonOperations:
    """User-defined operations in graphs of a model.

    Attributes:
        changing: those that have changed something.
    """

    def __init__(self):
        self.changing = set()  # type: set
        self._effects = {}  # type: dict

    def follow(self, outputs):
        """Find them in the graph of some variables."""
        generators = [np.random.mtrand._rand, random._inst]
        for outer, op in _operations(graph.io_toposort([], list(outputs))):
            if is_custom(op) and op not in self._effects:
                self._effects[op] = outer, Effects([op] + generators, _is_value)

    @contextlib.contextmanager
    def unchanged(self):
        """Watch a block in which they must not change what they can reach.

        Raises:
            HasEffectsError: one did.
        """
        watched = [each for each in self._effects.values() if each[0] not in self.changing]
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
    """Yield the operations of nodes, and those within their loops with the outer one."""
    for node in nodes:
        yield node.op, node.op
        inner = getattr(node.op, "outputs", None) or ()  # of a loop
        for _, op in _operations(graph.io_toposort([], inner)):
            yield node.op, op


def _is_value(value):
    """Return whether it is Theano's, a part of the graph or of a type, which no call changes."""
    if isinstance(value, Op):
        return False
    return any(kind.__module__.partition(".")[0] == "theano" for kind in type(value).__mro__)
