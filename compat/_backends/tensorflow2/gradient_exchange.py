"""Exchange of gradients in a step of a rank: tapes return their mean over all ranks.

While a step runs (or is traced), ``tf.GradientTape.gradient`` returns the mean over the rows of all
ranks for the model's weights, so that whatever uses it next (clipping, a norm, the second step of a
sharpness-aware one, an optimizer) gets the results of one process. Where another tape records it,
in a loop of TensorFlow's, or within another backward pass, it need not be the gradient of a loss
over the batch, and stays that of the rank. Gradients that no tape has averaged are averaged when an
optimizer applies them. This is right only if they are sums and means of the rank's gradients: see
``ranked_step_trial``.
"""

import contextlib
import functools
import sys
from _thread import get_ident
from typing import Any, Callable, Dict, Set

import tensorflow as tf

from ... import errors
from ..._keras.steps import has_own_steps
from ..._ranks import step_functions
from ..._verification import keras_steps
from .graph import recording

# Functions of TensorFlow's that trace their argument to run it for parts of a batch, or several
# times: ``map_fn()`` and autograph's loops call them, and so does ``vectorized_map()``.
_LOOPS = ("while_loop", "while_loop_v2", "_pfor_impl")


class GradientExchange:
    """The gradients that one step of a model computes and applies.

    Arguments:
        engine: the engine of the ranks.
        model: the model of the step.
        rows: the number of this rank's rows in the batch: an integer, or a tensor.
        share: their fraction of the rows of all ranks, a float64 tensor.
        reductions: the ``RankedReductions`` of the step.

    Attributes:
        exchanges: how often gradients were averaged over all ranks.
        lines: the lines of the script where tapes have computed gradients of all ranks.
        unproven: the lines of the script where gradients of this rank alone were computed, or were
            averaged later than a tape computed them.
    """

    def __init__(
        self, engine: "Any", model: "Any", rows: "Any", share: "tf.Tensor", reductions: "Any"
    ) -> None:
        self.engine, self.model, self.rows, self.share = engine, model, rows, share
        self.reductions = reductions
        self.optimizers = keras_steps.optimizers(model)
        self.scales_losses = any(map(_scales_losses, self.optimizers))
        self.exchanges = 0
        self.lines: "Dict[str, None]" = {}  # an ordered set
        self.unproven: "Dict[str, None]" = {}  # likewise
        self.means: "Set[int]" = set()  # keys of the weights whose gradients tapes have averaged
        self.thread, self.in_backward_pass = get_ident(), False

    def run(self, step: "Callable[[Any], Any]", data: "Any") -> "Any":
        """Run the step, or trace it."""
        tape, replaced = tf.GradientTape, functools.partial(step_functions.replaced, self.engine)
        is_due = bool if has_own_steps(self.model) else self.is_due
        with contextlib.ExitStack() as stack:
            gradient = self.of_all_ranks(tape.gradient)
            stack.enter_context(replaced(tape, is_due, gradient=gradient))
            for optimizer in self.optimizers:
                due = is_due if optimizer is self.model.optimizer else bool
                stack.enter_context(replaced(optimizer, due, **self.methods(optimizer)))
            return step(data)

    def is_due(self, called: int) -> bool:
        """Return whether a step defined by Keras has to call a replaced method."""
        return bool(called or self.model.trainable_variables)

    # Tapes ------------------------------------------------------------------------------------

    def of_all_ranks(self, plain):
        """Return ``GradientTape.gradient`` with means over all ranks for the model's weights."""

        def gradient(
            tape,
            target,
            sources,
            output_gradients=None,
            unconnected_gradients=tf.UnconnectedGradients.NONE,
        ):
            call = functools.partial(plain, tape, unconnected_gradients=unconnected_gradients)
            keys = list(map(_key, tf.nest.flatten(sources)))
            weights = set(map(_key, _weights(self.model))).intersection(filter(None, keys))
            if get_ident() != self.thread or self.in_backward_pass:
                return call(target, sources, output_gradients)
            if not weights:
                with self.reductions.weighted(self.weights_of(target)[0]):
                    return call(target, sources, output_gradients)
            if tape._recording and not tape._persistent:  # as the plain function begins
                tape._pop_tape()
            if recording() or _is_in_loop():
                self.unproven[errors.users_line()] = None
                with self.reductions.weighted(self.weights_of(target)[0]):
                    return call(target, sources, output_gradients)
            if hasattr(tape, "_allreduce_grads"):  # Horovod's DistributedGradientTape
                tape._allreduce_grads = lambda gradients, *_: gradients
            self.lines[errors.users_line()] = None
            weight, output_gradients = self.weighted(target, output_gradients)
            self.in_backward_pass = True
            try:
                with self.reductions.weighted(weight):
                    gradients = tf.nest.flatten(call(target, sources, output_gradients))
            finally:
                self.in_backward_pass = False
            places = [place for place, key in enumerate(keys) if key in weights]
            means = self.mean([gradients[place] for place in places], weight)
            for place, mean in zip(places, means):
                gradients[place] = mean
            self.means.update(weights)
            return tf.nest.pack_sequence_as(sources, gradients)

        gradient.autograph_info__ = {}  # as in ReplicatedCall
        return gradient

    def weighted(self, target, output_gradients):
        """Return the weight of this rank's gradients of a target, and the upstream gradients.

        The gradient of a vector with a loss for each row is the sum of theirs, also in one process.

        A ``LossScaleOptimizer`` lets float16 overflow if the scale is too large. The mean over a
        rank's rows weighs each row more than the mean over all ranks' rows does. So there the
        backward pass itself begins with this rank's weight, and overflows as in one process.
        """
        targets, weights = tf.nest.flatten(target), self.weights_of(target)
        if not self.scales_losses and len(set(map(id, weights))) < 2:
            return weights[0], output_gradients
        seeds = [None] * len(targets)
        if output_gradients is not None:
            seeds = tf.nest.flatten(output_gradients)

        def weigh(seed, target, weight):
            if not tf.is_tensor(target) or not target.dtype.is_floating:
                return seed
            seed = tf.ones_like(target) if seed is None else seed
            return seed * tf.cast(weight, seed.dtype)

        return tf.ones_like(self.share), list(map(weigh, seeds, targets, weights))

    def weights_of(self, target):
        """Return the weights of this rank's gradients of targets, at least one."""
        ones = tf.ones_like(self.share)
        targets = tf.nest.flatten(target)
        return [ones if self.has_rows(each) else self.share for each in targets] or [self.share]

    def has_rows(self, target):
        """Return whether a tape's target has a loss for each row."""
        shape = getattr(target, "shape", None)
        if shape is None or not shape.rank:
            return False
        rows = self.rows if isinstance(self.rows, int) else None
        return shape[0] == rows

    # Optimizers -------------------------------------------------------------------------------

    def methods(self, optimizer: "Any") -> "Dict[str, Callable[..., Any]]":
        """Return the methods that replace those of an optimizer, by name."""
        apply = optimizer.apply_gradients

        def apply_gradients(grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            means = self.later(*zip(*pairs)) if pairs else []
            return apply([(g, v) for g, (_, v) in zip(means, pairs)], *args, **kwargs)

        return {"apply_gradients": apply_gradients}

    def later(self, gradients, variables):
        """Return the gradients to apply: averaged over all ranks, unless a tape has done that."""
        gradients = list(gradients)
        places = [
            place
            for place, (gradient, variable) in enumerate(zip(gradients, variables))
            if gradient is not None and _key(variable) not in self.means
        ]
        if places:
            self.unproven[errors.users_line()] = None
            means = self.mean([gradients[place] for place in places], self.share)
            for place, mean in zip(places, means):
                gradients[place] = mean
        return gradients

    def mean(self, gradients, weight):
        """Return the means of all ranks' gradients, and None for a missing gradient."""
        mine = [gradient for gradient in gradients if gradient is not None]
        name = "gradients_{}".format(self.exchanges)
        with tf.control_dependencies(self.reductions.before_gradients()):
            means = iter(self.engine.mean(mine, weight, name))
        self.exchanges += 1
        return [None if gradient is None else next(means) for gradient in gradients]


class Keras3Exchange(GradientExchange):
    """The exchange of a step of Keras 3, whose optimizers apply gradients by ``apply``."""

    def methods(self, optimizer):
        plain = optimizer.apply

        def apply(grads, trainable_variables=None, *args, **kwargs):
            variables = trainable_variables
            if variables is None:
                variables = optimizer._trainable_variables
            means = self.later(grads, variables)
            return plain(means, trainable_variables, *args, **kwargs)

        return {"apply": apply}


def _scales_losses(optimizer):
    """Return whether it is a ``LossScaleOptimizer``, of tf.keras or of Keras 3."""
    return hasattr(optimizer, "get_scaled_loss") or hasattr(optimizer, "inner_optimizer")


def _key(variable):
    """Return the identity of a variable, however it is wrapped; None for a tensor."""
    handle = getattr(getattr(variable, "_value", variable), "handle", None)
    return None if handle is None else id(handle)


def _weights(model):
    """Return the variables of a model and its parts, as far as they are made."""
    try:
        return model.weights
    except ValueError:  # Keras: the model is not built, but its parts may be
        parts = model.layers
        return [weight for part in parts if part.built for weight in part.weights]


def _is_in_loop():
    """Return whether the caller is run or traced by one of TensorFlow's loops within the step."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not GradientExchange.run.__code__:
        if frame.f_code.co_name in _LOOPS:
            return True
        frame = frame.f_back
    return False
