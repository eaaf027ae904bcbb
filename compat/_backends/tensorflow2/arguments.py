"""Arguments of a call: their tensors, which of these are data, and shards of the data."""

import hashlib
import numbers
import weakref
from typing import Any, Dict, Hashable, Iterable, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from ..._rows import (
    REPLICATED,
    Count,
    Fallback,
    Placement,
    Reason,
    Replicated,
    Sharded,
    Unknown,
    trial,
)
from .trial import SampleValues


def tensors_of(structure: "Any") -> "List[tf.Tensor]":
    """Return all tensors that a structure consists of."""
    values = tf.nest.flatten(structure, expand_composites=True)
    return [value for value in values if tf.is_tensor(value)]


def with_tensors(structure: "Any", tensors: "Iterable[tf.Tensor]") -> "Any":
    """Return the structure with these tensors in place of its ``tensors_of``."""
    replacements = iter(tensors)

    def replacement(value):
        return next(replacements) if tf.is_tensor(value) else value

    return tf.nest.map_structure(replacement, structure, expand_composites=True)


def has_rows(value: "Any") -> bool:
    """Return whether a value is a tensor with at least one dimension."""
    return tf.is_tensor(value) and value.shape.rank != 0


def _is_array(value):
    return type(value).__module__ == "numpy" and value.shape != () and value.dtype != object


def are_arrays(arguments: "Any") -> bool:
    """Return whether all of a call's arguments that have rows are NumPy arrays."""
    leaves = tf.nest.flatten(arguments)
    return any(map(_is_array, leaves)) and not any(has_rows(leaf) for leaf in leaves)


def as_tensors(structure: "Any") -> "Any":
    """Return the structure with a tensor in place of each NumPy array."""
    return tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if _is_array(leaf) else leaf, structure
    )


def rows_of(batch: "Any") -> "Any":
    """Return the number of rows: an integer where it is static, else a scalar tensor (int32)."""
    if batch.shape.rank is not None and batch.shape[0] is not None:
        return batch.shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return tf.cast(batch.nrows(), tf.int32)
    if isinstance(batch, tf.SparseTensor):
        return tf.cast(batch.dense_shape[0], tf.int32)
    return tf.shape(batch)[0]


