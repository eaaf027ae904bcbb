"""Backward passes of ranks: their end, and the rows of the forward passes behind them."""

import contextlib
import itertools
import weakref
from typing import Any, Callable, ContextManager, Dict, List, Optional, Set, Tuple

import torch

from ... import errors
from ..._runtime import patching
from . import loss_terms, parameter_hooks
from .tensors import tensors_in

#: The function of torch that reports the end of a pass.
PASS_HOOK = "Variable._execution_engine.queue_callback"
#: The function of torch that reports the beginning of a pass, and the gradients of its loss.
_NODE_HOOK = "Node.register_prehook"


class BackwardCall:
    """A call of ``torch.autograd.backward()``, which adds to the gradients of parameters.

    Several threads may be in such calls at once, and a hook runs in the thread of a device. So a
    call is known by the number of its graph task, which is the same for all of its hooks.

    Attributes:
        number: one of its own.
        loss: the ``Loss`` that it differentiates.
        outermost: the call that it is nested in, as those of ``torch.utils.checkpoint`` are; or
            itself.
        joined: a weak reference to the ``Pass`` that it is, once ranks exchange gradients in it.
        model: the class of a model whose gradients are exchanged in it, or None.
        beside: likewise, in a call of another thread that was under way at the same time.
        shares: by the number of an exchange, the share of this rank among the weights of all, as
            gradients of values that were reduced in the forward pass had it.
    """

    _under_way: "List[BackwardCall]" = []
    _numbers = itertools.count()

    def __init__(self, loss):
        self.number = next(self._numbers)
        self.loss, self.task, self.joined = loss, None, _nothing
        self.model = self.beside = None
        self.outermost = self
        self.shares: "Dict[int, float]" = {}

    @classmethod
    def current(cls) -> "BackwardCall":
        """Return the call that the hook that is running belongs to, or ``UNSEEN``."""
        task = torch._C._current_graph_task_id()
        calls = [call for call in list(cls._under_way) if call.task == task]
        return calls[0] if calls and task >= 0 else UNSEEN

    @classmethod
    def has_ended(cls, number: int) -> bool:
        """Return whether the call of this number has ended."""
        return number not in [call.number for call in list(cls._under_way)]

    @classmethod
    def missed_hooks(cls) -> "List[str]":
        """Return the names of functions that should have noted the loss, and did not.

        It is called at the end of a pass.
        """
        call = cls.current()
        if call is UNSEEN:
            return [_NODE_HOOK if cls._under_way else "torch.autograd.backward"]
        terms = call.outermost.loss.terms
        return [_NODE_HOOK] if terms and all(term.gradient is None for term in terms) else []

    @contextlib.contextmanager
    def followed(self, tensors):
        """Return the context of the call, which begins with these tensors."""
        outer = self.current()
        self.outermost = self if outer is UNSEEN else outer.outermost
        models = [call.model for call in self._others()]
        self.beside = next(filter(None, models), None)
        with contextlib.ExitStack() as afterwards:
            self._under_way.append(self)
            afterwards.callback(self._under_way.remove, self)
            hooks = [(_node(tensor), self._begin) for tensor in tensors]
            for node, hook in hooks + [(term.node, term.note) for term in self.loss.terms]:
                if node is not None:
                    handle = node.register_prehook(patching.Callback(_NODE_HOOK, hook))
                    afterwards.callback(handle.remove)
            yield

    def _begin(self, gradients):
        if self.task is None:  # else another call begins with the same tensor
            self.task = torch._C._current_graph_task_id()

    def _others(self):
        """Return the calls of other threads."""
        return [call for call in list(self._under_way) if call.outermost is not self.outermost]

    def exchanges(self, model: str) -> None:
        """Note that the gradients of a model of this class are exchanged in this call.

        Raises:
            UnsupportedError: so are gradients in another thread.
        """
        self.model = self.model or model
        for call in self._others():
            call.beside = self.model
        if self.beside is not None:
            raise errors.UnsupportedError(
                f"Two threads run backward passes at once, of {self.beside} and of {model}, whose "
                "gradients ranks exchange. Each rank may do that in another order. Run one "
                "backward pass after the other: in one thread, or in an order that is the same on "
                "all ranks."
            )


