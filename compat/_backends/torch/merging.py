"""How one value of all replicas becomes that of one device: decided once, from how it was made.

``decide`` finds a rule from the tags of ``watch``, ``prove`` holds all rules against a
trial: two parts of three rows, compared with the three together.
"""

import torch

from ... import _rows
from . import batches, calls
from .calls import EXPRESSIONS, NotMergeable, RowCount, State, Total, tag_of

#: What puts totals together, along the first dimension; means have weights.
KINDS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin,
         "any": torch.any, "all": torch.all}  # fmt: skip


class Rule:
    """What becomes of the replicas' values.

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
        """Whether a value that was not watched looks as this rule expects.

        Arguments:
            given: a replica's own copy of this buffer, or None: it is another value.
        """
        if self.form[:2] != form(value)[:2]:
            return False
        if self.kind == "unchanged" and given is not None:
            # BatchNorm's averages change without it, and have rules.
            return value is given and not value._version
        return self.kind != "rows" or batches.size(value, self.dim) % rows == 0

    def merged(self, values, sizes, home, before=None):
        """The value of all rows, from those of the replicas that have ``sizes`` rows."""
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


class Known:
    """What one kind of call has shown: a rule for each value, once it was watched."""

    def __init__(self, cuts, kept=(), numbers=()):
        self.cuts, self.kept = cuts, kept  # of a ``batches.Layout``, but for what has no rows
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
        """Whether the rules are those for what was not watched."""
        sizes = [outcome.rows for outcome in outcomes]
        differ = any(calls.differs(*each, sizes, total) for each in self.comparisons)
        return (total in self.totals or not differ) and all(map(self.fits, outcomes))

    def fits(self, outcome):
        # A number of rows that is what an attribute was before does not show that it was set.
        counts = {key for key, rule in self.rules.items() if rule.kind == "count"}
        is_alike = outcome.described == self.described and counts <= outcome.values.keys()
        return is_alike and all(
            key in self.rules and self.rules[key].fits(value, outcome.rows, outcome.given.get(key))
            for key, value in outcome.values.items()
        )


# Deciding ---------------------------------------------------------------------------------------


def decide(key, values, sizes, before, home, trial):
    """The rule for one value.

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
    if calls.is_number(first):
        return _of_numbers(key, values, before, trial)
    if not isinstance(first, torch.Tensor):
        is_packed = isinstance(first, batches.PackedSequence)  # in an order of its own
        if is_packed or any(value is not first and value != first for value in values):
            raise NotMergeable(_rows.Across(f"that makes a {type(first).__name__}", why="unknown"))
        return Rule("first")
    # Of the replica with most rows: one row cannot be told from none.
    found = tag_of(values[sizes.index(max(sizes))])
    if isinstance(found, _rows.Mixed):
        raise NotMergeable(found.why)
    if isinstance(found, _rows.Sharded):
        if key[0] in ("state", "weight"):
            raise NotMergeable(_rows.Across(f"that sets the state {key[-1]!r}"))
        return Rule("rows", found.copies == 1, found.axis, found.copies)
    if key[0] == "state" and isinstance(found, State):
        if all(torch.equal(value.to(before), before) for value in values):
            return Rule("unchanged")
    if isinstance(found, EXPRESSIONS) and not isinstance(found, State):
        rule = _expression(key, values, home, trial)
        # State may be a mean of batch normalization's; a sum would be added to what was there.
        kinds = ("sum", "mean") if key[0] in ("result", "loss") else ("mean",)
        simple = isinstance(found, Total) and found.regular and found.kind in kinds
        return Rule(found.kind) if simple else rule
    if all(batches.close(value, first) for value in values):
        return Rule("first")
    return _of_rows_that_were_lost(key, trial)


def _of_rows_that_were_lost(key, trial):
    """The rule for a tensor that was computed where no function is seen."""
    found, (parts, whole) = [], trial.values(key) or ([], None)
    values = [v.detach().cpu() for v in parts + [whole] if isinstance(v, torch.Tensor)]
    if key[0] not in ("state", "weight") and len(values) > len(trial.sizes):
        found = _rows.trial.placements(values[:-1], values[-1], trial.sizes)
    if not found or not isinstance(found[0], _rows.Sharded) or found[0].copies != 1:
        raise NotMergeable(_rows.Across(None, why="tried"))
    return Rule("rows", dim=found[0].axis)


def _of_numbers(key, values, before, trial):
    """The rule for numbers of Python's, such as counters of calls and of rows.

    What counts may do something else by its count: such calls are watched.
    """
    if all(isinstance(value, RowCount) for value in values):
        return Rule("count")
    if before is not None and all(value == before for value in values):
        return Rule("unchanged")
    found = trial.values(key)
    for kind in ("first", "sum") if found is not None else ():
        rule = Rule(kind, lasting=key[0] == "result")
        if kind == "first" and key[0] == "effect" and any(value != values[0] for value in values):
            continue  # such as a random number
        if fits(rule, found, trial.sizes, None, before):
            return rule
    raise NotMergeable(_rows.Across("that computes a number in Python", why="unknown"))


