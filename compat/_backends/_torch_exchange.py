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
import operator
import sys
import warnings
import weakref

from .. import _checksum, errors

# Why buffers of torch modules differ.
_BUFFERS = (
    "Each rank computes this buffer from its own rows; of such buffers only the running "
    "statistics of torch's own normalization are averaged over ranks. Sum or average it in "
    "forward() by torch.distributed.all_reduce(), or, if it is each rank's own, register it with "
    "persistent=False."
)
# How deep tensors are looked for in the attributes of objects.
_DEPTH = 3


class Backward:
    """Has the models' exchanges run when a backward pass ends, on all ranks in the same order."""

    def __init__(self):
        self.waiting = {}  # graph task -> exchanges

    def queue(self, exchange):
        torch = sys.modules["torch"]
        task = torch._C._current_graph_task_id()
        if task not in self.waiting:
            self.waiting[task] = set()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.run(task))
        self.waiting[task].add(exchange)

    def run(self, task):
        for exchange in sorted(self.waiting.pop(task), key=lambda exchange: exchange.number):
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
                exchange.engine.backward.queue(exchange)

        for parameter in parameters:
            if parameter not in self.hooks and parameter.is_leaf:
                self.hooks[parameter] = _hook(parameter, arrived)
        self.hooked = parameters
        return True

    def is_hooked(self, parameters):
        return _are(parameters, self.hooked)

    def note(self, state, value):
        """Make these the running statistics. ``value`` gives what new ones had before."""
        if not _are(state, self.state):
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
            check = _checksum.is_due(self.count)
            if check and self.engine.ranks.rank == 0:
                self.warn_of_means(sums)
            if self.state:
                means = [sums.means[id(tensor)].to(tensor.dtype) for tensor in self.state]
                torch._foreach_add_(self.before, means)
                _copy(self.state, self.before)
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
        _copy(present, means)

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
        dtype = _summed(values.dtype)
        indices = self.engine.concatenate(indices.t().contiguous()).t()
        values = self.engine.concatenate(values.to(dtype) * sums.weight) / sums.total
        parameter.grad = torch.sparse_coo_tensor(
            indices, values.to(parameter.dtype), parameter.shape
        ).coalesce()

    def check_rows(self, rows, unknown):
        if rows is None and unknown == self.engine.ranks.size and not self.warned:
            self.warned = True
            if self.engine.ranks.rank == 0:
                warnings.warn(
                    "A backward pass reached the parameters of {}, but no call of the model in "
                    "which rows of a batch are seen. So all ranks count alike, which is one "
                    "process's gradient where all have the same number of rows. Call the model "
                    "itself with a batch of tensors.".format(type(self.model()).__name__),
                    errors.CompatWarning,
                    stacklevel=2,
                )
        elif 0 < unknown < self.engine.ranks.size:
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
        """Compare the model's variables on all ranks. See ``_checksum.verify``."""
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

        names, arrays = [name for name, _ in named], [_array(tensor) for tensor in tensors]
        _checksum.verify(self.engine, names, arrays, write, when, *causes)

    def look(self, parameters):
        """Compare the weights where they were updated without an exchange.

        Every rank sees that in the same place of the program, or its weights do differ.
        """
        count = self.updates.without_exchange(parameters)
        if count and _checksum.is_due(count):
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


class Sums:
    """The sums over all ranks of a header and of tensors, which the rows divide.

    Arguments:
        header: rows, whether they are unknown, each rank's flag, and two numbers for each
            parameter.
        values: pairs of a tensor and what is summed in its place, or None for zeros.
        weight: what the values are multiplied by.
    """

    def __init__(self, engine, header, values, weight):
        torch = sys.modules["torch"]
        self.weight = weight
        self.means = {}  # by the ids of the tensors
        buckets = {}  # type of number and device -> pairs
        for target, value in values:
            key = _summed(target.dtype), target.device
            buckets.setdefault(key, []).append((target, value))
        sums = None
        for (dtype, device), pairs in buckets.items():
            front = torch.tensor(header if sums is None else [], dtype=dtype, device=device)
            parts = [_flat(target, value if weight else None, dtype) for target, value in pairs]
            bucket = torch.cat([front] + parts)
            numbers = bucket[len(front) :]
            numbers *= weight
            engine.sum_tensor(bucket)
            if sums is None:
                sums = front.copy_(bucket[: len(front)]).tolist()
            numbers /= sums[0]
            for (target, _), mean in zip(pairs, numbers.split([len(part) for part in parts])):
                self.means[id(target)] = _shaped(mean, target)
        self.total, self.unknown = sums[:2]
        flags, rest = sums[2 : 2 + engine.ranks.size], sums[2 + engine.ranks.size :]
        self.ended = [rank for rank, flag in enumerate(flags) if flag]
        self.used, self.sparse = rest[: len(rest) // 2], rest[len(rest) // 2 :]


def _summed(dtype):
    """The type of number in which tensors of a type are summed up."""
    torch = sys.modules["torch"]
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _flat(target, value, dtype):
    """The numbers of a tensor in a row; zeros where there is no tensor."""
    torch = sys.modules["torch"]
    if value is None:
        count = target.numel() * (2 if target.is_complex() else 1)
        return torch.zeros(count, dtype=dtype, device=target.device)
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.reshape(-1).to(dtype)


def _shaped(flat, target):
    if target.is_complex():
        # A copy: the numbers may begin at an odd place.
        return sys.modules["torch"].view_as_complex(flat.clone().view(target.shape + (2,)))
    return flat.view(target.shape)


def _are(tensors, others):
    """Whether these are the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def _copy(targets, values):
    if not targets:
        return
    together = getattr(sys.modules["torch"], "_foreach_copy_", None)  # since torch 2.1
    if together is not None:
        together(targets, values)
    else:
        for target, value in zip(targets, values):
            target.copy_(value)


def _hook(parameter, function):
    """Have the function called when a backward pass has added to the parameter's gradient."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(function)
    accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # torch 2.0
    accumulate.register_hook(function)
    return accumulate  # which lives as long as it is held


def _array(tensor):
    tensor = tensor.detach().cpu()
    torch = sys.modules["torch"]
    # numpy has no bfloat16, nor floats of 8 bits; float32 has all their values.
    known = tensor.dtype in (torch.float64, torch.float32, torch.float16) or not (
        tensor.is_floating_point()
    )
    return (tensor if known else tensor.float()).resolve_conj().numpy()


def first_batch(arguments):
    """The first tensor in a call's arguments that has rows, or packed sequences, or None."""
    torch = sys.modules["torch"]
    packed = torch.nn.utils.rnn.PackedSequence
    leaves = torch.utils._pytree.tree_leaves(arguments, is_leaf=lambda v: isinstance(v, packed))
    for leaf in leaves:
        if isinstance(leaf, packed):
            return leaf
        tensor = next((tensor for tensor in tensors_in(leaf) if tensor.dim()), None)
        if tensor is not None:
            return tensor
    return None


def tensors_in(value, depth=_DEPTH):
    """The tensors in nested tuples, lists, dictionaries, and attributes of other objects."""
    torch = sys.modules["torch"]
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (str, bytes, int, float, type, torch.nn.Module)):
            parts = getattr(leaf, "__dict__", None) or {
                name: getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())
            }
            if hasattr(leaf, "keys") and hasattr(leaf, "__getitem__"):  # a mapping of its own kind
                parts = {key: leaf[key] for key in leaf.keys()}
            yield from tensors_in(list(parts.values()), depth - 1)
