"""Placements of the variables of a graph, inferred from those of its inputs."""

from theano.gof import graph

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Replicated, Sharded
from .rules import ARRANGING, OF_SIZES, RULES, AppliedOp, Drawn, drawn, unknown
from .sizes import Sizes


class Propagation:
    """Placements of the variables of a graph, inferred from its inputs on.

    Arguments:
        placements: those of the graph's inputs that have rows.
        sizes: a ``Sizes`` for its inputs.

    Attributes:
        placements: of all variables that were followed, in the order in which they are computed.
        changing: operations of the user's that change more than they return.
    """

    changing = frozenset()  # type: frozenset

    def __init__(self, placements, sizes):
        self.placements = dict(placements)
        self.sizes = sizes

    def follow(self, wanted):
        """Find the placements of what these variables depend on, and return this."""
        for node in graph.io_toposort([], wanted):
            self.sizes.infer(node)
            for variable, placement in zip(node.outputs, self._after(node)):
                if isinstance(placement, Count) and self.sizes.constant(variable) is not None:
                    placement = REPLICATED
                self.placements[variable] = placement
        return self

    def placement_of(self, variable):
        return self.placements.get(variable, REPLICATED)

    def value(self, variable):
        placement = self.placement_of(variable)
        if isinstance(placement, Drawn):
            placement = self.as_drawn(variable)
        return _rows.Value(placement, self.sizes.shape(variable))

    def as_drawn(self, variable):
        """Return where random numbers have rows: along the one dimension that grows with them."""
        grown = self.sizes.grown(variable)
        if not grown:
            return REPLICATED
        whole = len(grown) == 1 and self.sizes.in_proportion(variable, grown[0])
        return Sharded(grown[0], inner=None) if whole else Mixed()

    def _after(self, node):
        if node.op in self.changing:
            return [Mixed()] * len(node.outputs)
        name, rule = _entry(node.op)
        given = [self.placement_of(variable) for variable in node.inputs]
        kinds = set(map(type, given))
        if kinds <= {Replicated} and rule is not drawn:
            return [REPLICATED] * len(node.outputs)
        if Drawn in kinds and kinds <= {Replicated, Count, Drawn} and name in ARRANGING:
            return [Drawn()] * len(node.outputs)
        values = [self.value(variable) for variable in node.inputs]
        found = _rows.without_rows([value.placement for value in values])
        if found is None or rule in OF_SIZES:
            found = rule(AppliedOp(node, self), values)
        return found if isinstance(found, list) else [found] * len(node.outputs)

    def inside(self, pairs, wanted):
        """Follow the graph inside of an operation.

        Arguments:
            pairs: for its inputs: the variable there, the one here that its values are from, its
                placement, and how many of that one's first dimensions it lacks.
            wanted: variables in there.
        """
        sizes = Sizes(
            {v: self.sizes.dimensions(outer)[lacking:] for v, outer, _, lacking in pairs},
            {v: self.sizes.numbers(outer) for v, outer, _, lacking in pairs if not lacking},
        )
        return Propagation({v: placement for v, _, placement, _ in pairs}, sizes).follow(wanted)


def _entry(op):
    """Return the name and the rule of an operation of Theano's own, not of a user's class."""
    if type(op).__module__.partition(".")[0] == "theano":
        for kind in type(op).__mro__:
            if kind.__name__ in RULES:
                return kind.__name__, RULES[kind.__name__]
    return type(op).__name__, unknown
