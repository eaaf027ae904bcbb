"""In the place of a framework: dense layers trained by SGD, devices, and a record of what ran."""

import concurrent.futures
import contextlib
import functools
import threading

import numpy as np

floatx = "float64"
# Of each matrix product: the device, "forward" or "backward", and the rows of its left side.
_records = []  # type: list
_running = threading.local()


class Network:
    """Dense layers with tanh between them; its loss is the mean squared error of a row.

    Arguments:
        sizes: of the inputs, of each layer.
        seed: of the initial weights.
    """

    def __init__(self, *sizes, seed=0):
        random = np.random.RandomState(seed)
        self.weights = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            self.weights.append(random.normal(size=(inputs, outputs)).astype(floatx) * 0.3)
            self.weights.append(np.zeros(outputs, floatx))
        self.velocities = [np.zeros_like(weight) for weight in self.weights]

    def train_on_batch(self, inputs, targets, rate=0.05, momentum=0.9):
        """One step of SGD with momentum. Returns the loss."""
        loss, gradients = self.gradients(inputs, targets)
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients):
            velocity *= momentum
            velocity -= rate * gradient
            weight += velocity
        return loss

    def predict(self, inputs):
        return self.outputs(inputs)

    def outputs(self, inputs):
        return self._activations(inputs)[-1]

    def gradients(self, inputs, targets):
        """Return the loss, and its gradient for each weight."""
        activations = self._activations(inputs)
        errors = activations[-1] - targets
        upstream = 2 * errors / len(inputs)
        gradients = []
        for place in range(len(self.weights) - 2, -1, -2):
            activation = activations[place // 2]
            gradients += [upstream.sum(axis=0), _product(activation.T, upstream, "backward")]
            if place:
                upstream = _product(upstream, self.weights[place].T, "backward")
                upstream = upstream * (1 - activation**2)
        return float((errors**2).sum() / len(inputs)), gradients[::-1]

    def _activations(self, inputs):
        """Return the inputs, and the outputs of each layer."""
        activations = [np.asarray(inputs, floatx)]
        for place in range(0, len(self.weights), 2):
            kernel, bias = self.weights[place : place + 2]
            sums = _product(activations[-1], kernel, "forward") + bias
            activations.append(np.tanh(sums) if place + 2 < len(self.weights) else sums)
        return activations


def _product(left, right, phase):
    device = getattr(_running, "device", "cpu:0")
    for record in _records:
        record.append((device, phase, len(left)))
    return left @ right


@contextlib.contextmanager
def recorded():
    """Within, a list gets what is told of each product, on whichever device."""
    record = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


class Device:
    """A thread of its own, in which all runs that runs on the device."""

    def __init__(self, name):
        self.name = name
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def start(self, function, *arguments):
        """Begin to call a function there. Returns what waits for its ``result()``."""
        return self._thread.submit(self._run, function, arguments)

    def _run(self, function, arguments):
        _running.device = self.name
        return function(*arguments)


@functools.lru_cache(maxsize=None)
def device(name):
    """Return the device with a name."""
    return Device(name)