class ShardedArguments:
    """The arguments of a call, of which each replica gets a shard of those that are data.

    The first tensor is the batch. The argument that contains it, alone or in a list or a
    dictionary, is the model's input, and all of it must have as many rows. Other arguments are
    data if they have as many rows as the batch; if TensorFlow knows their number only at run time,
    it must be the same. Variables are not data, nor are constants, nor tensors of a static length
    beside a batch of a dynamic one.

    Attributes:
        structure: the positional arguments and those by keyword.
        tree: the structure, and the Keras masks of its leaves.
        leaves: those of the tree.
        batch: the first tensor that has rows, or None.
        rows: their number: an integer, or a scalar tensor.
        is_data: of each leaf, whether it is data.
        fallback: why the batch cannot be split, or None.
    """

    def __init__(self, args: "Tuple[Any, ...]", kwargs: "Dict[str, Any]", replicas: int) -> None:
        self.structure = (args, kwargs)
        leaves = tf.nest.flatten(self.structure)
        masks = [getattr(value, "_keras_mask", None) for value in leaves]
        self.tree = self.structure, masks
        self.leaves = leaves + masks
        self.batch = next(filter(has_rows, leaves), None)
        if self.batch is None:
            return
        self.rows = rows_of(self.batch)
        self.has_values = tf.executing_eagerly()  # which an initialization scope always is
        self.fallback = None
        if replicas == 1:
            self.is_data = [False] * len(self.leaves)
            return
        if any(isinstance(value, tf.RaggedTensor) for value in leaves):
            self.fallback = Fallback(Reason.NO_RULE)
            return
        self.constant_batch = _is_constant(self.batch)
        self.is_data = []
        for argument in list(args) + [kwargs[name] for name in sorted(kwargs)]:
            is_input = not any(self.is_data)  # the first one with rows
            self.is_data += [self._is_data(leaf, is_input) for leaf in tf.nest.flatten(argument)]
        self.is_data *= 2  # and their masks'

    def _is_data(self, value, is_input):
        if value is self.batch:
            return True
        is_constant = _is_constant(value) and not self.constant_batch
        if is_constant or not has_rows(value) or isinstance(value, tf.Variable):
            return False
        rows, of_batch = rows_of(value), rows_of(self.batch)
        if isinstance(rows, int) and isinstance(of_batch, int):
            if is_input and rows != of_batch:
                self.fallback = Fallback(Reason.CROSS_BATCH)
            return rows == of_batch
        if isinstance(rows, int) and not is_input:
            return False
        message = _DIFFERENT_INPUTS if is_input else _DIFFERENT_ARGUMENTS
        check = tf.debugging.assert_equal(rows, self.rows, message=message)
        # None if TensorFlow has proved it.
        with tf.control_dependencies([] if check is None else [check]):
            self.rows = tf.identity(self.rows)
        return True

    def shard(self, bounds: "Tuple[Any, Any]") -> "Any":
        """Return the tree of the replica that has the rows between two bounds."""
        leaves = [
            rows_between(value, *bounds) if is_data and value is not None else value
            for value, is_data in zip(self.leaves, self.is_data)
        ]
        return tf.nest.pack_sequence_as(self.tree, leaves)

    def _tensors(self):
        """Return pairs of a tensor and whether it is data: of the arguments, then of the masks."""
        return [pair for pair in zip(self.leaves, self.is_data) if tf.is_tensor(pair[0])]

    def placements(self) -> "List[Placement]":
        """Return the placement of each tensor of the tree."""
        placements: "List[Placement]" = []
        uneven = Sharded(0, inner=None, even=False)
        for value, is_data in self._tensors():
            if not is_data:
                placements += [REPLICATED] * len(tensors_of(value))
            elif isinstance(value, tf.SparseTensor):
                placements += [Unknown(), uneven, Count([0])]
            else:
                placements.append(Sharded(0))
        return placements

    def specs(self) -> "List[tf.TensorSpec]":
        """Return the shapes and types of each tensor of the tree, for any number of rows."""
        return [
            tf.TensorSpec(_any_rows(tensor, placement), tensor.dtype)
            for tensor, placement in zip(tensors_of(self.tree), self.placements())
        ]

    def without_number(self, tree: "Any") -> "Any":
        """Return the tree of a replica in a graph, which does not know how many rows it has."""
        tensors = [
            tf.compat.v1.placeholder_with_default(tensor, _any_rows(tensor, placement))
            for tensor, placement in zip(tensors_of(tree), self.placements())
        ]
        return with_tensors(tree, tensors)

    def kind(self) -> "Hashable":
        """Return the key of all calls for which the trace of this one holds."""
        # The structure, for the names of arguments.
        structure = repr(tf.nest.map_structure(lambda leaf: 0, self.structure))
        values = tuple(_PlainValue(leaf) for leaf in self.leaves if not tf.is_tensor(leaf))
        places = tuple(place for place, leaf in enumerate(self.leaves) if tf.is_tensor(leaf))
        types = [(tensor.dtype.name, str(tensor.shape[1:])) for tensor in tensors_of(self.leaves)]
        return structure, places, tuple(types), repr(self.placements()), values

    def three_rows(self) -> "List[Optional[SampleValues]]":
        """Return the ``SampleValues`` of three rows, for each tensor of the tree.

        None for a tensor that has neither a value yet nor rows.
        """
        real = self.has_values and int(self.rows) >= 3
        samples: "List[Optional[SampleValues]]" = []
        for value, is_data in self._tensors():
            if not is_data:
                parts = tensors_of(value)
                samples += [
                    SampleValues(part) if hasattr(part, "numpy") else None for part in parts
                ]
            else:
                three = rows_between(value, 0, 3) if real else _made_up(value)
                parts = [_some_rows(three, rows) for rows in trial.PARTS + trial.OTHER_PARTS]
                lanes = zip(*map(tensors_of, [three] + parts))
                samples += [SampleValues(whole, parts) for whole, *parts in lanes]
        return samples


