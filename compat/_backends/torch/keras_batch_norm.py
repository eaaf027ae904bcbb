"""Layers of Keras that normalize by the mean and the variance of the whole batch.

Keras has this for TensorFlow and JAX, and refuses it on torch.
"""

import contextlib
import functools
from typing import Any, Callable, Iterable

import torch

from ..._runtime import patching
from .reductions import MoreReductions


def over_replicas(layers: "Iterable[Any]", current: "Callable[[], Any]") -> contextlib.ExitStack:
    """Return a context in which these layers do that.

    Arguments:
        layers: layers of batch normalization.
        current: a function that returns the ``ReplicaReductions`` of the replica that runs, or None
            where one device computes the whole batch.
    """
    patched = contextlib.ExitStack()
    for layer in layers:
        if patching.find(layer, "_moments") is not None:
            continue  # within another model's call
        moments = functools.partial(_moments, layer, layer._moments, current)
        patched.enter_context(patching.replaced(layer, synchronized=False, _moments=moments))
    return patched


def _moments(layer, plain, current, inputs, mask):
    reducing = current()
    if reducing is None or len(reducing.sizes) == 1:
        return plain(inputs, mask)
    if reducing.turn is None:
        reducing.reductions.in_layers = True
        raise MoreReductions
    return whole_moments(reducing, layer, inputs, mask)


def whole_moments(reductions: Any, layer: Any, inputs: torch.Tensor, mask: Any) -> Any:
    """Return mean and variance of the whole batch, as a layer of Keras would.

    Arguments:
        reductions: the ``ReplicaReductions``, or those of ranks.
        layer: the layer.
        inputs: this replica's rows.
        mask: which of them count, or None.
    """
    if mask is not None:
        return _masked_moments(reductions, layer, inputs, mask)
    mean, variance, _ = reductions.moments(inputs, list(layer._reduction_axes))
    return mean.flatten(), variance.flatten()


def _masked_moments(reducing, layer, inputs, mask):
    """Return mean and variance of what is not masked, as Keras computes them."""
    axes = list(layer._reduction_axes)
    mask = mask.unsqueeze(-1).expand(inputs.shape)

    def total(values):
        return reducing.reduce("sum", values.sum(axes, keepdim=True))

    count = total(mask.to(inputs.dtype)) + _epsilon()
    mean = total(torch.where(mask, inputs, 0)) / count
    variance = total(torch.where(mask, inputs - mean, 0).square()) / count
    return mean.squeeze(), variance.squeeze()


def _epsilon():
    import keras

    return keras.config.epsilon()
