"""Bytes that cross devices in one step, against what a ring all-reduce moves.

    python benchmarks/bytes_across_devices.py    # TensorFlow 1

Counted from what TensorFlow executed: the tensors that one device sent to another. All ranks
of a ring together move 2 (N - 1) W bytes to sum up gradients of W bytes over N devices. The sum on
one device, with the weights sent out from there, moves as many.
"""

import argparse
import importlib
import json

import numpy as np
import tensorflow as tf
import works
from interleaved import MARK

import compat

DEVICES = sorted({works.size(number) for number in (2, 4, 8, 16)})
ROWS = 64  # of each device: the activations that cross are few beside the weights


def sent(metadata):
    """Return the bytes of the tensors that devices sent to others."""
    sizes = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                tensor = output.tensor_description
                elements = int(np.prod([dim.size for dim in tensor.shape.dim] or [1]))
                size = elements * tf.as_dtype(tensor.dtype).size
                sizes[device.device, node.node_name, output.slot] = size
    found = 0
    for graph in metadata.partition_graphs:
        for node in graph.node:
            here, there = [node.attr[key].s.decode() for key in ("send_device", "recv_device")]
            if node.op == "_Send" and here != there:
                name, _, slot = node.input[0].partition(":")
                # What was folded into a constant, or has no kernel, is a scalar here.
                found += sizes.get((here, name, int(slot or 0)), 0)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    parser.parse_args()
    compat.configure_gpu(simulate=max(DEVICES))
    keras = importlib.import_module("tensorflow.keras")
    found = {}
    for devices in DEVICES:
        keras.backend.clear_session()
        model = compat.parallelize(works.build(keras, "dense"), gpus=devices)
        options = tf.compat.v1.RunOptions(
            trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        metadata = tf.compat.v1.RunMetadata()
        model.compile("sgd", "mse", options=options, run_metadata=metadata)
        inputs, targets = works.data("dense", ROWS * devices)
        model.train_on_batch(inputs, targets)
        model.train_on_batch(inputs, targets)  # the first one makes variables
        weights = 4 * model.count_params()
        found[devices] = {
            "bytes": sent(metadata),
            "weights": weights,
            "ring": 2 * (devices - 1) * weights,
        }
        print(
            "{:2} devices: {:.2f} times the weights cross devices in a step, a ring {}".format(
                devices, found[devices]["bytes"] / weights, 2 * (devices - 1)
            )
        )
    print(MARK + json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    main()
