"""A network on several devices: each computes the gradients of its rows; the update is one."""

import collections
import contextlib
import functools
import time

import numpy as np

from compat.backend import Operation, count_batch

from .networks import Network, device, recorded

# The methods of one network that hide its class's.
_METHODS = "gradients", "outputs"

# The methods with which a step begins.
_STEPS = {"train_on_batch": "train", "predict": "predict"}


_profiles = []  # lists that are being filled


@contextlib.contextmanager
def profiled():
    operations = []
    _profiles.append(operations)
    try:
        yield operations
    finally:
        _profiles.remove(operations)


@contextlib.contextmanager
def executed():
    """Within, the products that each device computes are counted, by what ``networks`` records."""
    numbers = collections.Counter()
    with recorded() as records:
        yield numbers
    numbers.update(device for device, _, _ in records)


def watch(network, check):
    """Have steps checked where a script begins them, which is outside of what ``install`` hides."""
    for name, kind in _STEPS.items():
        vars(network).pop(name, None)
        if check is not None:
            setattr(network, name, functools.partial(_watched, network, name, check, kind))


def _watched(network, name, check, kind, *args, **kwargs):
    with check.step(kind, name=name):
        return getattr(Network, name)(network, *args, **kwargs)


def _start(name, function, *arguments):
    def run():
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            took = time.perf_counter() - began
            for operations in _profiles:
                operations.append(Operation(name, function.__name__, began * 1e6, took * 1e6))

    return device(name).start(run)


def install(network, devices):
    network.gradients = functools.partial(_gradients, network, list(devices))
    network.outputs = functools.partial(_outputs, network, list(devices))


def remove(network):
    for name in _METHODS:
        vars(network).pop(name, None)


@contextlib.contextmanager
def unsplit(network):
    """Within, the network runs on one device."""
    hidden = {name: vars(network).pop(name) for name in _METHODS if name in vars(network)}
    try:
        yield
    finally:
        vars(network).update(hidden)


def _shards(rows, devices):
    """Yield a device, and the slice of the batch that it computes, if it has rows."""
    count = min(len(devices), rows)
    for number, name in enumerate(devices[:count]):
        yield name, slice(number * rows // count, (number + 1) * rows // count)


def _outputs(network, devices, inputs):
    running = [
        _start(name, Network.outputs, network, inputs[rows])
        for name, rows in _shards(len(inputs), devices)
    ]
    outputs = np.concatenate([each.result() for each in running])
    _count(devices, len(inputs), training=False)
    return outputs


def _count(devices, rows, training):
    sizes = [part.stop - part.start for _, part in _shards(rows, devices)]
    count_batch(devices, sizes + [0] * (len(devices) - len(sizes)), training)


def _gradients(network, devices, inputs, targets):
    shards = list(_shards(len(inputs), devices))
    running = [
        _start(name, Network.gradients, network, inputs[rows], targets[rows])
        for name, rows in shards
    ]
    shares = [(rows.stop - rows.start) / len(inputs) for _, rows in shards]
    parts = [each.result() for each in running]
    loss = sum(share * part[0] for share, part in zip(shares, parts))
    gradients = [
        sum(share * gradient for share, gradient in zip(shares, same))
        for same in zip(*[part[1] for part in parts])
    ]
    _count(devices, len(inputs), training=True)
    return loss, gradients
