"""A trial of the operations of a graph, each by itself: on three rows, and on parts of them.

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
from ..._rows.merging import NUMPY, merge
from .._tensorflow.graph import constant
from .graph import CALLS, CONDITIONS, LOOPS, READS, bodies_of, carried, is_random, is_resource

#: How many operations are executed at most, for loops that are long.
LIMIT = 50000

#: How many values a tensor has that depends on the rows: of the whole, and of all parts.
LANES = 1 + len(trial.PARTS + trial.OTHER_PARTS)
#: How many of these an operation has to be computed for: it may need rows in their order.
FEWEST = 1 + len(trial.PARTS)


class SampleValues:
    """The values of a tensor in a trial.

    Arguments:
        whole: that of three rows.
        parts: those of the parts, first of ``PARTS``, then of ``OTHER_PARTS``, which may lack;
            None for what is the same, whatever the rows.
    """

    def __init__(self, whole, parts=None):
        self.whole, self.is_same = whole, parts is None
        self.lanes = [whole] * LANES if parts is None else [whole] + list(parts)


class OpTrial:
    """The values of a graph's tensors: of the whole, and of the parts.

    All are kept for as long as the trial lasts, as training keeps those of a whole batch. None is
    known of what might have side effects.

    Arguments:
        values: the ``SampleValues`` of each tensor that is known from the start, by name.
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
        """Return the branch of a condition that is taken, 0 or 1, where that is the same one."""
        samples = self.values.get(op.inputs[0].name)
        return int(not samples.whole) if samples is not None and samples.is_same else None

    def sizes(self, tensor):
        """Return unknown sizes, as many as a tensor has dimensions, where a value shows them."""
        samples = self.values.get(tensor.name)
        is_shown = samples is not None and not is_resource(tensor)
        return [None] * samples.whole.shape.rank if is_shown else None

    def follow(self, op, placements, claimed):
        """Compute an operation; return the placements of its results, as far as that shows them.

        Arguments:
            op: the operation.
            placements: those of its inputs.
            claimed: those that the rules say its results have.
        """
        results = self._computed(op, claimed)
        if results is None:
            return claimed
        places, results_shown = self._places(op, placements, claimed), []
        for output, samples, placement in zip(op.outputs, results, claimed):
            if not is_resource(output) and isinstance(placement, _SHOWN):
                inputs = [self.values[tensor.name] for tensor in op.inputs]
                placement, samples = self._shown(samples, placements, placement, places, inputs)
            self.values[output.name] = samples
            results_shown.append(placement)
        return results_shown

    def draw(self, tensor, output, placement):
        """Take random values for the gradient of an output."""
        result = self.values.get(output.name)
        if result is not None and output.dtype.is_floating:
            samples = self._random(result.whole.shape, output.dtype, placement)
            if isinstance(placement, Replicated):  # its gradient is a sum over the rows
                quarter = samples.whole * tf.cast(0.25, output.dtype)
                samples = SampleValues(samples.whole, [quarter * n for n in (1, 3, 3, 1)])
            self.values[tensor.name] = samples

    def take_whole(self, tensor):
        """Take the value of the whole for those of all parts, which are reduced to it."""
        samples = self.values.get(tensor.name)
        if samples is not None:
            self.values[tensor.name] = SampleValues(samples.whole)

    def take_rows(self, op, placement):
        """Compute an operation of which all parts together compute the whole, each its rows."""
        inputs = [self.values.get(tensor.name) for tensor in op.inputs]
        if None not in inputs and placement.even:
            (whole,) = self._execute(op, [samples.whole for samples in inputs])
            self.values[op.outputs[0].name] = self._cut(whole, placement)

    def _places(self, op, placements, claimed):
        """Return where the elements of a reshaped value go: rows of these are never the same."""
        if op.type != "Reshape" or not isinstance(claimed[0], Unknown):
            return None
        before, dtype = placements[0], op.outputs[0].dtype
        countable = dtype.is_floating or dtype.is_integer
        if not (isinstance(before, Sharded) and before.even and countable):
            return None
        value, sizes = [self.values[tensor.name] for tensor in op.inputs]
        places = np.arange(np.prod(value.whole.shape)).reshape(value.whole.shape)
        places = self._cut(tf.constant(places, dtype), before)
        return self._in_lanes(op, [places, sizes])[0]

    def _shown(self, samples, placements, placement, places, inputs):
        """Return the placement of a result by its values; and these, which devices have by it."""
        if samples.is_same and not isinstance(placement, (Sharded, Unknown)):
            return placement, samples
        if isinstance(placement, Unknown):
            # Rows that are not even long have lengths, of which each device has its own. Whole
            # numbers made of these are mostly lengths, too.
            uneven = any(isinstance(p, Unknown) or not getattr(p, "even", True) for p in placements)
            arrays = self._arrays(samples if places is None else places)
            is_length = uneven and arrays[0].dtype.kind not in "fc"
            shown = None if is_length else _placement_shown(*arrays, placements)
            if shown is None:
                return placement if uneven else Mixed(Fallback(Reason.TRIAL_DIFFERS)), samples
            placement = shown
        elif not _fits(*self._arrays(samples), placement):
            rounded = self._rounded(samples, placement, inputs)
            other = Mixed(Fallback(Reason.TRIAL_DIFFERS)), samples
            return other if rounded is None else (placement, rounded)
        if isinstance(placement, Sharded) and placement.even:
            return placement, self._cut(samples.whole, placement)
        return placement, samples

    def _rounded(self, samples, placement, inputs):
        """Return a total that differs from its parts' by rounding alone; None where it is more.

        The mean of what is centred already is next to zero.
        """
        whole, parts, others = self._arrays(samples)
        lanes = [lane for each in inputs + [samples] for lane in each.lanes]
        lanes = [lane for lane in lanes if lane.dtype.is_floating]
        arrays = list(map(self._array, lanes))
        is_total = isinstance(placement, Partial) and placement.how in ("sum", "mean")
        if not (is_total and whole.dtype.kind == "f" and whole.size and arrays):
            return None
        bound = trial.TOLERANCES[8 * whole.dtype.itemsize] / 10
        bound *= max(np.abs(each).max() for each in arrays if each.size)
        if placement.how == "sum":
            bound *= max(each.size for each in arrays) / whole.size
        lanes = []
        for values in (parts, others):
            if any(value.shape != whole.shape for value in values):
                return None
            missing = whole - merge(placement, values, trial.SIZES, NUMPY) if values else 0
            if not np.all(np.abs(missing) <= bound):
                return None
            places = range(len(values) if placement.how == "mean" else 1)
            lanes += [v + missing if place in places else v for place, v in enumerate(values)]
        dtype = samples.whole.dtype
        return SampleValues(samples.whole, [tf.constant(lane, dtype) for lane in lanes])

    def _arrays(self, samples):
        """Return the array of the whole; those of ``PARTS``; and those of ``OTHER_PARTS``."""
        whole, *parts = map(self._array, samples.lanes)
        count = len(trial.PARTS)
        return whole, parts[:count], parts[count:]

    def _array(self, tensor):
        array = np.asarray(tensor)
        if array.dtype.kind in "biufcSUO":
            return array
        return tf.cast(tensor, tf.float16).numpy()  # types that numpy does not have

    def _cut(self, value, placement):
        parts = trial.cut(value.numpy(), placement, trial.PARTS + trial.OTHER_PARTS)
        return SampleValues(value, [tf.constant(part, value.dtype) for part in parts])

    def _computed(self, op, claimed):
        """Return the ``SampleValues`` of each result, or None where it cannot be computed."""
        inputs = [self.values.get(tensor.name) for tensor in op.inputs]
        if None in inputs:
            return None
        try:
            if is_random(op):
                return self._drawn(op, inputs, claimed)
            if all(samples.is_same for samples in inputs):
                return list(
                    map(SampleValues, self._execute(op, [samples.whole for samples in inputs]))
                )
            return self._in_lanes(op, inputs)
        except Exception as error:  # whatever an operation can have against three rows
            if trial.is_fault(error):
                raise
            return None

    def _in_lanes(self, op, inputs):
        """Return the ``SampleValues`` of each result, computed for the whole and for parts.

        Those of ``OTHER_PARTS`` lack where it cannot be computed for rows in another order.
        """
        results = []
        try:
            for lane in range(min(len(samples.lanes) for samples in inputs)):
                results.append(self._execute(op, [samples.lanes[lane] for samples in inputs]))
        except Exception:
            if len(results) < FEWEST:
                raise
            del results[FEWEST:]
        return [SampleValues(whole, parts) for whole, *parts in zip(*results)]

    def _drawn(self, op, inputs, claimed):
        """Return random numbers that are not TensorFlow's, whose generators are not advanced."""
        dtype = op.outputs[0].dtype
        names = [argument.name for argument in op.op_def.input_arg]
        if "shape" not in names or not dtype.is_floating:
            return None
        shape = np.asarray(inputs[names.index("shape")].whole)
        return [self._random(shape, dtype, claimed[0])]

    def _random(self, shape, dtype, placement):
        whole = tf.constant(np.random.RandomState(0).uniform(size=shape), dtype)
        if isinstance(placement, Sharded) and placement.even:
            return self._cut(whole, placement)
        return SampleValues(whole)

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
            has_values = all(tensor.name in values for tensor in op.inputs)
            if op.type == "Placeholder" or not has_values or not op.outputs and not sets:
                continue
            results = self._execute(op, [values[tensor.name] for tensor in op.inputs])
            values.update(zip([tensor.name for tensor in op.outputs], results))
        return [values[tensor.name] for tensor in graph.outputs]


