"""Samples of the data that ``shard()`` splits, by which ranks detect that their data differ.

``shard()`` exchanges nothing: it may be called before the ranks have joined, or on one of them
alone. It keeps a few rows of its data, and their checksum is exchanged with the next ``fit()``,
``evaluate()`` or step of a torch loop. Ranks that have called it more often than others since then
are not compared, and data that no ``shard()`` has split may differ between ranks.
"""

import json
from typing import Any, List

import numpy as np

from .. import errors
from .._runtime import nested
from .._runtime.process import process
from . import arrays, checksum

_ROWS = 64  # of each array
_NUMBERS = 256  # of each row
_KEPT = 32  # samples, until ranks compare them


class Samples:
    """Samples of the data that this rank has split since the ranks last compared them."""

    def __init__(self):
        self.calls = 0
        self.kept: List[Any] = []

    def add(self, data):
        """Count a call of ``shard()``, and keep a sample of its data."""
        self.calls += 1
        if len(self.kept) < _KEPT:  # a loop may call shard() in each step
            self.kept.append(sample(data))

    def numbers(self):
        """Return the number of calls, and a checksum, as numbers that engines gather exactly."""
        if not self.calls:
            return [0] * 5
        shapes = json.dumps([[shape for shape, _ in pairs] for pairs in self.kept])
        values = [value for pairs in self.kept for _, value in pairs]
        return [self.calls % checksum.LARGEST, *checksum.of_arrays_and_text(values, shapes)]


def note(place, data):
    """Keep a sample of the arrays of a call of ``shard()``."""
    process.samples.setdefault(place.rank, Samples()).add(data)


def numbers(place):
    """Return the numbers that ranks gather for ``compare()``."""
    return process.samples.setdefault(place.rank, Samples()).numbers()


def compare(engine, rows):
    """Compare the data that all ranks have split, by their gathered ``numbers()``.

    Raises:
        RankError: the data differ by more than rounding.
    """
    samples = process.samples.pop(engine.place.rank, Samples())
    if checksum.same(rows) or not checksum.same([calls for calls, *_ in rows]):
        return
    is_like_chief = int(_are_close(samples.kept, engine.broadcast(samples.kept)))
    others = [rank for rank, (same,) in enumerate(engine.gather([is_like_chief])) if not same]
    if others:
        raise errors.RankError(
            f"shard() was given other data on {errors.numbered_ranks(others)} of "
            f"{engine.place.size} than on rank 0, so that the ranks train on some rows several "
            "times and on others never. Each rank takes its rows of the same data: seed what is "
            "shuffled, split or made at random, with one seed for all ranks."
        )


def sample(data):
    """Return the shape of each array in a structure, and some numbers of some of its rows."""
    return [
        (list(map(int, array.shape)), _numbers(array))
        for array in nested.leaves(data)
        if getattr(array, "shape", None)
    ]


def _numbers(array):
    """Return some numbers of an array as a numpy array, an empty one where they are unreadable."""
    try:
        rows = getattr(array, "iloc", array)[:: max(1, int(array.shape[0]) // _ROWS)]
        rows = arrays.to_numpy(rows)
    except Exception:  # a library's own array, which takes no such slice
        rows = None
    if rows is None or not rows.size:
        return np.zeros(0)
    rows = rows.reshape(len(rows), -1)
    return np.ascontiguousarray(rows[:, :: max(1, rows.shape[1] // _NUMBERS)])


def _are_close(samples, others):
    """Return whether the samples of two ranks are the same, but for rounding."""
    mine, chief = ([pair for sample in kept for pair in sample] for kept in (samples, others))
    return len(mine) == len(chief) and all(
        shape == other_shape and _is_close(value, other)
        for (shape, value), (other_shape, other) in zip(mine, chief)
    )


def _is_close(mine, chief):
    if mine.dtype != chief.dtype or mine.dtype.kind != "f":
        return mine.dtype == chief.dtype and np.array_equal(mine, chief)
    mine, chief = mine.astype("float64"), chief.astype("float64")
    # Small numbers may be what is left of a difference.
    typical = np.median(np.abs(chief)) if chief.size else 0.0
    return np.allclose(mine, chief, rtol=1e-4, atol=1e-5 * typical, equal_nan=True)