def _expression(key, values, home, trial):
    """The rule for a value that was computed from totals over the rows.

    What has another number in the trial is none of theirs; a ``Total`` itself has none.
    """
    tried = None if isinstance(tag_of(values[0]), Total) else trial.values(key)
    with torch.no_grad():
        together(list(map(tag_of, values)), home)
        constant = all(tag_of(value).constant for value in values)
        if tried is not None:
            parts, whole = tried
            if constant and isinstance(tag_of(whole), State):
                return Rule("first")  # torch's own, which changes in training only
            together([tag_of(value) for value in parts + [whole]], home)
    return Rule("first") if constant else Rule("expression", lasting=False)


def form(value):
    """What values have in common that were computed in the same way: kind, dimensions, tag."""
    found, dims = tag_of(value), value.dim() if isinstance(value, torch.Tensor) else None
    if isinstance(found, Total):
        return type(value), dims, Total, found.kind, found.regular
    # Numbers of rows are plain ones where nothing watches.
    kind = int if isinstance(value, RowCount) else type(value)
    if isinstance(found, calls.ComputedTotal):
        return kind, dims, found.path()
    return kind, dims, found if isinstance(found, _rows.Placement) else type(found)


def is_one_devices(escapes, home):
    """Whether Python was given the number that one device would give it."""
    try:
        number = together([escape.tag for escape in escapes], home).item()
    except (NotMergeable, RuntimeError, ValueError):
        return False
    return all(type(escape.value)(number) == escape.value for escape in escapes)


# Proving --------------------------------------------------------------------------------------


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
            raise NotMergeable(_rows.Across(None, why="unknown" if trial.is_random() else "tried"))
    if len({(str(each.described), frozenset(each.values)) for each in trial.outcomes()}) > 1:
        raise NotMergeable()


def fits(rule, values, sizes, home, before):
    """Whether the parts of a trial make up the whole by this rule."""
    parts, whole = values
    if rule.kind == "unchanged":
        return True
    if rule.kind == "first" and not all(batches.close(part, parts[0]) for part in parts):
        return False
    try:
        return batches.close(rule.merged(parts, sizes, home, before), whole)
    except (RuntimeError, TypeError, NotMergeable):  # shapes that do not fit together
        return False


def prove_gradients(trial, rules, before, home, sources, across):
    """Hold the gradients of what was put together against those of all rows.

    Arguments:
        trial: a ``PartsTrial``.
        rules: by key, how values are put together.
        before: state before the call, by key.
        sources: tensors that get gradients.
        across: what may mix rows.

    Raises:
        NotMergeable: they differ, or cannot be computed.
    """
    try:
        with torch.backends.cudnn.flags(enabled=False):  # which has none in inference for an RNN
            whole, *parts = [trial.compute(rows, True) for rows in [trial.all_rows] + trial.parts]
            pairs = []
            for key, rule in rules.items():
                value = whole.values.get(key)
                if isinstance(value, torch.Tensor) and value.grad_fn and value.is_floating_point():
                    values = [part.values[key] for part in parts]
                    with torch.enable_grad():
                        merged = rule.merged(values, trial.sizes, home, before.get(key))
                    pairs.append((value, merged))
            upstream = [value.detach() + 0.5 for value, _ in pairs]
            gradients = [
                torch.autograd.grad(v, sources, upstream, allow_unused=True, materialize_grads=True)
                for v in zip(*pairs)
            ]
    except (KeyError, RuntimeError, TypeError, NotMergeable) as error:
        raise NotMergeable(across) from error
    if not all(map(batches.close, *gradients)):
        raise NotMergeable(across)


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
        leaves, specs = zip(*[calls.tree.tree_flatten((each.args, each.kwargs)) for each in values])
        if any(spec != specs[0] for spec in specs):
            raise NotMergeable()
        args, kwargs = calls.tree.tree_unflatten(list(map(self.argument, zip(*leaves))), specs[0])
        if first.in_place:
            args = (args[0].clone(),) + tuple(args[1:])
        with torch.set_grad_enabled(first.grad and torch.is_grad_enabled()):
            result = first.function(*args, **kwargs)
            if calls.name_of(first.function) == "__setitem__":
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
        if isinstance(first, calls.Constant):
            return self.constant(values)
        if isinstance(first, torch.device):
            return self.home
        if isinstance(first, RowCount):
            return sum(values)
        return _one_number(values) if calls.is_number(first) else first

    def constant(self, values):
        first = values[0].value
        if any(not isinstance(v, calls.Constant) or v.value._version != v.version for v in values):
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
