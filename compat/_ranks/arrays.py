"""Arrays and batches of them: their rows, this rank's, and whether all ranks were given the same.

``shard()`` itself does not ask: it may be called before the ranks have joined, or on some only.
Nor does what it returns, when a batch is taken: Keras does that in threads, in processes, and some
batches ahead, and engines need the same order of operations on all ranks. So batches leave
checksums behind, and the main thread compares them when ``fit()`` begins and when an epoch ends
(``Agreement``), or when it begins to iterate over a loader (``compare``).
"""

import itertools
import threading
import types
import weakref
import zlib

import numpy as np

from .. import errors
from .._runtime.process import process
from .checksum import LARGEST

# Keras 3 takes generators of Python's own type only, which have no attributes.
of_generators = weakref.WeakKeyDictionary()  # type: weakref.WeakKeyDictionary


def shard(place, data, batch_size=None):
    """Return this rank's rows of arrays, as ``compat.shard()`` has it."""
    rows = number_of_rows(data)
    rows -= left_out(place, rows, batch_size or place.size)
    size = batch_size or rows
    starts = range(0, rows, size)
    return rows_of(data, [place.part_of(min(size, rows - start), start) for start in starts])


def left_out(place, count, batch_size, what="rows"):
    """Return how many rows at the end no rank gets, with a warning.

    They are too few for one on each.

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
    """Yield the arrays in a structure."""
    if isinstance(data, (tuple, list, dict)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from parts_of(part)
    elif data is not None:
        yield data


def number_of_rows(data):
    """Return the rows of all arrays in a structure.

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
    """Return the same structure, with these runs of rows, (start, stop), of each array."""
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
    """Return the opposite: arrays of the shapes and types of these.

    Also of JAX's.
    """
    ends = itertools.accumulate(array.size for array in arrays)
    return [
        numbers[end - array.size : end].reshape(array.shape).astype(array.dtype, copy=False)
        for array, end in zip(arrays, ends)
    ]


# Batches --------------------------------------------------------------------------------------


def part_of_batch(place, batch, batch_size=None):
    """Return this rank's rows of a batch of all ranks, or None where it has fewer rows than ranks.

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
    """Return a checksum of about so many rows of each array, spread evenly.

    Of all where they are fewer.

    Arguments:
        value: the checksum of what came before.
    """
    for array in parts_of(data):
        rows = getattr(array, "iloc", array)
        step = max(1, int(array.shape[0]) // sampled)
        value = zlib.crc32(_content(rows[::step]), zlib.crc32(str(array.shape).encode(), value))
    return value


def to_numpy(array):
    """Return an array of any framework's as numpy's.

    None where numpy has no such type of number.
    """
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


# What ranks compare ----------------------------------------------------------------------------


class Part:
    """What ``shard()`` returns for a source of batches, as far as ranks compare it.

    An instance of this very class stands for what is no part.

    Attributes:
        name: of what it is a part, for errors.
        changes: whether the ranks compare it at the end of each epoch, too.
    """

    name = ""
    changes = False

    def position(self):
        """Return how far this rank has come, in numbers of which each has a checksum."""
        return 0

    def checksum_at(self, position):
        """0: it is not known."""
        return 0

    def begin(self):
        """Note that a ``fit()`` begins."""

    def advance(self, position):
        """Come as far as the rank that has come farthest."""

    def peek(self):
        """Return the checksum of the next batch, or 0 where there is none."""
        return 0


class StandIn:
    """What has all attributes that it lacks from ``_whole``, in whose place it stands."""

    def __getattr__(self, name):
        if name.startswith("__") or "_whole" not in vars(self):
            raise AttributeError(name)
        return getattr(self._whole, name)


class PartOfObject(StandIn, Part):
    """A ``Part``. ``make`` has frameworks take it for an object of their own class."""

    def __init__(self, place, whole):
        self.name = type(whole).__name__
        self._place = place
        self._whole = whole

    @classmethod
    def make(cls, base, *arguments):
        """Return an instance that is one of a framework's class, too.

        ``base``.
        """
        return type("RankPart", (cls, base), {})(*arguments)

    def whole(self):
        """Return what it is a part of, from where ``peek()`` has looked."""
        return self._whole


def part_in(data):
    """Return what ``shard()`` has returned, or None for anything else."""
    if isinstance(data, types.GeneratorType):
        return of_generators.get(data)
    return data if isinstance(data, Part) else None


class Agreement:
    """What one ``fit()`` was given on all ranks.

    Arguments:
        sources: the training data, and the validation data.
    """

    def __init__(self, engine, sources):
        self.engine = engine
        self.parts = [Part() if part is None else part for part in map(part_in, sources)]

    def positions(self):
        """Return how far this rank has come in each source, from 1 on.

        0: there is no part of it.
        """
        for part in self.parts:
            part.begin()
        return [part.position() + 1 if part.name else 0 for part in self.parts]

    def advance(self, positions):
        """Come as far as the farthest rank, by the positions of all.

        Keras may have taken some batches ahead in an earlier ``fit()``, and other ranks' Keras
        more.

        Returns:
            The checksums of the next batches, which ranks have to ``compare``.
        """
        for place, of_ranks in enumerate(zip(*positions)):
            if not all(of_ranks):  # one rank may validate alone
                self.parts[place] = Part()
            self.parts[place].advance(max(of_ranks) - 1)
        return [part.peek() % LARGEST for part in self.parts]

    def compare(self, checksums):
        """Compare the next batches, by the checksums of all ranks.

        Raises:
            RankError: they differ.
        """
        for part, of_ranks in zip(self.parts, zip(*checksums)):
            _compare(self.engine, part.name, of_ranks)

    def epoch_ended(self, positions):
        """Compare what all ranks have trained on, by how far each has come.

        Raises:
            RankError: it differs.
        """
        part = self.parts[0]
        if part.changes:
            compare(self.engine, part.name, part.checksum_at(min(positions)))


def compare(engine, name, checksum):
    """Compare the ranks' checksums of a batch.

    Raises:
        RankError: they differ.
    """
    _compare(engine, name, [of_rank[0] for of_rank in engine.gather([checksum % LARGEST])])


def _compare(engine, name, gathered):
    others = [rank for rank, each in enumerate(gathered) if each != gathered[0]]
    if others and all(gathered):
        raise errors.RankError(
            "{} gives other batches on {} of {} than on rank 0. Each rank takes its rows of the "
            "same batches, in the same order: seed what is shuffled or made at random, with one "
            "seed for all ranks.".format(name, errors.numbered_ranks(others), engine.place.size)
        )


# Without fit() --------------------------------------------------------------------------------


def joined():
    """Return the engine that this process has joined, or None."""
    return next(iter(process.engines.values()), None)


def barrier():
    """As ``compat.barrier()``, in a rank."""
    engine = joined()
    if engine is None:
        raise errors.RankError(
            "compat.barrier() was called before the ranks have joined, so none can wait for the "
            "others. Call it after compat.parallelize(), which joins them."
        )
    engine.agree("barrier()")
    engine.gather([0])


def ready(name, shuffled):
    """Return the engine, where the ranks can compare now, or None.

    Arguments:
        shuffled: whether the order is drawn at random, so that a warning is due.
    """
    main = threading.current_thread() is threading.main_thread()
    engine = joined()
    if engine is not None and main:
        return engine
    if shuffled:
        errors.warn(
            "The ranks cannot agree on the order of a shuffled {} {}: each may draw another one, "
            "so that they train on some rows several times and on others never. Call "
            "compat.parallelize() first, and iterate in the main thread.".format(
                name, "outside of the main thread" if engine else "before they have joined"
            )
        )
    return None
