"""Inputs of a model in a static graph: shards of them, and checks that their rows agree."""

from typing import Any, Dict, List

from ... import errors
from .._tensorflow.graph import v1_names


def shard(tensor: "Any", first: "Any", end: "Any") -> "Any":
    """Return rows of a dense or sparse tensor, as an operation of its graph.

    Arguments:
        tensor: a tensor, or a ``SparseTensor``.
        first: the first row.
        end: the one after the last. Both are scalar tensors.
    """
    tf = v1_names()
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[first:end]
    bounds, others = tf.cast([first, end - first], tf.int64), tensor.dense_shape[1:]
    start = tf.concat([bounds[:1], tf.zeros_like(others)], axis=0)
    return tf.sparse_slice(tensor, start, tf.concat([bounds[1:], others], axis=0))


def is_fed(tensor: "Any") -> bool:
    """Return whether a tensor is a placeholder."""
    return tensor.op.type.startswith("Placeholder")


def checks_of_rows(model: str, inputs: "List[Any]") -> "List[Any]":
    """Return operations that check that inputs, if not fed, have as many rows as the others."""
    tf, fed = v1_names(), list(map(is_fed, inputs))
    if len(fed) < 2 or all(fed):
        return []
    with tf.device("/cpu:0"):
        counts = [tf.shape(tensor)[0] for tensor in inputs]
        same = tf.reduce_all(tf.equal(counts, counts[0]))
        return [tf.Assert(same, [_rows_differ(model) + " Rows:"] + counts)]


def check_fed_rows(model: str, rows: "Dict[str, int]") -> None:
    """Check that inputs that are fed have the same number of rows.

    Arguments:
        model: the model's name.
        rows: the number of rows of each input, by name.

    Raises:
        UnsupportedError: they differ.
    """
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name} has {rows[name]}" for name in sorted(rows))
        raise errors.UnsupportedError(_rows_differ(model, ": " + sizes))


def rows_of(value: "Any") -> "Any":
    """Return the number of rows of an array or, if it is known, of a tensor; else None."""
    shape = getattr(value, "shape", None)
    return getattr(shape[0], "value", shape[0]) if shape else None


def _rows_differ(model, details=""):
    return (
        f"parallelize() splits each input of model {model!r} along its first dimension, but their "
        f"sizes there differ{details}. Give each input one row for each sample, or use one device: "
        "parallelize(model, gpus=1)."
    )
