"""Parts of a Keras model on devices of their own, on TensorFlow 2.

A functional model's graph is not TensorFlow's: Keras calls each layer again whenever the model
runs, and device scopes at building time are lost. So each node of Keras' graph that is made in
the scope remembers its device. When Keras gets the arguments of such a node together, the node
tells its layer where the call to come belongs; the layer's ``call`` then runs as a single
replica there, with its gradient.
"""

import contextlib
import sys
import threading
import types

from .tensorflow2 import ReplicatedCall

# Where the Kerases have their class of nodes.
_NODES = (
    "keras.src.ops.node",
    "keras.src.engine.node",
    "keras.engine.node",
    "tf_keras.src.engine.node",
    "tensorflow.python.keras.engine.node",
)

_next = threading.local()


@contextlib.contextmanager
def placed_on(tf, device):
    with contextlib.ExitStack() as stack:
        for name in _NODES:
            if hasattr(sys.modules.get(name), "Node"):
                stack.enter_context(_nodes_placed(sys.modules[name].Node, device))
        stack.enter_context(tf.device(device))
        yield


@contextlib.contextmanager
def _nodes_placed(node_class, device):
    make = node_class.__init__

    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if not self.is_input:
            _place(self, device)

    node_class.__init__ = __init__
    try:
        yield
    finally:
        node_class.__init__ = make


def _place(node, device):
    layer = node.operation if hasattr(node, "operation") else node.layer
    if not isinstance(getattr(vars(layer).get("call"), "__func__", None), PlacedCall):
        PlacedCall().install(layer)
    # Keras 3 asks the node's arguments, tf.keras the node itself.
    owner, name = (
        (node.arguments, "fill_in") if hasattr(node, "arguments") else (node, "map_arguments")
    )
    fill_in = getattr(owner, name)

    def fill_in_placed(tensors):
        _next.call = layer, device
        return fill_in(tensors)

    vars(owner)[name] = fill_in_placed
    node._compat_device = device


def placed_parts(model):
    """The devices that ``device()`` gave to parts of ``model``."""
    depths = getattr(model, "_nodes_by_depth", None) or {}
    nodes = [node for nodes in depths.values() for node in nodes]
    return sorted({n._compat_device for n in nodes if hasattr(n, "_compat_device")})


class PlacedCall(ReplicatedCall):
    """A layer's ``call``: one replica, where the node that is being run says."""

    def __init__(self):
        super().__init__([])

    def install(self, layer):
        self.hidden = {k: v for k, v in layer.__dict__.items() if k == "call"}
        layer.__dict__["call"] = types.MethodType(self, layer)

    def __call__(self, layer, *args, **kwargs):
        following, device = getattr(_next, "call", None) or (None, None)
        if following is not layer:
            return self._unreplicated(sys.modules["tensorflow"], layer, *args, **kwargs)
        _next.call = None
        placed = PlacedCall()
        placed.hidden, placed.devices = self.hidden, [device]
        return ReplicatedCall.__call__(placed, layer, *args, **kwargs)
