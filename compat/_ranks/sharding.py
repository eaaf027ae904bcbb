"""``shard()``, and ``fit()`` of a script that knows nothing of ranks, of all kinds of data.

Each rank takes its rows of every batch of its own ``Sequence`` or generator. That needs batches
that are the same on all ranks, so that these end at the same step, too: nothing is said between
ranks when a batch is taken.
"""

import itertools
import mmap
import threading
import types
import weakref

import numpy as np

from .. import errors
from . import adapting, arrays, checksum, data_samples, datasets, loaders

_REMEMBERED = 4096  # how many of a generator's last checksums are kept


def shard(place, data, batch_size=None):
    """As ``compat.shard()``, in a rank."""
    if batch_size is not None:
        place.rows_of_batch(batch_size)  # one row per rank, at least
    if arrays.part_in(data) is not None or loaders.is_part(data):
        raise errors.InvalidArgumentError(
            "shard() was given what it has returned before: this rank's part. Call it once."
        )
    adapting.watch()
    take = _of_batches(data)
    if datasets.takes(data):
        part, known = datasets.shard(place, data, batch_size), datasets.arrays_in(data)
    elif take is not None:  # of most of these ranks compare the batches
        part, known = take(place, data, batch_size), loaders.arrays_in(data)
    else:
        part, known = arrays.shard(place, data, batch_size), data
        adapting.note(part, data)
    data_samples.note(place, known)
    return part


def _of_batches(data):
    """What takes a part of each batch of such a source; None: it is none."""
    if _keras_class(type(data)) is not None:
        return _part_of_sequence
    if loaders.takes(data):
        return loaders.shard
    if loaders.takes_mxnets(data):  # an iterator, too
        return loaders.shard_mxnets
    is_iterator = hasattr(data, "__next__") and not hasattr(data, "shape")
    return _part_of_iterator if is_iterator else None


