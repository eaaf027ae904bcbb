"""torch as one of several ranks: torch.distributed carries the gradients.

torch's own ``DistributedDataParallel`` wraps the model in another one and weights all ranks
alike. Here the model stays itself: its ``call`` or ``forward`` notes how many rows it was given,
and when autograd has finished a backward pass, the gradients of all ranks become their mean
weighted by those rows (``gradient_exchange``).
"""

import contextlib
import sys
import types
import weakref

from ... import _keras, _patching, _work, errors
from ..._engines.torch_distributed import TorchDistributed
from ..._ranks import keras3, keras_model, losses
from . import batches, gradient_exchange, keras_models
from .tensors import first_batch


def distribute(model, place):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    keras = _keras.keras_of(model)
    if keras is not None:
        keras_models.refuse_torch_compile(model)
    engine = TorchDistributed.join(place)
    kind = RankedForward if keras is None else RankedCall
    if kind.of(model) is None:
        ranked = kind(engine)
        ranked.install(model)
        if keras is not None:
            for step in (RankedTrainStep, RankedTestStep):
                step(ranked).install(model)
            keras_model.install(model, engine)
    kind.of(model).start(model)
    return model


class Ranked(_patching.InstanceMethod):
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
            self.exchanges[model] = gradient_exchange.Exchange(self.engine, self, model)
        return self.exchanges[model]

    def __call__(self, model, *args, **kwargs):
        torch = sys.modules["torch"]
        batch = first_batch((args, kwargs))
        if self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        self.count(model, batch)
        if not torch.is_grad_enabled():
            return self.plain(model)(*args, **kwargs)
        parameters = self.start(model)
        exchange = self.exchange(model)
        exchange.look(parameters)
        result, rows = self.run(model, batch, args, kwargs)
        self.ran(rows)
        if rows is not None:
            exchange.rows.forward(rows, result)
        return result

    def ran(self, rows):
        """Called with the rows of a call whose gradients are wanted; None: they are not known."""

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
            keras_model.count(model, rows, training)

    def weights_made(self, model):
        return len(model.weights) or None

    def same_start(self, model):
        keras_model.same_start(model, self.engine)

    # Not ``value``, which within an autocast scope is a copy of another type.

    def parameters(self, model):
        return [variable._value for variable in model.trainable_variables]

    def averaged(self, model):
        return [variable._value for variable in keras3.averaged(model)]

    def warn_of_means(self, model, differ):
        for variable in keras3.averaged_by_layers_of_users(model):
            if differ(variable._value):
                keras3.warn_of_mean(variable)

    def verified(self, model):
        return [(variable.path, variable._value) for variable in keras3.same(model)]

    def verified_state(self, model):
        return []


class RankedStep(_patching.InstanceMethod):
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
        keras_model.count(model, rows, self.training)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, exchange.rows, "step", None)
            stack.callback(setattr, exchange, "agreed", False)
            stack.enter_context(self.reductions(model, exchange).within(keras))
            stack.enter_context(self.scaling(model))
            result = step(data, *args, **kwargs)
        if self.training and not exchange.checked:
            exchange.checked = True
            with sys.modules["torch"].no_grad():
                keras3.check_loss_eagerly(model, data)
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

        return losses.Reductions(share, total)

    def agreed(self, model, exchange):
        """The ranks have said their rows in front of the step."""

    @contextlib.contextmanager
    def scaling(self, model):
        """What becomes of a ``LossScaleOptimizer``."""
        yield


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
        size = self.ranked.engine.place.size
        scale_loss, apply = optimizer.scale_loss, optimizer.apply

        def apply_scaled(gradients, *args, **kwargs):
            scaled = [None if gradient is None else gradient * size for gradient in gradients]
            return apply(scaled, *args, **kwargs)

        def scale_share(loss):
            return scale_loss(loss) / size

        with _patching.replaced(optimizer, scale_loss=scale_share, apply=apply_scaled):
            yield


class RankedTestStep(RankedStep):
    method = "test_step"

    def agreed(self, model, exchange):
        keras_model.in_step(model)


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
        if not sys.modules["torch"].is_grad_enabled():
            dim = batches.declared(model) or 0
            has_rows = len(getattr(batch, "shape", ())) > dim
            _work.count([""], [int(batch.shape[dim])] if has_rows else None, False)

    def ran(self, rows):
        _work.count([""], None if rows is None else [rows], True)

    def run(self, model, batch, args, kwargs):
        """The rows are where torch's recurrent layers and transformers in the model find them."""
        if isinstance(batch, sys.modules["torch"].nn.utils.rnn.PackedSequence):
            return self.plain(model)(*args, **kwargs), int(batch.batch_sizes[0])
        own = batches.declared(model)
        if own is not None:
            rows = None if batch is None else int(batch.shape[own]) if batch.dim() > 2 else 1
            return self.plain(model)(*args, **kwargs), rows
        exchange = self.exchange(model)
        if exchange.declares is None:
            exchange.declares = batches.has_declared(model)
        if batch is None or not exchange.declares:
            return super().run(model, batch, args, kwargs)
        with batches.Seen(model, 1) as seen:
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
            if self.engine.place.rank == 0
            else None
        )
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in chief.items()}:
            raise errors.ranks_differ(self.engine.place, type(model).__name__)
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
