"""Parts of a static graph on devices of their own, and gradients beside them."""

import contextlib

from ..._runtime import patching
from .graph import ancestors, dense_parts, handles, loop_of, reached


@contextlib.contextmanager
def placed_on(tf, device):
    """Within, operations go to ``device``; later, their gradients' operations do."""
    graph = tf.get_default_graph()
    if not _colocates_gradients(graph):
        graph._apply_device_functions = _ColocatingDeviceFunctions(graph._apply_device_functions)
    with tf.device(device), _variables_read_before_loops():
        yield


def placed_parts(model):
    """The devices that ``device()`` gave to parts of ``model``."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs or not _colocates_gradients(outputs[0].graph):
        return []
    starts = {part.op for part in dense_parts(*inputs)}
    _, consumers = ancestors(outputs, starts)
    return sorted({op.device for op in reached(starts, consumers) - starts if op.device})


def _colocates_gradients(graph):
    return isinstance(getattr(graph, "_apply_device_functions", None), _ColocatingDeviceFunctions)


class _ColocatingDeviceFunctions:
    """What a graph does to give each operation its device; gradients follow from then on.

    tf.keras does not ask TensorFlow to place gradients at all, and loops' counters and stacks
    stay behind in every Keras: a loop on two devices waits at each step.
    """

    def __init__(self, apply):
        self.apply = apply
        self.colocate = ColocateGradients({}, sums=False)

    def __call__(self, op):
        self.apply(op)
        if not op.device:
            op._set_device(self.colocate(op))


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


class ColocateGradients:
    """The device of a gradient's operation: where the operation ran that it belongs to.

    Arguments:
        device_of: devices of operations, and of loops by name, where operations have no device
            of their own.
        sums: whether all operations are gradients', so that those which belong to none sum up
            gradients, of one device or of several.
    """

    def __init__(self, device_of, sums):
        self.device_of = device_of
        self.sums = sums

    def __call__(self, op):
        if handles(op):
            return ""
        device, forward, loop = "", op._original_op, loop_of(op)
        if forward is not None:
            device = self._device_of(forward)
        elif loop is not None:  # one of its counters, or of those of its gradient
            forward = loop if loop.grad_state is None else loop.grad_state.forward_context
            # A loop has a pivot as soon as it has a condition.
            pivot = forward.pivot.op.device if forward.pivot is not None else ""
            device = self.device_of[loop.name] = self.device_of.get(forward.name, pivot)
        elif op.type == "Enter":
            device = self.device_of.get(op.get_attr("frame_name").decode(), "")
        elif self.sums:
            devices = {self._device_of(tensor.op) for tensor in op.inputs}
            device = devices.pop() if len(devices) == 1 else ""
        if device:
            self.device_of[op] = device
            # Loops' own constants are made before them, outside of their context. Left elsewhere,
            # TensorFlow's constant folding moves them into the loop, which then waits for them
            # forever.
            constant = op.inputs[0].op if op.type == "Enter" else None
            if constant is not None and constant.type == "Const" and not constant.device:
                constant._set_device(device)
        return device

    def _device_of(self, op):
        return self.device_of.get(op, op.device)