# fit() of a script that knows nothing of ranks ------------------------------------------------

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
    is_own_part = arrays.part_in(source) is not None or loaders.is_split(source)
    batched = datasets.batch_size_of(source) if datasets.takes(source) else None
    part = None if is_own_part else _part_of_batches(engine.place, source)
    looked_at = arrays.part_in(part)
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
    """How many batches an epoch has, from what ``fit()`` was given; 0: that is not known."""
    count = given.get("steps_per_epoch")
    if count is None:
        count = -(-_number_of_rows(source) // (given.get("batch_size") or _BATCH_SIZE))
    return int(count) % checksum.LARGEST


def _part_of_batches(place, source):
    """This rank's part of each batch of a generator, for example; None: that cannot be had."""
    take = _of_batches(source)
    try:
        return take and take(place, source, None)
    except errors.InvalidArgumentError:  # of a loader that draws no numbers of rows, for example
        return None


def _number_of_rows(data):
    """The rows of these arrays, or 0 where they are others' business."""
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


# Sequences and PyDatasets ---------------------------------------------------------------------


def _keras_class(kind):
    """Keras' class that a class is derived from: what Keras looks for."""
    for parent in reversed(kind.__mro__):
        if parent.__name__ in ("Sequence", "PyDataset") and hasattr(parent, "on_epoch_end"):
            return parent
    return None


def _part_of_sequence(place, sequence, batch_size):
    """The last item is computed to tell how many rows it has."""
    part = _made(place, sequence, batch_size, 0)
    count = part.num_batches
    if count:
        last = part._kept[count - 1] = sequence[count - 1]
        rows = arrays.number_of_rows(last)
        if rows < place.size:
            if count == 1:
                raise errors.too_few_rows(rows, place.size)
            arrays.warn_of_few(rows, place)
            part._left_out = 1
            part._kept.clear()
        elif batch_size is not None:
            arrays.part_of_batch(place, last, batch_size)
    return part


def _made(place, sequence, batch_size, left_out):
    base = _keras_class(type(sequence))
    return PartOfSequence.make(base, place, sequence, batch_size, left_out)


class PartOfSequence(arrays.PartOfObject):
    """This rank's rows of each item. Beside it, Keras' own class is a base class.

    What it does not have itself is the whole sequence's: a class's own attributes, for example.
    Keras may compute items in processes that it forks, which leave the checksum of an epoch's first
    item in memory that they share with this one.
    """

    changes = True

    def __init__(self, place, sequence, batch_size, left_out):
        base = _keras_class(type(sequence))
        if hasattr(base, "use_multiprocessing"):  # a PyDataset
            names = "workers", "use_multiprocessing", "max_queue_size"
            base.__init__(self, **{name: getattr(sequence, name) for name in names})
        super().__init__(place, sequence)
        self._batch_size = batch_size
        self._left_out = left_out  # the last item, 0 or 1
        self._kept = {}  # items that were computed to look at them
        self._epoch = 1
        self._ended = False  # in a thread
        # The number of this epoch, and the checksum; and those of the one before or after.
        self._shared = np.frombuffer(mmap.mmap(-1, 32), "int64").reshape(2, 2)

    def __reduce__(self):
        return _made, (self._place, self._whole, self._batch_size, self._left_out)

    @property
    def num_batches(self):
        """None: there is no end."""
        whole = self._whole
        is_dataset = hasattr(_keras_class(type(whole)), "num_batches")
        count = whole.num_batches if is_dataset else len(whole)
        return None if count is None else count - self._left_out

    def __len__(self):
        return self.num_batches

    def __getitem__(self, index):
        count = self.num_batches
        if count is not None:
            index = range(count)[index]
        item = self._kept.pop(index, None)
        if item is None:
            item = self._whole[index]
        if index == 0:
            self._shared[self._epoch % 2] = self._epoch, arrays.checksum(item)
        part = arrays.part_of_batch(self._place, item, self._batch_size)
        if part is None:
            raise errors.InvalidArgumentError(
                f"Item {index} of {self.name} has {arrays.number_of_rows(item)} rows, which are "
                f"too few for one on each of {self._place.size} ranks; only the last item is left "
                "out then. Give all others one row per rank or more."
            )
        return part

    def on_epoch_begin(self):
        if hasattr(self._whole, "on_epoch_begin"):
            self._whole.on_epoch_begin()

    def on_epoch_end(self):
        # Where threads compute items, tf.keras may end an epoch twice: in one of its threads, when
        # all items were taken (data_utils.OrderedEnqueuer), and then in fit() itself. How often
        # depends on how long a step takes, and must not differ between ranks.
        main = threading.current_thread() is threading.main_thread()
        again, self._ended = main and self._ended, not main
        if again:
            return
        self._whole.on_epoch_end()
        self._kept.clear()
        self._epoch += 1

    # What ranks compare -----------------------------------------------------------------------

    def position(self):
        """The last epoch whose first item was computed."""
        return int(self._shared[:, 0].max())

    def begin(self):
        self._ended = False

    def checksum_at(self, position):
        return dict(self._shared.tolist()).get(position, 0)

    def peek(self):
        if self.num_batches == 0:
            return 0
        if 0 not in self._kept:
            self._kept[0] = self._whole[0]
        return arrays.checksum(self._kept[0])


# Generators and other iterators ---------------------------------------------------------------


def _part_of_iterator(place, iterator, batch_size):
    """What was a generator becomes one: Keras 3 takes nothing else."""
    part = PartOfIterator(place, iterator, batch_size)
    return part.as_given(part)


class PartOfIterator(arrays.Part):
    """This rank's rows of each batch. Threads may share it where they may share the iterator."""

    changes = True

    def __init__(self, place, iterator, batch_size):
        self.name = type(iterator).__name__
        self.place = place
        self.iterator = iterator
        self.batch_size = batch_size
        self.lock = threading.Lock()
        self.ahead = []  # the next batch, where it has been looked at
        self.threads = weakref.WeakSet()  # type: weakref.WeakSet  # that have drawn in this fit()
        self.ended = weakref.WeakSet()  # type: weakref.WeakSet  # and in those before
        self.checksums = {0: 0}  # of the first so many batches
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            with self.lock:
                thread = threading.current_thread()
                if thread in self.ended:
                    return None
                self.threads.add(thread)
                batch = self._draw()
            part = arrays.part_of_batch(self.place, batch, self.batch_size)
            if part is not None:
                return part
            arrays.warn_of_few(arrays.number_of_rows(batch), self.place)

    def _draw(self):
        batch = self.ahead.pop() if self.ahead else next(self.iterator)
        value = arrays.checksum(batch, value=self.checksums[self.drawn])
        self.drawn += 1
        self.checksums[self.drawn] = value
        self.checksums.pop(self.drawn - _REMEMBERED, None)
        return batch

    def as_given(self, batches):
        """Batches of this part as an object of the kind that ``shard()`` was given."""
        if not isinstance(self.iterator, types.GeneratorType):
            return batches
        generator = (batch for batch in batches)
        if batches is self:
            arrays.of_generators[generator] = self
        return generator

    def whole(self):
        """What it was made of, with the batch that has been looked at."""
        return self.as_given(itertools.chain(self.ahead, self.iterator))

    # What ranks compare -----------------------------------------------------------------------

    def position(self):
        return self.drawn

    def checksum_at(self, position):
        return self.checksums.get(position, 0)

    def begin(self):
        """Threads of an earlier ``fit()`` draw no more.

        Keras 2 does not wait for those of its pool, which go on for as many batches as it has
        asked for ahead (data_utils.GeneratorEnqueuer), and takes what they return no more.
        """
        with self.lock:
            pool = [each for each in self.threads if type(each).__name__ == "DummyProcess"]
            self.ended.update(pool)
            self.threads.clear()

    def advance(self, position):
        with self.lock:
            while self.drawn < position:
                self._draw()

    def peek(self):
        with self.lock:
            if not self.ahead:
                self.ahead.extend(itertools.islice(self.iterator, 1))
            return arrays.checksum(self.ahead[0]) if self.ahead else 0
