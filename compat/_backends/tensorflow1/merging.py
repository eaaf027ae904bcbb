"""Tensors of replicas, merged into one of the whole batch."""

from .._tensorflow.graph import v1_names


class Merging:
    """Merges the tensors that replicas compute.

    Arguments:
        devices: those of the replicas.
        sizes: tensors: how many rows each replica has of its own.
    """

    def __init__(self, devices, sizes):
        self.devices, self.sizes = devices, sizes
        self._weights = {}  # type: Dict[Any, Any]  # of the replicas' rows in a mean, by dtype

    def rows_in_order(self, parts):
        """Return the replicas' rows, one replica's after the other's."""
        tf = v1_names()
        kept = []
        for part, size, device in zip(parts, self.sizes, self.devices):
            with tf.device(device):
                # A replica without rows of its own has computed one, to be dropped.
                kept.append(part[: tf.shape(part)[0] * tf.minimum(size, 1)])
        return tf.concat(kept, axis=0, name="rows_in_order")

    def mean(self, parts):
        """Return the replicas' mean, weighted by their rows."""
        tf = v1_names()
        if not parts[0].dtype.is_floating:
            return parts[0]
        dtype = parts[0].dtype
        if dtype not in self._weights:
            rows = tf.cast(sum(self.sizes), dtype)
            self._weights[dtype] = [tf.cast(size, dtype) / rows for size in self.sizes]
        weighted = [w * part for w, part in zip(self._weights[dtype], parts)]
        return tf.add_n(weighted, name="mean_by_rows")
