"""The rules by which replicas' values are merged, found once for each kind of call.

``decide`` finds a rule from the tags of ``propagation``; ``trial.prove`` compares what all rules
make of parts of the batch with the whole.
"""

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _rows
from .expressions import EXPRESSIONS, State, Total
from .graph import tag_of
from .merging import MergeRule, NotMergeable, together
from .row_counts import RowCount, differs
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
        self.trial = None  # on the first call
        self.comparisons = set()  # of numbers of rows with others, by which Python chose its way
        self.totals = set()  # numbers of rows for which its choices are harmless
        self.harmless = set()  # lines that choose by totals, and give the same whatever they choose

    def follow_numbers(self, numbers):
        """Watch a call that comes after a script has set a number, by which it may choose."""
        counts = [key[1] for key, rule in self.rules.items() if rule.kind == "count"]
        counts = [place[1] for place in counts if isinstance(place, tuple)]
        same = [each for each in self.numbers if each[1] not in counts]
        self.watch = self.watch or same != [each for each in numbers if each[1] not in counts]
        self.numbers = numbers

    def fit(self, outcomes, total):
        """Return whether the rules are those for calls that were not watched."""
        sizes = [outcome.rows for outcome in outcomes]
        differ = any(differs(*each, sizes, total) for each in self.comparisons)
        return (total in self.totals or not differ) and all(map(self.fits, outcomes))

    def fits(self, outcome):
        # A number of rows that is what an attribute was before does not show that it was set.
        counts = {key for key, rule in self.rules.items() if rule.kind == "count"}
        is_alike = outcome.described == self.described and counts <= outcome.values.keys()
        return is_alike and all(
            key in self.rules and self.rules[key].fits(value, outcome.rows, outcome.given.get(key))
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
        trial: a ``PartsTrial``.

    Raises:
        NotMergeable: no rule fits.
    """
    first = values[0]
    if is_number(first):
        return _of_numbers(key, values, before, trial)
    if not isinstance(first, torch.Tensor):
        is_packed = isinstance(first, PackedSequence)  # in an order of its own
        if is_packed or any(value is not first and value != first for value in values):
            raise NotMergeable(_rows.Across(f"that makes a {type(first).__name__}", why="unknown"))
        return MergeRule("first")
    # Of the replica with most rows: one row cannot be told from none.
    found = tag_of(values[sizes.index(max(sizes))])
    if isinstance(found, _rows.Mixed):
        raise NotMergeable(found.why)
    if isinstance(found, _rows.Sharded):
        if key[0] in ("state", "weight"):
            raise NotMergeable(_rows.Across(f"that sets the state {key[-1]!r}"))
        return MergeRule("rows", found.copies == 1, found.axis, found.copies)
    if key[0] == "state" and isinstance(found, State):
        if all(torch.equal(value.to(before), before) for value in values):
            return MergeRule("unchanged")
    if isinstance(found, EXPRESSIONS) and not isinstance(found, State):
        rule = _expression(key, values, home, trial)
        # State may be a mean of batch normalization's; a sum would be added to what was there.
        kinds = ("sum", "mean") if key[0] in ("result", "loss") else ("mean",)
        simple = isinstance(found, Total) and found.regular and found.kind in kinds
        return MergeRule(found.kind) if simple else rule
    if all(close(value, first) for value in values):
        return MergeRule("first")
    return _of_rows_that_were_lost(key, trial)


def _of_rows_that_were_lost(key, trial):
    """Return the rule for a tensor that was computed where no function is seen."""
    found, (parts, whole) = [], trial.values(key) or ([], None)
    values = [v.detach().cpu() for v in parts + [whole] if isinstance(v, torch.Tensor)]
    if key[0] not in ("state", "weight") and len(values) > len(trial.sizes):
        found = _rows.trial.placements(values[:-1], values[-1], trial.sizes)
    if not found or not isinstance(found[0], _rows.Sharded) or found[0].copies != 1:
        raise NotMergeable(_rows.Across(None, why="tried"))
    return MergeRule("rows", dim=found[0].axis)


def _of_numbers(key, values, before, trial):
    """Return the rule for numbers of Python's, such as counters of calls and of rows.

    What counts may do something else by its count: such calls are watched.
    """
    if all(isinstance(value, RowCount) for value in values):
        return MergeRule("count")
    if before is not None and all(value == before for value in values):
        return MergeRule("unchanged")
    found = trial.values(key)
    for kind in ("first", "sum") if found is not None else ():
        rule = MergeRule(kind, lasting=key[0] == "result")
        if kind == "first" and key[0] == "effect" and any(value != values[0] for value in values):
            continue  # such as a random number
        if fits(rule, found, trial.sizes, None, before):
            return rule
    raise NotMergeable(_rows.Across("that computes a number in Python", why="unknown"))


def _expression(key, values, home, trial):
    """Return the rule for a value that was computed from totals over the rows.

    What has another number in the trial is none of theirs; a ``Total`` itself has none.
    """
    tried = None if isinstance(tag_of(values[0]), Total) else trial.values(key)
    with torch.no_grad():
        together(list(map(tag_of, values)), home)
        constant = all(tag_of(value).constant for value in values)
        if tried is not None:
            parts, whole = tried
            if constant and isinstance(tag_of(whole), State):
                return MergeRule("first")  # torch's own, which changes in training only
            together([tag_of(value) for value in parts + [whole]], home)
    return MergeRule("first") if constant else MergeRule("expression", lasting=False)
