"""Batch normalization of ranks by the statistics of the whole batch: keras-mxnet, by Horovod.

In the graph of a training step an operation in Python stands between a layer's own moments and
those of all ranks. A rank's loss is the mean of its own rows, so gradients of others' are weighted.
"""

import contextlib
from typing import Any, Dict, Iterator, List

import mxnet as mx
import numpy as np

from . import batch_norm, joined_executors
from .graph import Entry, Graph

_OPERATION = "compat_moments_of_all_ranks"
# The engine and the rank's share of the rows, within ``exchanging()``; else each rank has its own.
_step: "Dict[str, Any]" = {}


@contextlib.contextmanager
def exchanging(engine: "Any", share: float) -> "Iterator[None]":
    """Have layers exchange their moments within.

    Arguments:
        engine: the ranks'.
        share: this rank's, of the rows of the step.
    """
    _step.update(engine=engine, share=share)
    try:
        yield
    finally:
        _step.clear()


def synchronized(symbol: "Any", wanted: "joined_executors.Requested") -> "Any":
    """Return a graph in which batch normalization has the moments of all ranks.

    Arguments:
        symbol: the graph.
        wanted: as for ``joined_executors.synchronized``.
    """
    graph = Graph([], symbol)
    chosen = joined_executors.synchronized(graph, wanted)
    if not chosen:
        return symbol
    nodes: "List[Any]" = []
    places: "Dict[Entry, Entry]" = {}
    # Names of operations count all that a process has made, which may be more on some ranks.
    orders = {number: order for order, number in enumerate(sorted(chosen))}
    for number, node in enumerate(graph.nodes):
        if number in chosen:
            inputs = joined_executors.inputs_of(graph, number)

            def source(name, _):
                return places[inputs[name]]  # noqa: B023

            (places[number, 0],) = joined_executors.append(
                nodes, _normalized(node, orders[number]), source, node["name"]
            )
            continue
        for other in graph.inputs + [graph.heads]:
            for entry in other:
                if entry[0] == number:
                    places[entry] = len(nodes), entry[1]
        copied = [places[entry] + (0,) for entry in graph.inputs[number]]
        nodes.append(dict(node, inputs=copied))
    return graph.symbol([places[head] for head in graph.heads], nodes)


def _normalized(node, order):
    F, inputs = mx.sym, joined_executors.variables(0)
    axis = joined_executors.attribute(node, "axis", 1)
    like, variance = batch_norm.moments(F, inputs[0], axis)
    size = F.BlockGrad(F.Cast(F.size_array(inputs[0]), dtype="float64"))
    merged = F.Custom(F.reshape(like, shape=(-1,)), variance, size, op_type=_OPERATION, layer=order)
    attributes = joined_executors.attributes_of(node)
    return batch_norm.normalized(F, inputs, [merged[0], merged[1]], like, axis, attributes)


class _Moments(mx.operator.CustomOp):
    """Mean and variance of the rows of all ranks, from those of each."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, is_train, req, in_data, out_data, aux):
        mean, variance, size = [array.asnumpy().astype("float64") for array in in_data]
        self.step = dict(_step) if is_train else {}
        if self.step:
            sent = np.concatenate([size, mean, variance])
            ranks = self.exchange("allgather", "moments", sent[None])
            shares = ranks[:, 0] / ranks[:, 0].sum()
            means, variances = np.split(ranks[:, 1:], 2, axis=1)
            total = shares.dot(means)
            self.own = shares[self.step["engine"].place.rank], mean - total
            mean, variance = total, shares.dot(variances + np.square(means - total))
        for array, request, value in zip(out_data, req, (mean, variance)):
            self.assign(array, request, mx.nd.array(value, array.context, array.dtype))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        mean, variance = [array.asnumpy().astype("float64") for array in out_grad]
        if self.step:
            share, (own, distance) = self.step["share"], self.own
            sent = np.concatenate([mean, variance]) * share
            gradients = self.exchange("allreduce", "gradients of moments", sent) / share
            mean, variance = own * np.split(gradients, 2)[0], own * np.split(gradients, 2)[1]
            mean += 2 * distance * variance
        for array, request, value in zip(in_grad, req, (mean, variance, np.zeros(1))):
            self.assign(array, request, mx.nd.array(value, array.context, array.dtype))

    def exchange(self, operation, what, values):
        """Return the result of an operation of Horovod's for an array, in the thread of MXNet."""
        engine = self.step["engine"]
        options = {"op": engine.horovod.Sum} if operation == "allreduce" else {}
        array = mx.nd.array(values, mx.cpu(), "float64")
        name = f"horovod_{what}_{self.layer}".replace(" ", "_")
        engine.arrive()
        result = getattr(engine.horovod, operation)(array, name=name, **options).asnumpy()
        engine.resume()
        return result


@mx.operator.register(_OPERATION)
class _MomentsProp(mx.operator.CustomOpProp):
    def __init__(self, layer):
        super().__init__(need_top_grad=True)
        self.layer = layer

    def list_arguments(self):
        return ["mean", "variance", "size"]

    def list_outputs(self):
        return ["mean_of_all", "variance_of_all"]

    def infer_shape(self, in_shape):
        return [in_shape[0], in_shape[0], [1]], [in_shape[0]] * 2, []

    def infer_type(self, in_type):
        return [in_type[0], in_type[0], np.float64], [in_type[0]] * 2, []

    def create_operator(self, ctx, shapes, dtypes):
        return _Moments(self.layer)
