"""How one value of all replicas becomes that of one device: decided once, from how it was made.

``decide`` finds a rule from the tags of ``reductions`` and, where these leave a doubt, from
a probe: two parts of three rows, compared with the three together.
"""

import math

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import errors
from . import batches
from .reductions import (
    DIVERGED,
    EXPRESSIONS,
    Mixed,
    NotMergeable,
    Rows,
    State,
    Total,
    is_number,
    tag_of,
    together,
    weighted_mean,
)

# The rows of the probe's trials: two parts, and the whole. One alone might fit by chance.
TRIALS = (([0, 1], [2], [0, 1, 2]), ([-1, -2], [-3], [-1, -2, -3]))


class Rule:
    """What becomes of the replicas' values.

    Arguments:
        kind: "rows" (one after the other), "packed" (so, in a PackedSequence), "first" (all are
            the same), "unchanged" (state), "sum" (of changes, where there was a value before),
            "mean" (weighted by rows) or "expression" (see ``together``).
        lasting: whether it needs no tags, so that later calls need not be watched.
        dim, outer: where the rows are.
        numbers: for an expression, what becomes of each number in it.

    Attributes:
        form: where a probe was needed, the form of the tags that it was found for.
        like: the type of the values and their number of dimensions.
    """

    def __init__(self, kind, lasting=True, dim=0, outer=1, numbers=()):
        self.kind = kind
        self.lasting = lasting
        self.dim = dim
        self.outer = outer
        self.numbers = list(numbers)
        self.form = None
        self.like = None

    def fits(self, value, rows):
        """Whether a value that was not watched looks as this rule expects."""
        if self.like != like(value):
            return False
        return self.kind != "rows" or value.shape[self.dim] % rows == 0

    def merged(self, values, sizes, home, before=None):
        """The value of all rows, from those of the replicas that have ``sizes`` rows."""
        first = values[0]
        if self.kind == "packed":
            return batches.cat_packed(values, home)
        if self.kind == "expression":
            numbers = iter(self.numbers)
            return together([tag_of(value) for value in values], home, _apply(numbers))
        if self.kind == "rows":
            return _rows(values, self.dim, self.outer, home)
        if not isinstance(first, torch.Tensor):
            if self.kind == "sum":
                return sum(values) - (len(values) - 1) * (before or 0)
            if self.kind == "mean":
                return sum(v * size for v, size in zip(values, sizes)) / float(sum(sizes))
            return first
        values = [value.to(home) for value in values]
        if self.kind == "sum":
            start = 0 if before is None else before.to(home)
            return start + sum(value - start for value in values)
        return weighted_mean(values, sizes) if self.kind == "mean" else values[0]


def like(value):
    return type(value), value.dim() if isinstance(value, torch.Tensor) else None


def _rows(values, dim, outer, home):
    merged = batches.cat_rows(values, dim, outer, home)
    masks = [getattr(value, "_keras_mask", None) for value in values]
    if masks[0] is not None:
        merged._keras_mask = torch.cat([mask.to(home) for mask in masks])
    return merged


# Numbers in expressions -------------------------------------------------------------------------

NUMBERS = {
    "same": lambda values: values[0],
    "sum": sum,  # as a number of rows is
    "inverse": lambda values: 1.0 / sum(1.0 / value for value in values),
}


def _apply(rules):
    def number(values):
        try:
            return NUMBERS[next(rules)](values)
        except (StopIteration, ZeroDivisionError):
            raise NotMergeable(DIVERGED) from None

    return number


def _numbers_of(tags, home):
    """The numbers in an expression: for each, the list of the replicas'."""
    found = []

    def number(values):
        found.append(values)
        return values[0]

    with torch.no_grad():
        together(tags, home, number)
    return found


def _obvious(values, sizes):
    """Whether a number can be no number of rows, nor of parts of them, whatever the batch."""
    if any(value != values[0] for value in values):
        return False
    if len(set(sizes)) > 1:
        return True
    times = values[0] / float(sizes[0]) if abs(values[0]) >= 1 else 1.0 / (values[0] or 0.3)
    return times % (1 if abs(values[0]) >= 1 else sizes[0]) != 0


def _number_rules(parts, whole):
    """What makes the probe's numbers of those of its parts."""
    if len(parts) != len(whole):
        raise NotMergeable(DIVERGED)
    rules = []
    for values, (all_rows,) in zip(parts, whole):
        if all(value == all_rows for value in values):
            rules.append("same")
        elif math.isclose(sum(values), all_rows, rel_tol=1e-9):
            rules.append("sum")
        elif all(values) and math.isclose(NUMBERS["inverse"](values), all_rows, rel_tol=1e-9):
            rules.append("inverse")
        else:
            raise NotMergeable(
                "it depends on a number that is {} for two rows, {} for another one and {} for "
                "the three together".format(values[0], values[-1], all_rows)
            )
    return rules


