"""Batch normalization by the statistics of the whole batch, where that is asked for.

Layers that compute it by plain operations need nothing: their means are reduced as any others are.
Fused operations are computed jointly by the replicas, from plain operations.
"""

from ..._rows import Partial
from .._tensorflow.graph import v1_names


def normalized(op, inputs, reductions):
    """Return the results of a fused batch normalization that trains, for each replica.

    Each computes mean and variance of its shard. They are merged at once, by Chan's formula.

    Arguments:
        op: the operation, of Keras' graph.
        inputs: for each replica, its inputs.
        reductions: the ``BatchReductions`` over the replicas.
    """
    tf = v1_names()
    by_channel = op.get_attr("data_format").startswith(b"NC")
    rank = inputs[0][0].shape.ndims
    channels = 1 if by_channel else rank - 1
    axes = [axis for axis in range(rank) if axis != channels]
    values, means, variances, counts = [], [], [], []
    for (images, *weights), device in zip(inputs, reductions.devices):
        with tf.device(device):
            values.append(tf.cast(images, weights[0].dtype))
            mean = tf.reduce_mean(values[-1], axes, True)
            means.append(tf.squeeze(mean, axes))
            variances.append(tf.reduce_mean(tf.square(values[-1] - mean), axes))
            counts.append(tf.size(images) // tf.shape(images)[channels])
    mean = reductions.merge(Partial("mean"), means)
    with tf.device(reductions.devices[0]):
        spreads = [
            variance + tf.square(of_shard - mean) for variance, of_shard in zip(variances, means)
        ]
    variance = reductions.merge(Partial("mean"), spreads)
    count = reductions.merge(Partial("sum"), counts)
    with tf.device(reductions.devices[0]):
        # As TensorFlow has it, for the moving average.
        exact = tf.cast(count, variance.dtype) / tf.cast(tf.maximum(count - 1, 1), variance.dtype)
        statistics = [mean, variance * exact] + [mean, variance] * (len(op.outputs) - 3)
    results = []
    shape = [-1] + [1] * (rank - 1 - channels)
    for value, (images, scale, offset, *_), device in zip(values, inputs, reductions.devices):
        with tf.device(device):
            factor = tf.rsqrt(variance + op.get_attr("epsilon")) * scale
            centered = value - tf.reshape(mean, shape)
            result = centered * tf.reshape(factor, shape) + tf.reshape(offset, shape)
            results.append([tf.cast(result, images.dtype)] + statistics[: len(op.outputs) - 1])
    return results
