"""Batch normalization by the statistics of the whole batch: layers of Keras in replicas."""

import contextlib
from typing import Any, Dict, Iterable, Iterator, List, Sequence

import tensorflow as tf

from ... import _keras
from ..._runtime import patching, synchronized

# The methods that a user's class may define in place of Keras'.
_METHODS = ("call", "_moments", "_calculate_mean_and_var", "_assign_moving_average")


def requested(model: "Any", layers: "Iterable[Any]") -> "List[Any]":
    """Return the layers of batch normalization that are to use the whole batch's statistics.

    Arguments:
        model: the model that is parallelized.
        layers: its layers.
    """
    is_asked = synchronized.is_asked(model)
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    kinds = synchronized.layers(named)
    return [
        layer
        for name, layer in named
        if (name in kinds and synchronized.asks(layer))
        or (is_asked and (name in kinds or hasattr(layer, "moving_mean")))
    ]


def requested_within(model: "Any") -> "List[Any]":
    """Return the built layers of a rank's model that are to use the whole batch's statistics.

    Models within it may ask for them, too.
    """
    layers = _keras.all_layers(model)
    owners = [layer for layer in layers if layer is model or synchronized.is_asked(layer)]
    found = [layer for owner in owners for layer in requested(owner, _keras.all_layers(owner))]
    return list({id(layer): layer for layer in found if layer.built}.values())


def is_synchronizable(layer: "Any") -> bool:
    """Return whether a layer is batch normalization as Keras has it, of all rows alike."""
    is_of_parts = getattr(layer, "virtual_batch_size", None) is not None
    if is_of_parts or getattr(layer, "renorm", False) or not hasattr(layer, "_moments"):
        return False
    methods = [name for name in _METHODS if hasattr(layer, name)]
    # Horovod's own layer asks for the statistics of all ranks, weighted alike.
    return _keras.has_keras_methods(layer, methods, others=["horovod"])


@contextlib.contextmanager
def synchronizing(layers: "Sequence[Any]", reductions: "Any") -> "Iterator[None]":
    """Let layers, within replicas or ranks, normalize by the statistics of the whole batch.

    Arguments:
        layers: the layers.
        reductions: the ``BatchReductions`` of replicas, or the ``RankedReductions`` of a step.
    """
    totals: "Dict[int, tf.Tensor]" = {}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            kind = _KerasLayer if hasattr(layer, "_assign_moving_average") else _Keras3Layer
            for owner, attributes in kind(layer, reductions, totals).replacements():
                stack.enter_context(patching.replaced(owner, **attributes))
        yield


class _KerasLayer:
    """A layer of tf.keras, without its fused kernel.

    Arguments:
        totals: by the layers' ids, how many elements were normalized last.
    """

    def __init__(self, layer, reductions, totals):
        self.layer, self.reductions, self.totals = layer, reductions, totals
        self.moments, self.assign = layer._moments, getattr(layer, "_assign_moving_average", None)
        # Fused kernels return the variance of a sample for the moving average.
        self.is_unbiased = bool(getattr(layer, "fused", False))

    def replacements(self):
        """Return pairs of an object and what replaces its attributes."""
        attributes = {"_moments": self._moments, "_assign_moving_average": self._assign}
        if self.is_unbiased:
            attributes["fused"] = False
        return [(self.layer, attributes)]

    def _moments(self, inputs, reduction_axes, keep_dims=False, mask=None):
        if not self.reductions.applies_to(self.layer):
            return self.moments(inputs, reduction_axes, keep_dims, *[mask][: mask is not None])
        total, *moments = _moments(self.reductions, inputs, reduction_axes, mask, 0)
        if self.reductions.updates_averages():
            self.totals[id(self.layer)] = total
        return moments if keep_dims else [tf.squeeze(m, reduction_axes) for m in moments]

    def _assign(self, variable, value, *args, **kwargs):
        if not self.reductions.applies_to(self.layer):
            return self.assign(variable, value, *args, **kwargs)
        if not self.reductions.updates_averages():
            return variable
        if self.is_unbiased and variable is self.layer.moving_variance:
            total = tf.reshape(self.totals[id(self.layer)], [])
            value *= tf.cast(total / tf.maximum(total - 1, 1), value.dtype)
        return self.assign(variable, value, *args, **kwargs)


class _Keras3Layer(_KerasLayer):
    """A layer of Keras 3."""

    def replacements(self):
        replacements = [(self.layer, {"_moments": self._moments_by_mask})]
        for variable in (self.layer.moving_mean, self.layer.moving_variance):
            replacements.append((variable, {"assign": self._assign_once(variable.assign)}))
        return replacements

    def _moments_by_mask(self, inputs, mask):
        if not self.reductions.applies_to(self.layer):
            return self.moments(inputs, mask)
        from keras import backend

        axes = self.layer._reduction_axes
        epsilon = 0 if mask is None else backend.epsilon()
        _, *moments = _moments(self.reductions, inputs, axes, mask, epsilon)
        return [tf.squeeze(moment, axes) for moment in moments]

    def _assign_once(self, assign):
        """Return the method of a variable, which replicas that update no averages do not call."""

        def assign_once(value, *args, **kwargs):
            reductions = self.reductions
            is_due = not reductions.applies_to(self.layer) or reductions.updates_averages()
            return assign(value, *args, **kwargs) if is_due else value

        return assign_once


def _moments(reductions, inputs, axes, mask, epsilon):
    """Return the number of elements of the whole batch, their mean and their variance.

    Each replica computes those of its rows, which are merged as by Chan et al.: that is as stable
    as the moments of one device.
    """
    inputs = tf.convert_to_tensor(inputs)
    if mask is None:
        sizes = tf.cast(tf.gather(tf.shape(inputs), list(axes)), inputs.dtype)
        count = tf.reshape(tf.reduce_prod(sizes), [1] * inputs.shape.rank)
        mean = tf.reduce_mean(inputs, axes, keepdims=True)
        distances = tf.math.squared_difference(inputs, tf.stop_gradient(mean))
        variance = tf.reduce_mean(distances, axes, keepdims=True)
    else:
        is_valid = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(is_valid, inputs.dtype), axes, keepdims=True)

        def mean_of(values):
            values = tf.where(is_valid, values, tf.zeros_like(values))
            return tf.math.divide_no_nan(tf.reduce_sum(values, axes, keepdims=True), count)

        mean = mean_of(inputs)
        variance = mean_of(tf.math.squared_difference(inputs, tf.stop_gradient(mean)))
    count *= reductions.weight(inputs.dtype)
    return reductions.merge(_merge(epsilon), [count, mean, variance])


def _merge(epsilon):
    def merged_moments(replicas):
        total = tf.add_n([count for count, _, _ in replicas])
        number = total + epsilon
        mean = tf.add_n([count * mean for count, mean, _ in replicas]) / number
        squares = [
            count * (variance + tf.math.squared_difference(own, mean))
            for count, own, variance in replicas
        ]
        return [total, mean, tf.add_n(squares) / number]

    return merged_moments
