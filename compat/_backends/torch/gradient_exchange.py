"""What ranks of torch exchange: gradients and running statistics, once for each backward pass.

As in ``DistributedDataParallel`` hooks on the parameters tell that autograd has reached them,
whatever called the model. Each rank sends its gradients times its rows, in buckets that leave while
others are still computed, and with the last of them its rows and whether it has more batches; what
comes back is divided by all ranks' rows. Nothing is agreed upon before.

A bucket leaves early where the rows of the pass are known by then: autograd has come to the outputs
of each forward pass since the last exchange. Otherwise all leave at the end.

A gradient that was exchanged already is the same on all ranks, and so is its mean: gradients may
be accumulated over several passes.
"""

import itertools
import threading
import weakref

import torch

from ... import errors
from ..._ranks import checksum, weights
from . import loss_terms
from .batches import are_same, tensors_in, to_numpy
from .sums import Sums

# The backward pass that goes on, if there is one.
_under_way = weakref.WeakSet()  # type: weakref.WeakSet
# Autograd has a thread for each device, and one for the CPU.
_arriving = threading.RLock()


class _Pass:
    """A backward pass, which autograd calls when it has ended, and lets go of if it fails.

    A pass within another, such as those of ``torch.utils.checkpoint``, belongs to that one.
    """

    def __init__(self):
        self.exchanges = []
        self.early = None  # the exchange whose buckets may leave before the end

    @classmethod
    def join(cls, exchange):
        """Have an exchange run at the end of the pass, and tell it whether it may send before.

        No frame that an error goes through, and which the error keeps, may hold a pass.
        """
        found = next(iter(_under_way), None)
        if found is None:
            found = cls()
            torch.autograd.Variable._execution_engine.queue_callback(found)
            _under_way.add(found)
        if exchange not in found.exchanges:
            exchange.begin()
            found.exchanges.append(exchange)
            if found.early is None and exchange.may_be_early():
                found.early = exchange
        exchange.task = torch._C._current_graph_task_id()
        exchange.is_early = found.early is exchange

    def __call__(self):
        """Of several models all ranks run theirs in the same order."""
        _under_way.discard(self)
        for exchange in sorted(self.exchanges, key=lambda e: (e is not self.early, e.number)):
            exchange.run()


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


