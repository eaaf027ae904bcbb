"""Bytes that each device sends and receives on TensorFlow 1, beside those of the weights.

    python benchmarks/bytes_tensorflow1.py

Counted from what sessions executed: the tensors that one device sent to another. The batches are
small, so that few of them are activations.
"""

import argparse
import collections
import importlib
import json
import os
import sys

import numpy as np
import tensorflow as tf
from interleaved import MARK

import compat
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1.profiler import recorded

v1 = v1_names(tf)
DEVICES = (2, 4, 8, 16)
UNITS = 256  # of each of three layers
STEPS = ("train", "predict, first", "predict, later", "evaluate, first", "evaluate, later")


def links(metadata):
    """Return the bytes that each device sent in a run of a session, and those it received."""
    sizes = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                tensor = output.tensor_description
                elements = np.prod([dim.size for dim in tensor.shape.dim], dtype=int)
                size = int(elements) * tf.as_dtype(tensor.dtype).size
                sizes[device.device, node.node_name, output.slot] = size
    sent, received = collections.Counter(), collections.Counter()
    for graph in metadata.partition_graphs:
        for node in graph.node:
            here, there = [node.attr[key].s.decode() for key in ("send_device", "recv_device")]
            if node.op == "_Send" and here != there:
                name, _, slot = node.input[0].partition(":")
                # What was not computed has no size, nor has what was folded into a constant.
                size = sizes.get((here, name, int(slot or 0)), 0)
                sent[here] += size
                received[there] += size
    return sent, received


def measured(step):
    """Return the busiest device's bytes in a step, sent and received, and the step's operations."""
    with recorded(v1, output_partition_graphs=True) as runs:
        step()
    counts = [links(run) for run in runs]
    sums = [sum((count[i] for count in counts), collections.Counter()) for i in (0, 1)]
    busiest = [max(count.values(), default=0) for count in sums]
    devices = [device for run in runs for device in run.step_stats.dev_stats]
    nodes = [node for device in devices for node in device.node_stats]
    return {"sent": busiest[0], "received": busiest[1], "operations": len(nodes)}


def python_calls(step):
    """Return the number of Python functions that are called in a step."""
    calls = []
    sys.setprofile(lambda frame, event, argument: event == "call" and calls.append(1))
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(calls)


def build(keras):
    """Return a compiled model whose activations are small beside its weights."""
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
        "train": lambda: model.train_on_batch(inputs, inputs),
        "predict": lambda: model.predict_on_batch(inputs),
        "evaluate": lambda: model.test_on_batch(inputs, inputs),
    }
    for step in steps.values():  # make functions, and try the replicas
        step()
    found = {"weights": 4 * int(model.count_params())}
    for kind in STEPS:
        name, _, batch = kind.partition(", ")
        if batch == "first":
            steps["train"]()
        found[kind] = measured(steps[name])
        found[kind]["calls"] = python_calls(steps[name])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    arguments = parser.parse_args()
    compat.configure_gpu(simulate=max(arguments.devices))
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "tensorflow.keras"))
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
