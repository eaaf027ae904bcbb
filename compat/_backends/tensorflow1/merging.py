"""Merging of replicas' tensors into those of the whole batch."""

from typing import Any, Sequence

from ..._rows.merging import merge
from ..._rows.placements import REPLICATED, Partial, Sharded
from .._tensorflow.graph import v1_names
from .._tensorflow.merging import TensorOperations


class Merging:
    """Merges the tensors that replicas compute.

    Arguments:
        devices: those of the replicas.
        sizes: the number of rows of each replica's shard, tensors.
    """

    def __init__(self, devices, sizes):
        self.devices, self.sizes = devices, sizes
        self._operations = TensorOperations(v1_names())

    def rows_in_order(self, parts: "Sequence[Any]") -> "Any":
        """Return the replicas' rows, concatenated."""
        tf = v1_names()
        kept = []
        for part, size, device in zip(parts, self.sizes, self.devices):
            with tf.device(device):
                # A replica whose shard is empty has computed one row, which is dropped.
                kept.append(part[: tf.shape(part)[0] * tf.minimum(size, 1)])
        return self._merged(Sharded(0), kept, "rows_in_order")

    def mean(self, parts: "Sequence[Any]") -> "Any":
        """Return the mean of the replicas' values by their rows; of integers the first value."""
        placement = Partial("mean") if parts[0].dtype.is_floating else REPLICATED
        return self._merged(placement, parts, "mean_by_rows")

    def _merged(self, placement, parts, name):
        with v1_names().name_scope(name):  # by which errors are recognized as those of replicas
            return merge(placement, parts, self.sizes, self._operations)
