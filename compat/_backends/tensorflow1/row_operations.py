"""How results of TensorFlow's operations depend on the rows of a batch: one table.

TensorFlow 1 and 2 have the same operations, and share it. What changes variables, calls functions
and loops is not in it. Rules of shapes and sizes are here, all others in ``row_rules``.
"""

import numpy as np

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from . import ragged_rules, row_rules
from .graph import constant, known_numbers, sizes_of
from .row_rules import NotKnown, Positions, known, of_first

#: Of a single number: it depends on the number of rows, and does not grow in proportion.
NOT_IN_PROPORTION = Count([])


# What takes a shape -----------------------------------------------------------------------------


def _of_shape(rule):
    """A rule of rows whose other inputs, such as a new shape, are the same for all or sizes."""

    def applied(op, values):
        placement = values[0].placement
        others = _rows.without_rows([value.placement for value in values[1:]])
        if isinstance(placement, Sharded) and others is not None:
            return rule(op, values)
        return placement if isinstance(placement, Partial) and others == REPLICATED else Mixed()

    return applied


@_of_shape
def reshape(op, values):
    sizes, after = values[1].placement, known(sizes_of(op.outputs[0]))
    if isinstance(sizes, Count):
        places = known(sizes.places)
    else:
        places = [i for i, each in enumerate(known(_partly(op.inputs[1]))) if each == -1]
    after = [None if place in places else each for place, each in enumerate(after)]
    if after.count(None) > 1:
        raise NotKnown
    return _rows.reshaped(values[0], after)


def with_sizes(op, values):
    """``Reshape`` to a shape that has rows, of what has none."""
    if isinstance(values[0].placement, Replicated):
        return Unknown("an input without rows takes a shape with them")
    return single(op, values)


def _partly(tensor):
    """As ``known_numbers``; of a vector packed of some, None for those that are not known."""
    found = known_numbers(tensor)
    if found is None and tensor.op.type == "Pack":
        packed = [known_numbers(each) for each in tensor.op.inputs]
        return [each[0] if each else None for each in packed]
    return found


@_of_shape
def strided_slice(op, values):
    """``x[:, 0]``; of a dimension taken whole no numbers need be known."""
    value, (count,) = values[0], known(sizes_of(op.inputs[3]))
    begin, end, step = [known_numbers(tensor) for tensor in op.inputs[1:4]]

    def masked(name):
        mask = op.get_attr(name + "_mask")
        return {i for i in range(known(count)) if mask >> i & 1}

    ellipsis, new, one = masked("ellipsis"), masked("new_axis"), masked("shrink_axis")
    from_first, to_last = masked("begin"), masked("end")
    taken = []  # of each dimension, old or new, in order
    for i in range(count):
        axis = len(taken) - taken.count("new")
        if i in ellipsis:
            taken += ["all"] * (value.rank - count + len(ellipsis | new))
        elif i in new | one:
            taken.append("new" if i in new else "one")
        else:
            starts = i in from_first or begin is not None and begin[i] == 0
            stops = i in to_last or end is not None and end[i] == value.shape[axis]
            is_all = starts and stops and step is not None and step[i] == 1
            taken.append("all" if is_all else "part")
    old = [each for each in taken if each != "new"]
    if None in (begin, end) and old[value.axis : value.axis + 1] == ["part"]:
        raise NotKnown
    result = _rows.sliced(value, {i: each for i, each in enumerate(old) if each != "all"})
    left = [each for each in taken if each != "one"]
    new_axes = [place for place, each in enumerate(left) if each == "new"]
    return _rows.expanded(Value(result, [None] * (value.rank - old.count("one"))), new_axes)


@of_first
def tile(op, values):
    return _rows.tiled(values[0], _partly(op.inputs[1]))


@_of_shape
def broadcast_to(op, values):
    value, sizes, rank = values[0], values[1].placement, known(op.outputs[0].shape.ndims)
    if isinstance(sizes, Replicated):
        return Mixed()  # as many rows on each device
    if sizes.places != {value.axis + rank - value.rank}:
        raise NotKnown
    return _rows.broadcast(value, rank)


