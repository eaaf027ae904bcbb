"""Parts of a model on chosen devices: ``compat.device()``.

Gradients go beside the operations that they belong to.
"""

import contextlib

from ..._runtime import patching
from . import graph
from .colocation import ColocateGradients

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, List


class _DeviceFunctions:
    """Function by which a graph gives an operation its device, extended to gradients.

    tf.keras does not ask TensorFlow to place gradients at all, and loops' counters and stacks
    stay behind in every Keras: a loop on two devices waits at each step.

    Arguments:
        apply: the graph's own, which applies the device functions that are in force.
    """

    def __init__(self, apply: "Callable[[Any], None]") -> None:
        self.apply, self.colocate = apply, ColocateGradients({})

    def __call__(self, op: "Any") -> None:
        self.apply(op)
        if not op.device:
            op._set_device(self.colocate(op))


def _places_gradients(within):
    return isinstance(getattr(within, "_apply_device_functions", None), _DeviceFunctions)


@contextlib.contextmanager
def placed_on(tf: "Any", device: str) -> "Iterator[None]":
    """Place operations of a block, and later those of their gradients, on a device."""
    within = tf.get_default_graph()
    if not _places_gradients(within):
        # Graphs of TensorFlow 2.15 have no ``__dict__``, which ``patching`` writes to.
        within._apply_device_functions = _DeviceFunctions(within._apply_device_functions)
    with tf.device(device), _variables_read_before_loops():
        yield


def placed_parts(model: "Any") -> "List[str]":
    """Return the devices to which ``device()`` has assigned parts of a model."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs or not _places_gradients(outputs[0].graph):
        return []
    starts = {part.op for part in graph.dense_parts(*inputs)}
    _, consumers = graph.ancestors(outputs, starts)
    return sorted({op.device for op in graph.reached(starts, consumers) - starts if op.device})


@contextlib.contextmanager
def _variables_read_before_loops():
    """Have loops take the value of a variable in, instead of reading it at each step.

    It is read where the variable lies. Inside a loop that is elsewhere, the read would draw with
    it what the gradient keeps of it, and then the products (they share a stack).
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    variable = next(c for c in ResourceVariable.__mro__ if "value" in vars(c))
    if patching.find(variable, "value") is not None:  # within another such context
        yield
        return
    value = variable.value

    def value_before_loops(self):
        with ops.control_dependencies(None):  # out of all loops
            return value(self)

    with patching.replaced(variable, value=value_before_loops):
        yield
