"""``fit()`` of a script that knows nothing of ranks: each rank gets its part of every batch."""

import inspect
import zlib

import numpy as np

from .. import errors
from . import datasets, lengths_of, local_batch_size, rows_of, shard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Sequence

    from .._engines import Engine

_DATA = ("x", "y", "sample_weight")
_BATCH_SIZE = 32  # Keras' own, where none is given
_SAMPLED = 1000  # rows, by which ranks compare what they were given


def split(
    engine: "Engine", name: str, fit: "Callable", args: "Sequence[Any]", kwargs: "Dict[str, Any]"
) -> "Dict[str, Any]":
    """The keyword arguments of ``fit()`` for this rank, from those that one process would take.

    Arrays are split where all ranks were given the same ones; others are taken for each rank's own
    part. ``validation_split`` takes the rows that it would in one process. Every rank validates
    with all validation data.

    Arguments:
        name: the model's, for warnings.
        fit: Keras' method, bound to the model.
    """
    signature = inspect.signature(fit)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    data = tuple(given.get(argument) for argument in _DATA)
    batched = datasets.batch_size_of(data[0]) if hasattr(data[0], "element_spec") else None
    rows = _number_of_rows(data) if not given.get("steps_per_epoch") else 0
    same = _are_same(engine, data, rows)
    if rows and same:
        _split_arrays(given, data, rows)
    elif batched and same:
        # Of batches whose size is not known, each is split by itself.
        given["x"] = shard(data[0], batched if batched > 0 else engine.place.size)
    elif not rows:
        errors.warn(
            "fit() of {!r} was given a {}, which is not split over the ranks: each trains on all "
            "of it. Give each rank its part, with compat.rank() and compat.size(), or give "
            "arrays.".format(name, type(given.get("generator", data[0])).__name__)
        )
    else:
        errors.warn(
            "fit() of {!r} was given other data on other ranks, so each rank's data is taken for "
            "its own part, and batch_size for that of one rank. Data that are the same on all "
            "ranks are split: set a seed where they are shuffled or made at random.".format(name)
        )
    return given


def _number_of_rows(data):
    """The rows of these arrays, or 0 where they are others' business."""
    try:
        lengths = set(lengths_of(data))
    except errors.InvalidArgumentError:  # a generator, for example
        return 0
    return lengths.pop() if len(lengths) == 1 else 0  # Keras tells of lengths that differ


def _are_same(engine, data, rows):
    """Whether all ranks were given the same data, as far as a sample of the rows tells."""
    checksum = 0
    for array in _arrays(data) if rows else ():
        sample = np.asarray(getattr(array, "iloc", array)[:: max(1, rows // _SAMPLED)])
        sample = sample.astype(str) if sample.dtype.kind == "O" else np.ascontiguousarray(sample)
        checksum = zlib.crc32(sample.tobytes(), checksum)
    numbers = engine.gather([rows % 2**24, checksum % 2**24])
    return all(of_rank == numbers[0] for of_rank in numbers)


def _arrays(data):
    if isinstance(data, (tuple, list, dict)):
        for part in data.values() if isinstance(data, dict) else data:
            for array in _arrays(part):
                yield array
    elif data is not None:
        yield data


def _split_arrays(given, data, rows):
    fraction = given.pop("validation_split", None)
    if fraction and given.get("validation_data") is None:
        trained = int(rows * (1 - fraction))  # as Keras has it
        validation = rows_of(data, [(trained, rows)])
        given["validation_data"] = validation if validation[2] is not None else validation[:2]
        data = rows_of(data, [(0, trained)])
    batch_size = given.get("batch_size") or _BATCH_SIZE
    data = shard(data, batch_size)
    given.update((name, part) for name, part in zip(_DATA, data) if part is not None)
    given["batch_size"] = local_batch_size(batch_size)
