"""torch as one of several ranks: torch.distributed carries the gradients.

torch's own ``DistributedDataParallel`` wraps the model in another one and weights all ranks
alike. Here the model stays itself: its ``call`` or ``forward`` notes how many rows it was given,
and when autograd has finished a backward pass, the gradients of all ranks become their mean
weighted by those rows (``gradient_exchange``).
"""

import contextlib
import functools
import weakref

import torch
from torch._C import _functorch
from torch.nn.parameter import is_lazy

from ... import _keras, errors
from ..._ranks import (
    checksum,
    data_samples,
    keras3_state,
    keras_model,
    losses,
    step_functions,
)
from ..._ranks.engines.torch_distributed import TorchDistributed
from ..._runtime import patching, usage, work
from . import (
    activation_hooks,
    backward_passes,
    batches,
    gradient_exchange,
    models,
    optimizer_steps,
    ranked_buffers,
    ranked_state,
)


def distribute(model, place):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    models.refuse_torch_compile(model)
    engine = TorchDistributed.join(place)
    backward_passes.follow()
    activation_hooks.follow(gradient_exchange.is_under_way)
    kind = RankedForward if _keras.keras_of(model) is None else RankedKerasCall
    if kind.of(model) is None:
        kind(engine).install(model)
        if kind is RankedKerasCall:
            keras_model.install(model, engine, (RankedTrainStep, RankedTorchTestStep))
    kind.of(model).start(model)
    return model


class Ranked(keras_model.RankedMethod):
    """The ``call`` or ``forward`` of a model that trains together with the other ranks.

    Deep copies of a model share it.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.exchanges = weakref.WeakKeyDictionary()  # model -> its exchange
        self.is_differentiated = False  # by torch.func, as a warning told
        self.is_alone = False

    def exchange(self, model):
        if model not in self.exchanges:
            self.exchanges[model] = gradient_exchange.Exchange(self.engine, self, model)
        return self.exchanges[model]

    def alone(self):
        """Within, a model trains by itself."""
        return patching.replaced(self, is_alone=True)

    def invoke(self, model, *args, **kwargs):
        batch = batches.first_batch((args, kwargs))
        if self.is_alone or self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.count(model, self.rows_given(model, batch))
            return self.plain(model)(*args, **kwargs)
        in_function = _functorch.maybe_current_level() is not None  # in one of torch.func
        if in_function and any(map(_functorch.is_gradtrackingtensor, model.parameters())):
            self.warn_of_function(model)
            return self.plain(model)(*args, **kwargs)
        exchange = self.start(model)
        exchange.look()
        result, rows = self.run(model, batch, args, kwargs)
        self.count(model, rows)
        if rows is not None:
            exchange.rows.forward(rows, result)
        return result

    def note_unreached(self, model, name):
        """Note that torch did not call what was put in the place of one of its functions."""
        self.engine.unreached[name] = None  # which a ``RanksCheck`` reports

    def warn_of_function(self, model):
        """Say what ``torch.func.grad()`` or its like gives, which differentiates by parameters."""
        if not self.is_differentiated and self.engine.place.rank == 0:
            errors.warn(
                f"Gradients of the parameters of {type(model).__name__} that torch.func computes "
                "are those of each rank's own rows. Before you update parameters with them, "
                "average them over the ranks with torch.distributed.all_reduce(), or use "
                "loss.backward(), whose gradients are averaged."
            )
        self.is_differentiated = True

    def rows_given(self, model, batch):
        """The rows of a batch, or None where they are not known."""
        if isinstance(batch, batches.PackedSequence) or batches.declared(model) is not None:
            rows = batches.rows_declared(model, batch)
            return 1 if rows is None and batch is not None else rows  # without a batch
        return None if batch is None else int(batch.shape[0])

    def count(self, model, rows):
        work.count([""], None if rows is None else [rows], torch.is_grad_enabled())

    def has_exchanged(self, model, rows):
        """Act upon the exchange of a backward pass, in which this rank had so many rows."""

    def run(self, model, batch, args, kwargs):
        """The model's own result, and its rows."""
        return self.plain(model)(*args, **kwargs), self.rows_given(model, batch)

    def start(self, model):
        """Take rank 0's weights, wherever there are other ones than before.

        Returns:
            The exchange, which notes its parameters and running statistics.
        """
        parameters, exchange = self.parameters(model), self.exchange(model)
        exchange.settled = batches.are_same(parameters, exchange.hooked)
        if exchange.weights is None or not exchange.settled:
            weights = self.weights_made(model)
            if weights != exchange.weights:
                exchange.weights = weights
                self.same_start(model)
        if not exchange.settled:
            exchange.hook(parameters)
            exchange.note(self.averaged(model), lambda tensor: tensor.detach().clone())
        return exchange

    def verify(self, model, when):
        """Compare the model's variables on all ranks. See ``_ranks.checksum.verify``."""
        for named, *causes in self.verified(model):
            names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
            if named or not causes:  # another rank's model may have variables: that is an error
                write, arrays = functools.partial(_set, tensors), map(batches.to_numpy, tensors)
                checksum.verify(self.engine, names, list(arrays), write, when, *causes)