# Shapes and sizes -------------------------------------------------------------------------------


def shape(op, values):
    return list(map(_rows.shape_of, values))


def size(op, values):
    return _rows.size_of(values[0])


def rank(op, values):
    placement = values[0].placement
    return placement if isinstance(placement, Unknown) else REPLICATED


# What becomes of sizes, where nothing has rows --------------------------------------------------


def picked(op, values):
    """Elements of a vector of sizes, such as a shape."""
    sizes, arguments = values[0].placement, [constant(tensor) for tensor in op.inputs[1:]]
    known = isinstance(sizes, Count) and sizes.places is not None and values[0].rank == 1
    if not known or values[0].shape[0] is None or any(each is None for each in arguments):
        return _not_told(op)
    places = np.arange(values[0].shape[0])
    if op.type == "Unpack":
        return [_rows.counted(sizes, int(place)) for place in places]
    if op.type in ("Gather", "GatherV2"):
        chosen = arguments[0]
    elif len(arguments[0]) != 1:
        return _not_told(op)
    elif op.type == "Slice":
        begin, count = [argument.item() for argument in arguments]
        chosen = slice(begin, begin + count if count >= 0 else None)
    elif op.get_attr("shrink_axis_mask"):
        chosen = arguments[0].item()
    else:
        begin, end, step = [argument.item() for argument in arguments]
        begin = None if op.get_attr("begin_mask") else begin
        chosen = slice(begin, None if op.get_attr("end_mask") else end, step)
    return _rows.counted(sizes, places[chosen].tolist())


def _not_told(op):
    """Results that depend on the number of rows: a single number may grow in any way."""
    return [NOT_IN_PROPORTION if t.shape.ndims == 0 else Count() for t in op.outputs]


def single(op, values):
    """The product of a vector of sizes, or its only element."""
    sizes = values[0].placement
    if values[0].rank == 0:
        return sizes
    return Count() if len(getattr(sizes, "places", None) or ()) == 1 else _not_told(op)


def cast_sizes(op, values):
    rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    return _not_told(op) if rounds else values[0].placement


def calculated(op, values):
    """What arithmetic makes of sizes, each in proportion to the rows or not."""
    counted = [value for value in values if isinstance(value.placement, Count)]
    first, after = counted[0], sizes_of(op.outputs[0])
    kept = len(counted) == 1 and op.type in ("Mul", "Neg")
    if op.type in ("Maximum", "Minimum"):
        # The larger of two that are in proportion to the rows is so, too, whatever the number of
        # rows; so is the larger one of a number of rows, which is at least 1, and 1.
        others = [constant(t) for t, v in zip(op.inputs, values) if v not in counted]
        is_one = op.type == "Maximum" and all(o is not None and o.max() <= 1 for o in others)
        kept = all(each.placement == Count() for each in counted) and (not others or is_one)
    if after == []:
        return first.placement if kept else NOT_IN_PROPORTION
    if not kept or after is None or any(value.rank not in (0, 1) for value in values):
        return Count()
    if first.rank == 0 and first.placement == Count() and after[0]:
        return Count(range(after[0]))  # multiples of one number
    return first.placement


def joined_sizes(op, values):
    """A vector of sizes put together from numbers, or from such vectors."""
    values, rank = (values, 0) if op.type == "Pack" else (values[:-1], 1)
    if any(value.rank != rank or None in value.shape for value in values):
        return Count()
    places, start = [], 0
    for value in values:
        placement = value.placement
        if isinstance(placement, Count):
            if rank and placement.places is None or placement == NOT_IN_PROPORTION:
                return Count()
            places += [start + place for place in (placement.places if rank else [0])]
        start += value.shape[0] if rank else 1
    return Count(places)


# The table --------------------------------------------------------------------------------------


