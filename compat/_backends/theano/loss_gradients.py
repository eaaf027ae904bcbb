"""Gradients of a model's loss in Theano's graphs, averaged over all ranks.

``theano.grad``, which Keras calls as well, returns the mean over all ranks where it is called with
a model's loss, or within an optimizer. Gradients of other variables stay this rank's own, and are
marked: see ``gradient_marks``.
"""

import functools
from typing import Any, Dict, List

import theano
from theano import tensor
from theano.compile import SharedVariable
from theano.gradient import disconnected_grad

from ... import errors
from ..._ranks import arrays
from ..._runtime import patching
from . import gradient_marks
from .graph import computed_by

_HOOK = "theano.tensor.grad"


class TheanoLoss:
    """Loss of a model on this rank: an operation for each exchange computes means over ranks.

    Arguments:
        engine: the engine by which ranks communicate.
        model: the model.
        loss: its loss, a variable.
        share_of: a function from a number of rows to this rank's fraction of all ranks' rows.

    Attributes:
        is_used: whether an optimizer is computing its updates.
        pending: variables whose means the next exchange is to compute as well.
        means: means by variable.
        gradients: means of gradients of the loss, by weight.
        mean_of_ranks: the mean of the loss.
        last: a result of the last exchange.
    """

    def __init__(self, engine, model, loss, share_of):
        self.engine, self.loss, self.share_of = engine, loss, share_of
        self.rows = model.inputs[0].shape[0]
        self.is_used = False
        self.pending: "List[Any]" = []
        self.means: "Dict[Any, Any]" = {}
        self.gradients: "Dict[Any, Any]" = {}
        self.mean_of_ranks: "Any" = None
        self.last = tensor.constant(0.0, dtype="float32")

    def means_of(self, weights, gradients):
        """Return the means over all ranks of gradients of the loss, each exchanged once."""
        new = {w: mine for w, mine in zip(weights, gradients) if w not in self.gradients}
        self.gradients.update(zip(new, self.exchange(new.values())))
        return [self.gradients[weight] for weight in weights]

    def is_loss(self, cost):
        """Return whether a variable is the loss, or its mean over all ranks."""
        return cost is self.loss or cost is self.mean_of_ranks

    def mean(self, parameters, averages):
        """Return the mean of the loss over all ranks' rows, with its gradients.

        Arguments:
            parameters: the weights.
            averages: further results of the step whose means are wanted, such as moving averages.
        """
        self.pending = [self.loss] + averages
        self.engine.unexchanged[_HOOK] = None
        tensor.grad(self.loss, parameters)  # exchanges: see watch()
        self.exchange(())  # what is pending, if there was nothing new
        here = self.loss - disconnected_grad(self.loss)  # is 0
        self.mean_of_ranks = disconnected_grad(self.means[self.loss]) + here
        return self.mean_of_ranks

    def exchange(self, gradients):
        """Return the means of gradients over all ranks, and have those of ``pending`` computed.

        One operation computes the means that no other does yet. It waits for the last exchange, so
        that the order is the same on all ranks.
        """
        gradients, pending = list(gradients), self.pending
        self.pending = []
        new = [v for v in dict.fromkeys(gradients + pending) if v not in self.means]

        def mean(_, rows, *values):
            kind = "float64" if any(value.dtype == "float64" for value in values) else "float32"
            flat = arrays.flat(values, kind)
            flat *= self.share_of(int(rows))
            means = arrays.like(values, self.engine.sum_array(flat))
            if gradients:
                self.engine.count("gradients")
            return means

        values = [variable.transfer("cpu") for variable in new]
        if new:
            made = computed_by(mean, [self.last, self.rows, *values], values, _shapes_of_values)
            self.means.update(zip(new, made))
            self.last = made[0]
        return [self.means[gradient] for gradient in gradients]


def _shapes_of_values(node, shapes):
    return shapes[2:]


def watch(loss_of, losses):
    """Have Theano's functions for gradients return the means over all ranks from now on.

    Arguments:
        loss_of: a function from a cost to the ``TheanoLoss`` that exchanges its gradients, or None.
        losses: a function that returns the ``TheanoLoss`` of each model.
    """
    for owner in (tensor, theano):
        if patching.find(owner, "grad") is None:
            patching.Patch(owner, "grad", _of_all_ranks(owner.grad, loss_of, losses))


def _of_all_ranks(plain, loss_of, losses):
    @functools.wraps(plain)
    def grad(cost, wrt, *args, **options):
        is_sequence = isinstance(wrt, (list, tuple))
        variables = list(wrt) if is_sequence else [wrt]
        loss = None if cost is None else loss_of(cost)
        is_loss = loss is not None and loss.is_loss(cost)
        if loss is not None:
            loss.engine.unexchanged.pop(_HOOK, None)
        if is_loss and loss.gradients.keys() >= set(variables):
            gradients = [loss.gradients[variable] for variable in variables]
            return type(wrt)(gradients) if is_sequence else gradients[0]
        result = plain(cost, wrt, *args, **options)
        gradients = list(result) if is_sequence else [result]
        indices = [
            index
            for index, (variable, mine) in enumerate(zip(variables, gradients))
            if isinstance(variable, SharedVariable) and isinstance(mine, tensor.TensorVariable)
        ]
        if not indices:
            return result
        weights, mine = [variables[i] for i in indices], [gradients[i] for i in indices]
        if is_loss:
            mine = loss.means_of(weights, mine)
        elif cost is not None and gradient_marks.depends_on_rows(cost, exchanged_by(losses())):
            line = errors.users_line()
            mine = [gradient_marks.marked(*pair, line) for pair in zip(weights, mine)]
        elif loss is not None:  # of the mean of the loss, in an optimizer
            mine = loss.exchange(mine)
        for index, gradient in zip(indices, mine):
            gradients[index] = gradient
        return type(wrt)(gradients) if is_sequence else gradients[0]

    return grad


def exchanged_by(losses):
    """Return the variables whose values are those of all ranks, by the exchanges of these losses.

    Arguments:
        losses: the ``TheanoLoss`` of each model.
    """
    return {mean for loss in losses for mean in [*loss.means.values(), loss.mean_of_ranks]}
