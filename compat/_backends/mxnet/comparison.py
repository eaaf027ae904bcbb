"""Arrays compared with values that they had before.

MXNet does not report that an array was written: its engine counts the writes of each array, but no
function of its interface returns that number.
"""

import ctypes
import functools
import os

import mxnet as mx
import numpy as np

from .arrays import context_of, is_numpy

_LIBRARY = ctypes.CDLL("msvcrt" if os.name == "nt" else None)  # C's


def differing(pairs):
    """Return the numbers of the pairs whose arrays differ in shape, type, context or values.

    It waits for the arrays.

    Arguments:
        pairs: of dense arrays.
    """
    differing, elsewhere = set(), []
    for number, (one, other) in enumerate(pairs):
        context = context_of(one)
        if (one.shape, one.dtype, context) != (other.shape, other.dtype, context_of(other)):
            differing.add(number)
        elif not _is_in_memory(context):
            elsewhere.append(number)
        elif not _are_bitwise_equal(one, other):
            differing.add(number)
    flags = _flags([pairs[number] for number in elsewhere])
    differing.update(number for number, flag in zip(elsewhere, flags) if flag)
    return differing


def _is_in_memory(context):
    return context.device_type.startswith("cpu")


def _are_bitwise_equal(one, other):
    """Return whether two arrays are equal, where they lie: MXNet's operations are much slower."""
    size = one.size * np.dtype(one.dtype).itemsize
    return not _LIBRARY.memcmp(_address(one), _address(other), ctypes.c_size_t(size))


def _address(array):
    array.wait_to_read()
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address


def _flags(pairs):
    """Return for each pair whether the arrays differ, by one call and one transfer to the host."""
    if not pairs:
        return []
    arrays = [a.as_nd_ndarray() if is_numpy(a) else a for pair in pairs for a in pair]
    with mx.autograd.pause():
        return _comparison(len(pairs))(*arrays).asnumpy()


@functools.lru_cache(maxsize=None)
def _comparison(count):
    """Return a compiled function of so many pairs: 1 for each pair that differs, else 0."""
    variables = [mx.sym.var(f"compat_{number}") for number in range(2 * count)]
    flags = [
        mx.sym.cast(mx.sym.reshape(mx.sym.max(one != other), (1,)), "float32")
        for one, other in zip(variables[::2], variables[1::2])
    ]
    return mx.nd.CachedOp(mx.sym.concat(*flags, dim=0))
