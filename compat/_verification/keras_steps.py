"""Verification of Keras models, by replacing the methods that make the functions of their steps.

Every Keras keeps three functions, which do a training, a test and a prediction step, and makes
each when it is first needed, by a method of the model. The instance gets other methods in their
place. Each backend has a subclass of ``Verified``, which does a step on one device.
"""

import contextlib
from typing import (
    Any,
    Collection,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from .. import _keras, errors
from .._rows.splitting import unsplit
from .._runtime import patching
from . import reasons, steps
from .verification import Verification, random_numbers, suspended

# Kind of step -> the attribute that keeps its function.
FUNCTIONS = {"train": "train_function", "evaluate": "test_function", "predict": "predict_function"}

# Kind of step -> the model's method that does it.
STEPS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}


class Verified(patching.InstanceMethod):
    """The method that makes one of a model's functions, which verifies its first steps.

    Subclasses for a backend define how a step is done and what it changes; ``prefix`` is that of
    the names of Keras' own methods, "make_" or, in Keras 2, "_make_"; ``step`` the class of
    ``FunctionStep`` for calls of the function.
    """

    prefix = "make_"

    def __init__(self, verification: "Verification", kind: str, attribute: str) -> None:
        super().__init__([])
        self.verification = verification
        self.kind = kind
        self.attribute = attribute
        self.method = self.method_of(attribute)

    @classmethod
    def method_of(cls, attribute: str) -> str:
        """Return the name of Keras' method that makes the function of an attribute."""
        return cls.prefix + attribute.lstrip("_")

    @classmethod
    def install_on(cls, model: "Any", verification: "Optional[Verification]") -> None:
        """Install such methods on ``model``, one for each kind of step; None: remove them.

        The tf.keras of TensorFlow 2.0 and 2.1 has none to replace, which it warns of.
        """
        kinds = {
            name: kind
            for kind, attribute in FUNCTIONS.items()
            for name in sorted({attribute, _keras.function_of_epochs(model, attribute)})
            if hasattr(model, cls.method_of(name))
        }
        if verification is not None and not kinds:
            keras = _keras.keras_of(model)
            errors.warn(
                f"verify={verification.requested}: {keras.__name__} {keras.__version__} makes no "
                "functions of a model's steps that could be verified, so nothing is verified of "
                f"model {model.name!r}. Verify it with TensorFlow 2.2 or later."
            )
        for function, kind in kinds.items():
            present = getattr(vars(model).get(cls.method_of(function)), "__func__", None)
            if isinstance(present, Verified):  # whichever backend's
                present.remove(model)
                made = getattr(model, function, None)
                if isinstance(made, VerifiedFunction):
                    setattr(model, function, made.made)
            if verification is not None:
                method = cls(verification, kind, function)
                method.install(model)
                method.verified(model)

    def invoke(self, model: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        result = self.plain(model)(*args, **kwargs)
        made = self.verified(model)
        return None if result is None else made

    def verified(self, model: "Any") -> "Any":
        """Have the function that Keras has made verified, and return it."""
        attribute = self.attribute
        made = getattr(model, attribute, None)
        is_plain = made is not None and not isinstance(made, VerifiedFunction)
        if is_plain and self.verification.wants(self.kind):
            made = VerifiedFunction(self, model, made)
            setattr(model, attribute, made)
        return made

    # Of a backend -----------------------------------------------------------------------------

    def is_ready(self, model: "Any") -> bool:
        """Return whether all state of a step exists; before, none can be verified."""
        return True

    def make_unsplit(self, model: "Any") -> "Any":
        """Return a function as Keras makes it, which does the step on one device."""
        return self.made_anew(model)

    def made_anew(self, model: "Any") -> "Any":
        """Return a new function as Keras makes it, without replacing the model's."""
        attribute = self.attribute
        names = attribute, self.kind + "_tf_function"  # TensorFlow's Keras sets another one, too
        kept = {name: getattr(model, name) for name in names if hasattr(model, name)}
        # By setattr, as Keras does: it tracks functions of tf.function() as parts of the model.
        setattr(model, attribute, None)
        try:
            getattr(type(model), self.method)(model)
            return getattr(model, attribute)
        finally:
            for name, value in kept.items():
                setattr(model, name, value)


class VerifiedFunction:
    """A function of a model's steps, the first of which are verified.

    Attributes:
        made: Keras' function, for all devices.
        unsplit: one that does the same on one device.
    """

    unsplit: "Any" = None

    def __init__(self, method: "Verified", model: "Any", made: "Any") -> None:
        vars(self).update(method=method, model=model, made=made, unsplit=None)

    def __getattr__(
        self, name: str
    ) -> "Any":  # its outputs, for example, to which callbacks may add
        return getattr(self.made, name)

    def __setattr__(self, name: str, value: "Any") -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:  # what it fetches, for example
            setattr(self.made, name, value)

    def __call__(self, *args: "Any") -> "Any":
        method = self.method
        verification = method.verification
        if not suspended and not verification.wants(method.kind):
            if getattr(self.model, method.attribute, None) is self:
                setattr(self.model, method.attribute, self.made)
        elif not method.is_ready(self.model):
            with suspended:
                return self.made(*args)
        elif verification.is_due(method.kind):
            if self.unsplit is None:
                with random_numbers(), verification.shown(method.kind):
                    self.unsplit = method.make_unsplit(self.model)
            return verification.verify(method.kind, method.step(method, self, *args))
        return self.made(*args)


def named_results(model: "Any", kind: str, results: "Any") -> "Dict[str, Any]":
    """Return a step's results, a dictionary of logs or the outputs of a prediction, by label."""
    if kind == "predict":
        return outputs(model, results)
    if isinstance(results, dict):
        return {"the loss" if k == "loss" else "metric " + k: v for k, v in results.items()}
    values = results if isinstance(results, (list, tuple)) else [results]
    names = list(getattr(model, "metrics_names", ()))[1:]
    names += map(str, range(len(names) + 1, len(values)))
    return dict(zip(["the loss"] + ["metric " + name for name in names], values))


def outputs(model: "Any", results: "Any") -> "Dict[str, Any]":
    """Return a model's outputs by label, with the names of their layers, if these are known."""
    flat = list(_flat(results))
    names = [f" ({name})" for name in getattr(model, "output_names", None) or ()]
    if len(names) != len(flat):
        names = [""] * len(flat)
    return {f"output {n}{name}": v for n, (name, v) in enumerate(zip(names, flat), 1)}


def _flat(value: "Any") -> "Iterator[Any]":
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value


class FunctionStep(steps.Step):
    """A call of a function of a model's steps.

    Arguments:
        method: the ``Verified``.
        function: the ``VerifiedFunction`` that was called.
        data: the step's inputs: arrays, or batches.
    """

    input_attributes = ("data",)

    def __init__(self, method: "Any", function: "Any", data: "Any") -> None:
        self.method = method
        self.function = function
        self.data = data
        self.model = function.model
        self.kind = method.kind

    def random_rates(self) -> "Dict[str, str]":
        layers = _keras.layers_within(self.model)
        return reasons.rates((layer.name, layer) for layer in layers)

    def taken(self) -> "Any":
        """Return the argument of a function."""
        return self.data

    def named(self, results: "Any") -> "Dict[str, Any]":
        """Return a step's results, by label, as arrays."""
        return named_results(self.model, self.kind, results)

    def done(self, function: "Any") -> "Tuple[Any, Dict[str, Any]]":
        """Call a function, and return its results, also by label."""
        results = function(self.taken())
        return results, self.named(results)

    def on_one_device(self) -> "Dict[str, Any]":
        with unsplit:
            return self.done(self.function.unsplit)[1]

    def on_all_devices(self) -> "Tuple[Any, Dict[str, Any]]":
        return self.done(self.function.made)


class KerasStep(FunctionStep):
    """A step of a model of tf.keras or Keras 3, whose variables are objects; of some batches."""

    #: The classes of variables, besides Keras' own.
    variable_kinds: "Tuple[type, ...]" = ()

    def __init__(self, method: "Any", function: "Any", data: "Any") -> None:
        super().__init__(method, function, data)
        self._labels: "Dict[int, str]" = {}  # by id of the variable
        self._labelled: "Dict[str, Any]" = {}  # the variables by label
        layers = _keras.all_layers(self.model)
        dtypes = {str(getattr(layer, "compute_dtype", None) or layer.dtype) for layer in layers}
        result_type = getattr(_keras.keras_of(self.model).backend, "result_type", None)
        if result_type is not None:
            # On JAX and torch Keras 3 sums float64 in float32, as in losses and normalization.
            dtypes |= {result_type(dtype, "float32") for dtype in dtypes if "float" in dtype}
        self.dtype = coarsest(dtypes)

    def by_design(
        self, inference: bool, changed: "Collection[str]"
    ) -> "Optional[reasons.Incomparable]":
        training = self.kind == "train" and not inference
        labelled = self.labelled()
        moved = [labelled[label] for label in changed if label in labelled]
        layers = trained_layers(_keras.all_layers(self.model), training, moved)
        layers = [each for each in layers if not self.is_synchronized(each)]
        return normalized(layers, self.model)

    def is_synchronized(self, layer: "Any") -> bool:
        """Return whether a layer normalizes by the whole batch, if it is batch normalization."""
        return False

    def as_array(self, value: "Any") -> "Any":
        """Return a tensor, or the value of a variable, as a numpy array."""

    def labelled(self) -> "Dict[str, Any]":
        """Return all variables that the step may change, by label, which is always the same."""
        model = self.model
        kinds = self.variable_kinds + _keras.variable_kinds(_keras.keras_of(model))
        trainable = {id(v) for v in model.trainable_variables}
        groups = [("state", _variables_of(model))]
        # Some of an optimizer's variables are not among those that it lists, such as those of a
        # user-defined schedule.
        for optimizer in optimizers(model):
            groups.append(
                ("slot", _variables_of(optimizer) + steps.variables_held([optimizer], kinds))
            )
        groups += [("metric state", metric.variables) for metric in model.metrics]
        groups.append(("state", steps.variables_held([model], kinds)))
        for word, variables in groups:
            for variable in variables:
                self.label_of("weight" if id(variable) in trainable else word, variable)
        return self._labelled

    def label_of(self, word: str, variable: "Any") -> str:
        """Return the label of a variable; an optimizer may call two of them the same."""
        if id(variable) not in self._labels:
            name = getattr(variable, "path", None) or variable.name
            label = self._labels[id(variable)] = unlike(f"{word} {name}", self._labelled)
            self._labelled[label] = variable
        return self._labels[id(variable)]

    def attributes(self) -> "steps.Attributes":
        return steps.numbers_held([self.model] + optimizers(self.model))

    def read(self) -> "Dict[str, Any]":
        return {label: self.as_array(variable) for label, variable in self.labelled().items()}

    def write(self, values: "Mapping[str, Any]") -> None:
        for label, variable in self.labelled().items():
            if label in values:
                variable.assign(values[label])
            elif label.startswith("metric state"):  # made by the step
                variable.assign(0 * self.as_array(variable))

    def is_random(self, label: str) -> bool:
        return "seed_generator_state" in label or "StateVar" in label

    def named(self, results: "Any") -> "Dict[str, Any]":
        return {label: self.as_array(v) for label, v in super().named(results).items()}

    def infer(self, inputs: "Any") -> "Tuple[Any, Sequence[Any]]":
        """Return the model's outputs in inference, and the losses that its layers add."""
        return self.model(inputs, training=False), self.model.losses

    def outputs(self, is_unsplit: bool) -> "Optional[Dict[str, Any]]":
        inputs = self.data[0]
        if isinstance(inputs, (tuple, list)):  # Keras takes a list, as of torch's loaders, too
            inputs = inputs[0]
        with unsplit if is_unsplit else contextlib.ExitStack():
            try:
                results, losses = self.infer(inputs)
            except NotImplementedError:  # a model whose train_step calls its parts
                return None
        named = outputs(self.model, results)
        named.update((f"output: loss {n} of add_loss()", loss) for n, loss in enumerate(losses, 1))
        return {label: self.as_array(value) for label, value in named.items()}


def unlike(label: str, others: "Container[str]") -> str:
    """Return the label, or one like it that is not among the others."""
    while label in others:
        label += "'"
    return label


def optimizers(model: "Any") -> "List[Any]":
    """Return the optimizer of a model, and others that are attributes of it."""
    held = list(vars(model).values()) + [getattr(model, "optimizer", None)]
    optimizers = [v for v in held if hasattr(v, "apply_gradients") and not isinstance(v, type)]
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def _variables_of(thing: "Any") -> "List[Any]":
    variables = getattr(thing, "variables", ())
    variables = variables() if callable(variables) else variables
    # The vocabulary of a layer, which tf.keras saves as a weight, is no variable.
    return [
        variable for variable in variables if hasattr(variable, "name") or hasattr(variable, "path")
    ]


def trained_layers(
    layers: "Iterable[Any]", training: bool, moved: "Iterable[Any]" = (), frozen: bool = False
) -> "List[Any]":
    """Return the layers that train in a step.

    Arguments:
        layers: those of the model.
        training: whether it is a training step.
        frozen: whether frozen layers train, too, unless they have TensorFlow 2's behaviour.
        moved: the variables that it changes. With ``training=True``, or a learning phase that is
            set, batch normalization moves its averages in any step.
    """
    moved = set(map(id, moved))  # where it is empty, no layer is asked for its variables
    return [
        layer
        for layer in layers
        if training and (layer.trainable or not getattr(layer, "_USE_V2_BEHAVIOR", not frozen))
        or moved and not moved.isdisjoint(map(id, _variables_of(layer)))
    ]  # fmt: skip


_BY_REPLICA = ("BatchNormalization", "BatchNormalizationBase", "BatchNormalizationV1")


def normalized(layers: "Iterable[Any]", model: "Any") -> "Optional[reasons.Incomparable]":
    """Return why a step of a model, in which these layers train, differs by design, or None."""
    for layer in layers:
        if any(c.__name__ in _BY_REPLICA for c in type(layer).__mro__):
            return reasons.normalized("layer", layer.name, model)
    return None


def coarsest(dtypes: "Container[str]") -> str:
    """Return the type with the fewest digits of those in which layers compute."""
    order = ["bfloat16", "float16", "float32", "float64"]
    return next((dtype for dtype in order if dtype in dtypes), "float32")
