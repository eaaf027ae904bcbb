"""torch as one of several ranks: torch.distributed carries the gradients.

torch's own ``DistributedDataParallel`` wraps the model in another one and weights all ranks
alike. Here the model stays itself: its ``call`` or ``forward`` notes how many rows it was given,
and when autograd has finished a backward pass, the gradients of all ranks become their mean
weighted by those rows (``_torch_exchange``).
"""

import atexit
import contextlib
import datetime
import os
import re
import sys
import time
import types
import weakref

from .. import (
    _engine,
    _keras,
    _keras3_ranks,
    _keras_ranks,
    _keras_ranks_losses,
    _launchers,
    _ranks,
    errors,
)
from . import _torch_batch, _torch_exchange


class TorchDistributed(_engine.Engine):
    """The process group of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, ranks):
        import torch.distributed as distributed

        super().__init__(ranks)
        self.distributed = distributed
        self.backward = _torch_exchange.Backward()
        self.last = None  # the exchange that all ranks did last
        self.store = None
        if not distributed.is_initialized():
            self.timeout = _ranks.timeout(os.environ)
            limit = datetime.timedelta(seconds=self.timeout)
            cuda = sys.modules["torch"].cuda.is_available()
            with self.waiting("to start"):
                self.store = _store(distributed, ranks, limit)
                with _interface(ranks):
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

    def concatenate(self, tensor):
        """All ranks' tensors of any numbers of rows, one below the other."""
        torch = sys.modules["torch"]
        sizes = [0.0] * self.ranks.size
        sizes[self.ranks.rank] = float(len(tensor))
        sizes = [int(size) for size in self.sum(sizes)]
        padded = tensor.new_zeros((max(sizes),) + tensor.shape[1:])
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in sizes]
        with self.waiting("for the others' gradients"):
            self.distributed.all_gather(found, padded)
        return torch.cat([part[:size] for part, size in zip(found, sizes)])

    def _close(self):
        # Others that have more batches are in an exchange like the last one.
        return super()._close() if self.last is None else self.last.close()

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
        except RuntimeError:  # the store has gone, too: rank 0's, or torchrun's
            return [] if _launchers.torchrun_keeps_store(os.environ) else [0]
        return others


def _store(distributed, ranks, limit):
    """The store where the ranks meet."""
    if _launchers.torchrun_keeps_store(os.environ):  # it outlives every rank
        return next(distributed.rendezvous("env://", ranks.rank, ranks.size, timeout=limit))[0]
    host, port = _ranks.meeting(ranks, "torch.distributed")
    options = {"is_master": ranks.rank == 0, "timeout": limit}
    if ranks.rank == 0:
        # By itself the store would listen at all addresses.
        options["master_listen_fd"] = _ranks.listen(ranks, host, port).detach()
    return distributed.TCPStore(host, port, ranks.size, **options)


@contextlib.contextmanager
def _interface(ranks):
    """Within, gloo listens on the loopback interface where all ranks are on this machine."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not (ranks.on_one_machine and sys.platform == "linux"):
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


def distribute(model, ranks):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    keras = _keras.keras_of(model)
    if keras is not None and _keras.compiled_with(model).get("jit_compile") is True:
        raise errors.several_devices_in_torch_compile()
    engine = TorchDistributed.join(ranks)
    kind = RankedForward if keras is None else RankedCall
    if kind.of(model) is None:
        ranked = kind(engine)
        ranked.install(model)
        if keras is not None:
            for step in (RankedTrainStep, RankedTestStep):
                step(ranked).install(model)
            _keras_ranks.install(model, engine)
    kind.of(model).start(model)
    return model


class Ranked(_keras.InstanceMethod):
    """The ``call`` or ``forward`` of a model that trains together with the other ranks.

    Deep copies of a model share it.
    """

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine
        self.exchanges = weakref.WeakKeyDictionary()  # model -> its exchange
        self.weights = weakref.WeakKeyDictionary()  # model -> how many were made the same

    def exchange(self, model):
        if model not in self.exchanges:
            self.exchanges[model] = _torch_exchange.Exchange(self.engine, self, model)
        return self.exchanges[model]

    def __call__(self, model, *args, **kwargs):
        torch = sys.modules["torch"]
        batch = _torch_exchange.first_batch((args, kwargs))
        if self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        self.count(model, batch)
        if not torch.is_grad_enabled():
            return self.plain(model)(*args, **kwargs)
        parameters = self.start(model)
        exchange = self.exchange(model)
        exchange.look(parameters)
        result, rows = self.run(model, batch, args, kwargs)
        if rows is not None:
            exchange.rows.forward(rows, result)
        return result

    def run(self, model, batch, args, kwargs):
        """The model's own result, and its rows."""
        rows = None if batch is None else int(batch.shape[0])
        return self.plain(model)(*args, **kwargs), rows

    def start(self, model):
        """Take rank 0's weights, wherever there are other ones than before.

        Returns:
            The parameters that are trained.
        """
        parameters = self.parameters(model)
        if model not in self.weights or not self.exchange(model).is_hooked(parameters):
            weights = self.weights_made(model)
            if weights != self.weights.get(model):
                self.weights[model] = weights
                self.same_start(model)
        self.exchange(model).watch(parameters)
        return parameters


