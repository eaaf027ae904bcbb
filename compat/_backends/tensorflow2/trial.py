"""A trial of the operations of a graph, each by itself: of three rows, of two and of the third.

Each operation is given what one device would give it, cut into parts, so that what does not compute
each row by itself is found where it is, whatever dropout or batch normalization is before it. It is
executed eagerly. Variables that the graph may set are copies, so that nothing is left behind.
"""

import copy
import functools
import itertools

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute

from ..._rows import Fallback, Mixed, Partial, Reason, Replicated, Sharded, Unknown, trial
from .._tensorflow.graph import constant
from .graph import CALLS, CONDITIONS, LOOPS, READS, bodies_of, carried, is_random, is_resource

#: How many operations are executed at most, for loops that are long.
LIMIT = 30000

#: The whole, and its parts.
LANES = 1 + len(trial.PARTS)


class OpTrial:
    """The values of a graph's tensors: of the whole, and of the parts.

    All are kept for as long as the trial lasts, as training keeps those of a whole batch. None is
    known of what might leave a trace.

    Arguments:
        values: a list of these for each tensor that is known from the start, by name. What is the
            same for all of them is the same object.
        copies: the handles of variables that may be set, which are copies, by id; all others may
            not.
    """

    def __init__(self, values, copies):
        self.values = values
        self.copies = copies
        self._left = iter(range(LIMIT))
        self._eagerly = functools.lru_cache(None)(_eagerly)

    def inside(self, graph, tensors):
        """Return the trial of a function that is called with these tensors."""
        inside = copy.copy(self)
        inside.values = carried(self.values, tensors, graph.inputs)
        return inside

    def branch(self, op):
        """Which branch of a condition is taken, 0 or 1, where it is the same one everywhere."""
        lanes = self.values.get(op.inputs[0].name)
        if lanes is None or any(value is not lanes[0] for value in lanes):
            return None
        return int(not lanes[0])

    def sizes(self, tensor):
        """As many sizes as a tensor has dimensions, none of them known, where a value shows it."""
        lanes = self.values.get(tensor.name)
        return None if lanes is None or is_resource(tensor) else [None] * lanes[0].shape.rank

    def follow(self, op, given, claimed):
        """Compute an operation; return the placements of its results, as far as that shows them.

        Arguments:
            given: the placements of its inputs; ``claimed``: those that the rules say its results
                have.
        """
        lanes = self._computed(op, claimed)
        if lanes is None:
            return claimed
        places, found = self._places(op, given, claimed), []
        for output, values, placement in zip(op.outputs, lanes, claimed):
            if not is_resource(output) and isinstance(placement, _SHOWN):
                placement, values = self._shown(values, given, placement, places)
            self.values[output.name] = values
            found.append(placement)
        return found

    def draw(self, tensor, output, placement):
        """Take random values for the gradient of an output."""
        lanes = self.values.get(output.name)
        if lanes is not None and output.dtype.is_floating:
            found = self._random(lanes[0].shape, output.dtype, placement)
            if isinstance(placement, Replicated):  # its gradient is a sum over the rows
                found[1:] = [found[0] * tf.cast(0.25, output.dtype) * n for n in (1, 3)]
            self.values[tensor.name] = found

    def _places(self, op, given, claimed):
        """Of a reshaped value, where its elements go: rows of these are never the same."""
        if op.type != "Reshape" or not isinstance(claimed[0], Unknown):
            return None
        before, dtype = given[0], op.outputs[0].dtype
        countable = dtype.is_floating or dtype.is_integer
        if not (isinstance(before, Sharded) and before.even and countable):
            return None
        (whole, *_), sizes = [self.values[tensor.name] for tensor in op.inputs]
        places = np.arange(np.prod(whole.shape)).reshape(whole.shape)
        places = self._cut(tf.constant(places, dtype), before)
        return [self._execute(op, pair)[0] for pair in zip(places, sizes)]

    def _shown(self, lanes, given, placement, places):
        if lanes[0] is lanes[1] and not isinstance(placement, (Sharded, Unknown)):
            return placement, lanes
        whole, parts = self._array(lanes[0]), [self._array(value) for value in lanes[1:]]
        if isinstance(placement, Unknown):
            # Rows that are not even long have lengths, of which each device has its own. Whole
            # numbers made of these are mostly lengths, too.
            uneven = any(isinstance(p, Unknown) or not getattr(p, "even", True) for p in given)
            if places is not None:
                whole, *parts = [self._array(value) for value in places]
            told = None if uneven and whole.dtype.kind not in "fc" else _told(parts, whole, given)
            if told is None:
                return placement if uneven else Mixed(Fallback(Reason.TRIAL_DIFFERS)), lanes
            placement = told
        elif not trial.fits(parts, whole, placement):
            return Mixed(Fallback(Reason.TRIAL_DIFFERS)), lanes
        if isinstance(placement, Sharded) and placement.even:
            return placement, self._cut(lanes[0], placement)
        return placement, lanes

    def _array(self, tensor):
        array = np.asarray(tensor)
        if array.dtype.kind in "biufcSUO":
            return array
        return tf.cast(tensor, tf.float16).numpy()  # types that numpy does not have

    def _cut(self, value, placement):
        array = value.numpy()
        return [value] + [tf.constant(part, value.dtype) for part in trial.cut(array, placement)]

    def _computed(self, op, claimed):
        inputs = [self.values.get(tensor.name) for tensor in op.inputs]
        if None in inputs:
            return None
        try:
            if is_random(op):
                return self._drawn(op, inputs, claimed)
            is_same = all(lanes[0] is each for lanes in inputs for each in lanes)
            lanes = range(1 if is_same else LANES)
            results = [self._execute(op, [each[lane] for each in inputs]) for lane in lanes]
        except Exception as error:  # whatever an operation can have against three rows
            if trial.is_fault(error):
                raise
            return None
        return [list(values) * (LANES // len(values)) for values in zip(*results)]

    def _drawn(self, op, inputs, claimed):
        """Random numbers, which are not TensorFlow's, so that those go on as they would have."""
        dtype = op.outputs[0].dtype
        names = [argument.name for argument in op.op_def.input_arg]
        if "shape" not in names or not dtype.is_floating:
            return None
        shape = np.asarray(inputs[names.index("shape")][0])
        return [self._random(shape, dtype, claimed[0])]

    def _random(self, shape, dtype, placement):
        whole = tf.constant(np.random.RandomState(0).uniform(size=shape), dtype)
        if isinstance(placement, Sharded) and placement.even:
            return self._cut(whole, placement)
        return [whole] * LANES

    # Operations are executed eagerly, one by one; those of functions within, too -----------------

    def _execute(self, op, inputs):
        """Return the results of an operation."""
        if op.type in CALLS:
            return self._run(*bodies_of(op), inputs=inputs)
        if op.type in CONDITIONS:
            then, otherwise = bodies_of(op)
            return self._run(then if inputs[0] else otherwise, inputs[1:])
        if op.type in LOOPS:
            condition, body = bodies_of(op)
            while self._run(condition, inputs)[0]:
                inputs = self._run(body, inputs)
            return inputs
        if next(self._left, None) is None:
            raise NotImplementedError(op.type)
        if op.type not in READS:
            resources = [value for value in inputs if value.dtype == tf.resource]
            are_copies = all(id(value) in self.copies for value in resources)
            if not are_copies or op.op_def.is_stateful and not resources:
                raise NotImplementedError(op.type)
        return self._eagerly(op)(list(inputs))

    def _run(self, graph, inputs):
        """Return the results of a function."""
        if graph is None:
            raise NotImplementedError("a function that TensorFlow does not show")
        values = dict(zip([tensor.name for tensor in graph.inputs], inputs))
        for op in graph.get_operations():
            sets = any(map(is_resource, op.inputs))  # a variable
            # What follows from a placeholder without a value is an own gradient that was followed.
            known = all(tensor.name in values for tensor in op.inputs)
            if op.type == "Placeholder" or not known or not op.outputs and not sets:
                continue
            results = self._execute(op, [values[tensor.name] for tensor in op.inputs])
            values.update(zip([tensor.name for tensor in op.outputs], results))
        return [values[tensor.name] for tensor in graph.outputs]


_SHOWN = (Partial, Replicated, Sharded, Unknown)


def _told(parts, whole, given):
    """What the values of an operation without a rule tell, but for what they may by chance."""
    for placement in trial.placements(parts, whole):
        if isinstance(placement, Sharded):
            rows = trial.cut(whole, placement, ((0,), (1,), (2,))) if placement.even else parts
            if not any(np.array_equal(*pair) for pair in itertools.combinations(rows, 2)):
                return placement
        elif isinstance(placement, Partial):
            linear = placement.how in ("sum", "mean") and whole.dtype.kind in "fc"
            if placement in given or linear and np.any(whole):
                return placement
    return None


def _eagerly(op):
    """Return what executes an operation: a function of its inputs."""
    if op.type == "Const":  # whose value is no attribute of eager execution
        value = tf.constant(constant(op.outputs[0]), op.outputs[0].dtype)
        return lambda inputs: [value]
    # Names of attributes, each followed by its value.
    pairs = [(n, _attribute(op.get_attr(n))) for n in op.node_def.attr if not n.startswith("_")]
    given = {"attrs": tuple(itertools.chain(*pairs)), "ctx": context.context()}
    return functools.partial(execute.quick_execute, op.type.encode(), len(op.outputs), **given)


def _attribute(value):
    """Return an attribute as eager execution takes it."""
    if isinstance(value, list):
        return list(map(_attribute, value))
    if hasattr(value, "attr"):
        raise NotImplementedError("an operation with a function")
    if hasattr(value, "unknown_rank"):  # a shape
        sizes = [None if size.size < 0 else size.size for size in value.dim]
        return None if value.unknown_rank else sizes
    return value
