"""Variables that a step of Keras sets besides the weights, merged over all ranks' rows.

How their values are merged is found by a trial (see ``_ranks.state``) in front of the first step.
They are merged when a step has ended, however many backward passes it has.
"""

import contextlib
from typing import Any, List

import torch

from ... import _keras
from ..._ranks import merging
from ..._ranks import state as rank_state
from ..._runtime import patching

OPERATIONS = merging.Operations(
    torch.zeros_like,
    torch.maximum,
    torch.minimum,
    torch.round,
    lambda tensor, dtype: tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype),
    lambda tensor, share: tensor * share,
)


class KerasState:
    """The variables that the steps of one model set, and their merges."""

    def __init__(self, engine):
        self.engine = engine
        self.optimizer = None  # that of the last step
        self.tried: "List[Any]" = []
        self.merges: "List[merging.Merge]" = []

    @contextlib.contextmanager
    def merged(self, model, step, data, rows, alone):
        """Return the context of a step, after which variables have one process's values.

        Arguments:
            model: the model.
            step: its plain ``train_step``.
            data: the argument of the step.
            rows: how many that has.
            alone: a context in which no gradients are exchanged.
        """
        if self.optimizer is not model.optimizer:  # else the model has its layers
            self.optimizer, tried = model.optimizer, rank_state.tried(model)
            if list(map(id, tried)) != list(map(id, self.tried)):
                self.tried = tried
                self.decide(model, step, data, rows, alone)
        before = [variable._value.detach().clone() for variable in self.tried]
        yield
        if any(merge.is_exchanged for merge in self.merges):
            with torch.no_grad():
                self.merge(before, rows)

    def decide(self, model, step, data, rows, alone):
        """Find the merges by a trial: see ``merged``."""
        keras, tried = _keras.keras_of(model), self.tried
        parameters = [variable._value for variable in model.trainable_variables]
        gradients = [parameter.grad for parameter in parameters]

        def run(numbers, values):
            with _keras.kept(model, model.variables):
                for variable, value in zip(tried, values):
                    variable.assign(value)
                for parameter in parameters:
                    parameter.grad = None
                step(rank_state.some_rows(keras, data, rows, numbers))
                return [keras.ops.convert_to_numpy(v._value).copy() for v in tried]

        def apply_nothing(*args, **kwargs):
            return None

        names, dtypes = [v.path for v in tried], [v.dtype for v in tried]
        state = rank_state.StepState(self.engine, names, dtypes, range(len(tried)))
        if tried:
            values = [keras.ops.convert_to_numpy(v._value).copy() for v in tried]
            optimizer = patching.replaced(model.optimizer, apply=apply_nothing)
            with alone, rank_state.steady(model), optimizer:
                state.decide(rows, values, run)
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
        self.merges = state.merges

    def merge(self, before, rows):
        """Set the variables to one process's values, in one exchange."""
        tensors = [variable._value for variable in self.tried]
        values = exchanged(self.engine, self.merges, before, tensors, rows)
        for tensor, value in zip(tensors, values):
            tensor.copy_(value)


def exchanged(engine, merges, before, after, rows):
    """Return one process's values, in one exchange.

    Arguments:
        engine: the engine of the ranks.
        merges: a ``Merge`` for each value.
        before: this rank's values before a step.
        after: those after it.
        rows: how many the step had.
    """
    place = engine.place
    parts = merging.parts(merges, OPERATIONS, before, after, rows, place)
    parts.insert(0, torch.tensor([float(rows)], device=after[0].device))
    kind = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    flat = torch.cat([part.reshape(-1).to(kind) for part in parts])
    (number,) = engine.end_sum(engine.begin_sum(flat), flat[:1])
    sums = [
        total.view(part.shape).to(part.dtype)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]))
    ]
    return merging.merged(merges, OPERATIONS, before, after, sums[1:], place.size, 1 / number)
