"""Values of all replicas, merged to the one that one device would have computed."""

import torch
from torch.utils import _pytree as tree

from ... import _rows
from ..._rows import Fallback, Reason
from ..._rows.merging import Operations, merge
from .arguments import size_along
from .expressions import ComputedTotal, Constant, State, Total, TotalValue, expression_of
from .graph import name_of, tag_of
from .row_counts import RowCount
from .tensors import is_number


class NotMergeable(Exception):
    """Values of the replicas cannot be merged.

    Attributes:
        fallback: where the reason is, a ``Fallback``.
    """

    def __init__(self, fallback=None):
        self.fallback = fallback or Fallback(Reason.DIVERGES)
        super().__init__(self.fallback)


class _Tensors(Operations):
    def add(self, parts):
        if not isinstance(parts[0], torch.Tensor):
            return super().add(parts)
        # From the last device to the first: each one receives one sum, and sends one.
        total = parts[-1]
        for part in parts[-2::-1]:
            total = part + total.to(part.device)
        return total

    def concatenate(self, parts, axis):
        if len({part.shape[:axis] + part.shape[axis + 1 :] for part in parts}) > 1:
            raise NotMergeable()
        return torch.cat(parts, axis)

    def split(self, part, count, axis):
        return part.unflatten(axis, (count, -1)).unbind(axis)

    def maximum(self, parts):
        return torch.amax(torch.stack(parts), dim=0)

    def minimum(self, parts):
        return torch.amin(torch.stack(parts), dim=0)

    def mean(self, parts, sizes):
        if not isinstance(sizes[0], torch.Tensor):
            return super().mean(parts, sizes)
        sizes = [size.to(part.device) for part, size in zip(parts, sizes)]
        # The mean over no targets is NaN, and counts for nothing.
        terms = [torch.where(n == 0, 0.0, part) * n for n, part in zip(sizes, parts)]
        return self.add(terms) / self.add(sizes)


#: Operations on tensors of one device; sums and means of those of several, and of numbers, too.
TENSORS = _Tensors()


def merge_tensors(placement, parts, sizes, home):
    """Return the value of the whole batch on the device ``home``; arguments as of ``merge``."""
    is_sum = getattr(placement, "how", None) in ("sum", "mean")
    if not is_sum and placement != _rows.REPLICATED:
        parts = [part.to(home) for part in parts]
    return merge(placement, parts, sizes, TENSORS).to(home)


class MergeRule:
    """The way in which the replicas' values are merged: by their placement.

    Arguments:
        placement: of the values. A sum of numbers is one of changes, where there was a value
            before, and a ``Count`` is a sum whatever was before.
        is_lasting: whether it needs no tags, so that later calls need not be watched.

    Attributes:
        form: that of the values that it was found for.
    """

    form = None

    def __init__(self, placement, is_lasting=True):
        self.placement, self.is_lasting = placement, is_lasting

    @property
    def axis(self):
        """The dimension of the merged value in which its rows are, in order, or None."""
        is_one_copy = isinstance(self.placement, _rows.Sharded) and self.placement.copies == 1
        return self.placement.axis if is_one_copy else None

    def fits(self, value, rows, before):
        """Return whether a value that was not watched looks as this rule expects.

        Arguments:
            value: a replica's.
            rows: the number of rows of its shard.
            before: a replica's own copy of this buffer, or None: it is another value.
        """
        if self.form[:2] != form(value)[:2]:
            return False
        is_sharded = isinstance(self.placement, _rows.Sharded)
        return not is_sharded or size_along(value, self.placement.axis) % rows == 0

    def merged(self, values, sizes, home, before=None):
        """Return the value of all rows, from those of the replicas that have ``sizes`` rows."""
        if isinstance(values[0], torch.Tensor):
            merged = merge_tensors(self.placement, values, sizes, home)
        else:
            is_count = isinstance(self.placement, _rows.Count)
            numbers = list(map(int, values)) if is_count else values
            merged = merge(self.placement, numbers, sizes, TENSORS)
        if self.placement == _rows.Partial("sum") and before:
            return merged - (len(values) - 1) * before
        masks = [getattr(value, "_keras_mask", None) for value in values]
        if isinstance(self.placement, _rows.Sharded) and masks[0] is not None:
            merged._keras_mask = torch.cat([mask.to(home) for mask in masks])
        return merged