def _nothing():
    """Return None, as a weak reference does to what is no more."""


#: Stands for a call that is not known, such as where torch's own hooks do not report it.
UNSEEN = BackwardCall(loss_terms.Loss([], True))


def _node(tensor):
    """Return the node of autograd's graph that a pass begins with at a tensor, or an edge."""
    if isinstance(tensor, torch.autograd.graph.GradientEdge):
        return tensor.node
    node = getattr(tensor, "grad_fn", None)
    if node is None and getattr(tensor, "requires_grad", False):  # a parameter itself
        node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node  # None: torch refuses it


def follow(context: "Callable[[], ContextManager[Any]]") -> None:
    """Have all backward passes record the tensors that they begin with.

    Arguments:
        context: a function that returns the context of a pass.
    """
    if patching.find(torch.autograd, "backward") is not None:
        return
    plain = torch.autograd.backward

    def backward(tensors, *args, **kwargs):
        single = isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))
        roots = [tensors] if single else list(tensors)
        with BackwardCall(loss_terms.loss_of(roots)).followed(roots), context():
            return plain(tensors if single else roots, *args, **kwargs)

    patching.Patch(torch.autograd, "backward", backward)


def is_under_way() -> bool:
    """Return whether the hook that is running belongs to a call of ``backward()``."""
    return BackwardCall.current() is not UNSEEN


def loss_under_way() -> loss_terms.Loss:
    """Return the ``Loss`` of the backward pass to which the hook that is running belongs."""
    return BackwardCall.current().outermost.loss


class Pass:
    """A backward pass, which autograd calls when it has ended, and lets go of if it fails.

    A pass within another, such as those of ``torch.utils.checkpoint``, belongs to that one.

    Arguments:
        call: the outermost ``BackwardCall`` that it belongs to.
    """

    def __init__(self, call):
        self.call = call
        self.exchanges: "List[Any]" = []
        self.early: Any = None  # the exchange whose buckets may leave before the end
        self.is_recorded = torch.is_grad_enabled()  # under create_graph=True
        # Ids of parameters, and names of functions that were to call their hooks.
        self.due: "Set[Tuple[int, str]]" = set()
        self.before: "Dict[int, torch.Tensor]" = {}  # by such an id: the gradient before the pass
        # Likewise: the parameter, and its ``ParameterHooks``.
        self.hooks: "Dict[int, Any]" = {}

    @classmethod
    def join(cls, exchange):
        """Have an exchange run at the end of the pass, and note whether it may send before.

        No frame that an error passes through, and which the error keeps, may hold a pass.
        """
        call = BackwardCall.current().outermost
        call.exchanges(type(exchange.model()).__name__)
        joined = call.joined()
        if joined is None:
            joined = cls(call)
            ended = patching.Callback(PASS_HOOK, joined)
            torch.autograd.Variable._execution_engine.queue_callback(ended)
            call.joined = weakref.ref(joined)
        if exchange not in joined.exchanges:
            exchange.begin()
            joined.exchanges.append(exchange)
            if joined.early is None and exchange.may_be_early():
                joined.early = exchange
        exchange.task = torch._C._current_graph_task_id()
        exchange.is_early = joined.early is exchange
        return joined

    def note(self, parameter: torch.Tensor, name: str) -> None:
        """Note that autograd would call the hooks of a parameter that have this name.

        Hooks on its gradient will get the gradient that this pass adds.
        """
        if (id(parameter), name) not in self.due:
            self.due.add((id(parameter), name))
            if name == parameter_hooks.GRADIENT_HOOK and parameter.grad is not None:
                self.before[id(parameter)] = parameter.grad.detach().clone()

    def add_hooks(self, parameter, hooks, is_reached):
        """Call the hooks of a parameter at the end: on some rank, the pass has reached it.

        Arguments:
            parameter: the parameter.
            hooks: its ``ParameterHooks``.
            is_reached: whether the pass has reached it on this rank.

        Returns:
            If it has, the names of hooks that autograd would not have called.
        """
        missed = [name for name in hooks.names() if (id(parameter), name) not in self.due]
        self.hooks[id(parameter)] = parameter, hooks
        if is_reached:
            return missed
        for name in missed:
            self.note(parameter, name)
        return []

    def __call__(self):
        """Run the exchanges: of several models all ranks run theirs in the same order.

        Where parameters belong to several models, the first exchange averages their gradients, so
        that they are the same on all ranks in the others.
        """
        self.call.joined = _nothing
        for exchange in self.exchanges:  # before means are written, of what several may exchange
            exchange.warn_of_changes()
        averaged: "Set[int]" = set()
        for exchange in sorted(self.exchanges, key=lambda e: (e is not self.early, *e.order())):
            exchange.run(self, averaged.issuperset(exchange.reached))
            averaged.update(exchange.reached)
        with torch.set_grad_enabled(self.is_recorded):
            for key, (parameter, hooks) in self.hooks.items():
                hooks.call(parameter, self.before.get(key))


