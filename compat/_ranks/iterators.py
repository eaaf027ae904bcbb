"""``shard()`` of a generator or another iterator: this rank's rows of each batch.

That needs batches that are the same on all ranks, so that these end at the same step, too: nothing
is exchanged between ranks when a batch is taken.
"""

import itertools
import threading
import types
import weakref
from typing import Any

from . import arrays, batch_agreement

_REMEMBERED = 4096  # how many of a generator's last checksums are kept


def shard(place, iterator, batch_size=None):
    """Return this rank's shard. That of a generator is one, too: Keras 3 takes nothing else."""
    part = PartOfIterator(place, iterator, batch_size)
    return part.as_given(part)


class PartOfIterator(batch_agreement.Part):
    """This rank's rows of each batch. Threads may share it where they may share the iterator."""

    changes = True

    def __init__(self, place, iterator, batch_size):
        self.name = type(iterator).__name__
        self.place = place
        self.iterator = iterator
        self.batch_size = batch_size
        self.lock = threading.Lock()
        self.ahead = []  # the next batch, if ``peek()`` has drawn it
        self.threads: "weakref.WeakSet[Any]" = weakref.WeakSet()  # that have drawn in this fit()
        self.ended: "weakref.WeakSet[Any]" = weakref.WeakSet()  # and in those before
        self.checksums = {0: 0}  # of the first so many batches
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            with self.lock:
                thread = threading.current_thread()
                if thread in self.ended:
                    return None
                self.threads.add(thread)
                batch = self._draw()
            part = arrays.part_of_batch(self.place, batch, self.batch_size)
            if part is not None:
                return part
            arrays.warn_of_few(arrays.number_of_rows(batch), self.place)

    def _draw(self):
        batch = self.ahead.pop() if self.ahead else next(self.iterator)
        value = arrays.checksum(batch, value=self.checksums[self.drawn])
        self.drawn += 1
        self.checksums[self.drawn] = value
        self.checksums.pop(self.drawn - _REMEMBERED, None)
        return batch

    def as_given(self, batches):
        """Return batches as an object of the kind that ``shard()`` has split."""
        if not isinstance(self.iterator, types.GeneratorType):
            return batches
        generator = (batch for batch in batches)
        if batches is self:
            batch_agreement.of_generators[generator] = self
        return generator

    def whole(self):
        """Return the whole source, with the batch that ``peek()`` has drawn."""
        return self.as_given(itertools.chain(self.ahead, self.iterator))

    def position(self):
        """Return how many batches were drawn."""
        return self.drawn

    def checksum_at(self, position):
        """Return the checksum of the first so many batches, or 0 where it is not known."""
        return self.checksums.get(position, 0)

    def begin(self):
        """Have threads of an earlier ``fit()`` draw no more batches.

        Keras 2 does not wait for those of its pool, which go on for as many batches as it has
        requested ahead (data_utils.GeneratorEnqueuer), and discards what they return.
        """
        with self.lock:
            pool = [thread for thread in self.threads if type(thread).__name__ == "DummyProcess"]
            self.ended.update(pool)
            self.threads.clear()

    def advance(self, position):
        """Draw batches up to a position."""
        with self.lock:
            while self.drawn < position:
                self._draw()

    def peek(self):
        """Return the checksum of the next batch, or 0 where there is none."""
        with self.lock:
            if not self.ahead:
                self.ahead.extend(itertools.islice(self.iterator, 1))
            return arrays.checksum(self.ahead[0]) if self.ahead else 0
