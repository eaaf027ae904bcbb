"""Placements of the values that a graph of MXNet computes, inferred by rules and shapes."""

import itertools
from typing import Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from ..._rows import (
    REPLICATED,
    Count,
    Fallback,
    Mixed,
    Partial,
    Placement,
    Reason,
    Sharded,
    Unknown,
    Value,
)
from . import rules
from .graph import Entry, Graph, inferred

# Two batch sizes, far from any width and from one another: dimensions that differ between them grow
# with the batch.
ROWS = (1009, 2003)


class EntryShape(NamedTuple):
    """Shape of an entry, from those that MXNet infers for two batch sizes.

    Attributes:
        sizes: of its dimensions, None for those that grow with the batch or are not known; or None
            where the number of dimensions is unknown.
        grows: the dimensions that grow with the batch; None where that is not known.
        has_one_each: whether it has one element for each row of the batch along these.
    """

    sizes: "Optional[Tuple[Optional[int], ...]]" = None
    grows: "Optional[List[int]]" = None
    has_one_each: bool = False

    @classmethod
    def compared(cls, shape, other):
        """Return the shape of an entry that has these shapes for the batch sizes of ``ROWS``."""
        if shape is None or other is None or len(shape) != len(other):
            return cls()
        pairs = list(zip(shape, other))
        sizes = tuple(a if a == b and a > 0 else None for a, b in pairs)
        if any(min(pair) <= 0 for pair in pairs):
            return cls(sizes)
        grows = [axis for axis, (a, b) in enumerate(pairs) if a != b]
        return cls(sizes, grows, all(pairs[axis] == ROWS for axis in grows))


