"""Batch normalization by the statistics of the whole batch: which models and layers ask for it."""

from typing import Any, Collection, Dict, Iterable, Tuple

from . import patching

_ASKED = "_compat_sync_batch_norm"  # an attribute of models
_SYNCHRONIZED = {"SyncBatchNormalization", "SyncBatchNorm"}
_CLASSES = {"BatchNormalization", "BatchNormalizationBase", "BatchNormalizationV1"}
_CLASSES |= {"BatchNorm", "BatchNorm_v1", "_BatchNorm"} | _SYNCHRONIZED


def ask(model: "Any", wanted: bool) -> None:
    """Note whether all batch normalization of a model is to use the whole batch's statistics."""
    if wanted:
        patching.attach(model, _ASKED, True)
    elif is_asked(model):
        patching.detach(model, _ASKED)


def is_asked(model: "Any") -> bool:
    """Return whether it is, by an argument of ``parallelize()`` or as configured."""
    return getattr(model, "__dict__", {}).get(_ASKED) is True


def layers(named: "Iterable[Tuple[str, Any]]") -> "Dict[str, Any]":
    """Return the layers among these, each with its name, that are batch normalization."""
    return {name or type(part).__name__: part for name, part in named if _is_a(part, _CLASSES)}


def asks(layer: "Any") -> bool:
    """Return whether a layer is one that uses the whole batch's statistics by itself."""
    return getattr(layer, "synchronized", False) is True or _is_a(layer, _SYNCHRONIZED)


def _is_a(layer: "Any", names: "Collection[str]") -> bool:
    return any(kind.__name__ in names for kind in type(layer).__mro__)
