"""Steps of the user's own (``train_step`` and the like), in tf.keras and Keras 3.

Keras' own steps call the model. A step of one's own may call the model's parts instead, as those
of GANs and autoencoders do. So these parts run on several devices as well. ``UsageCheck`` finds
steps that reach none of them.
"""

from typing import Any, List, Optional, Sequence, Type

from .. import _keras

_STEPS_OF_TRAINING = ("train_step", "compute_loss")
_STEPS = (*_STEPS_OF_TRAINING, "test_step", "predict_step")


def has_own_steps(model: "Any") -> bool:
    """Return whether a step of this model is the user's."""
    return any(_keras.is_users(getattr(type(model), name, None)) for name in _STEPS)


def has_own_training(model: "Any") -> bool:
    """Return whether the user's code computes the loss of a training step, or does all of it."""
    return any(_keras.is_users(getattr(type(model), name, None)) for name in _STEPS_OF_TRAINING)


def called_models(model: "Any") -> "List[Any]":
    """Return the models within ``model`` that a step of the user's may call."""
    if not has_own_steps(model):
        return []
    parts = [layer for layer in _keras.all_layers(model) if layer is not model]
    return [part for part in parts if _keras.keras_of(part) is not None]


def install(kind: "Type[Any]", model: "Any", devices: "Sequence[str]", first: str) -> None:
    """Have a model run on several devices, and the models that steps of its own call.

    Arguments:
        kind: the class of the call that does it. It has an attribute ``belongs_to_step``: whether
            the model became replicated with the one whose steps call it.
        first: where a model stays that cannot be divided, for the warning.
    """
    kind(devices).install(model)
    for part in called_models(model):
        reason = _keras.undivided(part)
        if reason:
            _keras.warn_not_divided(part, reason, first)
        elif kind.of(part) is None:
            kind(devices, belongs_to_step=True).install(part)


def remove(kind: "Type[Any]", model: "Any") -> bool:
    """Make a model plain, and the models within that became replicated with it.

    Returns:
        Whether there was one.
    """
    changed = False
    for part in _keras.all_layers(model):
        call = kind.of(part)
        if call is not None and (part is model or call.belongs_to_step):
            call.remove(part)
            changed = True
    return changed


def why_unsplit(model: "Any") -> "Optional[str]":
    """Why training steps of the user's own split no batch, a text for ``UsageCheck``, or None."""
    if not has_own_steps(model):
        return None
    within = {id(part) for part in called_models(model)}
    names = [f"model.{name}" for name, value in vars(model).items() if id(value) in within]
    return (
        f"The first step of training {model.name!r} ran on one device: its train_step() calls "
        "neither the model nor a model within it "
        f"({', '.join(sorted(names)) or 'there is none'}). Write compat.parallelize(part) for each "
        "model that it calls; put layers that it calls by themselves into a keras.Model first."
    )
