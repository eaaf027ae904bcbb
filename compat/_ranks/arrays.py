"""Arrays in nested structures: this rank's rows of them, and their checksums."""

import itertools
import zlib

import numpy as np

from .. import errors
from .._runtime.nested import leaves


def shard(place, data, batch_size=None):
    """Return this rank's rows of arrays, as ``compat.shard()`` does."""
    rows = number_of_rows(data)
    rows -= left_out(place, rows, batch_size or place.size)
    size = batch_size or rows
    starts = range(0, rows, size)
    return rows_of(data, [place.part_of(min(size, rows - start), start) for start in starts])


def left_out(place, count, batch_size, kind="rows"):
    """Return how many rows at the end no rank gets, being too few for one on each, with a warning.

    Raises:
        InvalidArgumentError: there are no other rows.
    """
    if count < place.size:
        raise errors.too_few_rows(count, place.size)
    last = count % batch_size
    if not 0 < last < place.size:
        return 0
    errors.warn(
        f"The last {last} of {count} {kind} are left out: they are too few for one on each of "
        f"{place.size} ranks."
    )
    return last


def number_of_rows(data):
    """Return the number of rows, which all arrays in a structure have.

    Raises:
        InvalidArgumentError: they have different numbers of rows, or there is none.
    """
    lengths = set()
    for array in leaves(data):
        if not getattr(array, "shape", None):
            raise errors.InvalidArgumentError(
                "shard() takes arrays, tables of pandas, tuples, lists and dictionaries of these, "
                "tf.data datasets, Sequences and PyDatasets of Keras, generators of batches, "
                "DataLoaders, and iterators of MXNet; there is {} in what it was given. Let it "
                "read every size()-th item from rank() on.".format(errors.class_of(array))
            )
        lengths.add(int(array.shape[0]))
    if not lengths:
        raise errors.InvalidArgumentError(
            "There is no array to take rows of in what shard() was given."
        )
    if len(lengths) > 1:
        raise errors.InvalidArgumentError(
            "The arrays given to shard() have different numbers of rows: {}. Give it arrays "
            "that belong together, row by row.".format(", ".join(map(str, sorted(lengths))))
        )
    return lengths.pop()


def rows_of(data, ranges):
    """Return the same structure, with runs of rows, (start, stop), of each array."""
    if isinstance(data, dict):
        return type(data)((key, rows_of(part, ranges)) for key, part in data.items())
    if isinstance(data, (tuple, list)):
        parts = [rows_of(part, ranges) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if data is None:
        return None
    rows = getattr(data, "iloc", data)  # of a table of pandas, [] takes columns
    if len(ranges) == 1:
        return rows[ranges[0][0] : ranges[0][1]]
    return rows[np.concatenate([np.arange(*bounds) for bounds in ranges])]


def flat(arrays, dtype):
    """Return all numbers of numpy arrays, one after the other."""
    return np.concatenate([np.zeros(0, dtype)] + [np.ravel(a).astype(dtype) for a in arrays])


def like(arrays, numbers):
    """Return arrays of the shapes and types of others, made of numbers that ``flat`` returned.

    Arguments:
        arrays: those others, numpy's or JAX's.
        numbers: an array of one axis.
    """
    ends = itertools.accumulate(array.size for array in arrays)
    shaped = [numbers[e - array.size : e].reshape(array.shape) for array, e in zip(arrays, ends)]
    # JAX's astype() has no copy=False before 0.4.27.
    return [s if s.dtype == a.dtype else s.astype(a.dtype) for s, a in zip(shaped, arrays)]


def part_of_batch(place, batch, batch_size=None):
    """Return this rank's rows of a batch of all ranks, or None where it has fewer rows than ranks.

    Arguments:
        place: this process's ``Place``.
        batch: a structure of arrays.
        batch_size: that of ``shard()``, or None.
    """
    rows = number_of_rows(batch)
    if batch_size is not None and rows > batch_size:
        raise other_batch_size(batch_size, rows)
    return rows_of(batch, [place.part_of(rows)]) if rows >= place.size else None


def other_batch_size(batch_size, rows):
    """Return the error for batches that have another size than ``shard()`` was given."""
    return errors.InvalidArgumentError(
        "shard(batch_size={}) was given batches of {} rows. Leave batch_size out: what comes "
        "in batches has its own.".format(batch_size, rows)
    )


def warn_of_few(rows, place):
    """Warn that a batch is left out, since it has fewer rows than there are ranks."""
    errors.warn(
        f"A batch of {rows} rows is left out: they are too few for one on each of {place.size} "
        "ranks."
    )


def checksum(data, sampled=16, value=0):
    """Return a checksum of some rows of each array, which are spread evenly.

    Arguments:
        data: a structure of arrays.
        sampled: about how many rows; an array with fewer of them takes part as a whole.
        value: the checksum of what came before.
    """
    for array in leaves(data):
        rows = getattr(array, "iloc", array)
        step = max(1, int(array.shape[0]) // sampled)
        value = zlib.crc32(_content(rows[::step]), zlib.crc32(str(array.shape).encode(), value))
    return value


def to_numpy(array):
    """Return an array of any framework as numpy's, or None where numpy has no such type."""
    if hasattr(array, "detach"):
        array = array.detach()
        array = array.cpu() if hasattr(array, "cpu") else array  # of torch, not of MXNet
    for method in ("asnumpy", "toarray"):  # of MXNet and scipy
        if hasattr(array, method):
            array = getattr(array, method)()
    try:
        array = np.asarray(array)
    except (TypeError, NotImplementedError):  # of torch, for bfloat16; a tensor of a graph
        return None
    return array.astype(str) if array.dtype.kind == "O" else array


def _content(array):
    array = to_numpy(array)
    return b"" if array is None else np.ascontiguousarray(array).tobytes()
