"""TensorFlow 2: the contract, and what is special to tf.keras and Keras 3 on TensorFlow."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

import compat
from compat._backends import tensorflow2
from compat.testing import CASES, DEVICES, ParallelContract, initialise, keras_under_test

# A recurrent layer of tf.keras runs as one function call on one device.
COMPUTING = ("MatMul", "_FusedMatMul", "BatchMatMulV2", "Conv2D", "_FusedConv2D", "PartitionedCall")
BACKWARD = ("gradient_tape", "gradients", "_grad", "Backprop")


def executed(step):
    """Run a step, and return the nodes of every graph partition that TensorFlow executed."""
    context.enable_run_metadata()
    try:
        step()
        record = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [
        node
        for function in record.function_graphs
        for partition in function.partition_graphs
        for node in partition.node
    ]


def short(device):
    """/job:localhost/replica:0/task:0/device:CPU:1 as compat names it."""
    return "/" + device.split("device:")[-1].lower()


KERAS3 = hasattr(keras_under_test(), "StatelessScope")


class TestTensorFlow2(ParallelContract):
    backend = "tensorflow2"
    # Keras 3 cannot train on with the optimizer of an HDF5 file, on one device neither.
    extension = ".keras" if KERAS3 else ".h5"

    def placement(self, model, inputs, targets):
        counts = collections.defaultdict(lambda: [0, 0])
        model.make_train_function(force=True)  # a graph is recorded when it is first made
        for node in executed(lambda: model.train_on_batch(inputs, targets)):
            if node.op in COMPUTING or "Backprop" in node.op:
                name = node.name + node.op
                counts[short(node.device)][any(mark in name for mark in BACKWARD)] += 1
        return {device: tuple(count) for device, count in counts.items()}

    def shard_sizes(self, model, inputs, targets):
        """Eagerly, TensorFlow shows each operation with its result, and where that lies."""
        rows = collections.OrderedDict()

        def note(op_type, inputs, attrs, outputs, op_name=None, graph=None):
            if op_type == "MatMul" and graph is None:
                rows.setdefault(short(outputs[0].device), outputs[0].shape[0])

        model.run_eagerly = True
        with op_callbacks_added(note):
            model.train_on_batch(inputs, targets)
        assert list(rows) == ["/cpu:0", "/cpu:1", "/cpu:2"]
        return rows.values()


class op_callbacks_added:
    def __init__(self, callback):
        self.callback = callback

    def __enter__(self):
        op_callbacks.add_op_callback(self.callback)

    def __exit__(self, *error):
        op_callbacks.remove_op_callback(self.callback)
