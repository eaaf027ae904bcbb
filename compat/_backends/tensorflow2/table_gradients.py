"""Gradients of tables in which replicas look up the same rows, joined as one device has them."""

from typing import Any, Dict, Set

import tensorflow as tf


class TableGradients:
    """The gradients of tables in which all replicas of one call look up the same rows.

    One device has one gradient for each lookup. TensorFlow would put those of the replicas side by
    side, and Keras 3 squares one by one what there is of a row. So the replica whose gradient is
    computed last has the sum of all, and the others have none.

    A backward pass reaches each replica once, in any order, or none of them: whatever is merged
    depends on all. So the last one is the one with which all are there. Where a replica comes
    again before that, an earlier pass has failed, and what is kept of it is discarded.

    TensorFlow never lets go of a gradient's function, so that nothing here may hold the model.

    Arguments:
        lookups: those of the ``Trace``.
        count: how many replicas there are.
    """

    def __init__(self, lookups: "Dict[int, Set[bool]]", count: int) -> None:
        self._keys = {key for key, are_same in lookups.items() if are_same == {True}}
        self._count = count
        # The id of a variable -> the replicas computed so far in this pass -> their gradients.
        self._waiting: "Dict[int, Dict[int, tf.IndexedSlices]]" = {}

    def joined(self, replica: int, variable: "tf.Variable", gradient: "Any") -> "Any":
        """Return what a replica's gradient of a variable becomes: the sum of all, or None."""
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in self._keys:
            return gradient
        gradients = self._waiting.setdefault(id(variable), {})
        if replica in gradients:
            gradients.clear()
        gradients[replica] = gradient
        if len(gradients) < self._count:
            return None
        del self._waiting[id(variable)]
        total = tf.add_n([each.values for each in gradients.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)


def dense(gradient):
    """Return the gradient of a table's rows, each looked up once, as that of the whole table.

    Other replicas have looked up some of the same rows. Keras 3 squares what there is of a row one
    by one, as it does where one device looks a row up several times.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return gradient
    op = gradient.indices.op
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return tf.convert_to_tensor(gradient) if op.type.startswith("Unique") else gradient
