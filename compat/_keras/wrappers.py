"""Wrappers of ``multi_gpu_model`` and ``make_parallel``, of any Keras', by how they are wired."""

from typing import Any, Iterable, List, Set, Tuple

from .. import _keras


def inside(model: "Any") -> "Any":
    """Return the model that computes all outputs of ``model`` from all its inputs, or None.

    The wrapper joins them along the rows; compat's own passes on those of one call. The calls of a
    siamese network are on an input each, so it is none.
    """
    found = set()
    inputs = {id(tensor) for tensor in getattr(model, "inputs", None) or ()}
    for output in _outputs(model):
        layer, sources = _made_of(output)
        if not _joins_rows(layer) and not (len(sources) == 1 and _is_identity(model, layer)):
            return None
        for source in sources:
            inner, parts = _made_of(source)
            if not hasattr(inner, "layers") or _inputs_of(parts) != inputs:
                return None
            found.add(inner)
    return found.pop() if len(found) == 1 else None


def splits_batches(model: "Any") -> bool:
    """Return whether ``model`` is a wrapper that calls the model inside on parts of a batch."""
    return inside(model) is not None and _joins_rows(_made_of(_outputs(model)[0])[0])


def _outputs(model: "Any") -> "List[Any]":
    """Return the symbolic outputs; Keras 3 raises an error where a model has none yet."""
    found = (getattr(model, "outputs", None) if model.built else None) or []
    # A model that was called with a tensor of a graph may have such ones for its outputs.
    return found if all(hasattr(tensor, "_keras_history") for tensor in found) else []


def _joins_rows(layer: "Any") -> bool:
    kind = type(layer).__name__
    if kind == "Merge":  # of Keras 1, in Keras before 2.2
        return bool(layer.mode == "concat" and layer.concat_axis == 0)
    return bool(kind == "Concatenate" and layer.axis == 0)


def _is_identity(model: "Any", layer: "Any") -> bool:
    """Return whether a layer is such as ``_keras.identity`` makes."""
    kind = type(layer).__name__
    if kind == "LeakyReLU":
        return float(getattr(layer, "negative_slope", getattr(layer, "alpha", 0))) == 1
    return kind == "Activation" and layer.activation is _keras.keras_of(model).activations.linear


def _made_of(tensor: "Any") -> "Tuple[Any, List[Any]]":
    """Return the layer that made a symbolic tensor, and the tensors that it made it of."""
    layer, index = tensor._keras_history[:2]
    nodes = getattr(layer, "_inbound_nodes", None) or layer.inbound_nodes  # before Keras 2.1.3
    tensors = nodes[index].input_tensors
    return layer, list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _inputs_of(tensors: "Iterable[Any]") -> "Set[int]":
    """Return the model's inputs, by their ids, that these tensors are made of."""
    todo = list(tensors)
    for tensor in todo:  # which grows meanwhile
        todo += [
            source for source in _made_of(tensor)[1] if all(source is not other for other in todo)
        ]
    return {id(tensor) for tensor in todo if type(_made_of(tensor)[0]).__name__ == "InputLayer"}
