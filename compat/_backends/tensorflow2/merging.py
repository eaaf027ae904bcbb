"""Results and new values of replicas, merged into those of the whole batch by their placements."""

import tensorflow as tf

from ..._rows import Count, Partial, Replicated, Sharded
from ..._rows.merging import merge
from .._tensorflow.merging import TensorOperations
from .propagation import Added


def is_merged(placement, dtype):
    """Return whether there is a way to the value for all rows from those of the replicas."""
    if isinstance(placement, Sharded):
        return placement.axis == 0 and placement.copies == 1
    if isinstance(placement, Partial) and placement.how == "mean":
        return "float" in str(dtype) or "complex" in str(dtype)
    return isinstance(placement, (Added, Partial, Replicated)) or placement == Count()


class Merging:
    """The replicas' values become those of the whole batch.

    Arguments:
        trace: the ``Trace`` of the plain call; None for a single replica.
    """

    def __init__(self, replicas, trace):
        self.replicas, self.trace = replicas, trace
        self._operations = TensorOperations(tf)

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
            values: those of the replicas.
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Added):
            changes = [value - before for value in values]
            return before + self._merged(Partial("sum"), changes)
        is_number = values[0].dtype.is_floating or values[0].dtype.is_complex
        if isinstance(placement, Replicated) and before is None and is_number:
            placement = Partial("mean")  # each replica's value has a gradient
        return self._merged(placement, values)

    def _merged(self, placement, values):
        if placement in (Partial("sum"), Count()):
            values = [self._counted(*pair) for pair in zip(self.replicas, values)]
        sizes = [replica.size for replica in self.replicas]
        return merge(placement, values, sizes, self._operations)

    def _counted(self, replica, value):
        """Return a term of a sum: zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value  # which is not counted there
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)
