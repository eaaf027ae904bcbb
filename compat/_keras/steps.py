"""User-defined steps (``train_step`` and the like), in tf.keras and Keras 3.

Keras' own steps call the model. A user-defined step may call the model's parts instead, as those
of GANs and autoencoders do. So these parts run on several devices as well. ``UsageCheck`` reports
steps that reach none of them.
"""

import ast
import functools
import inspect
import textwrap
from typing import Any, List, Optional, Sequence, Type

from .. import _keras

_STEPS_OF_TRAINING = ("train_step", "compute_loss")
_STEPS = (*_STEPS_OF_TRAINING, "test_step", "predict_step")


def has_own_steps(model: "Any") -> bool:
    """Return whether a step of a model is user-defined."""
    return any(_keras.is_users(getattr(type(model), name, None)) for name in _STEPS)


def has_own_training(model: "Any") -> bool:
    """Return whether the training step of a model, or its loss, is user-defined."""
    return any(_keras.is_users(getattr(type(model), name, None)) for name in _STEPS_OF_TRAINING)


def weighs_batches(model: "Any") -> bool:
    """Return whether Keras' steps count a batch by its rows in the loss of an epoch.

    Those of Keras before 3.2 call ``_loss_tracker.update_state(loss)`` without a weight.
    """
    return _weighs_batches(next(k for k in type(model).__mro__ if not _keras.is_users(k)))


@functools.lru_cache(maxsize=None)
def _weighs_batches(kind: "Type[Any]") -> bool:
    methods = [method for base in kind.__mro__ for method in vars(base).values()]
    return any(_weighs_batch(method) for method in methods if inspect.isfunction(method))


def _weighs_batch(method: "Any") -> bool:
    """Return whether a method calls ``_loss_tracker.update_state(loss, sample_weight=...)``."""
    if "_loss_tracker" not in method.__code__.co_names:
        return False
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            path = node.func.attr, getattr(node.func.value, "attr", "")
            weights = [each for each in node.keywords if each.arg == "sample_weight"]
            if path == ("update_state", "_loss_tracker") and weights:
                return True
    return False


def called_models(model: "Any") -> "List[Any]":
    """Return the models within ``model`` that a user-defined step may call."""
    if not has_own_steps(model):
        return []
    parts = [layer for layer in _keras.all_layers(model) if layer is not model]
    return [part for part in parts if _keras.keras_of(part) is not None]


def install(kind: "Type[Any]", model: "Any", devices: "Sequence[str]", first: str) -> None:
    """Have a model run on several devices, and the models that its user-defined steps call.

    Arguments:
        kind: the class of the replicated call. It has an attribute ``belongs_to_step``: whether
            the model became replicated with the one whose steps call it.
        model: the model.
        devices: the devices.
        first: the device of models that cannot be split, for the warning.
    """
    kind(devices).install(model)
    for part in called_models(model):
        reason = _keras.unsplit_reason(part)
        if reason:
            _keras.warn_left_unsplit(part, reason, first)
        elif kind.of(part) is None:
            kind(devices, belongs_to_step=True).install(part)


def remove(kind: "Type[Any]", model: "Any") -> bool:
    """Make a model plain, and the models within that became replicated with it.

    Returns:
        Whether one was replicated.
    """
    changed = False
    for part in _keras.all_layers(model):
        call = kind.of(part)
        if call is not None and (part is model or call.belongs_to_step):
            call.remove(part)
            changed = True
    return changed


def why_unsplit(model: "Any") -> "Optional[str]":
    """Return why user-defined training steps split no batch, for ``UsageCheck``, or None."""
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
