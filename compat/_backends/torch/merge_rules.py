"""The rules by which replicas' values are merged, found once for each kind of call.

``decide`` finds a rule from the tags of ``propagation``; ``trial.prove`` compares what all rules
make of parts of the batch with the whole.
"""

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _rows
from ..._rows import Fallback, Reason
from .expressions import ComputedTotal, State, Total, expression_of
from .graph import tag_of
from .merging import MergeRule, NotMergeable, Recomputed, UnchangedState, recompute
from .reductions import CallReductions
from .row_counts import RowCount
from .tensors import close, is_number
from .trial import fits


class CallPlan:
    """The plan of one kind of call: how it is split, and a rule for each value."""

    def __init__(self, cuts, kept=(), numbers=()):
        self.cuts, self.kept = cuts, kept  # of a ``Layout``, but for what has no rows
        self.numbers = numbers  # that a script may set, by module and name
        self.rules = {}
        self.described = None
        self.linked = set()  # keys of values on which others depend: see ``linked_values``
        self.watch = True
        self.reductions = CallReductions()
        self.trial = None  # on the first call
        self.comparisons = set()  # of numbers of rows with others, by which Python chose its way
        self.totals = set()  # numbers of rows for which its choices are harmless
        self.harmless = set()  # lines that choose by totals, and give the same whatever they choose

    def follow_numbers(self, numbers):
        """Watch a call that comes after a script has set a number, by which it may choose."""
        counts = [key[1][1] for key in self.counts() if isinstance(key[1], tuple)]
        same = [each for each in self.numbers if each[1] not in counts]
        self.watch = self.watch or same != [each for each in numbers if each[1] not in counts]
        self.numbers = numbers

    def counts(self):
        """Return the keys of numbers of rows."""
        return {k for k, rule in self.rules.items() if isinstance(rule.placement, _rows.Count)}

    def fit(self, outcomes, total):
        """Return whether the rules are those for calls that were not watched."""
        sizes = [outcome.rows for outcome in outcomes]
        differ = any(each.differs(sizes, total) for each in self.comparisons)
        return (total in self.totals or not differ) and all(map(self.fits, outcomes))

    def fits(self, outcome):
        # A number of rows that is what an attribute was before does not show that it was set.
        is_alike = outcome.described == self.described and self.counts() <= outcome.values.keys()
        return is_alike and all(
            key in self.rules
            and self.rules[key].fits(value, outcome.rows, outcome.initial_state.get(key))
            for key, value in outcome.values.items()
        )


def decide(key, values, sizes, before, home, trial):
    """Return the rule for one value.

    Arguments:
        key: which value: a tuple whose first element is its kind ("result", "loss", "state",
            "weight", "effect").
        values: that of each replica.
        sizes: how many rows each of them had.
        before: the value of state before the call.
        home: the device of the merged value.
        trial: a ``PartsTrial``.

    Raises:
        NotMergeable: no rule fits.
    """
    decision = _Decision(key, values, before, home, trial)
    if is_number(values[0]):
        return decision.of_numbers()
    if not isinstance(values[0], torch.Tensor):
        return decision.of_objects()
    # Of the replica with most rows: one row cannot be told from none.
    return decision.of_tensors(tag_of(values[sizes.index(max(sizes))]))


class _Decision:
    """The rule for one value, as its type and its tag determine it; arguments as of ``decide``."""

    def __init__(self, key, values, before, home, trial):
        self.key, self.kind, self.values = key, key[0], values
        self.before, self.home, self.trial = before, home, trial

    def of_numbers(self):
        """Return the rule for numbers of Python's, such as counters of calls and of rows.

        What counts may do something else by its count: such calls are watched.
        """
        if all(isinstance(value, RowCount) for value in self.values):
            return MergeRule(_rows.Count())
        if self.before is not None and all(value == self.before for value in self.values):
            return UnchangedState()
        placements = [_rows.REPLICATED, _rows.Partial("sum")]
        if self.kind == "effect" and any(value != self.values[0] for value in self.values):
            del placements[0]  # such as a random number
        tried = self.trial.values(self.key)
        for placement in placements if tried is not None else ():
            rule = MergeRule(placement, is_lasting=self.kind == "result")
            if fits(rule, tried, self.trial.sizes, None, self.before):
                return rule
        raise NotMergeable(Fallback(Reason.NO_RULE, "that computes a number in Python"))

    def of_objects(self):
        """Return the rule for values that are neither numbers nor tensors: all are the same."""
        first = self.values[0]
        is_packed = isinstance(first, PackedSequence)  # in an order of its own
        if is_packed or any(value is not first and value != first for value in self.values):
            raise NotMergeable(Fallback(Reason.NO_RULE, f"that makes a {type(first).__name__}"))
        return MergeRule(_rows.REPLICATED)

    def of_tensors(self, tag):
        """Return the rule for tensors with this tag."""
        if isinstance(tag, _rows.Mixed):
            raise NotMergeable(tag.fallback)
        if isinstance(tag, _rows.Sharded):
            if self.kind in ("state", "weight"):
                raise NotMergeable(
                    Fallback(Reason.CROSS_BATCH, f"that sets the state {self.key[-1]!r}")
                )
            return MergeRule(tag, is_lasting=tag.copies == 1)
        if isinstance(tag, (Total, ComputedTotal)):
            return self._of_expressions(tag)
        if self.kind == "state" and isinstance(tag, State):
            if all(torch.equal(value.to(self.before), self.before) for value in self.values):
                return UnchangedState()
        if all(close(value, self.values[0]) for value in self.values):
            return MergeRule(_rows.REPLICATED)
        return self._of_lost_rows()

    def _of_expressions(self, tag):
        """Return the rule for values that were computed from totals over the rows.

        What has another number in the trial is none of theirs; a ``Total`` itself has none.
        """
        tried = None if isinstance(tag_of(self.values[0]), Total) else self.trial.values(self.key)
        with torch.no_grad():
            recompute(list(map(expression_of, self.values)), self.home)
            constant = all(tag_of(value).constant for value in self.values)
            if tried is not None:
                parts, whole = tried
                if constant and isinstance(tag_of(whole), State):
                    return MergeRule(_rows.REPLICATED)  # torch's own, which changes in training
                recompute([expression_of(value) for value in parts + [whole]], self.home)
        if isinstance(tag, Total) and tag.is_regular:
            # State may be a mean of batch normalization's; a sum would be added to what was there.
            is_value = self.kind in ("result", "loss")
            if tag.placement.how == "mean" or is_value and tag.placement.how == "sum":
                return MergeRule(tag.placement)
        return MergeRule(_rows.REPLICATED) if constant else Recomputed()

    def _of_lost_rows(self):
        """Return the rule for tensors that were computed where no function is seen."""
        placements, (parts, whole) = [], self.trial.values(self.key) or ([], None)
        arrays = [v.detach().cpu() for v in parts + [whole] if isinstance(v, torch.Tensor)]
        if self.kind not in ("state", "weight") and len(arrays) > len(self.trial.sizes):
            placements = _rows.trial.placements(arrays[:-1], arrays[-1], self.trial.sizes)
        likeliest = placements[0] if placements else None
        if not isinstance(likeliest, _rows.Sharded) or likeliest.copies != 1:
            raise NotMergeable(Fallback(Reason.TRIAL_DIFFERS))
        return MergeRule(likeliest)
