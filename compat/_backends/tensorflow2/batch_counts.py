"""Batches counted where they are computed: in Python, or by the graph that computes them.

A graph's steps do not pass through Python. It counts in a table of its own runtime, by the number
of rows: an operation that makes its resource when it first runs, so that nothing is captured, and
what is saved of the graph runs anywhere. A batch costs some tens of microseconds.
"""

import itertools

import tensorflow as tf

from ..._rows import splitting
from ..._runtime import work
from ..._runtime.process import process

_numbers = itertools.count()


def _sizes(devices, rows):
    return splitting.sizes(rows, len(devices))


def count(devices, rows, training, sizes=_sizes):
    """Count a batch that is split over ``devices``; within a graph, whenever that runs.

    Arguments:
        rows: an integer, or a scalar tensor.
        training: whether gradients are wanted.
        sizes: tells of a number of rows how many each device gets.
    """
    if tf.executing_eagerly():
        work.count(devices, sizes(devices, int(rows)), training)
        return
    from tensorflow.python.ops import control_flow_util

    # The graph of ``tf.function(jit_compile=True)`` is all on one device, and XLA has no tables.
    # What tells it is not public.
    is_xlas = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    if not (is_xlas or work.uncounted):
        key = tuple(devices), training, sizes
        process.graph_counters.setdefault(key, Table(*key)).count(rows)


class Table:
    """How many batches of each number of rows there were, as graphs count them."""

    def __init__(self, devices, training, sizes):
        self.devices, self.training, self.sizes = devices, training, sizes
        self.name = f"compat_batches_{next(_numbers)}"

    def count(self, rows):
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
        """Made in each graph anew, of one name, so that it is the same."""
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self.name
        )

    def __call__(self):
        """Yield pairs of what ``work.count()`` would be told, and how often."""
        with tf.init_scope(), tf.device("/cpu:0"):
            keys, values = tf.raw_ops.LookupTableExportV2(
                table_handle=self._resource(), Tkeys=tf.int64, Tvalues=tf.int64
            )
        for rows, number in zip(keys.numpy().tolist(), values.numpy().tolist()):
            sizes = tuple(self.sizes(self.devices, rows))
            yield (self.devices, sizes, self.training), number
