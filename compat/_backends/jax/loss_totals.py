"""Totals by which the losses of a rank's step divide, exchanged before the step."""

from functools import partial
from typing import Dict, Tuple

import jax

from ... import _keras
from ..._ranks import losses
from ..._runtime import patching


class Reduced:
    """A step in which Keras' losses that are not means divide by totals over all ranks.

    The totals (the number of rows that a mask leaves, for example) are exchanged before, and
    computed by a separate program. It is traced from the whole step, of which XLA drops all other
    operations.
    """

    def __init__(self, model, engine, step, compiled=None):
        self.model, self.engine = model, engine
        self.keras = _keras.keras_of(model)
        self.step = step  # of state, data and this rank's share of the rows
        # By shapes of data: whether losses need the share of rows, and totals.
        self.needs: "Dict[str, Tuple[bool, bool]]" = {}
        self.compiled = not model.run_eagerly and model.jit_compile
        self.ask = jax.jit(self.parts) if self.compiled else self.parts
        compiled = compiled or partial(jax.jit, donate_argnums=0)
        self.run = compiled(self.reduced) if self.compiled else self.reduced
        self.is_asking = False  # whether a step runs for these totals alone

    def __call__(self, state, data, share):
        """Run the step.

        Arguments:
            state: of the model.
            data: the batch.
            share: a function that returns the share of rows, and is called only where it is needed.
        """
        leaves = _keras.tree_of(self.keras).flatten(data)
        key = str([getattr(leaf, "shape", None) for leaf in leaves])
        if key not in self.needs:
            self.needs[key] = self.needs_of(state, data)
        needs_share, needs_totals = self.needs[key]
        mine = share() if needs_share else 1.0
        totals = []
        if needs_totals:
            parts = self.ask(state, data, mine)
            sums = iter(self.engine.sum([float(part) for group in parts for part in group]))
            totals = [[float(next(sums)) for _ in group] for group in parts]
        return self.run(state, data, mine, totals)

    def needs_of(self, state, data):
        """Return whether the step's losses need the share of rows, and totals, by tracing it.

        A step that is not compiled is assumed to need both.
        """
        if not self.compiled:
            return True, True
        shares = []

        def share():
            shares.append(1.0)
            return 1.0

        _, parts = jax.eval_shape(partial(self.within, share, None), state, data)
        return bool(shares or parts), bool(parts)

    def within(self, share, totals, state, data):
        """Return the step's results, and the lists of values of which losses need totals.

        Arguments:
            share: a function that returns the share of rows.
            totals: the totals, in this order; None: each loss gets its own values.
            state: of the model.
            data: the batch.
        """
        parts = []

        def total(values):
            parts.append(list(values))
            return values if totals is None else totals[len(parts) - 1]

        with losses.Reductions(share, total, self.model, self.engine).within(self.keras):
            return self.step(state, data, share), parts

    def parts(self, state, data, share):
        """Return this rank's part of each total."""
        with patching.replaced(self, is_asking=True):
            return self.within(lambda: share, None, state, data)[1]

    def reduced(self, state, data, share, totals):
        """Return the results of the step, for totals of all ranks."""
        return self.within(lambda: share, totals, state, data)[0]
