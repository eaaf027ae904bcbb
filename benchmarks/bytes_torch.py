"""Bytes over the link of the busiest device, and the operations of a step, on torch.

    python benchmarks/bytes_torch.py

Counted are the copies between devices that torch's dispatcher reports, forward and backward. The
devices hold their tensors apart, as GPUs do (tests/backends/separate_devices.py), so that nothing
gets from one to another but by such a copy. Operations, and calls of Python, are those of a
training step on simulated devices.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("COMPAT_VERIFY", "0")

import numpy as np
import torch
import works
from interleaved import MARK
from torch.utils import _python_dispatch, _pytree

from compat._backends.torch import keras_replicas, native

DEVICES = sorted({works.size(number) for number in (2, 4, 8, 16)})
ROWS, UNITS = 2, works.size(512)  # rows of each device: activations are small beside the weights
KINDS = ("train", "evaluate", "evaluate later", "predict", "predict later")
SEPARATE = "tests/backends/separate_devices.py"


class Traffic(_python_dispatch.TorchDispatchMode):
    """Counts bytes by the device that sends and the device that receives them, and operations."""

    def __init__(self):
        super().__init__()
        self.bytes, self.operations = collections.Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in _pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and isinstance(result, torch.Tensor):
                if "cpu" not in (tensor.device.type, result.device.type):
                    size = tensor.numel() * tensor.element_size()
                    self.bytes[str(tensor.device), str(result.device)] += size
        return result

    def busiest(self):
        """Return the largest number of bytes that a device sends, and that one receives."""
        sums = collections.Counter(), collections.Counter()
        for pair, size in self.bytes.items():
            for counter, device in zip(sums, pair if pair[0] != pair[1] else ()):
                counter[device] += size
        return [max(counter.values(), default=0) for counter in sums]


def separate_devices(count):
    """Return the names of devices that hold their tensors apart."""
    if "separate_devices" not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), SEPARATE)
        spec = importlib.util.spec_from_file_location("separate_devices", path)
        sys.modules["separate_devices"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["separate_devices"])
    return ["lazy:{}".format(index) for index in range(count)]


class Module:
    """A torch module on several devices; its steps by their kind."""

    def __init__(self, devices):
        nn, home = torch.nn, devices[0].replace("cpu:0", "cpu")
        layers = nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, 1)
        self.model = nn.Sequential(*layers).to(home)
        self.inputs = torch.randn(ROWS * len(devices), UNITS).to(home)
        self.weights = sum(4 * weight.numel() for weight in self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        native.ReplicatedForward.install_on(self.model, devices)

    def step(self, kind):
        self.model.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"):
            loss = (self.model(self.inputs) ** 2).mean()
        if kind == "train":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class Keras:
    """A model of Keras on several devices; its steps by their kind."""

    def __init__(self, devices):
        import keras

        self.home, layers = devices[0].replace("cpu:0", "cpu"), keras.layers
        dense = [layers.Dense(UNITS, activation="relu"), layers.Dense(UNITS), layers.Dense(1)]
        self.model = keras.Sequential([layers.Input((UNITS,)), *dense])
        for variable in self.model.variables:
            moved = torch.nn.Parameter(variable.value.detach().to(self.home))
            variable._value = moved.requires_grad_(variable.value.requires_grad)
        self.weights = 4 * self.model.count_params()
        self.inputs = np.random.randn(ROWS * len(devices), UNITS).astype("float32")
        self.model.compile(keras.optimizers.SGD(0.01), "mse")
        keras_replicas.ReplicatedKerasCall(devices).install(self.model)

    def step(self, kind):
        targets = self.inputs[:, :1]
        with self.device():
            if kind == "train":
                self.model.train_on_batch(self.inputs, targets)
            elif kind.startswith("evaluate"):
                self.model.test_on_batch(self.inputs, targets)
            else:
                self.model.predict_on_batch(self.inputs)

    @contextlib.contextmanager
    def device(self):
        """Have Keras compute on the first device."""
        from keras.src.backend.torch import core

        before, core.DEFAULT_DEVICE = core.DEFAULT_DEVICE, self.home
        try:
            yield
        finally:
            core.DEFAULT_DEVICE = before


def counted(kind, count):
    """Return what the busiest device sends and receives in a step, in bytes, by kind of step.

    Arguments:
        kind: ``Module`` or ``Keras``.
        count: how many devices compute.

    Returns:
        step -> [bytes sent, bytes received], "weights" -> their bytes, "operations" and "calls" ->
        those of a training step on simulated devices.
    """
    model = kind(separate_devices(count))
    found = {"weights": model.weights}
    model.step("train")  # the first one is traced, which sends nothing more
    for step in KINDS:
        if step == "predict":
            model.step("train")  # which changes the weights
        with Traffic() as traffic:
            model.step(step)
        found[step] = traffic.busiest()
    simulated, calls = kind(["cpu:{}".format(index) for index in range(count)]), [0]
    for _ in range(2):
        simulated.step("train")
    with Traffic() as traffic:
        simulated.step("train")

    def count_call(frame, event, argument):
        calls[0] += event == "call"

    sys.setprofile(count_call)
    simulated.step("train")
    sys.setprofile(None)
    return dict(found, operations=traffic.operations, calls=calls[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    parser.parse_args()
    found = {}
    for kind in (Module, Keras):
        print("\n| {} | {} | operations | calls |".format(kind.__name__, " | ".join(KINDS)))
        print("| --- " * (len(KINDS) + 3) + "|")
        for count in DEVICES:
            row = counted(kind, count)
            found.setdefault(kind.__name__, {})[count] = row
            cells = [[size / row["weights"] for size in row[step]] for step in KINDS]
            texts = ["{:.2f} W, {:.2f} W".format(*cell) for cell in cells]
            print(
                "| {} |".format(
                    " | ".join(map(str, [count, *texts, row["operations"], row["calls"]]))
                )
            )
    print(MARK + json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    main()
