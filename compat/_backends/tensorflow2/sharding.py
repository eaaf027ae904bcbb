"""What each replica gets of a call's arguments on TensorFlow 2: some of the batch's rows."""

from ... import errors
from .row_kinds import Sizes


def has_rows(tf, value):
    return tf.is_tensor(value) and value.shape.rank != 0


def rows_of(tf, batch):
    """The number of rows: an integer where it is known, else a scalar tensor (int32)."""
    if batch.shape.rank is not None and batch.shape[0] is not None:
        return batch.shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return tf.cast(batch.nrows(), tf.int32)
    if isinstance(batch, tf.SparseTensor):
        return tf.cast(batch.dense_shape[0], tf.int32)
    return tf.shape(batch)[0]


class Arguments:
    """The arguments of a call: which of them are data, of which each replica gets some rows.

    The first tensor is the batch. The argument that it stands in, alone or in a list or a
    dictionary, is the model's input, and has to have as many rows everywhere. Other arguments
    are data if they have as many rows as the batch. Variables are no data, nor are constants and
    tensors of a known length beside a batch that has none.
    """

    def __init__(self, tf, args, kwargs, replicas):
        self.tf = tf
        self.replicas = replicas
        self.structure = (args, kwargs)
        self.leaves = tf.nest.flatten(self.structure)
        arguments = list(args) + [kwargs[name] for name in sorted(kwargs)]
        sizes = [len(tf.nest.flatten(argument)) for argument in arguments]
        places = [n for n, value in enumerate(self.leaves) if has_rows(tf, value)]
        self.batch = self.leaves[places[0]] if places else None
        if self.batch is None:
            return
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        end = next(end for end in ends if end > places[0])
        self.rows = rows_of(tf, self.batch)
        self.has_others = False
        if replicas == 1:
            self.is_data = [False] * len(self.leaves)
            return
        self.constant_batch = self._is_constant(self.batch)
        # For each leaf whether it is data: True, False, or a tensor that says so later.
        self.is_data = [self._is_data(value, n < end) for n, value in enumerate(self.leaves)]
        #: Whether something with rows of its own may go to each replica as it is.
        self.has_others = any(
            is_data is not True and has_rows(tf, value)
            for is_data, value in zip(self.is_data, self.leaves)
        )

    def _is_constant(self, value):
        from tensorflow.python.framework import tensor_util

        tf = self.tf
        if tf.executing_eagerly() or not tf.is_tensor(value):
            return False
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return False
        return hasattr(value, "numpy") or tensor_util.constant_value(value) is not None

    def _is_data(self, value, is_input):
        tf = self.tf
        if value is self.batch:
            return True
        if not has_rows(tf, value) or isinstance(value, tf.Variable):
            return False
        if self._is_constant(value) and not self.constant_batch:
            return False
        rows = rows_of(tf, value)
        if isinstance(rows, int) and isinstance(self.rows, int):
            if rows != self.rows and is_input:
                raise errors.UnsupportedError(_different_rows(self.rows, rows))
            return rows == self.rows
        if is_input:
            check = tf.debugging.assert_equal(
                rows, self.rows, message=_different_rows("some", "others")
            )
            # None where TensorFlow knew it to hold.
            with tf.control_dependencies([] if check is None else [check]):
                self.rows = tf.identity(self.rows)
            return True
        if isinstance(rows, int):
            return False
        return tf.equal(rows, self.rows)

    def shard(self, bounds):
        """The arguments of a replica, which has the rows from ``bounds[0]`` to ``bounds[1]``."""
        leaves = [self._cut(*each, bounds=bounds) for each in zip(self.leaves, self.is_data)]
        return self.tf.nest.pack_sequence_as(self.structure, leaves)

    def _cut(self, value, is_data, bounds):
        tf = self.tf
        if is_data is False:
            return value
        start, stop = bounds
        if is_data is not True:
            start = tf.where(is_data, start, 0)
            stop = tf.where(is_data, stop, rows_of(tf, value))
        shard = _rows(tf, value, start, stop)
        mask = getattr(value, "_keras_mask", None)
        if mask is not None:
            shard._keras_mask = mask[start:stop]
        return shard

    def traced(self):
        """For each tensor that the arguments consist of whether it has rows (see ``Trace``)."""
        tf, flags = self.tf, []
        for value, is_data in zip(self.leaves, self.is_data):
            count = len(tf.nest.flatten(value, expand_composites=True))
            if is_data is False:
                flags += [False] * count
            elif isinstance(value, tf.SparseTensor):
                flags += [None, None, Sizes(frozenset([0]))]
            else:
                flags += [True] if count == 1 else [None] * count
        return flags + [self._has_mask_rows(place) for place in range(len(self.leaves))]

    def _has_mask_rows(self, place):
        masked = getattr(self.leaves[place], "_keras_mask", None) is not None
        return masked and self.is_data[place] is not False


def _different_rows(first, second):
    return (
        "parallelize() cuts each batch by rows, and this model's inputs have different numbers of "
        "rows: {} and {}. Give inputs with one row for each sample, pass what all samples share "
        "as another argument of the call or as the model's own attribute, or run this model on "
        "one device, with parallelize(model, gpus=1).".format(first, second)
    )


def _rows(tf, value, start, stop):
    """Some rows of a tensor of any kind."""
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    shape = tf.unstack(value.dense_shape, num=value.shape.rank)
    sizes = [tf.cast(stop - start, tf.int64)] + shape[1:]
    starts = [tf.cast(start, tf.int64)] + [0] * (len(shape) - 1)
    return tf.sparse.slice(value, tf.stack(starts), tf.stack(sizes))


def kept(tf, value, size):
    """The rows of a result that are a replica's own: all of them, or none where it has none."""
    if isinstance(size, int):
        return value if size else _rows(tf, value, 0, 0)
    return _rows(tf, value, 0, rows_of(tf, value) * tf.minimum(size, 1))


def has_same_rows(value, batch):
    """Whether a result has as many rows as a replica's batch, as far as TensorFlow knows."""
    if value.shape.rank is None or batch.shape.rank is None:
        return value.shape.rank is None
    return value.shape.rank > 0 and value.shape[0] in (None, batch.shape[0])


def checked(tf, output, batch):
    """An output, once it is certain that it has a row for each row of a replica's batch.

    Beside arguments that each replica gets whole it might have one for each of theirs.
    """
    found, rows = rows_of(tf, output), rows_of(tf, batch)
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