class UnchangedState(MergeRule):
    """The rule for state that a call leaves as it was before."""

    def __init__(self):
        super().__init__(_rows.REPLICATED)

    def fits(self, value, rows, before):
        if before is None:
            return super().fits(value, rows, before)
        # BatchNorm's averages change without it, and have rules.
        return self.form[:2] == form(value)[:2] and value is before and not value._version


class Recomputed(MergeRule):
    """The rule for values that were computed from totals: by their tags, see ``recompute``."""

    def __init__(self):
        super().__init__(None, is_lasting=False)

    def merged(self, values, sizes, home, before=None):
        return recompute(list(map(expression_of, values)), home)


def form(value):
    """Return what values have in common that were computed in one way: kind, dimensions, tag."""
    tagged, dims = tag_of(value), value.dim() if isinstance(value, torch.Tensor) else None
    if isinstance(tagged, Total):
        return type(value), dims, tagged.placement, tagged.is_regular
    # Numbers of rows are plain ones where nothing watches.
    kind = int if isinstance(value, RowCount) else type(value)
    if isinstance(tagged, ComputedTotal):
        return kind, dims, tagged.path()
    return kind, dims, tagged if isinstance(tagged, _rows.Placement) else type(tagged)


def is_one_devices(escapes, home):
    """Return whether Python was given the number that one device would give it."""
    try:
        number = recompute([escape.tag for escape in escapes], home).item()
    except (NotMergeable, RuntimeError, ValueError):
        return False
    return all(type(escape.value)(number) == escape.value for escape in escapes)


def recompute(expressions, home):
    """Return what one device would have computed from all rows.

    Arguments:
        expressions: those of each replica's value, by ``expression_of``.
        home: the device of the result.

    Raises:
        NotMergeable: the replicas' expressions, or numbers in them, do not match.
    """
    return _Recomputation(home).value(expressions)


class _Recomputation:
    def __init__(self, home):
        self.home = home
        self.results = {}

    def value(self, expressions):
        first = expressions[0]
        if id(first) not in self.results:
            self.results[id(first)] = (self.computed(expressions), expressions)
        return self.results[id(first)][0]

    def computed(self, expressions):
        first = expressions[0]
        if isinstance(first, _rows.Mixed):
            raise NotMergeable(first.fallback)
        paths = {(type(each), getattr(each, "function", None)) for each in expressions}
        if len(paths) > 1 or not isinstance(first, (TotalValue, State, ComputedTotal)):
            raise NotMergeable()  # the replicas took different paths through the model
        if isinstance(first, State):
            return first.value.to(self.home)
        if isinstance(first, TotalValue):
            return self.total(expressions)
        leaves, specs = zip(*[tree.tree_flatten((each.args, each.kwargs)) for each in expressions])
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

    def total(self, totals):
        placement = totals[0].tag.placement
        if any(total.tag.placement != placement or total.is_changed() for total in totals):
            raise NotMergeable()
        weights = [total.tag.weight for total in totals]
        return merge_tensors(placement, [total.value for total in totals], weights, self.home)

    def argument(self, values):
        first = values[0]
        if isinstance(first, (TotalValue, State, ComputedTotal, _rows.Placement)):
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
        if any(not isinstance(v, Constant) or v.is_changed() for v in values):
            raise NotMergeable()
        if not first.dim():
            _one_number([value.value.detach().item() for value in values])
        return first.to(self.home)


def _one_number(values):
    """Return the number that all replicas have; one of rows is a ``RowCount``, or does not fit."""
    if any(value != values[0] for value in values):
        raise NotMergeable()
    return values[0]
