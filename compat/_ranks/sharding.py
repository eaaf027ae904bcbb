"""``shard()``: which module takes a rank's part of which kind of data."""

from .. import errors
from . import agreement, arrays, datasets, generators, loaders, mx_iterators, sequences

# An iterator of MXNet's is an iterator, too.
_OF_BATCHES = sequences, loaders, mx_iterators, generators


def of_batches(data):
    """The module that takes a part of each batch of such a source; None: it is none."""
    return next((module for module in _OF_BATCHES if module.takes(data)), None)


def shard(place, data, batch_size=None):
    """As ``compat.shard()``, in a rank."""
    if batch_size is not None:
        place.rows_of_batch(batch_size)  # one row per rank, at least
    if agreement.part_in(data) is not None or loaders.is_part(data):
        raise errors.InvalidArgumentError(
            "shard() was given what it has returned before: this rank's part. Call it once."
        )
    if datasets.takes(data):
        return datasets.shard(place, data, batch_size)
    return (of_batches(data) or arrays).shard(place, data, batch_size)
