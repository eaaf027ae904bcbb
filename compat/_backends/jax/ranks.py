"""JAX as one of several ranks: jax.distributed, and one array over all processes for each sum.

A step is two programs of this process, with the sum of the gradients between: the shapes of a
program that spans processes would have to be the same on all ranks, and batches need not be.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ... import _keras, errors
from ..._keras.steps import has_own_steps
from ..._ranks import checksum, keras3_state, keras_model, losses, merging, step_functions
from ..._ranks import state as rank_state
from ..._ranks.engines.jax_distributed import JaxDistributed
from ..._runtime import patching
from ..._runtime.within import Within
from . import cut_steps, gradient_exchange, gradient_marks

_step = Within()  # also where it trains models within

_OPERATIONS = merging.operations_of(jnp)


def distribute(model, place):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    engine = JaxDistributed.join(place)
    if RankedJAXTrainFunction.of(model) is None:
        model.train_function = model.test_function = None
    kinds = RankedJAXTrainFunction, RankedJAXTestFunction, RankedStatelessCall
    keras_model.install(model, engine, kinds)
    if model.built:
        keras_model.same_start(model, engine)
    return model


def _rows(model, data):
    # By Keras, for which a sparse array is one leaf: JAX takes it apart.
    batch = next(leaf for leaf in _keras.keras_of(model).tree.flatten(data) if leaf is not None)
    return int(batch.shape[0])


class RankedJAXTrainFunction(keras_model.RankedMethod):
    """What Keras makes of ``train_step``: a step in two programs."""

    method = "make_train_function"
    steps = ("train",)

    def invoke(self, model, force=False):
        if model.train_function is None or force:
            model.train_function = model._make_function(RankedJAXStep(model, self.engine))


class RankedJAXTestFunction(keras_model.RankedMethod):
    """What Keras makes of ``test_step``, with its rows counted."""

    method = "make_test_function"
    steps = ("evaluate",)

    def invoke(self, model, force=False):
        if model.test_function is not None and not force:
            return

        def step(state, data, share):
            return model.test_step(state, data)

        reduced = Reduced(model, self.engine, step)

        def counted(state, data):
            rows = _rows(model, data)
            keras_model.count(model, rows, False)

            def share():
                keras_model.RankedFit.of(model).in_step = True
                return self.engine.share(rows)

            return reduced(state, data, share)

        model.test_function = model._make_function(counted)


class Reduced:
    """A step in which Keras' losses divide by what all ranks have, where they are no means.

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
        """``share`` is a function that gives the share, and is called only where it is needed."""
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
        """Found by tracing the step; one that cannot be traced is taken to ask for all."""
        if not self.compiled:
            return True, True
        shares = []

        def share():
            shares.append(1.0)
            return 1.0

        _, parts = jax.eval_shape(partial(self.within, share, None), state, data)
        return bool(shares or parts), bool(parts)

    def within(self, share, totals, state, data):
        """What the step returns, and the lists of which losses ask the totals.

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


class RankedJAXStep:
    """One step of this rank and the others, in place of Keras' program of ``train_step``.

    What ``jax.grad()`` and its like give in it for variables is the mean over all ranks.
    """

    def __init__(self, model, engine):
        self.model = model
        self.engine = engine
        tried = rank_state.tried(model)
        ids = set(map(id, keras3_state.averaged(model) + tried))
        set_by_steps = [v for v in enumerate(model.non_trainable_variables) if id(v[1]) in ids]
        #: The places of variables that the step sets, and how those of all ranks are merged.
        self.places = [place for place, _ in set_by_steps]
        variables, ids = [variable for _, variable in set_by_steps], set(map(id, tried))
        self.state = rank_state.StepState(
            engine,
            [variable.path for variable in variables],
            [variable.dtype for variable in variables],
            [number for number, variable in enumerate(variables) if id(variable) in ids],
        )
        compiled = partial(
            cut_steps.CutStep, exchange=self.sum, is_local=self.is_local, check=self.check
        )
        self.compute = Reduced(model, engine, self.step, compiled)
        self.exchanges = 0  # of the step under way
        self.has_local = False  # if it is not compiled: gradients that were not exchanged
        self.count = 0

    def __call__(self, state, data):
        rows = _rows(self.model, data)
        keras_model.count(self.model, rows, True)
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
        return logs, self.verified(state) if checksum.is_due(self.count) else state

    def try_state(self, before, data, rows):
        """Find out how variables that the step sets are merged. See ``_ranks.state``."""
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
        self.exchanges += 1
        return self.engine.sum_array(parts)

    def step(self, state, data, share):
        """Do Keras' own step, with gradients and averages that are marked, or exchanged now."""
        share()  # with which what is marked is weighted
        trainable, before, _, _ = state
        model, optimizer = self.model, self.model.optimizer
        mark = gradient_marks.mark
        if not self.compute.compiled:
            mark = gradient_exchange.EagerStep(self, trainable, share).mark
        ours, scaled = keras3_state.scaling(optimizer, lambda dtype: jnp.asarray(share(), dtype))
        apply = optimizer.stateless_apply

        def stateless_apply(optimizer_variables, grads, trainable_variables):
            leaves, tree = jax.tree.flatten(grads)
            leaves = mark(gradient_marks.APPLIED, [], leaves, not scaled)
            return apply(optimizer_variables, jax.tree.unflatten(tree, leaves), trainable_variables)

        def is_due(called):
            return bool(called) or not has_own_steps(model)

        replaced = step_functions.replaced(
            self.engine, optimizer, is_due, stateless_apply=stateless_apply, **ours
        )
        differentiated = gradient_marks.marked(self.engine, is_due, mark, lambda: len(scaled))
        with _step, replaced, differentiated:
            logs, (trainable, others, variables, metrics) = model.train_step(state, data)
        others = self.merged(before, list(others), share(), mark)
        return logs, (trainable, others, variables, metrics)

    def merged(self, before, others, share, mark):
        """The state that steps set besides the weights, merged of what all ranks have set."""
        old, new = [[values[place] for place in self.places] for values in (before, others)]
        merges, place = self.state.merges, self.engine.place
        parts = merging.parts(merges, _OPERATIONS, old, new, share, place)
        sums = mark(gradient_marks.SUM, [], parts, False) if parts else []
        merged = merging.merged(merges, _OPERATIONS, old, new, sums, place.size)
        for number, value in zip(self.places, merged):
            others[number] = value
        return others

    def is_local(self, state):
        """Return a structure like the state, of whether ranks have values of their own there."""
        trainable, others, optimizer, metrics = (list(values) for values in state)
        weights_of_rank = set(map(id, self.model.weights)) - set(
            map(id, keras3_state.same(self.model))
        )
        own = [id(each) in weights_of_rank for each in self.model.non_trainable_variables]
        return [False] * len(trainable), own, [False] * len(optimizer), [True] * len(metrics)

    def check(self, program, state, data):
        """Check a step that was compiled: see ``gradient_exchange``."""
        gradient_exchange.check(self.model, program)
        if self.count:
            return  # ranks may not compile the others at once
        gradient_exchange.warn_of_inner(self.model, program)
        if program.applied() is not None:
            gradient_exchange.check_applied(self, program, state, data)

    def applied(self, state, data):
        """Return what a step of these rows alone gives the optimizer."""
        given, _ = self.stepped(state, data)
        return jnp.concatenate([gradient.astype("float32").ravel() for gradient in given])

    def stepped(self, state, data):
        """Return what a step of these rows alone gives the optimizer, and the state it sets."""
        given = []

        def capture(optimizer_variables, grads, trainable_variables):
            given.extend(jax.tree.leaves(grads))
            return trainable_variables, optimizer_variables

        with _step, patching.replaced(self.model.optimizer, stateless_apply=capture):
            _, (_, others, _, _) = self.model.train_step(state, data)
        return given, others

    def verified(self, state):
        """The state, compared with the other ranks'. See ``_ranks.checksum.verify``."""
        model, (values, tree) = self.model, jax.tree.flatten(state)
        slots = list(model.optimizer.variables)
        same = set(map(id, keras3_state.same(model) + slots))
        variables = enumerate(model.trainable_variables + model.non_trainable_variables + slots)
        paths = {place: variable.path for place, variable in variables if id(variable) in same}
        places = list(paths)

        def write(number, value):
            values[places[number]] = jnp.asarray(value)

        now = [values[place] for place in places]
        checksum.verify(self.engine, list(paths.values()), now, write, self.count)
        return jax.tree.unflatten(tree, values)


def _loss(state, model, data):
    """The loss in inference, whatever the model's own variables hold."""
    x, y, weights = _keras.keras_of(model).utils.unpack_x_y_sample_weight(data)
    trainable, non_trainable, _, metrics = state
    loss, _ = model.compute_loss_and_updates(
        trainable, non_trainable, metrics, x, y, weights, training=False
    )
    return loss


class RankedStatelessCall(keras_model.RankedMethod):
    """``stateless_call``, refused where a loop of the user's own trains with it: it would do so
    alone, since no part of it is the model's."""

    method = "stateless_call"
    steps = ("train",)
    is_of_keras_steps = True

    def invoke(self, model, *args, **kwargs):
        if kwargs.get("training") and not _step.here():
            raise errors.unsupported(
                "jax",
                "train model {!r} in a loop of the script's own in {}: gradients of such a "
                "loop are never the model's".format(model.name, self.engine.place),
                "Use fit() or train_on_batch(), or start the script without a launcher.",
            )
        return self.plain(model)(*args, **kwargs)
