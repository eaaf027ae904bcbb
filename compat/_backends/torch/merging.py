"""Values of all replicas, merged to the one that one device would have computed."""

import torch
from torch.utils import _pytree as tree

from ... import _rows
from .arguments import size_along
from .expressions import EXPRESSIONS, ComputedTotal, Constant, State, Total
from .graph import name_of, tag_of
from .row_counts import RowCount
from .tensors import is_number


class NotMergeable(Exception):
    """Values of the replicas cannot be merged.

    Attributes:
        across: where the reason is, an ``Across``.
    """

    def __init__(self, across=None):
        self.across = across or _rows.Across(None, why="diverged")
        super().__init__(self.across)


#: What puts totals together, along the first dimension; means have weights.
KINDS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin,
         "any": torch.any, "all": torch.all}  # fmt: skip


class MergeRule:
    """The way in which the replicas' values are merged.

    Arguments:
        kind: "rows" (one after the other), "first" (all are the same), "unchanged" (state), "sum"
            (of changes, where there was a value before), "count" (a number of rows, which is a sum
            whatever was before), "mean" (weighted by rows) or "expression" (see ``together``).
        lasting: whether it needs no tags, so that later calls need not be watched.
        dim, copies: where the rows are.

    Attributes:
        form: that of the values that it was found for.
    """

    def __init__(self, kind, lasting=True, dim=0, copies=1):
        self.kind, self.lasting = kind, lasting
        self.dim, self.copies = dim, copies
        self.form = None

    def fits(self, value, rows, given):
        """Return whether a value that was not watched looks as this rule expects.

        Arguments:
            given: a replica's own copy of this buffer, or None: it is another value.
        """
        if self.form[:2] != form(value)[:2]:
            return False
        if self.kind == "unchanged" and given is not None:
            # BatchNorm's averages change without it, and have rules.
            return value is given and not value._version
        return self.kind != "rows" or size_along(value, self.dim) % rows == 0

    def merged(self, values, sizes, home, before=None):
        """Return the value of all rows, from those of the replicas that have ``sizes`` rows."""
        if self.kind == "expression":
            return together(list(map(tag_of, values)), home)
        if self.kind == "rows":
            return _rows_of_all(values, self.dim, self.copies, home)
        if isinstance(values[0], torch.Tensor):
            values = [value.to(home) for value in values]
        if self.kind == "sum":
            return sum(values) - (len(values) - 1) * before if before else sum(values)
        if self.kind == "count":
            return sum(map(int, values))
        return weighted_mean(values, sizes) if self.kind == "mean" else values[0]


def _rows_of_all(values, dim, copies, home):
    if len({value.shape[:dim] + value.shape[dim + 1 :] for value in values}) > 1:
        raise NotMergeable()
    parts = [value.to(home) for value in values]
    if copies == 1:
        merged = torch.cat(parts, dim)
    else:
        parts = [part.unflatten(dim, (copies, -1)) for part in parts]
        merged = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
    masks = [getattr(value, "_keras_mask", None) for value in values]
    if masks[0] is not None:
        merged._keras_mask = torch.cat([mask.to(home) for mask in masks])
    return merged


def form(value):
    """Return what values have in common that were computed in one way: kind, dimensions, tag."""
    found, dims = tag_of(value), value.dim() if isinstance(value, torch.Tensor) else None
    if isinstance(found, Total):
        return type(value), dims, Total, found.kind, found.regular
    # Numbers of rows are plain ones where nothing watches.
    kind = int if isinstance(value, RowCount) else type(value)
    if isinstance(found, ComputedTotal):
        return kind, dims, found.path()
    return kind, dims, found if isinstance(found, _rows.Placement) else type(found)


def is_one_devices(escapes, home):
    """Return whether Python was given the number that one device would give it."""
    try:
        number = together([escape.tag for escape in escapes], home).item()
    except (NotMergeable, RuntimeError, ValueError):
        return False
    return all(type(escape.value)(number) == escape.value for escape in escapes)


def together(expressions, home):
    """Return what one device would have computed from all rows.

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
    """Return the number that all replicas have; one of rows is a ``RowCount``, or does not fit."""
    if any(value != values[0] for value in values):
        raise NotMergeable()
    return values[0]


def weighted_mean(tensors, weights):
    """Return the mean weighted by numbers; without weight a value is not even looked at."""
    total = float(sum(weights)) or 1.0
    home = tensors[0].device
    parts = [t.to(home) * (w / total) for t, w in zip(tensors, weights) if w]
    return sum(parts) if parts else tensors[0]
