"""Batch normalization by the mean and the variance of the whole batch."""

from typing import Any, Callable, List, Optional

from theano import tensor
from theano.gof import graph
from theano.gradient import disconnected_grad
from theano.tensor.nnet import bn

from ... import _keras
from ..._rows import REPLICATED, Placement, Replicated, Sharded
from ..._runtime import synchronized


def synchronized_in(model: "Any") -> "Callable[[List[Any]], bool]":
    """Return a function that returns whether a layer of a model is synchronized.

    It takes the variables by which the layer scales and shifts what it has normalized: a nested
    model's layers leave no other mark in the graph.
    """
    if synchronized.is_asked(model):
        return lambda variables: True
    layers = [layer for layer in _keras.layers_within(model) if synchronized.asks(layer)]
    weights = {weight for layer in layers for weight in layer.weights}
    return lambda variables: not weights.isdisjoint(graph.inputs(variables))


def placements(op: "Any", values: "Any") -> "Optional[List[Placement]]":
    """Return the placements of the results; None where these statistics are not to be had.

    Arguments:
        op: the ``AppliedOp``.
        values: the ``Value`` of each of its inputs.
    """
    rows, *others = [value.placement for value in values]
    is_split = isinstance(rows, Sharded) and rows.even and rows.axis in op.type.axes
    if not is_split or not all(isinstance(other, Replicated) for other in others):
        return None
    return [rows] + [REPLICATED] * (len(op.outputs) - 1)


def lowered(body: "Any", node: "Any", inputs: "List[Any]") -> "List[Any]":
    """Return the results of a node, by one reduction over the devices of mean and variance.

    Arguments:
        body: the ``BodyGraph``.
        node: the node.
        inputs: its inputs in that graph.
    """
    x, scale, bias, epsilon, factor = inputs[:5]
    axes = node.op.axes
    mean = x.mean(axes, keepdims=True)
    # The gradient of these squares by the mean is zero.
    variance = tensor.sqr(x - disconnected_grad(mean)).mean(axes, keepdims=True)
    mean, variance = body.all_reduced("moments", mean, variance, body.share)
    normalized = bn.AbstractBatchNormInference(axes)(x, scale, bias, mean, variance, epsilon)
    results = [mean, tensor.inv(tensor.sqrt(variance + epsilon.astype(variance.dtype)))]
    if len(inputs) > 5:
        count = (x.size / scale.size / body.share).astype(variance.dtype)
        unbiased = variance * count / (count - 1)
        averages = zip(inputs[5:], [mean, unbiased])
        results += [old * (1.0 - factor) + new * factor for old, new in averages]
    # As Theano has it, only the normalized values have a gradient.
    return [normalized] + list(map(disconnected_grad, results))
