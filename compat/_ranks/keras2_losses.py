"""Losses of Keras 2 that are not means over rows: refused, or tried on the first batch."""

import numpy as np

from .. import _keras, errors
from . import losses
from .keras2_divisors import masks_of


def refuse_sums(model):
    """Refuse losses that are not means, by their ``reduction``, which Keras 2.3 and tf.keras have.

    Raises:
        UnsupportedError: there is one.
    """
    for loss in getattr(model, "loss_functions", None) or ():
        reduction = getattr(loss, "reduction", None)
        if reduction in ("sum", "none"):
            raise errors.UnsupportedError(
                "{!r} cannot train on several ranks with a loss of reduction={!r}: ranks average "
                "means over rows. Use reduction='sum_over_batch_size', and a learning rate times "
                "the batch size for the steps of a sum.".format(model.name, reduction)
            )


def check_loss(model, inputs, rows):
    """Try a custom loss, which may be no mean over rows, on this rank's first batch.

    Arguments:
        model: the one whose loss it is.
        inputs: those of its function that trains: inputs, targets and sample weights.
        rows: of the batch.

    Raises:
        UnsupportedError: it contains a sum over rows.
    """
    K = _keras.keras_of(model).backend
    functions = [loss for loss in getattr(model, "loss_functions", None) or () if loss is not None]
    custom = [loss for loss in functions if losses.may_mix_rows(loss)]
    of_weights = set(map(id, model.get_losses_for(None)))
    added = [loss for loss in model.losses if id(loss) not in of_weights]
    if not custom and not added or any(mask is not None for mask in masks_of(model).values()):
        return
    phase = [K.learning_phase()] if isinstance(inputs[-1], (int, float)) else []
    feeds_of_weights = model._feed_sample_weights
    feeds = model._feed_inputs + model._feed_targets + feeds_of_weights
    function = K.function(feeds + phase, [model.total_loss])
    arrays = inputs[: len(feeds)]
    if any(np.any(weights != 1) for weights in arrays[len(feeds) - len(feeds_of_weights) :]):
        return

    def loss_of(places):
        return float(function([array[places] for array in arrays] + [0] * len(phase))[0])

    losses.check(model.name, None, rows, loss_of)