class Exchange:
    """What one model exchanges. ``source`` tells what belongs to it, as ``Ranked`` does."""

    _numbers = itertools.count()
    _all = weakref.WeakSet()  # type: weakref.WeakSet

    def __init__(self, engine, source, model):
        weak = torch.utils.weak
        self.engine, self.source, self.model = engine, source, weakref.ref(model)
        self.weights = None  # how many were made the same
        self.number = next(self._numbers)
        self._all.add(self)
        self.hooks = weak.WeakIdKeyDictionary()  # parameter -> what removes its hook
        self.hooked = []  # type: list  # the parameters that were looked at last
        self.settled = False  # whether the last forward pass began with these
        self.sums = None
        self.sends_early = True
        self.task, self.is_early = None, False  # the graph task that was joined last
        self.state = []  # type: list  # the running statistics
        self.before = []  # type: list  # their values, the same on all ranks
        self.checked = False  # the loss
        self.is_suspect = False  # the loss, as a warning told
        self.rows = ForwardRows()
        self.divisor = None  # what the loss of this pass was divided by, if not by rows
        self.count = 0  # exchanges so far
        self.versions = None  # of the parameters, at the last forward pass
        self.has_exchanged = True  # since then
        self.missed = 0  # updates with no exchange in between
        self.agreed = False  # whether ranks have said their rows in front of the step
        self.warned = set()  # type: set  # of which variables, and of what else

    def watch(self, parameters):
        """Before a forward pass: hook these parameters, and note the running statistics."""
        self.settled = are_same(parameters, self.hooked)
        if not self.settled:
            self.hook(parameters)
            self.note(self.source.averaged(self.model()), lambda tensor: tensor.detach().clone())

    def hook(self, parameters):
        """Hook the parameters that have no hook yet."""
        reference = weakref.ref(self)

        def arrived(parameter):
            exchange = reference()
            if exchange is not None and not exchange.source.is_alone:
                with _arriving:
                    exchange.arrived(parameter)

        for parameter in parameters:
            if parameter not in self.hooks and parameter.is_leaf:
                self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(arrived)
        self.hooked = parameters

    def note(self, state, value):
        """Make these the running statistics. ``value`` gives what new ones had before."""
        if not are_same(state, self.state):
            known = dict(zip(map(id, self.state), self.before))
            self.before = [known[id(t)] if id(t) in known else value(t) for t in state]
            self.state = state

    # One backward pass ------------------------------------------------------------------------

    def begin(self):
        """Autograd has come to the first of the parameters."""
        model = self.model()
        if model is not None:
            # Keras' losses are divided where they are computed.
            self.divisor = None if self.rows.step is not None else loss_terms.current().targets()
            if not self.settled:  # such as those that a forward pass has made
                self.hook(self.source.parameters(model))
            # A new one was put in a former one's place.
            self.note(self.source.averaged(model), torch.zeros_like)
            self.lay_out(self.state)

    def lay_out(self, state):
        """The same on all ranks: what is summed up, last layer first, since that comes first."""
        tensors = self.hooked[::-1] + state
        numbers = 5 + self.engine.place.size + len(self.hooked)
        sums = self.sums
        if sums is None or sums.numbers != numbers or not are_same(tensors, sums.tensors):
            self.sums = Sums(self.engine, tensors, numbers)

    def may_be_early(self):
        """Whether no other model, as far as is known, comes before this one in a pass.

        That models are called in one order on all ranks is what all that they exchange rests on.
        """
        return self.rows.are_awaited() and not any(
            other.number < self.number and other.rows.are_awaited() for other in self._all
        )

    def arrived(self, parameter):
        """Autograd has added to the gradient of a parameter for the last time in this pass."""
        if torch._C._current_graph_task_id() != self.task:  # of the first parameter
            _Pass.join(self)
        if not self.is_early or not self.sends_early or id(parameter) not in self.sums.leaving:
            return
        weight = self.rows.known() if self.divisor is None else self.divisor
        gradient = parameter.grad
        if not weight or gradient is None or gradient.is_sparse:
            return
        # A hook of the script's may change it by ``data``, which does not show.
        if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) <= 1:
            self.sums.put(parameter, gradient, weight)

    def run(self):
        """Make the gradients, and the running statistics, the mean over all ranks' rows."""
        model = self.model()
        if model is None:
            return
        name, rows, self.settled = type(model).__name__, self.rows.in_backward(), False
        # What this pass counts among those of all ranks; where that is not known all count alike.
        weight = rows if self.divisor is None else self.divisor
        unknown, weight = weight is None, 1 if weight is None else weight
        with torch.no_grad():
            self.sum(weight, unknown, weight if rows is None else rows)
            self.engine.last = None if self.agreed else self
            if not self.agreed:
                self.engine.stepped(self.sums.ended)
            self.check(name)
            self.set_gradients()
            check = checksum.is_due(self.count)
            if check and not self.is_suspect:
                self.is_suspect = loss_terms.check(self.engine, name, weight, rows)
            if check and self.engine.place.rank == 0:
                self.warn_of_means(model)
            if self.state:
                torch._foreach_add_(self.before, [self.mean(tensor) for tensor in self.state])
                torch._foreach_copy_(self.state, self.before)
        if check:
            self.verify(self.count or "before the first update")
        self.count += 1
        self.has_exchanged = True

    def sum(self, weight, unknown, rows):
        """Sum up over all ranks."""
        gradients = [parameter.grad for parameter in self.hooked]
        sparse = any(gradient.is_sparse for gradient in gradients if gradient is not None)
        header = [weight, unknown, rows, self.divisor is not None, sparse]
        header += self.engine.flags(False) + [gradient is not None for gradient in gradients]
        values = {}
        if weight and not sparse:
            values = {id(p): (gradient, weight) for p, gradient in zip(self.hooked, gradients)}
        if self.state:
            changes = torch._foreach_sub(self.state, self.before)
            values.update((id(tensor), (each, rows)) for tensor, each in zip(self.state, changes))
        if self.sums.complete(header, values):
            # Not a second time: such as where a script changes gradients during the pass.
            self.sends_early = False

    def close(self):
        """Take part in the exchange in which others may be, as a rank with no more batches.

        Returns:
            The ranks that have no more batches either.
        """
        model = self.model()
        self.hook(self.source.parameters(model))
        self.lay_out(self.source.averaged(model))
        header = [0, False, 0, False, False] + self.engine.flags(True)
        header += [False] * len(self.hooked)
        with torch.no_grad():
            self.sums.complete(header, {})
        return self.sums.ended

    def mean(self, tensor):
        """The mean of the changes of a running statistic, weighted by rows in any case."""
        return self.sums.mean(tensor) * (self.sums.total / self.sums.rows)

    def set_gradients(self):
        """Those that no rank has stay None."""
        for parameter, used in zip(self.hooked, self.sums.used):
            if used and parameter.grad is None:  # another rank's batch has used it
                parameter.grad = self.sums.mean(parameter)
            elif used:
                self.sums.mean_into(parameter, parameter.grad)

    def check(self, name):
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
        if unknown and ("rows",) not in self.warned and place.rank == 0:
            self.warned.add(("rows",))
            errors.warn(
                f"A backward pass reached the parameters of {name}, but no call of the model in "
                "which rows of a batch are seen. So all ranks count alike, which is one process's "
                "gradient where all have the same number of rows. Call the model itself with a "
                "batch of tensors."
            )

    def warn_of_means(self, model):
        """Tell, once, of variables of the user's that are now means of different values."""
        before = dict(zip(map(id, self.state), self.before))
        for variable, tensor in self.source.averaged_by_users(model):
            mine, mean = tensor - before[id(tensor)], self.mean(tensor)
            same = torch.allclose(mine, mean, rtol=1e-4, atol=1e-6, equal_nan=True)
            if not same and variable.path not in self.warned:
                self.warned.add(variable.path)
                weights.warn_of_mean(variable)

    # The same weights -------------------------------------------------------------------------

    def verify(self, when):
        """Compare the model's variables on all ranks. See ``_ranks.checksum.verify``."""
        for named, *causes in self.source.verified(self.model()):
            if named or not causes:  # another rank's model may have variables: that is an error
                self.compare(named, when, *causes)

    def compare(self, named, when, *causes):
        tensors = [tensor for _, tensor in named]

        def write(place, value):
            with torch.no_grad():
                tensors[place].copy_(torch.as_tensor(value))

        names, arrays = [name for name, _ in named], [to_numpy(tensor) for tensor in tensors]
        checksum.verify(self.engine, names, arrays, write, when, *causes)

    def look(self, parameters):
        """Compare the weights where they were updated, in place, without an exchange.

        Every rank sees that in the same place of the program, or its weights do differ.
        """
        versions = [parameter._version for parameter in parameters]
        if versions == self.versions:
            return
        is_missed = self.versions is not None and not self.has_exchanged
        self.versions, self.has_exchanged = versions, False
        if is_missed:
            self.missed += 1
            if checksum.is_due(self.missed):
                self.verify(self.missed)
