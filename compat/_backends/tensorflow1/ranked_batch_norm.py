"""Batch normalization of ranks by the statistics of the whole batch.

The graph of a model is there before it is one of several ranks, and a session that has run knows no
changes of it. So what trains takes copies of the operations that depend on the statistics, which
read those of all ranks. What evaluates and predicts keeps the model's own operations, and exchanges
nothing.
"""

import re
from typing import Any, List, Optional

from ... import _keras
from ..._ranks import evaluated_batch_norm
from ..._rows import own_statistics
from ..._runtime import synchronized
from . import graph
from .copying import Copy, copy_operations
from .ranked_reductions import RankedReductions


class RankedBatchNorm:
    """The part of a model's graph that depends on statistics of all ranks, as copies.

    Arguments:
        engine: that of the ranks.
        model: the model, with a loss.
        rows: the number of this rank's rows in the batch, a tensor.
        number: that of the model, as ``RankedReductions`` takes it.
    """

    def __init__(self, engine: "Any", model: "Any", rows: "Any", number: int) -> None:
        self.tf, self._copies = engine.tf, Copy({}, {})
        layers = requested(model)
        if not layers:
            return
        names = {layer.name for layer in _keras.all_layers_of_keras2(model)}
        self._reductions = RankedReductions(engine, rows, number)
        ends = [model.total_loss] + list(model.outputs)
        operations = sorted(graph.ancestors(ends, ())[0], key=lambda op: op._id)
        missed = {layer.name: layer for layer in layers}
        for op in operations:
            name = _layer_of(op, names)
            layer = next((layer for layer in layers if layer.name == name), None)
            if layer is not None and is_synchronizable(layer) and self._synchronize(op):
                missed.pop(name, None)
        known = [name for name, layer in missed.items() if is_synchronizable(layer)]
        if known:  # the front end names the others
            by_argument = is_asked(model)
            own_statistics.warn_of_layers("tensorflow1", model.name, "rank", known, by_argument)
        for layer in layers:
            if layer.name not in missed and _is_always_training(layer):
                evaluated_batch_norm.warn(layer, model.name)

    def whole(self, fetch: "Any") -> "Any":
        """Return a tensor or operation that is computed from the statistics of all ranks."""
        copies = self._copies
        if fetch in copies.replaced:
            return copies.replaced[fetch]
        ops, consumers = graph.ancestors([fetch], (), self._is_replaced)
        sources = [source for source in consumers if self._is_replaced(source)]
        between = graph.reached(sources, consumers)
        between.update(graph.whole_loops([op for op in ops if op in between], ops))
        new = [op for op in ops if op in between and op not in copies.operations]
        boundary = {
            tensor: copies.tensor(tensor)
            for op in new
            for tensor in op.inputs
            if tensor in copies.replaced or tensor.op in copies.operations
        }
        with self.tf.control_dependencies(None):
            made = copy_operations(
                new,
                boundary,
                "whole_batch",
                None,
                controls=lambda op: [copies.operations.get(op, op)],
            )
        copies.operations.update(made.operations)
        if isinstance(fetch, self.tf.Operation):
            return copies.operations.get(fetch, fetch)
        return copies.tensor(fetch)

    def _is_replaced(self, source):
        return not isinstance(source, self.tf.Operation) and source in self._copies.replaced

    def _synchronize(self, op):
        """Replace the results of an operation, if it computes statistics of a batch."""
        if op.type.startswith("FusedBatchNorm") and "Grad" not in op.type:
            return op.get_attr("is_training") and self._replace_fused(op)
        variance = _variance_by(op)
        if variance is None:
            return False
        keeps = op.get_attr("keep_dims")
        total, *merged = self._moments(self.whole(op.inputs[0]), op.inputs[1], keeps)
        self._replace(dict(zip([op.outputs[0], variance], merged)), variance, total)
        return True

    def _replace_fused(self, op):
        tf, rank = self.tf, op.inputs[0].shape.ndims
        images, scale, offset = [self.whole(tensor) for tensor in op.inputs[:3]]
        by_channel = op.get_attr("data_format").startswith(b"NC")
        channels = 1 if by_channel else rank - 1
        axes = [axis for axis in range(rank) if axis != channels]
        values = tf.cast(images, scale.dtype)
        total, mean, variance = self._moments(values, axes, True)
        shape = [-1] + [1] * (rank - 1 - channels)
        factor = tf.rsqrt(variance + op.get_attr("epsilon")) * tf.reshape(scale, shape)
        result = (values - mean) * factor + tf.reshape(offset, shape)
        # As TensorFlow has it, for the moving average.
        exact = variance * (total / tf.maximum(total - 1, 1))
        statistics = [tf.reshape(tensor, [-1]) for tensor in (mean, exact)]
        results = dict(zip(op.outputs, [tf.cast(result, images.dtype)] + statistics))
        for tensor, replacement in results.items():
            replacement.set_shape(tensor.shape)
        self._replace(results, op.outputs[2], total)
        return True

    def _moments(self, values, axes, keeps):
        """Return the number of elements of all ranks, their mean and variance, by Chan et al."""
        tf = self.tf
        mean = tf.reduce_mean(values, axes, keepdims=True)
        distances = tf.squared_difference(values, tf.stop_gradient(mean))
        variance = tf.reduce_mean(distances, axes, keepdims=keeps)
        mean = tf.reshape(mean, tf.shape(variance))
        mean.set_shape(variance.shape)
        count = tf.cast(tf.size(values) // tf.size(mean), mean.dtype)
        ranks = self._reductions.gather([count, mean, variance])
        total = tf.add_n([count for count, _, _ in ranks])
        merged = tf.add_n([count * mean for count, mean, _ in ranks]) / total
        squares = [
            count * (variance + tf.squared_difference(mean, merged))
            for count, mean, variance in ranks
        ]
        return total, merged, tf.add_n(squares) / total

    def _replace(self, tensors, variance, total):
        """Replace tensors, and the number of elements by which Keras 2 corrects the variance."""
        size = _size_of_sample(variance)
        if size is not None:
            tensors = dict(tensors)
            tensors[size] = self.tf.cast(total, size.dtype)
        self._copies.replaced.update(tensors)


def requested(model: "Any") -> "List[Any]":
    """Return the layers of a model that are to use the statistics of the whole batch.

    Horovod's own exchange them by themselves.
    """
    layers = synchronized.requested(model, _keras.all_layers_of_keras2, is_asked)
    return [layer for layer in layers if not type(layer).__module__.startswith("horovod.")]


def is_synchronizable(layer: "Any") -> bool:
    """Return whether a layer normalizes all rows of a batch alike."""
    return getattr(layer, "virtual_batch_size", None) is None


def is_asked(model: "Any") -> bool:
    """Return whether all layers of a model are to use the statistics of the whole batch."""
    # A Sequential before Keras 2.2 has another model in it, which makes functions.
    return any(map(synchronized.is_asked, [model, getattr(model, "callback_model", None)]))


def _is_always_training(layer):
    """Return whether a model calls a layer with ``training=True``, also as it evaluates."""
    nodes = getattr(layer, "_inbound_nodes", None) or getattr(layer, "inbound_nodes", ())
    modes = [(getattr(node, "arguments", None) or {}).get("training") for node in nodes]
    return any(isinstance(mode, (bool, int)) and mode for mode in modes)


def _layer_of(op, names):
    """Return the name of the layer that has made an operation: scopes of later calls end in _1."""
    for scope in reversed(op.name.split("/")[:-1]):
        for name in (scope, re.sub(r"_\d+$", "", scope)):
            if name in names:
                return name
    return None


def _variance_by(op: "Any") -> "Optional[Any]":
    """Return the variance of which an operation computes the mean, as ``tf.nn.moments`` does."""
    if op.type != "Mean":
        return None
    for copied in op.outputs[0].consumers():
        for distances in copied.outputs[0].consumers() if copied.type == "StopGradient" else ():
            if distances.type == "SquaredDifference" and distances.inputs[0] is op.inputs[0]:
                for reduced in distances.outputs[0].consumers():
                    if reduced.type == "Mean":
                        return reduced.outputs[0]
    return None


def _size_of_sample(variance):
    """Return the n of a correction n / (n - 1 - epsilon) of a variance, or None."""
    pending = [variance]
    for tensor in pending:  # which grows meanwhile
        for op in tensor.consumers():
            if op.type in ("Squeeze", "Reshape", "Identity", "Cast"):
                pending.append(op.outputs[0])
            factor = op.inputs[1].op if op.type == "Mul" else None
            if factor is not None and factor.type in ("RealDiv", "Div"):
                size, less = factor.inputs
                if less.op.type == "Sub" and less.op.inputs[0] is size:
                    return size
    return None
