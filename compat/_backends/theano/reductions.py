"""Reductions over the devices in the middle of a body, for operations that need the whole batch.

Where an operation needs a sum, mean, maximum or minimum of the whole batch, its graph gets an
``AllReduce`` of what each device has. No function computes that: a body is compiled in stages (see
``stages``), and between two of them the devices' values are reduced on the host.
"""

import itertools
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
from theano import tensor
from theano.compile.ops import Shape, Shape_i
from theano.gof import Apply, Op, graph
from theano.gradient import DisconnectedType
from theano.ifelse import IfElse
from theano.tensor.opt import Assert

from ..._rows import Count, Partial, Sharded
from ..._rows.merging import NUMPY, merge


class AllReduce(Op):
    """Reduction over the devices: of a shard's values to those of the whole batch.

    Arguments:
        how: "sum", "max" or "min" of one value; "mean", of a value and the device's fraction of the
            rows; "moments", of means and variances, and that fraction; "gradient", the sum of
            upstream gradients; "gather", as ``AllGather``.
        number: its number in the graph, which has each reduction once.
    """

    __props__: "Tuple[str, ...]" = ("how", "number")

    def __init__(self, how, number):
        self.how, self.number = how, number

    def make_node(self, *inputs):
        """Return the node; its results are like the values that are reduced."""
        return Apply(self, list(inputs), [v.type() for v in inputs[: self._count(inputs)]])

    def _count(self, inputs):
        return len(inputs) - (self.how in ("mean", "moments", "gather"))

    def perform(self, node, inputs, output_storage):
        """Refuse to compute: that is done between stages."""
        raise NotImplementedError(f"{self} is not computed within a function.")

    def connection_pattern(self, node):
        """Return that all results depend on all values, and none on the fraction of rows."""
        count = len(node.outputs)
        return [[index < count] * count for index in range(len(node.inputs))]

    def grad(self, inputs, upstream):
        """Return gradients, for Theano before 1.0."""
        outputs = self(*inputs)
        return self.L_op(inputs, outputs if isinstance(outputs, list) else [outputs], upstream)

    def L_op(self, inputs, outputs, upstream):
        """Return gradients: those that all devices have for the whole batch's values add up."""
        rest = [DisconnectedType()() for _ in inputs[len(outputs) :]]
        if "float" not in outputs[0].dtype:
            return [value.zeros_like(dtype=_floatx()) for value in outputs] + rest
        totals = AllReduce("gradient", self.number)(
            *[
                value.zeros_like()
                if isinstance(g.type, DisconnectedType)
                else tensor.tensor_copy(g)
                for value, g in zip(outputs, upstream)
            ]
        )
        totals = totals if isinstance(totals, list) else [totals]
        if self.how in ("max", "min"):  # also of several rows, as Theano has it
            return [tensor.eq(inputs[0], outputs[0]) * totals[0]]
        if self.how == "sum":
            return totals
        if self.how == "gather":
            return totals + rest
        share = inputs[-1].astype(outputs[0].dtype)
        gradients = [share * total for total in totals]
        if self.how == "moments":  # the means of the devices differ, which is part of the variance
            gradients[0] += share * 2 * (inputs[0] - outputs[0]) * totals[1]
        return gradients + rest


def _floatx():
    import theano

    return theano.config.floatX


class AllGather(AllReduce):
    """The rows of all devices, of a value that has rows; and the numbers of the device's rows.

    Arguments:
        axis: the dimension that the rows are along.
        number: its number in the graph, which has each gathered value once.
    """

    __props__ = ("how", "number", "axis")

    def __init__(self, axis, number):
        super(AllGather, self).__init__("gather", number)
        self.axis = axis

    def L_op(self, inputs, outputs, upstream):
        """Return gradients: a device's rows of the sum of those that all devices have."""
        totals, rest = super(AllGather, self).L_op(inputs, outputs, upstream)
        return [own_rows(totals, inputs[1], self.axis), rest]

    def gathered(
        self, parts: "Sequence[Any]", numbers: "Sequence[Any]", sizes: "Sequence[int]"
    ) -> "Any":
        """Return all rows.

        Arguments:
            parts: the devices' values.
            numbers: the numbers of their rows.
            sizes: how many rows each has; one without rows has computed one that does not count.
        """
        counted = [n for n, size in enumerate(sizes) if size]
        order = np.argsort(np.concatenate([numbers[n] for n in counted]), kind="mergesort")
        rows = np.concatenate([parts[n] for n in counted], self.axis)
        return np.ascontiguousarray(rows.take(order, self.axis))


def own_rows(value: "Any", numbers: "Any", axis: int = 0) -> "Any":
    """Return a device's rows of a value of the whole batch.

    Arguments:
        value: the value.
        numbers: a variable, the numbers of these rows.
        axis: the dimension that the rows are along.
    """
    order = [axis] + [n for n in range(value.ndim) if n != axis]
    back = [order.index(n) for n in range(value.ndim)]
    return value[numbers] if axis == 0 else value.dimshuffle(order)[numbers].dimshuffle(back)


