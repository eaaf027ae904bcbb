"""What replicas made, what their calls have shown, and what computes without a trace."""

import contextlib
import random
import sys

import torch

from . import batches
from .watch import differs


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
        self.rows, self.given, self.watch = rows, given, watch
        leaves, self.unflatten, self.described = batches.flatten(result)
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.values.update((("loss", index), loss) for index, loss in enumerate(losses))
        self.values.update(state)
        self.numbers = set()
        for key, value in self.values.items() if watch is not None else ():
            if isinstance(value, float) and id(value) in watch.items:
                self.values[key] = watch.items[id(value)][1]
                self.numbers.add(key)


class Known:
    """What one kind of call has shown: a rule for each value, once it was watched."""

    def __init__(self, cuts):
        self.cuts = cuts  # of a ``batches.Layout``, without those of what has the size by chance
        self.rules = {}
        self.described = None
        self.watch = True
        self.trial = None  # on the first call
        self.gradients = False  # whether that call had some
        self.comparisons = set()  # of numbers of rows with others, by which Python chose its way
        self.totals = set()  # numbers of rows for which its choices are harmless
        self.harmless = set()  # lines that choose by totals, and give the same whatever they choose

    def fit(self, outcomes, total):
        """Whether the rules are those for what was not watched."""
        sizes = [outcome.rows for outcome in outcomes]
        differ = any(differs(*each, sizes, total) for each in self.comparisons)
        return (total in self.totals or not differ) and all(map(self.fits, outcomes))

    def fits(self, outcome):
        return outcome.described == self.described and all(
            key in self.rules and self.rules[key].fits(value, outcome.rows, outcome.given.get(key))
            for key, value in outcome.values.items()
        )


def generators():
    """torch's own generators of random numbers, by device; those of GPUs once CUDA has started."""
    found = {f"cuda:{index}": each for index, each in enumerate(torch.cuda.default_generators)}
    return dict(found, cpu=torch.default_generator)


def random_numbers():
    """A context after which the random numbers that a model may draw are those from now on."""
    afterwards = contextlib.ExitStack()
    for generator in generators().values():
        afterwards.callback(generator.set_state, generator.get_state())
    afterwards.callback(random.setstate, random.getstate())
    if "numpy" in sys.modules:
        numbers = sys.modules["numpy"].random
        afterwards.callback(numbers.set_state, numbers.get_state())
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
