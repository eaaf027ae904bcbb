"""Tensors: found in nested values, compared, and converted to numpy."""

import math
import operator
from typing import Any, Iterator, Sequence

import torch
from torch.utils import _pytree as tree

from ... import _rows


def tensors_in(value: Any, depth: int = 3) -> "Iterator[torch.Tensor]":
    """Yield the tensors in nested containers, and in attributes of other objects.

    Arguments:
        value: the nested value.
        depth: how many objects, one in an attribute of the other, are traversed.
    """
    for leaf in tree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (str, bytes, int, float, type, torch.nn.Module)):
            parts = getattr(leaf, "__dict__", None) or {
                name: getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())
            }
            if hasattr(leaf, "keys") and hasattr(leaf, "__getitem__"):
                parts = {key: leaf[key] for key in leaf.keys()}
            yield from tensors_in(list(parts.values()), depth - 1)


def are_same(tensors: "Sequence[Any]", others: "Sequence[Any]") -> bool:
    """Return whether these are the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for those of inference mode.

    torch does not count the changes of tensors that were made under ``torch.inference_mode()``.
    """
    return 0 if tensor.is_inference() else tensor._version


def to_numpy(tensor: torch.Tensor) -> Any:
    """Return an array; for a sparse tensor, of the values that it stores."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    # numpy has no bfloat16, nor floats of 8 bits; float32 has all their values.
    types = torch.double, torch.float, torch.half
    has_type = not tensor.is_floating_point() or tensor.dtype in types
    return (tensor if has_type else tensor.float()).resolve_conj().numpy()


def array_of(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor's values as an array."""
    return to_numpy(tensor).copy()


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python's, and not a flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def close(value: Any, other: Any) -> bool:
    """Return whether two values are equal to rounding."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        numbers = is_number(value) and is_number(other)
        is_same = value is other or value == other
        return is_same or (numbers and math.isclose(value, other, rel_tol=1e-4))
    if value.dtype == torch.bfloat16:  # float32 in numpy, whose rounding is finer
        finite = other[torch.isfinite(other)].abs()
        scale = finite.max().clamp(min=1e-30) if finite.numel() else 1.0
        value, other = [(tensor / scale).half() for tensor in (value, other)]
    return _rows.trial.close(*[to_numpy(tensor.to_dense()) for tensor in (value, other)])
