"""``shard()`` of a ``tf.data.Dataset``: this rank's rows of each batch of one process."""

import sys
import weakref
import zlib
from typing import Any

from .. import errors
from . import arrays, batch_agreement

# Values of Dataset.cardinality() for an infinite and for an unknown one.
_INFINITE, _UNKNOWN = -1, -2


_shuffled: "weakref.WeakKeyDictionary[Any, Seeds]" = weakref.WeakKeyDictionary()  # of parts
_parts_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Seeds(batch_agreement.Part):
    """The seeds, TensorFlow's global one included, of a dataset shuffled before ``shard()``."""

    name = "Dataset"

    def __init__(self, seeds):
        self.seeds = seeds

    def peek(self):
        """Return the checksum of the seeds, in place of that of a batch."""
        return zlib.crc32(repr(self.seeds).encode())


def compared(data):
    """Return what ranks compare of data: of a shuffled dataset its seeds, else the data."""
    chain = _chain(data) if takes(data) else ()
    return next((_shuffled[part] for part in chain if part in _shuffled), data)


def takes(data):
    """Return whether data are a ``tf.data.Dataset``."""
    return hasattr(data, "element_spec") and hasattr(data, "shard")


def shard(place, dataset, batch_size):
    """Return this rank's shard of a dataset.

    Ranks compare how it is shuffled when ``fit()`` begins.
    """
    seeds = _seeds(dataset)
    if not all(map(any, seeds)):
        errors.warn(
            "shard() was given a dataset that is shuffled without a seed: each rank shuffles it "
            "in another order, so that they train on some rows several times and on others "
            "never. Call shuffle() after shard(), or give it the same seed on all ranks."
        )
    part = _part(place, dataset, batch_size)
    _parts_made.add(next(_chain(part)))
    if seeds:
        _shuffled[next(_chain(part))] = Seeds(seeds)
    return part


def is_part(data):
    """Return whether a dataset is made from one that ``shard()`` has returned."""
    return takes(data) and any(one in _parts_made for one in _chain(data))


def _part(place, dataset, batch_size):
    """Return this rank's shard of a dataset.

    Arguments:
        place: this process's ``Place``.
        dataset: one of rows or of batches.
        batch_size: rows of a batch of all ranks, or None: that of a dataset of batches; elements
            that are rows, or that may be, are dealt out then.
    """
    try:
        batched = batch_size_of(dataset)
    except errors.InvalidArgumentError:
        if batch_size is not None:
            raise
        batched = None
    if batched is None:
        return _rows(place, dataset, batch_size) if batch_size else _elements(place, dataset)
    if batch_size is not None and batched not in (_UNKNOWN, batch_size):
        raise errors.InvalidArgumentError(
            "shard(batch_size={}) was given a dataset in batches of {}. Give its own batch size, "
            "or shard the dataset before its batch().".format(batch_size, batched)
        )
    if batched != _UNKNOWN:
        place.rows_of_batch(batched)  # one row per rank, at least
    return _parts(place, dataset)


def arrays_in(dataset):
    """Return the arrays that a dataset is made of, if they can be read without running it."""
    return [
        tensor
        for one in _chain(dataset)
        for tensor in getattr(one, "_tensors", ())
        if hasattr(tensor, "numpy") and getattr(tensor.dtype, "is_numpy_compatible", True)
    ]


def _cardinality(dataset):
    try:
        return int(sys.modules["tensorflow"].data.experimental.cardinality(dataset))
    except (TypeError, ValueError):  # in a graph
        return _UNKNOWN


def _elements(place, dataset):
    """Return every N-th element, equally many on each rank."""
    count = _cardinality(dataset)
    if count == _INFINITE:
        return dataset.shard(place.size, place.rank)
    if count == _UNKNOWN:
        tf = sys.modules["tensorflow"]

        def mine(*window):
            rows = tf.data.Dataset.zip(window if len(window) > 1 else window[0])
            return rows.skip(place.rank).take(1)

        return dataset.window(place.size, drop_remainder=True).flat_map(mine)
    left_out = arrays.left_out(place, count, place.size, "elements")
    return dataset.take(count - left_out).shard(place.size, place.rank)


