"""Bytes over the busiest device's link: what ``bytes_*.py``, one for each backend, have in common.

Each of those scripts counts, from what its framework executed, what the devices of a model send to
one another in steps of each kind. Its ``BUILDS`` are the models: label -> a function that returns a
``Work`` on so many devices.
"""

import argparse
import collections
import json
import sys

import numpy as np
import works
from interleaved import MARK

import compat

DEVICES = sorted({works.size(number) for number in (2, 4, 8, 16)})
UNITS = works.size(256)  # of each of three layers of ``keras_model``
#: "first": the first batch after a training step; "later": the one after that.
STEPS = ("train", "predict, first", "predict, later", "evaluate, first", "evaluate, later")


class Links:
    """Bytes between devices.

    Attributes:
        sent, received: bytes, by the name of the device.
    """

    def __init__(self):
        self.sent, self.received = collections.Counter(), collections.Counter()

    def add(self, source, target, size):
        """Count a tensor of so many bytes, unless it stays on its device."""
        if source != target:
            self.sent[source] += size
            self.received[target] += size

    def busiest(self):
        """Return the largest number of bytes that a device sends, and that one receives."""
        sums = {"sent": self.sent, "received": self.received}
        return {name: int(max(counts.values() or [0])) for name, counts in sums.items()}


class Work:
    """A model on several devices.

    Arguments:
        weights: the bytes of its weights.
        steps: "train", "predict" and "evaluate" -> a function that does a step.
    """

    def __init__(self, weights, steps):
        self.weights, self.steps = int(weights), steps

    def run(self, name):
        """Do a step."""
        self.steps[name]()

    def measured(self, name):
        """Return a step's "sent" and "received" (see ``Links.busiest``) and its "operations"."""
        raise NotImplementedError

    def calls(self, name):
        """Return the number of Python functions that a step calls."""
        return python_calls(self.steps[name])


def keras_model(keras, devices):
    """Return the bytes of a model's weights on so many devices, and its steps by name.

    Its activations are small beside its weights.
    """
    keras.backend.clear_session()
    layers = keras.layers
    inputs = layers.Input(shape=(UNITS,))
    hidden = layers.Dense(UNITS, activation="relu")(inputs)
    hidden = layers.Dense(UNITS, activation="relu")(hidden)
    model = keras.models.Model(inputs, layers.Dense(UNITS)(hidden))
    compat.parallelize(model, gpus=devices)
    model.compile("sgd", "mse")
    batch = np.ones((devices, UNITS), "float32")
    steps = {
        "train": lambda: model.train_on_batch(batch, batch),
        "predict": lambda: model.predict_on_batch(batch),
        "evaluate": lambda: model.test_on_batch(batch, batch),
    }
    return 4 * model.count_params(), steps


def python_calls(step):
    """Return the number of Python functions that are called in ``step()``."""
    calls = []
    sys.setprofile(lambda frame, event, argument: event == "call" and calls.append(1))
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(calls)


def counted(work):
    """Return "weights" -> their bytes, and for each of ``STEPS`` what was counted.

    That is "sent", "received", "calls" of Python functions and, where it is known, "operations".
    """
    for _ in range(2):  # traces, and trials of the replicas
        for name in work.steps:
            work.run(name)
    counts = {"weights": work.weights}
    for kind in STEPS:
        name, _, batch = kind.partition(", ")
        counts[kind] = {}
        for measure in (work.measured, lambda name: {"calls": work.calls(name)}):
            if batch == "first":
                work.run("train")  # which changes the weights
            elif batch == "later":
                work.run(name)
            counts[kind].update(measure(name))
    return counts


def main(description, builds, prepare=lambda devices: None):
    """Count, print a table, and a line for ``benchmarks/run.py``: label -> devices -> counts.

    Arguments:
        description: the docstring of the script.
        builds: its ``BUILDS``.
        prepare: called with the largest number of devices.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    for option in ("--rounds", "--steps"):
        parser.add_argument(option, help="accepted, as by all scripts of benchmarks/run.py")
    devices = parser.parse_args().devices
    prepare(max(devices))
    results = {label: {} for label in builds}
    line = "{:30} {:>7}  {:15} {:>7} {:>8} {:>10} {:>7}"
    print("in times the weights:")
    print(line.format("", "devices", "step", "sent", "received", "operations", "calls"))
    for label, build in builds.items():
        for number in devices:
            counts = results[label][number] = counted(build(number))
            for kind in STEPS:
                step = counts[kind]
                times = ["{:.3f}".format(step[k] / counts["weights"]) for k in ("sent", "received")]
                rest = step.get("operations", ""), step["calls"]
                print(line.format(label, number, kind, *times, *rest), flush=True)
    print(MARK + json.dumps(results, sort_keys=True))
