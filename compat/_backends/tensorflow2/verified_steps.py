"""Verification of Keras models on TensorFlow 2: a step done on one device, from the same state."""

import contextlib
import sys

from ... import _replicas
from ..._verification import keras_steps
from . import op_placement


class VerifiedStep(keras_steps.Verified):
    """The method by which tf.keras, or Keras 3 on TensorFlow, makes the function of a step."""

    def is_ready(self, model):
        if not getattr(model, "built", True):
            return False
        if self.kind != "train":
            return True
        optimizers = keras_steps.optimizers(model)
        optimizer = getattr(model, "optimizer", None)
        if _is_keras_own(model, "train_step") and optimizer is not None:
            _build(optimizer, model.trainable_variables)
            optimizers = [optimizer]
        return all(_is_built(optimizer) for optimizer in optimizers)

    def make_undivided(self, model):
        return self.made_anew(model)

    def made_anew(self, model):
        return keras_steps.made_anew(self, model, (self.kind + "_tf_function",))

    def step(self, function, args):
        return _Step(sys.modules["tensorflow"], self, function, args[0])


def _is_keras_own(model, method):
    package = getattr(getattr(type(model), method, None), "__module__", "").split(".")[0]
    return package in ("keras", "tf_keras", "tensorflow", "tensorflow_core")


def _build(optimizer, variables):
    """Make the optimizer's state, which some versions of Keras make in the first step."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if _is_built(optimizer):
        return
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy optimizers
        optimizer._create_all_weights(variables)


def _is_built(optimizer):
    if hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy ones
        return len(optimizer.weights) > 0
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


class _Step(keras_steps.KerasStep):
    def __init__(self, tf, method, function, iterator):
        super().__init__(method, function)
        self.method = method
        self.tf = tf
        self.iterator = iterator
        self.batches = self._taken()

    # Batches ------------------------------------------------------------------------------------

    def _taken(self):
        """The batches that this call of the function consumes."""
        count = getattr(self.model, "_steps_per_execution", None)
        count = getattr(self.model, "steps_per_execution", 1) if count is None else count
        count = int(count.numpy() if hasattr(count, "numpy") else count)
        if isinstance(self.iterator, list):  # Keras 3 predicts lists of batches
            return self.iterator
        batches = [next(self.iterator)]
        while len(batches) < count:
            try:
                batches.append(next(self.iterator))
            except (StopIteration, self.tf.errors.OutOfRangeError):
                break
        return batches

    def _again(self):
        """An iterator over the same batches, in which sizes are known as far as they were."""
        spec = getattr(self.iterator, "element_spec", None)
        if spec is None:
            return self.batches if isinstance(self.iterator, list) else iter(self.batches)
        tf, batches = self.tf, self.batches
        flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]
        specs = tf.nest.flatten(spec, expand_composites=True)
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([tuple(values) for values in flat]),
            output_types=tuple(value.dtype for value in flat[0]),
            output_shapes=tuple(s.shape for s in specs),
        )
        dataset = dataset.map(
            lambda *values: tf.nest.pack_sequence_as(spec, values, expand_composites=True)
        )
        return iter(dataset)

    def as_array(self, value):
        value = value.to_tensor() if hasattr(value, "to_tensor") else value
        return value.numpy() if hasattr(value, "numpy") else value

    # Doing it -----------------------------------------------------------------------------------

    def on_one_device(self):
        with _replicas.undivided():
            return self.named(self.function.undivided(self._again()))

    def on_all_devices(self):
        results = self.function.made(self._again())
        return results, self.named(results)

    def operations(self):
        function = self.method.made_anew(self.model)
        nodes = op_placement.executed(lambda: function(self._again()))
        return op_placement.products(nodes)

    def outputs(self, undivided):
        data = self.batches[0]
        inputs = data[0] if isinstance(data, tuple) else data
        with _replicas.undivided() if undivided else contextlib.ExitStack():
            try:
                results = self.model(inputs, training=False)
            except NotImplementedError:  # a model whose train_step calls its parts
                return None
        return self.outputs_and_losses(results, self.model.losses)
