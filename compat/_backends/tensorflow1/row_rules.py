"""Rules of types of operations: where their results have the rows of the batch.

A rule is a function of the operation, of what is known of its inputs, and of the function that
tells what is known of any other tensor. It returns what is then known of the operation's outputs:
one for all of them, or a list.
"""

# What is known of a tensor: the number of the dimension along which it has the batch's rows, or
CONSTANT = "does not depend on the batch"
COUNT = "depends on the number of rows alone"
MIXED = "each value may depend on all rows"
SPARSE = "a part of a sparse tensor"
UNKNOWN = "unknown"


def is_axis(kind):
    return isinstance(kind, int)


def _constant(tensor):
    """The numbers in a tensor that are known before any run, as a list, or None."""
    value = _value(tensor)
    return None if value is None else value.ravel().tolist()


def _value(tensor):
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.op.type == "Sub":  # the order of tf.transpose(x)
        first, second = map(_value, tensor.op.inputs)
        return None if first is None or second is None else first - second
    return value


def rank_of(tensor):
    return tensor.shape.ndims


def _without_rows(kinds):
    """The result where no input has rows."""
    for kind in (UNKNOWN, SPARSE):
        if kind in kinds:
            return UNKNOWN
    return MIXED if MIXED in kinds else COUNT


def _of_rows(rule):
    """A rule that is asked only where an input has rows, and every input's kind is known."""

    def applied(op, kinds, known):
        if UNKNOWN in kinds or SPARSE in kinds:
            return UNKNOWN
        return rule(op, kinds, known) if any(map(is_axis, kinds)) else _without_rows(kinds)

    return applied


@_of_rows
def elementwise(op, kinds, known):
    """Dimensions are matched from the last one on: two tensors' rows may meet, or not."""
    ranks = [rank_of(tensor) for tensor in op.inputs]
    if None in ranks:
        return kinds[0] if len(kinds) == 1 else UNKNOWN
    places = {kind - rank for kind, rank in zip(kinds, ranks) if is_axis(kind)}
    if len(places) > 1 or COUNT in kinds and op.outputs[0].dtype.is_floating:
        return MIXED
    return max(ranks) + places.pop()


def _chosen(op, kinds, known):
    """``tf.where``: a vector chooses rows."""
    if rank_of(op.inputs[0]) == 1 and rank_of(op.inputs[1]) != 1:
        axes = {kind for kind in kinds if kind != CONSTANT}
        return 0 if axes == {0} else UNKNOWN
    return elementwise(op, kinds, known)


def _first(op, kinds, known):
    """Each row of the first input gives one of the output; all else is constant."""
    others = set(kinds[1:]) <= {CONSTANT, COUNT}
    return kinds[0] if others and (kinds[0] == 0 or kinds[0] == MIXED) else UNKNOWN


def _gradient_of_convolution(op, kinds, known):
    """A transposed convolution: what it convolves is its third input."""
    return 0 if kinds[2] == 0 and kinds[1] == CONSTANT else UNKNOWN


def _normalized(op, kinds, known):
    """The rows, then their mean and variance."""
    if kinds[0] != 0:
        return _first(op, kinds, known)
    return [0] + [MIXED if op.get_attr("is_training") else COUNT] * (len(op.outputs) - 1)


def _reduced(op, kinds, known):
    """Sums and the like."""
    axes, rank = _constant(op.inputs[1]), rank_of(op.inputs[0])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    if axes is None or rank is None:
        return UNKNOWN
    axes = {axis % rank for axis in axes}
    if kinds[0] in axes:
        return MIXED
    kept = "keep_dims" in op.node_def.attr and op.get_attr("keep_dims")
    return kinds[0] if kept else kinds[0] - sum(axis < kinds[0] for axis in axes)


def _summed(op, kinds, known):
    return MIXED if is_axis(kinds[0]) else _without_rows(kinds)


def _along(op, kinds, known):
    """What goes along some dimensions, and keeps them: cumulative sums, reversals."""
    axes, rank = _constant(op.inputs[1]), rank_of(op.inputs[0])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    if axes is None or rank is None:
        return UNKNOWN
    return MIXED if kinds[0] in {axis % rank for axis in axes} else kinds[0]


def _along_last(op, kinds, known):
    rank = rank_of(op.inputs[0])
    if not is_axis(kinds[0]) or rank is None:
        return _without_rows(kinds) if not is_axis(kinds[0]) else UNKNOWN
    return MIXED if kinds[0] == rank - 1 else kinds[0]


@_of_rows
def _product(op, kinds, known):
    """Matrix products, of the last two dimensions."""
    ranks = [rank_of(tensor) for tensor in op.inputs]
    if None in ranks:
        return UNKNOWN
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    places = []  # counted from the last dimension, as if nothing were transposed
    for kind, rank, name in zip(kinds, ranks, names):
        if is_axis(kind):
            place = kind - rank
            places.append(-3 - place if op.get_attr(name) and place >= -2 else place)
        else:
            places.append(None)
    first, second = places
    if first == second and first < -2:
        return max(ranks) + first
    if second is None and first != -1:
        return max(ranks) + first
    if first is None and second != -2:
        return max(ranks) + second
    return MIXED


