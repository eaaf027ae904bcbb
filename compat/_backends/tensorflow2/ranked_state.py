"""Variables that a step sets besides the weights, merged over all ranks.

How their values are merged is found by a trial (see ``_ranks.state``) before the step is traced:
the step runs eagerly, on some rows of the first batch, and applies no gradients.
"""

import contextlib
import itertools
from typing import Any, Dict, Iterable, List

import tensorflow as tf

from ... import _keras
from ..._ranks import merging, metrics
from ..._ranks import state as rank_state
from ..._runtime import patching
from ..._verification import keras_steps, steps
from .arguments import as_tensors
from .state import is_set, read

_OPERATIONS = merging.Operations(
    tf.zeros_like,
    tf.maximum,
    tf.minimum,
    tf.round,
    tf.cast,
    lambda tensor, share: tensor * tf.cast(share, tensor.dtype),
)


class TracedState:
    """The variables that the steps of one model set, and how they are merged."""

    def __init__(self, engine: "Any") -> None:
        self.engine = engine
        self.merges: "Dict[int, merging.Merge]" = {}  # by the id of a variable that was tried
        self.tried: "List[Any]" = []

    def begin(self, model: "Any", step: "Any", iterator: "Any", stepping: "Any") -> "Any":
        """Try the step with the first batch, if need be; return an iterator with the same batches.

        Arguments:
            model: the model.
            step: its ``train_step``, as it was before.
            iterator: of batches.
            stepping: the context of a step.
        """
        if not self.is_due(model):
            return iterator
        # A variable in tf.keras, of another name in its older versions.
        names = ("steps_per_execution", "_steps_per_execution")
        count = next((getattr(model, name) for name in names if hasattr(model, name)), 1)
        batch, iterator = _peeked(iterator, int(count))
        with stepping:
            self.decide(model, step, batch)
        return iterator

    def is_due(self, model: "Any") -> bool:
        """Return whether there are variables to try that have not been tried."""
        return list(map(id, rank_state.tried(model))) != list(map(id, self.tried))

    def decide(self, model: "Any", step: "Any", data: "Any") -> None:
        """Try with a batch how variables are merged; see ``_ranks.state``."""
        self.tried = tried = rank_state.tried(model)
        if not tried:
            return
        keras, (read_all, write) = _keras.keras_of(model), _keras.reader_and_writer(model)
        variables = [*model.variables, *metrics.variables(model)]
        unique = list({id(v): v for v in variables}.values())
        data = tf.nest.map_structure(
            lambda leaf: leaf.numpy() if tf.is_tensor(leaf) else leaf, data
        )
        rows = next(int(leaf.shape[0]) for leaf in tf.nest.flatten(data) if leaf is not None)
        counters = steps.numbers_held([*_keras.all_layers(model), *keras_steps.optimizers(model)])

        def run(numbers, values):
            some = rank_state.some_rows(keras, data, rows, numbers)
            with _keras.kept(model, unique):
                write(list(zip(tried, values)))
                step(as_tensors(some))
                return [value.copy() for value in read_all(tried)]

        with contextlib.ExitStack() as stack:
            stack.callback(counters.put_back)
            stack.enter_context(rank_state.steady(model))
            for optimizer in keras_steps.optimizers(model):
                name = "apply" if hasattr(optimizer, "apply") else "apply_gradients"
                stack.enter_context(patching.replaced(optimizer, **{name: _apply_nothing}))
            names = [getattr(v, "path", None) or v.name for v in tried]
            dtypes = [_name_of(variable.dtype) for variable in tried]
            state = rank_state.StepState(self.engine, names, dtypes, range(len(tried)))
            state.decide(rows, read_all(tried), run)
        self.merges = {id(_plain(v)): merge for v, merge in zip(tried, state.merges)}

    def variables(self, floats: "Iterable[tf.Variable]") -> "List[tf.Variable]":
        """Return the variables that may be merged: those of floats, and those that were tried."""
        variables = {id(variable): variable for variable in floats}
        variables.update((id(_plain(variable)), _plain(variable)) for variable in self.tried)
        return list(variables.values())

    def merge(
        self, variables: "List[tf.Variable]", before: "List[tf.Tensor]", share: "tf.Tensor"
    ) -> None:
        """Set the variables that the step has set to the values of one process."""
        pairs = [(v, value) for v, value in zip(variables, before) if is_set(v)]
        variables, before = [v for v, _ in pairs], [value for _, value in pairs]
        merges = [self.merges.get(id(v)) or merging.Merge() for v in variables]
        after, place = [read(v.handle) for v in variables], self.engine.place
        parts = merging.parts(merges, _OPERATIONS, before, after, share, place)
        sums = self.engine.mean(parts, tf.ones_like(share), "state")
        values = merging.merged(merges, _OPERATIONS, before, after, sums, place.size)
        for variable, merge, value in zip(variables, merges, values):
            if merge.is_exchanged:
                variable.assign(value)


def has_averaged(layer: "Any", variables: "List[tf.Variable]", before: "List[tf.Tensor]") -> bool:
    """Return whether a step has set the moving average of a layer, or may have in a graph.

    Arguments:
        layer: of batch normalization.
        variables: those of the model.
        before: their values before the step.
    """
    mean = getattr(layer.moving_mean, "_value", layer.moving_mean)
    if not tf.executing_eagerly():
        return is_set(mean)
    pairs = zip(variables, before)
    return any(v is mean and bool(tf.reduce_any(read(v.handle) != old)) for v, old in pairs)


def _apply_nothing(*args, **kwargs):
    return None


def _plain(variable):
    """Return TensorFlow's variable, also that of a Keras 3 variable."""
    return getattr(variable, "_value", variable) if hasattr(variable, "path") else variable


def _name_of(dtype):
    return getattr(dtype, "name", dtype)


def _peeked(iterator, count):
    """Return the next batch of an iterator, and an iterator that begins with it.

    The second iterator has ``count`` batches, after which the first one goes on.
    """
    if not hasattr(iterator, "element_spec"):  # a generator, in train_on_batch() of Keras 3
        batch = next(iterator)
        return batch, itertools.chain([batch], iterator)
    batches: "List[Any]" = []
    same = tf.data.Dataset.from_generator(lambda: batches, output_signature=iterator.element_spec)
    batches += itertools.islice(iterator, count)
    return batches[0], iter(same)


def build(model: "Any", iterator: "Any") -> "Any":
    """Make all weights that the first step would make; return an iterator with the same batches."""
    batch = getattr(iterator, "element_spec", None)
    if batch is None:  # a generator, in train_on_batch()
        batch = next(iterator)
        iterator = itertools.chain([batch], iterator)
    batch = tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, batch
    )
    step = tf.function(lambda batch: model.train_step(batch), autograph=False)
    step.get_concrete_function(batch)
    return iterator
