"""Functions along the batch dimension, computed from each replica's rows and a few reductions."""

from typing import Any

import tensorflow as tf

from ..._rows import Partial, Sharded, Value
from .reductions import BatchReductions


def can_compute(op: "tf.Operation", value: "Value") -> bool:
    """Return whether an operation is computed by ``softmax``.

    Arguments:
        op: the operation.
        value: its first input.
    """
    is_one = op.type in ("Softmax", "LogSoftmax") and isinstance(value.placement, Sharded)
    return is_one and value.rank is not None and value.axis == value.rank - 1


def softmax(reductions: BatchReductions, op: "tf.Operation") -> "tf.Tensor":
    """Return a softmax, or its logarithm, of each column over the rows of all replicas.

    Arguments:
        reductions: those of the call.
        op: the operation that computes it of the replica's rows, which are the last axis.
    """
    (values,) = op.inputs
    largest = tf.reduce_max(tf.stop_gradient(values), -1, keepdims=True)
    shifted = values - tf.stop_gradient(reductions.reduce(Partial("max"), largest))
    powers = tf.exp(shifted)
    total = reductions.reduce(Partial("sum"), tf.reduce_sum(powers, -1, keepdims=True))
    return shifted - tf.math.log(total) if op.type == "LogSoftmax" else powers / total


def extreme(reductions: BatchReductions, placement: Any, op: "tf.Operation") -> "tf.Tensor":
    """Return the largest or smallest elements; those that are equal share the gradient.

    Arguments:
        reductions: those of the call.
        placement: that of the result.
        op: the operation that computes it of the replica's rows.
    """
    values, axes = op.inputs
    (part,), keeps = op.outputs, op.get_attr("keep_dims")
    result = tf.stop_gradient(reductions.reduce(placement, tf.stop_gradient(part)))
    wide = tf.reshape(result, tf.shape(tf.reduce_sum(values, axes, keepdims=True)))
    same = tf.cast(tf.equal(values, wide), part.dtype)
    equal = tf.reduce_sum(same, axes, keepdims=keeps)
    total = tf.maximum(reductions.reduce(Partial("sum"), equal), tf.ones_like(result))
    # These are zeros, which have the gradients. The difference of infinities is none.
    finite = tf.clip_by_value(part, part.dtype.min, part.dtype.max)
    zeros = tf.stop_gradient(equal / total) * (finite - tf.stop_gradient(finite))
    return result + reductions.reduce(Partial("sum"), zeros)
