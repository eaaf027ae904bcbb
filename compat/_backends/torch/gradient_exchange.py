"""Gradients and running statistics, which ranks exchange once for each backward pass.

As in ``DistributedDataParallel``, hooks on the parameters report that autograd has reached them,
whatever called the model. Each rank sends its gradients times its rows, in buckets that leave while
others are still computed, and with the last of them its rows and whether it has more batches; the
sums are divided by all ranks' rows. Nothing is agreed upon before.

A bucket leaves early where the rows of the pass are known by then: autograd has come to the outputs
of each forward pass since the last exchange. Otherwise all leave at the end.

Which tensors are in which bucket, and the order of the buckets, are the same on all ranks, so that
each all-reduce finds its counterparts, whatever a rank's batch has used. A header with counts and
flags of each rank goes with the last bucket. It has, too, which buckets were sent before a tensor
in them had its last value; these are sent again.

A gradient that was exchanged already is the same on all ranks, and so is its mean: gradients may
be accumulated over several passes. A script's hooks on parameters get that mean, after the pass
(``parameter_hooks``).
"""

import contextlib
import itertools
import threading
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from ... import errors
from ..._ranks import checksum, same_rows
from ..._runtime import patching
from . import backward_passes, loss_terms, parameter_hooks
from .backward_passes import PASS_HOOK, BackwardCall, ForwardRows, Pass, loss_under_way
from .gradient_sums import Sums
from .tensors import are_same

# The function of torch that reports that a gradient is there.
_HOOK = parameter_hooks.ACCUMULATED_HOOK
# Autograd has a thread for each device, and one for the CPU.
_arriving = threading.RLock()


class _Calls(threading.local):
    """The exchanges of models whose calls are under way in a thread, the outermost first."""

    exchanges: "Tuple[Exchange, ...]" = ()


calls = _Calls()


def is_under_way() -> bool:
    """Return whether a backward pass is under way in which ranks may exchange gradients."""
    exchanges = waiting() if backward_passes.is_under_way() else []
    return any(not exchange.source.is_alone for exchange in exchanges)


def waiting() -> "List[Exchange]":
    """Return the exchanges of models whose forward passes wait for a backward pass, in order.

    Those that other models called come last.
    """
    exchanges = [exchange for exchange in list(Exchange._all) if exchange.rows.are_awaited()]
    return sorted(exchanges, key=lambda exchange: exchange.order()[1:])