# Keras ----------------------------------------------------------------------------------------


class RankedCall(Ranked):
    """The ``call`` of a Keras model."""

    def is_only_traced(self, model, batch):
        """Keras runs a model on the device "meta" to learn shapes, and in scopes of its own."""
        return getattr(batch, "is_meta", False) or _keras.in_stateless_scope(_keras.keras_of(model))

    def count(self, model, batch):
        if batch is not None and self.exchange(model).rows.step is None:
            rows, training = int(batch.shape[0]), sys.modules["torch"].is_grad_enabled()
            _keras_ranks.count(model, rows, training)

    def weights_made(self, model):
        return len(model.weights) or None

    def same_start(self, model):
        _keras_ranks.same_start(model, self.engine)

    # Not ``value``, which within an autocast scope is a copy of another type.

    def parameters(self, model):
        return [variable._value for variable in model.trainable_variables]

    def averaged(self, model):
        return [variable._value for variable in _keras3_ranks.averaged(model)]

    def warn_of_means(self, model, differ):
        for variable in _keras3_ranks.not_kerass(model):
            if differ(variable._value):
                _keras3_ranks.warn_of_mean(variable)

    def verified(self, model):
        return [(variable.path, variable._value) for variable in _keras3_ranks.same(model)]

    def verified_state(self, model):
        return []


class RankedStep(_keras.InstanceMethod):
    """A step of Keras' on a batch, whose rows count however it calls the model or its parts."""

    training = False

    def __init__(self, ranked):
        super().__init__([])
        self.ranked = ranked

    def __call__(self, model, data, *args, **kwargs):
        step = self.plain(model)
        exchange = self.ranked.exchange(model)
        keras = _keras.keras_of(model)
        leaves = keras.tree.flatten(data)  # tensors, and arrays in train_on_batch()
        batch = next((leaf for leaf in leaves if getattr(leaf, "shape", None)), None)
        if batch is None or exchange.rows.step is not None:
            return step(data, *args, **kwargs)
        rows = exchange.rows.step = int(batch.shape[0])
        _keras_ranks.count(model, rows, self.training)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, exchange.rows, "step", None)
            stack.callback(setattr, exchange, "agreed", False)
            stack.enter_context(self.reductions(model, exchange).within(keras))
            stack.enter_context(self.scaling(model))
            result = step(data, *args, **kwargs)
        if self.training and not exchange.checked:
            exchange.checked = True
            _check_loss(model, data)
        return result

    def reductions(self, model, exchange):
        """Losses that are no means over rows are those of all ranks' rows."""
        engine = self.ranked.engine
        rows = exchange.rows.step
        shares = []

        def share():
            if not shares:
                shares.append(engine.share(rows))
                self.agreed(model, exchange)
            return shares[0]

        def total(values):
            share()
            return engine.sum([float(value) for value in values]).tolist()

        return _keras_ranks_losses.Reductions(share, total)

    def agreed(self, model, exchange):
        """The ranks have said their rows in front of the step."""

    @contextlib.contextmanager
    def scaling(self, model):
        """What becomes of a ``LossScaleOptimizer``."""
        yield


