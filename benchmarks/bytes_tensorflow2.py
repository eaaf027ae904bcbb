"""Bytes over the busiest device's link on TensorFlow 2.

    python benchmarks/bytes_tensorflow2.py

Counted from what functions executed: the edges between partitions of their graphs, and the shapes
of the tensors that kernels got from there, which TensorFlow's profiler records. A branch that was
not taken has no kernels; kernels are the operations of a step. The batches are small, so that few
of the bytes are activations.
"""

import importlib
import os
import pathlib
import tempfile
import time

import numpy as np
import tensorflow as tf
import traffic

import compat
from compat._backends.tensorflow2 import profiler
from compat._backends.tensorflow2.run_metadata import functions_of, recorded


def kernels(step):
    """Return the shapes of the inputs of each kernel that a step executes, by the node's name."""
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)  # with shapes
    with tempfile.TemporaryDirectory() as directory:
        tf.profiler.experimental.start(directory, options)
        step()
        time.sleep(0.1)  # see profiler._profile()
        tf.profiler.experimental.stop()
        paths = list(pathlib.Path(directory).rglob("*.xplane.pb"))
        planes = [plane for path in paths for plane in profiler._planes(path)]
    executed = {}
    for plane in planes:
        for line in plane.lines:
            for event in profiler._events(plane, line):
                if "shape" in event.statistics:
                    shapes = str(event.statistics["shape"]).strip("()").split(";")
                    executed[event.name.rpartition(":")[0]] = shapes
    return executed


def records_shapes():
    """Return whether TensorFlow's profiler records shapes: from 2.3, but not in 2.21."""
    if not hasattr(getattr(tf, "profiler", None), "experimental"):
        return False
    has_options = hasattr(tf.profiler.experimental, "ProfilerOptions")
    return has_options and bool(kernels(lambda: tf.function(lambda: tf.zeros(2) + 1)()))


def size_of(shape):
    """Return the bytes of a tensor from its shape in a profile: "float[2,3]"."""
    kind, _, sizes = shape.rstrip("]").partition("[")
    dtype = {"float": "float32", "double": "float64", "half": "float16"}.get(kind, kind)
    return int(np.prod([int(size) for size in sizes.split(",") if size], dtype=int)) * (
        tf.as_dtype(dtype).size or 0
    )


def links(partitions, executed):
    """Return the ``Links`` of a step.

    Arguments:
        partitions: those of the graphs of the functions.
        executed: the result of ``kernels``.
    """
    found = traffic.Links()
    for graph in partitions:
        arriving = {node.name: node for node in graph.node if node.op in ("_Recv", "_HostRecv")}
        sizes = {}
        for node in graph.node:
            shapes = executed.get(node.name, ())
            data = [name for name in node.input if not name.startswith("^")]
            for name, shape in zip(data, shapes):
                if name.partition(":")[0] in arriving:
                    sizes[name.partition(":")[0]] = size_of(shape)
        for name, size in sizes.items():
            here, there = [arriving[name].attr[k].s for k in ("send_device", "recv_device")]
            found.add(here, there, size)
    return found


class Step:
    """A step, and the partitions of the functions that it executes, which are recorded once.

    Arguments:
        step: a function, which traces and executes TensorFlow's functions when it is first called.
    """

    def __init__(self, step):
        self.step, self.partitions = step, []

    def __call__(self):
        with recorded() as records:
            self.step()
        self.partitions += [graph for graphs in functions_of(records) for graph in graphs]

    def measured(self):
        """Return the bytes of the busiest device in a step, and the number of kernels."""
        executed = kernels(self)
        return dict(links(self.partitions, executed).busiest(), operations=len(executed))


class Work(traffic.Work):
    def measured(self, name):
        return self.steps[name].measured()

    def calls(self, name):
        return traffic.python_calls(self.steps[name].step)


def build(devices):
    """Return the work of a model of Keras."""
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    weights, steps = traffic.keras_model(keras, devices)
    return Work(weights, {name: Step(step) for name, step in steps.items()})


BUILDS = {"TensorFlow 2": build}

if __name__ == "__main__":
    traffic.main(__doc__, BUILDS, lambda devices: compat.configure_gpu(simulate=devices))
