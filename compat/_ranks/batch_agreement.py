"""Agreement of all ranks on the batches of which each takes its rows.

``shard()`` itself does not compare: it may be called before the ranks have joined, or on some only.
Nor does what it returns, when a batch is taken: Keras does that in threads, in processes, and some
batches ahead, and engines need the same order of operations on all ranks. So batches leave
checksums behind, and the main thread compares them when ``fit()`` begins and when an epoch ends
(``Agreement``), or when it begins to iterate over a loader (``compare``).
"""

import types
import weakref
from typing import Any

from .. import errors
from .checksum import LARGEST

#: The parts that generators yield, which have no attributes: Keras 3 takes no other iterators.
of_generators: "weakref.WeakKeyDictionary[Any, Part]" = weakref.WeakKeyDictionary()


class Part:
    """A shard of a source of batches, as far as ranks compare it.

    An instance of this very class stands for data that are not a shard.

    Attributes:
        name: that of the whole source, for errors.
        changes: whether the ranks compare it at the end of each epoch, too.
    """

    name = ""
    changes = False

    def position(self):
        """Return how far this rank has come, a number for which there is a checksum."""
        return 0

    def checksum_at(self, position):
        """Return the checksum of the batches up to a position, or 0 where it is not known."""
        return 0

    def begin(self):
        """Note that a ``fit()`` begins."""

    def advance(self, position):
        """Advance to the position of the rank that has come farthest."""

    def peek(self):
        """Return the checksum of the next batch, or 0 where there is none."""
        return 0


class StandIn:
    """An object in place of another, ``_whole``, whose attributes it has."""

    def __getattr__(self, name):
        if name.startswith("__") or "_whole" not in vars(self):
            raise AttributeError(name)
        return getattr(self._whole, name)


class PartOfObject(StandIn, Part):
    """A ``Part`` that a framework takes for an object of its own class, if ``make`` made it."""

    def __init__(self, place, whole):
        self.name = type(whole).__name__
        self._place = place
        self._whole = whole

    @classmethod
    def make(cls, base, *arguments):
        """Return an instance that is one of a framework's class ``base``, too."""
        return type("RankPart", (cls, base), {})(*arguments)

    def whole(self):
        """Return the whole source, from where ``peek()`` has looked."""
        return self._whole


def part_in(data):
    """Return the ``Part`` that data are, or None."""
    if isinstance(data, types.GeneratorType):
        return of_generators.get(data)
    return data if isinstance(data, Part) else None


class Agreement:
    """The agreement of all ranks on the data of one ``fit()``.

    Arguments:
        engine: that of the ranks.
        sources: the training data, and the validation data.
    """

    def __init__(self, engine, sources):
        self.engine = engine
        self.parts = [Part() if part is None else part for part in map(part_in, sources)]

    def positions(self):
        """Return how far this rank has come in each source, from 1 on; 0: it is not a shard."""
        for part in self.parts:
            part.begin()
        return [part.position() + 1 if part.name else 0 for part in self.parts]

    def advance(self, positions):
        """Advance each source to the position of the farthest rank.

        Keras may have taken some batches ahead in an earlier ``fit()``, and more of them on other
        ranks.

        Arguments:
            positions: those of all ranks.

        Returns:
            The checksums of the next batches, which ranks have to ``compare``.
        """
        for place, of_ranks in enumerate(zip(*positions)):
            if not all(of_ranks):  # one rank may validate alone
                self.parts[place] = Part()
            self.parts[place].advance(max(of_ranks) - 1)
        return [part.peek() % LARGEST for part in self.parts]

    def compare(self, checksums):
        """Compare the next batches, by the checksums of all ranks.

        Raises:
            RankError: they differ.
        """
        for part, of_ranks in zip(self.parts, zip(*checksums)):
            _compare(self.engine, part.name, of_ranks)

    def epoch_ended(self, positions):
        """Compare what all ranks have trained on, by how far each has come.

        Raises:
            RankError: it differs.
        """
        part = self.parts[0]
        if part.changes:
            compare(self.engine, part.name, part.checksum_at(min(positions)))


def compare(engine, name, checksum):
    """Compare the ranks' checksums of a batch.

    Raises:
        RankError: they differ.
    """
    _compare(engine, name, [of_rank[0] for of_rank in engine.gather([checksum % LARGEST])])


def _compare(engine, name, gathered):
    others = [rank for rank, checksum in enumerate(gathered) if checksum != gathered[0]]
    if others and all(gathered):
        raise errors.RankError(
            "{} gives other batches on {} of {} than on rank 0. Each rank takes its rows of the "
            "same batches, in the same order: seed what is shuffled or made at random, with one "
            "seed for all ranks.".format(name, errors.numbered_ranks(others), engine.place.size)
        )
