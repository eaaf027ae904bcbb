"""Values without rows, such as a loss, a batch statistic, a counter: those of all replicas as one.

A replica sees some rows only, so what it computes from all its rows at once is not what one device
computes. ``watch`` follows torch's functions and tags such tensors: ``Total`` is a total over the
rows, ``State`` is from before, ``ComputedTotal`` is a function of these. ``together`` puts the
totals of all replicas together, and computes the functions of them once.
"""

import collections

import torch

from ... import _rows
from .calls import RowCount, name_of, tree


class NotMergeable(Exception):
    """Values of the replicas cannot be put together.

    Attributes:
        across: where the reason is, an ``Across``.
    """

    def __init__(self, across=None):
        self.across = across or _rows.Across(None, why="diverged")
        super().__init__(self.across)


# Tags -----------------------------------------------------------------------------------------


class Total:
    """A tensor that ``KINDS`` can put together from those of the replicas.

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
        """The functions that led here, and the types of what they were given, in their order.

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


#: A number that a replica's rows have given to Python, which may choose its way by it: where, an
#: ``Across``; its tag, an expression or ``Mixed``; and the number.
Escape = collections.namedtuple("Escape", "across tag value")

EXPRESSIONS = (Total, State, ComputedTotal)

#: What puts totals together, along the first dimension; means have weights.
KINDS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin,
         "any": torch.any, "all": torch.all}  # fmt: skip


# Putting together -----------------------------------------------------------------------------


def together(expressions, home):
    """What one device would have computed from all rows.

    Arguments:
        expressions: for each replica, the tag of its value.
        home: the device of the result.

    Raises:
        NotMergeable: the replicas' expressions, or numbers in them, do not fit together.
    """
    return _Merge(home).value(expressions)


class _Merge:
    def __init__(self, home):
        self.home = home
        self.known = {}

    def value(self, values):
        first = values[0]
        if id(first) not in self.known:
            self.known[id(first)] = (self.computed(values), values)
        return self.known[id(first)][0]

    def computed(self, values):
        first = values[0]
        if isinstance(first, _rows.Mixed):
            raise NotMergeable(first.why)
        paths = {(type(v), getattr(v, "function", getattr(v, "kind", None))) for v in values}
        if len(paths) > 1 or not isinstance(first, EXPRESSIONS):
            raise NotMergeable()  # the replicas took different paths through the model
        if isinstance(first, State):
            return first.value.to(self.home)
        if isinstance(first, Total):
            return self.total(values)
        leaves, specs = zip(*[tree.tree_flatten((each.args, each.kwargs)) for each in values])
        if any(spec != specs[0] for spec in specs):
            raise NotMergeable()
        args, kwargs = tree.tree_unflatten(list(map(self.argument, zip(*leaves))), specs[0])
        if first.in_place:
            args = (args[0].clone(),) + tuple(args[1:])
        with torch.set_grad_enabled(first.grad and torch.is_grad_enabled()):
            result = first.function(*args, **kwargs)
            if name_of(first.function) == "__setitem__":
                result = args[0]
            return (result if first.pick is None else result[first.pick]).to(first.dtype)

    def total(self, values):
        first = values[0]
        tensors = [value.value.to(self.home) for value in values]
        if first.kind != "mean":
            return KINDS[first.kind](torch.stack(tensors), dim=0)
        weights = [value.weight for value in values]
        if not isinstance(weights[0], torch.Tensor):
            return weighted_mean(tensors, weights)
        weights = [weight.to(self.home) for weight in weights]
        # The mean over no targets is NaN, and counts for nothing.
        sums = [torch.where(w == 0, 0.0, t) * w for t, w in zip(tensors, weights)]
        return sum(sums) / sum(weights)

    def argument(self, values):
        first = values[0]
        if isinstance(first, EXPRESSIONS + (_rows.Placement,)):
            return self.value(values)
        if isinstance(first, Constant):
            return self.constant(values)
        if isinstance(first, torch.device):
            return self.home
        if isinstance(first, RowCount):
            return sum(values)
        return _one_number(values) if is_number(first) else first

    def constant(self, values):
        first = values[0].value
        if any(not isinstance(v, Constant) or v.value._version != v.version for v in values):
            raise NotMergeable()  # it was changed in place
        if not first.dim():
            _one_number([value.value.detach().item() for value in values])
        return first.to(self.home)


def _one_number(values):
    """The number that all replicas have; one of rows is a ``RowCount``, or does not fit."""
    if any(value != values[0] for value in values):
        raise NotMergeable()
    return values[0]


def weighted_mean(tensors, weights):
    """The mean weighted by numbers; without weight a value is not even looked at."""
    total = float(sum(weights)) or 1.0
    home = tensors[0].device
    parts = [t.to(home) * (w / total) for t, w in zip(tensors, weights) if w]
    return sum(parts) if parts else tensors[0]


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
