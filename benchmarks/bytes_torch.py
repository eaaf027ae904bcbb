"""Bytes over the busiest device's link on torch.

    python benchmarks/bytes_torch.py

Counted are the copies between devices that torch's dispatcher reports, forward and backward. The
devices hold their tensors apart, as GPUs do (tests/backends/separate_devices.py), so that nothing
gets from one to another but by such a copy. Operations, and calls of Python, are those of a step on
simulated devices.
"""

import contextlib
import functools
import importlib.util
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("COMPAT_VERIFY", "0")

import numpy as np
import torch
import traffic
import works
from torch.utils import _python_dispatch, _pytree

from compat._backends.torch import keras_replicas, native

ROWS, UNITS = 2, works.size(512)  # rows of each device: activations are small beside the weights
SEPARATE = "tests/backends/separate_devices.py"


class Traffic(_python_dispatch.TorchDispatchMode):
    """Counts bytes between devices, and operations."""

    def __init__(self):
        super().__init__()
        self.links, self.operations = traffic.Links(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in _pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and isinstance(result, torch.Tensor):
                if "cpu" not in (tensor.device.type, result.device.type):
                    size = tensor.numel() * tensor.element_size()
                    self.links.add(str(tensor.device), str(result.device), size)
        return result


def separate_devices(count):
    """Return the names of devices that hold their tensors apart."""
    if "separate_devices" not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), SEPARATE)
        spec = importlib.util.spec_from_file_location("separate_devices", path)
        sys.modules["separate_devices"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["separate_devices"])
    return ["lazy:{}".format(index) for index in range(count)]


class Module:
    """A torch module on several devices."""

    def __init__(self, devices):
        nn, home = torch.nn, devices[0].replace("cpu:0", "cpu")
        layers = nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, 1)
        self.model = nn.Sequential(*layers).to(home)
        self.inputs = torch.randn(ROWS * len(devices), UNITS).to(home)
        self.weights = sum(4 * weight.numel() for weight in self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        native.ReplicatedForward.install_on(self.model, devices)

    def step(self, name):
        self.model.train(name == "train")
        with torch.set_grad_enabled(name == "train"):
            loss = (self.model(self.inputs) ** 2).mean()
        if name == "train":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class Keras:
    """A model of Keras on several devices."""

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

    def step(self, name):
        targets = self.inputs[:, :1]
        with self.device():
            if name == "train":
                self.model.train_on_batch(self.inputs, targets)
            elif name == "evaluate":
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


class Work(traffic.Work):
    """A model on devices that hold their tensors apart, and the same one on simulated devices.

    Arguments:
        kind: ``Module`` or ``Keras``.
        devices: their number.
    """

    def __init__(self, kind, devices):
        self.separate = kind(separate_devices(devices))
        self.simulated = kind(["cpu:{}".format(index) for index in range(devices)])
        super().__init__(
            self.separate.weights,
            {
                name: functools.partial(self.simulated.step, name)
                for name in ("train", "predict", "evaluate")
            },
        )

    def run(self, name):
        super().run(name)
        self.separate.step(name)

    def measured(self, name):
        with Traffic() as separate:
            self.separate.step(name)
        with Traffic() as simulated:
            self.simulated.step(name)
        return dict(separate.links.busiest(), operations=simulated.operations)


BUILDS = {
    "torch, Module": functools.partial(Work, Module),
    "torch, Keras 3": functools.partial(Work, Keras),
}

if __name__ == "__main__":
    traffic.main(__doc__, BUILDS)
