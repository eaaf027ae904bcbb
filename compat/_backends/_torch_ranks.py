"""torch as one of several ranks: torch.distributed carries the gradients.

torch's own ``DistributedDataParallel`` wraps the model in another one and weights all ranks
alike. Here the model stays itself: its ``call`` or ``forward`` notes how many rows it was given,
and when autograd has finished a backward pass, the gradients of all ranks become their mean
weighted by those rows, in one all-reduce.
"""

import atexit
import datetime
import os
import re
import sys
import time

from .. import _engine, _keras, _keras_ranks, _ranks, errors


class TorchDistributed(_engine.Engine):
    """The process group of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, ranks):
        import torch.distributed as distributed

        super().__init__(ranks)
        self.distributed = distributed
        self.store = None
        if not distributed.is_initialized():
            meeting = _meeting(ranks)
            self.timeout = _ranks.timeout(os.environ)
            limit = datetime.timedelta(seconds=self.timeout)
            cuda = sys.modules["torch"].cuda.is_available()
            with self.waiting("to start"):
                # Under torchrun the launcher keeps the store, so it outlives every rank.
                self.store, _, _ = next(
                    distributed.rendezvous(meeting, ranks.rank, ranks.size, timeout=limit)
                )
                distributed.init_process_group(
                    "cpu:gloo,cuda:nccl" if cuda else "gloo",
                    store=distributed.PrefixStore("compat", self.store),
                    rank=ranks.rank,
                    world_size=ranks.size,
                    timeout=limit,
                )
            if not cuda:
                # One of gloo's threads that still lets go of a tensor while Python finalizes ends
                # the process: "terminate called without an active exception".
                atexit.register(self._leave)
        self.check_size(distributed.get_world_size())

    def _leave(self):
        """At the end of this process, unless the script has done so."""
        if self.distributed.is_initialized():
            self.distributed.destroy_process_group()

    def sum(self, values):
        torch = sys.modules["torch"]
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).numpy()

    def sum_tensor(self, tensor):
        """The sum of a tensor over all ranks, in its place."""
        with self.waiting("for the others' gradients"):
            self.distributed.all_reduce(tensor)
        return tensor

    def broadcast(self, value):
        box = [value]
        with self.waiting("for rank 0's weights"):
            self.distributed.broadcast_object_list(box, device="cpu")
        return box[0]

    def problem(self, error):
        if not isinstance(error, RuntimeError):  # of gloo, NCCL and the store
            return None
        # "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [...]. This is ..."
        return re.sub(r"^\[\S*\] ", "", str(error)).strip().split("\n")[0].split(". ")[0]

    def absent(self):
        """As far as the store still tells."""
        if self.store is None:
            return []
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        try:
            self.store.set("compat/waits/{}".format(self.ranks.rank), "")
            until = time.monotonic() + 2.0
            while others and time.monotonic() < until:
                time.sleep(0.1)
                others = [r for r in others if not self.store.check(["compat/waits/%d" % r])]
        except RuntimeError:  # the store has gone, too
            return []
        return others


def _meeting(ranks):
    """Where the ranks meet, as torch.distributed takes it."""
    if ranks.launcher == "compat run":
        return "tcp://" + os.environ["COMPAT_MEETING"]
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise errors.no_meeting_point(ranks, "torch.distributed", missing)
    return "env://"


def distribute(model, ranks):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    keras = _keras.keras_of(model)
    if keras is not None and _keras.compiled_with(model).get("jit_compile") is True:
        raise errors.several_devices_in_torch_compile()
    engine = TorchDistributed.join(ranks)
    kind = RankedForward if keras is None else RankedCall
    if kind.of(model) is None:
        kind(engine).install(model)
        if keras is not None:
            _keras_ranks.install(model, engine)
    kind.of(model).start(model)
    return model


# One step -------------------------------------------------------------------------------------


class Ranked(_keras.InstanceMethod):
    """The ``call`` or ``forward`` of a model that trains together with the other ranks."""

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine
        self.weights = None  # how many were made the same on all ranks

    def __call__(self, model, *args, **kwargs):
        torch = sys.modules["torch"]
        tree = torch.utils._pytree
        leaves = tree.tree_leaves((args, kwargs))
        batch = next((leaf for leaf in leaves if getattr(leaf, "shape", None)), None)
        if batch is None or self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        rows = int(batch.shape[0])
        self.count(model, rows)
        if not torch.is_grad_enabled():
            return self.plain(model)(*args, **kwargs)
        self.start(model)
        before = [(tensor, _version(tensor)) for tensor in self.state(model)]
        result = self.plain(model)(*args, **kwargs)
        step = Step(self.engine, self.parameters(model), before, rows)
        for leaf in tree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(step.queue)
        return result

    def start(self, model):
        """Take rank 0's weights, wherever there are other ones than before."""
        weights = self.weights_made(model)
        if weights != self.weights:
            self.weights = weights
            self.same_start(model)


