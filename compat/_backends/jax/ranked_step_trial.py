"""A trial of a step: whether the gradients that ranks exchange in it are means over samples.

A custom loss may compare the rows of a batch with one another, or be their sum. So the step is run
again with the first batch and with its halves: the gradients of the batch must be the means of
those of the halves.
"""

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map

from ... import errors
from ..._ranks import batch_parts, losses
from ..._ranks import state as rank_state
from . import gradient_marks, ranked_programs
from .gradient_exchange import draws_numbers, line_of


def check(step, program, state, data, share, totals):
    """Warn if the gradients of a custom step are not means over the rows of a batch.

    Arguments:
        step: a ``RankedJAXStep``.
        program: the ``ranked_programs.Program`` of the step, for the following arguments.
        state: the model's.
        data: the batch.
        share: of the rows, this rank's.
        totals: of all ranks, by which losses divide.
    """
    rows, name = batch_parts.rows_of(tree_leaves(data)), step.model.name
    if draws_numbers(program) or rows is None or rows < 2:
        return
    here = errors.users_line()  # where Keras' own code takes the gradients
    lines = [line or here for line, _ in _gradients(program, {})]
    trial = _Trial(step, state, data, share, totals)
    try:
        whole, sums = trial.run(batch_parts.WHOLE)
        parts = [trial.run(half, sums)[0] for half in batch_parts.in_two(rows, rows // 2)]
    except Exception as error:  # whatever a step raises for a half of a batch
        problem = "{}: {}".format(type(error).__name__, str(error).split("\n")[0])
        losses.warn_of_untried_step(name, errors.at_lines(dict.fromkeys(lines)), problem)
        return
    limit = losses.rounding(step.model.compute_dtype)
    for (line, values), *others in zip(whole, *parts):
        largest = np.abs(values).max(initial=0.0)
        off = np.abs(values - sum(part for _, part in others)).max(initial=0.0)
        if off > limit * largest:
            losses.warn_of_step(name, errors.at_lines([line or here]), rows, off / share)
            return


class _Trial:
    """The step of some rows, which exchanges nothing."""

    def __init__(self, step, state, data, share, totals):
        self.step, self.state, self.data = step, state, data
        self.share, self.totals = share, totals

    def run(self, part, sums=()):
        """Run the step on some rows.

        Arguments:
            part: of this rank's batch.
            sums: the results of exchanges, in place of the values that the step contributes.

        Returns:
            The gradients that it would exchange, with their lines; and all that it would exchange.
        """
        some = tree_map(lambda leaf: leaf[part.rows], self.data)
        args = tree_map(jnp.copy, self.state), some, self.share * part.share, self.totals
        with rank_state.steady(self.step.model):
            is_local = self.step.is_local(self.state)
            program = ranked_programs.Program(self.step.compute.reduced, is_local, *args)
        exchanged, results = [], iter(sums)

        def exchange(values):
            exchanged.append(np.array(values))
            return next(results, values)

        program(tree_leaves(args), exchange)
        return list(_gradients(program, dict(enumerate(exchanged)))), exchanged


def _gradients(program, exchanged):
    """Yield the line of each gradient that a program exchanges, and its values.

    Arguments:
        program: a ``ranked_programs.Program``.
        exchanged: all that it exchanges, by level; values are None for levels that are not there.
    """
    for level in sorted(program.marks):
        marks = program.marks[level]
        sizes = [sum(variable.aval.size for variable in mark.outvars) for mark in marks]
        values = exchanged.get(level)
        parts = [None] * len(marks) if values is None else np.split(values, np.cumsum(sizes)[:-1])
        for mark, part in zip(marks, parts):
            if ranked_programs.kind_of(mark) == gradient_marks.GRADIENT:
                yield line_of(mark, ""), part
