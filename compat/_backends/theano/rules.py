"""Rules for Theano's operations: how their results depend on the rows of a batch.

A rule gets a node, a ``Value`` for each of its inputs, and the ``Propagation`` over the graph. It
is called only where an input has rows, or is a part of a sum, unless it is one of ``OF_SIZES``.
"""

import os

from theano.scan_module.scan_utils import scan_args
from theano.tensor.subtensor import get_idx_list

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from .graph import frames_of


class Drawn(_rows.Placement):
    """Random numbers, none of which depends on another one, or on a row."""

    __slots__ = ()


def _plain(values):
    return _rows.without_rows([value.placement for value in values])


def _are_replicated(values):
    return all(isinstance(value.placement, Replicated) for value in values)


def unknown(node, values, propagation):
    """Return the placement of what no rule knows; what needs the whole batch cannot be tried."""
    united = any(isinstance(value.placement, Partial) for value in values)
    return Mixed() if united else Unknown("it is not known")


# Element by element, and nothing at all:


def _pointwise(node, values, propagation):
    is_second = type(getattr(node.op, "scalar_op", None)).__name__ == "Second"
    if is_second and isinstance(values[0].placement, Partial):  # whose shape alone it takes
        values = [Value(REPLICATED, values[0].shape), values[1]]
    return _rows.pointwise(values)


def _all(rule):
    """Return a rule of the values alone."""
    return lambda node, values, propagation: rule(values)


def _checked(node, values, propagation):
    """Follow ``Assert``: each device may check its own rows, but not how many it has."""
    own = all(value.placement in (REPLICATED, Partial("min")) for value in values[1:])
    return values[0].placement if own else Mixed()


# Reductions, and what goes along dimensions:

_HOW = {"add": "sum", "maximum": "max", "minimum": "min", "or": "any", "and": "all"}


def _reduced(node, values, propagation):
    how = _HOW.get(str(node.op.scalar_op).lower(), "other")
    how = "mean" if type(node.op).__name__ == "Mean" else how
    return _rows.reduced(values[0], node.op.axis, how)


def _maximum(node, values, propagation):
    hows = ["max", "position"][-len(node.outputs) :]  # Argmax has the last one only
    return [_rows.reduced(values[0], node.op.axis, how) for how in hows]


def _along(node, values, propagation):
    """Follow what goes along ``op.axis`` (None: all, as one), or along the second input's axis."""
    has_axis = hasattr(node.op, "axis")
    axis = node.op.axis if has_axis else propagation.sizes.constant(node.inputs[1])
    known = axis is not None and _are_replicated(values[1:])
    return _rows.along(values[0], axis) if known else Mixed()


def _along_last(values):
    """Follow what goes along the last dimension: of several matrices the corresponding rows."""
    return _rows.along(Value(_rows.pointwise(values), values[0].shape), -1)


# Products:


def _batched_product(node, values, propagation):
    letters = {2: "bj", 3: "bij"}[values[0].rank], {2: "bj", 3: "bjk"}[values[1].rank]
    return _rows.contracted(values, letters, [each for each in "bik" if each in "".join(letters)])


# Views:


def _dimshuffled(node, values, propagation):
    placement, order = values[0].placement, list(node.op.new_order)
    if isinstance(placement, Partial):
        return placement
    dropped = placement.axis not in order  # of one row
    return Mixed() if dropped else placement.replace(axis=order.index(placement.axis))


def _reshaped(node, values, propagation):
    if any(not isinstance(value.placement, (Replicated, Count)) for value in values[1:]):
        return Mixed()
    return _rows.reshaped(values[0], propagation.sizes.shape(node.outputs[0]))


def _joined(node, values, propagation):
    axis = propagation.sizes.constant(node.inputs[0])
    return Mixed() if axis is None else _rows.concatenated(values[1:], axis)


def _parts(node, variables, propagation):
    """Return the parts of dimensions in an index, for ``_rows.sliced``; None where it varies.

    Arguments:
        variables: what is indexed, and the variables in the index.
    """
    parts = {}
    for axis, index in enumerate(get_idx_list(variables, node.op.idx_list)):
        is_slice = isinstance(index, slice)
        if is_slice and propagation.sizes.takes_all(index, variables[0], axis):
            continue
        asked = [index.start, index.stop, index.step] if is_slice else [index]
        if any(
            not isinstance(propagation.placement_of(v), Replicated)
            for v in asked
            if hasattr(v, "owner")
        ):
            return None
        parts[axis] = "part" if is_slice else "one"
    return parts


def _sliced(node, values, propagation):
    parts = _parts(node, node.inputs, propagation)
    return Mixed() if parts is None else _rows.sliced(values[0], parts)


def _assigned(node, values, propagation):
    """Follow ``set_subtensor`` and ``inc_subtensor``: a part, computed as that part is."""
    parts = _parts(node, node.inputs[:1] + node.inputs[2:], propagation)
    target = values[0].placement
    if parts is None or not isinstance(target, Sharded):
        return Mixed()
    part = _rows.sliced(values[0], parts)
    rank = values[0].rank - list(parts.values()).count("one")
    both = _rows.pointwise([Value(part, [None] * rank), values[1]])
    return target if isinstance(both, Sharded) and both.axis == part.axis else Mixed()


def _repeated(node, values, propagation):
    found = _rows.repeated(values[0], node.op.axis, propagation.sizes.constant(node.inputs[1]))
    return found if _are_replicated(values[1:]) else Mixed()


# Layers, new values:


def _by_row(axes):
    return lambda node, values, propagation: _rows.by_row(values, axes)


