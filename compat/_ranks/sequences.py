"""``shard()`` of a Keras ``Sequence`` or ``PyDataset``: this rank's rows of each item.

That needs items that are the same on all ranks, so that these end at the same step, too: nothing is
exchanged between ranks when an item is taken.
"""

import mmap
import threading

import numpy as np

from .. import errors
from . import arrays, batch_agreement


def keras_class(kind):
    """Return Keras' class that a class is derived from, or None."""
    for parent in reversed(kind.__mro__):
        if parent.__name__ in ("Sequence", "PyDataset") and hasattr(parent, "on_epoch_end"):
            return parent
    return None


def shard(place, sequence, batch_size=None):
    """Return this rank's rows of each item. The last item is computed to count its rows."""
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
    base = keras_class(type(sequence))
    return PartOfSequence.make(base, place, sequence, batch_size, left_out)


class PartOfSequence(batch_agreement.PartOfObject):
    """This rank's rows of each item. Keras' own class is the other base class of instances.

    Other attributes are those of the whole sequence, such as those that its class defines.
    Keras may compute items in processes that it forks, which leave the checksum of an epoch's first
    item in memory that they share with this one.
    """

    changes = True

    def __init__(self, place, sequence, batch_size, left_out):
        base = keras_class(type(sequence))
        if hasattr(base, "use_multiprocessing"):  # a PyDataset
            names = "workers", "use_multiprocessing", "max_queue_size"
            base.__init__(self, **{name: getattr(sequence, name) for name in names})
        super().__init__(place, sequence)
        self._batch_size = batch_size
        self._left_out = left_out  # the last item, 0 or 1
        self._kept = {}  # items that were computed in advance
        self._epoch = 1
        self._ended = False  # in a thread
        # The number of this epoch, and the checksum; and those of the one before or after.
        self._shared = np.frombuffer(mmap.mmap(-1, 32), "int64").reshape(2, 2)

    def __reduce__(self):
        return _made, (self._place, self._whole, self._batch_size, self._left_out)

    @property
    def num_batches(self):
        """The number of items, or None where it is infinite."""
        whole = self._whole
        is_dataset = hasattr(keras_class(type(whole)), "num_batches")
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
        """Begin an epoch of the whole sequence."""
        if hasattr(self._whole, "on_epoch_begin"):
            self._whole.on_epoch_begin()

    def on_epoch_end(self):
        """End an epoch of the whole sequence, once."""
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

    def position(self):
        """Return the last epoch whose first item was computed."""
        return int(self._shared[:, 0].max())

    def begin(self):
        """Begin a ``fit()``."""
        self._ended = False

    def checksum_at(self, position):
        """Return the checksum of the first item of an epoch, or 0 where it is not known."""
        return dict(self._shared.tolist()).get(position, 0)

    def peek(self):
        """Return the checksum of the first item, or 0 where there is none."""
        if self.num_batches == 0:
            return 0
        if 0 not in self._kept:
            self._kept[0] = self._whole[0]
        return arrays.checksum(self._kept[0])
