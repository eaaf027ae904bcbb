"""Batch normalization by the statistics of the whole batch: which models and layers ask for it."""

from typing import Any, Callable, Collection, Dict, Iterable, List, Tuple

from . import patching

_ASKED = "_compat_sync_batch_norm"  # an attribute of models
_OF_MODEL = "_compat_sync_batch_norm_of_model"  # of layers
_SYNCHRONIZED = {"SyncBatchNormalization", "SyncBatchNorm"}
_CLASSES = {"BatchNormalization", "BatchNormalizationBase", "BatchNormalizationV1"}
_CLASSES |= {"BatchNorm", "BatchNorm_v1", "_BatchNorm"} | _SYNCHRONIZED


def ask(model: "Any", wanted: bool) -> None:
    """Note whether all batch normalization of a model is to use the whole batch's statistics."""
    _note(model, _ASKED, wanted)


def ask_layer(layer: "Any", wanted: bool) -> bool:
    """Note the same of a layer of a model, for others that contain it; return if that is new."""
    return _note(layer, _OF_MODEL, wanted)


def _note(part: "Any", name: str, wanted: bool) -> bool:
    is_new = _is_noted(part, name) != wanted
    if is_new and wanted:
        patching.attach(part, name, True)
    elif is_new:
        patching.detach(part, name)
    return is_new


def _is_noted(part: "Any", name: str) -> bool:
    return getattr(part, "__dict__", {}).get(name) is True


def is_asked(model: "Any") -> bool:
    """Return whether it is, by an argument of ``parallelize()`` or as configured."""
    return _is_noted(model, _ASKED)


def layers(named: "Iterable[Tuple[str, Any]]") -> "Dict[str, Any]":
    """Return the layers among these, each with its name, that are batch normalization."""
    return {name or type(part).__name__: part for name, part in named if _is_a(part, _CLASSES)}


def requested(
    model: "Any",
    layers_of: "Callable[[Any], Iterable[Any]]",
    is_model_asked: "Callable[[Any], bool]" = is_asked,
) -> "List[Any]":
    """Return a model's layers of batch normalization that are to use the whole batch's statistics.

    Arguments:
        model: the model; others within it may be asked for that, too.
        layers_of: a function that returns the layers of a model, at any depth.
        is_model_asked: a function that returns whether a model is asked for that.
    """
    parts = list(layers_of(model))
    asked = filter(is_model_asked, [model, *parts])
    within = {id(layer) for part in asked for layer in layers_of(part)}
    found = layers((str(id(part)), part) for part in parts).values()
    return [layer for layer in found if id(layer) in within or asks(layer)]


def asks(layer: "Any") -> bool:
    """Return whether a layer uses the whole batch's statistics whichever model calls it.

    By itself, or as a part of a model that is asked for it.
    """
    by_itself = getattr(layer, "synchronized", False) is True or _is_a(layer, _SYNCHRONIZED)
    return by_itself or _is_noted(layer, _OF_MODEL)


def _is_a(layer: "Any", names: "Collection[str]") -> bool:
    return any(kind.__name__ in names for kind in type(layer).__mro__)
