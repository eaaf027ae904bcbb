"""Results and new values of replicas, merged into those of the whole batch by their placements."""

import tensorflow as tf

from ..._rows import Count, Partial, Replicated, Sharded
from .propagation import Added


def is_merged(placement, dtype):
    """Return whether there is a way to the value for all rows from those of the replicas."""
    if isinstance(placement, Sharded):
        return placement.axis == 0 and placement.copies == 1
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
        self.replicas, self.trace = replicas, trace
        total = max(rows, 1) if isinstance(rows, int) else tf.maximum(rows, 1)
        #: What the replicas' means count.
        self.shares = [replica.size / total for replica in replicas]

    def results(self):
        """Return the results of the call for the whole batch, as ``Replica.values``."""
        if self.trace is None:
            return self.replicas[0].values
        found = {}
        for name, placements in self.trace.placements.items():
            values = zip(*[replica.values[name] for replica in self.replicas])
            found[name] = [self._result(name, *each) for each in zip(placements, values)]
        return found

    def _result(self, name, placement, values):
        if not tf.is_tensor(values[0]):
            return values[0]
        if name in ("masks", "logits") and not isinstance(placement, Sharded):
            return None  # they would belong to its rows
        if isinstance(values[0], (tf.SparseTensor, tf.IndexedSlices)):
            return values[0]  # the same for any rows, and TensorFlow adds up none
        return self.value(list(values), placement)

    def value(self, values, placement, before=None):
        """Return one value for the whole batch.

        Arguments:
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Sharded):
            return tf.concat(values, axis=0)
        dtype, how = values[0].dtype, getattr(placement, "how", "sum")
        if isinstance(placement, Replicated):
            is_merged = before is None and (dtype.is_floating or dtype.is_complex)
            return self._mean(values) if is_merged else values[0]
        if how == "mean":
            return self._mean(values)
        if how in _EXTREME:
            of_numbers, of_booleans = _EXTREME[how]
            reduce = of_booleans if dtype == tf.bool else of_numbers
            return reduce(tf.stack(values), axis=0)
        relative = isinstance(placement, Added)
        parts = [value - before for value in values] if relative else values
        parts = [self._own(*each) for each in zip(self.replicas, parts)]
        return tf.add_n([before] + parts if relative else parts)

    def _own(self, replica, value):
        """Return the value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else tf.zeros_like(value)
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)

    def _mean(self, values):
        # A number of Python's would be one of 32 bits in between.
        shares = [tf.convert_to_tensor(share, tf.float64) for share in self.shares]
        shares = [tf.cast(share, values[0].dtype) for share in shares]
        return tf.add_n([value * share for value, share in zip(values, shares)])
