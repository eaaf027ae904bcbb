"""Gradients of tables in which replicas look up the same rows, summed as on one device."""

from typing import Any, Dict, Sequence, Set

import tensorflow as tf


class TableGradients:
    """The gradients of tables in which all replicas of one call look up the same rows.

    One device has one gradient for each lookup. TensorFlow would concatenate the slices of the
    replicas, of which optimizers of Keras 3 square each by itself. So the replica whose gradient is
    computed last gets the sum of all, and the others get none.

    A backward pass reaches each replica that has rows once, in any order, or none of them: every
    merged value depends on all of these. So the last gradient is the one that completes them. If a
    replica comes again before that, an earlier pass has failed, and its gradients are discarded.
    A replica without rows, where their number is static, has no part in sums and means, so that a
    pass may miss it; its gradient is zero.

    TensorFlow never releases the function of a gradient, so that nothing here may hold the model.

    Arguments:
        lookups: those of the ``Trace``.
        sizes: the number of rows of each replica: integers, or scalar tensors.

    Attributes:
        counted: the replicas that every backward pass reaches.
    """

    def __init__(self, lookups: "Dict[int, Set[bool]]", sizes: "Sequence[Any]") -> None:
        self._keys = {key for key, are_same in lookups.items() if are_same == {True}}
        with_rows = {n for n, size in enumerate(sizes) if not isinstance(size, int) or size}
        self.counted = with_rows or {0}  # as ``merge`` does
        # The id of a variable -> the replicas computed so far in this pass -> their gradients.
        self._waiting: "Dict[int, Dict[int, tf.IndexedSlices]]" = {}

    def joined(self, replica: int, variable: "tf.Variable", gradient: "Any") -> "Any":
        """Return what a replica's gradient of a variable becomes: the sum of all, or None."""
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in self._keys:
            return gradient
        if replica not in self.counted:
            return None
        gradients = self._waiting.setdefault(id(variable), {})
        if replica in gradients:
            gradients.clear()
        gradients[replica] = gradient
        if len(gradients) < len(self.counted):
            return None
        del self._waiting[id(variable)]
        total = tf.add_n([slices.values for slices in gradients.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)


def dense(gradient):
    """Return a gradient of table rows that are unique in a replica as one of the whole table.

    Other replicas have looked up some of the same rows. Optimizers of Keras 3 square the slices of
    a row separately, as they do where one device looks a row up several times.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return gradient
    op = gradient.indices.op
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return tf.convert_to_tensor(gradient) if op.type.startswith("Unique") else gradient
