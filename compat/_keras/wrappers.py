"""Wrappers of ``multi_gpu_model`` and ``make_parallel``, recognised by their layers."""

from typing import Any, Iterable, List, Set, Tuple

from .. import _keras


def inside(model: "Any") -> "Any":
    """Return the model that computes all outputs of ``model`` from all its inputs, or None.

    The wrapper concatenates them along the batch dimension; compat's own returns those of one call.
    A siamese network calls a model on one input at a time, so it is not a wrapper.
    """
    models = set()
    inputs = {id(tensor) for tensor in getattr(model, "inputs", None) or ()}
    for output in _outputs(model):
        layer, sources = _made_of(output)
        if not _joins_rows(layer) and not (len(sources) == 1 and _is_identity(model, layer)):
            return None
        for source in sources:
            inner, parts = _made_of(source)
            if not hasattr(inner, "layers") or _inputs_of(parts) != inputs:
                return None
            models.add(inner)
    return models.pop() if len(models) == 1 else None


def splits_batches(model: "Any") -> bool:
    """Return whether ``model`` is a wrapper that calls the model inside on parts of a batch."""
    return inside(model) is not None and _joins_rows(_made_of(_outputs(model)[0])[0])


def _outputs(model: "Any") -> "List[Any]":
    """Return a model's symbolic outputs; Keras 3 raises an error where it has none yet."""
    outputs = (getattr(model, "outputs", None) if model.built else None) or []
    # A model that was called with a tensor of a graph may have such ones for its outputs.
    return outputs if all(hasattr(tensor, "_keras_history") for tensor in outputs) else []


def _joins_rows(layer: "Any") -> bool:
    kind = type(layer).__name__
    if kind == "Merge":  # of Keras 1, in Keras before 2.2
        return bool(layer.mode == "concat" and layer.concat_axis == 0)
    return bool(kind == "Concatenate" and layer.axis == 0)


def _is_identity(model: "Any", layer: "Any") -> bool:
    """Return whether a layer is like those of ``_keras.identity``."""
    kind = type(layer).__name__
    if kind == "LeakyReLU":
        return float(getattr(layer, "negative_slope", getattr(layer, "alpha", 0))) == 1
    return kind == "Activation" and layer.activation is _keras.keras_of(model).activations.linear


def _made_of(tensor: "Any") -> "Tuple[Any, List[Any]]":
    """Return the layer that made a symbolic tensor, and its inputs."""
    layer, index = tensor._keras_history[:2]
    nodes = getattr(layer, "_inbound_nodes", None) or layer.inbound_nodes  # before Keras 2.1.3
    tensors = nodes[index].input_tensors
    return layer, list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _inputs_of(tensors: "Iterable[Any]") -> "Set[int]":
    """Return the ids of the model's inputs from which tensors are computed."""
    todo = list(tensors)
    for tensor in todo:  # which grows meanwhile
        todo += [
            source for source in _made_of(tensor)[1] if all(source is not other for other in todo)
        ]
    return {id(tensor) for tensor in todo if type(_made_of(tensor)[0]).__name__ == "InputLayer"}
