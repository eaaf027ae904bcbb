"""Values of the whole batch that replicas need on the way, reduced over the replicas.

A sum or mean over the batch, for example, is computed of each shard, and reduced once: the reduced
tensor stands in the graph beside the replicas, and later operations of all replicas read it. The
gradient of such a tensor is the sum of what all replicas send back, and flows on to each of them.

Some operations need the whole batch in their middle, such as a softmax over the rows. They are
computed jointly: each replica has its rows of the result, and in between the replicas reduce.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional

from ..._rows import REPLICATED, Partial, Placement, Sharded
from .._tensorflow.custom_gradients import has_custom_gradient
from .._tensorflow.graph import v1_names
from . import batch_norm, graph


def joint_operation(op, values):
    """Return how replicas compute an operation jointly, and the placements of its results.

    Arguments:
        op: the operation.
        values: a ``Value`` for each of its inputs.

    Returns:
        A function of the operation, the replicas' inputs and ``BatchReductions``, which returns the
        replicas' results; and the placements. Or None: each replica computes it by itself.
    """
    rows = values[0].placement if values else None
    if not isinstance(rows, Sharded) or has_custom_gradient(op):
        return None
    if op.type in ("Softmax", "LogSoftmax") and rows.axis == values[0].rank - 1:
        return _softmax, [rows]
    if op.type.startswith("FusedBatchNorm") and op.get_attr("is_training"):
        weights = all(value.placement == REPLICATED for value in values[1:3])
        if weights and rows.axis == 0 and rows.even:
            return batch_norm.normalized, [rows] + [REPLICATED] * (len(op.outputs) - 1)
    return None


def in_stages(
    operations: "List[Any]",
    reduced: "Any",
    gathered: "Optional[Callable[[Any], List[Any]]]" = None,
) -> "List[List[Any]]":
    """Return operations in stages, such that none needs a reduced tensor of its own stage.

    Arguments:
        operations: the operations; of a loop all or none, which stay together.
        reduced: the tensors that are reduced.
        gathered: a function that returns the operations whose results an operation needs of the
            whole batch; None: there are none.
    """
    stages: "Dict[Any, int]" = dict.fromkeys(operations, 0)
    before = []  # for each operation, and for its loop, what it takes
    for op in sorted(operations, key=lambda op: op._id) if reduced or gathered else ():
        sources = [(t.op, int(t in reduced)) for t in op.inputs if t.op in stages]
        sources += [(source, 1) for source in gathered(op)] if gathered else []
        sources += [(other, 0) for other in op.control_inputs if other in stages]
        before.append((op, sources))
        loop = graph.outermost_loop(op)
        if loop is not None:
            before.append((op, [(loop, 0)]))
            before.append((loop, [(op, 0)]))
    changing = True
    while changing:
        changing = False
        for key, sources in before:
            stage = max([stages.get(source, 0) + more for source, more in sources] or [0])
            if stage > stages.get(key, 0):
                stages[key], changing = stage, True
    found: "List[List[Any]]" = [[] for _ in range(max(stages.values()) + 1 if stages else 1)]
    for op in operations:
        found[stages[op]].append(op)
    return found


class BatchReductions:
    """Reductions over the replicas.

    Arguments:
        merging: the ``Merging`` of their tensors.

    Attributes:
        merged: the reduced tensors, in order.
        unconditional: those of them that are computed in each run.
    """

    def __init__(self, merging):
        self.merging, self.devices = merging, merging.devices
        self.merged: "List[Any]" = []
        self.unconditional: "List[Any]" = []

    @contextlib.contextmanager
    def of(self, op: "Any") -> "Iterator[None]":
        """Reduce, within a block, what an operation of Keras' graph computes."""
        before = len(self.merged)
        yield
        if graph.is_outermost(op):
            self.unconditional += self.merged[before:]

    def merge(self, placement: "Placement", parts: "List[Any]") -> "Any":
        """Return the value of the whole batch of what replicas have computed of their shards."""
        merged = self.merging.reduced(placement, parts)
        self.merged.append(merged)
        return merged

    def reduce(self, tensor: "Any", placement: "Any", copies: "List[Any]") -> "Any":
        """Return a tensor of the whole batch.

        Arguments:
            tensor: of Keras' graph.
            placement: its placement, ``Partial``.
            copies: the ``Copy`` of each replica.
        """
        parts = [copied.tensor(tensor) for copied in copies]
        if placement.how in ("sum", "mean") or not tensor.dtype.is_floating:
            return self.merge(placement, parts)
        inputs = [[copied.tensor(source) for source in tensor.op.inputs] for copied in copies]
        return self._extreme(tensor.op, placement, inputs, parts)

    def _extreme(self, op, placement, inputs, parts):
        """Return the largest or smallest elements; those that are equal share the gradient."""
        tf = v1_names()
        result = tf.stop_gradient(self.merge(placement, parts))
        keeps, equal = op.get_attr("keep_dims"), []
        for (values, axes), device in zip(inputs, self.devices):
            with tf.device(device):
                wide = tf.reshape(result, tf.shape(tf.reduce_sum(values, axes, True)))
                same = tf.cast(tf.equal(values, wide), result.dtype)
                equal.append(tf.reduce_sum(same, axes, keeps))
        with tf.device(self.devices[0]):
            equal = self.merging.with_rows(equal)
            total = tf.maximum(tf.add_n(equal), tf.ones_like(result))
            # These are zeros, which have the gradients. The difference of infinities is none.
            finite = [tf.clip_by_value(p, p.dtype.min, p.dtype.max) for p in parts]
            zeros = [n / total * (p - tf.stop_gradient(p)) for n, p in zip(equal, finite)]
            return result + tf.add_n(zeros)


def _softmax(op, inputs, reductions):
    """Return a softmax of each column over the rows of all replicas, which are the last axis."""
    tf, results = v1_names(), []
    pairs = [(values, device) for (values,), device in zip(inputs, reductions.devices)]

    def reduce(how, function, values):
        parts = []
        for value, device in zip(values, reductions.devices):
            with tf.device(device):
                parts.append(function(value, -1, True))
        return reductions.merge(Partial(how), parts)

    largest = tf.stop_gradient(reduce("max", tf.reduce_max, [values for values, _ in pairs]))
    shifted, powers = [], []
    for values, device in pairs:
        with tf.device(device):
            shifted.append(values - largest)
            powers.append(tf.exp(shifted[-1]))
    total = reduce("sum", tf.reduce_sum, powers)
    for less, power, device in zip(shifted, powers, reductions.devices):
        with tf.device(device):
            results.append([less - tf.log(total) if op.type == "LogSoftmax" else power / total])
    return results