def _pooled(node, values, propagation):
    """Follow what pools along the last dimensions."""
    if not _are_replicated(values[1:]):
        return Mixed()
    return _rows.resized(values[0], list(range(-node.op.ndim, 0)))


def _normalized(node, values, propagation):
    """Follow batch normalization: by device in Keras' layer, elsewhere as on one device.

    Its statistics are those of the whole batch.
    """
    frames = frames_of(node.outputs[0])
    layer = os.path.join("keras", "layers", "normalization.py")
    found = _rows.pointwise(values[:3])
    of_layer = not frames or any(path.endswith(layer) for path, _ in frames)
    alone = isinstance(found, Sharded) and (of_layer or found.axis not in node.op.axes)
    return [found if alone else Mixed()] + [Mixed()] * (len(node.outputs) - 1)


def drawn(node, values, propagation):
    """Follow random numbers of a shape. The generator's state is each device's own."""
    known = all(
        isinstance(propagation.placement_of(v), (Replicated, Count, Drawn)) for v in node.inputs[1:]
    )
    return [REPLICATED, Drawn() if known else _plain(values) or Unknown("a draw for each row")]


def _filled(node, values, propagation):
    """Follow ``Alloc``, a value of the sizes after it; ``AllocEmpty`` has none."""
    result = node.outputs[0]
    filling, others = values[: -result.ndim or None], values[len(values) - result.ndim :]
    found = _plain(others)
    if not isinstance(found, (Replicated, Count)):
        return found or Mixed()
    return _rows.pointwise(
        filling + [Value(propagation.as_drawn(result), propagation.sizes.shape(result))]
    )


def _shape(node, values, propagation):
    return (
        Count()
        if isinstance(propagation.placement_of(node.inputs[0]), Drawn)
        else _rows.shape_of(values[0])
    )


# Branches, and a graph of their own inside:


def _branched(node, values, propagation):
    count = node.op.n_outs
    kinds = [value.placement for value in values]
    pairs = zip(kinds[1 : 1 + count], kinds[1 + count :])
    return [_rows.chosen(kinds[0], pair) for pair in pairs]


def _looped(node, values, propagation):
    """Follow ``scan``: rows along another dimension than the steps'. A step per row is tried."""
    loop = scan_args(node.inputs, node.outputs, node.op.inputs, node.op.outputs, node.op.info)
    of = dict(zip(node.inputs, values))
    if loop.outer_in_mit_mot:
        return Unknown("a loop's gradient")
    states = loop.outer_in_mit_sot + loop.outer_in_sit_sot
    if any(of[v].axis == 0 for v in loop.outer_in_seqs):
        alone = not states + loop.cond and _are_replicated(of[v] for v in loop.outer_in_non_seqs)
        return Unknown("a step for each row") if alone else Mixed()
    if not _are_replicated([of[loop.n_steps]]) or any(of[v].axis == 0 for v in states):
        return Mixed()
    held, inside = _in_each_step(loop, of, states, propagation)
    if not _are_replicated(map(inside.value, loop.cond)):
        return Mixed()  # the rows tell where it ends
    for outer, before in zip(loop.outer_out_mit_sot + loop.outer_out_sit_sot, states):
        propagation.sizes.set(outer, propagation.sizes.dimensions(before))
    for outer, v in zip(loop.outer_out_nit_sot, loop.inner_out_nit_sot):
        steps = None if loop.cond else loop.n_steps
        propagation.sizes.set(outer, [steps] + inside.sizes.dimensions(v))
    found = held + [inside.value(v).placement for v in loop.inner_out_nit_sot]
    return [_moved(each, 1) for each in found] + [REPLICATED] * len(loop.outer_out_shared)


def _in_each_step(loop, of, states, propagation):
    """Return the states' placements in each step, and a step's graph, followed until stable.

    A step sees sequences and states without their first dimension.
    """
    same = zip(loop.inner_in_shared + loop.inner_in_non_seqs,
               loop.outer_in_shared + loop.outer_in_non_seqs)  # fmt: skip
    pairs = [(inner, outer, of[outer].placement, 0) for inner, outer in same]
    steps = zip(loop.inner_in_seqs, loop.outer_in_seqs)
    pairs += [(inner, outer, _moved(of[outer].placement, -1), 1) for inner, outer in steps]
    taps = loop.inner_in_mit_sot + [[v] for v in loop.inner_in_sit_sot]
    held, before = [_moved(of[v].placement, -1) for v in states], None
    while held != before:
        of_states = [(v, *state, 1) for each, *state in zip(taps, states, held) for v in each]
        inside, before = propagation.inside(pairs + of_states, loop.inner_outputs), held
        new = map(inside.value, loop.inner_out_mit_sot + loop.inner_out_sit_sot)
        # What they are before a step, and after it.
        held = [_rows.chosen(REPLICATED, [was, is_now.placement]) for was, is_now in zip(held, new)]
    return held, inside


def _moved(placement, by):
    has_rows = isinstance(placement, Sharded)
    return placement.replace(axis=placement.axis + by) if has_rows else placement


_KINDS = [
    (_pointwise, "Elemwise ScalarOp AbstractBatchNormInference"),
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
    (_looped, "Scan"),
]
#: By the names of the classes of operations, or of their parents.
RULES = {name: rule for rule, names in _KINDS for name in names.split()}

#: Those which tell more of what has no rows than ``without_rows``: of sizes, and of each result.
OF_SIZES = (_filled, _shape, drawn, _branched)

#: What leaves random numbers what they are.
ARRANGING = set(
    "AdvancedSubtensor AdvancedSubtensor1 Alloc DimShuffle Elemwise Join Nonzero Rebroadcast "
    "Reshape Subtensor".split()
)
