"""Keras models as one of several ranks: their call, and their steps."""

import contextlib
import functools

import torch

from ... import _keras
from ..._ranks import keras3_state, keras_model, losses, step_functions
from . import ranked_batch_norm, ranked_state
from .keras_replicas import ReplicatedKerasCall
from .ranked_calls import RankedCall


class RankedKerasCall(RankedCall):
    """The ``call`` of a Keras model."""

    steps = ("train",)
    is_of_keras_steps = True
    is_only_traced = ReplicatedKerasCall.is_only_traced

    def count(self, model, rows):
        """Count a batch, unless a step of Keras has counted it."""
        is_training = torch.is_grad_enabled()  # else it predicts, or a step has counted
        if is_training and rows is not None and self.exchange(model).rows.step is None:
            keras_model.count(model, rows, True)

    def weights_made(self, model):
        """Return how many weights the model has; None: it is not built."""
        return len(model.weights) or None

    def same_start(self, model):
        """Take rank 0's weights."""
        keras_model.same_start(model, self.engine)

    # Not ``value``, which within an autocast scope is a copy of another type.

    def parameters(self, model):
        """List the trainable variables' tensors."""
        return [variable._value for variable in model.trainable_variables]

    def modules(self, model):
        """Return the layers of a model, and the modules of torch within these."""
        return {each: None for layer in _keras.all_layers(model) for each in layer.modules()}

    def averaged(self, model):
        """List the tensors of variables whose mean is exchanged with the gradients."""
        others = self.merged_later(model)
        return [v._value for v in keras3_state.averaged(model) if id(v) not in others]

    def merged_later(self, model):
        """Return the ids of variables that a step merges when it ends, if one is under way."""
        is_step = self.exchange(model).rows.step is not None
        step = RankedTrainStep.of(model)
        return set(map(id, step.state.tried)) if is_step and step is not None else set()

    def warn_of_means(self, model, exchange):
        """Warn, once, of user-defined variables that are now means of different values."""
        before = dict(zip(map(id, exchange.state), exchange.before))
        variables = keras3_state.averaged(model, by_users=True)
        for variable in [v for v in variables if id(v._value) in before]:
            mean = exchange.mean(variable._value)
            change = variable._value - before[id(variable._value)]
            is_same = torch.allclose(change, mean, rtol=1e-4, atol=1e-6, equal_nan=True)
            if not is_same and variable.path not in exchange.warned:
                exchange.warned.add(variable.path)
                keras3_state.warn_of_mean(variable)

    def verified(self, model):
        """List the variables that are the same on all ranks."""
        others = self.merged_later(model)
        return [([(v.path, v._value) for v in keras3_state.same(model) if id(v) not in others],)]


class RankedTrainStep(keras_model.RankedMethod):
    """A training step of Keras: its batch's rows count, however it calls the model."""

    method = "train_step"
    steps = ("train",)
    training = True

    def __init__(self, engine):
        super().__init__(engine)
        self.state = ranked_state.KerasState(engine)

    def invoke(self, model, data, *args, **kwargs):
        """Run a step, with losses, gradients and state as those of all ranks' rows."""
        step = self.plain(model)
        exchange = RankedKerasCall.of(model).exchange(model)
        keras = _keras.keras_of(model)
        # Tensors, and arrays in train_on_batch().
        leaves = _keras.tree_of(keras).flatten(data)
        batch = next((leaf for leaf in leaves if getattr(leaf, "shape", None)), None)
        if batch is None or exchange.rows.step is not None or exchange.source.is_alone:
            return step(data, *args, **kwargs)
        if self.training and exchange.weights is None:  # made since; the step may not call it
            exchange.source.start(model)
        if type(model).train_step.__module__.startswith("keras."):
            exchange.is_suspect = True  # check_loss() warns of it
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
            if self.training:
                stack.enter_context(ranked_batch_norm.called(exchange, model))
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
        """Return losses of all ranks' rows, for those that are not means over rows."""
        rows = exchange.rows.step

        @functools.lru_cache(None)
        def share_of_rows():
            """Exchange the ranks' rows in front of the step."""
            share = self.engine.share(rows)
            if self.training:
                exchange.agreed = True
            else:
                keras_model.RankedFit.of(model).in_step = True
            return share

        def total(values):
            share_of_rows()
            return self.engine.sum([float(value) for value in values]).tolist()

        return losses.Reductions(share_of_rows, total, model, self.engine)

    def scaling(self, optimizer):
        """Have a ``LossScaleOptimizer``'s gradients overflow in this context as one process's do.

        The mean over a rank's rows weighs each row as many times more as there are ranks.
        """
        size, apply = self.engine.place.size, optimizer.apply

        def apply_scaled(gradients, *args, **kwargs):
            scaled = [None if gradient is None else gradient * size for gradient in gradients]
            return apply(scaled, *args, **kwargs)

        scaling, _ = keras3_state.scaling(optimizer, lambda dtype: 1 / size)
        return step_functions.replaced(self.engine, optimizer, apply=apply_scaled, **scaling)


class RankedTorchTestStep(RankedTrainStep):
    """A test step of Keras."""

    method = "test_step"
    steps = ("evaluate",)
    training = False