def _version(tensor):
    return tensor._version


class Step:
    """The exchange of one backward pass: gradients, and state that the forward pass has changed."""

    def __init__(self, engine, parameters, before, rows):
        self.engine = engine
        self.parameters = parameters
        self.before = before
        self.rows = rows
        self.queued = False

    def queue(self, gradient):
        """When autograd comes to the model's outputs: run when it has finished."""
        if not self.queued:
            self.queued = True
            sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(self.run)

    def run(self):
        """Make the gradients, and the state, the mean over all ranks' rows."""
        torch = sys.modules["torch"]
        self.queued = False
        share = self.engine.share(self.rows)
        changed = [tensor for tensor, version in self.before if _version(tensor) != version]
        with torch.no_grad():
            values = [parameter.grad for parameter in self.parameters] + changed
            targets = self.parameters + changed
            flat = [_flat(value, target) for value, target in zip(values, targets)]
            mean = self.engine.sum_tensor(torch.cat(flat) * share)
            parts = mean.split([target.numel() for target in targets])
            for parameter, part in zip(self.parameters, parts):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter))
                elif part.any():  # another rank's batch has used it
                    parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)
            for tensor, part in zip(changed, parts[len(self.parameters) :]):
                tensor.copy_(part.view_as(tensor))


def _flat(value, target):
    """The numbers of a tensor in a row, in float32; zeros where there is no tensor."""
    torch = sys.modules["torch"]
    if value is None:
        return torch.zeros(target.numel(), device=target.device)
    return value.detach().reshape(-1).float()


# Keras ----------------------------------------------------------------------------------------


class RankedCall(Ranked):
    """The ``call`` of a Keras model."""

    def is_only_traced(self, model, batch):
        """Keras runs a model on the device "meta" to learn shapes, and in scopes of its own."""
        return getattr(batch, "is_meta", False) or _keras.in_stateless_scope(_keras.keras_of(model))

    def count(self, model, rows):
        _keras_ranks.count(model, rows, sys.modules["torch"].is_grad_enabled())

    def weights_made(self, model):
        return len(model.weights) or None

    def same_start(self, model):
        _keras_ranks.same_start(model, self.engine)

    def parameters(self, model):
        return [variable.value for variable in model.trainable_variables]

    def state(self, model):
        values = [variable.value for variable in model.non_trainable_variables]
        return [value for value in values if value.is_floating_point()]


# torch ----------------------------------------------------------------------------------------


class RankedForward(Ranked):
    """The ``forward`` of a torch module."""

    method = "forward"

    def is_only_traced(self, model, batch):
        return batch.is_meta or sys.modules["torch"].jit.is_tracing()

    def count(self, model, rows):
        """Nobody asks."""

    def weights_made(self, model):
        parameters = list(model.parameters())
        lazy = sys.modules["torch"].nn.parameter.is_lazy
        return None if any(lazy(parameter) for parameter in parameters) else len(parameters)

    def same_start(self, model):
        """Rank 0's parameters and buffers. The user's optimizer has no state before a step."""
        mine = model.state_dict()
        chief = self.engine.broadcast(
            {name: tensor.cpu() for name, tensor in mine.items()}
            if self.engine.ranks.rank == 0
            else None
        )
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in chief.items()}:
            raise errors.ranks_differ(self.engine.ranks, type(model).__name__)
        model.load_state_dict(chief)

    def parameters(self, model):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def state(self, model):
        return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
