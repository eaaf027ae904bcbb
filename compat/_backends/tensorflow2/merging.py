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
        self.replicas, self.rows, self.trace = replicas, rows, trace
        self._shares = {}  # type: dict  # what means are weighted by -> the replicas' shares of it

    def results(self):
        """Those of the call for the whole batch, as ``Replica.values``."""
        if self.trace is None:
            return self.replicas[0].values
        return {
            name: [
                self._result(name, placement, values)
                for placement, *values in zip(placements, *[r.values[name] for r in self.replicas])
            ]
            for name, placements in self.trace.placements.items()
        }

    def _result(self, name, placement, values):
        if not tf.is_tensor(values[0]):
            return values[0]
        if name in ("masks", "logits") and not isinstance(placement, Sharded):
            return None  # they would belong to its rows
        return self.value(values, placement)

    def value(self, values, placement, before=None):
        """One value for the whole batch.

        Arguments:
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Sharded):
            return sharding.concatenated(values)
        dtype, how = values[0].dtype, getattr(placement, "how", "sum")
        if isinstance(placement, Replicated):
            is_merged = before is None and (dtype.is_floating or dtype.is_complex)
            return self._mean(values, None) if is_merged else values[0]
        if how == "mean":
            return self._mean(values, placement.denominator)
        if how in _EXTREME:
            of_numbers, of_booleans = _EXTREME[how]
            reduce = of_booleans if dtype == tf.bool else of_numbers
            return reduce(tf.stack(values), axis=0)
        relative = isinstance(placement, Added)
        parts = [value - before for value in values] if relative else values
        parts = [self._own(*each) for each in zip(self.replicas, parts)]
        return tf.add_n([before] + parts if relative else parts)

    def _own(self, replica, value):
        """The value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else tf.zeros_like(value)
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)

    def _mean(self, values, weight):
        if weight not in self._shares:
            self._shares[weight] = self._shares_of(weight)
        shares = [tf.cast(share, values[0].dtype) for share in self._shares[weight]]
        return tf.add_n([value * share for value, share in zip(values, shares)])

    def _shares_of(self, weight):
        """What the replicas' means count: by their rows, or by a mask's sum, for example."""
        parts, total = [replica.size for replica in self.replicas], self.rows
        if weight is not None:
            parts, sums = [], []
            for replica in self.replicas:
                with tf.device(replica.device):
                    weights = self.trace.weights(weight, replica.shard)
                part, part_of_sum = [self._own(replica, each) for each in weights]
                parts.append(part)
                sums.append(part_of_sum)
            total = self.trace.total(weight, sums)
        total = tf.cast(total, tf.float64)
        return [tf.math.divide_no_nan(tf.cast(part, tf.float64), total) for part in parts]
