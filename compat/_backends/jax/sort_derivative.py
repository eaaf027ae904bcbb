"""A derivative of sorting that XLA's partitioner accepts for any number of rows."""

import threading

import jax
from jax.interpreters import ad

from ..._runtime import patching

_patching = threading.Lock()


def install():
    """Have JAX differentiate sorts by this rule, in the whole process."""
    with _patching:
        if patching.find(ad.primitive_jvps, jax.lax.sort_p) is None:
            patching.Patch(ad.primitive_jvps, jax.lax.sort_p, _differentiate_sort)
            jax.clear_caches()  # which have derivatives by JAX's own rule


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
