"""Backward passes of ranks: their end, and the rows of the forward passes behind them."""

import weakref

import torch

from ..._runtime import patching
from . import parameter_hooks
from .tensors import tensors_in

#: What tells that a pass has ended.
PASS_HOOK = "Variable._execution_engine.queue_callback"
# The one that goes on, if there is one.
_passes = weakref.WeakSet()  # type: weakref.WeakSet


class Pass:
    """A backward pass, which autograd calls when it has ended, and lets go of if it fails.

    A pass within another, such as those of ``torch.utils.checkpoint``, belongs to that one.
    """

    def __init__(self):
        self.exchanges = []
        self.early = None  # the exchange whose buckets may leave before the end
        self.is_recorded = torch.is_grad_enabled()  # under create_graph=True
        self.due = set()  # type: set  # ids of parameters and names of what was to call their hooks
        self.before = {}  # type: dict  # by such an id: the gradient before the pass
        self.hooks = {}  # type: dict  # likewise: the parameter, and what calls its hooks

    @classmethod
    def join(cls, exchange):
        """Have an exchange run at the end of the pass, and tell it whether it may send before.

        No frame that an error goes through, and which the error keeps, may hold a pass.
        """
        found = next(iter(_passes), None)
        if found is None:
            found = cls()
            ended = patching.Callback(PASS_HOOK, found)
            torch.autograd.Variable._execution_engine.queue_callback(ended)
            _passes.add(found)
        if exchange not in found.exchanges:
            exchange.begin()
            found.exchanges.append(exchange)
            if found.early is None and exchange.may_be_early():
                found.early = exchange
        exchange.task = torch._C._current_graph_task_id()
        exchange.is_early = found.early is exchange
        return found

    def note(self, parameter, name):
        """Note that autograd would call the hooks of a parameter that have this name.

        Those that get its gradient will get what this pass adds to it.
        """
        if (id(parameter), name) not in self.due:
            self.due.add((id(parameter), name))
            if name == parameter_hooks.GRADIENT_HOOK and parameter.grad is not None:
                self.before[id(parameter)] = parameter.grad.detach().clone()

    def add_hooks(self, parameter, hooks, is_reached):
        """Call these hooks of a parameter at the end: on some rank, the pass has reached it.

        Arguments:
            is_reached: whether it has on this rank.

        Returns:
            The names of hooks that autograd would not have called, if it has.
        """
        missed = [name for name in hooks.names() if (id(parameter), name) not in self.due]
        self.hooks[id(parameter)] = parameter, hooks
        if is_reached:
            return missed
        for name in missed:
            self.note(parameter, name)
        return []

    def __call__(self):
        """Run the exchanges: of several models all ranks run theirs in the same order."""
        _passes.discard(self)
        for exchange in self.exchanges:  # before means are written, of what several may exchange
            exchange.warn_of_changes()
        for exchange in sorted(self.exchanges, key=lambda e: (e is not self.early, e.number)):
            exchange.run(self)
        with torch.set_grad_enabled(self.is_recorded):
            for key, (parameter, hooks) in self.hooks.items():
                hooks.call(parameter, self.before.get(key))


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
            tensor.register_hook(patching.Callback("Tensor.register_hook", reach))
        if self.used:
            self.passes, self.used = [], False
        self.passes.append(noted)

    def are_awaited(self):
        """Return whether a backward pass through forward passes is still to come."""
        return self.step is not None or bool(self.passes and not self.used)

    def known(self):
        """Return the rows of the pass that goes on; None until autograd comes to all outputs."""
        is_known = self.step is not None or all(reached for _, reached in self.passes)
        return self.total() if is_known else None

    def total(self):
        """Return the rows of the pass that has ended, or None."""
        if self.step is not None:
            return self.step
        reached = [rows for rows, is_reached in self.passes if is_reached]
        counted = reached or [rows for rows, is_reached in self.passes if is_reached is None]
        return sum(counted) if counted else None
