"""Counts of batches: made in Python, or by the graph that computes the batches.

A graph's steps do not pass through Python. It counts in a hash table of TensorFlow's runtime, by
the number of rows. The table's operation makes its resource when it first runs, so that the graph
captures nothing, and can be saved and run anywhere. A batch costs some tens of microseconds.
"""

import itertools
from typing import Any, Callable, Dict, Sequence

import tensorflow as tf

from ..._rows import splitting
from ..._runtime import work
from ..._runtime.process import process
from .graph import is_for_xla

_numbers = itertools.count()


def _sizes(devices, rows):
    return splitting.sizes(rows, len(devices))


def count(
    devices: "Sequence[str]",
    rows: "Any",
    training: bool,
    sizes: "Callable[[Sequence[str], int], Sequence[int]]" = _sizes,
) -> None:
    """Count a batch that is split over devices; within a graph, whenever that runs.

    Arguments:
        devices: their names.
        rows: an integer, or a scalar tensor.
        training: whether gradients are wanted.
        sizes: returns the number of rows of each device's shard.
    """
    if tf.executing_eagerly():
        work.count(devices, sizes(devices, int(rows)), training)
        return
    if not (is_for_xla() or work.uncounted):
        key = tuple(devices), training, sizes
        tables: "Dict[Any, Any]" = process.graph_counters
        tables.setdefault(key, Table(*key)).count(rows)


class Table:
    """Counts of batches in graphs, by their number of rows.

    Arguments:
        devices, training, sizes: as those of ``count``.
    """

    def __init__(
        self,
        devices: "Sequence[str]",
        training: bool,
        sizes: "Callable[[Sequence[str], int], Sequence[int]]",
    ) -> None:
        self.devices, self.training, self.sizes = devices, training, sizes
        self.name = f"compat_batches_{next(_numbers)}"

    def count(self, rows: "Any") -> None:
        """Add the operations that count a batch to the graph."""
        with tf.device("/cpu:0"):
            table, mutex = self._resource(), tf.raw_ops.MutexV2(shared_name=self.name + "_mutex")
            key = tf.reshape(tf.cast(rows, tf.int64), [1])
            none = tf.constant(0, tf.int64)
            # Other calls, of this graph or in other threads, may count at the same time.
            lock = tf.raw_ops.MutexLock(mutex=mutex)
            with tf.control_dependencies([lock]):
                number = tf.raw_ops.LookupTableFindV2(
                    table_handle=table, keys=key, default_value=none
                )
            insert = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=key, values=number + 1)
            with tf.control_dependencies([insert]):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def _resource(self):
        """Return the table's handle in this graph: the name makes it the same table."""
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self.name
        )

    def __call__(self):
        """Yield pairs of the arguments of ``work.count()``, and how often it would be called."""
        with tf.init_scope(), tf.device("/cpu:0"):
            keys, values = tf.raw_ops.LookupTableExportV2(
                table_handle=self._resource(), Tkeys=tf.int64, Tvalues=tf.int64
            )
        for rows, number in zip(keys.numpy().tolist(), values.numpy().tolist()):
            sizes = tuple(self.sizes(self.devices, rows))
            yield (self.devices, sizes, self.training), number