def _any_rows(tensor, placement):
    """Return the shape of a tensor, without the number of rows."""
    is_same = isinstance(placement, (Replicated, Count))
    return tensor.shape if is_same else tf.TensorShape([None] + tensor.shape.as_list()[1:])


class _PlainValue:
    """An argument that is not a tensor, as a part of a key.

    Numbers, texts and numpy's arrays are equal by value; any other object equals only itself, as
    long as it lives and looks the same.
    """

    def __init__(self, value):
        self.reference = None
        if type(value) is np.ndarray and not value.dtype.hasobject:
            contents = hashlib.sha256(np.ascontiguousarray(value)).digest()
            self.key = "array", str(value.dtype), value.shape, contents
        elif isinstance(value, (numbers.Number, np.generic, str, bytes, type(None))):
            self.key = type(value), repr(value)  # a NaN equals itself, and 0.0 is not -0.0
        else:
            self.key = id(value), repr(value)  # another object may get the id of a dead one
            self.reference = _reference_to(value)

    def __eq__(self, other):
        if self.key != other.key:
            return False
        return self.reference is None or self.reference() is other.reference() is not None

    def __hash__(self):
        return hash(self.key)


def _reference_to(value):
    try:
        return weakref.ref(value)
    except TypeError:  # there is none to objects of its type
        return lambda: value


_DIFFERENT_INPUTS = (
    "parallelize() splits each batch along its first dimension, and this model's inputs have "
    "different sizes there. Give inputs with one row for each sample, pass what all samples share "
    "as another argument of the call or as the model's own attribute, or run this model on one "
    "device, with parallelize(model, gpus=1)."
)

_DIFFERENT_ARGUMENTS = (
    "parallelize() splits each batch along its first dimension, and another argument of this "
    "model's call has a different size there than the first, which TensorFlow did not know when it "
    "traced the call. Make it the model's own attribute, have tf.function's input_signature say "
    "how many rows it has, or run this model on one device, with parallelize(model, gpus=1)."
)


def _is_constant(value):
    from tensorflow.python.framework import tensor_util

    if tf.executing_eagerly() or isinstance(value, tf.SparseTensor) or not tf.is_tensor(value):
        return False
    return hasattr(value, "numpy") or tensor_util.constant_value(value) is not None


def _made_up(tensor):
    """Return three random rows of a tensor's shape and type, whose batch has no values yet."""
    sizes, dtype = [16 if size is None else size for size in tensor.shape.as_list()], tensor.dtype
    values = np.random.RandomState(0).normal(size=[3] + sizes[1:])
    if dtype == tf.string and not isinstance(tensor, tf.SparseTensor):  # those raise below
        return tf.strings.as_string(values)
    values = tf.cast(values if dtype.is_floating or dtype.is_complex else values > 0, dtype)
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.from_dense(tf.where(values > 0, values, tf.zeros_like(values)))
    return values


def _some_rows(value, rows):
    """Return rows of a tensor, be it dense, ragged or sparse, in this order."""
    parts = [rows_between(value, row, row + 1) for row in rows]
    is_sparse = isinstance(value, tf.SparseTensor)
    return tf.sparse.concat(0, parts) if is_sparse else tf.concat(parts, 0)


def rows_between(value: "Any", start: "Any", stop: "Any") -> "Any":
    """Return some rows of a tensor, be it dense, ragged or sparse."""
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    shape = tf.unstack(value.dense_shape, num=value.shape.rank)
    sizes = [tf.cast(stop - start, tf.int64)] + shape[1:]
    starts = [tf.cast(start, tf.int64)] + [0] * (len(shape) - 1)
    return tf.sparse.slice(value, tf.stack(starts), tf.stack(sizes))
