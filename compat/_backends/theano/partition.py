"""Partition of a model's graph: cuts between the part that devices compute and the rest."""

from typing import Any, List

import numpy as np
from theano.gof import graph

from ..._rows import REPLICATED, Fallback, Mixed, Partial, Placement, Reason, Sharded, Unknown
from .graph import depending_on, line_of, nearest
from .propagation import Propagation
from .sizes import ROWS, Sizes


class Cut:
    """A variable that leaves the body.

    Arguments:
        variable: the variable.
        placement: its placement: ``Sharded``, or ``Unknown`` until it is tried; ``Replicated`` for
            values that are reduced over the devices, and what is computed from them.
    """

    def __init__(self, variable: "Any", placement: "Placement") -> None:
        self.variable = variable
        self.placement = placement


class ModelGraph(Propagation):
    """The graph of a model's outputs, with the placements of its variables.

    Arguments:
        outputs: the model's.
        sharded: the variables of which devices get shards, along the first dimension.
        values: the values of these, and of other variables that the outputs depend on.
        tries: whether operations without a rule may be tried.
        changing: operations that run once for the whole batch, as ``PythonOperations`` has them.
        is_synchronized: as ``Propagation`` has it.
    """

    def __init__(
        self, outputs, sharded, values, tries=True, changing=frozenset(), is_synchronized=None
    ):
        sizes = {variable: list(np.shape(value)) for variable, value in values.items()}
        for variable in sharded:
            sizes[variable][0] = list(ROWS)
        placements = {variable: Sharded(0) for variable in sharded}
        super().__init__(placements, Sizes(sizes), outputs, changing, True, is_synchronized)
        self._outputs = outputs
        self._tries = tries

    def cuts(self, wanted: "List[Any]") -> "List[Cut]":
        """Return cuts at the nearest variables that a device can compute from its own shard."""
        return [
            Cut(v, REPLICATED if self.is_whole(v) else self.placement_of(v))
            for v in nearest(wanted, self._can_be_cut)
        ]

    def _can_be_cut(self, variable):
        placement = self.placement_of(variable)
        if isinstance(placement, Unknown):
            return self._tries and bool(self.sizes.grown(variable))
        has_rows = isinstance(placement, Sharded) and placement.copies == 1
        return (has_rows or self.is_whole(variable)) and hasattr(variable, "broadcastable")

    def fallback(self, doubt):
        """Return the ``Fallback`` for the first operation that needs the whole batch, or None.

        None, too, if no result of such operations grows with the batch: then they cost little.

        Arguments:
            doubt: the ``Reason`` for operations without a rule.
        """
        kinds = Mixed if self._tries else (Mixed, Unknown)
        needed = set(graph.ancestors(self._outputs))
        unsplit = [v for v, p in self.placements.items() if isinstance(p, kinds) and v in needed]
        if not any(map(self.sizes.grown, unsplit)):
            return None
        first = unsplit[0]
        reason = Reason.CROSS_BATCH if isinstance(self.placement_of(first), Mixed) else doubt
        if first.owner.op in self.changing:
            reason = Reason.SIDE_EFFECTS
        # An operation on a total over rows is reported as the operation that computes the total.
        totals = [first]
        while totals:
            first = totals[0]
            totals = [v for v in first.owner.inputs if isinstance(self.placement_of(v), Partial)]
        following = depending_on([first], self._outputs)
        layers = [v for v in self.placements if v in following and hasattr(v, "_keras_history")]
        name = f"layer {layers[0]._keras_history[0].name!r}" if layers else None
        return Fallback(reason, first.owner.op, name, line_of(first))
