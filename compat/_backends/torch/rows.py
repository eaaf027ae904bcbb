"""How many rows a backward pass goes back through, as the forward passes tell."""

from .tensors import tensors_in


class ForwardRows:
    """The rows of the forward passes that a backward pass goes back through."""

    def __init__(self):
        # Of each forward pass since the last backward pass: its rows, and whether autograd has come
        # to its outputs; None: no tensor was found in these.
        self.passes = []  # type: list
        self.used = False  # whether a backward pass has gone through them
        self.step = None  # the rows of a step of Keras', which may call the model in any way

    def forward(self, rows, outputs):
        """Note a forward pass of so many rows."""
        found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        noted = [rows, False if found else None]

        def reach(gradient):
            noted[1] = True

        for tensor in found:
            tensor.register_hook(reach)
        if self.used:
            self.passes, self.used = [], False
        self.passes.append(noted)

    def are_awaited(self):
        """Whether there were forward passes which no backward pass has gone back through."""
        return self.step is not None or bool(self.passes and not self.used)

    def known(self):
        """The rows of the pass that goes on, if autograd has come to all outputs, or None."""
        is_known = self.step is not None or all(reached for _, reached in self.passes)
        return self.total() if is_known else None

    def in_backward(self):
        """The rows of the pass that has ended, or None."""
        self.used = True
        return self.total()

    def total(self):
        if self.step is not None:
            return self.step
        reached = [rows for rows, is_reached in self.passes if is_reached]
        counted = reached or [rows for rows, is_reached in self.passes if is_reached is None]
        return sum(counted) if counted else None
