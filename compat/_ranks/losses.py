"""Losses over all ranks' rows, and their divisors where these are not the number of rows.

The ranks' gradients become their mean, weighted by rows. That is the gradient of one process as
long as the loss is a mean over rows. Where Keras itself divides by something else (the rows that a
mask leaves) or by nothing (``reduction="sum"``), ``Reductions`` has it divide by what one process
would, so that the mean over ranks is right again. Penalties on weights are the same on all ranks,
and count once. Custom losses are tried: ``check()``.
"""

import contextlib
import functools
import inspect
import sys
from typing import Any, List

import numpy as np

from .. import _keras, errors
from .._keras.steps import has_own_steps, weighs_batches
from .._runtime import patching
from . import batch_parts, metrics, step_functions

# Those of the functions that ``Reductions`` replaces that Keras' metrics call as well.
_MASKING = ("apply_mask", "apply_valid_mask")

# How far the mean over two parts of a batch may be from the whole, relative to the loss.
_ROUNDING = {"float16": 2e-2, "bfloat16": 5e-2}  # others: 1e-3


def rounding(dtype):
    """Return the relative rounding error of results that are computed in a type of number."""
    return _ROUNDING.get(dtype, 1e-3)


class Reductions:
    """Reductions of losses over all ranks' rows, in place of those of tf.keras 2 or Keras 3.

    ``share`` and ``total`` are called only where a loss is not a mean over rows, then on all ranks.

    Arguments:
        share: a function without arguments, which returns this rank's share of the step's rows.
        total: a function of a list of scalars, which returns their sums over all ranks.
        model: the one whose step computes the losses; None: only parts of it are tried.
        engine: that of the ranks, or None likewise.
    """

    def __init__(self, share, total, model=None, engine=None):
        self.share = share
        self.total = total
        self.model = model
        self.engine = engine

    @contextlib.contextmanager
    def within(self, keras):
        """Replace the functions by which Keras reduces losses, which it computes within."""
        if keras is None:  # one whose losses are custom functions, and in a graph
            yield
            return
        module = sys.modules[keras.losses.Loss.__module__]
        if hasattr(module, "reduce_values"):
            self.ops = module.ops
            takes_weights = "sample_weight" in inspect.signature(module.reduce_values).parameters
            reduce = self.reduce if takes_weights else self.reduce_unweighted
            ours: Any = {"apply_mask": self.mask_of_keras_3, "reduce_values": reduce}
        else:
            module, self.ops = module.losses_utils, sys.modules["tensorflow"]
            ours = {"compute_weighted_loss": self.reduce}
            if hasattr(module, "apply_valid_mask"):  # before tf.keras 2.12 masks are weights
                ours["apply_valid_mask"] = self.mask_of_tf_keras
        ours = {name: functools.partial(ours[name], getattr(module, name)) for name in ours}
        with contextlib.ExitStack() as stack:
            stack.enter_context(step_functions.replaced(self.engine, module, self.is_due, **ours))
            tracker = getattr(self.model, "_loss_tracker", None)  # of Keras 3
            if tracker is not None and not (
                has_own_steps(self.model) or weighs_batches(self.model)
            ):
                track = functools.partial(self.track, tracker.update_state)
                stack.enter_context(patching.replaced(tracker, update_state=track))
            yield

    def is_due(self, called):
        """Return whether Keras has to call these functions, as where it computes losses.

        Arguments:
            called: the names of those that it has called.
        """
        reduces = any(name not in _MASKING for name in called)
        return reduces or self.model is not None and computes_losses(self.model)

    # Each is called as Keras' own function, ``plain``. Where the reduction is "sum", that takes the
    # mask for a weight, and divides by nothing.

    def mask_of_keras_3(self, plain, sample_weight, mask, dtype, reduction):
        """Apply a mask in Keras 3, with the divisor of all ranks."""
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return plain(sample_weight, mask, dtype, reduction)
        ops = self.ops
        mask = ops.cast(mask, dtype)
        size, valid = self.total([ops.cast(ops.size(mask), dtype), ops.sum(mask)])
        scale = ops.divide_no_nan(ops.cast(size, dtype), ops.cast(valid, dtype))
        return plain(sample_weight, mask * scale, dtype, "sum")

    def mask_of_tf_keras(self, plain, losses, sw, mask, reduction):
        """Apply a mask in tf.keras, with the divisor of all ranks."""
        if mask is None or reduction not in ("auto", "sum_over_batch_size"):
            return plain(losses, sw, mask, reduction)
        tf = self.ops
        mask = tf.cast(mask, losses.dtype)
        size, valid = self.total([tf.size(mask), tf.reduce_sum(mask)])
        return plain(losses, sw, mask * tf.cast(size / valid, losses.dtype), "sum")

    def reduce(self, plain, values, sample_weight=None, reduction="sum_over_batch_size", **options):
        """Reduce the losses of samples to a number, with the divisor of all ranks."""
        if reduction in (None, "none") and len(values.shape):
            raise errors.UnsupportedError(
                "A loss with reduction='none' cannot train on several ranks: what becomes of its "
                "values is not known there. Use reduction='sum_over_batch_size' or 'sum'."
            )
        loss = plain(values, sample_weight, reduction, **options)
        cast = functools.partial(self.ops.cast, dtype=loss.dtype)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            mine = self.ops.sum(sample_weight)
            (total,) = self.total([mine])
            loss = loss * (cast(mine) / (cast(total) * cast(self.share())))
        if reduction == "sum" and len(values.shape):
            loss = loss / cast(self.share())
        return loss

    def track(self, plain, loss, sample_weight=None):
        """Count the loss of a step in an epoch's mean.

        Only where Keras itself takes the mean over batches, whatever their rows.
        """
        if sample_weight is None:
            sample_weight = self.ops.cast(self.share() * self.engine.place.size, loss.dtype)
        return plain(loss, sample_weight=sample_weight)

    def reduce_unweighted(self, plain, values, reduction="sum_over_batch_size"):
        """Reduce losses in Keras before 3.7, which divides by no sums of weights."""

        def unweighted(values, _, reduction):
            return plain(values, reduction)

        return self.reduce(unweighted, values, None, reduction)


