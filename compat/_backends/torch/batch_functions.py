"""Functions along the batch dimension, computed from each replica's rows and a few reductions.

``compute`` has the arguments that ``ReducedFunction`` says: a ``ReplicaReductions``, the function,
its arguments.
"""

import functools
import inspect
from typing import Any, Callable, Dict

import torch

from ... import _rows
from .graph import name_of


def _maximum(reductions, value, dims):
    """Return the largest values along dimensions, 0 where that is not finite."""
    largest = reductions.reduce("max", value.detach().amax(dims, keepdim=True))
    return torch.where(largest.isfinite(), largest, 0.0)


def _exponentials(reductions, value, dims):
    """Return the largest values along dimensions, exponentials less these, and their sum."""
    largest = _maximum(reductions, value, dims)
    exponentials = (value - largest).exp()
    return largest, exponentials, reductions.reduce("sum", exponentials.sum(dims, keepdim=True))


def _softmax(reductions, value, dim, dtype=None):
    value = value if dtype is None else value.to(dtype)
    _, exponentials, total = _exponentials(reductions, value, dim)
    return exponentials / total


def _log_softmax(reductions, value, dim, dtype=None):
    value = value if dtype is None else value.to(dtype)
    largest, _, total = _exponentials(reductions, value, dim)
    return value - largest - total.log()


def _logsumexp(reductions, value, dim, keepdim=False):
    largest, _, total = _exponentials(reductions, value, dim)
    result = largest + total.log()
    return result if keepdim else result.squeeze(dim)


def _var_mean(reductions, value, dim, unbiased=True, keepdim=False, correction=None):
    dim = list(range(value.dim())) if dim is None else dim
    mean, variance, count = reductions.moments(value, dim)
    less = int(unbiased) if correction is None else correction
    variance = variance * (count / float(count - less)) if count > less else variance / 0.0
    return (variance, mean) if keepdim else (variance.squeeze(dim), mean.squeeze(dim))


def _spread(with_mean, is_root):
    def compute(reductions, value, dim=None, unbiased=True, keepdim=False, correction=None):
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        variance, mean = _var_mean(reductions, value, dim, unbiased, keepdim, correction)
        variance = variance.sqrt() if is_root else variance
        return (variance, mean) if with_mean else variance

    return compute


_FUNCTIONS: "Dict[str, Callable[..., Any]]" = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "var": _spread(False, False),
    "std": _spread(False, True),
    "var_mean": _spread(True, False),
    "std_mean": _spread(True, True),
}


def _bound(name, args, kwargs):
    """Return the arguments by the names that the function of ``_FUNCTIONS`` has for them."""
    kwargs = {("dim" if key == "axis" else key): value for key, value in kwargs.items()}
    kwargs.pop("_stacklevel", None)
    if "input" in kwargs:
        args = (kwargs.pop("input"), *args)
    if (
        name in ("softmax", "log_softmax")
        and len(args) > 2
        and not isinstance(args[2], torch.dtype)
    ):
        args = args[:2] + args[3:]  # ``_stacklevel``
    return inspect.signature(_FUNCTIONS[name]).bind(None, *args, **kwargs).arguments


def compute(reductions: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Compute one of these functions for the whole batch."""
    name = name_of(function)
    bound = dict(_bound(name, args, kwargs), reductions=reductions)
    return _FUNCTIONS[name](**bound)


def can_compute(call: Any) -> bool:
    """Return whether a call can be computed by reductions, if it goes along the rows."""
    try:
        is_known = call.name in _FUNCTIONS and _bound(call.name, call.args, call.kwargs)
    except TypeError:  # another form of it
        return False
    return bool(is_known) and len(call.tensors) == 1 and call.first.is_floating_point()


def gathering(call: Any) -> Any:
    """Return a function that joins rows to a state by gathering those of all replicas, or None.

    So a queue of samples takes in a batch.
    """
    if call.name not in ("cat", "concat", "concatenate") or "out" in call.kwargs:
        return None
    dim = call.get(1, "dim", "axis", default=0)
    sharded, others = [], []
    for place, (tensor, tag) in enumerate(zip(call.tensors, call.tags)):
        if not isinstance(tag, _rows.Sharded):
            others.append(tag if tensor.numel() else None)
        elif tag.copies == 1 and tag.even and tag.axis == dim % tensor.dim():
            sharded.append(place)
        else:
            return None
    is_known = all(tag is None or getattr(tag, "constant", False) for tag in others)
    is_gathered = sharded and is_known and any(others)
    return functools.partial(_gathered, sharded, dim) if is_gathered else None


def _gathered(sharded, dim, reductions, function, args, kwargs):
    tensors = list(args[0] if args else kwargs["tensors"])
    for place in sharded:
        tensors[place] = reductions.gather(tensors[place], dim % tensors[place].dim())
    if args:
        return function(tensors, *args[1:], **kwargs)
    return function(**dict(kwargs, tensors=tensors))


#: Those whose results have rows, as their first argument has.
SHARDED = ("softmax", "log_softmax", "batch_norm")
