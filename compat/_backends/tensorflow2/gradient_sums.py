"""Sums of the replicas' gradients, which take the way of the weights back."""

from typing import Any, Dict, List, Sequence, Set

import tensorflow as tf

from .table_gradients import TableGradients
from .variable_reads import Copies


class GradientSums:
    """The gradients of the variables of which replicas have read copies.

    Each device adds its gradient to that of the next one, and the device before it does the same,
    variable by variable. TensorFlow would send all to one device. As with ``TableGradients``, the
    replica whose gradient is computed last gets the sum, and the others get none.

    Arguments:
        devices: those of the replicas.
        copies: those that each replica reads.
        tables: for gradients that are slices, which stay slices.
    """

    def __init__(
        self, devices: "Sequence[str]", copies: "Sequence[Copies]", tables: TableGradients
    ) -> None:
        self._devices, self._tables = devices, tables
        self._were_read: "List[Set[int]]" = [each.were_read for each in copies]
        # The id of a variable's handle -> the replicas computed so far -> their gradients.
        self._waiting: "Dict[int, Dict[int, Any]]" = {}

    def joined(self, replica: int, variable: "tf.Variable", gradient: "Any") -> "Any":
        """Return what a replica's gradient of a variable becomes: the sum of all, or None."""
        key, slices = id(variable.handle), None
        if key not in self._were_read[replica]:
            return self._tables.joined(replica, variable, gradient)
        if isinstance(gradient, tf.IndexedSlices):
            slices, gradient = self._tables.joined(replica, variable, gradient), None
        total = self._sum(replica, key, gradient)
        if slices is None or total is None:
            return slices if total is None else total
        return tf.convert_to_tensor(slices) + total

    def _sum(self, replica, key, gradient):
        counted = self._tables.counted
        if replica not in counted:
            return None
        gradients = self._waiting.setdefault(key, {})
        if replica in gradients:  # an earlier pass has failed
            gradients.clear()
        gradients[replica] = gradient
        if len(gradients) < sum(key in self._were_read[index] for index in counted):
            return None
        del self._waiting[key]
        total = None
        for index in sorted(gradients, reverse=True):
            if gradients[index] is not None:
                with tf.device(self._devices[index]):
                    is_first = total is None
                    total = gradients[index] if is_first else gradients[index] + total
        return total
