"""Batch normalization by the mean and the variance of the whole batch, over all replicas.

The formulas are those of arrays and of symbols: ``F`` is ``mx.nd`` or ``mx.sym``, as in a block.
"""

import contextlib
import functools
import threading
from typing import Any, Dict, Iterator, List, Optional, Sequence

import mxnet as mx
import numpy as np

from ..._rows.replica_threads import DifferentReductions, current_turn
from ..._runtime import patching
from . import reductions
from .arrays import is_numpy
from .graph import Graph
from .invocations import Interception, handle_of

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
    with contextlib.ExitStack() as stack:
        if is_asked is not None:
            stack.callback(Interception(_called).take_back)
            stack.enter_context(_COMPILED)
        _scope.is_asked = is_asked
        try:
            yield
        finally:
            _scope.is_asked = before


#: Attributes of the operations that normalize; MXNet's number has the digits of float32.
DEFAULTS = {"eps": float(np.float32(1e-3)), "momentum": 0.9, "fix_gamma": True}


@functools.lru_cache(maxsize=None)
def _kinds():
    """Return the names of the operations that normalize, by MXNet's numbers for them."""
    return {handle_of(name): name for name in reversed(NORMALIZING + SYNCHRONIZED)}


def _called(call, handle, inputs, names, values, out, *options):
    """Compute an operation for the whole batch, if it is to; else as MXNet does."""
    is_asked = _is_asked()
    name = None if is_asked is None else _kinds().get(handle)
    is_own = name in SYNCHRONIZED
    if name is None or not (is_own or is_asked) or not mx.autograd.is_training():
        return call(handle, inputs, names, values, out, *options)
    attributes = dict(zip(names, map(_parsed, values)))
    if attributes.get("use_global_stats"):
        return call(handle, inputs, names, values, out, *options)
    if current_turn() is not None:
        if out is not None:
            raise DifferentReductions  # then the block runs unsplit
        return _of_all_replicas(name, inputs, attributes)
    if is_own:  # which would wait for executors on other contexts
        kept = {name: v for name, v in zip(names, values) if name not in ("key", "ndev")}
        handle, names, values = handle_of("BatchNorm"), list(kept), list(kept.values())
    return call(handle, inputs, names, values, out, *options)


def _parsed(value):
    """Return the value of an attribute, which a script may have given as a text."""
    return {"true": True, "false": False}.get(str(value).lower(), value)


def _uncompiled(call):
    """Return what replaces the method by which Gluon calls a compiled block, which cannot wait."""

    @functools.wraps(call)
    def uncompiled(block, *args):
        is_asked = _is_asked()
        if is_asked is None or not mx.autograd.is_training():
            return call(block, *args)
        if not isinstance(block, mx.gluon.SymbolBlock):
            with patching.replaced(block, _active=False):
                return mx.gluon.HybridBlock.forward(block, *args)
        if current_turn() is not None and is_in_graph(block, is_asked):
            raise DifferentReductions
        return call(block, *args)

    return uncompiled


# Of all blocks: one may be kept where its parent does not know of it.
_COMPILED = patching.SharedPatches(lambda: [(mx.gluon.HybridBlock, "_call_cached_op", _uncompiled)])


def is_in_graph(block: "Any", is_asked: bool) -> bool:
    """Return whether a ``SymbolBlock`` is to normalize by the statistics of the whole batch."""
    kinds = SYNCHRONIZED + (NORMALIZING if is_asked else ())
    graph = Graph([], mx.sym.Group(list(block._cached_graph[1])))
    return any(node["op"] in kinds for node in graph.nodes)


def _of_all_replicas(name, inputs, given):
    """Compute an operation, with these arrays and attributes, for the whole batch."""
    if len(inputs) < 5 or given.get("output_mean_var") or name == "BatchNorm_v1":
        raise DifferentReductions
    is_np = is_numpy(inputs[0])
    inputs = [array.as_nd_ndarray() if is_np else array for array in inputs]
    dtype, axis = inputs[0].dtype, int(given.get("axis", 1))
    if inputs[1].dtype != dtype:  # of low precision
        inputs[0] = inputs[0].astype(inputs[1].dtype)
    data = inputs[0]
    like, variance = moments(mx.nd, data, axis)
    count = data.size // max(1, variance.size)
    values = [like.reshape((-1,)), variance]
    statistics, total = reductions.merge((name, axis), values, count, merged_moments)
    attributes = {key: type(value)(given.get(key, value)) for key, value in DEFAULTS.items()}
    factor = correction(data.context, given.get("cudnn_off"), total)
    with synchronizing(None):
        result = normalized(mx.nd, inputs, statistics, like, axis, attributes, factor)
    result = mx.nd.relu(result) if name == "_contrib_BatchNormWithReLU" else result
    result = result.astype(dtype) if result.dtype != dtype else result
    return result.as_np_ndarray() if is_np else result
