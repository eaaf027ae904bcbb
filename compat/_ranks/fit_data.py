"""Data of a ``fit()`` whose script knows nothing of ranks: split over the ranks where it can be."""

from .. import errors
from . import arrays, batch_agreement, checksum, datasets, loaders
from .sharding import of_batches, shard

_DATA = ("x", "y", "sample_weight")

_BATCH_SIZE = 32  # Keras' own, where none is given

_SAMPLED = 1000  # rows, by which ranks compare what they were given


def split(engine, name, given):
    """Make the arguments of ``fit()`` those for this rank, of those that one process would take.

    Data are split where all ranks were given the same, as far as the ranks can compare them: by a
    sample of the rows. Others are taken for each rank's own part. ``validation_split`` takes the
    rows that it would in one process. Every rank validates with all validation data.

    Arguments:
        name: the model's, for warnings.
        given: the arguments, by name.
    """
    argument = "generator" if "generator" in given else "x"
    source = given.get(argument)
    data = tuple(given.get(each) for each in _DATA)
    is_own_part = batch_agreement.part_in(source) is not None or loaders.is_split(source)
    batched = datasets.batch_size_of(source) if datasets.takes(source) else None
    part = None if is_own_part else _part_of_batches(engine.place, source)
    looked_at = batch_agreement.part_in(part)
    rows = _number_of_rows(data) if part is None and not given.get("steps_per_epoch") else 0
    if looked_at is not None:
        told = 1, looked_at.peek()
    elif part is not None:
        told = 1, len(part)
    else:
        told = rows, arrays.checksum(data, _SAMPLED) if rows else 0
    same = checksum.same(engine.gather([number % checksum.LARGEST for number in told]))
    if rows and same:
        _split_arrays(engine.place, given, data, rows)
    elif batched and same:
        given["x"] = shard(engine.place, source)
    elif part is not None and same:
        given[argument] = part
    elif is_own_part:
        pass
    elif not rows and part is None:
        errors.warn(
            "fit() of {!r} was given a {}, which is not split over the ranks: each trains on all "
            "of it. Give each rank its part, with compat.rank() and compat.size(), or give "
            "arrays.".format(name, type(source).__name__)
        )
    else:
        if looked_at is not None:
            given[argument] = looked_at.whole()
        errors.warn(
            "fit() of {!r} was given other data on other ranks, so each rank's data is taken for "
            "its own part, and batch_size for that of one rank. Data that are the same on all "
            "ranks are split: set a seed where they are shuffled or made at random.".format(name)
        )


def batches(given, source):
    """Return how many batches an epoch has, from what ``fit()`` was given.

    0: that is not known.
    """
    count = given.get("steps_per_epoch")
    if count is None:
        count = -(-_number_of_rows(source) // (given.get("batch_size") or _BATCH_SIZE))
    return int(count) % checksum.LARGEST


def _part_of_batches(place, source):
    """Return this rank's part of each batch of a generator, for example.

    None: that cannot be had.
    """
    take = of_batches(source)
    try:
        return take and take(place, source, None)
    except errors.InvalidArgumentError:  # of a loader that draws no numbers of rows, for example
        return None


def _number_of_rows(data):
    """Return the rows of these arrays, or 0 where they are others' business."""
    try:
        return arrays.number_of_rows(data)
    except errors.InvalidArgumentError:  # Keras tells of numbers that differ
        return 0


def _split_arrays(place, given, data, rows):
    fraction = given.pop("validation_split", None)
    if fraction and given.get("validation_data") is None:
        trained = int(rows * (1 - fraction))  # as Keras has it
        validation = arrays.rows_of(data, [(trained, rows)])
        given["validation_data"] = validation if validation[2] is not None else validation[:2]
        data = arrays.rows_of(data, [(0, trained)])
    batch_size = given.get("batch_size") or _BATCH_SIZE
    given["batch_size"] = place.rows_of_batch(batch_size)
    data = arrays.shard(place, data, batch_size)
    given.update((name, part) for name, part in zip(_DATA, data) if part is not None)
