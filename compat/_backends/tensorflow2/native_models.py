"""TensorFlow 2's models without Keras: ``tf.Module``, ``tf.function``, objects with variables.

An object is called by its type's ``__call__``, so the object gets another type: a subclass of
its own, made for it, of the same name.

What a model is trained with is not known here, so what is verified is a call: its results, the
variables that it sets, and the gradients of those it reads for a random gradient of its results.
Only calls from outside of a ``tf.function`` can be, since in one there are no numbers yet; a
warning tells the user once. Random numbers that TensorFlow draws without a ``tf.random.Generator``
go on from where the verified calls left them.
"""

import concurrent.futures
import contextlib
import functools
import inspect

import numpy as np
import tensorflow as tf

from ... import _verification, errors
from ..._rows import split_rows
from ..._runtime import work
from ..._verification import keras_steps
from . import executions, merging, side_effects, watched_loops
from .replicas import are_arrays, recording, tensors_of
from .replicated_call import ReplicatedCall
from .runtime import held, is_variable


def parallelize(model, devices, replicated):
    plain = getattr(type(model), "_compat_plain_class", None)
    if plain is not None:
        model.__class__ = plain
    if replicated:
        model.__class__ = _replicated_class(type(model), NativeCall(devices))
    return model


def verify(model, verification):
    """Verify calls of ``model``, if it runs on several devices; None: no more."""
    if "_compat_call" in vars(type(model)):
        type(model)._compat_call.verification = verification


def _replicated_class(plain, replicated_call):
    def __call__(self, *args, **kwargs):
        return watched_loops.called(self, type(self)._compat_call, (self,) + args, kwargs)

    def by_plain_class(name):
        """The method of the plain class, while the object is one of it."""

        def method(self, *args, **kwargs):
            replicated, self.__class__ = type(self), plain
            try:
                return getattr(self, name)(*args, **kwargs)
            finally:
                self.__class__ = replicated

        return method

    members = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
    members.update(__call__=__call__, _compat_plain_class=plain, _compat_call=replicated_call)
    members["autograph_info__"] = {}  # as in ReplicatedCall
    # Copies and pickles are plain, and what TensorFlow saves: a __call__ that is a tf.function.
    for name in ("__reduce_ex__", "_trackable_children", "_list_functions_for_serialization"):
        if hasattr(plain, name):
            members[name] = by_plain_class(name)
    return type(plain)(plain.__name__, (plain,), members)


class NativeCall(ReplicatedCall):
    """The ``__call__`` of a native model, on several devices."""

    is_of_keras = False
    _has_warned = False
    _has_said = False  # that it is not verified
    verification = None

    def invoke(self, model, *args, **kwargs):
        kind, verification = "train" if recording() else "predict", self.verification
        is_wanted = verification is not None and verification.wants(kind)
        if is_wanted and not split_rows.runs_undivided():
            if tf.executing_eagerly() and verification.is_due(kind):
                return verification.verify(kind, VerifiedCall(self, model, args, kwargs))
            if not (tf.executing_eagerly() or self._has_said):
                self._has_said = True
                errors.warn(
                    f"verify={verification.asked}: model {verification.record.model!r} is called "
                    "within a tf.function, where there are no numbers to compare yet, so those "
                    "calls are not verified. Call it once outside, within a tf.GradientTape for "
                    "its gradients: model(batch)."
                )
        return super().invoke(model, *args, **kwargs)

    def _given(self, model, given):
        if are_arrays(given) and not self._has_warned:
            self._has_warned = True
            errors.warn(
                f"A call of the parallelized {type(model).__name__} was given numpy arrays, which "
                "are not split, so it ran on one device: give it tensors, tf.constant(array)."
            )
        return given

    def _trace(self, call, arguments, state, effects):
        if tf.executing_eagerly() and not self.traces:
            # Variables that the first call makes must not be made within a replica.
            args, kwargs = arguments.structure
            with effects.taken():
                tf.function(call).get_concrete_function(*args, **kwargs)
        return super()._trace(call, arguments, state, effects)

    def plain(self, model):
        plain = type(model)._compat_plain_class
        return plain.__call__.__get__(model, plain)


# Names of the argument that switches between training and inference.
_TRAINING = ("training", "is_training")