def _check_loss(model, data):
    keras = _keras.keras_of(model)
    read, write = _keras.reader_and_writer(model)
    trackers = list(model.metrics_variables)
    values = [value.copy() for value in read(trackers)]

    def loss_of(data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with sys.modules["torch"].no_grad():
            outputs = model(x, training=False)
            return float(model._compute_loss(x, y, outputs, weights, training=False))

    try:
        _keras3_ranks.check_loss(model, data, loss_of)
    finally:
        write(list(zip(trackers, values)))


class RankedTrainStep(RankedStep):
    method = "train_step"
    training = True

    def agreed(self, model, exchange):
        exchange.agreed = True

    @contextlib.contextmanager
    def scaling(self, model):
        """Within, the gradients of a rank overflow where those of one process would.

        The mean over a rank's rows weighs each row as many times more as there are ranks.
        """
        optimizer = model.optimizer
        if not hasattr(optimizer, "inner_optimizer"):
            yield
            return
        size = self.ranked.engine.ranks.size
        scale_loss, apply = optimizer.scale_loss, optimizer.apply

        def apply_scaled(gradients, *args, **kwargs):
            scaled = [None if gradient is None else gradient * size for gradient in gradients]
            return apply(scaled, *args, **kwargs)

        # Not by setattr: Keras would track them.
        optimizer.__dict__["scale_loss"] = lambda loss: scale_loss(loss) / size
        optimizer.__dict__["apply"] = apply_scaled
        try:
            yield
        finally:
            del optimizer.__dict__["scale_loss"], optimizer.__dict__["apply"]


class RankedTestStep(RankedStep):
    method = "test_step"

    def agreed(self, model, exchange):
        _keras_ranks.in_step(model)


# torch ----------------------------------------------------------------------------------------


class RankedForward(Ranked):
    """The ``forward`` of a torch module."""

    method = "forward"

    def install(self, model):
        """A function: ``torch.compile`` takes no other callables for methods.

        It leaves the code of this package as it is, and compiles the module's own.
        """
        rules = sys.modules["torch"]._dynamo.trace_rules
        if hasattr(rules, "add"):
            rules.add(__name__.partition(".")[0])

        def forward(module, *args, **kwargs):
            return self(module, *args, **kwargs)

        forward.ranked = self
        self.hidden = model.__dict__.get("forward")
        model.__dict__["forward"] = types.MethodType(forward, model)

    @classmethod
    def of(cls, model):
        function = getattr(model.__dict__.get("forward"), "__func__", None)
        return getattr(function, "ranked", None)

    def is_only_traced(self, model, batch):
        return getattr(batch, "is_meta", False) is True or sys.modules["torch"].jit.is_tracing()

    def count(self, model, batch):
        """Nothing needs it: metrics are the script's."""

    def run(self, model, batch, args, kwargs):
        """The rows are where torch's recurrent layers and transformers in the model find them."""
        if isinstance(batch, sys.modules["torch"].nn.utils.rnn.PackedSequence):
            return self.plain(model)(*args, **kwargs), int(batch.batch_sizes[0])
        own = _torch_batch.declared(model)
        if own is not None:
            rows = None if batch is None else int(batch.shape[own]) if batch.dim() > 2 else 1
            return self.plain(model)(*args, **kwargs), rows
        exchange = self.exchange(model)
        if exchange.declares is None:
            exchange.declares = _torch_batch.has_declared(model)
        if batch is None or not exchange.declares:
            return super().run(model, batch, args, kwargs)
        with _torch_batch.Seen(model, 1) as seen:
            result = self.plain(model)(*args, **kwargs)
        found = [size for size in seen.sizes if size is not None]
        sizes = [int(size) for size in batch.shape[:2]]
        same = [size for size in sizes if size in found]
        multiple = [size for size in sizes if size and all(each % size == 0 for each in found)]
        return result, (same + multiple + sizes)[0]

    def weights_made(self, model):
        parameters = list(model.parameters())
        lazy = sys.modules["torch"].nn.parameter.is_lazy
        return None if any(lazy(parameter) for parameter in parameters) else len(parameters)

    def same_start(self, model):
        """Rank 0's parameters and buffers. The user's optimizer has no state before a step."""
        torch = sys.modules["torch"]
        state = model.state_dict()
        mine = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        chief = self.engine.broadcast(
            {name: tensor.cpu() for name, tensor in mine.items()}
            if self.engine.ranks.rank == 0
            else None
        )
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in chief.items()}:
            raise errors.ranks_differ(self.engine.ranks, type(model).__name__)
        state.update(chief)
        model.load_state_dict(state)

    def parameters(self, model):
        lazy = sys.modules["torch"].nn.parameter.is_lazy
        return [p for p in model.parameters() if p.requires_grad and not lazy(p)]

    def averaged(self, model):
        """Running statistics. The operation that updates them does not move their version."""
        kind = sys.modules["torch"].nn.modules.batchnorm._NormBase
        found = [
            getattr(part, name)
            for part in model.modules()
            if isinstance(part, kind) and part.track_running_stats
            for name in ("running_mean", "running_var")
        ]
        lazy = sys.modules["torch"].nn.parameter.is_lazy
        return [tensor for tensor in found if tensor is not None and not lazy(tensor)]

    def warn_of_means(self, model, differ):
        """Running statistics of torch's own are means."""

    def verified(self, model):
        return list(model.named_parameters())

    def verified_state(self, model):
        """Buffers; those that are not saved are the rank's own."""
        torch = sys.modules["torch"]
        saved = model.state_dict()
        return [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name in saved and buffer.layout is torch.strided and not buffer.is_quantized
        ]
