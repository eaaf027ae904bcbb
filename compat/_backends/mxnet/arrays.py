"""MXNet's two kinds of arrays, nested in lists, tuples and dictionaries, and their contexts."""

import mxnet as mx

from ..._runtime import nested


def leaves(value, kind=mx.nd.NDArray):
    """Return all arrays, or objects of another kind, in lists, tuples and dictionaries."""
    return (part for part in nested.leaves(value) if isinstance(part, kind))


def mapped(function, value, place=()):
    """Return a nested value with ``function(place, array)`` in place of each array.

    A place is a tuple of keys.
    """
    if isinstance(value, (list, tuple)):
        parts = [mapped(function, part, place + (key,)) for key, part in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, dict):
        return {key: mapped(function, part, place + (key,)) for key, part in value.items()}
    return function(place, value) if isinstance(value, mx.nd.NDArray) else value


def without_arrays(value):
    """Return a nested value with None in place of each array."""
    return mapped(lambda place, array: None, value)


def is_numpy(array):
    """Return whether an array is one of ``mx.np``."""
    return hasattr(mx, "np") and isinstance(array, mx.np.ndarray)


def on_context(context, array):
    """Return an array, or a copy of it on this context if it is on another."""
    return getattr(array, "as_in_ctx", array.as_in_context)(context)  # mx.np has the short one


def context_of(array):
    """Return the context of an array of either kind."""
    return array.ctx if is_numpy(array) else array.context


def like(values, array):
    """Return values as an array of the kind, the type and the context of ``array``."""
    made = mx.nd.array(values, ctx=context_of(array), dtype=array.dtype)
    return made if type(array) is mx.nd.NDArray else made.as_np_ndarray()


def are_equal(arrays):
    """Return whether all arrays are equal."""
    first, *others = [array.asnumpy() for array in arrays]
    return all((other == first).all() for other in others)
