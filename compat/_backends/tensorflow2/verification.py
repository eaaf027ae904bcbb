"""Verification of a step of a Keras model, or of a call of a native one, against one device.

How a native model is trained is not known here, so a call is verified: its results, the variables
that it sets, and the gradients of those it reads for a random upstream gradient. This takes a call
outside of a ``tf.function``, since within there are no values yet; a warning says so once. Random
numbers that TensorFlow draws without a ``tf.random.Generator`` go on from where the verified calls
left them.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import itertools
from typing import Dict, List

import numpy as np
import tensorflow as tf

from ... import _keras, _verification
from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from ..._verification import keras_steps
from . import batch_norm
from .arguments import tensors_of
from .graph import recording
from .native_kinds import held, is_variable
from .profiler import products
from .replicas import ReplicatedCall
from .run_metadata import nodes_executed
from .side_effects import Snapshot, roots_of
from .state import is_generator


def _build(optimizer, variables):
    """Make the optimizer's state, which some versions of Keras make in the first step.

    Returns:
        Whether it was still to be made.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if _is_of_tensorflow(optimizer):
        with tf.init_scope():
            optimizer.optimizer._create_slots(list(variables))  # unless they are there already
    if _is_built(optimizer):
        return False
    # The second is that of tf.keras' legacy optimizers.
    build = getattr(optimizer, "build", getattr(optimizer, "_create_all_weights", None))
    if build is not None:
        build(variables)
    return True


def _is_of_tensorflow(optimizer):
    """Return whether it is one of ``tf.compat.v1.train``, which tf.keras wraps."""
    return hasattr(getattr(optimizer, "optimizer", None), "_create_slots")


def _is_built(optimizer):
    if _is_of_tensorflow(optimizer):  # ``_build`` has made its state
        return True
    if hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy ones
        return len(optimizer.weights) > 0
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def _batches(model, iterator):
    """Return the batches that a call of the model's function consumes."""
    if isinstance(iterator, list):  # Keras 3 predicts lists of batches
        return iterator
    count = getattr(model, "_steps_per_execution", None)
    count = getattr(model, "steps_per_execution", 1) if count is None else count
    count = int(count.numpy() if hasattr(count, "numpy") else count)
    return [next(iterator)] + list(itertools.islice(iterator, count - 1))


class _Step(keras_steps.KerasStep):
    """A step of a Keras model."""

    variable_kinds = (tf.Variable,)

    def __init__(self, method, function, iterator):
        super().__init__(method, function, _batches(function.model, iterator))
        self.iterator = iterator

    def attributes(self):
        return Snapshot(super().attributes(), *roots_of(self.model))

    def is_synchronized(self, layer):
        # One that cannot be synchronized makes the model run unsplit.
        return bool(batch_norm.requested(self.model, [layer]))

    # Batches ------------------------------------------------------------------------------------

    def taken(self):
        """Return an iterator over the same batches, with the same static sizes."""
        spec = getattr(self.iterator, "element_spec", None)
        if spec is None:
            return self.data if isinstance(self.iterator, list) else iter(self.data)
        datasets = map(tf.data.Dataset.from_tensors, self.data)
        dataset = functools.reduce(lambda first, second: first.concatenate(second), datasets)
        variant = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(variant, spec))

    def as_array(self, value):
        value = value.to_tensor() if hasattr(value, "to_tensor") else value
        return value.numpy() if hasattr(value, "numpy") else value

    # Doing it -----------------------------------------------------------------------------------

    def on_all_devices(self):
        start, attributes = self.read(), self.attributes()
        results, traced = self._traced_and_done()
        if traced and self.method.has_built and attributes.have_changed():
            # TensorFlow traces a function twice if it makes variables. Here the optimizer's already
            # existed, and something counts traces: an optimizer, or a layer's seed.
            self.write(start)
            self.function.made = self.method.made_anew(self.model)
            results, _ = self._traced_and_done()
        self.method.has_built = False
        return results, self.named(results)

    def _traced_and_done(self):
        """Do the step; return its results, and whether a graph was traced.

        Python counters begin a graph on one device with the values that they have in this one.
        """
        name = keras_steps.STEPS[self.kind]
        plain, traces = getattr(self.model, name), []

        def step(*args):
            if not tf.executing_eagerly():
                traces.append(True)
                self.start_attributes = self.attributes()
            return plain(*args)

        with patching.replaced(self.model, **{name: step}):
            return self.function.made(self.taken()), bool(traces)

    def operations(self):
        function = self.method.made_anew(self.model)
        nodes = nodes_executed(lambda: function(self.taken()))
        return products(nodes)


