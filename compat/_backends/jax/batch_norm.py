"""Batch normalization by the statistics of the whole batch: layers of Keras in a rank's step.

On several devices of a process JAX computes on arrays of the whole batch.
"""

import contextlib
import functools

import jax.numpy as jnp

from ... import _keras
from ..._rows import own_statistics
from ..._runtime import patching, synchronized
from . import reductions
from .gradient_exchange import line_of

# The methods that a user's class may define in place of Keras'.
_METHODS = ("call", "_moments")


def requested(model):
    """Return a model's layers that are to normalize by the statistics of all ranks' rows."""
    return synchronized.requested(model, _keras.all_layers)


def is_synchronizable(layer):
    """Return whether a layer is batch normalization as Keras has it."""
    return _keras.has_keras_methods(layer, _METHODS)


def synchronizable(model, warned):
    """Return those layers of ``requested`` that can.

    Arguments:
        model: the model.
        warned: layers of which there was a warning that they cannot; others are added.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``, there are others.
    """
    layers = requested(model)
    others = [layer for layer in layers if not is_synchronizable(layer)]
    new = [layer for layer in others if not any(layer is other for other in warned)]
    warned += new
    if new:
        names, is_asked = [layer.name for layer in new], synchronized.is_asked(model)
        own_statistics.warn_of_layers("jax", model.name, "rank", names, is_asked)
    return list(filter(is_synchronizable, layers))


@contextlib.contextmanager
def over_ranks(model, layers, place, mark):
    """Let layers, within a block, normalize by the statistics of all ranks' rows.

    Arguments:
        model: the one that has them.
        layers: those of ``synchronizable``.
        place: this rank's ``Place``.
        mark: as ``gradient_marks.mark``.
    """
    keras = _keras.keras_of(model)
    with contextlib.ExitStack() as patched:
        for layer in layers:
            if patching.find(layer, "_moments") is None:  # else within another model's step
                moments = functools.partial(_moments, keras, layer, place, mark)
                patched.enter_context(patching.replaced(layer, _moments=moments))
        yield


def _moments(keras, layer, place, mark, inputs, mask):
    """Return mean and variance, merged as by Chan et al.: as stable as those of one process."""
    axes = tuple(layer._reduction_axes)
    is_valid, epsilon = True, 0.0
    if mask is not None:
        is_valid = jnp.broadcast_to(mask[..., None], inputs.shape).astype(bool)
        epsilon = keras.config.epsilon()

    def total(values):
        return jnp.sum(jnp.where(is_valid, values, 0), axes, keepdims=True)

    summed = total(inputs)
    count = jnp.full([1] * inputs.ndim, inputs.size // summed.size, inputs.dtype)
    if mask is not None:
        count = total(jnp.ones_like(inputs))
    mean = summed / jnp.maximum(count, 1)
    squares = total(jnp.square(inputs - mean))
    counts, means, squares = reductions.gathered([count, mean, squares], place, mark)
    number = counts.sum(0) + epsilon
    mean = (counts * means).sum(0) / number
    variance = (squares + counts * jnp.square(means - mean)).sum(0) / number
    return jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)


def check(model, program):
    """Warn of layers within loops of a step, where it cannot be cut.

    Raises:
        UnsupportedError: there are some, under ``configure_gpu(strict=True)``.
    """
    operation = reductions.within_functions(program.jaxpr)
    if operation is not None:
        where = line_of(operation)
        own_statistics.warn(
            f"Batch normalization of model {model.name!r} is called in jax.lax.scan() or the like "
            f"in {where}: each rank uses the statistics of its own samples there, and not those of "
            "the whole batch."
        )
