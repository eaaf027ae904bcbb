"""Placements of the values that a graph of MXNet computes, inferred by rules and shapes."""

import mxnet as mx

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Sharded, Unknown, Value
from . import rules
from .graph import inferred

# Two numbers of rows, far from any width and from one another, so that shapes tell what grows
# with the batch.
ROWS = (1009, 2003)


class Propagation:
    """The placements of a graph's entries, as far as its outputs follow from them.

    Before ``propagate()`` there are none.

    Arguments:
        graph: a ``Graph``.
    """

    def __init__(self, graph):
        self.graph = graph
        self.forget()

    def forget(self):
        """Drop all placements: then nothing has a batch dimension."""
        self._placements = {}  # type: dict  # by entry
        self.without_rule = []  # type: list  # entries whose placement is that of their shape

    def placement_of(self, entry):
        """Return the placement of an entry that the outputs follow from."""
        return self._placements[entry]

    def propagate(self, given, shapes, tried=None):
        """Find the placement of each entry that the outputs follow from.

        What has no rule is taken for rows where its shape has them, and listed in
        ``without_rule``: ``trial.propagate_and_try`` tries it.

        Arguments:
            given: placements of variables, by name; those of weights are left out.
            shapes: of variables, by name, with any number of rows.
            tried: by node of which a trial said that it mixes rows: why.
        """
        numbers = sorted(self.graph.ancestors(self.graph.outputs))
        inputs = [self.graph.inputs[number] for number in numbers]
        self._find_sizes(set(self.graph.outputs).union(*inputs), given, shapes)
        self.forget()
        self._causes = dict(tried or {})  # by node that mixes rows: why
        for number in numbers:
            values = [Value(self._placements[e], self._sizes[e]) for e in self.graph.inputs[number]]
            found = Mixed() if number in self._causes else self._by_rule(number, values, given)
            mixed = any(isinstance(value.placement, Mixed) for value in values)
            for entry in self._used[number]:
                placement = found[entry[1]] if isinstance(found, list) else found
                placement = self._agreeing(placement, entry)
                grows = self.grows.get(entry) or ()
                if isinstance(placement, Unknown) and len(grows) == 1:
                    placement = Sharded(grows[0], inner=1 if entry in self._one_each else None)
                    self.without_rule.append(entry)
                elif isinstance(placement, Unknown):
                    placement, self._causes[number] = Mixed(), "unknown"
                elif isinstance(placement, Mixed) and not mixed:
                    self._causes.setdefault(number, "mixed")
                self._placements[entry] = placement

    def _by_rule(self, number, values, given):
        """Return the placement of a node's outputs, or a list of those of each."""
        node, first = self.graph.nodes[number], (number, 0)
        if node["op"] == "null":
            return given.get(node["name"], Mixed() if self.grows.get(first) else REPLICATED)
        sources = {self.graph.nodes[source]["name"] for source, _ in self.graph.inputs[number]}
        if node["op"] not in rules.MEANS and not sources.isdisjoint(self.graph.auxiliary):
            return Mixed()  # a state, of which nobody knows how those of devices go together
        sizes, grows = self._sizes.get(first), self.grows.get(first)
        return rules.placements(rules.SymbolNode(node["op"], node["attrs"], sizes, grows), values)

    def _find_sizes(self, entries, given, shapes):
        """Find what is known of the entries' shapes: sizes that do not grow, dimensions that do."""
        entries = sorted(entries)
        symbol, found = self.graph.symbol(entries), []
        for rows in ROWS:
            known = {name: grown(shape, given.get(name), rows) for name, shape in shapes.items()}
            _, sizes, _ = inferred(symbol.infer_shape_partial, symbol, known)
            sizes = sizes or [None] * len(entries)
            # None: the number of dimensions is not known. ``()`` is a number's shape in MXNet's
            # numpy mode only.
            found.append([size if size or mx.util.is_np_shape() else None for size in sizes])
        self._sizes, self.grows, self._used = dict.fromkeys(entries), {}, {}
        self._one_each = set()  # entries with as many elements as rows along what grows
        for entry, one, other in zip(entries, *found):
            self._used.setdefault(entry[0], []).append(entry)
            if one is not None and other is not None and len(one) == len(other):
                pairs = list(zip(one, other))
                self._sizes[entry] = tuple(a if a == b and a > 0 else None for a, b in pairs)
                if all(min(pair) > 0 for pair in pairs):
                    self.grows[entry] = [axis for axis, (a, b) in enumerate(pairs) if a != b]
                    if all(pairs[axis] == ROWS for axis in self.grows[entry]):
                        self._one_each.add(entry)

    def _agreeing(self, placement, entry):
        """Return a rule's placement, unless the shape has another: then nothing is known."""
        grows = self.grows.get(entry)
        if grows is None or isinstance(placement, (Mixed, Unknown, Count)):
            return placement
        if grows != ([placement.axis] if isinstance(placement, Sharded) else []):
            return Unknown("its shape grows in other dimensions")
        if isinstance(placement, Sharded) and entry in self._one_each:
            return placement.replace(inner=1)
        return placement

    def across(self, outputs, with_rows=True):
        """Return the first operation that mixes rows, if outputs follow from one.

        Or an output whose rows are not those of the first axis, one for each of the batch.
        """
        for entry in outputs:
            has_rows = self.grows.get(entry) != []
            if isinstance(self._placements[entry], Sharded) and not self.has_rows(entry):
                return _rows.Across(self.graph.nodes[entry[0]]["name"])
            if isinstance(self._placements[entry], Mixed) and (has_rows or not with_rows):
                first = min(self._causes)
                name = self.graph.nodes[self._origin(first)]["name"]
                return _rows.Across(name, why=self._causes[first])
        return None

    def _origin(self, number):
        """Return a node, or the reduction that it goes on from."""
        for entry in self.graph.inputs[number]:
            if isinstance(self._placements[entry], (Count, Partial)):
                return self._origin(entry[0])
        return number

    def has_rows(self, entry):
        """Return whether an entry has a row for each of the batch, each computed by itself."""
        return self._placements.get(entry) == Sharded(0)


def grown(shape, placement, rows):
    """Return the shape that a value with a placement has where the batch has so many rows."""
    if not isinstance(placement, Sharded):
        return tuple(shape)
    length = rows * placement.inner * placement.copies
    return tuple(shape[: placement.axis]) + (length,) + tuple(shape[placement.axis + 1 :])
