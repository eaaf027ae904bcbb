"""What replicas made, and what a trial shows: some rows together, against the same in parts."""

import contextlib
import math

import torch

from ... import _rows, _verification
from . import batches, calls
from .calls import RowCount, is_sharded, tag_of
from .reductions import NotMergeable, is_number

# What computes without a trace ------------------------------------------------------------------


def generators():
    """torch's own generators of random numbers, by device; those of GPUs once CUDA has started."""
    found = {f"cuda:{index}": each for index, each in enumerate(torch.cuda.default_generators)}
    return dict(found, cpu=torch.default_generator)


def random_numbers():
    """A context after which the random numbers that a model may draw are those from now on."""
    afterwards = _verification.random_numbers()
    for generator in generators().values():
        afterwards.callback(generator.set_state, generator.get_state())
    return afterwards


def evaluating(parts):
    """A context in which modules drop nothing and normalise with their averages."""
    afterwards = contextlib.ExitStack()
    for part in parts:
        if part.training:
            part.training = False
            afterwards.callback(setattr, part, "training", True)
    return afterwards


def is_users(module):
    """Whether torch has not made a module: the forward of such may set anything."""
    return not type(module).__module__.startswith("torch.nn")


# Models -----------------------------------------------------------------------------------------


class Outcome:
    """What one replica made.

    Attributes:
        rows: how many rows it computed.
        values: by key, each value of the result, each loss, each state, each attribute.
        unflatten, described: how the result is nested.
        given: by key, state as the replica was given it.
        numbers: those that were taken from a tensor, which stands in for them.
        watch: the ``Watch`` that saw it, or None.
    """

    def __init__(self, rows, result, state, given, watch):
        self.rows, self.given, self.watch = rows, given, watch
        leaves, self.unflatten, self.described = batches.flatten(result)
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.values.update(state)
        items = {} if watch is None else watch.items
        floats = [key for key, value in self.values.items() if isinstance(value, float)]
        self.numbers = {key for key in floats if id(self.values[key]) in items}
        self.values.update((key, items[id(self.values[key])][1]) for key in self.numbers)


class Known:
    """What one kind of call has shown: a rule for each value, once it was watched."""

    def __init__(self, cuts):
        self.cuts = cuts  # of a ``batches.Layout``, without those of what has the size by chance
        self.rules = {}
        self.described = None
        self.watch = True
        self.trial = None  # on the first call
        self.comparisons = set()  # of numbers of rows with others, by which Python chose its way
        self.totals = set()  # numbers of rows for which its choices are harmless
        self.harmless = set()  # lines that choose by totals, and give the same whatever they choose

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

    def outcomes(self):
        """That of all rows, and those of the parts."""
        if self._outcomes is None:
            self._outcomes = [self.compute(rows) for rows in [self.all_rows] + self.parts]
        return self._outcomes

    def finds_sequences(self):
        """Whether the rows are where layers of sequences have them."""
        return self._outcomes is not None and not any(o.watch.misplaced for o in self._outcomes)

    def values(self, key):
        """The parts' values and that of all rows; None where there are none."""
        found = [each.values[key] for each in self.outcomes() if key in each.values]
        return (found[1:], found[0]) if len(found) == len(self.outcomes()) else None

    def is_random(self):
        """Whether the same rows give something else each time."""
        whole, again = self.outcomes()[0].values, self.compute(self.all_rows).values
        return list(whole) != list(again) or not all(close(whole[k], again[k]) for k in whole)


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
    if len({(str(each.described), frozenset(each.values)) for each in trial.outcomes()}) > 1:
        raise NotMergeable()


def fits(rule, values, sizes, home, before):
    """Whether the parts of a trial make up the whole by this rule."""
    parts, whole = values
    if rule.kind == "unchanged":
        return True
    if rule.kind == "first" and not all(close(part, parts[0]) for part in parts):
        return False
    try:
        return close(rule.merged(parts, sizes, home, before), whole)
    except (RuntimeError, TypeError, NotMergeable):  # shapes that do not fit together
        return False


def close(value, other):
    """Whether two values are the same, to rounding."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        numbers = is_number(value) and is_number(other)
        same = value is other or value == other
        return same or (numbers and math.isclose(value, other, rel_tol=1e-4))
    if value.dtype == torch.bfloat16:  # numpy does not know that it is coarse
        finite = other[torch.isfinite(other)].abs()
        scale = finite.max().clamp(min=1e-30) if finite.numel() else 1.0
        value, other = [(tensor / scale).half() for tensor in (value, other)]
    return _rows.trial.close(*[batches.to_numpy(tensor.to_dense()) for tensor in (value, other)])


# Gradients of the user's own: autograd functions, and hooks on what comes back -------------------

# These may compute across rows on the way back, whatever they did on the way there. A call that has
# one is tried with its gradients, too: those of three rows together, against those of its parts.


#: What computes gradients as autograd would: compat, and torch's checkpoints.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")


def own_gradient(outcome, arguments):
    """The first gradient of the user's own that leads to a replica's values, or None.

    Arguments:
        arguments: tensors that the call was given; what is before them is not the call's.

    Returns:
        An ``Across``.
    """
    if outcome.watch.hooks:
        return outcome.watch.hooks[0]
    seen = {value.grad_fn for value in arguments}
    pending = [getattr(value, "grad_fn", None) for value in outcome.values.values()]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_LIBRARIES):
            return _rows.Across(function.__name__, why="gradient")
        pending += [before for before, _ in node.next_functions]
    return None


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
    if not all(map(close, *gradients)):
        raise NotMergeable(across)


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
        return list(map(batches.to_numpy, calls.tensors_in([call.func(*args, **kwargs)])))

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
    split = value.unflatten(axis, (copies, count, value.shape[axis] // (copies * count)))
    picked = split.index_select(axis + 1, torch.tensor(rows, device=value.device))
    return picked.flatten(axis, axis + 2)
