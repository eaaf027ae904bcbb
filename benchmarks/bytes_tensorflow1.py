"""Bytes over the busiest device's link on TensorFlow 1.

    python benchmarks/bytes_tensorflow1.py

Counted from what sessions executed: the tensors that one device sent to another, and the operations
of all partitions. The batches are small, so that few of the bytes are activations.
"""

import importlib
import os

import numpy as np
import tensorflow as tf
import traffic

import compat
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1.profiler import recorded

v1 = v1_names(tf)


def add_links(links, metadata):
    """Count what devices sent in a run of a session."""
    sizes = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                tensor = output.tensor_description
                elements = np.prod([dim.size for dim in tensor.shape.dim], dtype=int)
                size = int(elements) * tf.as_dtype(tensor.dtype).size
                sizes[device.device, node.node_name, output.slot] = size
    for graph in metadata.partition_graphs:
        for node in graph.node:
            here, there = [node.attr[key].s.decode() for key in ("send_device", "recv_device")]
            if node.op == "_Send" and here != there:
                name, _, slot = node.input[0].partition(":")
                # What was not computed has no size, nor has what was folded into a constant.
                links.add(here, there, sizes.get((here, name, int(slot or 0)), 0))


def measured(step):
    """Return the busiest device's bytes in a step, sent and received, and the step's operations."""
    with recorded(v1, output_partition_graphs=True) as runs:
        step()
    links = traffic.Links()
    for run in runs:
        add_links(links, run)
    devices = [device for run in runs for device in run.step_stats.dev_stats]
    return dict(links.busiest(), operations=sum(len(device.node_stats) for device in devices))


class Work(traffic.Work):
    def measured(self, name):
        return measured(self.steps[name])


def build(devices):
    """Return the work of a model of Keras."""
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "tensorflow.keras"))
    weights, steps = traffic.keras_model(keras, devices)
    return Work(weights, steps)


BUILDS = {"TensorFlow 1": build}

if __name__ == "__main__":
    traffic.main(__doc__, BUILDS, lambda devices: compat.configure_gpu(simulate=devices))
