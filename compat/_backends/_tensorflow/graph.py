"""Queries on a graph of TensorFlow 1 or 2, and on its operations."""

import sys
from typing import Any, List, Optional

from ... import errors


def v1_names(tensorflow: "Any" = None) -> "Any":
    """Return the module with the names of TensorFlow 1, which are deprecated elsewhere."""
    tensorflow = tensorflow or sys.modules["tensorflow"]
    return getattr(tensorflow.compat, "v1", tensorflow)


def attribute(op: "Any", name: str, default: "Any" = None) -> "Any":
    """Return an attribute of an operation, or a default."""
    # Before 1.8 reading an attribute that does not exist adds it to a dictionary.
    return op.get_attr(name) if name in op.node_def.attr else default


def line_of(op: "Any") -> "Optional[str]":
    """Return the line of the user's code that made an operation, as "file.py, line 12", or None."""
    frames = [(frame[0], frame[1]) for frame in op.traceback or ()]
    # Autograph writes the functions that it converts to other files.
    return errors.innermost_line([f for f in frames if "__autograph_generated_file" not in f[0]])


def constant(tensor: "Any") -> "Any":
    """Return the value of a constant tensor, as an array, or None."""
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.op.type == "Sub":  # the order of tf.transpose(x)
        first, second = map(constant, tensor.op.inputs)
        return None if first is None or second is None else first - second
    return value


def known_numbers(tensor: "Any") -> "Optional[List[Any]]":
    """Return the numbers in a constant tensor, as a list, or None."""
    value = constant(tensor)
    return None if value is None else value.ravel().tolist()


def sizes_of(tensor: "Any") -> "Optional[List[Optional[int]]]":
    """Return the static shape of a tensor, or None if its rank is not known."""
    return None if tensor.shape.ndims is None else tensor.shape.as_list()
