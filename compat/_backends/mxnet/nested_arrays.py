"""Arguments and results of Gluon blocks, nested as they may be, for the MXNet backend."""

import mxnet as mx

from ..._ranks.arrays import parts_of
from ..._rows import REPLICATED, Partial, Sharded


def _leaves(value, kind):
    """All of a kind within lists, tuples and dictionaries."""
    return (part for part in parts_of(value) if isinstance(part, kind))


def _arrays(values):
    return _leaves(values, mx.nd.NDArray)


def _mapped(function, value, place=()):
    """The same with ``function(place, array)`` for each array; a place is a tuple of keys."""
    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, each, place + (key,)) for key, each in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, dict):
        return {key: _mapped(function, each, place + (key,)) for key, each in value.items()}
    return function(place, value) if isinstance(value, mx.nd.NDArray) else value


def _on(context, array):
    return getattr(array, "as_in_ctx", array.as_in_context)(context)  # mx.np has the short one


def _others(value):
    """What is no array, in its place."""
    return _mapped(lambda place, array: None, value)


# The replicas' results as one -------------------------------------------------------------------


def can_be_merged(placement):
    """Whether the value of the whole batch is put together here from the replicas' values."""
    if isinstance(placement, Sharded):
        return placement == Sharded(placement.axis, placement.inner)
    return placement in (REPLICATED, Partial("sum"), Partial("mean"))


def are_of(placements, results, sizes):
    """Whether results are what ``placements`` say, as far as their shapes tell."""
    arrays = [list(_arrays(result)) for result in results]
    for result, found in zip(results, arrays):
        if _others(result) != _others(results[0]) or len(found) != len(placements):
            return False
    for placement, parts in zip(placements, zip(*arrays)):
        axis = getattr(placement, "axis", None)
        each = {  # sizes, and along the rows the number of elements of each row
            tuple(n / (size or 1) if dim == axis else n for dim, n in enumerate(part.shape))
            for part, size in zip(parts, sizes)
        }
        if len(each) > 1 or any(n % 1 for n in each.pop()):
            return False
    return True


def merged(placements, results, sizes, context):
    """One result for the whole batch; of a replica whose shard is empty nothing is kept.

    It has all replicas' gradients: a trainer wants some from each.
    """
    parts = zip(*[list(_arrays(result)) for result in results])
    values = [
        _merged(placement, [_on(context, each) for each in part], sizes, context)
        for placement, part in zip(placements, parts)
    ]
    values.reverse()
    return _mapped(lambda place, array: values.pop(), results[0])


def _merged(placement, parts, sizes, context):
    if placement == REPLICATED or len(parts) == 1:
        return parts[0]
    if isinstance(placement, Partial):
        total = float(sum(sizes)) if placement.how == "mean" else None
        weights = [size / total if total else float(size > 0) for size in sizes]
        return sum(part * weight for part, weight in zip(parts, weights))
    axis = placement.axis
    whole = concatenated(parts, axis)
    if all(sizes):
        return whole
    each = parts[0].shape[axis]  # every replica has computed one row
    kept = [n * each + k for n, size in enumerate(sizes) if size for k in range(each)]
    module = mx.np if _is_numpy(whole) else mx.nd
    return module.take(whole, module.array(kept, dtype="int32", ctx=context), axis=axis)


def concatenated(arrays, axis):
    if _is_numpy(arrays[0]):
        return mx.np.concatenate(arrays, axis=axis)
    return mx.nd.concat(*arrays, dim=axis)


def _is_numpy(array):
    return hasattr(mx, "np") and isinstance(array, mx.np.ndarray)
