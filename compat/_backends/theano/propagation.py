"""Placements of the variables of a graph, inferred from those of its inputs."""

from typing import Any, Dict

from theano.gof import graph

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Replicated, Sharded
from .rules import ARRANGING, OF_SIZES, RULES, AppliedOp, Drawn, drawn, unknown
from .sizes import Sizes


class Propagation:
    """Placements of the variables of a graph, inferred from its inputs on; complete once made.

    Arguments:
        placements: those of the graph's inputs that have rows.
        sizes: a ``Sizes`` for its inputs.
        outputs: the variables that the graph computes.
        changing: operations that have side effects, so that they run once, for the whole batch.

    Attributes:
        placements: those of all variables of the graph, in the order in which they are computed.
        sizes: the ``Sizes``, with those of all variables.
    """

    def __init__(self, placements, sizes, outputs, changing=frozenset()):
        self.placements: "Dict[Any, _rows.Placement]" = dict(placements)
        self.sizes = sizes
        self.changing = changing
        for node in graph.io_toposort([], outputs):
            self.sizes.infer(node)
            for variable, placement in zip(node.outputs, self._after(node)):
                if isinstance(placement, Count) and self.sizes.constant(variable) is not None:
                    placement = REPLICATED
                self.placements[variable] = placement

    def placement_of(self, variable: "Any") -> "_rows.Placement":
        """Return the placement of a variable; random numbers are ``Drawn``."""
        return self.placements.get(variable, REPLICATED)

    def value(self, variable: "Any") -> "_rows.Value":
        """Return a variable as rules take it: random numbers have rows or none."""
        placement = self.placement_of(variable)
        if isinstance(placement, Drawn):
            placement = self.as_drawn(variable)
        return _rows.Value(placement, self.sizes.shape(variable))

    def as_drawn(self, variable: "Any") -> "_rows.Placement":
        """Return the placement of random numbers: they have rows along the dimension that grows."""
        grown = self.sizes.grown(variable)
        if not grown:
            return REPLICATED
        is_split = len(grown) == 1 and self.sizes.in_proportion(variable, grown[0])
        return Sharded(grown[0], inner=None) if is_split else Mixed()

    def _after(self, node):
        """Return the placements of a node's results."""
        if node.op in self.changing:
            return [Mixed()] * len(node.outputs)
        name, rule = _entry(node.op)
        kinds = {type(self.placement_of(variable)) for variable in node.inputs}
        if kinds <= {Replicated} and rule is not drawn:
            return [REPLICATED] * len(node.outputs)
        if Drawn in kinds and kinds <= {Replicated, Count, Drawn} and name in ARRANGING:
            return [Drawn()] * len(node.outputs)
        values = [self.value(variable) for variable in node.inputs]
        result = _rows.without_rows([value.placement for value in values])
        if result is None or rule in OF_SIZES:
            result = rule(AppliedOp(node, self), values)
        return result if isinstance(result, list) else [result] * len(node.outputs)

    def inside(self, inputs, outputs):
        """Return the ``Propagation`` over the graph inside of an operation.

        Arguments:
            inputs: for each input of the inner graph: the variable, the outer one from which its
                values are, its placement, and how many of the first dimensions it lacks.
            outputs: variables of the inner graph.
        """
        sizes = Sizes(
            {v: self.sizes.dimensions(outer)[lacking:] for v, outer, _, lacking in inputs},
            {v: self.sizes.numbers(outer) for v, outer, _, lacking in inputs if not lacking},
        )
        return Propagation({v: placement for v, _, placement, _ in inputs}, sizes, outputs)


def _entry(op):
    """Return the name and the rule of an operation; only those of Theano have rules."""
    if type(op).__module__.partition(".")[0] == "theano":
        for kind in type(op).__mro__:
            if kind.__name__ in RULES:
                return kind.__name__, RULES[kind.__name__]
    return type(op).__name__, unknown
