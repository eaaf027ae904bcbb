"""What replicas made, what their calls have shown, and what computes without a trace."""

import contextlib
import random
import sys

import torch

from . import batches
from .function_kinds import differs


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

    def __init__(self, rows, result, losses, state, given, watch):
        self.rows = rows
        leaves, self.unflatten, self.described = batches.flatten(result)
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.results = len(leaves)
        self.values.update((("loss", index), loss) for index, loss in enumerate(losses))
        self.values.update(state)
        self.given = given
        self.watch = watch
        self.numbers = set()
        for key, value in self.values.items() if watch is not None else ():
            if isinstance(value, float) and id(value) in watch.items:
                self.values[key] = watch.items[id(value)][1]
                self.numbers.add(key)

    def localize(self, given, device, home):
        """Let what is the replica's own be what it is of the whole batch.

        Arguments:
            given: its arguments, a ``batches.Given``.
            device, home: that of the replica, and that of what is put together.
        """
        for key, value in self.values.items():
            if isinstance(value, torch.Tensor):
                self.values[key] = given.own(value)
            elif isinstance(value, torch.device) and value == device:
                self.values[key] = home


class Known:
    """What one kind of call has shown: a rule for each value, once it was watched."""

    def __init__(self, whole):
        self.whole = whole  # arguments, by number, that are not cut, although they have the size
        self.rules = {}
        self.described = None
        self.watch = True
        self.trial = None  # on the first call
        self.gradients = False  # whether that call had some
        self.comparisons = set()  # of numbers of rows with others, by which Python chose its way
        self.counted = False  # whether Python may choose its way by the number of rows unseen
        self.totals = set()  # numbers of rows for which its choices are harmless
        self.harmless = set()  # lines that choose by totals, and give the same whatever they choose

    def fit(self, outcomes, total):
        """Whether the rules are those for what was not watched."""
        sizes = [outcome.rows for outcome in outcomes]
        if total not in self.totals:
            if self.counted or any(differs(*each, sizes, total) for each in self.comparisons):
                return False
        return all(self.fits(outcome) for outcome in outcomes)

    def fits(self, outcome):
        if outcome.described != self.described:
            return False
        for key, value in outcome.values.items():
            rule = self.rules.get(key)
            if rule is None or not rule.fits(value, outcome.rows):
                return False
            if rule.kind == "unchanged" and key[0] == "state":
                # BatchNorm's averages change without it, and have rules.
                if value is not outcome.given[key] or value._version:
                    return False
        return True


class RandomNumbers:
    """Where the random numbers are that a model may draw."""

    def __init__(self):
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def set(self):
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextlib.contextmanager
def evaluating(model):
    """Within, torch's own modules drop nothing and normalise with their averages."""
    own = [part for part in model.modules() if type(part).__module__.startswith("torch.nn")]
    parts = [part for part in own if part.training]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True
