"""Rule of loops (``scan``): they have rows along another dimension than that of the steps.

A ``scan`` has *sequences*, of which each step sees one element, and *states*, which each step
passes on to the next one. Its other results are collected step by step. Sequences, states and
results have the steps along their first dimension, which a step does not see.
"""

from typing import Any, List, Tuple

from theano.scan_module.scan_utils import scan_args

from ... import _rows
from ..._rows import REPLICATED, Mixed, Replicated, Sharded, Unknown


def looped(op, values):
    """Follow ``scan``. With a step for each row it is tried."""
    loop = Loop(op, values)
    if loop.args.outer_in_mit_mot:
        return Unknown()  # a loop's gradient
    if loop.has_rows_as_steps(loop.args.outer_in_seqs):
        return Unknown() if loop.has_independent_steps() else Mixed()  # a step for each row
    if not loop.are_replicated([loop.args.n_steps]) or loop.has_rows_as_steps(loop.states):
        return Mixed()
    placements, step = loop.stable_step()
    if not _are_replicated(map(step.value, loop.args.cond)):
        return Mixed()  # it ends by a condition on rows
    loop.set_sizes(step)
    placements += [step.value(v).placement for v in loop.args.inner_out_nit_sot]
    after = [_moved(placement, 1) for placement in placements]
    return after + [REPLICATED] * len(loop.args.outer_out_shared)


class Loop:
    """A ``scan``.

    Arguments:
        op: the ``AppliedOp``.
        values: the ``Value`` of each of its inputs.

    Attributes:
        args: its inputs, its results and a step's, by their kinds, as Theano names them.
        states: its states' values before the first step.
    """

    def __init__(self, op: "Any", values: "List[_rows.Value]") -> None:
        kind = op.type
        self.args = scan_args(op.inputs, op.outputs, kind.inputs, kind.outputs, kind.info)
        self.states = self.args.outer_in_mit_sot + self.args.outer_in_sit_sot
        self._propagation = op.propagation
        self._values = dict(zip(op.inputs, values))

    def has_rows_as_steps(self, variables: "List[Any]") -> bool:
        """Return whether the first dimension of any of these inputs is that of the rows."""
        return any(self._values[variable].axis == 0 for variable in variables)

    def are_replicated(self, variables: "List[Any]") -> bool:
        """Return whether these inputs are the same on every device."""
        return _are_replicated(self._values[variable] for variable in variables)

    def has_independent_steps(self) -> bool:
        """Return whether each step depends on its elements of the sequences alone."""
        args = self.args
        return not self.states + args.cond and self.are_replicated(args.outer_in_non_seqs)

    def stable_step(self) -> "Tuple[List[_rows.Placement], Any]":
        """Follow a step until its states are placed after it as they are before it.

        Returns:
            The placements of the states in a step, and the ``Propagation`` over its graph.
        """
        args = self.args
        constant = zip(args.inner_in_shared + args.inner_in_non_seqs,
                       args.outer_in_shared + args.outer_in_non_seqs)  # fmt: skip
        inputs = [(inner, outer, self._values[outer].placement, 0) for inner, outer in constant]
        inputs += [
            (inner, outer, self._in_a_step(outer), 1)
            for inner, outer in zip(args.inner_in_seqs, args.outer_in_seqs)
        ]
        # By state, the variables of the steps before that a step sees.
        seen = args.inner_in_mit_sot + [[variable] for variable in args.inner_in_sit_sot]
        placements = [self._in_a_step(state) for state in self.states]
        while True:
            of_states = [
                (inner, state, placement, 1)
                for variables, state, placement in zip(seen, self.states, placements)
                for inner in variables
            ]
            step = self._propagation.inside(inputs + of_states, args.inner_outputs)
            results = map(step.value, args.inner_out_mit_sot + args.inner_out_sit_sot)
            before, placements = placements, [
                _rows.chosen(REPLICATED, [placement, result.placement])
                for placement, result in zip(placements, results)
            ]  # fmt: skip
            if placements == before:
                return placements, step

    def set_sizes(self, step: "Any") -> None:
        """Record the sizes of the results, inferred from a step's ``Propagation``."""
        args, sizes = self.args, self._propagation.sizes
        for result, state in zip(args.outer_out_mit_sot + args.outer_out_sit_sot, self.states):
            sizes.set(result, sizes.dimensions(state))
        for result, variable in zip(args.outer_out_nit_sot, args.inner_out_nit_sot):
            steps = None if args.cond else args.n_steps
            sizes.set(result, [steps] + step.sizes.dimensions(variable))

    def _in_a_step(self, variable):
        return _moved(self._values[variable].placement, -1)


def _are_replicated(values):
    return all(isinstance(value.placement, Replicated) for value in values)


def _moved(placement, by):
    """Return a placement with its axis moved: a step lacks the first dimension."""
    has_rows = isinstance(placement, Sharded)
    return placement.replace(axis=placement.axis + by) if has_rows else placement
