"""What each replica gets of a call's arguments on TensorFlow 2: some of the batch's rows."""

import itertools

import tensorflow as tf

from ..._rows import REPLICATED, Count, Sharded, Unknown


def has_rows(value):
    return tf.is_tensor(value) and value.shape.rank != 0


def _is_array(value):
    return type(value).__module__ == "numpy" and value.shape != () and value.dtype != object


def are_arrays(given):
    """Whether arrays of numpy's are the only values with rows that a call was given."""
    leaves = tf.nest.flatten(given)
    return any(map(_is_array, leaves)) and not any(has_rows(leaf) for leaf in leaves)


def as_tensors(given):
    return tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if _is_array(leaf) else leaf, given
    )


def rows_of(batch):
    """The number of rows: an integer where it is known, else a scalar tensor (int32)."""
    if batch.shape.rank is not None and batch.shape[0] is not None:
        return batch.shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return tf.cast(batch.nrows(), tf.int32)
    if isinstance(batch, tf.SparseTensor):
        return tf.cast(batch.dense_shape[0], tf.int32)
    return tf.shape(batch)[0]


class ShardedArguments:
    """The arguments of a call: which of them are data, of which each replica gets some rows.

    ``given`` is the structure of the arguments, and the masks of all that they consist of.
    The first tensor is the batch. The argument that it stands in, alone or in a list or a
    dictionary, is the model's input, and has to have as many rows everywhere. Other arguments
    are data if they have as many rows as the batch. Variables are no data, nor are constants and
    tensors of a known length beside a batch that has none.
    """

    def __init__(self, args, kwargs, replicas):
        self.structure = (args, kwargs)
        leaves = tf.nest.flatten(self.structure)
        masks = [getattr(value, "_keras_mask", None) for value in leaves]
        self.given = self.structure, masks
        self.leaves = leaves + masks
        arguments = list(args) + [kwargs[name] for name in sorted(kwargs)]
        ends = itertools.accumulate(len(tf.nest.flatten(argument)) for argument in arguments)
        places = [n for n, value in enumerate(self.leaves) if has_rows(value)]
        self.batch = self.leaves[places[0]] if places else None
        if self.batch is None:
            return
        end = next(end for end in ends if end > places[0])
        self.rows = rows_of(self.batch)
        self.has_values = tf.executing_eagerly()  # which an initialization scope always is
        self.differ = False  # whether parts of the input have other numbers of rows
        self.has_others = False
        if replicas == 1:
            self.is_data = [False] * len(self.leaves)
            return
        self.constant_batch = self._is_constant(self.batch)
        # For each leaf whether it is data: True, False, or a tensor that says so later.
        self.is_data = [self._is_data(value, n < end) for n, value in enumerate(leaves)] * 2
        #: Whether something with rows of its own may go to each replica as it is.
        leaves = [v for v, is_data in zip(self.leaves, self.is_data) if is_data is not True]
        self.has_others = any(map(has_rows, leaves))

    def _is_constant(self, value):
        from tensorflow.python.framework import tensor_util

        is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        if tf.executing_eagerly() or is_composite or not tf.is_tensor(value):
            return False
        return hasattr(value, "numpy") or tensor_util.constant_value(value) is not None

    def _is_data(self, value, is_input):
        if value is self.batch:
            return True
        is_constant = self._is_constant(value) and not self.constant_batch
        if is_constant or not has_rows(value) or isinstance(value, tf.Variable):
            return False
        rows = rows_of(value)
        if isinstance(rows, int) and isinstance(self.rows, int):
            self.differ = self.differ or is_input and rows != self.rows
            return rows == self.rows
        if is_input:
            check = tf.debugging.assert_equal(rows, self.rows, message=_DIFFERENT_ROWS)
            # None where TensorFlow knew it to hold.
            with tf.control_dependencies([] if check is None else [check]):
                self.rows = tf.identity(self.rows)
            return True
        return False if isinstance(rows, int) else tf.equal(rows, self.rows)

    def shard(self, bounds):
        """What a replica is ``given`` that has the rows from ``bounds[0]`` to ``bounds[1]``."""
        leaves = [self._cut(*each, bounds=bounds) for each in zip(self.leaves, self.is_data)]
        return tf.nest.pack_sequence_as(self.given, leaves)

    def _cut(self, value, is_data, bounds):
        if is_data is False or value is None:
            return value
        start, stop = bounds
        if is_data is not True:
            start = tf.where(is_data, start, 0)
            stop = tf.where(is_data, stop, rows_of(value))
        return _rows(value, start, stop)

    def _tensors(self):
        """Pairs of a tensor and whether it is data: of the arguments, then of their masks."""
        return [pair for pair in zip(self.leaves, self.is_data) if tf.is_tensor(pair[0])]

    def placements(self):
        """For each tensor that the arguments, and their masks, consist of how it has rows."""
        found, uneven = [], Sharded(0, inner=None, even=False)
        for value, is_data in self._tensors():
            count = len(tf.nest.flatten(value, expand_composites=True))
            if is_data is False:
                found += [REPLICATED] * count
            elif isinstance(value, tf.SparseTensor):
                found += [Unknown(), uneven, Count([0])]
            else:
                found += [Sharded(0)] if count == 1 else [uneven] + [Unknown()] * (count - 1)
        return found

    def kind(self):
        """What calls with arguments of the same kinds have in common."""
        tensors = tf.nest.flatten([each for each, _ in self._tensors()], expand_composites=True)
        plain = [value for value in self.leaves if not tf.is_tensor(value)]
        kinds = [(str(each.dtype), str(each.shape[1:])) for each in tensors]
        return repr((kinds, self.placements(), plain))

    def three_rows(self):
        """For each of these tensors its values: of three rows, of two of them and of the third.

        None for those that have no value yet and no rows.
        """
        real, found = self.has_values and int(self.rows) >= 3, []
        for value, is_data in self._tensors():
            if is_data is False:
                parts = tf.nest.flatten(value, expand_composites=True)
                found += [[part] * 3 if hasattr(part, "numpy") else None for part in parts]
            else:
                whole = _rows(value, 0, 3) if real else _made_up(value)
                parts = [whole, _rows(whole, 0, 2), _rows(whole, 2, 3)]
                lanes = [tf.nest.flatten(part, expand_composites=True) for part in parts]
                found += list(map(list, zip(*lanes)))
        return found


