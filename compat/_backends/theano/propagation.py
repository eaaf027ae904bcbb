"""Placements of the variables of a graph, inferred from those of its inputs."""

from typing import Any, Dict, List, Optional, Set, Tuple

import numpy as np
from theano.compile.ops import Shape, Shape_i
from theano.gof import graph

from ... import _rows
from ..._rows import LARGEST, REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Value
from . import batch_norm, redistribution, softmax
from .graph import is_custom
from .rules import ARRANGING, OF_SIZES, RULES, AppliedOp, Drawn, drawn, pointwise, unknown
from .sizes import ROWS, Sizes

#: By the names of operations that need the whole batch: what computes them by reductions.
_LOWERED: "Dict[str, Any]" = {
    "AbstractBatchNormTrain": batch_norm,
    "LogSoftmax": softmax,
    "Softmax": softmax,
}


class Propagation:
    """Placements of the variables of a graph, inferred from its inputs on; complete once made.

    Arguments:
        placements: those of the graph's inputs that have rows.
        sizes: a ``Sizes`` for its inputs.
        outputs: the variables that the graph computes.
        changing: operations that have side effects, so that they run once, for the whole batch.
        is_body: whether values may be reduced over the devices on the way.
        is_synchronized: whether a layer normalizes a batch by the statistics of all devices, of the
            variables by which it scales and shifts.

    Attributes:
        placements: those of all variables of the graph, in the order in which they are computed.
        sizes: the ``Sizes``, with those of all variables.
        whole: by node, the positions of inputs that it needs of the whole batch.
        lowered: by node, the function that computes it by reductions, of a ``BodyGraph``.
        split_again: variables that each device computes of the whole batch, and of which it goes on
            with its own rows.
    """

    def __init__(
        self, placements, sizes, outputs, changing=frozenset(), is_body=False, is_synchronized=None
    ):
        self.placements: "Dict[Any, _rows.Placement]" = dict(placements)
        self.sizes = sizes
        self.changing = changing
        self.is_body = is_body
        self.is_synchronized = is_synchronized or (lambda variables: False)
        self.whole: "Dict[Any, List[int]]" = {}
        self.lowered: "Dict[Any, Any]" = {}
        self.split_again: "Set[Any]" = set()
        self._worthwhile = redistribution.before_costly(outputs) if is_body else set()
        self._after_reductions: "Set[Any]" = set()
        self._reduced: "Set[Any]" = set()
        for node in graph.io_toposort([], outputs):
            self.sizes.infer(node)
            for variable, placement in zip(node.outputs, self._after(node)):
                if isinstance(placement, Count) and self.sizes.constant(variable) is not None:
                    placement = REPLICATED
                self.placements[variable] = placement
            self._note_reductions(node)
            self._split_again(node)

    def _note_reductions(self, node):
        needed = [node.inputs[index] for index in self.whole.get(node, ())]
        partial = [v for v in needed if isinstance(self.placement_of(v), Partial)]
        gathered = [v for v in needed if isinstance(self.placement_of(v), Sharded)]
        self._reduced.update(partial)
        is_first = partial or gathered or node in self.lowered
        if is_first or not self._after_reductions.isdisjoint(node.inputs):
            self._after_reductions.update(
                v for v in node.outputs if isinstance(self.placement_of(v), Replicated)
            )

    def _split_again(self, node):
        """Have devices go on with their rows of results of the whole batch that have its rows."""
        for variable in node.outputs:
            is_whole = variable in self._after_reductions and node in self._worthwhile
            if is_whole and self._has_a_row_for_each(variable):
                self._after_reductions.remove(variable)
                self.split_again.add(variable)
                self.placements[variable] = Sharded(0)

    def _has_a_row_for_each(self, variable):
        return redistribution.is_dense(variable) and self.sizes.dimensions(variable)[:1] == [
            list(ROWS)
        ]

    def is_whole(self, variable: "Any") -> bool:
        """Return whether each device has a variable's value of the whole batch, by reductions."""
        if self._after_reductions and isinstance(self.placement_of(variable), Count):
            return self._is_counted(variable)
        return variable in self._reduced or variable in self._after_reductions

    def _is_counted(self, variable):
        """Return whether the value of a ``Count`` is known for the whole batch."""
        placement, node = self.placement_of(variable), variable.owner
        if not isinstance(placement, Count):
            return isinstance(placement, Replicated)
        if isinstance(node.op, (Shape, Shape_i)):
            return self.elements_of_row(node.inputs[0]) is not None
        return all(map(self._is_counted, node.inputs))

    def elements_of_row(self, variable: "Any") -> "Optional[Tuple[int, int]]":
        """Return the dimension of the rows, and the number of elements of each; or None."""
        placement = self.placement_of(variable)
        if not isinstance(placement, Sharded) or not placement.even:
            return None
        axis = placement.axis
        if placement.inner is not None:
            return axis, placement.inner * placement.copies
        if not self.sizes.in_proportion(variable, axis):
            return None
        return axis, int(self.sizes.dimensions(variable)[axis][0])  # of one row

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
            return [self._of_whole(node)] * len(node.outputs)
        if Drawn in kinds and kinds <= {Replicated, Count, Drawn} and name in ARRANGING:
            return [Drawn()] * len(node.outputs)
        values = [self.value(variable) for variable in node.inputs]
        if not self.is_body:
            return self._results(node, rule, values)
        return self._by_reductions(node, name, rule, values)

    def _of_whole(self, node):
        """Return the placement of the results of a node whose inputs are the same on all devices.

        Each device would do what is costly, of the rows of all.
        """
        grows = any(v in self._after_reductions and self.sizes.grown(v) for v in node.inputs)
        return Mixed() if redistribution.is_costly(node.op) and grows else REPLICATED

    def _results(self, node, rule, values):
        """Return what the rule gives for inputs with these values."""
        result = _rows.without_rows([value.placement for value in values])
        if result is None or rule in OF_SIZES:
            result = rule(AppliedOp(node, self), values)
        return result if isinstance(result, list) else [result] * len(node.outputs)

    def _by_reductions(self, node, name, rule, values):
        """Return the placements of a node's results, where values that it needs are reduced."""

        def first_mixed(values):
            results = self._results(node, rule, values)
            return next((result for result in results if isinstance(result, Mixed)), results[0])

        partial = [n for n, value in enumerate(values) if isinstance(value.placement, Partial)]
        if all(self._is_small(node.inputs[n]) for n in partial):
            counts = self._counts(node, rule, values)
            summed = [
                Value(Partial("sum"), value.shape) if n in counts else value
                for n, value in enumerate(values)
            ]
            _, whole = _rows.redistributed(first_mixed, summed)
            if whole:
                self.whole[node] = whole
                values = [
                    Value(REPLICATED, value.shape) if n in whole else value
                    for n, value in enumerate(values)
                ]
        results = self._results(node, rule, values)
        lowering = _LOWERED.get(name)
        if lowering is not None and isinstance(results[0], Mixed):
            placements = lowering.placements(AppliedOp(node, self), values)
            if placements is not None:
                self.lowered[node], results = lowering.lowered, placements
        if all(isinstance(result, Mixed) for result in results):
            results = self._by_gathering(node, rule, values) or results
        return results

    def _by_gathering(self, node, rule, values):
        """Return the placements of a node's results, with inputs gathered from devices; or None.

        One of several inputs is gathered where the rows of others stay apart. Else all are, and
        each device computes the results of the whole batch, if that costs little.
        """
        dense = all(map(redistribution.is_dense, node.outputs))
        if node not in self._worthwhile or not dense or is_custom(node.op):
            return None
        reduced = self.whole.get(node, [])
        result, place = _rows.gathering(lambda values: self._results(node, rule, values)[0], values)
        if place is not None and len(node.outputs) == 1:
            places, results = [place], [result]
        elif redistribution.is_costly(node.op):
            return None
        else:
            places = [n for n, v in enumerate(values) if isinstance(v.placement, Sharded)]
            whole = [Value(REPLICATED, v.shape) if n in places else v for n, v in enumerate(values)]
            results = self._results(node, rule, whole)
            if not all(isinstance(result, Replicated) for result in results):
                return None
        if not all(self._can_be_gathered(node.inputs[n]) for n in places):
            return None
        self.whole[node] = reduced + places
        return results

    def _can_be_gathered(self, variable):
        rows = self.elements_of_row(variable)
        is_one = rows is not None and rows[1] == 1 and redistribution.is_dense(variable)
        return variable in self.split_again or is_one

    def _is_small(self, variable):
        """Return whether a value is of a fixed size that costs little to reduce over devices."""
        sizes = self.sizes.shape(variable) or ()
        return None not in sizes and np.prod(sizes, dtype=float) <= LARGEST

    def _counts(self, node, rule, values):
        """Return the positions of numbers of rows that a node computes with: those of all rows.

        Elsewhere numbers of rows are sizes of what a device has.
        """
        has_rows = any(isinstance(value.placement, (Sharded, Partial)) for value in values)
        if rule is not pointwise or not has_rows and self._after_reductions.isdisjoint(node.inputs):
            return []
        return [
            n for n, variable in enumerate(node.inputs)
            if isinstance(self.placement_of(variable), Count) and self._is_counted(variable)
        ]  # fmt: skip

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