def _sparse_product(op, kinds, known):
    """A sparse matrix times a dense one, by whose rows it would sum."""
    if SPARSE not in kinds[:3]:
        return UNKNOWN
    if is_axis(kinds[3]) or op.get_attr("adjoint_a"):
        return MIXED
    return 0


def _transposed(op, kinds, known):
    order = _constant(op.inputs[1])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    return UNKNOWN if order is None else order.index(kinds[0])


def _reshaped(op, kinds, known):
    """What divides a row leaves the rows in order; what puts several together need not."""
    if kinds[0] == CONSTANT:
        return _made(op, kinds, known)
    if kinds[0] != 0:
        return _without_rows(kinds) if not is_axis(kinds[0]) else UNKNOWN
    before, after = [
        tensor.shape[1:].num_elements() if rank_of(tensor) else None
        for tensor in (op.inputs[0], op.outputs[0])
    ]
    return 0 if before and after and before % after == 0 else UNKNOWN


def _expanded(op, kinds, known):
    place, rank = _constant(op.inputs[1]), rank_of(op.inputs[0])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    if place is None or rank is None:
        return UNKNOWN
    return kinds[0] + (place[0] % (rank + 1) <= kinds[0])


def _squeezed(op, kinds, known):
    rank = rank_of(op.inputs[0])
    places = op.get_attr("squeeze_dims")
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    if rank is None or not places:
        return UNKNOWN
    places = {place % rank for place in places}
    return UNKNOWN if kinds[0] in places else kinds[0] - sum(p < kinds[0] for p in places)


def stacked(op, kinds, known):
    axes = {kind for kind in kinds if kind != CONSTANT}
    if not any(map(is_axis, axes)):
        return _without_rows(kinds)
    rank = rank_of(op.inputs[0])
    if len(axes) > 1 or rank is None:
        return UNKNOWN
    axis, place = axes.pop(), op.get_attr("axis") % (rank + 1)
    return axis + (place <= axis)


def _unstacked(op, kinds, known):
    rank, source = rank_of(op.inputs[0]), op.inputs[0].op
    if kinds[0] == COUNT and source.type == "Shape" and is_axis(known(source.inputs[0])):
        like = known(source.inputs[0])
        return [COUNT if place == like else CONSTANT for place in range(len(op.outputs))]
    if not is_axis(kinds[0]) or rank is None:
        return _without_rows(kinds) if not is_axis(kinds[0]) else UNKNOWN
    place = op.get_attr("axis") % rank
    return MIXED if place == kinds[0] else kinds[0] - (place < kinds[0])


def concatenated(op, kinds, known):
    axis, rank = _constant(op.inputs[-1]), rank_of(op.outputs[0])
    kinds = kinds[:-1]
    if not any(map(is_axis, kinds)):
        return _without_rows(kinds)
    if axis is None or rank is None:
        return UNKNOWN
    if axis[0] % rank in kinds:
        return MIXED  # the second tensor's first row comes after the first one's last
    return kinds[0] if len(set(kinds)) == 1 else UNKNOWN


def _split(op, kinds, known):
    data, axis = (1, 0) if op.type == "Split" else (0, 2)
    place, rank = _constant(op.inputs[axis]), rank_of(op.inputs[data])
    if not is_axis(kinds[data]):
        return _without_rows(kinds)
    if place is None or rank is None:
        return UNKNOWN
    return MIXED if place[0] % rank == kinds[data] else kinds[data]


def _sliced(op, kinds, known):
    """``x[:, 0]``: all rows, or some of them."""
    begin, end, step = [_constant(tensor) for tensor in op.inputs[1:4]]
    axis = kinds[0]
    if axis == COUNT and op.inputs[0].op.type == "Shape" and begin is not None:
        like = known(op.inputs[0].op.inputs[0])
        if like == 0 and begin[0] > 0 and step == [1]:
            return CONSTANT  # sizes of other dimensions
    if not is_axis(axis):
        return _without_rows(kinds)
    if step is None or op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return UNKNOWN
    if axis < len(step):
        bit = 1 << axis
        all_of_it = op.get_attr("begin_mask") & bit or begin is not None and begin[axis] == 0
        if op.get_attr("shrink_axis_mask") & bit:
            return MIXED
        if not all_of_it or not op.get_attr("end_mask") & bit or step[axis] != 1:
            return UNKNOWN if end is None or begin is None else MIXED
    shrunk = op.get_attr("shrink_axis_mask") & ((1 << axis) - 1)
    return axis - bin(shrunk).count("1")


def _cut(op, kinds, known):
    """``tf.slice``, which takes all rows from 0 by a size of -1."""
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    begin, size = [_constant(tensor) for tensor in op.inputs[1:]]
    if begin is None or size is None:
        return UNKNOWN
    return kinds[0] if begin[kinds[0]] == 0 and size[kinds[0]] == -1 else MIXED


