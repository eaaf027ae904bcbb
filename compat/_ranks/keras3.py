"""What ranks of Keras 3 have in common on all its backends: state, and losses of the user's own."""

from .. import _keras, errors
from . import losses

# State ----------------------------------------------------------------------------------------


def averaged(model, by_users=False):
    """The moving averages and their like: floats that layers set as they compute.

    Not weights that are frozen, nor what is a rank's own.

    Arguments:
        by_users: whether it is to be those alone that belong to layers of the user's own.
    """
    found = {
        id(variable): variable
        for layer in _keras.all_layers(model)
        if not (by_users and type(layer).__module__.startswith("keras."))
        for variable in layer._non_trainable_variables
        if "float" in str(variable.dtype)
    }
    own = _states(model) if found else ()
    return [variable for key, variable in found.items() if key not in own]


def same(model):
    """The variables that are the same on all ranks. Seeds and metrics are no weights."""
    own = _states(model)
    return [variable for variable in model.weights if id(variable) not in own]


def _states(model):
    """The ids of those that have a row for each row of the batch: the states of stateful RNNs."""
    keras = _keras.keras_of(model)
    return {
        id(state)
        for layer in _keras.all_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in keras.tree.flatten(layer.states)
        if state is not None
    }


def warn_of_mean(variable):
    """Say what becomes of a variable that each rank has set to another value."""
    errors.warn(
        "Each rank sets {!r} from its own rows. All ranks get the mean, weighted by rows, which is "
        "one process's value for a moving average; it is not for a sum over rows. Divide such a "
        "sum by the number of rows.".format(variable.path)
    )


# Losses that may be no means ------------------------------------------------------------------


def check_loss(model, data, loss_of_data):
    """Check the loss of the first batch by ``losses.check``, where it may be no mean.

    Arguments:
        data: what Keras hands to a step.
        loss_of_data: a function of such data, of fewer rows: their loss in inference, as a float.

    Raises:
        UnsupportedError: it contains a sum over rows.
    """
    keras = _keras.keras_of(model)
    if not may_mix_rows(model):
        return
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    rows = {leaf.shape[0] if getattr(leaf, "shape", None) else None for leaf in leaves}
    if len(rows) > 1 or None in rows:
        return

    def loss_of(places):
        return loss_of_data(
            keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[places], data)
        )

    losses.check(model.name, keras, rows.pop(), loss_of, model.compute_dtype)


def check_loss_eagerly(model, data):
    """``check_loss`` where a model computes eagerly, and keeps the state of its metrics.

    Raises:
        UnsupportedError: as ``check_loss``.
    """
    keras = _keras.keras_of(model)

    def loss_of(data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs = model(x, training=False)
        return float(model._compute_loss(x, y, outputs, weights, training=False))

    with _keras.kept(model, model.metrics_variables):
        check_loss(model, data, loss_of)


def may_mix_rows(model):
    """Whether the loss, by Keras' own training step, may be no mean over rows."""
    if not type(model).train_step.__module__.startswith("keras."):
        return False  # what it computes is not known
    given = _keras.keras_of(model).tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    if any(map(losses.may_mix_rows, [loss for loss in given if loss is not None])):
        return True
    return any(map(_adds_losses, {type(layer) for layer in _keras.all_layers(model)}))


def _adds_losses(kind):
    """Whether methods of a class, or of its parents that are not Keras', may add any loss."""
    return any(
        "add_loss" in getattr(getattr(function, "__code__", None), "co_names", ())
        for parent in kind.__mro__
        if not parent.__module__.startswith("keras.")
        for function in vars(parent).values()
    )
