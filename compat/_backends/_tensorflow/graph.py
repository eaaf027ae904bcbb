"""Queries on a graph of TensorFlow's, of either version, and on its operations."""

import sys

from ... import errors


def v1_names(tensorflow=None):
    """TensorFlow under its 1.x names, which late versions of it call deprecated elsewhere."""
    tensorflow = tensorflow or sys.modules["tensorflow"]
    return getattr(tensorflow.compat, "v1", tensorflow)


def attribute(op, name, default=None):
    """Return an attribute of an operation, which need not have it."""
    # Before 1.8 asking for one that is not there adds it to a dictionary.
    return op.get_attr(name) if name in op.node_def.attr else default


def line_of(op):
    """Where the user's code made an operation, as "file.py, line 12", or None."""
    frames = [(frame[0], frame[1]) for frame in op.traceback or ()]
    # What autograph makes of the user's functions is in files of its own.
    return errors.innermost_line([f for f in frames if "__autograph_generated_file" not in f[0]])


def constant(tensor):
    """Return the value of a tensor that is known before any run, as an array, or None."""
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.op.type == "Sub":  # the order of tf.transpose(x)
        first, second = map(constant, tensor.op.inputs)
        return None if first is None or second is None else first - second
    return value


def known_numbers(tensor):
    """Return the numbers in a tensor that are known before any run, as a list, or None."""
    value = constant(tensor)
    return None if value is None else value.ravel().tolist()


def sizes_of(tensor):
    return None if tensor.shape.ndims is None else tensor.shape.as_list()