_SHOWN = (Partial, Replicated, Sharded, Unknown)


def _fits(whole, parts, others, placement):
    """Return whether the parts of both partitions make up the whole by a placement."""
    if not trial.fits(parts, whole, placement):
        return False
    return not others or trial.fits_others(others, whole, placement, parts)


def _placement_shown(whole, parts, others, inputs):
    """Return the placement that the values of an operation without a rule have, not by chance."""
    for placement in trial.placements(parts, whole):
        if not _fits(whole, parts, others, placement):
            continue
        if isinstance(placement, Sharded):
            rows = trial.cut(whole, placement, ((0,), (1,), (2,))) if placement.even else parts
            if not any(np.array_equal(*pair) for pair in itertools.combinations(rows, 2)):
                return placement
        elif isinstance(placement, Partial):
            linear = placement.how in ("sum", "mean") and whole.dtype.kind in "fc"
            if placement in inputs or linear and np.any(whole):
                return placement
    return None


def _eagerly(op):
    """Return what executes an operation: a function of its inputs."""
    if op.type == "Const":  # whose value is no attribute of eager execution
        value = tf.constant(constant(op.outputs[0]), op.outputs[0].dtype)
        return lambda inputs: [value]
    # Names of attributes, each followed by its value.
    pairs = [(n, _attribute(op.get_attr(n))) for n in op.node_def.attr if not n.startswith("_")]
    arguments = {"attrs": tuple(itertools.chain(*pairs)), "ctx": context.context()}
    return functools.partial(execute.quick_execute, op.type.encode(), len(op.outputs), **arguments)


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
