"""Batch normalization by the mean and the variance of the whole batch, of replicas or of ranks."""

import inspect
import sys
from typing import Any

import torch

_LAYER = torch.nn.SyncBatchNorm


def is_asked_here() -> bool:
    """Return whether a layer that asks for it is calling."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("split_calls.py"):
        if frame.f_code is _LAYER.forward.__code__:
            return True
        frame = frame.f_back
    return False


def uses_batch(bound: "dict[str, Any]") -> bool:
    """Return whether a call, with these arguments, uses its batch's mean and variance."""
    return bool(bound.get("training")) or bound.get("running_mean") is None


def compute(reductions: Any, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Compute ``torch.nn.functional.batch_norm()`` in training, for the whole batch."""
    arguments = _SIGNATURE.bind(reductions, *args, **kwargs).arguments
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
