"""Bytes that each device sends and receives on TensorFlow 2, beside those of the weights.

    python benchmarks/bytes_tensorflow2.py

Counted from what functions executed: the edges between partitions of their graphs, and the shapes
of the tensors that kernels got from there, which TensorFlow's profiler records. A branch that was
not taken has no kernels. The batches are small, so that few of the bytes are activations.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
from interleaved import MARK

import compat
from compat._backends.tensorflow2 import profiler
from compat._backends.tensorflow2.run_metadata import functions_of, recorded

DEVICES = (2, 4, 8, 16)
UNITS = 256  # of each of three layers
STEPS = ("train", "predict, first", "predict, later", "evaluate, first", "evaluate, later")


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
    """Return the bytes that each device sent, and those it received.

    Arguments:
        partitions: those of the graphs of the functions.
        executed: the result of ``kernels``.
    """
    sent, received = collections.Counter(), collections.Counter()
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
            if here != there:
                sent[here] += size
                received[there] += size
    return sent, received


class Step:
    """A step, and the partitions of the functions that it executes, which are recorded once.

    Arguments:
        step: a function, which traces and executes TensorFlow's functions when it is first called.
    """

    def __init__(self, step):
        self.step, self.partitions = step, []

    def measured(self):
        """Return the bytes of the busiest device in a step, and the number of kernels."""
        with recorded() as records:
            executed = kernels(self.step)
        self.partitions += [graph for graphs in functions_of(records) for graph in graphs]
        sent, received = links(self.partitions, executed)
        busiest = [max(count.values() or [0]) for count in (sent, received)]
        return {"sent": busiest[0], "received": busiest[1], "operations": len(executed)}

    def python_calls(self):
        """Return the number of Python functions that are called in a step."""
        calls = []
        sys.setprofile(lambda frame, event, argument: event == "call" and calls.append(1))
        try:
            self.step()
        finally:
            sys.setprofile(None)
        return len(calls)


def build(keras):
    """Return a model whose activations are small beside its weights."""
    layers = keras.layers
    inputs = layers.Input(shape=(UNITS,))
    hidden = layers.Dense(UNITS, activation="relu")(inputs)
    hidden = layers.Dense(UNITS, activation="relu")(hidden)
    return keras.models.Model(inputs, layers.Dense(UNITS)(hidden))


def traffic(keras, devices):
    """Return the bytes of the weights, and what each kind of step on so many devices sends."""
    keras.backend.clear_session()
    model = compat.parallelize(build(keras), gpus=devices)
    model.compile("sgd", "mse")
    inputs = np.ones((devices, UNITS), "float32")
    steps = {
        "train": Step(lambda: model.train_on_batch(inputs, inputs)),
        "predict": Step(lambda: model.predict_on_batch(inputs)),
        "evaluate": Step(lambda: model.test_on_batch(inputs, inputs)),
    }
    for step in steps.values():  # traces
        step.measured()
    found = {"weights": 4 * int(model.count_params())}
    for kind in STEPS:
        name, _, batch = kind.partition(", ")
        if batch == "first":
            steps["train"].step()
        found[kind] = steps[name].measured()
        found[kind]["calls"] = steps[name].python_calls()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    arguments = parser.parse_args()
    compat.configure_gpu(simulate=max(arguments.devices))
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    found = {number: traffic(keras, number) for number in arguments.devices}
    print("devices  step             sent, received (times the weights)  operations  Python calls")
    for number, steps in found.items():
        for kind in STEPS:
            step = steps[kind]
            sent, received = [step[key] / steps["weights"] for key in ("sent", "received")]
            row = number, kind, sent, received, step["operations"], step["calls"]
            print("{:7}  {:15}  {:8.3f} {:8.3f} {:28} {:13}".format(*row))
    print(MARK + json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    main()