class Exchange:
    """The exchange of one model's gradients.

    Arguments:
        engine: the engine of the ranks.
        source: the model's ``RankedCall``, which lists its parameters and running statistics.
        model: the model.
    """

    _numbers = itertools.count()
    _all: "weakref.WeakSet[Exchange]" = weakref.WeakSet()

    def __init__(self, engine, source, model):
        self.engine, self.source, self.model = engine, source, weakref.ref(model)
        self.weights: "Optional[int]" = None  # how many were made the same
        self.number = next(self._numbers)
        self._all.add(self)
        self.hooks = torch.utils.weak.WeakIdKeyDictionary()  # parameter -> its hook's handle
        self.hooked: "List[torch.Tensor]" = []  # the parameters of the last pass
        self.settled = False  # whether the last forward pass began with these
        self.parts: "Set[int]" = set()  # the ids of modules, if batch normalization is synchronized
        self.sums: Any = None
        self.sends_early = True
        self.task: "Optional[int]" = None  # the graph task that was joined last
        self.is_early = False
        # Of the parameters that a pass has come to, by id: the gradient, and its version.
        self.reached: "Dict[int, Any]" = {}
        self.state: "List[torch.Tensor]" = []  # the running statistics
        self.before: "List[torch.Tensor]" = []  # their values, the same on all ranks
        self.checked = False  # the loss
        self.is_suspect = False  # the loss, as a warning has said
        self.rows = ForwardRows()
        self.first_batch = same_rows.FirstBatch(engine)
        self.divisor: "Optional[float]" = None  # of the loss of this pass, if not its rows
        self.count = 0  # exchanges so far
        self.versions: "Optional[List[int]]" = None  # of the parameters, at the last forward pass
        self.has_exchanged = True  # since then
        self.missed = 0  # updates with no exchange in between
        self.calls_batch_norm = True  # as a function, in the last pass: see ``ranked_batch_norm``
        # The ids of the layers of batch normalization that it had at last, once these were listed.
        self.normalizing: "Optional[Set[int]]" = None
        self.agreed = False  # whether ranks have exchanged their rows in front of the step
        self.warned: "Set[Any]" = set()  # variables, and topics, of which there was a warning

    def hook(self, parameters: "List[torch.Tensor]") -> None:
        """Register hooks on the parameters that have none yet."""
        reference = weakref.ref(self)

        def arrived(parameter):
            exchange = reference()
            if exchange is not None and not exchange.source.is_alone:
                with _arriving:
                    exchange.arrived(parameter)

        for parameter in parameters:
            if parameter not in self.hooks and parameter.is_leaf:
                parameter_hooks.ParameterHooks.of(parameter).exchanges.add(self)
                hook = patching.Callback(_HOOK, arrived)
                self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self.hooked = parameters

    def missed_hook(self, task: "Optional[int]") -> str:
        """Return the name of the hook that was not called, if none has exchanged since a task."""
        return _HOOK if self.task == task else PASS_HOOK

    def note(self, state, value):
        """Note running statistics. ``value`` returns the value of a new one before the pass."""
        if not are_same(state, self.state):
            before = dict(zip(map(id, self.state), self.before))
            self.before = [before[id(t)] if id(t) in before else value(t) for t in state]
            self.state = state

    @contextlib.contextmanager
    def called(self):
        """Return the context of a call of the model."""
        outer = calls.exchanges
        calls.exchanges = (*outer, self)
        try:
            yield
        finally:
            calls.exchanges = outer

    def is_within_call(self) -> bool:
        """Return whether a model that has all of its parameters is being called in this thread."""
        mine = set(map(id, self.hooked))
        return any(mine.issubset(map(id, e.hooked)) for e in calls.exchanges if e is not self)

    # One backward pass ------------------------------------------------------------------------

    def begin(self):
        """Prepare for a pass: autograd has come to the first of the parameters."""
        self.reached = {}
        model = self.model()
        if model is not None:
            # Losses of Keras are divided where they are computed.
            self.divisor = None if self.rows.step is not None else loss_under_way().targets()
            if not self.settled:  # such as those that a forward pass has made
                self.hook(self.source.parameters(model))
            # A new one was put in a former one's place.
            self.note(self.source.averaged(model), torch.zeros_like)
            self.lay_out(self.state)

    def lay_out(self, state):
        """Arrange the tensors that are summed up, the same on all ranks: last layer first."""
        tensors, count, sums = self.hooked[::-1] + state, len(self.hooked), self.sums
        if sums is None or sums.count != count or not are_same(tensors, sums.tensors):
            self.sums = Sums(self.engine, tensors, count)

    def may_be_early(self):
        """Return whether no other model comes before this one in a pass, by its forward passes.

        Ranks call their models in one order: all exchanges rest on that.
        """
        mine = self.rows.are_within(), self.number
        return self.rows.are_awaited() and not any(
            (other.rows.are_within(), other.number) < mine and other.rows.are_awaited()
            for other in self._all
        )

    def order(self):
        """Return a key by which the exchanges of a pass that has ended are sorted.

        Models that were called come first, and those that other models did not call: their rows are
        those of the loss.
        """
        return self.rows.total() is None, self.rows.are_within(), self.number

    def join(self):
        """Take part in the pass under way, before a hook of the script's is called in it.

        Returns:
            The pass; None: gradients of this model are not exchanged now.
        """
        if self.source.is_alone or not backward_passes.is_under_way():
            return None
        with _arriving:
            return Pass.join(self)

    def arrived(self, parameter):
        """Note that the gradient of a parameter is complete in this pass."""
        if torch._C._current_graph_task_id() != self.task:  # of the first parameter
            Pass.join(self)
        gradient = parameter.grad
        self.reached[id(parameter)] = gradient, getattr(gradient, "_version", None)
        if not self.is_early or not self.sends_early:
            return
        weight = self.rows.current() if self.divisor is None else self.divisor
        if not weight or gradient is None or gradient.is_sparse:
            return
        self.sums.put(parameter, gradient, weight)

    def run(self, under_way, is_averaged):
        """Average the gradients, and the running statistics, over all ranks' rows.

        Arguments:
            under_way: the pass that ends.
            is_averaged: whether exchanges of other models have averaged its gradients before.
        """
        model = self.model()
        if model is None:
            return
        is_averaged = is_averaged and bool(self.reached)
        name, rows = type(model).__name__, self.rows.total()
        if rows is None and not is_averaged:
            rows = self.rows.last()
        self.rows.used, self.settled = True, False
        # The weight of this pass among those of all ranks; if it is unknown, all have the same.
        weight = rows if self.divisor is None else self.divisor
        unknown, weight = weight is None, 1 if weight is None else weight
        with torch.no_grad():
            share = under_way.call.shares.get(self.number)
            # A rank whose targets do not count has gradients all the same, by the statistics of its
            # samples.
            scale = weight or float(share is not None and bool(rows))
            self.sum(weight, scale, unknown, weight if rows is None else rows)
            self.engine.count("gradients")
            self.engine.last = None if self.agreed else self
            if not self.agreed:
                self.engine.stepped(self.sums.ended)
            self.check(name, is_averaged)
            self.check_share(name, share, weight)
            self.note_hooks(model, under_way)
            for parameter, used in zip(self.hooked, self.sums.used):
                if used and parameter.grad is None:  # another rank's batch has used it
                    parameter.grad = self.sums.write_mean(parameter, torch.empty_like(parameter))
                elif used:
                    self.sums.write_mean(parameter, parameter.grad)
            check = checksum.is_due(self.count)
            if check and not self.is_suspect and not is_averaged:
                self.is_suspect = loss_terms.check_loss(
                    self.engine, name, loss_under_way(), weight, rows
                )
            if check and self.engine.place.rank == 0:
                self.source.warn_of_means(model, self)
            if self.state:
                torch._foreach_add_(self.before, [self.mean(tensor) for tensor in self.state])
                torch._foreach_copy_(self.state, self.before)
            self.source.has_exchanged(model, 1 if rows is None else rows)
        if check:
            self.source.verify(model, self.count or "before the first update")
        self.count += 1
        self.has_exchanged = True

    def note_hooks(self, model, under_way):
        """Have the pass call the script's hooks on parameters when all means are there."""
        missed = BackwardCall.missed_hooks()
        for parameter, hooks in parameter_hooks.registered(self.hooked, self.sums.reached):
            missed += under_way.add_hooks(parameter, hooks, id(parameter) in self.reached)
        for name in missed:
            self.source.note_unreached(model, name)

    def expected_weight(self) -> float:
        """Return the weight of this rank in the backward pass under way, as far as it is known."""
        if not backward_passes.is_under_way():
            return 1.0  # such as in ``torch.autograd.grad()``
        weight = loss_under_way().targets() if self.rows.step is None else None
        weight = self.rows.expected() if weight is None else weight
        return 1.0 if weight is None else float(weight)

    def sum(self, weight, scale, unknown, rows):
        """Sum up over all ranks."""
        gradients = [parameter.grad for parameter in self.hooked]
        used = [gradient is not None for gradient in gradients]
        reached = [id(parameter) in self.reached for parameter in self.hooked]
        sparse = any(gradient.is_sparse for gradient in gradients if gradient is not None)
        values = {}
        if scale and not sparse:
            values = {id(p): (gradient, scale) for p, gradient in zip(self.hooked, gradients)}
        if self.state:
            changes = torch._foreach_sub(self.state, self.before)
            values.update(
                (id(tensor), (change, rows)) for tensor, change in zip(self.state, changes)
            )
        header = [weight, unknown, rows, self.divisor is not None, sparse]
        if self.sums.complete(header, False, used, reached, values):
            # Not a second time: such as where a script changes gradients during the pass.
            self.sends_early = False

    def warn_of_changes(self):
        """Warn if a gradient was changed after autograd has computed it, before it is a mean."""
        for parameter in self.hooked if ("changed",) not in self.warned else ():
            gradient, version = self.reached.get(id(parameter), (parameter.grad, None))
            is_other = parameter.grad is not gradient
            if is_other or version not in (None, getattr(gradient, "_version", None)):
                self.warned.add(("changed",))
                errors.warn(
                    "The gradient of a parameter of {}, of shape {}, was changed during the "
                    "backward pass, by a hook of a module or of a tensor. It was that of this "
                    "rank's rows: if the change is not linear, as where it clips, ranks train to "
                    "other numbers than one process. Hooks on parameters, and changes after "
                    "backward(), see the mean over all ranks.".format(
                        type(self.model()).__name__, tuple(parameter.shape)
                    )
                )
                return

    def close(self) -> "List[int]":
        """Take part in the exchange of others, as a rank with no more batches.

        Returns:
            The ranks that have no more batches either.
        """
        model = self.model()
        self.hook(self.source.parameters(model))
        self.lay_out(self.source.averaged(model))
        with torch.no_grad():
            none = [False] * len(self.hooked)
            self.sums.complete([0] * 5, True, none, none, {})
        return self.sums.ended

    def mean(self, tensor):
        """Return the mean of a running statistic's changes, which is always weighted by rows."""
        mean = self.sums.write_mean(tensor, torch.empty_like(tensor))
        rows = self.sums.rows
        return mean * (self.sums.total / rows if rows else float("nan"))

    def check(self, name: str, is_averaged: bool) -> None:
        """Check what ranks have to have in common.

        Arguments:
            name: the model's class.
            is_averaged: whether all gradients were averaged before, so that any weights will do.

        Raises:
            CompatError: they have not.
        """
        place, unknown = self.engine.place, self.sums.unknown
        if self.sums.sparse:
            raise errors.UnsupportedError(
                f"A gradient of {name} is sparse, which ranks cannot exchange. Make the embedding "
                "with sparse=False."
            )
        if 0 < unknown < place.size:
            raise errors.RankError(
                f"Some ranks have called {name} with a batch in this backward pass, and others "
                "have not, so that their gradients cannot be weighted by rows. Have all ranks do "
                "the same."
            )
        if 0 < self.sums.divided < place.size:
            raise errors.RankError(
                f"Some ranks divide the loss of {name} by their targets that count, and others do "
                "not, so that their gradients cannot be weighted. Have all ranks compute the same "
                "loss."
            )
        is_new = unknown and ("rows",) not in self.warned and not is_averaged
        if is_new and place.rank == 0:
            self.warned.add(("rows",))
            errors.warn(
                f"A backward pass reached the parameters of {name}, but no call of the model in "
                "which rows of a batch are seen. So all ranks count alike, which is one process's "
                "gradient where all have the same number of rows. Call the model itself with a "
                "batch of tensors."
            )

    def check_share(self, name: str, share: "Optional[float]", weight: float) -> None:
        """Warn if gradients of values that are reduced over ranks had other weights in this pass.

        Arguments:
            name: the model's class.
            share: that of this rank among the weights they had, or None.
            weight: that of this rank in the pass.
        """
        is_same = share is None or abs(share * self.sums.total - weight) <= 1e-4 * self.sums.total
        if not is_same and ("share",) not in self.warned:
            self.warned.add(("share",))
            errors.warn(
                f"Batch normalization of {name} uses the samples of all ranks. Its gradients were "
                "weighted by the rows of all calls of the model since the last backward pass, and "
                "this pass does not come to all of them, of which ranks have different shares. So "
                "the ranks train to other numbers than one process. Call backward() after each "
                "call of the model, or give every rank the same number of rows."
            )

    # The same weights -------------------------------------------------------------------------

    def look(self):
        """Compare the weights where they were updated, in place, without an exchange.

        Every rank sees that in the same place of the program, or its weights do differ.
        """
        versions = [parameter._version for parameter in self.hooked]
        if versions == self.versions:
            return
        is_missed = self.versions is not None and not self.has_exchanged
        self.versions, self.has_exchanged = versions, False
        if is_missed:
            self.missed += 1
            if checksum.is_due(self.missed):
                self.source.verify(self.model(), self.missed)
