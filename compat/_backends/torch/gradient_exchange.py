"""What ranks of torch exchange: gradients and running statistics, once for each backward pass.

As in ``DistributedDataParallel`` hooks on the parameters tell that autograd has reached them,
whatever called the model. When the pass has ended, each rank sends its gradients times its rows,
and beside them its rows and whether it has more batches, in one all-reduce for each type of
number; what comes back is divided by all ranks' rows. Nothing is agreed upon before, so that a
bucket of gradients could be sent while others are still computed.

A gradient that was exchanged already is the same on all ranks, and so is its mean: gradients may
be accumulated over several passes.
"""

import itertools
import sys
import weakref

from ... import errors
from ..._ranks import checksum
from .sums import Sums, sum_dtype
from .tensors import are_same, copy_all, tensors_in, to_numpy

# Why buffers of torch modules differ.
_BUFFERS = (
    "Each rank computes this buffer from its own rows; of such buffers only the running "
    "statistics of torch's own normalization are averaged over ranks. Sum or average it in "
    "forward() by torch.distributed.all_reduce(), or, if it is each rank's own, register it with "
    "persistent=False."
)

_queued = {}  # type: dict  # graph task of autograd -> the exchanges to run when it has ended


def _run_after_backward(exchange):
    """Run an exchange when the backward pass that goes on has ended.

    Of several models all ranks run theirs in the same order.
    """
    torch = sys.modules["torch"]
    task = torch._C._current_graph_task_id()
    if task not in _queued:
        _queued[task] = set()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _run_queued(task))
    _queued[task].add(exchange)


def _run_queued(task):
    for exchange in sorted(_queued.pop(task), key=lambda exchange: exchange.number):
        exchange.run()


