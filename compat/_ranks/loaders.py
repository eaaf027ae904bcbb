"""``shard()`` of DataLoaders of torch and Gluon.

The batches of a DataLoader are drawn as in one process, by their numbers, and each rank loads the
rows of its part alone. torch's own DistributedSampler does not do that: it deals out rows, and
repeats some where they do not divide, so that the ranks train on other batches than one process.
"""

import copy
import inspect
import itertools
import numbers
import sys
from typing import Any, List

import numpy as np

from .. import errors
from .._runtime import patching
from . import arrays, batch_agreement, joined_engine

_SAMPLED = 64  # numbers of rows, or components of a dataset


def takes(data):
    """Return whether data are a DataLoader of torch or Gluon."""
    is_torchs = hasattr(data, "batch_sampler") and hasattr(data, "collate_fn")
    return is_torchs or (hasattr(data, "_batch_sampler") and hasattr(data, "_batchify_fn"))


def _attribute(owner, name):
    """Return an attribute of torch's loader or sampler; Gluon's has an underscore in front."""
    return getattr(owner, name, getattr(owner, "_" + name, None))


def _is_distributed(loader):
    """Return whether its sampler already gives each rank its rows, as DistributedSampler does."""
    batches = _attribute(loader, "batch_sampler")
    samplers = batches, _attribute(batches, "sampler"), _attribute(loader, "sampler")
    return any(hasattr(sampler, "num_replicas") for sampler in samplers)


def is_part(data):
    """Return whether this is a loader that ``shard()`` has returned."""
    return isinstance(_attribute(data, "batch_sampler"), PartOfBatches)


def is_split(data):
    """Return whether this is a loader of this rank's rows alone."""
    is_loader = _attribute(data, "batch_sampler") is not None
    return is_part(data) or (is_loader and _is_distributed(data))


def shard(place, loader, batch_size=None):
    """Return a loader of this rank's rows of each batch."""
    batches = _attribute(loader, "batch_sampler")
    kind = type(loader).__name__
    if _is_distributed(loader):
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
    size = _attribute(batches, "batch_size")
    if size is not None:
        place.rows_of_batch(size)
    if None not in (size, batch_size) and size != batch_size:
        raise arrays.other_batch_size(batch_size, size)
    part = PartOfBatches(place, batches, kind)
    if part.left_out():
        arrays.warn_of_few(part.left_out(), place)
    if "batch_sampler" not in vars(loader):
        return _made(loader, part)
    # The same, with all its other attributes; torch lets none of these be set later.
    loader = copy.copy(loader)
    patching.attach(loader, "batch_sampler", part)
    patching.attach(loader, "_iterator", None)
    if size is not None:
        patching.attach(loader, "batch_size", place.rows_of_batch(size))
    return loader


# Where datasets and samplers of torch and Gluon keep arrays, numbers of rows, or other datasets.
_CONTENTS = ("dataset", "datasets", "tensors", "indices", "weights", "_data", "_dataset")


def arrays_in(loader):
    """Return the arrays by which a loader chooses its rows, and those that its dataset holds.

    There are none for other sources of batches.
    """
    if not takes(loader):
        return []
    batches = _attribute(loader, "batch_sampler")
    contents: List[Any] = []
    seen: List[Any] = []
    waiting = [_attribute(loader, "dataset"), batches, _attribute(batches, "sampler")]
    while waiting:
        value = waiting.pop()
        if value is None or any(value is other for other in seen):
            continue
        seen.append(value)
        if getattr(value, "shape", None):
            contents.append(value)
        elif isinstance(value, (list, tuple, range)):
            if value and isinstance(value[0], numbers.Integral):
                contents.append(np.array([len(value), *value[:: 1 + len(value) // _SAMPLED]]))
            else:
                waiting += value[:_SAMPLED]
        else:
            waiting += [getattr(value, name, None) for name in _CONTENTS]
    return contents


def _made(loader, part):
    """Return a loader of Gluon's made anew, with processes of its own."""
    names = list(inspect.signature(type(loader).__init__).parameters)[2:]
    options = {name: getattr(loader, "_" + name) for name in names if hasattr(loader, "_" + name)}
    options["batch_sampler"] = part
    return type(loader)(loader._dataset, **options)


class PartOfBatches(batch_agreement.StandIn):
    """This rank's numbers of rows in each batch that a sampler draws.

    The order is rank 0's where the sampler has no generator: each iteration has a seed that rank 0
    draws, exactly as it would in one process.
    """

    def __init__(self, place, batches, kind):
        self.place = place
        self._whole = batches
        self.kind = kind

    def set_epoch(self, epoch):
        """Set the epoch of the samplers that have one, as scripts do with a DistributedSampler."""
        for sampler in (self._whole, self.rows):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def rows(self):
        """The sampler that draws the rows, or None."""
        return _attribute(self._whole, "sampler")

    def left_out(self):
        """Return the rows of a last batch that is too small, or 0 if there is none or unknown."""
        drops = getattr(self._whole, "drop_last", getattr(self._whole, "_last_batch", True))
        size = _attribute(self._whole, "batch_size")
        if drops not in (False, "keep") or not size:
            return 0
        rows = len(self.rows) % size
        return rows if rows < self.place.size else 0

    def __len__(self):
        return len(self._whole) - bool(self.left_out())

    def __iter__(self):
        expected = self.left_out()
        for batch in self._agreed():
            batch = list(batch)
            if len(batch) >= self.place.size:
                start, stop = self.place.part_of(len(batch))
                yield batch[start:stop]
            elif len(batch) != expected:
                arrays.warn_of_few(len(batch), self.place)

    def _agreed(self):
        """Return the batches of all ranks, the first of which the ranks have compared."""
        batches, sampler = iter(self._whole), self.rows
        kind = type(sampler).__name__
        # Gluon's RandomSampler takes none.
        generator = getattr(sampler, "generator", None if kind == "RandomSampler" else self)
        is_in_order = kind == "SequentialSampler"
        engine = None if is_in_order else joined_engine.ready(self.kind, generator is None)
        if engine is None:
            return batches
        seeded = generator is None and hasattr(sampler, "generator")
        if seeded:
            sampler.generator = _generator(engine)  # which may be a property
        try:
            first = [list(batch) for batch in itertools.islice(batches, 1)]
        finally:
            if seeded:
                sampler.generator = None
        batch_agreement.compare(engine, self.kind, arrays.checksum(list(map(np.array, first))))
        return itertools.chain(first, batches)


def _generator(engine):
    """Return a generator of torch's with the seed that its RandomSampler would draw on rank 0."""
    torch = sys.modules["torch"]
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    generator = torch.Generator()
    generator.manual_seed(engine.broadcast(seed))
    return generator
