"""``shard()`` of a DataLoader of torch or Gluon: one whose batches are this rank's parts.

The batches are drawn as in one process, by their numbers, and each rank loads the rows of its part
alone. torch's own DistributedSampler does not do that: it deals out rows, and repeats some where
they do not divide, so that the ranks train on other batches than one process.
"""

import copy
import inspect
import itertools
import sys

from .. import errors
from . import agreement, arrays

# What loaders of torch and of Gluon have: what draws the batches, and what makes them.
_MARKS = ("batch_sampler", "collate_fn"), ("_batch_sampler", "_batchify_fn")


def takes(data):
    return any(hasattr(data, draws) and hasattr(data, makes) for draws, makes in _MARKS)


def _sampler_of(data):
    """What draws the batches of a loader; None of one that has none, and of other data."""
    return next((getattr(data, draws) for draws, _ in _MARKS if hasattr(data, draws)), None)


def is_distributed(loader):
    """Whether its sampler already gives each rank other rows, as a DistributedSampler does."""
    batches = _sampler_of(loader)
    samplers = batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)
    return any(hasattr(sampler, "num_replicas") for sampler in samplers)


def is_part(data):
    """Whether this is a loader of ``shard()``'s."""
    return isinstance(_sampler_of(data), PartOfBatches)


def is_split(data):
    """Whether this is a loader whose batches are this rank's alone."""
    return is_part(data) or (_sampler_of(data) is not None and is_distributed(data))


def shard(place, loader, batch_size=None):
    """As ``compat.shard()``."""
    batches = _sampler_of(loader)
    kind = type(loader).__name__
    if is_distributed(loader):
        raise errors.InvalidArgumentError(
            "The sampler of the {0} given to shard() has rows for this rank alone already, as a "
            "DistributedSampler has. Use the {0} as it is, or give it a sampler for one "
            "process.".format(kind)
        )
    infinite = type(getattr(batches, "sampler", None)).__name__ == "_InfiniteConstantSampler"
    if batches is None or infinite:
        raise errors.InvalidArgumentError(
            "shard() cannot split the batches of this {}: it does not choose rows by their "
            "numbers (its dataset is an IterableDataset, or batch_size is None). Have the dataset "
            "give each rank its part, with compat.rank() and compat.size().".format(kind)
        )
    own = _batch_size_of(batches)
    if own is not None:
        place.rows_of_batch(own)
    if None not in (own, batch_size) and own != batch_size:
        raise arrays.other_batch_size(batch_size, own)
    part = PartOfBatches(place, batches, kind)
    if part.left_out():
        arrays.warn_of_few(part.left_out(), place)
    if "batch_sampler" not in vars(loader):
        return _made(loader, part)
    # The same, with all its other attributes; torch lets none of these be set later.
    loader = copy.copy(loader)
    vars(loader).update(batch_sampler=part, _iterator=None)
    if own is not None:
        vars(loader)["batch_size"] = place.rows_of_batch(own)
    return loader


def _batch_size_of(batches):
    return getattr(batches, "batch_size", getattr(batches, "_batch_size", None))


def _made(loader, part):
    """A loader of Gluon's, whose processes are its own."""
    names = list(inspect.signature(type(loader).__init__).parameters)[2:]
    given = {name: getattr(loader, "_" + name) for name in names if hasattr(loader, "_" + name)}
    given["batch_sampler"] = part
    return type(loader)(loader._dataset, **given)


class PartOfBatches(agreement.StandIn):
    """This rank's part of each batch that a sampler draws, as numbers of rows.

    The order is rank 0's where the sampler has no generator of its own: each iteration has a seed
    that rank 0 draws, exactly as it would in one process.
    """

    def __init__(self, place, batches, kind):
        self.place = place
        self._whole = self.batches = batches
        self.kind = kind

    def set_epoch(self, epoch):
        """Tell the sampler, as scripts tell a DistributedSampler; one that needs none has none."""
        for sampler in (self.batches, self.rows):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def rows(self):
        """What draws the rows, or None."""
        return getattr(self.batches, "sampler", getattr(self.batches, "_sampler", None))

    def left_out(self):
        """The rows of a last batch that is too small, as far as that is known, or 0."""
        drops = getattr(self.batches, "drop_last", getattr(self.batches, "_last_batch", True))
        size = _batch_size_of(self.batches)
        if drops not in (False, "keep") or not size:
            return 0
        rows = len(self.rows) % size
        return rows if rows < self.place.size else 0

    def __len__(self):
        return len(self.batches) - bool(self.left_out())

    def __iter__(self):
        known = self.left_out()
        for batch in self._agreed():
            batch = list(batch)
            if len(batch) >= self.place.size:
                start, stop = self.place.part_of(len(batch))
                yield batch[start:stop]
            elif len(batch) != known:
                arrays.warn_of_few(len(batch), self.place)

    def _agreed(self):
        """The batches of all ranks, of which the ranks have compared the first."""
        if type(self.rows).__name__ == "SequentialSampler":
            return iter(self.batches)
        gluons = type(self.rows).__name__ == "RandomSampler"  # which takes no generator
        shuffled = getattr(self.rows, "generator", None if gluons else self) is None
        engine = agreement.ready(self.kind, shuffled)
        return iter(self.batches) if engine is None else self._compared(engine)

    def _compared(self, engine):
        batches = iter(self.batches)
        sampler = self.rows
        drawn = getattr(sampler, "generator", self) is None
        if drawn:
            sampler.generator = _generator(engine)
        try:
            first = [list(batch) for batch in itertools.islice(batches, 1)]
        finally:
            if drawn:
                sampler.generator = None
        import numpy

        agreement.compare(engine, self.kind, arrays.checksum([numpy.array(b) for b in first]))
        yield from itertools.chain(first, batches)


def _generator(engine):
    """A generator of torch's, of the seed that its RandomSampler would draw on rank 0."""
    torch = sys.modules["torch"]
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    generator = torch.Generator()
    generator.manual_seed(engine.broadcast(seed))
    return generator