def computes_losses(model):
    """Return whether Keras' own step computes losses that Keras reduces."""
    if has_own_steps(model):
        return False
    kind = _keras.keras_of(model).losses.Loss
    return any(
        not isinstance(loss, kind) or type(loss).__call__ is kind.__call__  # else it is a function
        for loss in _compiled_losses(model)
        if loss is not None
    )


def _compiled_losses(model):
    """Return the losses that ``compile()`` was given."""
    if hasattr(model, "_compile_loss"):  # Keras 3
        losses = getattr(model._compile_loss, "_user_loss", None)
    else:
        losses = model.compiled_loss._user_losses
    return _keras.tree_of(_keras.keras_of(model)).flatten(losses)


# Losses that may be no means ------------------------------------------------------------------

#: What the names of Keras' own modules begin with.
KERAS = ("keras.", "tensorflow.python.keras.", "tensorflow_core.python.keras.", "tf_keras.")
# Keras' own that read several rows at once, whatever their options; others do by axis=0.
_ACROSS_ROWS = ("circle", "dice", "tversky")


def may_mix_rows(loss):
    """Return whether a loss, as given to ``compile()``, may be no mean over rows.

    Such a loss is to be tried.
    """
    function = getattr(loss, "fn", loss)
    name = loss if isinstance(loss, str) else getattr(function, "__name__", type(loss).__name__)
    module = getattr(function, "__module__", None) or type(function).__module__
    if callable(function) and not module.startswith(KERAS):
        return True
    axis = getattr(loss, "_fn_kwargs", {}).get("axis", -1)
    return axis != -1 or name.lower() in _ACROSS_ROWS


def _replaying(totals):
    """Return a function of values that returns these totals, one after the other.

    Further values it appends to the totals, and returns them.
    """
    recorded = iter(list(totals))

    def total(values):
        value = next(recorded, None)
        if value is None:
            totals.append(values)
        return values if value is None else value

    return total


