"""What ranks of Keras 3 have in common on all its backends: state, and losses of the user's own.

The losses of tf.keras 2 are looked at in the same way.
"""

from .. import _keras, errors
from . import losses, metrics

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


def scaling(optimizer, share):
    """What has a ``LossScaleOptimizer`` scale the loss of this rank's share of the rows.

    So gradients overflow where those of one process would.

    Arguments:
        share: a function that gives the share in a loss's type of number.

    Returns:
        The method to replace, by its name; and a list, empty until a loss was scaled.
    """
    scaled = []  # type: list
    if not hasattr(optimizer, "inner_optimizer"):
        return {}, scaled
    scale_loss = optimizer.scale_loss

    def scale_share(loss):
        scaled.append(loss)
        return scale_loss(loss) * share(loss.dtype)

    return {"scale_loss": scale_share}, scaled


# Losses that may be no means ------------------------------------------------------------------


def check_loss(model, data, loss_of):
    """Check the loss of the first batch by ``losses.check``, where ``may_mix_rows``.

    Arguments:
        data: what Keras hands to a step.
        loss_of: a function of the model and of such data, of fewer rows: their loss in inference.

    Raises:
        UnsupportedError: it contains a sum over rows.
    """
    keras = _keras.keras_of(model)
    tree = losses.tree_of(keras)
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    rows = {leaf.shape[0] if getattr(leaf, "shape", None) else None for leaf in leaves}
    if len(rows) > 1 or None in rows:
        return

    def loss_of_rows(places):
        some = tree.map_structure(lambda leaf: None if leaf is None else leaf[places], data)
        return float(loss_of(model, some))

    dtype = getattr(model, "compute_dtype", None) or "float32"
    losses.check(model.name, keras, rows.pop(), loss_of_rows, dtype)


def loss_in_inference(model, data):
    """The loss of a model that computes eagerly. The state of its metrics stays."""
    x, y, weights = _keras.keras_of(model).utils.unpack_x_y_sample_weight(data)
    with _keras.kept(model, metrics.variables(model)):
        outputs = model(x, training=False)
        if hasattr(model, "_compile_loss"):  # Keras 3
            return model._compute_loss(x, y, outputs, weights, training=False)
        return model.compiled_loss(y, outputs, weights, regularization_losses=model.losses)


def may_mix_rows(model):
    """Whether the loss, by Keras' own training step, may be no mean over rows."""
    if not getattr(type(model).train_step, "__module__", "").startswith(losses.KERAS):
        return False  # what it computes is not known
    layers = _keras.all_layers(model)
    if hasattr(model, "_compile_loss"):  # Keras 3
        given = getattr(model._compile_loss, "_user_loss", None)
        adds = any(map(_adds_losses, {type(layer) for layer in layers}))
    else:
        given = model.compiled_loss._user_losses
        adds = any(layer._losses or layer._eager_losses for layer in layers)
    tree = losses.tree_of(_keras.keras_of(model))
    return adds or any(map(losses.may_mix_rows, tree.flatten(given)))


def _adds_losses(kind):
    """Whether methods of a class, or of its parents that are not Keras', may add any loss."""
    return any(
        "add_loss" in getattr(getattr(function, "__code__", None), "co_names", ())
        for parent in kind.__mro__
        if not parent.__module__.startswith("keras.")
        for function in vars(parent).values()
    )
