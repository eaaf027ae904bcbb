"""Rules for Theano's operations: how their results depend on the rows of a batch.

A rule takes an ``AppliedOp`` and a ``Value`` for each of its inputs, and returns the placement of
its results, or a list of them. It is called only where an input has rows, or is a part of a sum,
unless it is one of ``OF_SIZES``.
"""

import os
from typing import Any

from theano.tensor.subtensor import get_idx_list

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import frames_of
from .rules_loops import looped


class Drawn(_rows.Placement):
    """Placement of random numbers, which are independent of each other and of the batch."""

    __slots__ = ()


class AppliedOp:
    """An operation in a graph that is followed, and what is known of its variables.

    Arguments:
        node: Theano's ``Apply``.
        propagation: the ``Propagation`` over the graph.

    Attributes:
        type: Theano's ``Op``, which has the operation's attributes, such as ``axis``.
        inputs, outputs: the variables.
    """

    def __init__(self, node: "Any", propagation: "Any") -> None:
        self.type, self.inputs, self.outputs = node.op, node.inputs, node.outputs
        self.propagation = propagation

    def constant(self, index: int) -> "Any":
        """Return the value of an input that is the same for any number of rows, or None."""
        return self.propagation.sizes.constant(self.inputs[index])

    def result_shape(self) -> "Any":
        """Return the sizes of the first result, as a ``Value`` has them."""
        return self.propagation.sizes.shape(self.outputs[0])

    def result_as_drawn(self) -> "_rows.Placement":
        """Return the placement of the first result, were it random numbers."""
        return self.propagation.as_drawn(self.outputs[0])

    def takes_all(self, part: slice, variable: "Any", axis: int) -> bool:
        """Return whether a slice in an index takes all of a dimension, in order."""
        return self.propagation.sizes.takes_all(part, variable, axis)

    def placement_of(self, variable: "Any") -> "_rows.Placement":
        """Return the placement of an input; random numbers are ``Drawn``."""
        return self.propagation.placement_of(variable)


def _plain(values):
    return _rows.without_rows([value.placement for value in values])


def _are_replicated(values):
    return all(isinstance(value.placement, Replicated) for value in values)


def unknown(op, values):
    """Return the placement for an operation without a rule; one of partial values is not tried."""
    is_partial = any(isinstance(value.placement, Partial) for value in values)
    return Mixed() if is_partial else Unknown()


# Pointwise operations and identities:


def pointwise(op, values):
    """Follow a function of the elements at the same place."""
    is_second = type(getattr(op.type, "scalar_op", None)).__name__ == "Second"
    if is_second and isinstance(values[0].placement, Partial):  # whose shape alone it takes
        values = [Value(REPLICATED, values[0].shape), values[1]]
    return _rows.pointwise(values)


def _all(rule):
    """Return a rule of the values alone."""
    return lambda op, values: rule(values)


def _checked(op, values):
    """Follow ``Assert``: each device may check its own rows, but not how many it has."""
    are_by_row = all(value.placement in (REPLICATED, Partial("min")) for value in values[1:])
    return values[0].placement if are_by_row else Mixed()


# Reductions, and operations along dimensions:

_HOW = {"add": "sum", "maximum": "max", "minimum": "min", "or": "any", "and": "all"}


def _reduced(op, values):
    how = _HOW.get(str(op.type.scalar_op).lower(), "other")
    how = "mean" if type(op.type).__name__ == "Mean" else how
    return _rows.reduced(values[0], op.type.axis, how)


def _maximum(op, values):
    hows = ["max", "position"][-len(op.outputs) :]  # Argmax has the last one only
    return [_rows.reduced(values[0], op.type.axis, how) for how in hows]


def _along(op, values):
    """Follow an operation along ``axis`` (None: all, as one), or along the second input's value."""
    has_axis = hasattr(op.type, "axis")
    axis = op.type.axis if has_axis else op.constant(1)
    is_known = axis is not None and _are_replicated(values[1:])
    return _rows.along(values[0], axis) if is_known else Mixed()


def _along_last(values):
    """Follow an operation along the last dimension, of corresponding rows of its inputs."""
    return _rows.along(Value(_rows.pointwise(values), values[0].shape), -1)


# Products:


def _batched_product(op, values):
    letters = {2: "bj", 3: "bij"}[values[0].rank], {2: "bj", 3: "bjk"}[values[1].rank]
    return _rows.contracted(
        values, letters, [letter for letter in "bik" if letter in "".join(letters)]
    )


# Views:


def _dimshuffled(op, values):
    placement, order = values[0].placement, list(op.type.new_order)
    if isinstance(placement, Partial):
        return placement
    dropped = placement.axis not in order  # of one row
    return Mixed() if dropped else placement.replace(axis=order.index(placement.axis))


def _reshaped(op, values):
    if any(not isinstance(value.placement, (Replicated, Count)) for value in values[1:]):
        return Mixed()
    return _rows.reshaped(values[0], op.result_shape())


def _joined(op, values):
    axis = op.constant(0)
    return Mixed() if axis is None else _rows.concatenated(values[1:], axis)


def _parts(op, variables):
    """Return the parts of dimensions in an index, for ``_rows.sliced``; None where it varies.

    Arguments:
        op: the ``AppliedOp``.
        variables: the variable that is indexed, and those in the index.
    """
    parts = {}
    for axis, index in enumerate(get_idx_list(variables, op.type.idx_list)):
        is_slice = isinstance(index, slice)
        if is_slice and op.takes_all(index, variables[0], axis):
            continue
        bounds = [index.start, index.stop, index.step] if is_slice else [index]
        placements = [op.placement_of(bound) for bound in bounds if hasattr(bound, "owner")]
        if not all(isinstance(placement, Replicated) for placement in placements):
            return None
        parts[axis] = "part" if is_slice else "one"
    return parts