class ForwardRows:
    """The rows of the forward passes that a backward pass differentiates."""

    def __init__(self):
        self.passes: "List[_ForwardPass]" = []  # since the last backward pass with an exchange
        self.used = False  # whether a backward pass has differentiated them
        self.step: "Optional[int]" = None  # rows of a step of Keras, however it calls the model

    def forward(self, rows: int, outputs: Any, is_within: bool) -> None:
        """Note a forward pass of so many rows.

        Arguments:
            rows: their number.
            outputs: its results.
            is_within: whether it is part of a forward pass of another model.
        """
        self.passes = [] if self.used else [each for each in self.passes if not each.is_over()]
        self.passes.append(_ForwardPass(rows, outputs, is_within))
        self.used = False

    def are_awaited(self) -> bool:
        """Return whether a backward pass through forward passes is still to come."""
        return self.step is not None or (not self.used and any(self._due()))

    def current(self) -> "Optional[int]":
        """Return the rows of the pass under way; None until autograd has come to all outputs."""
        if self.step is None and not all(each.reached for each in self._due()):
            return None
        return self.total()

    def expected(self) -> "Optional[int]":
        """Return the rows of the pass under way, if it comes to all forward passes; or None."""
        due = list(self._due())
        known = [each.rows for each in due if each.has_outputs] or [each.rows for each in due]
        return self.step if self.step is not None else sum(known) if known else None

    def total(self) -> "Optional[int]":
        """Return the rows of the pass that has ended, or None."""
        if self.step is not None:
            return self.step
        task = BackwardCall.current().outermost.number
        due = [each for each in self._due() if not self.used or task in each.reached]
        reached = [each.rows for each in due if each.reached]
        counted = reached or [each.rows for each in due if not each.has_outputs]
        return sum(counted) if counted else None

    def last(self) -> "Optional[int]":
        """Return the rows of the last pass, where the one that has ended came to no outputs."""
        reached = [each.rows for each in self.passes if each.reached]
        return sum(reached) if reached else None

    def are_within(self) -> bool:
        """Return whether all passes are part of other models' forward passes."""
        return self.step is None and all(each.is_within for each in self._due())

    def _due(self):
        """Yield the passes that were not differentiated before."""
        return (each for each in self.passes if not each.is_over())


class _ForwardPass:
    """A forward pass of a model.

    Attributes:
        rows: their number.
        is_within: whether it is part of a forward pass of another model.
        has_outputs: whether a tensor that is differentiated was found in its outputs.
        reached: the numbers of the calls of ``backward()``, and that of ``UNSEEN``, in which
            autograd has come to its outputs.
    """

    def __init__(self, rows, outputs, is_within):
        self.rows, self.is_within, self.reached = rows, is_within, set()
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        self.has_outputs = bool(tensors)
        for tensor in tensors:
            tensor.register_hook(patching.Callback("Tensor.register_hook", self._reach))

    def _reach(self, gradient):
        self.reached.add(BackwardCall.current().outermost.number)

    def is_over(self):
        """Return whether calls of ``backward()`` that have ended came to it.

        Such as one of a generator's loss, of the passes of a discriminator that it does not train.
        """
        calls = self.reached - {UNSEEN.number}
        return bool(calls) and all(map(BackwardCall.has_ended, calls))
