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

    def joined(
        self, replica: int, variables: "Sequence[tf.Variable]", gradients: "Sequence[Any]"
    ) -> "List[Any]":
        """Return what a replica's gradients of variables become: the sums of all, or None."""
        results = list(gradients)
        complete = {}
        for place, (variable, gradient) in enumerate(zip(variables, gradients)):
            key, was_read = id(variable.handle), id(variable.handle) in self._were_read[replica]
            if not was_read or isinstance(gradient, tf.IndexedSlices):
                results[place] = self._tables.joined(replica, variable, gradient)
                gradient = None
            else:
                results[place] = None
            if was_read:
                complete[place] = self._collected(replica, key, gradient)
        for place, total in self._sums(complete).items():
            results[place] = added(results[place], total)
        return results

    def _collected(self, replica, key, gradient):
        """Return the gradients of all replicas by their numbers; none before the last one."""
        counted = self._tables.counted
        if replica not in counted:
            return {}
        gradients = self._waiting.setdefault(key, {})
        if replica in gradients:  # an earlier pass has failed
            gradients.clear()
        gradients[replica] = gradient
        if len(gradients) < sum(key in self._were_read[index] for index in counted):
            return {}
        return self._waiting.pop(key)

    def _sums(self, complete):
        totals = {}
        for index in reversed(range(len(self._devices))):
            with tf.device(self._devices[index]):  # once: it takes as long as an operation
                for place, gradients in complete.items():
                    gradient, total = gradients.get(index), totals.get(place)
                    if gradient is not None:
                        is_first = total is None
                        totals[place] = (
                            gradient if is_first else tf.raw_ops.AddV2(x=gradient, y=total)
                        )
        return totals


def added(gradient: "Any", other: "Any") -> "Any":
    """Return the sum of two gradients, either of which may be None or slices."""
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return tf.convert_to_tensor(gradient) + tf.convert_to_tensor(other)
