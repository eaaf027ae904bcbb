"""Verification of keras-mxnet's models: on one device a single replica runs the whole batch."""

import contextlib
import functools

from ... import _keras
from ..._verification import keras2, keras_steps
from . import op_placement

# Kind of step -> what the replicas call it.
_PHASES = {"train": "train", "evaluate": "test", "predict": "predict"}


class _MXNetStep(keras2.ArraysStep):
    def by_design(self, inference, changed):
        training = self.kind == "train" and not inference
        layers = _keras.all_layers_of_keras2(self.model)
        return keras_steps.normalised(layers) if training else None

    def _arrays(self):
        """The arrays of weights and auxiliary states in Keras' hands, by label."""
        model = self.model
        trained = {weight.name for weight in model.trainable_weights}
        held = list(model._args.items()) + list(model._auxs.items())
        return {("weight " if name in trained else "state ") + name: array for name, array in held}

    def read(self):
        self.model._sync_weights()
        values = {label: array.asnumpy() for label, array in self._arrays().items()}
        optimizer = getattr(self.model, "optimizer", None)
        for place, array in enumerate(optimizer.weights if optimizer is not None else ()):
            values[f"slot {place}"] = array.asnumpy()
        return values

    def write(self, values):
        self.model._set_weights()  # replicas take Keras' arrays before the next batch
        for label, array in self._arrays().items():
            if label in values:
                array[:] = values[label]
        if self.kind == "train":
            slots = [f"slot {place}" for place in range(len(values))]
            # Without any, as before the first step, set_weights() makes them 0, as they begin.
            self.model.optimizer.set_weights([values[label] for label in slots if label in values])

    def operations(self):
        return op_placement.products(lambda: self.function.made(self.data))

    def outputs(self, undivided):
        replicas = self.model._compat_replicas
        with replicas.undivided() if undivided else contextlib.ExitStack():
            run = replicas.run
            return self.in_inference(lambda kind, rows: run(_PHASES[kind], rows), self.data)


class VerifiedMXNetStep(keras_steps.Verified):
    """The method by which keras-mxnet makes the function of a step."""

    prefix = "_make_"
    step = _MXNetStep

    def make_undivided(self, model):
        replicas = model._compat_replicas
        return replicas.undivided()(functools.partial(replicas.run, _PHASES[self.kind]))