def check(name, keras, rows, loss_of, dtype="float32"):
    """Check that the loss of a batch is the mean, weighted by rows, of the losses of its parts.

    Called once, with a rank's first batch, where ``may_mix_rows()`` of one of the losses.

    Arguments:
        name: the model's.
        keras: its Keras; None: one whose losses are custom functions in a graph.
        rows: of the batch.
        loss_of: a function of an array of places of rows: their loss as a float, in inference.
        dtype: in which the model computes.

    Raises:
        UnsupportedError: it contains a sum over rows.
    """
    if rows < 2:
        return
    first = max(1, rows // 3)
    totals: List[Any] = []  # of the whole batch, for its parts
    parts = [batch_parts.WHOLE, *batch_parts.in_two(rows, first)]

    def losses(times):
        values = []
        for part in parts:
            # The losses that Keras itself reduces count as they do in ranks of these rows.
            share = times * part.share
            with Reductions(lambda: share, _replaying(totals)).within(keras):  # noqa: B023
                values.append(loss_of(np.tile(np.arange(rows)[part.rows], times)))
        return np.array(values)

    once = losses(1)
    whole, one, other = once
    limit = rounding(dtype) * np.abs(once).max()
    distance = whole - (first * one + (rows - first) * other) / rows
    if not abs(distance) > limit or not np.abs(losses(1) - once).max() <= limit / 10:
        return  # it is right, or random
    comparison = "{:.6g} of {} rows, {:.6g} of the first {} and {:.6g} of the others".format(
        whole, rows, one, first, other
    )
    # The parts of the loss that are sums: they double where all rows come twice.
    _, of_one, of_other = losses(2) - once
    if abs(distance - ((rows - first) * of_one + first * of_other) / rows) <= 3 * limit:
        raise errors.UnsupportedError(
            "The loss of {!r} is, or contains, a sum over the rows of a batch: {}. Only means over "
            "rows can be averaged over ranks; the gradient of a sum would be too small by the "
            "number of ranks. Divide by the number of rows: reduce_mean() in place of "
            "reduce_sum(), in add_loss() for example.".format(name, comparison)
        )
    errors.warn(
        "The loss of {!r} is no mean over the rows of a batch: {}. Each rank computes it of its "
        "own rows, so that the ranks train to other numbers than one process. A loss that "
        "returns one value for each row trains to the same.".format(name, comparison)
    )


def warn_of_step(name, where, rows, distance):
    """Warn that a custom step computes gradients that are not means over the rows of a batch.

    Arguments:
        name: the model's.
        where: the place of the script that computes them, " (train.py, line 12)"; empty: unknown.
        rows: of the batch.
        distance: the largest one of a gradient from its mean over parts of the batch.
    """
    errors.warn(
        f"The gradients that the training step of {name!r} computes{where} are no mean over the "
        f"rows of a batch: those of {rows} rows differ by up to {distance:.3g} from the mean over "
        "two parts of them. Its loss is a sum, or compares rows with one another, as contrastive "
        "losses and mixup do. Each rank computes it of its own rows, so that the ranks train to "
        "other numbers than one process."
    )


def warn_of_untried_step(name, where, problem):
    """Warn that a custom step failed on parts of a batch.

    Arguments:
        name: the model's.
        where: as ``warn_of_step`` takes it.
        problem: the error, in a line.
    """
    errors.warn(
        f"The gradients that the training step of {name!r} computes{where} could not be checked on "
        f"parts of a batch: {problem.rstrip('.')}. If its loss is a sum, or compares rows with one "
        "another, the ranks train to other numbers than one process."
    )


# The loss of a model of tf.keras or Keras 3 ----------------------------------------------------


def check_loss(model, data, loss_of):
    """Check the loss of the first batch by ``check``, where ``loss_may_mix_rows``.

    Arguments:
        model: the one that is about to train.
        data: those that Keras passes to a step.
        loss_of: a function of the model and of such data, of fewer rows: their loss in inference.

    Raises:
        UnsupportedError: it contains a sum over rows.
    """
    keras = _keras.keras_of(model)
    tree = _keras.tree_of(keras)
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    rows = batch_parts.rows_of(leaves)
    if rows is None:
        return

    def loss_of_rows(places):
        some = tree.map_structure(lambda leaf: None if leaf is None else leaf[places], data)
        return float(loss_of(model, some))

    dtype = getattr(model, "compute_dtype", None) or "float32"
    check(model.name, keras, rows, loss_of_rows, dtype)


def loss_in_inference(model, data):
    """Return the loss of a model that computes eagerly, and leave its metrics as they are."""
    x, y, weights = _keras.keras_of(model).utils.unpack_x_y_sample_weight(data)
    with _keras.kept(model, metrics.variables(model)):
        outputs = model(x, training=False)
        if hasattr(model, "_compile_loss"):  # Keras 3
            if hasattr(model, "_compute_loss"):
                return model._compute_loss(x, y, outputs, weights, training=False)
            return model.compute_loss(x, y, outputs, weights)  # Keras before 3.4
        return model.compiled_loss(y, outputs, weights, regularization_losses=model.losses)


def loss_may_mix_rows(model):
    """Return whether the loss, by Keras' own training step, may be no mean over rows."""
    if not getattr(type(model).train_step, "__module__", "").startswith(KERAS):
        return False  # a custom one, whose loss is unknown
    layers = _keras.all_layers(model)
    if hasattr(model, "_compile_loss"):  # Keras 3
        adds = any(map(_adds_losses, {type(layer) for layer in layers}))
    else:
        adds = any(layer._losses or layer._eager_losses for layer in layers)
    return adds or any(map(may_mix_rows, _compiled_losses(model)))


def _adds_losses(kind):
    """Return whether user-defined methods of a class may add a loss."""
    return any(
        "add_loss" in getattr(getattr(function, "__code__", None), "co_names", ())
        for parent in kind.__mro__
        if not parent.__module__.startswith("keras.")
        for function in vars(parent).values()
    )