def placements(op, values):
    """The placements of an operation's outputs.

    Arguments:
        op: a ``tf.Operation``.
        values: a ``Value`` for each of its inputs.
    """
    found = ragged_rules.placements(op, values)
    if found is not None:
        return found
    values = ragged_rules.without_numbers_of_rows(values)
    rule, positions = RULES.get(op.type), [v for v in values if isinstance(v.placement, Positions)]
    if positions and rule in (None, strided_slice):
        values = [Value(Unknown(), v.shape) if v in positions else v for v in values]
    results = _rows.settled(values)
    stateful = op.op_def is None or op.op_def.is_stateful
    if rule is None and (stateful or results is None):
        results = Unknown("it is not known")
    asked = results is None or rule in _ASKED_ALWAYS or positions and rule in _LOOKING_UP
    if not asked:
        rule = _OF_SIZES.get(op.type) if isinstance(results, Count) else None
    if rule is not None:
        try:
            results = rule(op, values)
        except NotKnown:
            results = Unknown("an axis or a size is not known")
    results = results if isinstance(results, list) else [results] * len(op.outputs)
    return [_as_meant(op, *pair) for pair in zip(op.outputs, results)]


def _as_meant(op, output, placement):
    """A result, where ``without_rows`` passed on what its operation does not keep."""
    if isinstance(placement, Positions) and op.type not in _KEEPING_POSITIONS:
        return Mixed(placement.why)
    if placement == Count() and output.shape.ndims == 0 and op.type not in _IN_PROPORTION:
        return NOT_IN_PROPORTION
    return placement


_KEEPING_POSITIONS = {"Cast", "Identity", "Squeeze", "Where"}
_IN_PROPORTION = {
    "Cast", "Gather", "GatherV2", "Identity", "Maximum", "Minimum", "Mul", "Prod", "Reshape",
    "Squeeze", "StridedSlice", "Unpack",
}  # fmt: skip


