"""Verification of Keras models on TensorFlow 2: a step done on one device, from the same state."""

import functools
import itertools

import tensorflow as tf

from ... import _keras
from ..._runtime import patching
from ..._verification import keras_steps
from . import op_placement


def _build(optimizer, variables):
    """Make the optimizer's state, which some versions of Keras make in the first step.

    Returns:
        Whether it was not there yet.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if _is_of_tensorflow(optimizer):
        with tf.init_scope():
            optimizer.optimizer._create_slots(list(variables))  # those that are not there yet
    if _is_built(optimizer):
        return False
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy optimizers
        optimizer._create_all_weights(variables)
    return True


def _is_of_tensorflow(optimizer):
    """Whether it is one of ``tf.compat.v1.train``, which tf.keras wraps."""
    return hasattr(getattr(optimizer, "optimizer", None), "_create_slots")


def _is_built(optimizer):
    if _is_of_tensorflow(optimizer):  # ``_build`` has made its state
        return True
    if hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy ones
        return len(optimizer.weights) > 0
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def _batches(model, iterator):
    """Those that a call of the model's function consumes."""
    if isinstance(iterator, list):  # Keras 3 predicts lists of batches
        return iterator
    count = getattr(model, "_steps_per_execution", None)
    count = getattr(model, "steps_per_execution", 1) if count is None else count
    count = int(count.numpy() if hasattr(count, "numpy") else count)
    return [next(iterator)] + list(itertools.islice(iterator, count - 1))


class _TensorFlow2Step(keras_steps.KerasStep):
    variable_kinds = (tf.Variable,)

    def __init__(self, method, function, iterator):
        super().__init__(method, function, _batches(function.model, iterator))
        self.iterator = iterator

    # Batches ------------------------------------------------------------------------------------

    def taken(self):
        """An iterator over the same batches, in which sizes are known as far as they were."""
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
        start, noted = self.read(), self.attributes()
        results, traced = self._traced_and_done()
        if traced and self.method.has_built and noted.have_changed():
            # TensorFlow traces a function twice that makes variables. Here the optimizer's were
            # there already, and something counts traces: an optimizer, or a layer's seed.
            self.write(start)
            self.function.made = self.method.made_anew(self.model)
            results, _ = self._traced_and_done()
        self.method.has_built = False
        return results, self.named(results)

    def _traced_and_done(self):
        """Do the step; what it returned, and whether a graph was traced.

        What counts in Python begins a graph on one device with the numbers of this one.
        """
        name = keras_steps.STEPS[self.kind]
        plain, traces = getattr(self.model, name), []

        def step(*args):
            if not tf.executing_eagerly():
                traces.append(True)
                self.noted = self.attributes()
            return plain(*args)

        with patching.replaced(self.model, **{name: step}):
            return self.function.made(self.taken()), bool(traces)

    def operations(self):
        function = self.method.made_anew(self.model)
        nodes = op_placement.executed(lambda: function(self.taken()))
        return op_placement.products(nodes)


class VerifiedTensorFlow2Step(keras_steps.Verified):
    """The method by which tf.keras, or Keras 3 on TensorFlow, makes the function of a step."""

    step = _TensorFlow2Step
    has_built = False  # whether the optimizer made its state here, not in a step

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
