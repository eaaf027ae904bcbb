"""First steps of a network on several devices, compared with the same steps on one."""

import contextlib
import functools

from compat.backend import Step

from . import replicas
from .networks import Network, recorded

_METHODS = {"train_on_batch": "train", "predict": "predict"}


def install(network, verification):
    for method, kind in _METHODS.items():
        step = functools.partial(_verified, network, verification, method, kind)
        setattr(network, method, step)


def remove(network):
    for method in _METHODS:
        vars(network).pop(method, None)


def _verified(network, verification, method, kind, *args, **kwargs):
    plain = functools.partial(getattr(Network, method), network)
    if not verification.wants(kind):
        return plain(*args, **kwargs)
    label = {"train": "the loss", "predict": "output 1"}[kind]
    return verification.verify(kind, NetworkStep(network, plain, label, args, kwargs))


class NetworkStep(Step):
    """A call of ``train_on_batch`` or ``predict``."""

    input_attributes = ("args", "kwargs")

    def __init__(self, network, plain, label, args, kwargs):
        self.network = network
        self.plain = plain
        self.label = label
        self.args = args
        self.kwargs = kwargs
        self.dtype = str(network.weights[0].dtype)

    def call(self):
        return self.plain(*self.args, **self.kwargs)

    def _arrays(self):
        for what, arrays in (
            ("weight", self.network.weights),
            ("slot", self.network.velocities),
        ):
            for place, array in enumerate(arrays):
                yield "{} {}".format(what, place), array

    def read(self):
        return {label: array.copy() for label, array in self._arrays()}

    def write(self, values):
        for label, array in self._arrays():
            if label in values:
                array[...] = values[label]

    def on_one_device(self):
        with replicas.unsplit(self.network):
            return {self.label: self.call()}

    def on_all_devices(self):
        result = self.call()
        return result, {self.label: result}

    def operations(self):
        with recorded() as record:
            self.call()
        return products(record)

    def outputs(self, is_unsplit):
        with replicas.unsplit(self.network) if is_unsplit else contextlib.ExitStack():
            inputs = self.args[0] if self.args else self.kwargs["inputs"]
            return {"output 1": self.network.outputs(inputs)}


def products(record):
    """For each device, how many products it ran in the forward and in the backward pass."""
    counts = {}
    for device, phase, _ in record:
        forward, backward = counts.get(device, (0, 0))
        counts[device] = forward + (phase == "forward"), backward + (phase == "backward")
    return counts
