"""Parts of a model on devices of their own: ``compat.device()``.

Gradients go beside the operations that they belong to.
"""

import contextlib

from ..._runtime import patching
from . import graph
from .colocation import ColocateGradients


@contextlib.contextmanager
def placed_on(tf, device):
    """Within, operations go to ``device``; later, their gradients' operations do.

    tf.keras does not ask TensorFlow to place gradients at all, and loops' counters and stacks
    stay behind in every Keras: a loop on two devices waits at each step.
    """
    within = tf.get_default_graph()
    if not _colocates_gradients(within):
        apply, colocate = within._apply_device_functions, ColocateGradients({}, sums=False)

        def apply_device_functions(op):
            apply(op)
            if not op.device:
                op._set_device(colocate(op))

        apply_device_functions.colocates_gradients = True
        within._apply_device_functions = apply_device_functions
    with tf.device(device), _variables_read_before_loops():
        yield


def placed_parts(model):
    """Return the devices that ``device()`` gave to parts of ``model``."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs or not _colocates_gradients(outputs[0].graph):
        return []
    starts = {part.op for part in graph.dense_parts(*inputs)}
    _, consumers = graph.ancestors(outputs, starts)
    return sorted({op.device for op in graph.reached(starts, consumers) - starts if op.device})


def _colocates_gradients(within):
    return hasattr(getattr(within, "_apply_device_functions", None), "colocates_gradients")


@contextlib.contextmanager
def _variables_read_before_loops():
    """Within, loops take the value of a variable in, instead of reading it at each step.

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
