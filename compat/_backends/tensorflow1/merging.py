"""Tensors of replicas, merged into one of the whole batch."""

from typing import Any, Sequence

from ..._rows.merging import merge
from ..._rows.placements import REPLICATED, Partial, Sharded
from .._tensorflow.graph import v1_names
from .._tensorflow.merging import TensorOperations


class Merging:
    """Merges the tensors that replicas compute.

    Arguments:
        devices: those of the replicas.
        sizes: tensors: how many rows each replica has of its own.
    """

    def __init__(self, devices, sizes):
        self.devices, self.sizes = devices, sizes
        self._operations = TensorOperations(v1_names())

    def rows_in_order(self, parts: "Sequence[Any]") -> "Any":
        """Return the replicas' rows, one replica's after the other's."""
        tf = v1_names()
        kept = []
        for part, size, device in zip(parts, self.sizes, self.devices):
            with tf.device(device):
                # A replica without rows of its own has computed one, to be dropped.
                kept.append(part[: tf.shape(part)[0] * tf.minimum(size, 1)])
        return self._merged(Sharded(0), kept, "rows_in_order")

    def mean(self, parts: "Sequence[Any]") -> "Any":
        """Return the replicas' mean, weighted by their rows; of whole numbers the first one."""
        placement = Partial("mean") if parts[0].dtype.is_floating else REPLICATED
        return self._merged(placement, parts, "mean_by_rows")

    def _merged(self, placement, parts, name):
        with v1_names().name_scope(name):  # by which errors are recognized as those of replicas
            return merge(placement, parts, self.sizes, self._operations)
