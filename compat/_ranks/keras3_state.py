"""The state of a Keras 3 model: which variables ranks average, and which are the same on all."""

from typing import Any, List

from .. import _keras, errors


def averaged(model, by_users=False):
    """Return moving averages and similar variables: floats that layers set as they compute.

    Frozen weights are not among them, nor the states of stateful RNNs.

    Arguments:
        model: the one whose layers have them.
        by_users: whether to return those of user-defined layers only.
    """
    variables = {
        id(variable): variable
        for layer in _keras.all_layers(model)
        if not (by_users and type(layer).__module__.startswith("keras."))
        for variable in layer._non_trainable_variables
        if "float" in str(variable.dtype)
    }
    states = _states(model) if variables else ()
    return [variable for key, variable in variables.items() if key not in states]


def same(model):
    """Return the weights that are the same on all ranks. Seeds and metrics are not weights."""
    states = _states(model)
    return [variable for variable in model.weights if id(variable) not in states]


def _states(model):
    """Return the ids of the states of stateful RNNs, which have a row for each sample."""
    keras = _keras.keras_of(model)
    return {
        id(state)
        for layer in _keras.all_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in _keras.tree_of(keras).flatten(layer.states)
        if state is not None
    }


def warn_of_mean(variable):
    """Warn that ranks have set a variable to different values, of which they take the mean."""
    errors.warn(
        "Each rank sets {!r} from its own rows. All ranks get the mean, weighted by rows, which is "
        "one process's value for a moving average; it is not for a sum over rows. Divide such a "
        "sum by the number of rows.".format(variable.path)
    )


def scaling(optimizer, share):
    """Return a method for a ``LossScaleOptimizer`` that scales losses by this rank's share, too.

    So gradients overflow where those of one process would.

    Arguments:
        optimizer: that of the model.
        share: a function of a loss's type of number, which returns this rank's share of the rows.

    Returns:
        The method to replace, by its name; and a list, empty until a loss was scaled.
    """
    scaled: List[Any] = []
    if not hasattr(optimizer, "inner_optimizer"):
        return {}, scaled
    scale_loss = optimizer.scale_loss

    def scale_share(loss):
        scaled.append(loss)
        return scale_loss(loss) * share(loss.dtype)

    return {"scale_loss": scale_share}, scaled
