"""What ranks of torch exchange: gradients and running statistics, once for each backward pass.

As in ``DistributedDataParallel`` hooks on the parameters tell that autograd has reached them,
whatever called the model. Each rank sends its gradients times its rows, in buckets that leave while
others are still computed, and with the last of them its rows and whether it has more batches; what
comes back is divided by all ranks' rows. Nothing is agreed upon before.

A bucket leaves early where the rows of the pass are known by then: autograd has come to the outputs
of each forward pass since the last exchange. Otherwise all leave at the end.

Which tensors are in which bucket, and the order of the buckets, are the same on all ranks, so that
each all-reduce finds its counterparts, whatever a rank's batch has used. A header goes with the
last bucket: what the ranks have to know of each other. It tells, too, which buckets were sent
before a tensor in them had its last value; these are sent again.

A gradient that was exchanged already is the same on all ranks, and so is its mean: gradients may
be accumulated over several passes.
"""

import itertools
import threading
import weakref

import torch

from ... import errors
from ..._ranks import checksum, engines
from ..._runtime import patching
from .backward_passes import PASS_HOOK, ForwardRows, Pass, check_loss, loss_under_way, missed_hooks
from .batches import are_same

# What tells that a gradient is there.
_HOOK = "Parameter.register_post_accumulate_grad_hook"
# Autograd has a thread for each device, and one for the CPU.
_arriving = threading.RLock()


class Exchange:
    """What one model exchanges. ``source`` tells what belongs to it, as ``Ranked`` does."""

    _numbers = itertools.count()
    _all = weakref.WeakSet()  # type: weakref.WeakSet

    def __init__(self, engine, source, model):
        self.engine, self.source, self.model = engine, source, weakref.ref(model)
        self.weights = None  # how many were made the same
        self.number = next(self._numbers)
        self._all.add(self)
        self.hooks = torch.utils.weak.WeakIdKeyDictionary()  # parameter -> what removes its hook
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
                hook = patching.Callback(_HOOK, arrived)
                self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self.hooked = parameters

    def missed_hook(self, task):
        """Return the name of what did not call, where no pass has exchanged since this task."""
        return _HOOK if self.task == task else PASS_HOOK

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
            self.divisor = None if self.rows.step is not None else loss_under_way().targets()
            if not self.settled:  # such as those that a forward pass has made
                self.hook(self.source.parameters(model))
            # A new one was put in a former one's place.
            self.note(self.source.averaged(model), torch.zeros_like)
            self.lay_out(self.state)

    def lay_out(self, state):
        """The same on all ranks: what is summed up, last layer first, since that comes first."""
        tensors, count, sums = self.hooked[::-1] + state, len(self.hooked), self.sums
        if sums is None or sums.count != count or not are_same(tensors, sums.tensors):
            self.sums = Sums(self.engine, tensors, count)

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
            Pass.join(self)
        if not self.is_early or not self.sends_early:
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
        name, rows = type(model).__name__, self.rows.total()
        self.rows.used, self.settled = True, False
        # What this pass counts among those of all ranks; where that is not known all count alike.
        weight = rows if self.divisor is None else self.divisor
        unknown, weight = weight is None, 1 if weight is None else weight
        with torch.no_grad():
            self.sum(weight, unknown, weight if rows is None else rows)
            self.engine.count("gradients")
            self.engine.last = None if self.agreed else self
            if not self.agreed:
                self.engine.stepped(self.sums.ended)
            self.check(name)
            for hook in missed_hooks():
                self.source.note_unreached(model, hook)
            for parameter, used in zip(self.hooked, self.sums.used):
                if used and parameter.grad is None:  # another rank's batch has used it
                    parameter.grad = self.sums.write_mean(parameter, torch.empty_like(parameter))
                elif used:
                    self.sums.write_mean(parameter, parameter.grad)
            check = checksum.is_due(self.count)
            if check and not self.is_suspect:
                self.is_suspect = check_loss(self.engine, name, weight, rows)
            if check and self.engine.place.rank == 0:
                self.source.warn_of_means(model, self)
            if self.state:
                torch._foreach_add_(self.before, [self.mean(tensor) for tensor in self.state])
                torch._foreach_copy_(self.state, self.before)
        if check:
            self.source.verify(model, self.count or "before the first update")
        self.count += 1
        self.has_exchanged = True

    def sum(self, weight, unknown, rows):
        """Sum up over all ranks."""
        gradients = [parameter.grad for parameter in self.hooked]
        used = [gradient is not None for gradient in gradients]
        sparse = any(gradient.is_sparse for gradient in gradients if gradient is not None)
        values = {}
        if weight and not sparse:
            values = {id(p): (gradient, weight) for p, gradient in zip(self.hooked, gradients)}
        if self.state:
            changes = torch._foreach_sub(self.state, self.before)
            values.update((id(tensor), (each, rows)) for tensor, each in zip(self.state, changes))
        told = [weight, unknown, rows, self.divisor is not None, sparse]
        if self.sums.complete(told, False, used, values):
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
        with torch.no_grad():
            self.sums.complete([0] * 5, True, [False] * len(self.hooked), {})
        return self.sums.ended

    def mean(self, tensor):
        """The mean of the changes of a running statistic, weighted by rows in any case."""
        mean = self.sums.write_mean(tensor, torch.empty_like(tensor))
        return mean * (self.sums.total / self.sums.rows)

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


