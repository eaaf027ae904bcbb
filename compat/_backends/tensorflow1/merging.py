"""Merging of replicas' tensors into those of the whole batch."""

from typing import Any, List, Sequence

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

    def reduced(self, placement: "Partial", parts: "Sequence[Any]") -> "Any":
        """Return the sum, mean, maximum or minimum of the whole batch."""
        tf = v1_names()
        with tf.device(self.devices[0]):
            if placement.how == "sum":
                parts = self.with_rows(parts)
            # A replica whose shard is empty has computed a row of another one's, which neither
            # changes an extreme nor counts in a mean.
            reduced = self._merged(placement, parts, "reduced_over_replicas")
        reduced.set_shape(parts[0].shape)
        return reduced

    def with_rows(self, parts: "Sequence[Any]") -> "Sequence[Any]":
        """Return the replicas' values; zeros in place of those of empty shards."""
        tf = v1_names()
        pairs = zip(parts, self.sizes)
        return [part * tf.cast(tf.minimum(size, 1), part.dtype) for part, size in pairs]

    def shards(self, whole: "Any") -> "List[Any]":
        """Return the rows of each replica of a tensor that has as many as the batch."""
        tf, end, shards = v1_names(), 0, []
        text = (
            f"{whole.op.name} does not have one row for each sample of this batch, as it has for "
            "others. Use one device: parallelize(model, gpus=1). Rows and samples:"
        )
        with tf.name_scope("split_again"), tf.device("/cpu:0"):
            rows, total = tf.shape(whole)[0], tf.add_n(self.sizes)
            check = tf.Assert(tf.equal(rows, total), [text, rows, total])
        with tf.name_scope("split_again"), tf.device(self.devices[0]):
            with tf.control_dependencies([check]):
                whole = tf.identity(whole)
            for size in self.sizes:
                # As with inputs, a replica whose shard is empty computes one row.
                first = tf.minimum(end, rows - 1)
                end += size
                shards.append(whole[first : tf.maximum(end, first + 1)])
        return shards

    def shape(self, parts: "Sequence[Any]", dtype: "Any") -> "Any":
        """Return the shape of the replicas' rows, concatenated."""
        tf = v1_names()
        with tf.name_scope("shape_of_rows"):
            shapes = [tf.shape(part, out_type=dtype) for part in parts]
            rows = [tf.expand_dims(shape[0], 0) for shape in shapes]
            total = tf.add_n(self.with_rows(rows))
            return tf.concat([total, shapes[0][1:]], axis=0)

    def _merged(self, placement, parts, name):
        with v1_names().name_scope(name):  # by which errors are recognized as those of replicas
            return merge(placement, parts, self.sizes, self._operations)
