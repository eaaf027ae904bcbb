"""Gradients of a model's loss in TensorFlow 1's graphs: those of all ranks, wherever computed.

All functions for gradients, TensorFlow's and Keras', call one of TensorFlow's. On ranks it returns
the mean over all ranks where it is called with a model's loss and weights. Gradients of other
tensors stay this rank's own, and are marked, so that what uses them can be found.
"""

import contextlib
import functools
import importlib
import itertools

from ... import errors
from ..._runtime import patching
from . import graph

# Attributes of operations: the engine through which ranks exchange their values; the variable, and
# the line, of a gradient of this rank's rows alone.
_EXCHANGED_BY = "_compat_exchanged_by"
_OF_THIS_RANK = "_compat_of_this_rank"

_HOOK = "gradients_util._GradientsHelper"


class TensorFlow1Loss:
    """The loss of a model on this rank, whose gradients are exchanged where they are used.

    Arguments:
        share: this rank's share of the rows, a float64 tensor.
        number: of the model; the ranks' exchanges of models of one number belong together.
    """

    def __init__(self, engine, model, loss, share, number):
        self.engine, self.tf = engine, engine.tf
        self.name, self.loss, self.share = model.name, loss, share
        self.names = (f"gradients_{number}_{count}" for count in itertools.count())
        self.means = {}  # by variable

    def means_of(self, variables, gradients):
        """Return the means over all ranks of gradients of the loss, each of which is sent once."""
        self.engine.unexchanged.pop(_HOOK, None)
        of_variables = dict(zip(map(_identity, variables), gradients))
        new = [variable for variable in of_variables if variable not in self.means]
        if new:
            with self.tf.name_scope("ranks"):
                mine = [of_variables[variable] for variable in new]
                means = self.engine.mean(mine, self.share, next(self.names))
                self.means.update(zip(new, map(self._once, means)))
        return [self.means[_identity(variable)] for variable in variables]

    def mean(self, parameters):
        """Return the mean of the loss over all ranks' rows, whose gradients are those of it."""
        tf = self.tf
        self.engine.unexchanged[_HOOK] = None
        gradients = tf.gradients(self.loss, parameters)  # the means: see watch()
        pairs = [(p, g) for p, g in zip(parameters, gradients) if g is not None]
        zeros = [_zero(tf, parameter, gradient) for parameter, gradient in pairs]
        # Exchanged by steps alone that use the loss itself, such as one whose rate it is.
        (mean,) = self.engine.mean([self.loss], self.share, "loss")
        mean = tf.add_n([tf.stop_gradient(mean)] + [tf.cast(zero, mean.dtype) for zero in zeros])
        setattr(mean.op, _EXCHANGED_BY, self.engine)
        return mean

    def _once(self, mean):
        """Return the mean of a gradient, which cannot be differentiated once more."""
        tf = self.tf

        @tf.custom_gradient
        def once(value):
            def refuse(upstream):
                raise errors.UnsupportedError(
                    f"Gradients of the loss of {self.name!r} are differentiated once more. Ranks "
                    "exchange first derivatives alone: such a step would use those of each rank's "
                    "own rows. Use an optimizer of first derivatives on several ranks."
                )

            return tf.identity(value), refuse

        if isinstance(mean, tf.IndexedSlices):
            values = once(mean.values)
            setattr(values.op, _EXCHANGED_BY, self.engine)
            return tf.IndexedSlices(values, mean.indices, mean.dense_shape)
        mean = once(mean)
        setattr(mean.op, _EXCHANGED_BY, self.engine)
        return mean


def _zero(tf, parameter, gradient):
    """A scalar that is 0, and whose gradient with respect to a parameter is this one."""

    def zero(value):
        def times(upstream):
            if isinstance(gradient, tf.IndexedSlices):
                rows = gradient.values * tf.cast(upstream, gradient.dtype)
                return tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape)
            return gradient * tf.cast(upstream, gradient.dtype)

        return tf.zeros([], value.dtype), times

    return tf.custom_gradient(zero)(parameter)