class Exchange:
    """What one model exchanges. ``source`` tells what belongs to it, as ``Ranked`` does."""

    _numbers = itertools.count()

    def __init__(self, engine, source, model):
        weak = sys.modules["torch"].utils.weak
        self.engine = engine
        self.source = source
        self.model = weakref.ref(model)
        self.number = next(self._numbers)
        self.hooks = weak.WeakIdKeyDictionary()  # parameter -> what removes its hook
        self.hooked = []  # type: list  # the parameters that were looked at last
        self.state = []  # type: list  # the running statistics
        self.before = []  # type: list  # their values, the same on all ranks
        self.sparse = weak.WeakIdKeyDictionary()  # the parameters whose gradients are sparse
        self.means = weak.WeakIdKeyDictionary()  # those that a warning told of
        self.checked = False  # the loss
        self.declares = None  # whether modules within say which dimension has the rows
        self.rows = Rows()
        self.count = 0  # exchanges so far
        self.updates = Updates()
        self.agreed = False  # whether ranks have said their rows in front of the step
        self.warned = False

    def watch(self, parameters):
        """Before a forward pass: hook these parameters, and note the running statistics."""
        if self.hook(parameters):
            self.note(self.source.averaged(self.model()), lambda tensor: tensor.detach().clone())

    def hook(self, parameters):
        """Hook the parameters that have no hook yet. Returns whether they are other ones."""
        if self.is_hooked(parameters):
            return False
        reference = weakref.ref(self)

        def arrived(*ignored):
            exchange = reference()
            if exchange is not None:
                _run_after_backward(exchange)

        for parameter in parameters:
            if parameter not in self.hooks and parameter.is_leaf:
                self.hooks[parameter] = _hook(parameter, arrived)
        self.hooked = parameters
        return True

    def is_hooked(self, parameters):
        return are_same(parameters, self.hooked)

    def note(self, state, value):
        """Make these the running statistics. ``value`` gives what new ones had before."""
        if not are_same(state, self.state):
            known = {id(tensor): before for tensor, before in zip(self.state, self.before)}
            self.before = [known[id(t)] if id(t) in known else value(t) for t in state]
            self.state = state

    # One backward pass ------------------------------------------------------------------------

    def run(self):
        """Make the gradients, and the running statistics, the mean over all ranks' rows."""
        model = self.model()
        if model is None:
            return
        torch = sys.modules["torch"]
        rows = self.rows.in_backward()
        parameters = self.source.parameters(model)
        self.hook(parameters)
        with torch.no_grad():
            # A new one was put in a former one's place.
            self.note(self.source.averaged(model), torch.zeros_like)
            sums = self.sum(parameters, rows)
            self.engine.last = None if self.agreed else self
            if not self.agreed:
                self.engine.stepped(sums.ended)
            self.check_rows(rows, sums.unknown)
            self.set_gradients(parameters, sums)
            check = checksum.is_due(self.count)
            if check and self.engine.place.rank == 0:
                self.warn_of_means(sums)
            if self.state:
                means = [sums.means[id(tensor)].to(tensor.dtype) for tensor in self.state]
                torch._foreach_add_(self.before, means)
                copy_all(self.state, self.before)
        if check:
            self.verify(self.count or "before the first update")
        self.count += 1
        self.updates.exchanged()

    def sum(self, parameters, rows):
        """The sums over all ranks; ``rows`` is None where they are not known."""
        torch = sys.modules["torch"]
        gradients = [parameter.grad for parameter in parameters]
        sparse = [gradient is not None and gradient.is_sparse for gradient in gradients]
        weight = 1 if rows is None else rows
        header = [weight, rows is None] + self.engine.flags(False)
        header += [gradient is not None for gradient in gradients] + sparse
        values = [
            (parameter, None if sparse else gradient)
            for parameter, gradient, sparse in zip(parameters, gradients, sparse)
            if not self.sparse or parameter not in self.sparse
        ]
        if self.state:
            values += list(zip(self.state, torch._foreach_sub(self.state, self.before)))
        sums = Sums(self.engine, header, values, weight)
        for parameter, sparse in zip(parameters, sums.sparse):
            if sparse:
                self.sparse[parameter] = True
        return sums

    def close(self):
        """Take part in the exchange in which others may be, as a rank with no more batches.

        Returns:
            The ranks that have no more batches either.
        """
        model = self.model()
        parameters, averaged = self.source.parameters(model), self.source.averaged(model)
        header = [0, False] + self.engine.flags(True) + [False] * (2 * len(parameters))
        values = [(p, None) for p in parameters if p not in self.sparse]
        with sys.modules["torch"].no_grad():
            return Sums(self.engine, header, values + [(t, None) for t in averaged], 0).ended

    def set_gradients(self, parameters, sums):
        """Those that no rank has stay None."""
        present, means = [], []
        for parameter, used, sparse in zip(parameters, sums.used, sums.sparse):
            if sparse:
                self.exchange_sparse(parameter, sums, used != sparse)
            elif used and parameter.grad is None:  # another rank's batch has used it
                parameter.grad = sums.means[id(parameter)].to(parameter.dtype, copy=True)
            elif used:
                present.append(parameter.grad)
                means.append(sums.means[id(parameter)])
        copy_all(present, means)

    def exchange_sparse(self, parameter, sums, mixed):
        """The mean of a sparse gradient: every rank gets all ranks' indices and values."""
        torch = sys.modules["torch"]
        if mixed:
            raise errors.UnsupportedError(
                "The gradient of a parameter of shape {} is sparse on some ranks or in some passes "
                "and dense in others, which cannot be exchanged. Make it one of both: sparse=False "
                "of the embedding.".format(tuple(parameter.shape))
            )
        gradient = parameter.grad
        if gradient is None or not sums.weight:
            empty = torch.Size([0]) + parameter.shape[1:]
            indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
            values = torch.zeros(empty, dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = gradient.coalesce()
            indices, values = gradient.indices(), gradient.values()
        dtype = sum_dtype(values.dtype)
        indices = self.engine.concatenate(indices.t().contiguous()).t()
        values = self.engine.concatenate(values.to(dtype) * sums.weight) / sums.total
        parameter.grad = torch.sparse_coo_tensor(
            indices, values.to(parameter.dtype), parameter.shape
        ).coalesce()

    def check_rows(self, rows, unknown):
        if rows is None and unknown == self.engine.place.size and not self.warned:
            self.warned = True
            if self.engine.place.rank == 0:
                errors.warn(
                    "A backward pass reached the parameters of {}, but no call of the model in "
                    "which rows of a batch are seen. So all ranks count alike, which is one "
                    "process's gradient where all have the same number of rows. Call the model "
                    "itself with a batch of tensors.".format(type(self.model()).__name__)
                )
        elif 0 < unknown < self.engine.place.size:
            raise errors.RankError(
                "Some ranks have called {} with a batch in this backward pass, and others have "
                "not, so that their gradients cannot be weighted by rows. Have all ranks do the "
                "same.".format(type(self.model()).__name__)
            )

    def warn_of_means(self, sums):
        """Have the source warn, once, of variables that are now means of different values."""

        torch = sys.modules["torch"]
        before = {id(tensor): value for tensor, value in zip(self.state, self.before)}

        def differ(tensor):
            mine, mean = tensor - before[id(tensor)], sums.means[id(tensor)].to(tensor.dtype)
            same = tensor in self.means or torch.allclose(mine, mean, 1e-4, 1e-6, True)
            if not same:
                self.means[tensor] = True
            return not same

        self.source.warn_of_means(self.model(), differ)

    # The same weights -------------------------------------------------------------------------

    def verify(self, when):
        """Compare the model's variables on all ranks. See ``_ranks.checksum.verify``."""
        model = self.model()
        self.compare(self.source.verified(model), when)
        state = self.source.verified_state(model)
        if state:
            self.compare(state, when, _BUFFERS)

    def compare(self, named, when, *causes):
        torch = sys.modules["torch"]
        tensors = [tensor for _, tensor in named]

        def write(place, value):
            with torch.no_grad():
                tensors[place].copy_(torch.as_tensor(value))

        names, arrays = [name for name, _ in named], [to_numpy(tensor) for tensor in tensors]
        checksum.verify(self.engine, names, arrays, write, when, *causes)

    def look(self, parameters):
        """Compare the weights where they were updated without an exchange.

        Every rank sees that in the same place of the program, or its weights do differ.
        """
        count = self.updates.without_exchange(parameters)
        if count and checksum.is_due(count):
            self.verify(count)


class Updates:
    """How often weights were updated, in place, with no backward pass in between."""

    def __init__(self):
        self.versions = None
        self.has_exchanged = True
        self.count = 0

    def exchanged(self):
        self.has_exchanged = True

    def without_exchange(self, parameters):
        """How many such updates there were if this call sees one more, else 0."""
        versions = [parameter._version for parameter in parameters]
        if versions == self.versions:
            return 0
        missed = self.versions is not None and not self.has_exchanged
        self.versions, self.has_exchanged = versions, False
        self.count += missed
        return self.count if missed else 0


class Rows:
    """The rows of the forward passes that a backward pass goes back through."""

    def __init__(self):
        self.reached = {}  # forward pass -> its rows; autograd has come to its outputs
        self.others = None  # rows of those in whose outputs no tensor was found
        self.used = False
        self.step = None  # the rows of a step of Keras', which may call the model in any way

    def forward(self, rows, outputs):
        """Note a forward pass of so many rows."""
        if self.used:
            self.reached, self.others, self.used = {}, None, False
        key, reached = object(), self.reached

        def reach(gradient):
            reached[key] = rows

        found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in found:
            tensor.register_hook(reach)
        if not found:
            self.others = (self.others or 0) + rows

    def in_backward(self):
        """The rows of the pass that has ended, or None."""
        self.used = True
        if self.step is not None:
            return self.step
        return sum(self.reached.values()) if self.reached else self.others


def _hook(parameter, function):
    """Have the function called when a backward pass has added to the parameter's gradient."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(function)
    accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # torch 2.0
    accumulate.register_hook(function)
    return accumulate  # which lives as long as it is held
