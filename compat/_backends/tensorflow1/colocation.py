"""Devices of gradients: those of the operations that they differentiate."""

from . import graph


class ColocateGradients:
    """Device function that places a gradient's operation beside the one that it differentiates.

    Arguments:
        device_of: devices of operations, and of loops by name, where the operations themselves
            have no device.
        chain: the devices that sum up gradients, each its own and the next one's, in order, where
            all operations are gradients', so that those which differentiate none are such sums.
    """

    def __init__(self, device_of, chain=()):
        self.device_of = device_of
        self.chain = list(chain)

    def __call__(self, op):
        if graph.handles(op):
            return ""
        device, forward, loop = "", op._original_op, graph.loop_of(op)
        if forward is not None:
            device = self._device_of(forward)
        elif loop is not None:  # one of its counters, or of those of its gradient
            forward = loop if loop.grad_state is None else loop.grad_state.forward_context
            # A loop has a pivot as soon as it has a condition.
            pivot = forward.pivot.op.device if forward.pivot is not None else ""
            device = self.device_of[loop.name] = self.device_of.get(forward.name, pivot)
        elif op.type == "Enter":
            device = self.device_of.get(op.get_attr("frame_name").decode(), "")
        elif self.chain:
            device = self._device_of_sum(op)
        if device:
            self.device_of[op] = device
            # Loops' own constants are made before them, outside of their context. Left elsewhere,
            # TensorFlow's constant folding moves them into the loop, which then waits for them
            # forever.
            constant = op.inputs[0].op if op.type == "Enter" else None
            if constant is not None and constant.type == "Const" and not constant.device:
                constant._set_device(device)
        return device

    def _device_of_sum(self, op):
        """Return the device of a sum, or of slices that are concatenated: the first one's."""
        summands = list(op.inputs)[: -1 if op.type == "ConcatV2" else None]  # without the axis
        devices = {self._device_of(tensor.op) for tensor in summands}
        if len(devices) > 1 and devices.issubset(self.chain):
            return min(devices, key=self.chain.index)
        return devices.pop() if len(devices) == 1 else ""

    def _device_of(self, op):
        return self.device_of.get(op, op.device)
