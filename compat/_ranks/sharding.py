"""``shard()``: this rank's shard of data of any kind."""

from .. import errors
from . import (
    adapting,
    arrays,
    batch_agreement,
    data_samples,
    datasets,
    iterators,
    loaders,
    mxnet_iterators,
    sequences,
)


def shard(place, data, batch_size=None):
    """Return this rank's shard of data: see ``compat.shard()``."""
    if batch_size is not None:
        place.rows_of_batch(batch_size)  # one row per rank, at least
    if batch_agreement.part_in(data) is not None or loaders.is_part(data):
        raise errors.InvalidArgumentError(
            "shard() was given what it has returned before: this rank's part. Call it once."
        )
    adapting.watch()
    take = of_batches(data)
    if datasets.takes(data):
        part, samples = datasets.shard(place, data, batch_size), datasets.arrays_in(data)
    elif take is not None:  # of most of these ranks compare the batches
        part, samples = take(place, data, batch_size), loaders.arrays_in(data)
    else:
        part, samples = arrays.shard(place, data, batch_size), data
        adapting.note(part, data)
    data_samples.note(place, samples)
    return part


def of_batches(data):
    """Return the function that shards a source of batches, or None for other data."""
    if sequences.keras_class(type(data)) is not None:
        return sequences.shard
    if loaders.takes(data):
        return loaders.shard
    if mxnet_iterators.takes(data):  # an iterator, too
        return mxnet_iterators.shard
    is_iterator = hasattr(data, "__next__") and not hasattr(data, "shape")
    return iterators.shard if is_iterator else None
