"""Placements checked by computing: three rows together, against two of them and the third.

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
            found = _rows.trial.tried(compute)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # of less rows
            return None
    # Whole numbers may agree by chance.
    floating = [value.is_floating_point() or value.is_complex() for value in call.results]
    return [each if sure else _rows.Mixed() for each, sure in zip(found, floating)]


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
    """Results of some rows of the batch: in parts, and together.

    Arguments:
        compute: gives the ``Outcome`` of a list of rows.
        parts: lists of rows, in the batch's order.
    """

    def __init__(self, compute, parts):
        self.compute, self.parts = compute, parts
        self.sizes = [len(part) for part in parts]
        self.all_rows = [row for part in parts for row in part]
        self._outcomes = None

    def outcomes(self):
        """Return that of all rows, and those of the parts."""
        if self._outcomes is None:
            self._outcomes = [self.compute(rows) for rows in [self.all_rows] + self.parts]
        return self._outcomes

    def finds_sequences(self):
        """Return whether the rows are where layers of sequences have them."""
        return self._outcomes is not None and not any(
            o.propagation.misplaced for o in self._outcomes
        )

    def values(self, key):
        """Return the parts' values and that of all rows; None where there are none."""
        found = [each.values[key] for each in self.outcomes() if key in each.values]
        return (found[1:], found[0]) if len(found) == len(self.outcomes()) else None

    def is_random(self):
        """Return whether the same rows have another result each time."""
        whole, again = self.outcomes()[0].values, self.compute(self.all_rows).values
        same = list(whole) == list(again)
        return not (same and all(close(whole[k], again[k]) for k in whole))


def prove(trial, rules, before, home):
    """Hold all rules against a trial.

    Arguments:
        before: state before the call, by key.

    Raises:
        NotMergeable: the parts do not make up the whole.
    """
    for key, rule in rules.items():
        values = trial.values(key)
        if values is None and key[0] != "state":  # of batch normalization, in training only
            raise NotMergeable()
        if values is not None and not fits(rule, values, trial.sizes, home, before.get(key)):
            raise NotMergeable(
                Fallback(Reason.NO_RULE if trial.is_random() else Reason.TRIAL_DIFFERS)
            )
    if len({(str(each.described), frozenset(each.values)) for each in trial.outcomes()}) > 1:
        raise NotMergeable()


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