# Deciding ---------------------------------------------------------------------------------------


class Probe:
    """What three rows give: each of two parts, and all of them.

    Arguments:
        compute: gives the ``Outcome`` of a list of rows.
    """

    def __init__(self, compute):
        self.compute = compute
        self.trials = []  # for each, a list of outcomes, or None where the model fails
        self.inexact = None  # the function that lets the parts differ from the whole
        self.asked = []  # the keys of the values that were asked for

    def trial(self, number):
        while len(self.trials) <= number:
            try:
                outcomes = [self.compute(rows) for rows in TRIALS[len(self.trials)]]
            except Exception:  # whatever a model says of three rows
                outcomes = None
            self.trials.append(outcomes)
            for outcome in outcomes or ():
                self.inexact = self.inexact or outcome.inexact
        return self.trials[number]

    def values(self, key, number=0):
        """The parts' values and that of all rows; None where there are none."""
        self.asked.append(key)
        found = [outcome.values.get(key) for outcome in self.trial(number) or ()]
        return None if not found or any(v is None for v in found) else (found[:2], found[2])


def decide(key, values, sizes, before, dim, home, probe):
    """The rule for one value, see ``_decide``."""
    tried = len(probe.asked)
    rule = _decide(key, values, sizes, before, dim, home, probe)
    rule.like = like(values[0])
    if len(probe.asked) > tried and (rule.lasting or rule.kind == "expression"):
        rule.form = _form(values)
    return rule


def _decide(key, values, sizes, before, dim, home, probe):
    """The rule for one value.

    Arguments:
        key: which value: a tuple whose first element is its kind ("result", "loss", "state",
            "attribute").
        values: that of each replica.
        sizes: how many rows each of them had.
        before: the value of state before the call.
        dim: where the rows of the arguments are.
        probe: a ``Probe``.

    Raises:
        NotMergeable: no rule fits.
    """
    first = values[0]
    if isinstance(first, PackedSequence):
        return Rule("packed")
    if is_number(first):
        if before is not None and all(value == before for value in values):
            return Rule("unchanged")
        return _by_comparison(key, values, sizes, before, dim, probe, "it is a number")
    if not isinstance(first, torch.Tensor):
        if any(value is not first and value != first for value in values):
            raise NotMergeable(
                "it is a {}, and each replica has another".format(type(first).__name__)
            )
        return Rule("first")
    # Of the replica with most rows: one row cannot be told from none.
    found = tag_of(values[sizes.index(max(sizes))])
    if isinstance(found, Rows) and key[0] != "state":
        return Rule("rows", found.outer == 1, found.dim, found.outer)
    if key[0] == "state" and (found is None or isinstance(found, State)):
        if all(torch.equal(value.to(before), before) for value in values):
            return Rule("unchanged")
    simple = isinstance(found, Total) and found.regular and found.kind in ("sum", "mean")
    if simple and found.kind == "mean" and key[0] == "state":
        return Rule("mean")  # an average of batch normalization
    if isinstance(found, EXPRESSIONS) and not isinstance(found, State):
        try:
            rule = _expression(key, values, sizes, home, probe)
            return Rule(found.kind) if simple and key[0] in ("result", "loss") else rule
        except NotMergeable as problem:
            return _by_comparison(key, values, sizes, before, dim, probe, str(problem))
    if found is None and key[0] != "state":
        # Constants are the same on all replicas; rows that were not followed need the probe.
        with_rows = all(v.dim() > dim and v.shape[dim] == n for v, n in zip(values, sizes))
        if not with_rows and all(_close(value, first) for value in values):
            return Rule("first")
    why = "it was computed in a way that cannot be followed"
    if isinstance(found, Mixed):
        why = "{}() computes it from several rows".format(found.function)
    if isinstance(found, Rows):
        why = "it keeps values for each row"
    return _by_comparison(key, values, sizes, before, dim, probe, why)


def _expression(key, values, sizes, home, probe):
    """The rule for a value that was computed from totals over the rows."""
    tags = [tag_of(value) for value in values]
    numbers = _numbers_of(tags, home)
    obvious = all(_obvious(each, sizes) for each in numbers)
    if obvious and all(each.constant for each in tags):
        return Rule("first")
    rule = Rule("expression", lasting=False, numbers=["same"] * len(numbers))
    probed = probe.values(key)
    if probed is None:
        if obvious or all(value == each[0] for each in numbers for value in each):
            return rule
        raise NotMergeable("it depends on numbers of rows")
    parts, whole = probed
    tags = [tag_of(part) for part in parts]
    if not all(isinstance(each, EXPRESSIONS) for each in tags + [tag_of(whole)]):
        raise NotMergeable(DIVERGED)
    rule.numbers = _number_rules(_numbers_of(tags, home), _numbers_of([tag_of(whole)], home))
    if len(rule.numbers) != len(numbers):
        raise NotMergeable(DIVERGED)
    if set(rule.numbers) <= {"same"} and all(each.constant for each in tags):
        return Rule("first")
    if probe.inexact is None and not _close(rule.merged(parts, [2, 1], home), whole):
        raise NotMergeable("the parts of a batch do not make up the whole")
    return rule


