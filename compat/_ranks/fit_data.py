"""The data of ``fit()`` in a script without ``shard()``, split over the ranks where possible."""

from .. import errors
from . import arrays, batch_agreement, checksum, datasets, loaders
from .sharding import of_batches, shard

_DATA = ("x", "y", "sample_weight")

_BATCH_SIZE = 32  # Keras' own, where none is given

_SAMPLED = 1000  # rows, by which ranks compare their data


def split(engine, name, arguments):
    """Replace the arguments of ``fit()``, which are those of one process, by those of this rank.

    Data are split where they are the same on all ranks, which compare a sample of the rows. Other
    data are taken for each rank's shard. ``validation_split`` takes the rows that it would in one
    process. Every rank validates with all validation data.

    Arguments:
        engine: that of the ranks.
        name: the model's, for warnings.
        arguments: those of ``fit()``, by name.
    """
    argument = "generator" if "generator" in arguments else "x"
    source = arguments.get(argument)
    data = tuple(map(arguments.get, _DATA))
    is_split = batch_agreement.part_in(source) is not None or loaders.is_split(source)
    batched = datasets.batch_size_of(source) if datasets.takes(source) else None
    part = None if is_split else _part_of_batches(engine.place, source)
    comparable = batch_agreement.part_in(part)
    rows = _number_of_rows(data) if part is None and not arguments.get("steps_per_epoch") else 0
    if comparable is not None:
        numbers = 1, comparable.peek()
    elif part is not None:
        numbers = 1, len(part)
    else:
        numbers = rows, arrays.checksum(data, _SAMPLED) if rows else 0
    same = checksum.same(engine.gather([number % checksum.LARGEST for number in numbers]))
    if rows and same:
        _split_arrays(engine.place, arguments, data, rows)
    elif batched and same:
        arguments["x"] = shard(engine.place, source)
    elif part is not None and same:
        arguments[argument] = part
    elif is_split:
        pass
    elif not rows and part is None:
        errors.warn(
            "fit() of {!r} was given a {}, which is not split over the ranks: each trains on all "
            "of it. Give each rank its part, with compat.rank() and compat.size(), or give "
            "arrays.".format(name, type(source).__name__)
        )
    else:
        if comparable is not None:
            arguments[argument] = comparable.whole()
        errors.warn(
            "fit() of {!r} was given other data on other ranks, so each rank's data is taken for "
            "its own part, and batch_size for that of one rank. Data that are the same on all "
            "ranks are split: set a seed where they are shuffled or made at random.".format(name)
        )


def batches(arguments, source):
    """Return how many batches an epoch has, or 0 where that is not known.

    Arguments:
        arguments: those of ``fit()``, by name.
        source: the training data among them.
    """
    count = arguments.get("steps_per_epoch")
    if count is None:
        count = -(-_number_of_rows(source) // (arguments.get("batch_size") or _BATCH_SIZE))
    return int(count) % checksum.LARGEST


def arrays_in(arguments):
    """Return the arrays that ``fit()`` trains on: nothing where its data come in batches."""
    source = arguments.get("x")
    is_part = batch_agreement.part_in(source) is not None
    has_rows = not is_part and not loaders.is_part(source) and _number_of_rows(source)
    return list(map(arguments.get, _DATA)) if has_rows else []


def _part_of_batches(place, source):
    """Return this rank's shard of a source of batches, such as a generator, or None."""
    take = of_batches(source)
    try:
        return take and take(place, source, None)
    except errors.InvalidArgumentError:  # of a loader that draws no numbers of rows, for example
        return None


def _number_of_rows(data):
    """Return the number of rows that arrays have in common, or 0 for other data."""
    try:
        return arrays.number_of_rows(data)
    except errors.InvalidArgumentError:  # Keras reports numbers that differ
        return 0


def _split_arrays(place, arguments, data, rows):
    fraction = arguments.pop("validation_split", None)
    if fraction and arguments.get("validation_data") is None:
        trained = int(rows * (1 - fraction))  # as Keras has it
        validation = arrays.rows_of(data, [(trained, rows)])
        arguments["validation_data"] = validation if validation[2] is not None else validation[:2]
        data = arrays.rows_of(data, [(0, trained)])
    batch_size = arguments.get("batch_size") or _BATCH_SIZE
    arguments["batch_size"] = place.rows_of_batch(batch_size)
    data = arrays.shard(place, data, batch_size)
    arguments.update((name, part) for name, part in zip(_DATA, data) if part is not None)
