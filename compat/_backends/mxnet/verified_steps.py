"""Verification of keras-mxnet's models: on one device a single replica runs the whole batch."""

import contextlib

from ... import _keras, _verification
from ..._verification import keras_steps
from . import op_placement


class VerifiedMXNetStep(keras_steps.Verified):
    """The method by which keras-mxnet makes the function of a step."""

    prefix = "_make_"

    def make_undivided(self, model):
        replicas = model._compat_replicas

        def undivided(inputs):
            with replicas.undivided():
                return replicas.run({"evaluate": "test"}.get(self.kind, self.kind), inputs)

        return undivided

    def step(self, function, args):
        return _MXNetStep(self, function, list(args[0]))


class _MXNetStep(_verification.Step):
    given = ("inputs",)

    def __init__(self, method, function, inputs):
        self.function = function
        self.model = function.model
        self.replicas = self.model._compat_replicas
        self.kind = method.kind
        self.inputs = inputs
        from keras import backend as K

        self.dtype = K.floatx()

    def by_design(self, inference, changed):
        training = self.kind == "train" and not inference
        layers = _keras.all_layers_of_keras2(self.model)
        return keras_steps.normalised(layers) if training else None

    def _arrays(self):
        """The arrays of weights and auxiliary states in Keras' hands, by label."""
        model = self.model
        trained = {weight.name for weight in model.trainable_weights}
        return {
            "{} {}".format("weight" if name in trained else "state", name): array
            for held in (model._args, model._auxs)
            for name, array in held.items()
        }

    def read(self):
        self.replicas._sync_weights()
        values = {label: array.asnumpy() for label, array in self._arrays().items()}
        optimizer = getattr(self.model, "optimizer", None)
        for place, array in enumerate(optimizer.weights if optimizer is not None else ()):
            values["slot {}".format(place)] = array.asnumpy()
        return values

    def write(self, values):
        self.replicas._set_weights()  # they take Keras' arrays before the next batch
        for label, array in self._arrays().items():
            if label in values:
                array[:] = values[label]
        optimizer = getattr(self.model, "optimizer", None)
        if self.kind == "train" and optimizer is not None:
            slots = ["slot {}".format(place) for place in range(len(values))]
            # Without any, as before the first step, set_weights() makes them 0, as they begin.
            optimizer.set_weights([values[label] for label in slots if label in values])

    def on_one_device(self):
        return self._named(self.function.undivided(self.inputs))

    def on_all_devices(self):
        results = self.function.made(self.inputs)
        return results, self._named(results)

    def _named(self, results):
        return keras_steps.named_results(self.model, self.kind, results)

    def operations(self):
        return op_placement.products(lambda: self.function.made(self.inputs))

    def outputs(self, undivided):
        model, replicas = self.model, self.replicas
        rows = self.inputs[: len(model.inputs)]
        with replicas.undivided() if undivided else contextlib.ExitStack():
            named = keras_steps.outputs(model, replicas.run("predict", rows))
            if self.kind != "predict":
                results = replicas.run("test", self.inputs)
                for label, value in keras_steps.named_results(model, "evaluate", results).items():
                    named["output: {} in inference".format(label)] = value
        return named
