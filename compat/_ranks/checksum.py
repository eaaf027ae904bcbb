"""Comparison of the ranks' weights, by a checksum of each variable's bytes.

All ranks begin with rank 0's weights, and every update is computed from the same gradients by the
same operations, so that equal means equal to the last bit. Variables that differ by design (seeds,
metrics, the states of stateful RNNs, which belong to a rank's rows) are not compared.
"""

import hashlib
import struct

from .. import errors
from .._runtime.process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence, Union

    from .engines import Engine

#: Whole numbers up to this are gathered exactly.
LARGEST = 2**24
# A prime, so that the words which are added up come from places without a pattern.
_COLUMNS = 1021
_WORD = 8  # bytes
# Arrays of fewer bytes are concatenated: to begin with each takes longer than to add it up.
_SMALL = 2**18
# Ranks whose processors differ may round differently. More than this, relative to the largest
# number of a variable, is no rounding.
_ROUNDING = 1e-4


CAUSES = (
    "Likely causes: gradients that never reach the other ranks, such as those of "
    "torch.autograd.grad() or of an update made by hand; an initial value drawn at random after "
    "parallelize(); code that depends on a rank's data, such as a step that is skipped."
)


def is_due(steps):
    """Return whether ranks compare their weights after so many steps: soon, and then rarely."""
    return steps in (1, 4, 16, 64, 256) or steps % 1024 == 0


def checksum(array):
    """Return a checksum of the type, the shape and the bytes of an array, as a list of numbers.

    Most of it is a sum of words, as fast as memory is read; which word stands where counts but
    for words a multiple of 1021 places apart.
    """
    import numpy as np

    array = np.asarray(array, order="C")
    data = array.reshape(-1).view("uint8")
    block = _COLUMNS * _WORD
    folded = data[: data.size // block * block].view("uint64").reshape(-1, _COLUMNS)
    return _digest(
        "{} {}".format(array.dtype, array.shape).encode()
        + folded.sum(axis=0, dtype="uint64").tobytes()
        + data[folded.size * _WORD :].tobytes()
    )


def numbers(arrays):
    """Return one checksum of several arrays, as numbers that every engine gathers exactly."""
    import numpy as np

    arrays = [np.asarray(array, order="C") for array in arrays]
    kinds = [(array.dtype.str, array.shape) for array in arrays]
    small = [array.reshape(-1).view("uint8") for array in arrays if array.nbytes < _SMALL]
    parts = [np.concatenate([np.zeros(0, "uint8")] + small)]
    parts += [array for array in arrays if array.nbytes >= _SMALL]
    return of_text(repr(kinds + list(map(checksum, parts))))


def of_text(text):
    """Return the checksum of a text, as such numbers."""
    return _digest(text.encode())


def of_arrays_and_text(arrays, text):
    """Return the checksum of arrays and a text, as such numbers."""
    return of_text(repr([text, *map(checksum, arrays)]))


def _digest(content):
    """Return a hash of 64 bits as numbers of 16 bits, which float32 holds: some engines sum it."""
    return list(struct.unpack(">4H", hashlib.blake2b(content, digest_size=8).digest()))


def verify(
    engine: "Engine",
    names: "Sequence[str]",
    arrays: "Sequence[Any]",
    write: "Callable[[int, Any], None]",
    when: "Union[int, str]",
    causes: "Union[str, Callable[[], str]]" = CAUSES,
) -> None:
    """Compare variables that have to be the same on all ranks. All ranks call it at once.

    Where they are the same, this is one exchange of a few numbers. Where they differ by rounding
    alone, as between machines with different processors, every rank gets rank 0's, with a warning.

    Arguments:
        engine: that of the ranks.
        names: of the variables, in the order in which the model has them. Ranks may number them
            differently: Keras counts what each has made before.
        arrays: their values.
        write: a function of a variable's place in the lists and the value to set.
        when: after how many steps, or a phrase: "after epoch 3".
        causes: why such variables may differ, and what to do: sentences for the error, or a
            function that all ranks call for them.

    Raises:
        RankError: they differ. It names the first variable that does, and on which ranks.
    """
    process.comparisons += 1
    if not same(engine.gather(numbers(arrays))):
        resolve(engine, names, arrays, write, when, causes)


def resolve(engine, names, arrays, write, when, causes=CAUSES):
    """Resolve a difference of checksums, which all ranks know. Arguments as ``verify``."""
    if isinstance(when, int):
        when = "after 1 step" if when == 1 else "after {} steps".format(when)
    if not same(engine.gather([len(names)])):
        raise errors.RankError(
            f"The ranks' models have different variables {when}: rank {engine.place.rank} of "
            f"{engine.place.size} has {len(names)}: {', '.join(names)}. Build the same model on "
            "every rank."
        )
    names = engine.broadcast(names)  # Keras numbers layers by what else a rank has made
    differ = {}  # index of a variable -> ranks
    for index, rows in enumerate(engine.gather_each(list(map(checksum, arrays)))):
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            differ[index] = others
    chief = engine.broadcast([arrays[index] for index in differ])
    distances = [_distance(arrays[index], value) for index, value in zip(differ, chief)]
    # In parts per million: not all engines sum more digits, or carry infinities.
    gathered = engine.gather([int(min(1e6 * distance, 2.0**24)) for distance in distances])
    largest = [max(column) * 1e-6 for column in zip(*gathered)]
    if max(largest) > _ROUNDING:
        index = next(p for p, distance in zip(differ, largest) if distance > _ROUNDING)
        causes = causes() if callable(causes) else causes
        which, ranks = _and_others(names, differ, index), errors.numbered_ranks(differ[index])
        raise errors.RankError(
            f"The ranks have drifted apart: {when} the values of {which} on {ranks} of "
            f"{engine.place.size} are not those of rank 0. Ranks train to one process's numbers as "
            f"long as these are the same. {causes}"
        )
    for index, value in zip(differ, chief):
        write(index, value)
    if engine.place.rank == 0:
        first = next(iter(differ))
        errors.warn(
            "The weights of {} ({}) are {} not those of rank 0 to the last bit, but to rounding, "
            "as between machines with different processors. All ranks go on with rank 0's.".format(
                errors.numbered_ranks(differ[first]), _and_others(names, differ, first), when
            )
        )


def same(rows):
    """Return whether all ranks have gathered the same."""
    return all(row == rows[0] for row in rows)


def _distance(mine, chief):
    """Return the largest difference of two arrays, relative to rank 0's largest number."""
    import numpy as np

    mine, chief = np.asarray(mine), np.asarray(chief)
    if mine.shape != chief.shape or mine.dtype != chief.dtype or mine.dtype.kind in "iub":
        return 0.0 if np.array_equal(mine, chief) and mine.dtype == chief.dtype else np.inf
    mine, chief = mine.astype("float64"), chief.astype("float64")
    with np.errstate(invalid="ignore"):
        difference = np.where(
            (mine == chief) | (np.isnan(mine) & np.isnan(chief)), 0.0, np.abs(mine - chief)
        )
    if not difference.any():
        return 0.0
    distance = difference.max() / np.abs(chief).max()
    return float(distance) if np.isfinite(distance) else np.inf


def _and_others(names, differ, first):
    others = len(differ) - 1
    return repr(names[first]) + (f" and {others} other{'s' * (others > 1)}" if others else "")