_MADE = (
    "Empty Fill RandomStandardNormal RandomUniform RandomUniformInt StatelessRandomNormal "
    "StatelessRandomNormalV2 StatelessRandomUniform StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal "
    "StatelessTruncatedNormalV2 TruncatedNormal"
)
_TYPES = {
    row_rules.pointwise: (
        "Abs Acos Acosh Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e "
        "BesselI1 BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue "
        "Complex ComplexAbs Cos Cosh Digamma Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 "
        "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Floor FloorDiv FloorMod Greater "
        "GreaterEqual Igamma Igammac Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu "
        "LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr "
        "LookupTableFindV2 Mod Ndtri NextAfter NotEqual OnesLike Polygamma Pow Reciprocal "
        "ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad Selu "
        "SelectV2 SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign "
        "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad TruncateDiv "
        "TruncateMod Xlog1py Xlogy ZerosLike Zeta " + ragged_rules.ON_TEXTS
    ),
    row_rules.extreme: "Maximum Minimum",
    row_rules.added: "AccumulateNV2 Add AddN AddV2 Sub",
    row_rules.multiplied: "Conj Imag Mul MulNoNan Neg Real",
    row_rules.divided: "Div DivNoNan RealDiv Xdivy",
    row_rules.same: (
        "CheckNumerics Identity IdentityN PlaceholderWithDefault PreventGradient "
        "Snapshot StopGradient"
    ),
    row_rules.with_sizes: "EnsureShape",
    row_rules.cast: "Cast",
    row_rules.bias: "BiasAdd BiasAddV1",
    row_rules.selected: "Select",
    row_rules.reduced: "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum",
    row_rules.half_of_squares: "L2Loss",
    row_rules.all_but_channels: "BiasAddGrad",
    row_rules.by_numbers(_rows.along): "Cumprod Cumsum CumulativeLogsumexp ReverseV2",
    row_rules.by_numbers(_rows.along, 2): "Roll",
    row_rules.along_last(1): (
        "AdjustHue AdjustSaturation FFT HSVToRGB IFFT IRFFT LogSoftmax MatrixDiag MatrixDiagV2 "
        "MatrixDiagV3 RFFT RGBToHSV Softmax TopK TopKV2"
    ),
    row_rules.along_last(2): (
        "Cholesky FFT2D IFFT2D IRFFT2D LogMatrixDeterminant MatrixBandPart MatrixDeterminant "
        "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixInverse MatrixLogarithm "
        "MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd"
    ),
    row_rules.along_last(3): "AdjustContrastv2 FFT3D IFFT3D IRFFT3D RFFT3D",
    row_rules.along_last(2, 1): "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    row_rules.along_last(2, 2): "MatrixSolve MatrixSolveLs MatrixTriangularSolve",
    row_rules.along_last(1, 1): "Cross",
    row_rules.product: "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul SparseMatMul",
    row_rules.einsum: "Einsum",
    row_rules.sparse_product: "SparseTensorDenseMatMul",
    row_rules.gathered: "Gather GatherV2 ResourceGather",
    row_rules.gathered_by_coordinates: "GatherNd ResourceGatherNd",
    row_rules.segments: (
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum"
    ),
    row_rules.counted_in: "Bincount DenseBincount",
    of_first(lambda op, values: _rows.scattered(values[:1])): "HistogramFixedWidth",
    row_rules.scattered: "ScatterNd",
    row_rules.where: "Where",
    row_rules.sequences_reversed: "ReverseSequence",
    row_rules.of_values(_rows.by_row, [0]): (
        "AvgPool AvgPool3D Conv2D Conv3D DepthToSpace "
        "DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches LRN MaxPool "
        "MaxPool3D MaxPoolV2 Multinomial ResizeArea ResizeBicubic ResizeBilinear "
        "ResizeNearestNeighbor SpaceToDepth StatelessMultinomial"
    ),
    row_rules.of_values(_rows.by_row, [0, 0]): (
        "InTopK InTopKV2 ResizeBicubicGrad ResizeBilinearGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits"
    ),
    row_rules.of_values(_rows.by_row, [0, 0, 0]): "MaxPoolGrad MaxPool3DGrad LRNGrad",
    row_rules.of_sizes_and_rows: (
        "AvgPoolGrad AvgPool3DGrad Conv2DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNativeBackpropInput"
    ),
    row_rules.of_kernel: (
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"
    ),
    row_rules.normalized: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    row_rules.one_hot: "OneHot",
    row_rules.made: _MADE,
    row_rules.joined: "Merge",
    row_rules.switched: "Switch",
    shape: "Shape ShapeN",
    size: "Size",
    rank: "Rank",
    reshape: "Reshape",
    row_rules.by_numbers(_rows.transposed): "ConjugateTranspose Transpose",
    row_rules.by_numbers(_rows.expanded): "ExpandDims",
    row_rules.squeeze: "Squeeze",
    row_rules.pack: "Pack",
    row_rules.unpack: "Unpack",
    row_rules.concat: "ConcatV2",
    row_rules.split_along: "Split SplitV",
    row_rules.slice_of: "Slice",
    strided_slice: "StridedSlice",
    tile: "Tile",
    broadcast_to: "BroadcastTo",
    row_rules.pad: "MirrorPad Pad PadV2",
    row_rules.space_to_batch: "BatchToSpaceND SpaceToBatchND",
}

_CALCULATING = (row_rules.pointwise, row_rules.added, row_rules.multiplied, row_rules.divided)
#: What becomes of sizes, where that is more than something that depends on the number of rows.
_TYPES_OF_SIZES = {
    picked: "Gather GatherV2 Slice StridedSlice Unpack",
    joined_sizes: "ConcatV2 Pack",
    cast_sizes: "Cast",
    single: "Prod Squeeze",
    row_rules.same: "EnsureShape",
    with_sizes: "Reshape",
    row_rules.made: "BroadcastTo Tile " + _MADE,
    calculated: " ".join(_TYPES[rule] for rule in _CALCULATING + (row_rules.extreme,)),
}


def _by_name(types):
    return {name: rule for rule, names in types.items() for name in names.split()}


RULES, _OF_SIZES = _by_name(_TYPES), _by_name(_TYPES_OF_SIZES)
_ASKED_ALWAYS = (row_rules.same, row_rules.joined, row_rules.switched, shape, size, rank)
_LOOKING_UP = (row_rules.gathered, row_rules.gathered_by_coordinates, row_rules.sparse_product)
_MEETING = _CALCULATING + (row_rules.selected, row_rules.pack, row_rules.concat)
#: Operations whose inputs' rows meet.
ALIGNED = {name for name, rule in RULES.items() if rule in _MEETING}
