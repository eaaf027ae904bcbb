"""The state of a Keras 3 model: which variables ranks average, and which are the same on all."""

from .. import _keras, errors


def averaged(model, by_users=False):
    """Return the moving averages and their like.

    Floats that layers set as they compute.

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
    """Return the variables that are the same on all ranks.

    Seeds and metrics are no weights.
    """
    own = _states(model)
    return [variable for variable in model.weights if id(variable) not in own]


def _states(model):
    """Return the ids of those that have a row for each row of the batch.

    The states of stateful RNNs.
    """
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
    """Return what has a ``LossScaleOptimizer`` scale the loss of this rank's share of the rows.

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
