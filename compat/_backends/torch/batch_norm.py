"""Batch normalization by the mean and the variance of the whole batch, of replicas or of ranks."""

import inspect
import sys
from typing import Any, Dict, Iterable, Tuple

import torch

from ..._runtime import synchronized

_LAYER = torch.nn.SyncBatchNorm
#: Functions that ``compute`` replaces: what modules call, what that calls, and what modules call
#: that were made by ``torch.export``.
FUNCTION, CALLED = torch.nn.functional.batch_norm, torch.batch_norm
OPERATOR, OVERLOAD = torch.ops.aten.batch_norm, torch.ops.aten.batch_norm.default
# Parts of the names of functions that compute a part of batch normalization, or no statistics.
_PARTS = ("stats", "elemt", "backward", "no_training", "no_update", "quantized")


def layers(named: "Iterable[Tuple[str, Any]]") -> "Dict[str, Any]":
    """Return the modules among these, each with its name, that are batch normalization."""
    named = list(named)
    scripted = {
        name: part
        for name, part in named
        if isinstance(part, torch.jit.ScriptModule) and part.original_name.startswith("BatchNorm")
    }
    return {**synchronized.layers(named), **scripted}


def is_asked_here() -> bool:
    """Return whether a layer that asks for it is calling."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("split_calls.py"):
        if frame.f_code is _LAYER.forward.__code__:
            return True
        frame = frame.f_back
    return False


def is_other(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call that torch dispatches is batch normalization by another function."""
    name = getattr(function, "__name__", "")
    if "batch_norm" not in name or any(part in name for part in _PARTS):
        return False
    return kwargs.get("training", any(value is True for value in args[3:6]))


def uses_batch(bound: "dict[str, Any]") -> bool:
    """Return whether a call, with these arguments, uses its batch's mean and variance."""
    return bool(bound.get("training")) or bound.get("running_mean") is None


def compute(reductions: Any, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Compute one of the functions above in training, for the whole batch."""
    signature = _SIGNATURE if function is FUNCTION else _OF_OTHERS
    arguments = signature.bind(reductions, *args, **kwargs).arguments
    arguments.pop("cudnn_enabled", None)
    if not uses_batch(arguments):  # a layer that was frozen since
        return function(*args, **kwargs)
    return _batch_norm(**arguments)


def _batch_norm(
    reductions,
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    shape = [1, -1] + [1] * (input.dim() - 2)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    low = input.dtype in (torch.half, torch.bfloat16)
    value = input.float() if low else input
    mean, variance, count = reductions.moments(value, dims)
    if count < 2:
        size = [count, *input.shape[1:]]
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size}"
        )
    with torch.no_grad():
        pairs = (running_mean, mean), (running_var, variance * (count / (count - 1.0)))
        for average, new in pairs:
            if average is not None:
                average.mul_(1 - momentum).add_(new.detach().view(-1).to(average), alpha=momentum)
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.view(shape)
    centred = value - mean
    if bias is None:
        return (centred * scale).to(input.dtype)
    return torch.addcmul(bias.view(shape), centred, scale).to(input.dtype)


_SIGNATURE = inspect.signature(_batch_norm)


_ORDER = "reductions input weight bias running_mean running_var training momentum eps cudnn_enabled"
# Of those that the function calls.
_OF_OTHERS = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _ORDER.split()]
)