@torch.no_grad()
def _set(tensors, place, value):
    tensors[place].copy_(torch.as_tensor(value))


# Keras ----------------------------------------------------------------------------------------


class RankedKerasCall(Ranked):
    """The ``call`` of a Keras model."""

    steps = ("train",)
    is_of_keras_steps = True
    is_only_traced = models.ReplicatedKerasCall.is_only_traced

    def count(self, model, rows):
        is_training = torch.is_grad_enabled()  # else it predicts, or a step has counted
        if is_training and rows is not None and self.exchange(model).rows.step is None:
            keras_model.count(model, rows, True)

    def weights_made(self, model):
        return len(model.weights) or None

    def same_start(self, model):
        keras_model.same_start(model, self.engine)

    # Not ``value``, which within an autocast scope is a copy of another type.

    def parameters(self, model):
        return [variable._value for variable in model.trainable_variables]

    def averaged(self, model):
        others = self.merged_later(model)
        return [v._value for v in keras3_state.averaged(model) if id(v) not in others]

    def merged_later(self, model):
        """The ids of variables that a step merges when it ends, if one is under way."""
        is_step = self.exchange(model).rows.step is not None
        step = RankedTrainStep.of(model)
        return set(map(id, step.state.tried)) if is_step and step is not None else set()

    def warn_of_means(self, model, exchange):
        """Tell, once, of variables of the user's that are now means of different values."""
        before = dict(zip(map(id, exchange.state), exchange.before))
        variables = keras3_state.averaged(model, by_users=True)
        for variable in [v for v in variables if id(v._value) in before]:
            mean = exchange.mean(variable._value)
            mine = variable._value - before[id(variable._value)]
            same = torch.allclose(mine, mean, rtol=1e-4, atol=1e-6, equal_nan=True)
            if not same and variable.path not in exchange.warned:
                exchange.warned.add(variable.path)
                keras3_state.warn_of_mean(variable)

    def verified(self, model):
        others = self.merged_later(model)
        return [([(v.path, v._value) for v in keras3_state.same(model) if id(v) not in others],)]


class RankedTrainStep(keras_model.RankedMethod):
    """A step of Keras' on a batch, whose rows count however it calls the model or its parts."""

    method = "train_step"
    steps = ("train",)
    training = True

    def __init__(self, engine):
        super().__init__(engine)
        self.state = ranked_state.KerasState(engine)

    def invoke(self, model, data, *args, **kwargs):
        step = self.plain(model)
        exchange = RankedKerasCall.of(model).exchange(model)
        keras = _keras.keras_of(model)
        leaves = keras.tree.flatten(data)  # tensors, and arrays in train_on_batch()
        batch = next((leaf for leaf in leaves if getattr(leaf, "shape", None)), None)
        if batch is None or exchange.rows.step is not None or exchange.source.is_alone:
            return step(data, *args, **kwargs)
        if type(model).train_step.__module__.startswith("keras."):
            exchange.is_suspect = True  # check_loss() tells of it
        count, task = exchange.count, exchange.task
        rows = exchange.rows.step = int(batch.shape[0])
        keras_model.count(model, rows, self.training)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, exchange.rows, "step", None)
            stack.callback(setattr, exchange, "agreed", False)
            stack.enter_context(self.reductions(model, exchange).within(keras))
            if self.training:
                alone = exchange.source.alone()
                stack.enter_context(self.state.merged(model, step, data, rows, alone))
            if self.training and hasattr(model.optimizer, "inner_optimizer"):
                stack.enter_context(self.scaling(model.optimizer))
            result = step(data, *args, **kwargs)
        if exchange.count == count:
            self.engine.unexchanged = {exchange.missed_hook(task): None}
        if self.training and not exchange.checked:
            exchange.checked = True
            if losses.loss_may_mix_rows(model):
                with torch.no_grad():
                    losses.check_loss(model, data, losses.loss_in_inference)
        return result

    def reductions(self, model, exchange):
        """Losses that are no means over rows are those of all ranks' rows."""
        rows = exchange.rows.step

        @functools.lru_cache(None)
        def share():
            """The ranks say their rows in front of the step."""
            mine = self.engine.share(rows)
            if self.training:
                exchange.agreed = True
            else:
                keras_model.RankedFit.of(model).in_step = True
            return mine

        def total(values):
            share()
            return self.engine.sum([float(value) for value in values]).tolist()

        return losses.Reductions(share, total, model, self.engine)

    def scaling(self, optimizer):
        """Within, a ``LossScaleOptimizer`` has gradients overflow where one process's would.

        The mean over a rank's rows weighs each row as many times more as there are ranks.
        """
        size, apply = self.engine.place.size, optimizer.apply

        def apply_scaled(gradients, *args, **kwargs):
            scaled = [None if gradient is None else gradient * size for gradient in gradients]
            return apply(scaled, *args, **kwargs)

        scaling, _ = keras3_state.scaling(optimizer, lambda dtype: 1 / size)
        return step_functions.replaced(self.engine, optimizer, apply=apply_scaled, **scaling)