_DIFFERENT_ROWS = (
    "parallelize() cuts each batch by rows, and this model's inputs have different numbers of "
    "rows. Give inputs with one row for each sample, pass what all samples share as another "
    "argument of the call or as the model's own attribute, or run this model on one device, with "
    "parallelize(model, gpus=1)."
)


def _made_up(tensor):
    """Three rows of a tensor's shape and type, where the batch has no values yet."""
    import numpy as np

    random, sizes, dtype = np.random.RandomState(0), tensor.shape.as_list(), tensor.dtype
    sizes = [16 if size is None else size for size in sizes[1:]]
    if isinstance(tensor, tf.RaggedTensor):
        lengths, (flat, *_) = [2, 3, 1], tf.nest.flatten(tensor, expand_composites=True)
        values = random.normal(size=[6] + flat.shape.as_list()[1:])
        return tf.RaggedTensor.from_row_lengths(_of_type(values, dtype), lengths)
    values = _of_type(random.normal(size=[3] + sizes), dtype)
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.from_dense(tf.where(values > 0, values, tf.zeros_like(values)))
    return values


def _of_type(values, dtype):
    if dtype == tf.string:
        return tf.strings.as_string(values)
    return tf.cast(values if dtype.is_floating or dtype.is_complex else values > 0, dtype)


def _rows(value, start, stop):
    """Some rows of a tensor of any kind."""
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    shape = tf.unstack(value.dense_shape, num=value.shape.rank)
    sizes = [tf.cast(stop - start, tf.int64)] + shape[1:]
    starts = [tf.cast(start, tf.int64)] + [0] * (len(shape) - 1)
    return tf.sparse.slice(value, tf.stack(starts), tf.stack(sizes))


def concatenated(values):
    """The rows of tensors of any kind, one after the other."""
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(0, values, expand_nonconcat_dims=True)
    return tf.concat(values, axis=0)


def kept(value, size):
    """The rows of a result that are a replica's own: all of them, or none where it has none."""
    if isinstance(size, int):
        return value if size else _rows(value, 0, 0)
    return _rows(value, 0, rows_of(value) * tf.minimum(size, 1))


def checked(output, batch):
    """An output, once it is certain that it has a row for each row of a replica's batch.

    Beside arguments that each replica gets whole it might have one for each of theirs.
    """
    found, rows = rows_of(output), rows_of(batch)
    message = (
        "parallelize() cut the first argument of this model, {} rows on this device, and an output "
        "has {}: it does not follow the rows of the first argument. Pass the argument that it "
        "follows first, or run this model on one device, with parallelize(model, gpus=1)."
    )
    if isinstance(found, int) and isinstance(rows, int):
        return output  # as many
    check = tf.debugging.assert_equal(found % rows, 0, message=message.format("some", "others"))
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, output, expand_composites=True)
