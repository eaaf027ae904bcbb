"""Totals over the rows, and what is computed from them.

A replica sees some rows only, so what it computes from all its rows at once is not what one device
computes. ``propagation`` tags such tensors: ``Total`` is a total over the rows, ``State`` is from
before, ``ComputedTotal`` is a function of these. ``merging`` computes them again, from the totals
of all replicas.
"""

import torch
from torch.utils import _pytree as tree

from .graph import name_of


class Total:
    """A tensor that ``merging`` can put together from those of the replicas.

    ``weight`` is what a mean is weighted by: a number, or a tensor of one element. ``regular`` is
    whether it is always in proportion to the rows.
    """

    constant = False

    def __init__(self, kind, value, weight=None, regular=False):
        self.kind, self.value, self.weight, self.regular = kind, value, weight, regular


class State:
    """The value of a buffer from before."""

    constant = True

    def __init__(self, value):
        self.value = value


class ComputedTotal:
    """What a function computed from totals: tagged arguments are replaced by their tags.

    It is constant where it depends on state from before alone.
    """

    def __init__(self, function, args, kwargs, in_place, pick, dtype):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.in_place = in_place
        self.pick = pick  # which element of the function's result
        self.dtype = dtype  # autocast may make it another one
        self.grad = torch.is_grad_enabled()
        leaves = tree.tree_leaves((args, kwargs))
        self.constant = all(getattr(leaf, "constant", True) for leaf in leaves)

    def path(self):
        """List the functions that led here, and the types of their arguments, in their order.

        A call that comes by another path may have numbers that depend on the rows.
        """
        found, seen, waiting = [], set(), [self]
        while waiting:
            each = waiting.pop()
            found.append(type(each).__name__)
            if isinstance(each, ComputedTotal) and id(each) not in seen:
                seen.add(id(each))
                found.append(name_of(each.function))
                waiting += tree.tree_leaves((each.args, each.kwargs))
        return tuple(found)


class Constant:
    """A tensor that does not depend on the batch, as long as it is not changed in place."""

    def __init__(self, value):
        self.value = value
        self.version = value._version


EXPRESSIONS = (Total, State, ComputedTotal)
