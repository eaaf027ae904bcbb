"""Which values of a graph of TensorFlow 1 or 2 replicas can reduce for the rest of the graph."""

from typing import Any, Iterable

from ..._rows import LARGEST, REPLICATED, Count, Mixed, Placement, Unknown
from .custom_gradients import has_custom_gradient
from .graph import sizes_of


def can_be_reduced(tensor: "Any", placement: "Placement") -> bool:
    """Return whether a tensor that each replica computes of its shard can be reduced over them."""
    elements = 1
    for size in sizes_of(tensor) or ():
        elements *= size or 1
    # Equal extremes share the gradient, so that those of each shard have to be counted.
    is_sum = getattr(placement, "how", "sum") in ("sum", "mean") or not tensor.dtype.is_floating
    is_differentiable = is_sum or tensor.op.type in ("Max", "Min")
    return elements <= LARGEST and is_differentiable and not has_custom_gradient(tensor.op)


def first_mixed(placements: "Iterable[Placement]") -> "Placement":
    """Return the placement among several that decides whether inputs are to be reduced."""
    kinds = (Mixed, Unknown, Count)
    # A size of a shard is as good as mixed: devices have others.
    return next((Mixed() for p in placements if isinstance(p, kinds)), REPLICATED)
