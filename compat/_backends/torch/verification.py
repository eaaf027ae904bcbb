"""Verification of Keras models: a step repeated on one device, from the same state."""

import numpy as np
import torch

from ... import _keras, _verification
from ..._runtime import synchronized
from ..._verification import keras_steps
from . import profiler
from .side_effects import KerasReach
from .state import Snapshot, generators

_RANDOM = "random numbers of "


class VerifiedStep(keras_steps.Verified):
    """The method by which Keras makes the function of a step, which verifies it."""

    def is_ready(self, model):
        """Return whether a step can be repeated."""
        # Keras builds model, optimizer and metrics before the first step, unless train_step is
        # user-defined; then it is the optimizers that may not have their state yet.
        optimizers = keras_steps.optimizers(model) if self.kind == "train" else ()
        return model.built and all(optimizer.built for optimizer in optimizers)

    def verified(self, model):
        """Return a verified step; in ranks that of training only, others stay as they are."""
        if self.verification.ranks and self.kind != "train":
            return getattr(model, keras_steps.FUNCTIONS[self.kind])
        return super().verified(model)

    @property
    def step(self):
        """The class of the steps."""
        return RankedStep if self.verification.ranks else TorchStep


class RandomStep(_verification.Step):
    """A step that changes the state of torch's random generators, besides its subclass's state."""

    def __init__(self, *args):
        super().__init__(*args)
        self.differentiated = torch.is_grad_enabled()

    def give_up(self, values):
        """Restore the state, and that gradients are recorded or not."""
        super().give_up(values)
        # An interruption may come where torch.no_grad() begins or ends, which leaves it on.
        torch.set_grad_enabled(self.differentiated)

    def read(self):
        """Return the state, by label."""
        states = {_RANDOM + name: each.get_state() for name, each in generators().items()}
        return dict(super().read(), **{label: state.numpy() for label, state in states.items()})

    def write(self, values):
        """Restore the state."""
        super().write(values)
        for name, generator in generators().items():
            if _RANDOM + name in values:
                generator.set_state(torch.from_numpy(values[_RANDOM + name]))

    def left_outside(self):
        """Return the side effects of the step, as arrays by label."""
        return (
            self.start_attributes.changed() if self.start_attributes else {}
        )  # None: the step is verified no more

    def is_random(self, label):
        """Return whether a value may differ."""
        return label.startswith(_RANDOM) or super().is_random(label)


class TorchStep(RandomStep, keras_steps.KerasStep):
    """A step of Keras."""

    def is_synchronized(self, layer):
        """Return whether a layer uses the whole batch's statistics."""
        return synchronized.is_asked(self.model) or synchronized.asks(layer)

    def as_array(self, value):
        """Return a value as an array."""
        return _keras.keras_of(self.model).ops.convert_to_numpy(value)

    def operations(self):
        """Return counts of products by device."""
        return profiler.products(lambda: self.function.made(self.data))

    def attributes(self):
        """Return a snapshot of what the step reaches."""
        return Snapshot(KerasReach, self.model, super().attributes())

    def on_one_device(self):
        """Return results and side effects of the step on one device."""
        return dict(super().on_one_device(), **self.left_outside())

    def on_all_devices(self):
        """Return the result of the step, and results and side effects by label."""
        result, labelled = super().on_all_devices()
        return result, dict(labelled, **self.left_outside())

    def infer(self, inputs):
        """Compute outputs for inference."""
        with torch.no_grad():
            return super().infer(inputs)


class RankedStep(TorchStep):
    """A step of ranks: each does that of all their batches, concatenated, by itself.

    From the same state. The results of one rank's rows, such as its metrics, are not compared.
    """

    def __init__(self, method, function, batches):
        super().__init__(method, function, batches)
        from .keras_ranks import RankedKerasCall  # not without ranks: imports their engines

        self.ranked = RankedKerasCall.of(self.model)
        self.ranked.start(self.model)  # rank 0's weights, from which the step begins
        self.batches, tree = batches, _keras.tree_of(_keras.keras_of(self.model))
        first = next(leaf for leaf in tree.flatten(batches) if np.ndim(leaf))
        sizes = self.ranked.engine.gather([len(first)])
        start = sum(size for (size,) in sizes[: self.ranked.engine.place.rank])
        self.rows = slice(start, start + len(first))
        self.data = tree.map_structure(self.of_all_ranks, batches)

    def of_all_ranks(self, leaf):
        """Return the concatenated arrays of all ranks."""
        if not np.ndim(leaf):
            return leaf
        tensor = torch.as_tensor(leaf)
        whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        return self.ranked.engine.concatenate(whole).to(tensor.dtype)

    def on_one_device(self):
        """Return results of a step with the batches of all ranks, by this rank alone."""
        with self.ranked.alone():
            return super().on_one_device()

    def on_all_devices(self):
        """Return the result of the step with this rank's batch."""
        return self.function.made(self.batches), {}

    def is_random(self, label):
        """Return whether a value may differ, such as metrics of one rank's rows."""
        is_of_rank = label.startswith(("the loss", "metric "))
        return is_of_rank or super().is_random(label)

    def outputs(self, is_unsplit):
        """Return those of this rank's rows, computed alone or among all rows."""
        data, self.data = self.data, self.data if is_unsplit else self.batches
        try:  # inputs that are off by rounding may have replaced them already
            with self.ranked.alone():
                outputs = super().outputs(True)
        finally:
            self.data = data
        rows = self.rows if is_unsplit else slice(None)
        return outputs and {k: v[rows] for k, v in outputs.items() if "output:" not in k}

    def operations(self):
        """Return nothing: a rank has one device."""
        return {}
