"""Gradients of a model's loss in Theano's graphs: those of all ranks, wherever they are computed.

``theano.grad``, which Keras calls as well, returns the mean over all ranks where it is called with
a model's loss, or within an optimizer. Gradients of other variables stay this rank's own, and are
marked, so that what uses them can be found.
"""

import functools

import theano
from theano import gradient, tensor
from theano.compile import SharedVariable
from theano.gof import graph

from ... import errors
from ..._ranks import arrays
from ..._runtime import patching
from .graph import computed_by

_HOOK = "theano.tensor.grad"


class TheanoLoss:
    """The loss of a model on this rank: one operation for each exchange computes means of it.

    Arguments:
        share_of: a function of a number of rows, which returns this rank's share of all ranks'.
    """

    def __init__(self, engine, model, loss, share_of):
        self.engine, self.loss, self.share_of = engine, loss, share_of
        self.rows = model.inputs[0].shape[0]
        self.is_used = False  # an optimizer computes its updates
        self.pending = []  # type: list  # what the next exchange is to compute means of besides
        self.means = {}  # type: dict  # by what they are means of
        self.gradients = {}  # type: dict  # the means, by variable, of gradients of the loss
        self.mean_of_ranks = None  # the mean of the loss
        self.last = tensor.constant(0.0, dtype="float32")  # of the exchange before

    def means_of(self, variables, found):
        """Return the means over all ranks of gradients of the loss, each of which is sent once."""
        new = {v: mine for v, mine in zip(variables, found) if v not in self.gradients}
        self.gradients.update(zip(new, self.exchange(new.values())))
        return [self.gradients[variable] for variable in variables]

    def is_loss(self, cost):
        return cost is self.loss or cost is self.mean_of_ranks

    def mean(self, parameters, averages):
        """Return the mean of the loss over all ranks' rows, whose gradients are those of it.

        Arguments:
            averages: what else the step computes whose means are wanted, such as moving averages.
        """
        self.pending = [self.loss] + averages
        self.engine.unexchanged[_HOOK] = None
        tensor.grad(self.loss, parameters)  # exchanges: see watch()
        self.exchange(())  # what is pending, if there was nothing new
        here = self.loss - gradient.disconnected_grad(self.loss)  # is 0
        self.mean_of_ranks = gradient.disconnected_grad(self.means[self.loss]) + here
        return self.mean_of_ranks

    def exchange(self, found):
        """Return the means of these over all ranks, and have those of what is pending computed.

        One operation computes those that none does yet. It waits for the exchange before, so that
        all ranks have one order.
        """
        found, pending = list(found), self.pending
        self.pending = []
        new = [each for each in dict.fromkeys(found + pending) if each not in self.means]

        def mean(_, rows, *values):
            kind = "float64" if any(value.dtype == "float64" for value in values) else "float32"
            flat = arrays.flat(values, kind)
            flat *= self.share_of(int(rows))
            means = arrays.like(values, self.engine.sum_array(flat))
            if found:
                self.engine.count("gradients")
            return means

        values = [variable.transfer("cpu") for variable in new]
        if new:
            made = computed_by(mean, [self.last, self.rows, *values], values, _shapes_of_values)
            self.means.update(zip(new, made))
            self.last = made[0]
        return [self.means[each] for each in found]


def _shapes_of_values(node, shapes):
    return shapes[2:]


def watch(loss_of, losses):
    """Have Theano's functions for gradients return those of all ranks from now on.

    Arguments:
        loss_of: a function of a cost: the ``TheanoLoss`` that exchanges its gradients, or None.
        losses: a function that returns those of all models.
    """
    for owner in (tensor, theano):
        if patching.find(owner, "grad") is None:
            patching.Patch(owner, "grad", _of_all_ranks(owner.grad, loss_of, losses))


def _of_all_ranks(plain, loss_of, losses):
    @functools.wraps(plain)
    def grad(cost, wrt, *args, **options):
        variables = wrt if isinstance(wrt, (list, tuple)) else [wrt]
        loss = None if cost is None else loss_of(cost)
        if loss is not None:
            loss.engine.unexchanged.pop(_HOOK, None)
        if loss is not None and loss.is_loss(cost) and loss.gradients.keys() >= set(variables):
            results = [loss.gradients[variable] for variable in variables]
            return type(wrt)(results) if isinstance(wrt, (list, tuple)) else results[0]
        found = plain(cost, wrt, *args, **options)
        results = list(found) if isinstance(wrt, (list, tuple)) else [found]
        places = [place for place, x in enumerate(variables) if isinstance(x, SharedVariable)]
        places = [place for place in places if isinstance(results[place], tensor.TensorVariable)]
        if not places:
            return found
        of_variables = [variables[place] for place in places]
        changed = [results[place] for place in places]
        if loss is not None and loss.is_loss(cost):
            changed = loss.means_of(of_variables, changed)
        elif cost is not None and _takes_rows(graph.ancestors([cost], _exchanged(losses()))):
            changed = list(map(_marked, of_variables, changed, [errors.users_line()] * len(places)))
        elif loss is not None:  # of the mean of the loss, in an optimizer
            changed = loss.exchange(changed)
        for place, result in zip(places, changed):
            results[place] = result
        return type(wrt)(results) if isinstance(wrt, (list, tuple)) else results[0]

    return grad


def _exchanged(losses):
    return {mean for loss in losses for mean in [*loss.means.values(), loss.mean_of_ranks]}


def _takes_rows(variables):
    """Return whether any of these brings a batch, or a part of it, into the graph."""
    return any(
        variable.owner is None
        and not isinstance(variable, (SharedVariable, graph.Constant))
        and getattr(variable, "ndim", 0)
        for variable in variables
    )


def _marked(variable, found, line):
    found = tensor.tensor_copy(found)
    found.tag.compat_of_this_rank = variable, line
    return found


def lines_of_own(model, outputs, losses):
    """Return the lines at which gradients in outputs that are this rank's own were computed.

    Those of the model's weights; its loss may contain any.

    Arguments:
        losses: the ``TheanoLoss`` of all models.
    """
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    outputs = [each for each in outputs if isinstance(each, graph.Variable)]
    blockers = _exchanged(losses) | {getattr(model, "total_loss", None)}
    marks = [
        getattr(variable.tag, "compat_of_this_rank", (None, ""))
        for variable in graph.ancestors(outputs, blockers)
    ]
    weights = set(model.weights)
    return list(dict.fromkeys(line for variable, line in marks if variable in weights))
