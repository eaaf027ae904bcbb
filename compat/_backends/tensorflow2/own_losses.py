"""Losses in ranks: whether they are means over the rows of a batch."""

import tensorflow as tf

from ... import _keras
from ..._ranks import losses


def may_mix_rows(model):
    """Whether the loss, by Keras' own training step, may be no mean over rows."""
    if not getattr(type(model).train_step, "__module__", "").startswith(losses.KERAS):
        return False  # what it computes is not known
    given = tf.nest.flatten(model.compiled_loss._user_losses)
    if any(map(losses.may_mix_rows, [loss for loss in given if loss is not None])):
        return True
    return any(layer._losses or layer._eager_losses for layer in _keras.all_layers(model))


def check(model, data):
    """Check that the model's loss of a batch is the mean over its rows: see ``losses.check``."""
    keras = _keras.keras_of(model)
    rows = len(tf.nest.flatten(data)[0])

    def loss_of(part):
        some = tf.nest.map_structure(
            lambda array: None if array is None else tf.convert_to_tensor(array[part]), data
        )
        x, y, weights = keras.utils.unpack_x_y_sample_weight(some)
        outputs = model(x, training=False)
        loss = model.compiled_loss(y, outputs, weights, regularization_losses=model.losses)
        return float(loss)

    trackers = [variable for metric in model.metrics for variable in metric.variables]
    with _keras.kept(model, trackers):
        dtype = getattr(model, "compute_dtype", None) or "float32"
        losses.check(model.name, keras, rows, loss_of, dtype)