# Sums, in buckets of memory that is kept from pass to pass ----------------------------------------

#: What is held of a tensor that has no value, and its weight.
ABSENT = None, 0


class Sums:
    """The sums of a header and of tensors, which the sum of the weights divides.

    Arguments:
        tensors: in the order in which their values are expected.
        count: how many of them are parameters.

    Attributes, of what was summed up last:
        total: of the weights; ``unknown``, ``rows``, ``divided`` and ``sparse`` of what goes with
            these.
        ended: the ranks that have no more batches.
        used: for each parameter, how many ranks have a gradient.
    """

    def __init__(self, engine, tensors, count):
        self.engine, self.tensors, self.count = engine, tensors, count
        *groups, last = engines.buckets(map(_item, tensors)) or [((torch.float32, "cpu"), [])]
        self.buckets = [_Bucket(*group) for group in groups]
        header = 5 + engine.place.size + count + len(groups) + 1
        self.buckets.append(_Bucket(*last, front=header))
        # By the ids of the tensors.
        self.bucket_of = {key: bucket for bucket in self.buckets for key in bucket.views}

    def put(self, tensor, value, weight):
        """Write what is summed up in a tensor's place while it is in the cache; send what is full.

        But for the last bucket, which has the header: what a script does to gradients by ``data``
        until the end of the pass counts, and does not show.
        """
        bucket, others = self.bucket_of.get(id(tensor)), self.buckets[:-1]
        if bucket not in others or bucket.work is not None:
            return
        bucket.write(id(tensor), value, weight)
        for each in others:  # in their order
            if each.work is None and len(each.written) < len(each.views):
                break
            self._send(each)

    def complete(self, told, ended, used, values):
        """Sum up the header and all values; afterwards ``write_mean`` has the means.

        Arguments:
            told: the weight, whether it is unknown, rows, whether they are not the weight, and
                whether a gradient is sparse.
            ended: whether this rank has no more batches.
            used: of each parameter, whether it has a gradient.
            values: by the ids of the tensors, each with its weight; zeros in the place of what is
                not there, or None.

        Returns:
            Whether a value was sent too early on this rank.
        """
        early = []
        for bucket in self.buckets:
            keys = [k for k in bucket.views if not bucket.has(k, *values.get(k, ABSENT))]
            early.append(bucket.work is not None and bool(keys))
            if bucket.work is None:
                bucket.write_all(keys, values)
        front = self.buckets[-1].front
        header = told + self.engine.flags(ended) + used + early
        front.copy_(torch.tensor(header, dtype=front.dtype))
        for bucket in self.buckets:
            self._send(bucket)
        for bucket in self.buckets:
            self.engine.end_sum(bucket.work)
        sums = iter(front.tolist())
        self.total, self.unknown, self.rows, self.divided, self.sparse = itertools.islice(sums, 5)
        flags = itertools.islice(sums, self.engine.place.size)
        self.ended = [rank for rank, flag in enumerate(flags) if flag]
        self.used = list(itertools.islice(sums, self.count))
        for bucket, again in zip(self.buckets, sums):
            if again and not self.ended:
                bucket.write_all(bucket.views, values)
                self.engine.end_sum(self.engine.begin_sum(bucket.flat))
            bucket.clear()
        return any(early)

    def _send(self, bucket):
        """Send it, unless it is on its way."""
        bucket.work = bucket.work or self.engine.begin_sum(bucket.flat)

    def write_mean(self, tensor, result):
        """Write the mean of what was summed up for a tensor into another one, which is returned."""
        factor = 1 / self.total if self.total else float("nan")
        torch.mul(self.bucket_of[id(tensor)].views[id(tensor)], factor, out=_real(result))
        return result


class _Bucket:
    """Tensors of one type of number and device, which are sent together."""

    def __init__(self, kind, tensors, front=0):
        dtype, device = kind
        shapes = [_real(tensor.detach()).shape for tensor in tensors]
        counts = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(front + sum(counts), dtype=dtype, device=device)
        self.front = self.flat[:front]
        parts = zip(tensors, shapes, self.flat[front:].split(counts))
        # By the ids of the tensors, as are values that were written, their weights and versions.
        self.views = {id(tensor): part.view(shape) for tensor, shape, part in parts}
        self.clear()

    def clear(self):
        self.work, self.written = None, {}  # work: its all-reduce, which has begun

    def write_all(self, keys, values):
        for key in keys:
            self.write(key, *values.get(key, ABSENT))

    def write(self, key, value, weight):
        """Write a value times its weight, in one pass over the memory."""
        self.written[key] = value, weight, getattr(value, "_version", None)
        if value is None:
            self.views[key].zero_()
        else:
            value = value.detach() if value.requires_grad else value  # under create_graph=True
            torch.mul(_real(value).to(self.flat.dtype), weight, out=self.views[key])

    def has(self, key, value, weight):
        """Whether this was written, as it is now."""
        written, *others = self.written.get(key, (self, 0, None))
        return written is value and others == [weight, getattr(value, "_version", None)]


def _item(tensor):
    """As ``engines.buckets`` takes it: a bucket is of one type of number and device."""
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    dtype = torch.float64 if is_double else torch.float32
    size = _real(tensor.detach()).numel() * (8 if is_double else 4)
    return (dtype, tensor.device), size, tensor


def _real(tensor):
    """A tensor of real numbers, two for each complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
