"""Trial of a rank's step: whether the tensors that it exchanges are sums or means over samples.

If a step has used gradients of this rank's samples alone before they were averaged over all ranks
(see ``gradient_exchange``), the result is that of one process only if it used them linearly. And a
custom loss may compare the rows of a batch with one another, or be their sum. So the step is done
again with the first batch and with its halves: the tensors that it would exchange of the batch
should be the mean of those of the halves. If clipping comes first, they are not.
"""

import contextlib
import copy
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from ... import _keras, errors
from ..._ranks import batch_parts, losses, place
from ..._ranks.engines import tensorflow as tensorflow_engine
from ..._verification import keras_steps, steps
from .state import is_generator


class _Trial:
    """A stand-in for an engine, which records the tensors that it would exchange.

    Attributes:
        exchanged: of each exchange, the arrays that this rank would have contributed.
        whole: if this step is that of a half, the results of these exchanges in the step of the
            whole batch: what follows an exchange begins with the same values there.
    """

    def __init__(self, engine, share, whole=()):
        self.place = place.Place(0, 1, 0, 1, "")
        self.noting, self.called = engine.noting, engine.called
        self.unreached = {}
        self.share, self.whole = share, iter(whole)
        self.exchanged = []

    def share_in_graph(self, rows, count, seen=()):
        return self.called(lambda: float(self.share), [], tf.float64)

    def total(self, values):
        values = [tf.cast(value, tf.float64) for value in values]
        return self.noted(values, values)

    def mean(self, tensors, share, name):
        if name == "state" or not tensors:
            return tensors
        tensors = list(map(tf.convert_to_tensor, tensors))
        return self.noted([tensor * tf.cast(share, tensor.dtype) for tensor in tensors], tensors)

    def noted(self, weighted, results):
        """Note tensors, weighted by this part's rows, in the order in which they are computed."""

        def note(*arrays):
            self.exchanged.append([np.array(array, "float64") for array in arrays])
            exchanged = next(self.whole, arrays)
            return [np.asarray(a, b.dtype.as_numpy_dtype) for a, b in zip(exchanged, results)]

        tensors = tf.numpy_function(note, weighted, [result.dtype for result in results])
        for tensor, result in zip(tensors, results):
            tensor.set_shape(result.shape)
        return tensors


def check(step: "Any", model: "Any", data: "Any") -> None:
    """Check the tensors that a model's step exchanges.

    Arguments:
        step: the ``RankedStep``.
        model: the model.
        data: the first batch, of arrays.

    Raises:
        RankError: they are neither sums nor means over the rows of the batch, and were computed
            from gradients of this rank alone.
    """
    lines = step.unproven
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    rows = batch_parts.rows_of(leaves)
    if rows is None or rows < 2:
        return
    run = functools.partial(_exchanged, step, model, data)
    try:
        once = run(batch_parts.WHOLE)
        parts = [run(half, once) for half in batch_parts.in_two(rows, rows // 2)]
        again = run(batch_parts.WHOLE)
    except Exception as error:  # whatever a step raises for a half of a batch
        problem = f"{type(error).__name__}: {_message(error)}"
        if not lines:
            losses.warn_of_untried_step(model.name, errors.at_lines(step.lines), problem)
            return
        errors.warn(
            f"The train_step of {model.name!r} takes gradients{errors.at_lines(lines)} where they "
            "are those of this rank's samples alone. It could not be tried whether it uses them "
            f"linearly: {problem}. If it clips them, for example, the ranks train to other numbers "
            "than one process."
        )
        return
    if not len(once) == len(again) == len(parts[0]) == len(parts[1]):
        return  # it exchanges other tensors each time
    limit = losses.rounding(getattr(model, "compute_dtype", None) or "float32")
    for whole, other, *halves in zip(once, again, *parts):
        largest = max([np.abs(value).max() for value in whole if value.size] or [0.0])
        noise = max([_distance(*each) for each in zip(whole, other)] or [0.0])
        off = max([_distance(a, b + c) for a, b, c in zip(whole, *halves)] or [0.0])
        differs = noise <= limit * largest / 10 and off > limit * largest
        if not differs:  # or one of these is not a number, as where float16 overflows
            continue
        if not lines:
            losses.warn_of_step(model.name, errors.at_lines(step.lines), rows, off)
            return
        raise errors.RankError(
            f"The train_step of {model.name!r} takes gradients{errors.at_lines(lines)} where they "
            "are those of this rank's samples alone, and does not use them linearly (clipping, for "
            f"example): of a batch of {rows} samples they differ by up to {off:.3g} from their "
            f"mean over its halves. The ranks would train to other numbers than one process. "
            "Call tf.GradientTape.gradient() for the model's weights outside of the blocks of "
            "all tapes, and outside of TensorFlow's loops: there it returns the mean over all "
            "ranks."
        )


def _message(error):
    if isinstance(error, tf.errors.OpError):
        return tensorflow_engine.problem_of(error)
    return str(error).strip().split("\n")[0].rstrip(".")


def _distance(one, other):
    return np.abs(one - other).max() if one.size and one.shape == other.shape else 0.0


def _exchanged(step, model, data, part, whole=()):
    """Return the arrays that a step of some rows would exchange. All variables are restored."""
    trial = copy.copy(step)
    trial.engine = engine = _Trial(step.engine, part.share, whole)
    trial.is_trial = True
    some = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf[part.rows]), data
    )
    function = functools.partial(trial.invoke, model, some)
    optimizers = keras_steps.optimizers(model)
    counters = steps.numbers_held(optimizers)
    with _in_inference(model):
        variables = _variables([model, *optimizers])
        if not model.run_eagerly:
            function = tf.function(function, autograph=False).get_concrete_function()
            # It may set further ones, but does not list the slots that old optimizers set.
            variables = {id(v): v for v in [*variables, *function.graph.variables]}.values()
        # Random numbers go on, so that a step that depends on them differs from time to time.
        kept = [(v, v.read_value()) for v in variables if not is_generator(v)]
        try:
            function()
        finally:
            for variable, value in kept:
                variable.assign(value)
            counters.put_back()
    return engine.exchanged


def _variables(owners):
    """Return the variables of Keras objects, including those that Keras does not track."""
    unique = {}
    for owner in owners:
        variables = owner.variables() if callable(owner.variables) else owner.variables
        for attribute in [variables, *vars(owner).values()]:
            for value in attribute if isinstance(attribute, (list, tuple)) else [attribute]:
                value = getattr(value, "_value", value)
                if isinstance(value, tf.Variable):
                    unique[id(value)] = value
    return list(unique.values())


@contextlib.contextmanager
def _in_inference(model):
    """Let batch normalization use its averages: the statistics of each half differ."""
    layers = [layer for layer in _keras.all_layers(model) if hasattr(layer, "moving_mean")]
    layers = [layer for layer in layers if layer.trainable]
    for layer in layers:
        layer.trainable = False
    try:
        yield
    finally:
        for layer in layers:
            layer.trainable = True