class Propagation:
    """Placements of a graph's entries, as far as its outputs follow from them.

    An entry without a rule is assumed to be sharded along the dimension that grows with the batch,
    and is listed in ``without_rule``: ``trial.propagate_and_try`` tries it.

    Arguments:
        graph: a ``Graph``.
        inputs: placements of variables, by name; those of weights are left out. None: there are no
            placements, and nothing has a batch dimension.
        shapes: of variables, by name, with any number of rows.
        mixing: the ``Reason`` for each node that mixes rows by a trial.

    Attributes:
        without_rule: entries whose placement is that of their shape.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: "Optional[Dict[str, Placement]]" = None,
        shapes: "Optional[Dict[str, Tuple[int, ...]]]" = None,
        mixing: "Optional[Dict[int, Reason]]" = None,
    ) -> None:
        self.graph = graph
        self.without_rule: "List[Entry]" = []
        self._placements: "Dict[Entry, Placement]" = {}
        self._causes = dict(mixing or {})  # by node that mixes rows
        self._shapes: "Dict[Entry, EntryShape]" = {}
        if inputs is not None:
            numbers = graph.ancestors(graph.outputs)
            entries = set(graph.outputs).union(*[graph.inputs[number] for number in numbers])
            self._shapes = entry_shapes(graph, entries, inputs, shapes)
            self._propagate(inputs)

    def placement_of(self, entry: "Entry") -> "Placement":
        """Return the placement of an entry that the outputs follow from."""
        return self._placements[entry]

    def _propagate(self, inputs):
        """Find the placement of each entry, in the order in which nodes are computed."""
        for number, entries in itertools.groupby(sorted(self._shapes), key=lambda entry: entry[0]):
            sources = self.graph.inputs[number]
            values = [Value(self._placements[e], self._shapes[e].sizes) for e in sources]
            follows_mixed = any(isinstance(value.placement, Mixed) for value in values)
            results = Mixed() if number in self._causes else self._by_rule(number, values, inputs)
            for entry in entries:
                placement = results[entry[1]] if isinstance(results, list) else results
                placement = self._agreeing(placement, entry)
                grows = self._shapes[entry].grows or ()
                if isinstance(placement, Unknown) and len(grows) == 1:
                    inner = 1 if self._shapes[entry].has_one_each else None
                    placement = Sharded(grows[0], inner=inner)
                    self.without_rule.append(entry)
                elif isinstance(placement, Unknown):
                    placement, self._causes[number] = Mixed(), Reason.NO_RULE
                elif isinstance(placement, Mixed) and not follows_mixed:
                    self._causes.setdefault(number, Reason.CROSS_BATCH)
                self._placements[entry] = placement

    def _by_rule(self, number, values, inputs):
        """Return the placement of a node's outputs, or a list of those of each."""
        node, first = self.graph.nodes[number], self._shapes.get((number, 0), EntryShape())
        if node["op"] == "null":
            return inputs.get(node["name"], Mixed() if first.grows else REPLICATED)
        sources = {self.graph.nodes[source]["name"] for source, _ in self.graph.inputs[number]}
        if node["op"] not in rules.MEANS and not sources.isdisjoint(self.graph.auxiliary):
            return Mixed()  # a state, and it is not known how those of devices are merged
        op = rules.SymbolNode(node["op"], node["attrs"], first.sizes, first.grows)
        return rules.placements(op, values)

    def _agreeing(self, placement, entry):
        """Return a rule's placement, or ``Unknown`` if the shape contradicts it."""
        grows = self._shapes[entry].grows
        if grows is None or isinstance(placement, (Mixed, Unknown, Count)):
            return placement
        if grows != ([placement.axis] if isinstance(placement, Sharded) else []):
            return Unknown()  # its shape grows in other dimensions
        if isinstance(placement, Sharded) and self._shapes[entry].has_one_each:
            return placement.replace(inner=1)
        return placement

    def fallback(self, outputs: "List[Entry]", with_rows: bool = True) -> "Optional[Fallback]":
        """Return the first operation that mixes rows, if outputs depend on one.

        Or an output whose batch dimension is not the first one, with an element for each row.
        """
        for entry in outputs:
            has_rows = self._shapes[entry].grows != []
            if isinstance(self._placements[entry], Sharded) and not self.has_rows(entry):
                return Fallback(Reason.CROSS_BATCH, self.graph.nodes[entry[0]]["name"])
            if isinstance(self._placements[entry], Mixed) and (has_rows or not with_rows):
                first = min(self._causes)
                name = self.graph.nodes[self._origin(first)]["name"]
                return Fallback(self._causes[first], name)
        return None

    def _origin(self, number):
        """Return a node, or the reduction whose result it uses."""
        for entry in self.graph.inputs[number]:
            if isinstance(self._placements[entry], (Count, Partial)):
                return self._origin(entry[0])
        return number

    def has_rows(self, entry: "Entry") -> bool:
        """Return whether an entry has a row for each of the batch, computed from it alone."""
        return self._placements.get(entry) == Sharded(0)


def entry_shapes(graph, entries, placements, shapes):
    """Infer the shapes of entries, by entry.

    Arguments:
        graph: a ``Graph``.
        entries: of it.
        placements: of variables, by name.
        shapes: of variables, by name, with any number of rows.
    """
    entries = sorted(entries)
    symbol, inferences = graph.symbol(entries), []
    # MXNet before 1.5 has no numpy mode.
    is_np_shape = getattr(getattr(mx, "util", None), "is_np_shape", lambda: False)
    for rows in ROWS:
        inputs = {name: grown(shape, placements.get(name), rows) for name, shape in shapes.items()}
        _, sizes, _ = inferred(symbol.infer_shape_partial, symbol, inputs)
        sizes = sizes or [None] * len(entries)
        # None: the number of dimensions is not known. ``()`` is a number's shape in MXNet's
        # numpy mode only.
        inferences.append([size if size or is_np_shape() else None for size in sizes])
    return {e: EntryShape.compared(*pair) for e, *pair in zip(entries, *inferences)}


def grown(shape, placement, rows):
    """Return the shape of a value with a placement, for a batch of so many rows."""
    if not isinstance(placement, Sharded):
        return tuple(shape)
    length = rows * placement.inner * placement.copies
    return tuple(shape[: placement.axis]) + (length,) + tuple(shape[placement.axis + 1 :])