class VerifiedStep(keras_steps.Verified):
    """The method by which tf.keras, or Keras 3 on TensorFlow, makes the function of a step."""

    step = _Step
    has_built = False  # whether the optimizer's state was made here, not in a step

    def is_ready(self, model):
        is_built = getattr(model, "built", True)
        if self.kind != "train" or not is_built:
            return is_built
        optimizers = keras_steps.optimizers(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not _keras.is_users(type(model).train_step):
            self.has_built = _build(optimizer, model.trainable_variables) or self.has_built
            optimizers = [optimizer]
        return all(_is_built(optimizer) for optimizer in optimizers)


# Names of the argument that switches between training and inference.
_TRAINING = ("training", "is_training")


class VerifiedCall(_verification.Step):
    """A call of a ``NativeCall``."""

    input_attributes = ("args", "kwargs")

    def __init__(self, call, model, args, kwargs):
        self.call, self.model, self.args, self.kwargs = call, model, args, kwargs
        self.is_recording = recording()
        self.replicated = functools.partial(ReplicatedCall.invoke, call, model)
        self.variables = self._found()
        self.dtype = keras_steps.coarsest({v.dtype.name for v in self.variables.values()})

    def attributes(self):
        parts = [self.model] + list(getattr(self.model, "submodules", ()))
        kinds = (bool, int, float, tf.Tensor)
        parts = [part for part in parts if hasattr(part, "__dict__")]
        numbers = _verification.Attributes(parts, lambda name, value: isinstance(value, kinds))
        function = getattr(self.model, "python_function", None)
        return Snapshot(numbers, self.model, function)

    def by_design(self, inference, changed):
        layers = [part for part in self._parts() if hasattr(part, "moving_mean")]
        synchronized = list(map(id, batch_norm.requested(self.model, layers)))
        layers = [layer for layer in layers if id(layer) not in synchronized]
        moved = [self.variables[label] for label in changed if label in self.variables]
        training = self.is_recording and not inference
        trained = keras_steps.trained_layers(layers, training, moved)
        return keras_steps.normalized(trained, self.model)

    def random_rates(self):
        return _verification.rates((getattr(p, "name", ""), p) for p in self._parts())

    def _parts(self):
        return [*getattr(self.model, "submodules", ()), self.model, *held(self.model)]

    def _found(self):
        """Return the model's variables, and all others that the call reads or sets, by label."""
        variables: "List[tf.Variable]" = []
        # A call that cannot be traced has only the variables that the model holds.
        with contextlib.suppress(Exception):
            # Makes the variables that a first call makes, too.
            traced = tf.function(self._plain).get_concrete_function(*self.args, **self.kwargs)
            variables += traced.graph.variables
        variables += list(getattr(self.model, "variables", ()))
        # A tf.random.Generator has one.
        values = [getattr(value, "_state_var", value) for value in held(self.model)]
        variables += filter(is_variable, values)
        labelled: "Dict[str, tf.Variable]" = {}
        for variable in {id(variable): variable for variable in variables}.values():
            word = "weight" if variable.trainable and variable.dtype.is_floating else "state"
            word = "random" if is_generator(variable) else word
            label = "{} {}".format(word, variable.name.split(":")[0])
            labelled[keras_steps.unlike(label, labelled)] = variable
        return labelled

    def _plain(self, *args, **kwargs):
        with unsplit:
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
            # In another call, so that the caller's tape records the model alone.
            start = self.read()
            with work.uncounted:  # it runs once more
                gradients = _in_a_thread(self._differentiated, self.replicated)
            self.write(start)
        result = self.replicated(*self.args, **self.kwargs)
        return result, dict(gradients, **self._outputs(result))

    def _outputs(self, result):
        return _verification.numbered(value.numpy() for value in tensors_of(result))

    def _differentiated(self, call):
        """Return a call's results and, where the caller records a tape, its gradients, by label."""
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
        return products(nodes_executed(step))

    def outputs(self, is_unsplit):
        args, kwargs = self._in_inference()
        call = self._plain if is_unsplit else self.replicated
        return self._outputs(_in_a_thread(call, *args, **kwargs))

    def _in_inference(self):
        """Return the arguments, with the one that switches training on set to False."""
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
    """Call a function in another thread, where no tape of the caller records it."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()
