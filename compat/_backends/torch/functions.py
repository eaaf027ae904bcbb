"""torch's functions by name: what each kind does with the dimensions of its arguments."""

import inspect
import re

import torch

from .reductions import Rows, tag_of

REDUCTIONS = {
    "sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean",
    "max": "max", "amax": "max", "min": "min", "amin": "min", "any": "any", "all": "all",
    "norm": "norm", "vector_norm": "norm", "logsumexp": "logsumexp",
}  # fmt: skip
# Their results are means over the rows, weighted by the counted targets.
CLASS_LOSSES = ("cross_entropy", "nll_loss")
# With a dimension of the rows, each element of the result depends on several of them.
ALONG = (
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "sort", "argsort", "flip", "roll", "normalize", "topk", "gather", "index_select",
    "take_along_dim",
)  # fmt: skip
# Elements move, and their number stays.
PERMUTATIONS = (
    "transpose", "swapaxes", "swapdims", "t", "permute", "movedim", "moveaxis", "adjoint",
    "T", "mT", "H", "mH", "squeeze", "unsqueeze", "select", "narrow", "unbind", "split", "chunk",
    "tensor_split", "unfold",
)  # fmt: skip
RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel")
WEIGHTED = ("linear", "embedding", "embedding_bag", "conv1d", "conv2d", "conv3d")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout",
)  # fmt: skip
RANDOM = re.compile(
    "(rand|dropout|bernoulli|normal_|normal$|uniform_|multinomial|exponential_|rre)"
)
PRIME = 7919  # no dimension of a model has this size
_AUGMENTED = re.compile("__i[a-z]+__$")


def tensors_in(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for tensor in tensors_in(value):
                yield tensor


def map_nested(function, value):
    """Arguments of a torch function, with ``function`` applied to all that is in them."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        parts = [map_nested(function, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: map_nested(function, part) for key, part in value.items()}
    return function(value)


_with_reduction = {}  # type: dict  # function -> whether it has an argument of that name


def takes_reduction(func):
    if func not in _with_reduction:
        try:
            _with_reduction[func] = "reduction" in inspect.signature(func).parameters
        except (TypeError, ValueError):  # not a Python function
            _with_reduction[func] = False
    return _with_reduction[func]


def norm_order(args, kwargs):
    """Which norm."""
    return args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))


def rows_dim(value):
    """The dimension of the rows, or None."""
    rows = tag_of(value)
    return rows.dim if isinstance(rows, Rows) else None


def is_in_place(name):
    """By torch's names: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name == "__setitem__" or _AUGMENTED.match(name) is not None and name != "__invert__"
    return name.endswith("_")


def dims_given(args, kwargs, tensor, default, at=1):
    """The dimensions that a function is given, counted from the front; all where none are."""
    dims = kwargs.get("dim", kwargs.get("axis"))
    if dims is None and len(args) > at and not isinstance(args[at], (torch.Tensor, torch.dtype)):
        dims = args[at]
    dims = default if dims is None or dims == () or isinstance(dims, (bool, str)) else dims
    if dims is None:
        return list(range(tensor.dim()))
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % max(1, tensor.dim()) for dim in dims]


def only_dim(value, size):
    """The one dimension of this size, or None."""
    dims = [dim for dim, each in enumerate(value.shape) if each == size]
    return dims[0] if len(dims) == 1 else None


def product_of(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


def has_mask(index):
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, torch.Tensor) and p.dtype in (torch.bool, torch.uint8) for p in parts)


def targets_weight(input, target, weight=None, ignore_index=-100, **_):
    """What the mean of a loss over classes was divided by."""
    if target.is_floating_point():
        return target.numel()
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight.detach()[target.clamp(min=0)] * counted).sum()