class VerifiedCall(_verification.Step):
    """A call of a ``NativeCall``."""

    given = ("args", "kwargs")

    def __init__(self, call, model, args, kwargs):
        self.call, self.model, self.args, self.kwargs = call, model, args, kwargs
        self.is_recording = recording()
        self.replicated = functools.partial(ReplicatedCall.invoke, call, model)
        self.variables = self._found()
        self.dtype = keras_steps.coarsest({v.dtype.name for v in self.variables.values()})

    def attributes(self):
        parts = [self.model] + list(getattr(self.model, "submodules", ()))
        kinds = (bool, int, float, tf.Tensor)
        own = [part for part in parts if hasattr(part, "__dict__")]
        numbers = _verification.Attributes(own, lambda name, value: isinstance(value, kinds))
        function = getattr(self.model, "python_function", None)
        return side_effects.Snapshot(numbers, self.model, function)

    def by_design(self, inference, changed):
        parts = [*getattr(self.model, "submodules", ()), self.model, *held(self.model)]
        layers = [part for part in parts if hasattr(part, "moving_mean")]
        moved = [self.variables[label] for label in changed if label in self.variables]
        training = self.is_recording and not inference
        return keras_steps.normalised(keras_steps.trained_layers(layers, training, moved))

    def _found(self):
        """The model's variables, and all others that the call reads or sets, by label."""
        found = []  # type: list
        # Where it fails for being traced, what the model holds is all that is known.
        with contextlib.suppress(Exception):
            # Makes the variables that a first call makes, too.
            traced = tf.function(self._plain).get_concrete_function(*self.args, **self.kwargs)
            found += traced.graph.variables
        found += list(getattr(self.model, "variables", ()))
        # A tf.random.Generator has one.
        values = [getattr(value, "_state_var", value) for value in held(self.model)]
        found += filter(is_variable, values)
        labelled = {}  # type: dict
        for variable in {id(variable): variable for variable in found}.values():
            word = "weight" if variable.trainable and variable.dtype.is_floating else "state"
            word = "random" if merging.is_generator(variable) else word
            label = "{} {}".format(word, variable.name.split(":")[0])
            labelled[keras_steps.unlike(label, labelled)] = variable
        return labelled

    def _plain(self, *args, **kwargs):
        with split_rows.undivided():
            return self.call._unreplicated(self.model, *args, **kwargs)

    def read(self):
        return {label: variable.numpy() for label, variable in self.variables.items()}

    def write(self, values):
        for label, variable in self.variables.items():
            if label in values:
                variable.assign(values[label])

    def is_random(self, label):
        return label.startswith("random ")

    # Doing it -----------------------------------------------------------------------------------

    def on_one_device(self):
        return _in_a_thread(self._differentiated, self._plain)

    def on_all_devices(self):
        gradients = {}
        if self.is_recording:
            # In a call of its own, so that the caller's tape records the model alone.
            start = self.read()
            with work.uncounted:  # it is done once more
                gradients = _in_a_thread(self._differentiated, self.replicated)
            self.write(start)
        result = self.replicated(*self.args, **self.kwargs)
        return result, dict(gradients, **self._outputs(result))

    def _outputs(self, result):
        return _verification.numbered(value.numpy() for value in tensors_of(result))

    def _differentiated(self, call):
        """A call's results and, where the caller records a tape, its gradients, by label."""
        with self.attributes_kept():
            if not self.is_recording:
                return self._outputs(call(*self.args, **self.kwargs))
            with tf.GradientTape() as tape:
                result = call(*self.args, **self.kwargs)
        named = self._outputs(result)
        random = np.random.RandomState(0)
        heads = [tensor for tensor in tensors_of(result) if tensor.dtype.is_floating]
        upstream = [tf.cast(random.normal(size=head.numpy().shape), head.dtype) for head in heads]
        # By their names.
        pairs = self.variables.items()
        weights = {label.partition(" ")[2]: v for label, v in pairs if self.is_weight(label)}
        if heads and weights:
            for name, gradient in tape.gradient(heads, weights, upstream).items():
                if gradient is not None:  # of an embedding, IndexedSlices
                    named["gradient of " + name] = tf.convert_to_tensor(gradient).numpy()
        return named

    def operations(self):
        # A graph is recorded when it is made.
        step = functools.partial(self._differentiated, tf.function(self.replicated))
        return executions.products(executions.executed(step))

    def outputs(self, undivided):
        args, kwargs = self._in_inference()
        call = self._plain if undivided else self.replicated
        return self._outputs(_in_a_thread(call, *args, **kwargs))

    def _in_inference(self):
        """The arguments, with the one that switches training on set to False."""
        called = self.call.plain(self.model)
        for function in (called, self.model):  # the last of which may be one of tf.function
            called = getattr(function, "python_function", called)
        try:
            signature = inspect.signature(called)
            bound = signature.bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return self.args, self.kwargs
        names = [name for name in _TRAINING if name in signature.parameters]
        bound.arguments.update(dict.fromkeys(names, False))
        return bound.args, bound.kwargs


def _in_a_thread(function, *args, **kwargs):
    """Call a function where no tape of the caller's records what it does: they are a thread's."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()