class RankedTorchTestStep(RankedTrainStep):
    method = "test_step"
    steps = ("evaluate",)
    training = False


# torch ----------------------------------------------------------------------------------------

# Why buffers differ.
_BUFFERS = (
    "Each rank computes this buffer from its own rows; ranks merge what forward() sets buffers to, "
    "unless it calls torch.distributed by itself. Sum or average the buffer by "
    "torch.distributed.all_reduce(), or, if it is each rank's own, register it with "
    "persistent=False."
)


class RankedForward(models.ForwardMethod, Ranked):
    """The ``forward`` of a torch module."""

    def run(self, model, batch, args, kwargs):
        """The rows are where torch's recurrent layers and transformers in the model find them."""
        if batch is not None:
            self.buffers_of(model).forward(model, self.plain(model), args, kwargs)
        parts = [part for part in model.modules() if batches.declared(part) is not None]
        if not parts or model in parts or not isinstance(batch, torch.Tensor):
            return super().run(model, batch, args, kwargs)
        found = []

        def note(module, args, kwargs):
            found.append(batches.rows_declared(module, (list(args) + list(kwargs.values()))[0]))

        with contextlib.ExitStack() as stack:
            for part in parts:
                hook = part.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
            result = self.plain(model)(*args, **kwargs)
        found = [size for size in found if size is not None]
        sizes = [int(size) for size in batch.shape[:2]]
        same = [size for size in sizes if size in found]
        multiple = [size for size in sizes if size and all(each % size == 0 for each in found)]
        return result, (same + multiple + sizes)[0]

    def __init__(self, engine):
        super().__init__(engine)
        self.buffers = weakref.WeakKeyDictionary()  # model -> those that are merged

    def buffers_of(self, model):
        if model not in self.buffers:
            self.buffers[model] = ranked_buffers.RankedBuffers(self.engine)
        return self.buffers[model]

    def has_exchanged(self, model, rows):
        self.buffers_of(model).merge(rows)

    def exchange(self, model):
        if model not in self.exchanges:
            optimizer_steps.watch(super().exchange(model))
        return super().exchange(model)

    def note_unreached(self, model, name):
        exchange = self.exchange(model)
        if name not in exchange.warned:
            exchange.warned.add(name)
            text = f"{self.engine.place} did not do all that ranks depend on. "
            text += usage.unreached([name])
            usage.report(type(model).__name__, "the first training step", "backward", text)

    def weights_made(self, model):
        parameters = list(model.parameters())
        return None if any(is_lazy(parameter) for parameter in parameters) else len(parameters)

    def same_start(self, model):
        """Rank 0's parameters and buffers. The user's optimizer has no state before a step."""
        state = model.state_dict()
        mine = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        chief = self.engine.broadcast({name: tensor.cpu() for name, tensor in mine.items()})
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in chief.items()}:
            raise errors.ranks_differ(self.engine.place, type(model).__name__)
        state.update(chief)
        model.load_state_dict(state)

    def verify(self, model, when):
        place = self.engine.place
        data_samples.compare(self.engine, self.engine.gather(data_samples.numbers(place)))
        super().verify(model, when)

    def parameters(self, model):
        return [p for p in model.parameters() if p.requires_grad and not is_lazy(p)]

    def averaged(self, model):
        """Running statistics. The operation that updates them does not move their version."""
        kind = torch.nn.modules.batchnorm._NormBase
        parts = [part for part in model.modules() if isinstance(part, kind)]
        found = [tensor for part in parts for tensor in (part.running_mean, part.running_var)]
        return [tensor for tensor in found if tensor is not None and not is_lazy(tensor)]

    def warn_of_means(self, model, exchange):
        """Running statistics of torch's own are means."""

    def verified(self, model):
        """Parameters, and buffers; those that are not saved are the rank's own."""
        saved = model.state_dict()
        buffers = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name in saved and buffer.layout is torch.strided and not buffer.is_quantized
        ]
        return [(list(model.named_parameters()),), (buffers, _BUFFERS)]
