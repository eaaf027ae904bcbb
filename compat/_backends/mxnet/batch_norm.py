"""Batch normalization by the mean and the variance of the whole batch, over all replicas.

The formulas are those of arrays and of symbols: ``F`` is ``mx.nd`` or ``mx.sym``, as in a block.
"""

import contextlib
import functools
import inspect
import threading
from typing import Any, Dict, Iterator, List, Optional, Sequence

import mxnet as mx
import numpy as np

from ..._rows.replica_threads import DifferentReductions, current_turn
from ..._runtime import patching
from . import reductions
from .arrays import is_numpy

#: Operations that normalize by their batch's statistics if a model is asked for it; and always.
NORMALIZING = ("BatchNorm", "BatchNorm_v1", "_npx_batch_norm", "_contrib_BatchNormWithReLU")
SYNCHRONIZED = ("_contrib_SyncBatchNorm",)


def moments(F: "Any", data: "Any", axis: int) -> "Any":
    """Return the mean of each channel, with all dimensions; and the variance, without them."""
    mean = F.mean(data, axis=axis, exclude=True, keepdims=True)
    distances = F.square(F.broadcast_sub(data, F.BlockGrad(mean)))
    return mean, F.mean(distances, axis=axis, exclude=True)


def merged_moments(replicas: "Sequence[Any]", counts: "Sequence[int]") -> "List[Any]":
    """Return mean and variance of all rows from those of replicas, as Chan, Golub and LeVeque do.

    One replica after the other is added: MXNet adds up eight and more gradients of one value in
    place, and overwrites them by what another context has copied.

    Arguments:
        replicas: pairs of a replica's mean, and of the variance about it.
        counts: how many elements of a channel each of them has.
    """
    (mean, variance), total = replicas[0], counts[0]
    for (other, spread), count in zip(replicas[1:], counts[1:]):
        total += count
        share = float(count) / total
        difference = other - mean
        mean = mean + share * difference
        variance = (1 - share) * (variance + share * (difference * difference)) + share * spread
    return [mean, variance]


def normalized(
    F: "Any",
    inputs: "Sequence[Any]",
    statistics: "Sequence[Any]",
    like: "Any",
    axis: int,
    attributes: "Dict[str, Any]",
    correction: float = 1.0,
) -> "Any":
    """Return normalized data, whose backward pass updates the moving averages.

    MXNet's own operation updates them, in its backward pass, by two rows that have the statistics
    of the whole batch.

    Arguments:
        F: ``mx.nd`` or ``mx.sym``.
        inputs: those of the operation: data, gamma, beta and the moving averages.
        statistics: mean and variance of the whole batch, a number for each channel.
        like: an array with all dimensions of the data, of which that of channels alone is not 1.
        axis: that of channels.
        attributes: the operation's: ``eps``, ``momentum`` and ``fix_gamma``.
        correction: what the moving average's variance is multiplied by.
    """
    data, gamma, beta, *averages = inputs
    mean, variance = statistics
    deviation = F.sqrt(variance * correction)
    rows = F.BlockGrad(F.stack(mean - deviation, mean + deviation))
    # A term of 0 has the backward pass run the update, if there is any gradient to compute.
    shift = beta + 0 * mean
    update = F.BatchNorm(rows, gamma, shift, *averages, axis=1, cudnn_off=True, **attributes)
    # In this order: a module numbers arguments, and its optimizer's states, by it.
    shift = 0 * F.sum(update, axis=0) + shift
    root = F.sqrt(variance + attributes["eps"])
    scale = 1 / root if attributes["fix_gamma"] else gamma / root
    if F is mx.sym:  # whose operations take statistics from variables alone
        mean, scale, shift = [F.reshape_like(value, like) for value in (mean, scale, shift)]
        return F.broadcast_add(F.broadcast_mul(F.broadcast_sub(data, mean), scale), shift)
    # MXNet's kernel has no gradients of statistics: they pass through gamma and beta, whose values
    # these terms do not change.
    fixed_mean, fixed = F.BlockGrad(mean), F.BlockGrad(variance)
    beta = (fixed_mean - mean) * scale + shift
    gamma = scale * F.BlockGrad(root)
    options = {"eps": attributes["eps"], "fix_gamma": False, "use_global_stats": True}
    return F.BatchNorm(data, gamma, beta, fixed_mean, fixed, axis=axis, **options)


