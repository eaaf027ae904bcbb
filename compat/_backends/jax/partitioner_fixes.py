"""Fixes for XLA's partitioner, for dimensions that do not divide among the devices."""

import threading

import jax
from jax.interpreters import ad

from ..._runtime import patching

_patching = threading.Lock()


def install():
    """Have JAX bind these operations so that they are right, in the whole process."""
    with _patching:
        fixes = [
            (ad.primitive_jvps, jax.lax.sort_p, _differentiate_sort),
            (jax.lax.dynamic_update_slice_p, "bind", _bind_update),
        ]
        due = [fix for fix in fixes if patching.find(*fix[:2]) is None]
        for fix in due:
            patching.Patch(*fix)
        if due:
            jax.clear_caches()  # which have what was bound before


def _bind_update(array, update, *starts, **options):
    """Update a slice at indices that are in bounds.

    XLA moves one that is past the end back, so that the slice fits. Its partitioner moves it less
    far, by the length with which it has padded the shards: the update is lost. JAX differentiates
    ``x[i]`` to such an update.
    """
    starts = [
        _clamped(start, length - size)
        for start, length, size in zip(starts, array.shape, update.shape)
    ]
    primitive = jax.lax.dynamic_update_slice_p
    return type(primitive).bind(primitive, array, update, *starts, **options)


def _clamped(start, last):
    """Return an index of at most ``last``; as it is where that depends on unknown sizes."""
    return jax.numpy.minimum(start, last) if isinstance(last, int) else start


def _differentiate_sort(primals, tangents, dimension, **options):
    """Differentiate sorts by signed indices of 32 bits.

    JAX's own rule gathers by unsigned ones, and promises that they are in bounds. XLA's
    partitioner fails a check at that, and ends the process, where a dimension does not divide
    among the devices.
    """
    order = jax.lax.broadcasted_iota("int32", primals[0].shape, dimension)
    *results, order = jax.lax.sort_p.bind(*primals, order, dimension=dimension, **options)

    def sort(tangent):
        along = jax.numpy.take_along_axis
        return along(tangent, order, dimension, mode="promise_in_bounds")

    return results, [t if isinstance(t, ad.Zero) else sort(t) for t in tangents]
