"""Models and functions are asked: some rows of a batch together, against the same rows in parts."""

import math

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _rows
from . import calls
from .calls import RowCount, is_sharded, tag_of
from .reductions import NotMergeable, is_number
from .tensors import to_numpy

# Models -----------------------------------------------------------------------------------------


class PartsTrial:
    """What rows of the batch give: in parts, and together.

    Arguments:
        compute: gives the ``Outcome`` of a list of rows.
        parts: lists of rows, in the batch's order.
    """

    def __init__(self, compute, parts):
        self.compute, self.parts = compute, parts
        self.sizes = [len(part) for part in parts]
        self.all_rows = [row for part in parts for row in part]
        self._outcomes = None

    def compute_all(self):
        self._outcomes = [self.compute(rows) for rows in [self.all_rows] + self.parts]

    @property
    def outcomes(self):
        """That of all rows, and those of the parts."""
        if self._outcomes is None:
            self.compute_all()
        return self._outcomes

    def finds_sequences(self):
        """Whether the rows are where layers of sequences have them."""
        return self._outcomes is not None and not any(o.watch.misplaced for o in self._outcomes)

    def values(self, key):
        """The parts' values and that of all rows; None where there are none."""
        found = [outcome.values[key] for outcome in self.outcomes if key in outcome.values]
        return (found[1:], found[0]) if len(found) == len(self.outcomes) else None

    def is_random(self):
        """Whether the same rows give something else each time."""
        whole, again = self.outcomes[0], self.compute(self.all_rows)
        return list(whole.values) != list(again.values) or any(
            not close(value, again.values[key]) for key, value in whole.values.items()
        )


def prove(trial, rules, before, home):
    """Hold all rules against a trial.

    Arguments:
        before: state before the call, by key.

    Raises:
        NotMergeable: the parts do not make up the whole.
    """
    for key, rule in rules.items():
        values = trial.values(key)
        if values is None:
            if key[0] == "state":  # of batch normalization, in training only
                continue
            raise NotMergeable()
        if not fits(rule, values, trial.sizes, home, before.get(key)):
            raise NotMergeable(_rows.Across(None, why="unknown" if trial.is_random() else "tried"))
    if len({(str(each.described), frozenset(each.values)) for each in trial.outcomes}) > 1:
        raise NotMergeable()


def fits(rule, values, sizes, home, before):
    """Whether the parts of a trial make up the whole by this rule."""
    parts, whole = values
    if rule.kind in ("unchanged", "packed"):
        return True
    if rule.kind == "first" and not all(close(part, parts[0]) for part in parts):
        return False
    try:
        return close(rule.merged(parts, sizes, home, before), whole)
    except (RuntimeError, TypeError, NotMergeable):  # shapes that do not fit together
        return False


def close(value, other):
    """Whether two values are the same, to rounding."""
    if isinstance(value, PackedSequence) and isinstance(other, PackedSequence):
        value, other = value.data, other.data
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        numbers = is_number(value) and is_number(other)
        same = value is other or value == other
        return same or (numbers and math.isclose(value, other, rel_tol=1e-4))
    if value.dtype == torch.bfloat16:  # numpy does not know that it is coarse
        finite = other[torch.isfinite(other)].abs()
        scale = finite.max().clamp(min=1e-30) if finite.numel() else 1.0
        value, other = [(tensor / scale).half() for tensor in (value, other)]
    return _rows.trial.close(*[to_numpy(tensor.to_dense()) for tensor in (value, other)])


# Functions that have no line in the table -------------------------------------------------------


def try_function(call):
    """The placements of its results, or None where that does not tell."""

    def compute(rows):
        rows = [row % call.rows for row in rows]

        def cut(value):
            if isinstance(value, RowCount):
                return value.per * len(rows)
            return some_rows(value, tag_of(value), call.rows, rows) if is_sharded(value) else value

        args, kwargs = call.mapped(cut)
        result = call.func(*args, **kwargs)
        return [to_numpy(tensor) for tensor in calls.tensors_in([result])]

    if call.rows < 2:
        return None
    with torch.no_grad(), torch.random.fork_rng([]):
        try:
            found = _rows.trial.tried(compute)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # of less rows
            return None
    # Whole numbers may agree by chance.
    floating = [value.is_floating_point() or value.is_complex() for value in call.results]
    return [each if sure else _rows.Mixed() for each, sure in zip(found, floating)]


def some_rows(value, placement, count, rows):
    """Some of a tensor's ``count`` rows."""
    value, copies, axis = value.detach(), placement.copies, placement.axis
    if not placement.even:
        raise ValueError("rows of different lengths")
    if value.is_floating_point() and torch.equal(value, value.roll(1, axis)):
        # Of rows that are all the same any function seems to compute each one alone.
        numbers = torch.rand(value.shape, generator=torch.Generator().manual_seed(0))
        value = value + numbers.to(value)
    inner = value.shape[axis] // (copies * count)
    split = value.unflatten(axis, (copies, count, inner))
    picked = split.index_select(axis + 1, torch.tensor(rows, device=value.device))
    return picked.flatten(axis, axis + 2)


def described(value):
    """What tells one kind of call from another."""
    if not isinstance(value, torch.Tensor):
        return "rows" if isinstance(value, RowCount) else repr(value)
    shape, placement = list(value.shape), tag_of(value)
    if isinstance(placement, _rows.Sharded):
        shape[placement.axis] = None
    return value.dtype, shape, placement
