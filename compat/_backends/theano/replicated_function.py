"""A function of a Keras model, as ``K.function`` makes it, that runs its body on several devices.

When Keras makes a function of tensors, its graph is cut in two:

- The *body*, on which the model's outputs depend, is compiled for each device and computes its
  shard of the batch. Values at the cuts, towards loss, metrics or updates, have rows, which are
  merged on the host.
- The *head*, the rest, runs once, with the whole batch: losses, metrics, penalties, statistics of
  the batch, and cross-batch operations (see ``partition``) with all that depends on them. Its
  gradients at the cuts are split for the devices' backward passes, and the optimizer gets the sum
  of the devices' gradients.

So any loss, also one that compares rows with one another, and every metric is that of one device,
however uneven the shards. A compiled function keeps nothing for the next one, so that of the
forward pass also returns the values that the backward pass needs.
"""

import threading
from typing import Any, Dict, Optional, Tuple

import numpy as np
import theano

from ... import _keras, _rows, errors
from ..._rows import Fallback, Reason
from ..._runtime import progress, work
from . import custom_gradients, trial
from .plan import CompiledPlan
from .side_effects import HasEffectsError

#: Held while one thread makes functions: K.function is replaced for that, and Theano's state is not
#: safe for threads.
making = threading.RLock()

#: Errors of Theano where sizes do not fit a shard.
_ERRORS = (ValueError, IndexError, AssertionError)
#: The rows of a trial. One with fewer rows is repeated when a batch has more.
_ENOUGH = len(_rows.trial.WHOLE)


class ReplicatedFunction:
    """Replacement of a ``K.function``, compiled when its first batch is known.

    Arguments:
        owner: the model's ``Replicas``.
        inputs, outputs, updates, options: as ``K.function`` has them.
        gradients: empty, or the loss and the pairs of a weight and the variable that stands for
            its gradient in ``updates``.

    Attributes:
        plan: the ``CompiledPlan`` by which it runs; None before the first batch, and where the last
            plan has turned out to be wrong.
        tried: with how many rows plans were tried, for each shape of them.
    """

    def __init__(self, owner, inputs, outputs, updates, gradients, options):
        self.owner = owner
        self.inputs = list(inputs)
        # Of several updates of a variable the first counts, as with K.function.
        self.updates = dict(reversed(list(updates)))
        self.outputs = [
            # Keras 2.3 takes metrics' results after the updates.
            theano.clone(output, self.updates) if hasattr(output, "_is_metric") else output
            for output in outputs
        ]
        self.loss, self.weights = gradients or (None, [])
        self.options = options
        self.plan: "Optional[CompiledPlan]" = None
        self.tried: "Dict[Tuple[Any, ...], int]" = {}

    def __reduce__(self):
        """Make copies None: Keras before 2.2 copies, and pickles, a model with its functions."""
        model = self.owner.model
        if self.loss is not None and getattr(model.optimizer, "weights", None):
            errors.warn(
                f"The copy of model {model.name!r} will train from the beginning of its "
                "optimizer's state (momentum, moments): a function that runs on several devices "
                "is not copied, and the one that Keras makes anew has none. Use model.save() and "
                "load_model(), which keep it."
            )
        return type(None), ()

    def __call__(self, inputs):
        with self.owner.running:  # a compiled function holds the values of one call
            while True:
                try:
                    return self._call(inputs)
                except HasEffectsError:
                    self._discard_plan()

    def _call(self, inputs):
        rows, states = inputs[0].shape[0], _keras.states(self.owner.model, "get_value")
        values = {state: state.get_value(borrow=True) for state in states}  # one for each row
        values.update(zip(self.inputs, inputs))
        plan = self._tried_plan(values, rows)
        plan.take_weights()
        try:
            step = plan.forward_pass(values, rows)
        except _ERRORS:
            plan.compute_on_first(values, [range(rows)])
            self._run_unsplit()
            return self._call(inputs)
        results = plan.finish(step, inputs)
        names = [device.name for device in self.owner.devices]
        # Without cuts the head computes all.
        split = step.sizes if plan.cuts else work.unsplit_sizes(names, rows)
        work.count(names, split, self.loss is not None)
        return list(map(np.asarray, results))

    def _tried_plan(self, values, rows):
        """Return a plan that was tried with rows like these; make one where there is none."""
        fed = [values[v].shape for v in self.owner.model.inputs]
        if len({shape[0] for shape in fed}) > 1 and (self.plan is None or self.plan.cuts):
            self._run_unsplit()
        shapes = tuple(shape[1:] for shape in fed)
        if self.plan is not None and not self.plan.is_for(values):
            self._discard_plan()
        plan = self.plan
        while plan is None or plan.cuts and self.tried.get(shapes, 0) < min(rows, _ENOUGH):
            with progress.shown(f"compiling model {self.owner.model.name!r} for Theano"):
                if plan is None:
                    with making:
                        plan = CompiledPlan(self, values)
                arguments = plan, values, rows
                is_right = trial.is_right(*arguments) and custom_gradients.are_right(*arguments)
            self.plan = plan = plan if is_right else None
            self.tried[shapes] = rows
        return plan

    def _run_unsplit(self):
        """Run unsplit, on one device, from now on."""
        self.owner.fallback = Fallback(Reason.CROSS_BATCH)
        self._discard_plan()

    def _discard_plan(self):
        self.plan, self.tried = None, {}

    def compile(self, inputs, outputs, updates, **options):
        """Return a function of Theano's with the options of this one."""
        # As K.function has it.
        options = dict(self.options, allow_input_downcast=True, on_unused_input="ignore", **options)
        return theano.function(inputs, outputs, updates=updates, **options)
