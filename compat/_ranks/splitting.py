"""``fit()`` of a script that knows nothing of ranks: each rank gets its part of every batch."""

from .. import errors
from . import agreement, arrays, checksum, datasets, loaders, sharding

_DATA = ("x", "y", "sample_weight")
_BATCH_SIZE = 32  # Keras' own, where none is given
_SAMPLED = 1000  # rows, by which ranks compare what they were given


def split(engine, name, given):
    """Make the arguments of ``fit()`` those for this rank, of those that one process would take.

    Data are split where all ranks were given the same, as far as the ranks can compare them; others
    are taken for each rank's own part. ``validation_split`` takes the rows that it would in one
    process. Every rank validates with all validation data.

    Arguments:
        name: the model's, for warnings.
        given: the arguments, by name.
    """
    argument = "generator" if "generator" in given else "x"
    source = given.get(argument)
    data = tuple(given.get(each) for each in _DATA)
    batched = datasets.batch_size_of(source) if datasets.takes(source) else None
    part = _part_of_batches(engine.place, source)
    rows = _number_of_rows(data) if part is None and not given.get("steps_per_epoch") else 0
    same = _are_same(engine, data, rows, part)
    if rows and same:
        _split_arrays(engine.place, given, data, rows)
    elif batched and same:
        given["x"] = sharding.shard(engine.place, source)
    elif part is not None and same:
        given[argument] = part
    elif _is_own_part(source):
        pass
    elif not rows and part is None:
        errors.warn(
            "fit() of {!r} was given a {}, which is not split over the ranks: each trains on all "
            "of it. Give each rank its part, with compat.rank() and compat.size(), or give "
            "arrays.".format(name, type(source).__name__)
        )
    else:
        looked_at = agreement.part_in(part)
        if looked_at is not None:
            given[argument] = looked_at.whole()
        errors.warn(
            "fit() of {!r} was given other data on other ranks, so each rank's data is taken for "
            "its own part, and batch_size for that of one rank. Data that are the same on all "
            "ranks are split: set a seed where they are shuffled or made at random.".format(name)
        )


def batches(given, source):
    """How many batches an epoch has, from what ``fit()`` was given; 0: that is not known."""
    count = given.get("steps_per_epoch")
    if count is None:
        count = -(-_number_of_rows(source) // (given.get("batch_size") or _BATCH_SIZE))
    return int(count) % checksum.LARGEST


def _part_of_batches(place, source):
    """This rank's part of each batch of a generator, for example; None: that cannot be had."""
    kind = sharding.of_batches(source)
    if kind is None or _is_own_part(source):
        return None
    try:
        return kind.shard(place, source)
    except errors.InvalidArgumentError:  # of a loader that draws no numbers of rows, for example
        return None


def _is_own_part(source):
    """Whether the script itself has given this rank a part of the batches."""
    return agreement.part_in(source) is not None or loaders.is_split(source)


def _number_of_rows(data):
    """The rows of these arrays, or 0 where they are others' business."""
    try:
        return arrays.number_of_rows(data)
    except errors.InvalidArgumentError:  # Keras tells of numbers that differ
        return 0


def _are_same(engine, data, rows, part):
    """Whether all ranks were given the same data, as far as a sample of the rows tells."""
    value = arrays.checksum(data, _SAMPLED) if rows else 0
    if part is not None:
        compared = agreement.part_in(part)
        rows, value = 1, compared.peek() if compared else len(part)
    return checksum.same(engine.gather([rows % checksum.LARGEST, value % checksum.LARGEST]))


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
