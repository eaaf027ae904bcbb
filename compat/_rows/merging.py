"""Values of replicas, merged into the value of the whole batch by their placement."""

import functools
import operator
from typing import Any, Sequence

from .placements import Mixed, Partial, Placement, Replicated, Sharded, Unknown


class Operations:
    """A framework's operations on arrays, which ``merge`` computes with; these are on numbers.

    A backend overrides those that operators of Python do not cover.
    """

    def concatenate(self, parts: "Sequence[Any]", axis: int) -> "Any":
        """Return arrays concatenated along a dimension."""
        raise NotImplementedError

    def split(self, part: "Any", count: int, axis: int) -> "Sequence[Any]":
        """Return so many parts of the same length, along a dimension."""
        raise NotImplementedError

    def add(self, parts: "Sequence[Any]") -> "Any":
        """Return the sum of arrays of one shape, element by element."""
        return functools.reduce(operator.add, parts)

    def maximum(self, parts: "Sequence[Any]") -> "Any":
        """Return the largest elements at each place; of booleans, whether any is true."""
        return functools.reduce(max, parts)

    def minimum(self, parts: "Sequence[Any]") -> "Any":
        """Return the smallest elements at each place; of booleans, whether all are true."""
        return functools.reduce(min, parts)

    def mean(self, parts: "Sequence[Any]", sizes: "Sequence[Any]") -> "Any":
        """Return the mean of arrays of one shape, weighted by sizes."""
        total = float(sum(sizes))
        return self.add([part * (size / total) for part, size in zip(parts, sizes)])


class _NumpyOperations(Operations):
    def concatenate(self, parts: "Sequence[Any]", axis: int) -> "Any":
        import numpy as np

        return np.concatenate(parts, axis)

    def split(self, part: "Any", count: int, axis: int) -> "Sequence[Any]":
        import numpy as np

        parts: "Sequence[Any]" = np.split(part, count, axis)
        return parts

    def maximum(self, parts: "Sequence[Any]") -> "Any":
        import numpy as np

        return np.maximum.reduce(parts)

    def minimum(self, parts: "Sequence[Any]") -> "Any":
        import numpy as np

        return np.minimum.reduce(parts)


#: Operations on Python's numbers, and on arrays of numpy.
NUMBERS, NUMPY = Operations(), _NumpyOperations()


def merge(
    placement: Placement, parts: "Sequence[Any]", sizes: "Sequence[Any]", operations: Operations
) -> "Any":
    """Return the value of the whole batch.

    Arguments:
        placement: how it is related to the values of the replicas.
        parts: the values of the replicas, in the order of their shards. If they are sharded, each
            has the rows of the replica's shard and no others.
        sizes: the number of rows of each replica, or another weight of its value in a mean: numbers
            or scalars of the framework. Where one is the number 0, the value does not count.
        operations: the framework's.
    """
    if isinstance(placement, Replicated):
        return parts[0]
    if isinstance(placement, Sharded):
        return _in_order(placement, parts, operations)
    if isinstance(placement, (Mixed, Unknown)):
        raise TypeError(f"{placement!r} cannot be merged.")
    counted = [pair for pair in zip(parts, sizes) if not _is_zero(pair[1])]
    if not counted:
        return parts[0]
    parts, sizes = zip(*counted)
    how = placement.how if isinstance(placement, Partial) else "sum"  # numbers of rows add up
    if how == "max":
        return operations.maximum(parts)
    if how == "min":
        return operations.minimum(parts)
    if how == "mean":
        return operations.mean(parts, sizes)
    return operations.add(parts)


def _in_order(placement: Sharded, parts: "Sequence[Any]", operations: Operations) -> "Any":
    """Return the shards one after the other, in each copy of the batch."""
    if placement.copies == 1:
        return operations.concatenate(parts, placement.axis)
    copies = zip(*[operations.split(p, placement.copies, placement.axis) for p in parts])
    return operations.concatenate([shard for copy in copies for shard in copy], placement.axis)


def _is_zero(size: "Any") -> bool:
    return isinstance(size, (int, float)) and not size
