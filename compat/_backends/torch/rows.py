"""How many rows a backward pass goes back through, as the forward passes tell."""

from .tensors import tensors_in


class ForwardRows:
    """The rows of the forward passes that a backward pass goes back through."""

    def __init__(self):
        self.reached = {}  # forward pass -> its rows; autograd has come to its outputs
        self.others = None  # rows of those in whose outputs no tensor was found
        self.noted = 0  # forward passes since the last backward pass
        self.used = False
        self.step = None  # the rows of a step of Keras', which may call the model in any way

    def forward(self, rows, outputs):
        """Note a forward pass of so many rows."""
        if self.used:
            self.reached, self.others, self.noted, self.used = {}, None, 0, False
        key, reached = object(), self.reached

        def reach(gradient):
            reached[key] = rows

        found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in found:
            tensor.register_hook(reach)
        if not found:
            self.others = (self.others or 0) + rows
        self.noted += 1

    def are_awaited(self):
        """Whether there were forward passes which no backward pass has gone back through."""
        return self.step is not None or (self.noted > 0 and not self.used)

    def known(self):
        """The rows of the pass that goes on, if autograd has come to all outputs, or None."""
        if self.step is None and len(self.reached) < self.noted:
            return None
        return self.total()

    def in_backward(self):
        """The rows of the pass that has ended, or None."""
        self.used = True
        return self.total()

    def total(self):
        if self.step is not None:
            return self.step
        return sum(self.reached.values()) if self.reached else self.others