def _tiled(op, kinds, known):
    if kinds[0] == CONSTANT:
        return _made(op, kinds, known)
    times = _constant(op.inputs[1])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    return kinds[0] if times is not None and times[kinds[0]] == 1 else UNKNOWN


def _padded(op, kinds, known):
    pads = _constant(op.inputs[1])
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    if pads is None:
        return UNKNOWN
    return MIXED if any(pads[2 * kinds[0] : 2 * kinds[0] + 2]) else kinds[0]


def _gathered(op, kinds, known):
    """Entries of the first input, by numbers in the second."""
    axis = _constant(op.inputs[2]) if len(op.inputs) > 2 else [0]
    ranks = [rank_of(tensor) for tensor in op.inputs[:2]]
    if "batch_dims" in op.node_def.attr and op.get_attr("batch_dims"):
        return UNKNOWN
    if axis is None or op.type != "ResourceGather" and None in ranks:
        return UNKNOWN
    axis = axis[0] % ranks[0] if op.type != "ResourceGather" else 0
    data, numbers = kinds[:2]
    if data == CONSTANT and is_axis(numbers):
        return axis + numbers
    if is_axis(data) and numbers == CONSTANT:
        if data == axis:
            return MIXED
        return data if data < axis else data + ranks[1] - 1
    return UNKNOWN if any(map(is_axis, kinds)) else _without_rows(kinds)


def _one_hot(op, kinds, known):
    if not is_axis(kinds[0]):
        return _without_rows(kinds)
    axis = op.get_attr("axis")
    return kinds[0] + (0 <= axis <= kinds[0])


def _made(op, kinds, known):
    """New numbers, of a shape with as many rows."""
    shape = op.inputs[1 if op.type in ("Reshape", "Tile", "BroadcastTo") else 0]
    if any(map(is_axis, kinds)) or rank_of(op.outputs[0]) is None:
        return UNKNOWN
    sizes = op.outputs[0].shape.as_list()
    if sizes.count(None) == 1:
        return sizes.index(None)
    like = known(shape.op.inputs[0]) if shape.op.type == "Shape" else UNKNOWN
    return like if is_axis(like) else UNKNOWN


def _joined(op, kinds, known):
    """The end of a condition: what one of its branches gave."""
    kinds = set(kinds) - {CONSTANT}
    return [kinds.pop() if len(kinds) == 1 else UNKNOWN, COUNT]


def _switched(op, kinds, known):
    return kinds[0] if kinds[1] == CONSTANT else UNKNOWN


def _count(op, kinds, known):
    return UNKNOWN if UNKNOWN in kinds or SPARSE in kinds else COUNT


_TYPES = (
    (
        elementwise,
        "Abs Acos Asin Atan Ceil CheckNumerics Cos Cosh Digamma Elu Erf Erfc Exp Expm1 Floor "
        "Identity Inv IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Neg OnesLike "
        "PlaceholderWithDefault PreventGradient Reciprocal Relu Relu6 Rint Round Rsqrt Selu "
        "Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square StopGradient Tan Tanh "
        "ZerosLike Cast "
        "Add AddN AddV2 Atan2 ClipByValue Div DivNoNan Equal FloorDiv FloorMod Greater "
        "GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul NotEqual Pow "
        "RealDiv SelectV2 SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlogy",
    ),
    (_chosen, "Select"),
    (
        _first,
        "AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace DepthwiseConv2dNative LRN MaxPool "
        "MaxPool3D ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth",
    ),
    (_gradient_of_convolution, "Conv2DBackpropInput Conv3DBackpropInputV2"),
    (_normalized, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"),
    (_reduced, "All Any ArgMax ArgMin Max Mean Min Prod Sum"),
    (_summed, "L2Loss"),
    (_along, "Cumprod Cumsum ReverseV2"),
    (_along_last, "LogSoftmax Softmax TopK TopKV2"),
    (_product, "BatchMatMul BatchMatMulV2 MatMul"),
    (_sparse_product, "SparseTensorDenseMatMul"),
    (_transposed, "Transpose"),
    (_reshaped, "Reshape"),
    (_expanded, "ExpandDims"),
    (_squeezed, "Squeeze"),
    (stacked, "Pack"),
    (_unstacked, "Unpack"),
    (concatenated, "ConcatV2"),
    (_split, "Split SplitV"),
    (_sliced, "StridedSlice"),
    (_cut, "Slice"),
    (_tiled, "Tile"),
    (_padded, "MirrorPad Pad PadV2"),
    (_gathered, "Gather GatherV2 ResourceGather"),
    (_one_hot, "OneHot"),
    (_made, "BroadcastTo Fill RandomStandardNormal RandomUniform TruncatedNormal"),
    (_joined, "Merge"),
    (_switched, "Switch"),
    (_count, "Rank Shape ShapeN Size"),
)
RULES = {name: rule for rule, names in _TYPES for name in names.split()}
