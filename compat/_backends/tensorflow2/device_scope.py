"""Placement of parts of a Keras model on devices: ``compat.device()``.

A functional model's graph is not TensorFlow's: Keras calls each layer again whenever the model
runs, and device scopes at building time are lost. So each node of Keras' graph that is made in
the scope records its device. When Keras collects the arguments of such a node, the node announces
its layer's next call, and the device; the layer's ``call`` then runs there as a single replica,
with its gradient.
"""

import contextlib
import functools
import sys
import threading
from typing import Any, Iterator, List, Optional, Tuple

import tensorflow as tf

from ..._runtime import patching
from .refusals import refuse_loops
from .replicas import ReplicatedCall

# The modules of the class of nodes, of each Keras.
_NODES = (
    "keras.src.ops.node",
    "keras.src.engine.node",
    "keras.engine.node",
    "tf_keras.src.engine.node",
    "tensorflow.python.keras.engine.node",
)


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        devices: those of the enclosing contexts, the innermost last.
        announced: the layer whose call comes next, and its device; None where none is announced.
    """

    def __init__(self):
        self.devices: "List[str]" = []
        self.announced: "Optional[Tuple[Any, str]]" = None


_thread = _Thread()


def _constructors():
    """Return the constructors of nodes, as ``SharedPatches`` takes them."""
    modules = filter(None, map(sys.modules.get, _NODES))
    nodes = [module.Node for module in modules if hasattr(module, "Node")]
    return [(node, "__init__", _placing) for node in nodes]


_node_patches = patching.SharedPatches(_constructors)


@contextlib.contextmanager
def placed_on(device: str) -> "Iterator[None]":
    """Place this thread's operations, and the layers that it calls, on a device."""
    _thread.devices.append(device)
    try:
        with _node_patches, tf.device(device):
            yield
    finally:
        _thread.devices.pop()


def _placing(make):
    """Return the constructor of a node, which places it on the innermost context's device."""

    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        # TensorFlow 2.0's nodes have no `is_input`.
        is_input = self.is_input if hasattr(self, "is_input") else not self.inbound_layers
        if _thread.devices and not is_input:
            _place(self, _thread.devices[-1])

    return __init__


def _place(node, device):
    # In Keras 3, in tf.keras, in TensorFlow 2.0's.
    names = ("operation", "layer", "outbound_layer")
    layer = next(getattr(node, name) for name in names if hasattr(node, name))
    refuse_loops(tf, [layer])
    if PlacedCall.of(layer) is None:
        PlacedCall([]).install(layer)
    announce = functools.partial(setattr, _thread, "announced", (layer, device))
    # tf.keras calls the node, Keras 3 its arguments; in TensorFlow 2.0 Keras copies them.
    if hasattr(node, "map_arguments"):
        _announced_by(node, "map_arguments", announce)
    elif hasattr(node.arguments, "fill_in"):
        _announced_by(node.arguments, "fill_in", announce)
    else:
        node.arguments = AnnouncingArguments(node.arguments or {})
        node.arguments.announce = announce
    node._compat_device = device


def _announced_by(owner, name, announce):
    method = getattr(owner, name)

    def announcing(*args, **kwargs):
        announce()
        return method(*args, **kwargs)

    patching.attach(owner, name, announcing)


class AnnouncingArguments(dict):
    """A node's keyword arguments in TensorFlow 2.0, which Keras copies to call the layer."""

    def __bool__(self):
        return True  # or Keras would not copy them

    def __copy__(self):
        self.announce()
        return dict(self)


def placed_parts(model: "Any") -> "List[str]":
    """Return the devices on which ``device()`` has placed parts of a model."""
    depths = getattr(model, "_nodes_by_depth", None) or {}
    nodes = [node for nodes in depths.values() for node in nodes]
    return sorted({n._compat_device for n in nodes if hasattr(n, "_compat_device")})


class PlacedCall(ReplicatedCall):
    """A layer's ``call``: one replica, on the device of the node that Keras is running."""

    def invoke(self, layer, *args, **kwargs):
        announced, device = _thread.announced or (None, None)
        if announced is not layer:
            return self._unreplicated(layer, *args, **kwargs)
        _thread.announced = None
        placed = PlacedCall([device])
        placed.hidden = self.hidden
        return ReplicatedCall.invoke(placed, layer, *args, **kwargs)