def still(rule, values):
    """Whether a rule that a probe has found is that of these values, too."""
    if rule.form is None or rule.form != _form(values):
        return False
    if rule.kind != "expression":
        return True
    try:
        numbers = _numbers_of([tag_of(value) for value in values], values[0].device)
    except NotMergeable:
        return False
    return len(numbers) == len(rule.numbers)


def _form(values):
    """What values have in common that were computed in the same way."""
    found = tag_of(values[0])
    if isinstance(found, Total):
        return (type(values[0]), Total, found.kind, found.regular)
    return (type(values[0]), type(found), getattr(found, "function", None))


def _by_comparison(key, values, sizes, before, dim, probe, why):
    """The one rule by which the probe's parts make up the whole."""
    trials = [probe.values(key, number) for number in range(len(TRIALS))]
    if None in trials or why.startswith("arg"):
        raise NotMergeable(why)
    parts, whole = trials[0]
    if type(parts[0]) is not type(whole) or type(parts[1]) is not type(whole):
        raise NotMergeable(why)
    rules = []
    if isinstance(whole, torch.Tensor):
        shapes = list(zip(parts[0].shape, parts[1].shape, whole.shape))
        dims = [d for d, s in enumerate(shapes) if s[0] == 2 * s[1] and s[2] == 3 * s[1]]
        if dims and key[0] != "state":
            rules = [Rule("rows", dim=dims[0])]
            if probe.inexact is not None and "follow" in why:
                return rules[0]
    if not rules:
        same = not isinstance(whole, torch.Tensor) or whole.shape == values[0].shape
        if same and all(_close(value, values[0]) for value in values):
            rules.append(Rule("first"))
        rules.append(Rule("sum"))
        if not isinstance(whole, int):
            rules.append(Rule("mean"))
    if key[0] == "state":
        home = before.device if isinstance(before, torch.Tensor) else None
    else:
        home = whole.device if isinstance(whole, torch.Tensor) else None
    fitting = [r for r in rules if all(_fits(r, trial, home, before) for trial in trials)]
    if not fitting:
        raise NotMergeable(why)
    if len(fitting) > 1:  # zeros, say: this time any of them does, if it is the same on all
        fitting[0].lasting = False
        if fitting[0].kind != "first":
            raise NotMergeable(why)
    return fitting[0]


def _fits(rule, trial, home, before):
    """Whether the parts of a trial make up the whole by this rule."""
    parts, whole = trial
    if rule.kind == "first" and not _close(parts[0], parts[1]):
        return False
    try:
        return _close(rule.merged(parts, [2, 1], home, before), whole)
    except RuntimeError:  # shapes that do not fit together
        return False


def _close(value, other):
    """Whether two values are the same, to rounding."""
    if not isinstance(value, torch.Tensor):
        return value == other or (is_number(value) and math.isclose(value, other, rel_tol=1e-4))
    if value.shape != other.shape:
        return False
    if value.is_floating_point() or value.is_complex():
        value, other = value.detach(), other.detach().to(value.device)
        exact = value.dtype in (torch.float64, torch.complex128)
        coarse = value.dtype in (torch.float16, torch.bfloat16)
        tolerance = 1e-8 if exact else 2e-2 if coarse else 1e-4
        return torch.allclose(
            value, other.to(value.dtype), rtol=tolerance, atol=tolerance / 10, equal_nan=True
        )
    return torch.equal(value, other.to(value.device))


def refusal(model, key, why):
    """The error for a value that no rule fits."""
    number = "Result {}".format(key[-1]) if key[-1] != "" else "The result"
    place = {
        "result": "{} of {}".format(number, type(model).__name__),
        "loss": "A loss that {} adds".format(type(model).__name__),
        "state": "The state {!r} of {}".format(key[-1], type(model).__name__),
        "attribute": "The attribute {!r} of {}".format(key[1], type(model).__name__),
    }[key[0]]
    return errors.UnsupportedError(
        "{} cannot be put together from the parts of a batch that several devices compute: {}. "
        "Compute it outside of the model that is parallelized, from values for each row (or the "
        "logits) that the model returns, or run the model on one device: "
        "parallelize(model, gpus=1).".format(place, why)
    )
