"""Variables that a step of TensorFlow 2 sets besides the weights, as those of all ranks' rows.

How their values are merged is found by a trial (see ``_ranks.state``) before the step is traced:
the step runs eagerly, on some rows of the first batch, and moves no weights.
"""

import contextlib
import itertools

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

    def __init__(self, engine):
        self.engine = engine
        self.merges = {}  # type: dict  # id of one that was tried -> how it is merged
        self.tried = []  # type: list

    def begin(self, model, step, iterator, stepping):
        """Try what is to be tried with the first batch. Return an iterator with the same batches.

        Arguments:
            step: the model's own ``train_step``.
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

    def is_due(self, model):
        """Return whether there are variables to try that have not been tried."""
        return list(map(id, rank_state.tried(model))) != list(map(id, self.tried))

    def decide(self, model, step, data):
        """Try on a batch how variables are merged. See ``_ranks.state``."""
        self.tried = tried = rank_state.tried(model)
        if not tried:
            return
        keras, (read_all, write) = _keras.keras_of(model), _keras.reader_and_writer(model)
        held = list({id(v): v for v in [*model.variables, *metrics.variables(model)]}.values())
        data = tf.nest.map_structure(
            lambda leaf: leaf.numpy() if tf.is_tensor(leaf) else leaf, data
        )
        rows = next(int(leaf.shape[0]) for leaf in tf.nest.flatten(data) if leaf is not None)
        counters = steps.numbers_held([*_keras.all_layers(model), *keras_steps.optimizers(model)])

        def run(numbers, values):
            some = rank_state.some_rows(keras, data, rows, numbers)
            with _keras.kept(model, held):
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

    def variables(self, floats):
        """Return the variables that may be merged: those of floats, and those that were tried."""
        found = {id(variable): variable for variable in floats}
        found.update((id(_plain(variable)), _plain(variable)) for variable in self.tried)
        return list(found.values())

    def merge(self, variables, before, share):
        """Set what the step has set to one process's values."""
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


def _apply_nothing(*args, **kwargs):
    return None


def _plain(variable):
    """TensorFlow's own variable, of one of Keras 3's, too."""
    return getattr(variable, "_value", variable) if hasattr(variable, "path") else variable


def _name_of(dtype):
    return getattr(dtype, "name", dtype)


def _peeked(iterator, count):
    """Return the next batch of an iterator, and an iterator that begins with it.

    Arguments:
        count: how many batches are taken from that, before the first one goes on.
    """
    if not hasattr(iterator, "element_spec"):  # a generator, in train_on_batch() of Keras 3
        batch = next(iterator)
        return batch, itertools.chain([batch], iterator)
    found = []  # type: list
    same = tf.data.Dataset.from_generator(lambda: found, output_signature=iterator.element_spec)
    found += itertools.islice(iterator, count)
    return found[0], iter(same)


def build(model, iterator):
    """Make all weights that are still to be made, as the first step would, and run nothing."""
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
