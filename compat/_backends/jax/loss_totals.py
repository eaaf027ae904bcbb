"""Totals by which losses of a rank's step divide, exchanged before it."""

from functools import partial

import jax

from ... import _keras
from ..._ranks import losses
from ..._runtime import patching


class Reduced:
    """Step in which Keras' losses divide by what all ranks have, where they are not means.

    Their totals (the rows that a mask leaves, for example) are exchanged before, by a program of
    their own. It has the whole step in it, of which XLA leaves out all that they do not need.
    """

    def __init__(self, model, engine, step, compiled=None):
        self.model, self.engine = model, engine
        self.keras = _keras.keras_of(model)
        self.step = step  # of state, data and this rank's share of the rows
        self.asked = {}  # shapes of data -> whether losses ask for the share, and for totals
        self.compiled = not model.run_eagerly and model.jit_compile
        self.ask = jax.jit(self.parts) if self.compiled else self.parts
        compiled = compiled or partial(jax.jit, donate_argnums=0)
        self.run = compiled(self.reduced) if self.compiled else self.reduced
        self.is_asking = False  # whether a step runs for these totals alone

    def __call__(self, state, data, share):
        """Do the step.

        Arguments:
            share: a function that gives the share, and is called only where it is needed.
        """
        key = str([getattr(leaf, "shape", None) for leaf in self.keras.tree.flatten(data)])
        if key not in self.asked:
            self.asked[key] = self.what_is_asked(state, data)
        needs_share, needs_totals = self.asked[key]
        mine = share() if needs_share else 1.0
        totals = []
        if needs_totals:
            parts = self.ask(state, data, mine)
            sums = iter(self.engine.sum([float(part) for group in parts for part in group]))
            totals = [[float(next(sums)) for _ in group] for group in parts]
        return self.run(state, data, mine, totals)

    def what_is_asked(self, state, data):
        """Trace the step to find it out; one that cannot be traced is taken to ask for all."""
        if not self.compiled:
            return True, True
        shares = []

        def share():
            shares.append(1.0)
            return 1.0

        _, parts = jax.eval_shape(partial(self.within, share, None), state, data)
        return bool(shares or parts), bool(parts)

    def within(self, share, totals, state, data):
        """Return the step's results, and the lists of which losses ask the totals.

        Arguments:
            totals: what they get, one after the other; None: each gets its own.
        """
        parts = []

        def total(values):
            parts.append(list(values))
            return values if totals is None else totals[len(parts) - 1]

        with losses.Reductions(share, total, self.model, self.engine).within(self.keras):
            return self.step(state, data, share), parts

    def parts(self, state, data, share):
        with patching.replaced(self, is_asking=True):
            return self.within(lambda: share, None, state, data)[1]

    def reduced(self, state, data, share, totals):
        return self.within(lambda: share, totals, state, data)[0]
