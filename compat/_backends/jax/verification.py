"""Verification of models on several devices: a step is run again on one device.

A step of Keras on JAX is a pure function of the state, which Keras passes from step to step. Its
random numbers do not depend on how it is sharded, so they are compared as well.
"""

import functools
import itertools
import sys

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from ... import _keras
from ..._runtime import patching
from ..._runtime.effects import Effects
from ..._verification import keras_steps
from . import profiler


class _UsersObjects:
    """State of the objects of user-defined layers, and of numbers that other objects hold.

    Arguments:
        numbers: the latter.
        model: the model.
    """

    def __init__(self, numbers, model):
        self.numbers, self.have_changed = numbers, numbers.have_changed
        layers = [layer for layer in _keras.all_layers(model) if _keras.is_users(type(layer))]
        self.effects = Effects(layers, _is_value, _names_of_keras)
        self.effects.note()

    def put_back(self):
        self.numbers.put_back()
        self.effects.restore()


def _is_value(value):
    """Return whether an object is an array, a variable, or another object of Keras'."""
    of_keras = type(value).__module__.startswith("keras.") and not isinstance(value, (dict, list))
    return of_keras or isinstance(value, jax.Array)


def _names_of_keras(layer):
    """Return the attributes that Keras sets itself, some when a layer first runs."""
    if not isinstance(layer, sys.modules["keras"].layers.Layer):
        return ()
    return [name for name in vars(layer) if name.startswith("_") or name in _OF_KERAS]


_OF_KERAS = ("built", "history", "optimizer", "stop_training", *_keras.FUNCTIONS)


class _Step(keras_steps.KerasStep):
    def __init__(self, method, function, state, iterator):
        self.collection = iter if hasattr(iterator, "__next__") else list  # Keras 3.6's are lists
        iterator, count = iter(iterator), function.model.steps_per_execution
        first = next(iterator)
        super().__init__(method, function, [first, *itertools.islice(iterator, count - 1)])
        model = self.model
        groups = [("weight", model.trainable_variables), ("state", model.non_trainable_variables)]
        if self.kind == "train":
            groups.append(("slot", getattr(model.optimizer, "variables", ())))
        if self.kind != "predict":
            groups.append(("metric state", model.metrics_variables))
        # In the order of Keras' state.
        self.labels = [self.label_of(word, v) for word, group in groups for v in group]
        leaves, self.tree = tree_flatten(state)
        self.values = dict(zip(self.labels, map(np.asarray, leaves)))
        # Of values that lie elsewhere JAX would compile a program of their own.
        self.shardings = dict(zip(self.labels, [leaf.sharding for leaf in leaves]))

    def as_array(self, value):
        return np.asarray(value)

    def read(self):
        return dict(self.values)

    def write(self, values):
        self.values.update((label, values[label]) for label in self.values if label in values)

    def give_up(self, values):
        """Restore the variables, whose values Keras has removed for the duration of its loop."""
        self.write(values)
        for label, variable in self._labelled.items():
            variable.assign(self.values[label])

    def is_random(self, label):
        return False

    def attributes(self):
        return _UsersObjects(super().attributes(), self.model)

    def by_design(self, inference, changed):
        return None  # one program, with the statistics of the whole batch

    def _state(self, shardings):
        """Return copies of the values for a program, which reuses their memory.

        Arguments:
            shardings: by label; values without one are on JAX's default device.
        """
        pairs = self.values.items()
        # Of an array of NumPy all devices may share the memory, over which programs of JAX 0.4.31
        # write their results.
        placed = [jax.device_put(jax.numpy.array(v), shardings.get(label)) for label, v in pairs]
        return tree_unflatten(self.tree, placed)

    def done(self, function):
        shardings = {} if function is self.function.unsplit else self.shardings
        results, state = function(self._state(shardings), self.collection(self.data))
        leaves = tree_leaves(state)  # in Keras 3.6 a prediction gives the last ones only
        changed = self.labels[len(self.labels) - len(leaves) :]
        self.values.update(zip(changed, map(np.asarray, leaves)))
        return (results, state), self.named(results)

    def operations(self):
        function = self.method.made_anew(self.model)
        return profiler.products(profiler.executed_operations(lambda: self.done(function)))

    def infer(self, inputs):
        def infer(weights, state, inputs):
            outputs, _, losses = self.model.stateless_call(
                weights, state, inputs, training=False, return_losses=True
            )
            return outputs, losses

        weights, state, *_ = self._state({})
        return jax.jit(infer)(weights, state, inputs)


class VerifiedStep(keras_steps.Verified):
    """Method by which Keras makes the function of a step."""

    step = _Step

    def made_anew(self, model):
        # jax.jit() keeps one program for each function, and Keras gives it the model's method: by
        # another object, or the program that was traced unsplit would run in place of the other.
        name = keras_steps.STEPS[self.kind]
        step = functools.partial(getattr(model, name))
        step.__name__ = name  # by which ``CountedSteps`` recognises it
        with patching.replaced(model, **{name: step}):
            return super().made_anew(model)
