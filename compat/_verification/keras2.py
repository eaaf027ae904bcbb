"""Verification of Keras 2 models whose steps are functions of a graph: ``K.function``.

Keras makes each function of a model twice: as it would alone, and of replicas. Both share the
model's variables; but most optimizers make their state anew with each, so that it is carried from
the one to the other.
"""

import contextlib

from .. import _keras
from . import keras_steps, steps
from .verification import suspended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class VerifiedStep(keras_steps.Verified):
    """The method by which Keras 2 makes the function of a step. Subclassed by each backend."""

    prefix = "_make_"

    def written(self, function, model):
        """The variables that a function of Keras', or of replicas, of the model writes."""
        raise NotImplementedError

    def ordering(self, optimizer):
        """The context in which Keras makes the train function of one device."""
        return contextlib.ExitStack()

    def operations(self, step):
        """As ``steps.Step.operations``."""
        raise NotImplementedError

    def make_undivided(self, model):
        optimizer = getattr(model, "optimizer", None)
        if self.kind != "train":
            return Undivided(keras_steps.made_anew(self, model))
        kept = dict(vars(optimizer))
        with self.ordering(optimizer):
            function = Undivided(keras_steps.made_anew(self, model))
        function.slots = list(state_of(optimizer))
        vars(optimizer).clear()
        vars(optimizer).update(kept)
        return function

    def step(self, function, args):
        return Step(self, function, list(args[0]))


class Undivided:
    """A function of one device, and the optimizer's state that it changes in training."""

    slots: "Any" = ()

    def __init__(self, function):
        self.function = function

    def __call__(self, inputs):
        return self.function(inputs)


def state_of(optimizer):
    """The variables of an optimizer of Keras 2, or of one of TensorFlow's that it wraps."""
    own = getattr(optimizer, "optimizer", None)
    if own is not None:
        return own.variables()
    weights = getattr(optimizer, "weights", ())
    return weights() if callable(weights) else weights


def _layers(model):
    for layer in model.layers:
        yield layer
        inner = getattr(layer, "layer", None)  # of a wrapper
        if hasattr(layer, "layers"):
            for each in _layers(layer):
                yield each
        elif inner is not None:
            yield inner


class Step(steps.Step):
    """A call of one of the functions."""

    def __init__(self, method, function, inputs):
        self.method = method
        self.function = function
        self.model = function.model
        self.kind = method.kind
        self.inputs = inputs
        self.keras = _keras.keras_of(self.model)
        self.dtype = self.keras.backend.floatx()
        self.by_design = keras_steps.by_design(_layers(self.model))
        self.slots = {}  # of the function of replicas, and what an undivided one has instead
        undivided = function.undivided
        if self.kind == "train":
            pairs = zip(state_of(self.model.optimizer), undivided.slots)
            self.slots = {mine: other for mine, other in pairs if mine is not other}
        self.undivided_last = False
        self.variables = self._labelled(undivided.function)

    def _labelled(self, undivided):
        """The variables that the step writes, by label."""
        written = set(self.method.written(self.function.made, self.model))
        written |= set(self.method.written(undivided, self.model))
        written -= set(self.slots.values())
        weights = set(map(id, self.model.trainable_weights))
        slots = set(map(id, state_of(getattr(self.model, "optimizer", None))))
        found = {}  # type: dict
        for place, variable in enumerate(sorted(written, key=lambda v: str(v.name))):
            word = "weight" if id(variable) in weights else "state"
            word = "slot" if id(variable) in slots else word
            label = "{} {}".format(word, variable.name)
            found["{} [{}]".format(label, place) if label in found else label] = variable
        return found

    def read(self):
        now = [
            self.slots.get(variable, variable) if self.undivided_last else variable
            for variable in self.variables.values()
        ]
        return dict(zip(self.variables, self.keras.backend.batch_get_value(now)))

    def write(self, values):
        pairs = []
        for label, variable in self.variables.items():
            if label in values:
                pairs.append((variable, values[label]))
                if variable in self.slots:
                    pairs.append((self.slots[variable], values[label]))
        self.keras.backend.batch_set_value(pairs)

    def on_one_device(self):
        self.undivided_last = True
        return self._named(self.function.undivided(self.inputs))

    def on_all_devices(self):
        self.undivided_last = False
        results = self.function.made(self.inputs)
        return results, self._named(results)

    def _named(self, results):
        return keras_steps.named_results(self.model, self.kind, results)

    def operations(self):
        return self.method.operations(self)

    def outputs(self, undivided):
        """The predictions, and the loss without what only training does."""
        inputs, model = list(self.inputs), self.model
        phase = self.kind == "train" and not hasattr(inputs[-1], "shape")
        rows = inputs[: len(model._feed_inputs)]
        named = {}
        for kind, given in (("predict", rows), ("evaluate", inputs[:-1] if phase else inputs)):
            attribute = keras_steps.FUNCTIONS[kind]
            with suspended():
                if undivided:
                    method = vars(model)[self.method.prefix + attribute].__func__
                    function = method.make_undivided(model)
                else:
                    getattr(model, self.method.prefix + attribute)()
                    function = getattr(model, attribute)
                results = function(given + ([0.0] if phase else []))
            for label, value in keras_steps.named_results(model, kind, results).items():
                inferred = "output: {} in inference".format(label)
                named[label if kind == "predict" else inferred] = value
        return named
