"""Placements checked by computing: three rows together, against parts of them.

Those of one of torch's functions that has no rule, and those of all that a model's call has made.
"""

import contextlib

import torch

from ... import _rows
from ..._rows import Fallback, Reason
from .graph import call_tensors, is_sharded, tag_of
from .merging import NotMergeable, UnchangedState
from .row_counts import RowCount
from .tensors import close, to_numpy


def try_function(call):
    """Return the placements of its results, or None where that does not show them."""

    def compute(rows):
        rows = [row % call.rows for row in rows]

        def cut(value):
            if isinstance(value, RowCount):
                return value.per * len(rows)
            return some_rows(value, tag_of(value), call.rows, rows) if is_sharded(value) else value

        args, kwargs = call.mapped(cut)
        return list(map(to_numpy, call_tensors([call.func(*args, **kwargs)])))

    with torch.no_grad(), torch.random.fork_rng([]):
        try:
            placements = _rows.trial.tried(compute)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # of less rows
            return None
    # Whole numbers may agree by chance.
    floating = [value.is_floating_point() or value.is_complex() for value in call.results]
    return [p if is_sure else _rows.Mixed() for p, is_sure in zip(placements, floating)]


def some_rows(value, placement, count, rows):
    """Return some of a tensor's ``count`` rows."""
    value, copies, axis = value.detach(), placement.copies, placement.axis
    if not placement.even:
        raise ValueError("rows of different lengths")
    if value.is_floating_point() and torch.equal(value, value.roll(1, axis)):
        # Of rows that are all the same any function seems to compute each one alone.
        numbers = torch.rand(value.shape, generator=torch.Generator().manual_seed(0))
        value = value + numbers.to(value)
    split = value.unflatten(axis, (copies, count, value.shape[axis] // (copies * count)))
    picked = split.index_select(axis + 1, torch.tensor(rows, device=value.device))
    return picked.flatten(axis, axis + 2)


class PartsTrial:
    """Outcomes of some rows of the batch: in parts, and together.

    Arguments:
        compute: gives an ``Outcome`` for each of several lists of rows.
        parts: lists of rows, in the batch's order.
        others: those of another partition; none where one tells enough.
    """

    def __init__(self, compute, parts, others=()):
        self.compute, self.parts, self.others = compute, parts, list(others)
        self.sizes = [len(part) for part in parts]
        self.all_rows = [row for part in parts for row in part]
        self._outcomes = self._other_outcomes = None

    def outcomes(self):
        """Return that of all rows, and those of the parts."""
        if self._outcomes is None:
            self._outcomes = self.compute([self.all_rows]) + self.compute(self.parts)
        return self._outcomes

    def other_outcomes(self):
        """Return those of the other partition, whose order is that of the batch where need be."""
        if self._other_outcomes is None:
            try:
                self._other_outcomes = self.compute(self.others)
            except NotMergeable:  # such as sequences that have to be sorted by their lengths
                self.others = [self.all_rows[:1], self.all_rows[1:]]
                self._other_outcomes = self.compute(self.others)
        return self._other_outcomes

    def finds_sequences(self):
        """Return whether the rows are where layers of sequences have them."""
        return self._outcomes is not None and not any(
            o.propagation.misplaced for o in self._outcomes
        )

    def values(self, key):
        """Return the parts' values and that of all rows; None where there are none."""
        values = [each.values[key] for each in self.outcomes() if key in each.values]
        return (values[1:], values[0]) if len(values) == len(self.outcomes()) else None

    def is_random(self):
        """Return whether the same rows have another result each time."""
        whole, again = self.outcomes()[0].values, self.compute([self.all_rows])[0].values
        same = list(whole) == list(again)
        return not (same and all(close(whole[k], again[k]) for k in whole))

    def reordered(self, whole, placement, others, parts):
        """Return a value of all rows with these in the order of the other partition.

        Arguments:
            whole: the value of all rows.
            placement: how it depends on them.
            others: the values of that partition's parts.
            parts: the values of the first partition's parts.
        """
        is_in_order = [row for part in self.others for row in part] == self.all_rows
        if is_in_order or not isinstance(placement, _rows.Sharded):
            return whole
        arrays = to_numpy(whole), placement, *[list(map(to_numpy, v)) for v in (others, parts)]
        return torch.from_numpy(_rows.trial.reordered(*arrays)).to(whole)


def prove(trial, rules, before, home):
    """Check all rules by a trial.

    Arguments:
        trial: a ``PartsTrial``.
        rules: the rule of each value, by key.
        before: state before the call, by key.
        home: the device of merged values.

    Raises:
        NotMergeable: the parts do not make up the whole.
    """
    outcomes = trial.outcomes() + trial.other_outcomes()
    for key, rule in rules.items():
        values = [each.values[key] for each in outcomes if key in each.values]
        if len(values) < len(outcomes):
            if key[0] == "state":  # of batch normalization, in training only
                continue
            raise NotMergeable()
        whole, parts, others = _divided(values, len(trial.parts))
        is_fitting = fits(rule, (parts, whole), trial.sizes, home, before.get(key))
        if is_fitting and others:
            sizes = list(map(len, trial.others))
            whole = trial.reordered(whole, rule.placement, others, parts)
            is_fitting = fits(rule, (others, whole), sizes, home, before.get(key))
        if not is_fitting:
            raise NotMergeable(
                Fallback(Reason.NO_RULE if trial.is_random() else Reason.TRIAL_DIFFERS)
            )
    if len({(str(each.described), frozenset(each.values)) for each in outcomes}) > 1:
        raise NotMergeable()


def _divided(values, count):
    """Return the value of the whole, those of its ``count`` parts, and those of the others."""
    return values[0], values[1 : 1 + count], values[1 + count :]


def fits(rule, values, sizes, home, before):
    """Return whether the parts of a trial make up the whole by this rule."""
    parts, whole = values
    if isinstance(rule, UnchangedState):
        return True
    if rule.placement == _rows.REPLICATED and not all(close(part, parts[0]) for part in parts):
        return False
    try:
        return close(rule.merged(parts, sizes, home, before), whole)
    except (RuntimeError, TypeError, NotMergeable):  # shapes that do not fit together
        return False


def evaluating(parts):
    """Return a context in which modules drop nothing and normalise with their averages."""
    afterwards = contextlib.ExitStack()
    for part in parts:
        if part.training:
            part.training = False
            afterwards.callback(setattr, part, "training", True)
    return afterwards