def _sliced(op, values):
    parts = _parts(op, op.inputs)
    return Mixed() if parts is None else _rows.sliced(values[0], parts)


def _assigned(op, values):
    """Follow ``set_subtensor`` and ``inc_subtensor``: a part, computed as that part is."""
    parts = _parts(op, op.inputs[:1] + op.inputs[2:])
    target = values[0].placement
    if parts is None or not isinstance(target, Sharded):
        return Mixed()
    part = _rows.sliced(values[0], parts)
    rank = values[0].rank - list(parts.values()).count("one")
    both = _rows.pointwise([Value(part, [None] * rank), values[1]])
    return target if isinstance(both, Sharded) and both.axis == part.axis else Mixed()


def _repeated(op, values):
    placement = _rows.repeated(values[0], op.type.axis, op.constant(1))
    return placement if _are_replicated(values[1:]) else Mixed()


# Layers, new values:


def _by_row(axes):
    return lambda op, values: _rows.by_row(values, axes)


def _pooled(op, values):
    """Follow pooling along the last dimensions."""
    if not _are_replicated(values[1:]):
        return Mixed()
    return _rows.resized(values[0], list(range(-op.type.ndim, 0)))


def _normalized(op, values):
    """Follow batch normalization: in Keras' layer each device normalizes its own rows.

    Elsewhere, and in synchronized layers, it needs the whole batch, and so do the statistics that
    it returns.
    """
    frames = frames_of(op.outputs[0])
    layer = os.path.join("keras", "layers", "normalization.py")
    placement = _rows.pointwise(values[:3])
    of_layer = not frames or any(path.endswith(layer) for path, _ in frames)
    of_layer = of_layer and not op.propagation.is_synchronized(op.inputs[1:3])
    has_rows = isinstance(placement, Sharded)
    is_split = has_rows and (of_layer or placement.axis not in op.type.axes)
    return [placement if is_split else Mixed()] + [Mixed()] * (len(op.outputs) - 1)


def drawn(op, values):
    """Follow random numbers of a shape. Each device has its own state of the generator."""
    is_drawn = all(
        isinstance(op.placement_of(v), (Replicated, Count, Drawn)) for v in op.inputs[1:]
    )
    # Otherwise it may draw for each row.
    return [REPLICATED, Drawn() if is_drawn else _plain(values) or Unknown()]


def _filled(op, values):
    """Follow ``Alloc``, a value of the sizes after it; ``AllocEmpty`` has none."""
    result = op.outputs[0]
    filling, others = values[: -result.ndim or None], values[len(values) - result.ndim :]
    placement = _plain(others)
    if not isinstance(placement, (Replicated, Count)):
        return placement or Mixed()
    return _rows.pointwise(filling + [Value(op.result_as_drawn(), op.result_shape())])


def _shape(op, values):
    is_drawn = isinstance(op.placement_of(op.inputs[0]), Drawn)
    return Count() if is_drawn else _rows.shape_of(values[0])


# Branches:


def _branched(op, values):
    count = op.type.n_outs
    kinds = [value.placement for value in values]
    pairs = zip(kinds[1 : 1 + count], kinds[1 + count :])
    return [_rows.chosen(kinds[0], pair) for pair in pairs]


_KINDS = [
    (pointwise, "Elemwise ScalarOp AbstractBatchNormInference"),
    (
        _all(lambda values: values[0].placement),
        "CpuContiguous DeepCopyOp DenseFromSparse Print Rebroadcast ScalarFromTensor "
        "SparseFromDense TensorFromScalar ViewOp",
    ),
    (_checked, "Assert"),
    (_reduced, "CAReduce"),
    (_maximum, "Argmax MaxAndArgmax"),
    (_along, "ArgSortOp CumOp DiffOp SortOp Split TopKOp"),
    (_all(_along_last), "LogSoftmax Softmax SoftmaxGrad SoftmaxWithBias"),
    (_all(_rows.product), "Dot Dot22 StructuredDot TrueDot"),
    (_batched_product, "BatchedDot"),
    (_dimshuffled, "DimShuffle"),
    (_reshaped, "Flatten Reshape"),
    (_joined, "Join"),
    (_all(lambda values: _rows.stacked(values, 0)), "MakeVector"),
    (_sliced, "Subtensor"),
    (_assigned, "IncSubtensor"),
    (_all(lambda values: _rows.gathered(values, 0)), "AdvancedSubtensor1"),
    (_repeated, "RepeatOp"),
    (_by_row([0]), "AbstractConv RFFTOp IRFFTOp"),
    (_by_row([None, 0]), "AbstractConv_gradInputs"),
    (_pooled, "Pool"),
    (_normalized, "AbstractBatchNormTrain"),
    (drawn, "RandomFunction mrg_uniform"),
    (_filled, "Alloc AllocEmpty"),
    (_shape, "Shape Shape_i"),
    (_branched, "IfElse"),
    (looped, "Scan"),
]
#: By the names of the classes of operations, or of their parents.
RULES = {name: rule for rule, names in _KINDS for name in names.split()}

#: Rules that distinguish more than ``without_rows`` does where no input has rows.
OF_SIZES = (_filled, _shape, drawn, _branched)

#: Operations whose results are random numbers if their inputs are.
ARRANGING = set(
    "AdvancedSubtensor AdvancedSubtensor1 Alloc DimShuffle Elemwise Join Nonzero Rebroadcast "
    "Reshape Subtensor".split()
)
