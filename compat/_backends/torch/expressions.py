"""Totals over the rows, and what is computed from them.

A replica sees some rows only, so what it computes from all its rows at once is not what one device
computes. ``propagation`` tags such tensors: ``Total`` is a total over the rows, ``State`` is from
before, ``ComputedTotal`` is a function of these. ``merging`` computes them again, from the totals
of all replicas.
"""

from typing import Optional, Tuple

import torch
from torch.utils import _pytree as tree

from ... import _rows
from .graph import name_of, tag_of
from .row_counts import has_count
from .rules import canonical
from .tensors import changes_of


class Total:
    """The tag of a tensor that is a total over the rows. It does not refer to the tensor.

    Arguments:
        placement: how the total of the whole batch follows from those of the replicas, ``Partial``.
        weight: of a mean, its weight in the mean of the replicas' means: a number, or a tensor of
            one element.
        is_regular: whether a mean's weight is in proportion to the rows in any batch.

    Attributes:
        origin: the number of the function that has made it, and its place among the results; None
            where it cannot be reduced there.
    """

    constant = False
    origin: "Optional[Tuple[int, int]]" = None

    def __init__(self, placement, weight=None, is_regular=False):
        self.placement, self.weight, self.is_regular = placement, weight, is_regular


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
        names, seen, waiting = [], set(), [self]
        while waiting:
            node = waiting.pop()
            names.append(type(node).__name__)
            if isinstance(node, ComputedTotal) and id(node) not in seen:
                seen.add(id(node))
                names.append(name_of(node.function))
                waiting += tree.tree_leaves((node.args, node.kwargs))
        return tuple(names)


class _Kept:
    """A tensor as it is now, which may be changed in place later."""

    def __init__(self, value):
        self.value = value
        self.version = changes_of(value)

    def is_changed(self):
        """Return whether it was changed in place since."""
        return changes_of(self.value) != self.version


class Constant(_Kept):
    """A tensor that does not depend on the batch."""


class TotalValue(_Kept):
    """A replica's total with its value, as an argument of a ``ComputedTotal`` or as a result."""

    constant = False

    def __init__(self, tag, value):
        super().__init__(value)
        self.tag = tag


#: The tags of tensors that are computed again from the totals of all replicas.
EXPRESSIONS = (Total, State, ComputedTotal)


def expression_of(tensor):
    """Return the tag of a tensor, with its value if that is a total; or None."""
    tag = tag_of(tensor)
    return TotalValue(tag, tensor) if isinstance(tag, Total) else tag


def totals_in(tags, growing, arithmetic):
    """Return each ``Total`` that these tags are computed from; and whether one grows with the rows.

    Arguments:
        tags: some of the ``EXPRESSIONS``.
        growing: the names of functions to which numbers of rows may be passed as sizes.
        arithmetic: the names of those to which they may be passed as any other number.

    Returns:
        A list, or None where there are other values, too; and a flag.
    """
    totals, seen, pending, has_grown = [], {}, list(tags), False
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, TotalValue):
            pending.append(node.tag)
        elif isinstance(node, Total):
            totals.append(node)
        elif isinstance(node, ComputedTotal):
            leaves = tree.tree_leaves((node.args, node.kwargs))
            name, counts = name_of(node.function), list(filter(has_count, leaves))
            if name in growing or canonical(name) in arithmetic:
                leaves = [leaf for leaf in leaves if not has_count(leaf)]
                has_grown = has_grown or bool(counts) and name in growing
            pending += leaves
        elif not getattr(node, "constant", True) or isinstance(node, _rows.Placement):
            return None, False  # such as a number of rows
    return totals, has_grown