def correction(context: "Any", is_cudnn_off: "Any", count: int) -> float:
    """Return what moving averages multiply a variance by.

    Arguments:
        context: where it is computed.
        is_cudnn_off: whether MXNet computes it without cuDNN, which averages variances of samples.
        count: the number of elements of a channel.
    """
    is_unbiased = context.device_type == "gpu" and not is_cudnn_off and count > 1
    return count / (count - 1.0) if is_unbiased else 1.0


# Of a thread: ``is_asked``, or None outside of ``synchronizing()``.
_scope = threading.local()


def _is_asked():
    return getattr(_scope, "is_asked", None)


@contextlib.contextmanager
def synchronizing(is_asked: "Optional[bool]") -> "Iterator[None]":
    """Have operations, within replicas, normalize by the statistics of the whole batch.

    Arguments:
        is_asked: whether all of them, or else those that do so by themselves; None: none of them.
    """
    before = _is_asked()
    with _OPERATIONS:
        _scope.is_asked = is_asked
        try:
            yield
        finally:
            _scope.is_asked = before


def _operations():
    """Yield owners, names and wrappers of MXNet's functions."""
    spaces = [mx.nd, mx.nd.op, mx.nd.contrib, getattr(mx, "npx", None)]
    spaces += [getattr(mx.nd, "numpy_extension", None)]
    for space in spaces:
        for name in ("BatchNorm", "BatchNorm_v1", "batch_norm", "BatchNormWithReLU"):
            if hasattr(space, name):
                yield space, name, functools.partial(_replacement, name)
    yield mx.nd.contrib, "SyncBatchNorm", functools.partial(_replacement, "SyncBatchNorm")


_OPERATIONS = patching.SharedPatches(_operations)

#: Attributes of the operations that normalize; MXNet's number has the digits of float32.
DEFAULTS = {"eps": float(np.float32(1e-3)), "momentum": 0.9, "fix_gamma": True}


def _replacement(name, plain):
    """Return what replaces an operation's function."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def batch_norm(*args, **kwargs):
        is_own = name == "SyncBatchNorm"
        if _is_asked() is None or not (is_own or _is_asked()):
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        bound.update(bound.pop("kwargs", {}))
        given = {key: value for key, value in bound.items() if value is not mx.base._Null}
        if not mx.autograd.is_training() or given.get("use_global_stats"):
            return plain(*args, **kwargs)
        if current_turn() is not None:
            return _of_all_replicas(name, given)
        if is_own:  # which would wait for executors on other contexts
            given = {key: value for key, value in given.items() if key not in ("key", "ndev")}
            return mx.nd.BatchNorm(**given)
        return plain(*args, **kwargs)

    return batch_norm


def _of_all_replicas(name, given):
    """Compute an operation, with these arguments, for the whole batch."""
    names = "data", "gamma", "beta", "moving_mean", "moving_var"
    inputs = [given[name] for name in names if name in given]
    others = given.get("output_mean_var"), given.get("out"), name == "BatchNorm_v1"
    if len(inputs) < len(names) or any(value not in (None, False) for value in others):
        raise DifferentReductions  # then the block runs unsplit
    is_np = is_numpy(inputs[0])
    inputs = [array.as_nd_ndarray() for array in inputs] if is_np else inputs
    dtype, axis = inputs[0].dtype, given.get("axis", 1)
    if inputs[1].dtype != dtype:  # of low precision
        inputs[0] = inputs[0].astype(inputs[1].dtype)
    data = inputs[0]
    like, variance = moments(mx.nd, data, axis)
    count = data.size // max(1, variance.size)
    values = [like.reshape((-1,)), variance]
    statistics, total = reductions.merge((name, axis), values, count, merged_moments)
    attributes = {key: given.get(key, default) for key, default in DEFAULTS.items()}
    factor = correction(data.context, given.get("cudnn_off"), total)
    with synchronizing(None):
        result = normalized(mx.nd, inputs, statistics, like, axis, attributes, factor)
    result = mx.nd.relu(result) if name == "BatchNormWithReLU" else result
    result = result.astype(dtype) if result.dtype != dtype else result
    return result.as_np_ndarray() if is_np else result
