"""Copies of weights on the devices, each made from that of the device before it."""

from typing import Any, Dict, List

from .._tensorflow.graph import v1_names
from . import arguments, graph


class WeightChain:
    """Values of weights that each device receives from the one before it, and passes on.

    The gradient of such a chain of copies is a chain of sums: each device adds its gradient to the
    one that it receives from the next. So no device sends or receives more than the weights and
    their gradients once, whatever the number of devices.

    Arguments:
        devices: those of the replicas, in order.
    """

    def __init__(self, devices):
        self.devices = devices
        self._copies: "Dict[Any, List[Any]]" = {}

    def on(self, index: int, tensor: "Any") -> "Any":
        """Return the copy of a weight on the device of that index; other tensors as they are."""
        is_fed = arguments.is_fed(tensor)
        if is_fed or not tensor.dtype.is_floating or not graph.is_outermost(tensor.op):
            return tensor
        if tensor not in self._copies:
            self._copies[tensor] = self._chain(tensor)
        return self._copies[tensor][index]

    def stored(self, operation: "Any") -> "Any":
        """Return an operation that runs another one; no device keeps a copy."""
        return operation

    def _chain(self, value):
        tf, copies = v1_names(), []
        with tf.name_scope("weights"):
            for device in self.devices:
                with tf.device(device):
                    value = tf.identity(value)
                copies.append(value)
        return copies
