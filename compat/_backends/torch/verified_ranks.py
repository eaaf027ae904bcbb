"""Verification of a Keras model in ranks of torch: training steps, each as one process does it.

The ranks' batches are put together, and each rank does the step of all their rows by itself, from
the same state. The results of one rank's rows, such as its metrics, are not compared.
"""

import numpy as np
import torch

from ... import _keras
from ..._verification import keras_steps
from .ranks import RankedKerasCall
from .verified_steps import TorchStep, VerifiedTorchStep


class VerifiedRankedStep(VerifiedTorchStep):
    """The method by which Keras makes the function of a training step; others stay as they are."""

    def verified(self, model):
        if self.kind == "train":
            return super().verified(model)
        return getattr(model, keras_steps.FUNCTIONS[self.kind])

    def step(self, function, args):
        return _RankedStep(self, function, args[0])


class _RankedStep(TorchStep):
    def __init__(self, method, function, batches):
        super().__init__(method, function, batches)
        self.ranked = RankedKerasCall.of(self.model)
        self.ranked.start(self.model)  # rank 0's weights, from which the step begins
        self.own, tree = batches, _keras.keras_of(self.model).tree
        first = next(leaf for leaf in tree.flatten(batches) if np.ndim(leaf))
        sizes = self.ranked.engine.gather([len(first)])
        start = sum(size for (size,) in sizes[: self.ranked.engine.place.rank])
        self.rows = slice(start, start + len(first))
        self.batches = tree.map_structure(self.of_all_ranks, batches)

    def of_all_ranks(self, leaf):
        if not np.ndim(leaf):
            return leaf
        tensor = torch.as_tensor(leaf)
        whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        return self.ranked.engine.concatenate(whole).to(tensor.dtype)

    def on_one_device(self):
        with self.ranked.alone():
            return super().on_one_device()

    def on_all_devices(self):
        return self.function.made(self.own), {}

    def is_random(self, label):
        own = label.startswith(("the loss", "metric "))
        return own or super().is_random(label)

    def infer(self, inputs):
        with self.ranked.alone():
            return super().infer(inputs)

    def outputs(self, undivided):
        """Those of this rank's rows, computed alone or among all rows."""
        given, self.batches = self.batches, self.batches if undivided else self.own
        try:
            found = super().outputs(True)
        finally:
            self.batches = given
        if found is None:
            return None
        place = self.rows if undivided else slice(None)
        return {label: value[place] for label, value in found.items() if "output:" not in label}

    def operations(self):
        return {}
