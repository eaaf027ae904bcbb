"""Verification of Keras 2 models whose steps are functions of a graph: ``K.function``.

Keras makes each function of a model twice: plain, and of replicas. Both share the model's
variables; but most optimizers create their state with each, so it is copied from one to the
other.
"""

import contextlib
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
)

from .. import _keras
from . import keras_steps, reasons, steps
from .verification import Verification, suspended


class VerifiedKeras2Step(keras_steps.Verified):
    """The method by which Keras 2 makes the function of a step.

    Subclassed by each backend, with a ``Keras2Step`` of its own.
    """

    prefix = "_make_"

    def written(self, function: "Any", model: "Any") -> "List[Any]":
        """Return the variables that a function of Keras, or of replicas, writes.

        In the order in which they were made, which is the same for two functions with separate
        state.
        """
        raise NotImplementedError

    def is_random(self, variable: "Any") -> bool:
        """Return whether a variable, or None, is the state of a random number generator."""
        return False

    def ordering(self, optimizer: "Any") -> "ContextManager[Any]":
        """Return the context in which Keras makes the train function of one device."""
        return contextlib.ExitStack()

    def verified(self, model: "Any") -> "Any":
        # A function by which a script has replaced Keras' does more than that.
        function = getattr(model, self.attribute, None)
        is_users = function is not None and _keras.is_users_function(function)
        return function if is_users else super().verified(model)

    def make_unsplit(self, model: "Any") -> "Any":
        if self.kind != "train":
            return self.made_anew(model)
        optimizer = model.optimizer
        with _attributes_kept(_keras.wrapped_optimizers(optimizer)), self.ordering(optimizer):
            return self.made_anew(model)


def verify(
    kind: "Type[VerifiedKeras2Step]",
    model: "Any",
    replicas: "Any",
    verification: "Optional[Verification]",
) -> None:
    """Have the first steps of a model verified.

    Arguments:
        kind: the backend's ``VerifiedKeras2Step``.
        model: the model.
        replicas: the object that runs the model's functions on several devices, or None.
        verification: the ``Verification``; None: stop verifying.
    """
    inner = _keras.inner_model(model)
    if replicas is not None:
        replicas.verification = verification
    if inner is not None:
        kind.install_on(inner, verification)


@contextlib.contextmanager
def _attributes_kept(optimizers: "Sequence[Any]") -> "Iterator[None]":
    """Restore optimizers' attributes after a block in which they make a function."""
    attributes = steps.Attributes(optimizers, lambda name, value: True)
    values = [value for optimizer in optimizers for value in vars(optimizer).values()]
    lists = [(value, value[:]) for value in values if isinstance(value, list)]
    try:
        yield
    finally:
        for value, members in lists:
            value[:] = members
        attributes.put_back()


def _state_of(optimizer: "Any") -> "Iterator[Any]":
    """Yield the variables of an optimizer of Keras 2 or TensorFlow, and of those it wraps."""
    for wrapping in _keras.wrapped_optimizers(optimizer):
        yield from (
            wrapping.variables()
            if hasattr(wrapping, "variables")
            else vars(wrapping).get("weights", ())
        )


class ArraysStep(keras_steps.FunctionStep):
    """A call of a function of Keras 2, with a list of arrays."""

    def __init__(self, method: "Any", function: "Any", data: "Sequence[Any]") -> None:
        super().__init__(method, function, list(data))
        self.keras = _keras.keras_of(self.model)
        self.dtype = self.keras.backend.floatx()

    def in_inference(
        self, run: "Callable[[str, List[Any]], Any]", inputs: "List[Any]"
    ) -> "Dict[str, Any]":
        """Return the predictions, and the loss in inference.

        Arguments:
            run: does a step of a kind with inputs.
            inputs: of this step; the first ones are the model's.
        """
        rows = inputs[: len(self.model._feed_inputs)]
        named = keras_steps.named_results(self.model, "predict", run("predict", rows))
        if self.kind != "predict":
            results = keras_steps.named_results(self.model, "evaluate", run("evaluate", inputs))
            for label, value in results.items():
                named[f"output: {label} in inference"] = value
        return named


