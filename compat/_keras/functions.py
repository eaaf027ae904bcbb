"""The functions that a model of Keras 2 makes of its graph, and how they are rebuilt."""

import contextlib
import types
from typing import Any, Iterable, Iterator, Sequence

# Functions of a graph, each made by a method of the model: ``maker_of(name)``.
FUNCTIONS = ("train_function", "test_function", "predict_function")
# More of TensorFlow 1.13's tf.keras, for epochs: their metrics accumulate from batch to batch.
OF_EPOCHS = {"train_function": "_fit_function", "test_function": "_eval_function"}
ALL_FUNCTIONS = (*FUNCTIONS, *OF_EPOCHS.values())


def maker_of(function: str) -> str:
    """Return the name of the method by which Keras 2 makes one of a model's functions."""
    return "_make_" + function.lstrip("_")


def trains(function: str) -> bool:
    """Return whether the function of this name is one that trains."""
    return function in ("train_function", "_fit_function")


def function_of_epochs(model: "Any", function: str) -> str:
    """Return the name of the function that ``fit`` or ``evaluate`` calls instead."""
    name = OF_EPOCHS.get(function, function)
    return name if hasattr(model, maker_of(name)) else function


def is_layer(thing: "Any") -> bool:
    """Return whether an object is a layer, or a model, of tf.keras or Keras 3."""
    kinds = type(thing).__mro__
    return any(kind.__name__ == "Layer" and not is_users(kind) for kind in kinds)


def is_users(thing: "Any") -> bool:
    """Return whether a class or a function is user-defined, not Keras' own."""
    package = (getattr(thing, "__module__", None) or "keras").split(".")[0]
    return package not in ("keras", "tf_keras", "tensorflow", "tensorflow_core")


def has_keras_methods(layer: "Any", names: "Iterable[str]", others: "Sequence[str]" = ()) -> bool:
    """Return whether a layer has methods of these names, all of them Keras' own.

    Arguments:
        layer: the layer.
        names: those of the methods.
        others: packages whose methods may stand for Keras' own.
    """
    owners = [next((k for k in type(layer).__mro__ if n in vars(k)), None) for n in names]
    known = [owner for owner in owners if owner is not None]
    foreign = [owner for owner in known if owner.__module__.partition(".")[0] not in others]
    return len(known) == len(owners) and not any(map(is_users, foreign))


def is_users_function(function: "Any") -> bool:
    """Return whether a function that steps call was made neither by Keras nor by compat."""
    kind = function if isinstance(function, types.FunctionType) else type(function)
    return is_users(kind) and kind.__module__.split(".")[0] != __name__.split(".")[0]


@contextlib.contextmanager
def rebuilding_functions(model: "Any") -> "Iterator[None]":
    """Have a model of Keras 2 rebuild its functions after a block that changes how it makes them.

    Keras makes new variables for the optimizer's state with every train function. Their values are
    copied from the old ones. A function by which a script or another library has replaced Keras'
    stays. ``model`` is None where it is not built yet.
    """
    attributes = vars(model) if model is not None else {}
    made = [name for name in ALL_FUNCTIONS if attributes.get(name) is not None]
    made = [name for name in made if not is_users_function(attributes[name])]
    train = [function for function in made if trains(function)]
    state = model.optimizer.get_weights() if train else None
    yield
    for function in made:
        setattr(model, function, None)
    if state is not None:
        getattr(model, maker_of(train[0]))()
        model.optimizer.set_weights(state)