def reduced(how: str, parts: "Sequence[Sequence[Any]]", sizes: "Sequence[int]") -> "List[Any]":
    """Return for each device the reduced values.

    Arguments:
        how: as ``AllReduce`` has it.
        parts: for each device its values.
        sizes: the numbers of rows of the devices' shards. A device without rows has computed one
            that does not count, and has no gradient.
    """
    if how == "moments":
        means, variances = zip(*parts)
        results = _moments(means, variances, sizes)
    else:
        placement = Partial("sum" if how == "gradient" else how)
        count = 1 if how == "mean" else len(parts[0])
        results = [merge(placement, list(zip(*parts))[n], sizes, NUMPY) for n in range(count)]
    results = [np.asarray(value, part.dtype) for value, part in zip(results, parts[0])]
    if how == "gradient":
        return [results if size else list(map(np.zeros_like, results)) for size in sizes]
    return [results] * len(sizes)


def _moments(means, variances, sizes):
    """Return the mean and the variance of all rows, by Chan's formula."""
    mean = merge(Partial("mean"), means, sizes, NUMPY)
    apart = [variance + (part - mean) ** 2 for part, variance in zip(means, variances)]
    return [mean, merge(Partial("mean"), apart, sizes, NUMPY)]


class BodyGraph:
    """Graph of a model as devices compute it: with reductions where its propagation has them.

    Arguments:
        propagation: the ``Propagation`` over the model's graph.
        sharded: a variable of which each device has its shard, along the first dimension.
        phase: the learning phase, to take only what is for inference; or None.

    Attributes:
        rows: a variable, the number of rows of the whole batch.
        numbers: a variable, the numbers of the device's rows.
    """

    def __init__(self, propagation: "Any", sharded: "Any", phase: "Any" = None) -> None:
        self._propagation, self._phase = propagation, phase
        self.rows = tensor.lscalar("rows of the batch")
        self.numbers = tensor.lvector("numbers of the device's rows")
        self.share = sharded.shape[0].astype("float64") / self.rows
        self._numbers = itertools.count()
        self._made: "Dict[Any, Any]" = {}
        self._whole: "Dict[Any, Any]" = {}

    def variables(self, wanted: "List[Any]") -> "List[Any]":
        """Return variables of the model as devices compute them; those needed whole are reduced."""
        for node in graph.io_toposort([], wanted):
            if node.outputs[0] not in self._made:
                self._made.update(zip(node.outputs, self._outputs(node)))
                for variable in self._propagation.split_again.intersection(node.outputs):
                    self._whole[variable] = whole = self._made[variable]
                    self._made[variable] = _like(variable, self.checked(whole)[self.numbers])
        return [
            self._of_batch(v) if self._propagation.is_whole(v) else self._of_device(v)
            for v in wanted
        ]

    def all_reduced(self, how: str, *values: "Any") -> "Any":
        """Return a reduction over the devices, of values in this graph."""
        return AllReduce(how, next(self._numbers))(*values)

    def checked(self, whole: "Any") -> "Any":
        """Return a value of the whole batch, without whose rows a run is an error."""
        text = (
            "A layer has a result without one row for each sample of this batch, as it has for "
            "others. Use one device: parallelize(model, gpus=1)."
        )
        return Assert(text)(whole, tensor.eq(whole.shape[0], self.rows))

    def _of_device(self, variable):
        return self._made.get(variable, variable)

    def _outputs(self, node):
        """Return the results of a node in this graph; the node itself where nothing changes."""
        whole = self._propagation.whole.get(node, ())
        inputs = [
            self._of_batch(v) if index in whole else self._of_device(v)
            for index, v in enumerate(node.inputs)
        ]
        if isinstance(node.op, IfElse) and node.inputs[0] is self._phase:
            return inputs[1 + node.op.n_outs :]
        lowered = self._propagation.lowered.get(node)
        if lowered is not None:
            results = lowered(self, node, inputs)
            return [_like(variable, value) for variable, value in zip(node.outputs, results)]
        if all(new is old for new, old in zip(inputs, node.inputs)):
            return node.outputs
        return node.clone_with_new_inputs(inputs).outputs

    def _of_batch(self, variable):
        """Return the value of the whole batch, which is the same on all devices."""
        if variable not in self._whole:
            self._whole[variable] = self._reduced(variable)
        return self._whole[variable]

    def _reduced(self, variable):
        placement, value = self._propagation.placement_of(variable), self._of_device(variable)
        if isinstance(placement, Partial):
            shares = [self.share] if placement.how == "mean" else []
            return self.all_reduced(placement.how, value, *shares)
        if isinstance(placement, Sharded):
            return AllGather(placement.axis, next(self._numbers))(value, self.numbers)
        if not isinstance(placement, Count):
            return value
        node = variable.owner
        if isinstance(node.op, (Shape, Shape_i)):
            return self._shape(node)
        return node.clone_with_new_inputs(list(map(self._of_batch, node.inputs))).outputs[
            node.outputs.index(variable)
        ]

    def _shape(self, node):
        """Return the shape, or one size, that a value of the whole batch has."""
        of = node.inputs[0]
        axis, elements = self._propagation.elements_of_row(of)
        shape = self._of_device(of).shape
        sizes = [self.rows * elements if a == axis else shape[a] for a in range(of.ndim)]
        return sizes[node.op.i] if isinstance(node.op, Shape_i) else tensor.stack(sizes)


def _like(variable, value):
    """Return a value of the type of a variable."""
    if value.dtype != variable.dtype:
        value = value.astype(variable.dtype)
    return tensor.patternbroadcast(value, variable.broadcastable)
