"""A training step of one rank and the others, with sums over all of them within."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from ... import _keras
from ..._keras.steps import has_own_steps, has_own_training
from ..._ranks import checksum, keras3_state, keras_model, losses, merging, step_functions
from ..._ranks import state as rank_state
from ..._runtime import patching
from ..._runtime.within import Within
from . import (
    batch_norm,
    gradient_exchange,
    gradient_marks,
    ranked_programs,
    ranked_step_trial,
)
from .arguments import rows_of
from .loss_totals import Reduced

under_way = Within()  # a step, also where it trains models within


_OPERATIONS = merging.operations_of(jnp)


class RankedJAXStep:
    """Step of this rank and the others, in place of Keras' program of ``train_step``.

    Arguments:
        model: the model.
        engine: that of the ranks.
        normalizing: its layers that normalize by the statistics of all ranks' rows.

    What ``jax.grad()`` and its like give in it for variables is the mean over all ranks.
    """

    def __init__(self, model, engine, normalizing):
        self.model = model
        self.engine = engine
        tried = rank_state.tried(model)
        ids = set(map(id, keras3_state.averaged(model) + tried))
        set_by_steps = [v for v in enumerate(model.non_trainable_variables) if id(v[1]) in ids]
        #: The indices of variables that the step sets, and how those of all ranks are merged.
        self.places = [place for place, _ in set_by_steps]
        variables, ids = [variable for _, variable in set_by_steps], set(map(id, tried))
        self.state = rank_state.StepState(
            engine,
            [variable.path for variable in variables],
            [variable.dtype for variable in variables],
            [number for number, variable in enumerate(variables) if id(variable) in ids],
        )
        compiled = partial(
            ranked_programs.CutStep, exchange=self.sum, is_local=self.is_local, check=self.check
        )
        self.compute = Reduced(model, engine, self.step, compiled)
        #: Layers that normalize by the statistics of all ranks' rows.
        self.normalizing = normalizing
        self.exchanges = 0  # of the step under way
        self.has_local = False  # if it is not compiled: gradients that were not exchanged
        self.count = 0

    def __call__(self, state, data):
        rows = rows_of(self.model, data)
        keras_model.count(self.model, rows, True)
        fit = keras_model.RankedFit.of(self.model)
        fit.first_batch.see(data)
        share = self.engine.share(rows)
        if not self.count and losses.loss_may_mix_rows(self.model):
            losses.check_loss(self.model, data, partial(_loss, state))
        if not self.state.is_decided:
            self.try_state(state, data, rows)
        self.exchanges = 0
        logs, state = self.compute(state, data, lambda: share)
        if self.exchanges:
            self.engine.count("gradients")
        self.count += 1
        fit.first_batch.compare(self.model.name)
        return logs, self.verified(state) if checksum.is_due(self.count) else state

    def try_state(self, before, data, rows):
        """Decide by a trial how variables that the step sets are merged. See ``_ranks.state``."""
        model, places = self.model, [self.places[number] for number in self.state.tried]
        keras = _keras.keras_of(model)

        def stepped(values, data):
            trainable, others, optimizer, metrics = before
            others = list(others)
            for place, value in zip(places, values):
                others[place] = value
            _, others = self.stepped((trainable, others, optimizer, metrics), data)
            return [others[place] for place in places]

        step = jax.jit(stepped) if self.compute.compiled else stepped

        def run(numbers, values):
            values = [jnp.asarray(v, before[1][place].dtype) for place, v in zip(places, values)]
            some = rank_state.some_rows(keras, data, rows, numbers)
            return list(map(np.asarray, step(values, some)))

        with rank_state.steady(model):
            self.state.decide(rows, [np.asarray(before[1][place]) for place in places], run)

    def sum(self, parts):
        """Return the sum of a flat array over all ranks."""
        self.exchanges += 1
        return self.engine.sum_array(parts)

    def step(self, state, data, share):
        """Run Keras' own step, with gradients and averages marked, or exchanged at once."""
        share()  # which weights marked values
        trainable, before, _, _ = state
        model, optimizer = self.model, self.model.optimizer
        mark = gradient_marks.mark
        if not self.compute.compiled:
            mark = gradient_exchange.EagerStep(self, trainable, share).mark
        ours, scaled = keras3_state.scaling(optimizer, lambda dtype: jnp.asarray(share(), dtype))
        apply = optimizer.stateless_apply

        def stateless_apply(optimizer_variables, grads, trainable_variables):
            leaves, tree = tree_flatten(grads)
            leaves = mark(gradient_marks.APPLIED, [], leaves, not scaled)
            return apply(optimizer_variables, tree_unflatten(tree, leaves), trainable_variables)

        def is_due(called):
            return bool(called) or not has_own_steps(model)

        replaced = step_functions.replaced(
            self.engine, optimizer, is_due, stateless_apply=stateless_apply, **ours
        )
        differentiated = gradient_marks.marked(
            self.engine, is_due, mark, lambda: len(scaled), share if self.normalizing else None
        )
        normalized = batch_norm.over_ranks(model, self.normalizing, self.engine.place, mark)
        with under_way, replaced, differentiated, normalized:
            logs, (trainable, others, variables, metrics) = model.train_step(state, data)
        others = self.merged(before, list(others), share(), mark)
        return logs, (trainable, others, variables, metrics)

    def merged(self, before, others, share, mark):
        """Return the state that a step sets besides the weights, merged over all ranks."""
        old, new = [[values[place] for place in self.places] for values in (before, others)]
        merges, place = self.state.merges, self.engine.place
        parts = merging.parts(merges, _OPERATIONS, old, new, share, place)
        sums = mark(gradient_marks.SUM, [], parts, False) if parts else []
        merged = merging.merged(merges, _OPERATIONS, old, new, sums, place.size)
        for number, value in zip(self.places, merged):
            others[number] = value
        return others

    def is_local(self, state):
        """Return a structure like the state, of whether each value may differ between ranks."""
        trainable, others, optimizer, metrics = (list(values) for values in state)
        weights_of_rank = set(map(id, self.model.weights)) - set(
            map(id, keras3_state.same(self.model))
        )
        differ = [id(each) in weights_of_rank for each in self.model.non_trainable_variables]
        return [False] * len(trainable), differ, [False] * len(optimizer), [True] * len(metrics)

    def check(self, program, state, data, share, totals):
        """Check a step that was compiled; see ``gradient_exchange`` and ``ranked_step_trial``."""
        gradient_exchange.check(self.model, program)
        batch_norm.check(self.model, program)
        if self.count:
            return  # ranks may not compile the others at once
        gradient_exchange.warn_of_inner(self.model, program)
        if program.applied() is not None:
            gradient_exchange.check_applied(self, program, state, data)
        elif has_own_training(self.model) and program.inner() is None:
            ranked_step_trial.check(self, program, state, data, share, totals)

    def applied(self, state, data):
        """Return the gradients that a step of these rows alone passes to the optimizer, flat."""
        gradients, _ = self.stepped(state, data)
        return jnp.concatenate([gradient.astype("float32").ravel() for gradient in gradients])

    def stepped(self, state, data):
        """Return the gradients that a step of these rows alone computes, and the state it sets."""
        gradients = []

        def capture(optimizer_variables, grads, trainable_variables):
            gradients.extend(tree_leaves(grads))
            return trainable_variables, optimizer_variables

        with under_way, patching.replaced(self.model.optimizer, stateless_apply=capture):
            _, (_, others, _, _) = self.model.train_step(state, data)
        return gradients, others

    def verified(self, state):
        """Return the state after it was compared between ranks. See ``_ranks.checksum.verify``."""
        model, (values, tree) = self.model, tree_flatten(state)
        slots = list(model.optimizer.variables)
        same = set(map(id, keras3_state.same(model) + slots))
        variables = enumerate(model.trainable_variables + model.non_trainable_variables + slots)
        paths = {place: variable.path for place, variable in variables if id(variable) in same}
        places = list(paths)

        def write(number, value):
            values[places[number]] = jnp.asarray(value)

        now = [values[place] for place in places]
        checksum.verify(self.engine, list(paths.values()), now, write, self.count)
        return tree_unflatten(tree, values)


def _loss(state, model, data):
    """Return the loss in inference, for this state in place of the model's variables."""
    x, y, weights = _keras.keras_of(model).utils.unpack_x_y_sample_weight(data)
    trainable, non_trainable, _, metrics = state
    function = model.compute_loss_and_updates
    if "metrics_variables" in inspect.signature(function).parameters:  # Keras 3.2 and later
        function = partial(function, metrics_variables=metrics)
    loss, _ = function(trainable, non_trainable, x=x, y=y, sample_weight=weights, training=False)
    return loss