class Keras2Step(ArraysStep):
    """A call of one of the functions."""

    def __init__(self, method: "Any", function: "Any", data: "Sequence[Any]") -> None:
        super().__init__(method, function, data)
        # By kind, and whether it is that of one device.
        self._inferring: "Dict[Tuple[str, bool], Any]" = {}
        written = method.written(function.made, self.model)
        unsplit = method.written(function.unsplit, self.model)
        # Most optimizers create their state for each function.
        of_replicas = [variable for variable in written if variable not in unsplit]
        of_unsplit = [variable for variable in unsplit if variable not in written]
        self.slots = self._paired(
            of_replicas, of_unsplit
        )  # of the function of replicas -> of the other one
        self.unsplit_last = False
        shared = [variable for variable in unsplit if variable not in self.slots.values()]
        self.variables = self._labelled(written + shared)

    def _paired(self, first: "List[Any]", second: "List[Any]") -> "Dict[Any, Any]":
        """Return pairs of corresponding variables of two functions."""
        values = self.keras.backend.batch_get_value(first + second)
        kinds = {v: (value.shape, value.dtype) for v, value in zip(first + second, values)}
        pairs, left = {}, list(second)
        for variable in first:
            alike = [other for other in left if kinds[other] == kinds[variable]]
            if alike:
                pairs[variable] = alike[0]
                left.remove(alike[0])
        return pairs

    def _labelled(self, written: "List[Any]") -> "Dict[str, Any]":
        """Return the variables that the step writes, and the model's, by label."""
        weights = set(map(id, self.model.trainable_weights))
        slots = set(map(id, _state_of(getattr(self.model, "optimizer", None))))
        slots.update(map(id, self.slots))
        variables: "Dict[str, Any]" = {}
        every = {id(variable): variable for variable in written + list(self.model.weights)}
        for place, variable in enumerate(sorted(every.values(), key=lambda v: str(v.name))):
            word = "weight" if id(variable) in weights else "state"
            word = "slot" if id(variable) in slots else word
            label = f"{word} {variable.name}"
            variables[f"{label} [{place}]" if label in variables else label] = variable
        return variables

    def by_design(
        self, inference: bool, changed: "Collection[str]"
    ) -> "Optional[reasons.Incomparable]":
        layers = _keras.all_layers_of_keras2(self.model)
        phase = self.keras.backend.learning_phase()
        always = (isinstance(phase, int) and phase == 1) or any(map(_is_called_in_training, layers))
        if not always:
            training = self.kind == "train" and not inference
            layers = keras_steps.trained_layers(layers, training, frozen=True)
        layers = [layer for layer in layers if not self.is_synchronized(layer)]
        return keras_steps.normalized(layers, self.model)

    def is_synchronized(self, layer: "Any") -> bool:
        """Return whether batch normalization, if it is that, has the whole batch's statistics."""
        return False

    def is_random(self, label: str) -> bool:
        return bool(self.method.is_random(self.variables.get(label)))

    def read(self) -> "Dict[str, Any]":
        slots = self.slots if self.unsplit_last else {}
        now = [slots.get(variable, variable) for variable in self.variables.values()]
        return dict(zip(self.variables, self.keras.backend.batch_get_value(now)))

    def write(self, values: "Mapping[str, Any]") -> None:
        pairs = []
        for label, variable in self.variables.items():
            if label in values:
                pairs.append((variable, values[label]))
                if variable in self.slots:
                    pairs.append((self.slots[variable], values[label]))
        self.keras.backend.batch_set_value(pairs)

    def done(self, function: "Any") -> "Tuple[Any, Dict[str, Any]]":
        self.unsplit_last = function is self.function.unsplit
        return super().done(function)

    def outputs(self, is_unsplit: bool) -> "Dict[str, Any]":
        has_phase = self.kind == "train" and isinstance(self.data[-1], (int, float))
        # These determine random numbers, and are set after the step.
        going_on = set(filter(self.method.is_random, self.variables.values()))

        def run(kind: str, inputs: "List[Any]") -> "Any":
            function = self._function_of(kind, is_unsplit)
            written = self.method.written(function, self.model)
            written = [v for v in written if v not in going_on]
            before = self.keras.backend.batch_get_value(written)
            with suspended:
                results = function(inputs + ([0.0] if has_phase else []))
            self.keras.backend.batch_set_value(list(zip(written, before)))
            return results

        return self.in_inference(run, self.data[:-1] if has_phase else self.data)

    def _function_of(self, kind: str, is_unsplit: bool) -> "Any":
        """Return the function by which the model infers, on one device or on all."""
        if (kind, is_unsplit) not in self._inferring:
            attribute = keras_steps.FUNCTIONS[kind]
            method = getattr(self.model, self.method.prefix + attribute)
            with suspended:
                if is_unsplit:
                    function = method.__func__.make_unsplit(self.model)
                else:
                    method()
                    function = getattr(self.model, attribute)
                    function = getattr(function, "made", function)
            self._inferring[kind, is_unsplit] = function
        return self._inferring[kind, is_unsplit]


def _is_called_in_training(layer: "Any") -> bool:
    """Return whether a layer is called with ``training=True``, whatever the learning phase is."""
    nodes = getattr(layer, "_inbound_nodes", None) or getattr(layer, "inbound_nodes", None) or ()
    arguments = [
        getattr(n, "arguments", None) or getattr(n, "call_kwargs", None) or {} for n in nodes
    ]
    return any(keywords.get("training") in (1, True) for keywords in arguments)
