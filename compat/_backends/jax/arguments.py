"""Arrays among the arguments of calls and steps, their rows, and their sharding."""

import sys

import jax
import numpy as np

from ... import _keras


def leaves(values):
    """Return the leaves of nested values by Keras, for which a sparse array is a single leaf."""
    return _keras.tree_of(sys.modules["keras"]).flatten(values)


def mapped(function, values):
    """Map nested values by Keras, which keeps the order of dictionaries, unlike JAX."""
    return _keras.tree_of(sys.modules["keras"]).map_structure(function, values)


def as_array(value):
    """Return an array of NumPy, as eager steps and direct calls may get, as an array of JAX."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return jax.numpy.asarray(value) if is_array else value


def put(value, sharding):
    """Place a value by a sharding, with the mask that losses and metrics expect at an output."""
    place = jax.lax.with_sharding_constraint if is_staged(value) else jax.device_put
    result = place(value, sharding)
    masking = sys.modules.get("keras.src.backend.common.masking")
    if masking is None:  # Keras before 3.6: an attribute, which eager arrays cannot have
        if hasattr(value, "_keras_mask"):
            result._keras_mask = value._keras_mask
        return result
    mask = masking.get_keras_mask(value)
    if mask is not None:
        masking.set_keras_mask(result, mask)
    return result


def is_staged(value):
    """Return whether a program is being traced, and not an array differentiated eagerly."""
    while isinstance(value, jax.core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    return isinstance(value, jax.core.Tracer)


def has_rows(value):
    """Return whether this is a dense array (sparse ones stay whole) with a first dimension."""
    return isinstance(value, (jax.Array, jax.core.Tracer)) and value.ndim > 0


def rows_of(model, data):
    """Return the number of rows of a batch."""
    # By Keras, for which a sparse array is one leaf: JAX takes it apart.
    leaves = _keras.tree_of(_keras.keras_of(model)).flatten(data)
    batch = next(leaf for leaf in leaves if leaf is not None)
    return int(batch.shape[0])
