"""Queries on objects: whether one is a model without Keras, or a variable.

This imports no TensorFlow.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List


def is_native(model: "Any") -> bool:
    """Return whether an object is a model without Keras: callable, with variables."""
    if not callable(model) or isinstance(model, type):
        return False
    kinds = [(c.__module__, c.__name__) for c in type(model).__mro__]
    if any(m.split(".")[0] in ("keras", "tf_keras") or ".keras." in m for m, _ in kinds):
        return False
    ours = {name for module, name in kinds if module.startswith("tensorflow")}
    if "Variable" in ours or "Tensor" in ours:
        return False
    return bool(ours & {"Module", "Function"}) or any(map(is_variable, held(model)))


def held(model: "Any") -> "List[Any]":
    """Return the values of an object's attributes."""
    return list(getattr(model, "__dict__", {}).values())


def layers_reached(model: "Any") -> "List[Any]":
    """Return the objects that a model's call can reach, and the layers within those of Keras."""
    from ..._runtime.containers import reached  # not at start-up

    def is_of_keras(value: "Any") -> bool:
        return hasattr(value, "_flatten_layers")

    root = getattr(model, "python_function", model)  # of a tf.function
    return [
        part
        for value in reached([root], is_of_keras)
        for part in (value._flatten_layers() if is_of_keras(value) else [value])
    ]


def is_variable(value: "Any") -> bool:
    """Return whether a value is a variable of TensorFlow's."""
    kinds = type(value).__mro__
    return any(c.__name__ == "Variable" and c.__module__.startswith("tensorflow") for c in kinds)