def _rows(place, dataset, batch_size):
    """Return this rank's rows of each ``batch_size`` rows of a dataset of rows."""
    tf = sys.modules["tensorflow"]
    count = _cardinality(dataset)
    if count == _UNKNOWN:
        return _parts(place, dataset.batch(batch_size)).unbatch()
    is_finite = count != _INFINITE
    if not is_finite:
        count = sys.maxsize // batch_size * batch_size
    last = count % batch_size
    whole = count - last  # rows of batches that are whole
    start, stop = place.part_of(batch_size)
    first, end = place.part_of(last)
    if arrays.left_out(place, count, batch_size):
        dataset, first, end = dataset.take(whole), 0, 0

    def is_mine(row, element):
        at, is_whole = row % batch_size, row < whole
        mine = (start <= at) & (at < stop)
        if last:  # only then are there rows of a smaller last batch
            mine = (is_whole & mine) | (~is_whole & (first <= at) & (at < end))
        return mine

    shown = dataset.enumerate().filter(is_mine).map(lambda row, element: element)
    rows = whole // batch_size * (stop - start) + end - first
    if is_finite and hasattr(tf.data.experimental, "assert_cardinality"):
        shown = shown.apply(tf.data.experimental.assert_cardinality(rows))
    return shown


def _parts(place, dataset):
    """Return this rank's rows of each batch. A batch with fewer rows than ranks is left out."""
    tf = sys.modules["tensorflow"]

    def rows_of(batch):
        return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]

    def left_out(rows):
        arrays.warn_of_few(rows, place)  # in a thread of TensorFlow's: no caller is to be seen
        return False

    def is_kept(*batch):
        rows = rows_of(batch)
        return tf.cond(
            rows >= place.size,
            lambda: True,
            lambda: tf.ensure_shape(tf.numpy_function(left_out, [rows], tf.bool), []),
        )

    def part(*batch):
        least, more = rows_of(batch) // place.size, rows_of(batch) % place.size
        start = place.rank * least + tf.minimum(tf.cast(place.rank, tf.int64), more)
        stop = start + least + tf.cast(place.rank < more, tf.int64)
        mine = tf.nest.map_structure(lambda tensor: tensor[start:stop], batch)
        return mine if isinstance(dataset.element_spec, tuple) else mine[0]

    last = _rows_of_last(dataset)
    if last is None:
        return dataset.filter(is_kept).map(part)
    if last < place.size:
        arrays.warn_of_few(last, place)
        dataset = dataset.take(_cardinality(dataset) - 1)
    return dataset.map(part)


def _rows_of_last(dataset):
    """Return the number of rows of a dataset's last batch, or None where it is not known."""
    tf = sys.modules["tensorflow"]
    fixed = tf.nest.flatten(dataset.element_spec)[0].shape.as_list()[0]
    names = "BatchDataset", "ParallelBatchDataset", "_BatchDataset"
    batches = next((one for one in _chain(dataset) if type(one).__name__ in names), None)
    if fixed is not None or batches is None:
        return fixed
    size = tf.get_static_value(batches._batch_size)
    rows = _cardinality(batches._inputs()[0])
    if size is None or rows <= 0 or _cardinality(dataset) != -(-rows // size):
        return None
    return int(rows % size or size)


def _chain(dataset):
    """Yield a dataset, and those from which it is made."""
    seen = [dataset]
    while seen:
        dataset = seen.pop()
        dataset = getattr(dataset, "_dataset", dataset)  # of an adapter, in TensorFlow 1
        yield dataset
        inputs = getattr(dataset, "_inputs", None)
        seen += inputs() if callable(inputs) else []


def batch_size_of(dataset):
    """Return the number of rows of a dataset's batches, -2 where it varies, or None for rows.

    Raises:
        InvalidArgumentError: it is not known whether an element is a row or a batch.
    """
    tf = sys.modules["tensorflow"]
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    # None: not known; 0: there is no such axis.
    lengths = {shape.as_list()[0] if shape is not None and shape.rank else 0 for shape in shapes}
    for one in _chain(dataset):
        name = type(one).__name__.lower()
        if "unbatch" in name:
            return None
        if "batch" in name:
            length = lengths.pop() if len(lengths) == 1 else None
            if length is None and hasattr(one, "_batch_size"):
                length = tf.get_static_value(one._batch_size)
            return _UNKNOWN if length is None else int(length)
    if lengths == {None}:
        raise errors.InvalidArgumentError(
            "shard() cannot tell whether the elements of this dataset are rows or batches: the "
            "length of their first axis is not known. Batches: call its unbatch() before. Rows: "
            "call shard() after batch(), or without batch_size."
        )
    return None


def _seeds(dataset):
    """Return the two numbers that TensorFlow derives from the seeds of each shuffle."""
    tf = sys.modules["tensorflow"]
    return [
        [tf.get_static_value(seed) for seed in (one._seed, one._seed2)]
        for one in _chain(dataset)
        if "shuffle" in type(one).__name__.lower() and hasattr(one, "_seed")
    ]
