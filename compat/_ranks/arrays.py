"""Arrays, and structures of them: their rows, this rank's rows, and a checksum of some."""

import zlib

import numpy as np

from .. import errors


def shard(place, data, batch_size=None):
    """This rank's rows of arrays, as ``compat.shard()`` has it."""
    rows = number_of_rows(data)
    rows -= left_out(place, rows, batch_size or place.size)
    size = batch_size or rows
    ranges = []
    for start in range(0, rows, size):
        first, last = place.part_of(min(size, rows - start))
        ranges.append((start + first, start + last))
    return rows_of(data, ranges)


def left_out(place, count, batch_size, what="rows"):
    """How many rows at the end no rank gets, with a warning: they are too few for one on each.

    Raises:
        InvalidArgumentError: there are no more than that.
    """
    if count < place.size:
        raise errors.too_few_rows(count, place.size)
    last = count % batch_size
    if not 0 < last < place.size:
        return 0
    errors.warn(
        f"The last {last} of {count} {what} are left out: they are too few for one on each of "
        f"{place.size} ranks."
    )
    return last


def parts_of(data):
    """The arrays in a structure."""
    if isinstance(data, (tuple, list, dict)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from parts_of(part)
    elif data is not None:
        yield data


def number_of_rows(data):
    """The rows of all arrays in a structure.

    Raises:
        InvalidArgumentError: they have different numbers of rows, or there is none.
    """
    lengths = set()
    for array in parts_of(data):
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
    """The same structure, with these runs of rows, (start, stop), of each array."""
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
    """All numbers of numpy arrays, one after the other."""
    return np.concatenate([np.zeros(0, dtype)] + [np.ravel(a).astype(dtype) for a in arrays])


def like(arrays, numbers):
    """The opposite: arrays of the shapes and types of these. Also of JAX's."""
    parts, start = [], 0
    for array in arrays:
        part = numbers[start : start + array.size]
        parts.append(part.reshape(array.shape).astype(array.dtype, copy=False))
        start += array.size
    return parts


# Batches --------------------------------------------------------------------------------------


def part_of_batch(place, batch, batch_size=None):
    """This rank's rows of a batch of all ranks, or None where it has fewer rows than ranks.

    Arguments:
        batch_size: what ``shard()`` was given, or None.
    """
    rows = number_of_rows(batch)
    if batch_size is not None and rows > batch_size:
        raise other_batch_size(batch_size, rows)
    return rows_of(batch, [place.part_of(rows)]) if rows >= place.size else None


def other_batch_size(batch_size, rows):
    return errors.InvalidArgumentError(
        "shard(batch_size={}) was given batches of {} rows. Leave batch_size out: what comes "
        "in batches has its own.".format(batch_size, rows)
    )


def warn_of_few(rows, place):
    errors.warn(
        f"A batch of {rows} rows is left out: they are too few for one on each of {place.size} "
        "ranks."
    )


def checksum(data, sampled=16, value=0):
    """A checksum of about so many rows of each array, spread evenly; of all where they are fewer.

    Arguments:
        value: the checksum of what came before.
    """
    for array in parts_of(data):
        rows = getattr(array, "iloc", array)
        step = max(1, int(array.shape[0]) // sampled)
        value = zlib.crc32(_content(rows[::step]), zlib.crc32(str(array.shape).encode(), value))
    return value


def _content(array):
    """The bytes of an array of any framework's; none where numpy has no such type of number."""
    for method in ("detach", "cpu", "asnumpy", "toarray"):  # of torch, MXNet and scipy
        if hasattr(array, method):
            array = getattr(array, method)()
    try:
        array = np.asarray(array)
    except TypeError:  # of torch, for bfloat16
        return b""
    array = array.astype(str) if array.dtype.kind == "O" else np.ascontiguousarray(array)
    return array.tobytes()
