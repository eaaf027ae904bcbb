"""Values of a batch merged from those of the replicas of a Gluon block, by their placements."""

import mxnet as mx

from ..._rows import REPLICATED, Partial, Sharded
from ..._rows.merging import Operations, merge
from .arrays import is_numpy, leaves, mapped, on_context, without_arrays


def can_be_merged(placement):
    """Return whether the replicas' values can be merged to that of the whole batch."""
    if isinstance(placement, Sharded):
        return placement == Sharded(placement.axis, placement.inner)
    return placement in (REPLICATED, Partial("sum"), Partial("mean"))


def are_of(placements, results, sizes):
    """Return whether the shapes of results agree with their placements."""
    arrays = [list(leaves(result)) for result in results]
    for result, parts in zip(results, arrays):
        if without_arrays(result) != without_arrays(results[0]) or len(parts) != len(placements):
            return False
    for placement, parts in zip(placements, zip(*arrays)):
        axis = getattr(placement, "axis", None)
        shapes = {  # for each part, with the number of elements of a row along the batch dimension
            tuple(n / (size or 1) if dim == axis else n for dim, n in enumerate(part.shape))
            for part, size in zip(parts, sizes)
        }
        if len(shapes) > 1 or any(n % 1 for n in shapes.pop()):
            return False
    return True


def merged(placements, results, sizes, context):
    """Return the result for the whole batch, from those of replicas with so many rows."""
    parts = zip(*map(leaves, results))
    values = (
        merge(placement, [on_context(context, array) for array in arrays], sizes, ARRAYS)
        for placement, arrays in zip(placements, parts)
    )
    return mapped(lambda place, array: next(values), results[0])


class _Arrays(Operations):
    def concatenate(self, parts, axis):
        return concatenated(parts, axis)


#: Operations on arrays of either kind.
ARRAYS = _Arrays()


def concatenated(arrays, axis):
    """Return arrays of either kind, concatenated along a dimension."""
    if is_numpy(arrays[0]):
        return mx.np.concatenate(arrays, axis=axis)
    return mx.nd.concat(*arrays, dim=axis)
