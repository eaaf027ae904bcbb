"""How the replicas' values are merged into those of the whole batch."""

import tensorflow as tf

from ..._rows import Count, Partial, Replicated, Sharded
from . import sharding
from .graph_walk import Added


def is_merged(placement, dtype):
    """Whether there is a way to the value for all rows from those of the replicas."""
    if isinstance(placement, Sharded):
        return placement.axis == 0 and placement.copies == 1 and placement.per is None
    if isinstance(placement, Partial) and placement.how == "mean":
        return "float" in str(dtype) or "complex" in str(dtype)
    return isinstance(placement, (Added, Partial, Replicated)) or placement == Count()


_EXTREME = {"max": (tf.reduce_max, tf.reduce_any), "min": (tf.reduce_min, tf.reduce_all)}


class Merging:
    """The replicas' values become those of the whole batch.

    Arguments:
        rows: how many the batch has.
        trace: the ``Trace`` of the plain call; None for a single replica.
    """

    def __init__(self, replicas, rows, trace):
        self.replicas = replicas
        self.rows = rows
        self.trace = trace
        self._weights = {}  # Denominator -> the replicas' parts, and all

    def results(self):
        """Those of the call for the whole batch, as ``CallResults.values``."""
        parts = [replica.results.values for replica in self.replicas]
        return {
            name: [self._result(name, *each) for each in enumerate(zip(*[p[name] for p in parts]))]
            for name in parts[0]
        }

    def _result(self, name, place, values):
        if not tf.is_tensor(values[0]) or self.trace is None:
            return values[0]
        placement = self.trace.placements[name][place]
        if name in ("masks", "logits") and not isinstance(placement, Sharded):
            return None  # they would belong to its rows
        return self.value(list(values), placement)

    def mean(self, values):
        """The mean weighted by the replicas' rows."""
        shares = [tf.cast(replica.size, values[0].dtype) for replica in self.replicas]
        rows = tf.cast(self.rows, values[0].dtype)
        return tf.add_n([value * (share / rows) for value, share in zip(values, shares)])

    def value(self, values, placement, before=None):
        """One value for the whole batch.

        Arguments:
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Sharded):
            return sharding.concatenated(values)
        if isinstance(placement, Replicated):
            floating = values[0].dtype.is_floating or values[0].dtype.is_complex
            return values[0] if before is not None or not floating else self.mean(values)
        how = getattr(placement, "how", "sum")
        if how == "mean":
            by = placement.denominator
            return self.mean(values) if by is None else self._mean_by(values, by)
        if how in _EXTREME:
            of_numbers, of_booleans = _EXTREME[how]
            reduce = of_booleans if values[0].dtype == tf.bool else of_numbers
            return reduce(tf.stack(values), axis=0)
        relative = isinstance(placement, Added)
        parts = [value - before for value in values] if relative else values
        parts = [self._own(replica, part) for replica, part in zip(self.replicas, parts)]
        return tf.add_n([before] + parts if relative else parts)

    def _own(self, replica, value):
        """The value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else tf.zeros_like(value)
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)

    def _mean_by(self, values, weight):
        """The mean whose denominator is not the number of rows (a mask's sum, for example)."""
        if weight not in self._weights:
            parts, sums = [], []
            for replica in self.replicas:
                with tf.device(replica.device):
                    part, total = self.trace.weights(weight, replica.shard)
                parts.append(self._own(replica, part))
                sums.append(self._own(replica, total))
            self._weights[weight] = parts, self.trace.total(weight, sums)
        parts, total = self._weights[weight]
        dtype = values[0].dtype
        weighted = [value * tf.cast(part, dtype) for value, part in zip(values, parts)]
        return tf.math.divide_no_nan(tf.add_n(weighted), tf.cast(total, dtype))