def watch(loss_of):
    """Have functions for gradients return those of all ranks from now on.

    Arguments:
        loss_of: a function of a tensor: the ``TensorFlow1Loss`` that it is on this rank, or None.
    """
    for name in ("gradients_util", "gradients_impl"):  # from TensorFlow 1.14 on, and before
        with contextlib.suppress(ImportError):
            module = importlib.import_module("tensorflow.python.ops." + name)
            if patching.find(module, "_GradientsHelper") is None:
                changed = _of_all_ranks(module._GradientsHelper, loss_of)
                patching.Patch(module, "_GradientsHelper", changed)
            break


def _of_all_ranks(plain, loss_of):
    @functools.wraps(plain)
    def gradients_of(ys, xs, grad_ys=None, *args, **options):
        found = list(plain(ys, xs, grad_ys, *args, **options))
        ys, xs = [each if isinstance(each, (list, tuple)) else [each] for each in (ys, xs)]
        places = [p for p, x in enumerate(xs) if found[p] is not None and _is_variable(x)]
        if not places:
            return found
        loss = loss_of(ys[0]) if len(ys) == 1 and grad_ys is None else None
        variables, gradients = [xs[p] for p in places], [found[p] for p in places]
        if loss is not None:
            changed = loss.means_of(variables, gradients)
        elif any(map(_takes_rows, graph.ancestors(ys, _Exchanged())[0])):
            line = errors.users_line()
            changed = [_marked(*each, line) for each in zip(variables, gradients)]
        else:
            changed = gradients
        for place, gradient in zip(places, changed):
            found[place] = gradient
        return found

    return gradients_of


class _Exchanged:
    """The operations whose results are those of all ranks."""

    def __contains__(self, op):
        return hasattr(op, _EXCHANGED_BY)


def _identity(variable):
    """What is the same for a variable and for its handle."""
    return getattr(variable, "handle", variable)


def _is_variable(x):
    return hasattr(x, "assign") or x.op.type == "VarHandleOp"


def _takes_rows(op):
    """Return whether an operation brings a batch, or a part of it, into the graph."""
    of_weights = op.type in ("Const", "VarHandleOp", "VariableV2")
    return not op.inputs and not of_weights and any(each.shape.ndims != 0 for each in op.outputs)


def _marked(variable, gradient, line):
    tf = graph.v1_names()
    if isinstance(gradient, tf.IndexedSlices):
        values, places = tf.identity(gradient.values), gradient.indices
        gradient = tf.IndexedSlices(values, places, gradient.dense_shape)
    else:
        gradient = tf.identity(gradient)
    setattr(gradient.op, _OF_THIS_RANK, (_identity(variable), line))
    return gradient


def lines_of_own(model, fetches):
    """Return the lines at which gradients in these that are this rank's own were computed.

    Those of the model's weights; its loss may contain any.
    """
    weights = set(map(_identity, model.weights))
    found = graph.ancestors(_operations(fetches), _ExchangedOrLoss(model))[0]
    marks = [vars(op)[_OF_THIS_RANK] for op in found if _OF_THIS_RANK in vars(op)]
    return list(dict.fromkeys(line for variable, line in marks if variable in weights))


class _ExchangedOrLoss(_Exchanged):
    def __init__(self, model):
        self.loss = getattr(getattr(model, "total_loss", None), "op", None)

    def __contains__(self, op):
        return op is self.loss or super().__contains__(op)


def exchanging_engine(fetches):
    """Return the engine through which ranks exchange what is in these, or None."""
    found = graph.ancestors(_operations(fetches), ())[0]
    return next((vars(op)[_EXCHANGED_BY] for op in found if _EXCHANGED_BY in vars(op)), None)


def _operations(fetches):
    """Return the operations of tensors, operations and updates of Keras', nested as they may be."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [op for each in fetches for op in _operations(each)]
    op = getattr(fetches, "op", fetches)
    return [op] if hasattr(op, "inputs") else []
