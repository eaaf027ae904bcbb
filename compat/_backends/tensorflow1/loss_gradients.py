"""Gradients of a model's loss in TensorFlow 1's graphs, averaged over all ranks.

All functions for gradients, TensorFlow's and Keras', call one of TensorFlow's. On ranks it returns
the mean over all ranks where it is called with a model's loss and weights. Gradients of other
tensors stay this rank's own, and are marked: see ``gradient_marks``.
"""

import contextlib
import functools
import importlib
import itertools
from typing import Any, Dict

from ... import errors
from ..._runtime import patching
from .gradient_marks import depend_on_rows, identity, mark_exchanged, marked

_HOOK = "gradients_util._GradientsHelper"


class TensorFlow1Loss:
    """Loss of a model on this rank, whose gradients are exchanged where they are used.

    Arguments:
        engine: the engine by which ranks communicate.
        model: the model.
        loss: a tensor.
        share: this rank's fraction of the rows, a float64 tensor.
        number: that of the model: exchanges of models with the same number belong together.
        batch_norm: the ``RankedBatchNorm`` of the model.
    """

    def __init__(self, engine, model, loss, share, number, batch_norm):
        self.engine, self.tf = engine, engine.tf
        self.name, self.loss, self.share = model.name, loss, share
        self.batch_norm, self.computed = batch_norm, batch_norm.whole(loss)
        self.names = (f"gradients_{number}_{count}" for count in itertools.count())
        self.means: "Dict[Any, Any]" = {}  # by variable

    def means_of(self, variables, gradients):
        """Return the means over all ranks of gradients of the loss, each exchanged once."""
        self.engine.unexchanged.pop(_HOOK, None)
        of_variables = dict(zip(map(identity, variables), gradients))
        new = [variable for variable in of_variables if variable not in self.means]
        if new:
            with self.tf.name_scope("ranks"):
                mine = [of_variables[variable] for variable in new]
                means = self.engine.mean(mine, self.share, next(self.names))
                self.means.update(zip(new, map(self._once, means)))
        return [self.means[identity(variable)] for variable in variables]

    def mean(self, parameters):
        """Return the mean of the loss over all ranks' rows, with its gradients."""
        tf = self.tf
        self.engine.unexchanged[_HOOK] = None
        gradients = tf.gradients(self.loss, parameters)  # the means: see watch()
        pairs = [(p, g) for p, g in zip(parameters, gradients) if g is not None]
        zeros = [_zero(tf, parameter, gradient) for parameter, gradient in pairs]
        # Exchanged only in steps that use the value of the loss, such as for a learning rate.
        (mean,) = self.engine.mean([self.computed], self.share, "loss")
        mean = tf.add_n([tf.stop_gradient(mean)] + [tf.cast(zero, mean.dtype) for zero in zeros])
        mark_exchanged(mean, self.engine)
        return mean

    def _once(self, mean):
        """Return the mean of a gradient, which cannot be differentiated again."""
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
            mark_exchanged(values, self.engine)
            return tf.IndexedSlices(values, mean.indices, mean.dense_shape)
        mean = once(mean)
        mark_exchanged(mean, self.engine)
        return mean


def _zero(tf, parameter, gradient):
    """Return a scalar 0 whose gradient with respect to a parameter is the given one."""

    def zero(value):
        def times(upstream):
            if isinstance(gradient, tf.IndexedSlices):
                rows = gradient.values * tf.cast(upstream, gradient.dtype)
                return tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape)
            return gradient * tf.cast(upstream, gradient.dtype)

        return tf.zeros([], value.dtype), times

    return tf.custom_gradient(zero)(parameter)


def watch(loss_of):
    """Have functions for gradients return the means over all ranks from now on.

    Arguments:
        loss_of: a function from a tensor to its ``TensorFlow1Loss``, if it is a model's loss, or
            None.
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
        ys, xs = [t if isinstance(t, (list, tuple)) else [t] for t in (ys, xs)]
        is_loss = len(ys) == 1 and grad_ys is None and any(map(_is_variable, xs))
        loss = loss_of(ys[0]) if is_loss else None
        of = ys if loss is None else [loss.computed]
        gradients = list(plain(of, xs, grad_ys, *args, **options))
        indices = [i for i, x in enumerate(xs) if gradients[i] is not None and _is_variable(x)]
        if not indices:
            return gradients
        variables, mine = [xs[i] for i in indices], [gradients[i] for i in indices]
        if loss is not None:
            mine = loss.means_of(variables, mine)
        elif depend_on_rows(ys):
            line = errors.users_line()
            mine = [marked(*pair, line) for pair in zip(variables, mine)]
        for index, gradient in zip(indices, mine):
            gradients[index] = gradient
        return gradients

    return gradients_of


def _is_variable(x):
    return hasattr(x, "assign") or x.op.type == "VarHandleOp"
