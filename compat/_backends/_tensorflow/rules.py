"""The table of rules: the placements of the results of TensorFlow's operations.

TensorFlow 1 and 2 have the same operations, and share it. It does not contain operations that
change variables, nor those that call functions.
"""

from typing import Any, List, Sequence

from ... import _rows
from ..._rows import Count, Mixed, Placement, Unknown, Value
from . import rules_lookups, rules_shapes, rules_sizes, rules_text, rules_values
from .rules_common import NotKnown, Positions, by_numbers, of_first, of_values


def placements(op: "Any", values: "Sequence[Value]") -> "List[Placement]":
    """Return the placements of an operation's outputs.

    Arguments:
        op: a ``tf.Operation``.
        values: a ``Value`` for each of its inputs.
    """
    of_text = rules_text.placements(op, values)
    if of_text is not None:
        return of_text
    values = rules_text.without_numbers_of_rows(values)
    rule, positions = RULES.get(op.type), [v for v in values if isinstance(v.placement, Positions)]
    if positions and rule in (None, rules_shapes.strided_slice):
        values = [Value(Unknown(), v.shape) if v in positions else v for v in values]
    results: "Any" = _rows.settled(values)
    stateful = op.op_def is None or op.op_def.is_stateful
    if rule is None and (stateful or results is None):
        results = Unknown()
    applies = results is None or rule in _ALWAYS_APPLIED or positions and rule in _LOOKING_UP
    if not applies:
        rule = _OF_SIZES.get(op.type) if isinstance(results, Count) else None
    if rule is not None:
        try:
            results = rule(op, values)
        except NotKnown:
            results = Unknown()  # an axis or a size is not known
    results = results if isinstance(results, list) else [results] * len(op.outputs)
    return [_as_meant(op, *pair) for pair in zip(op.outputs, results)]


def _as_meant(op, output, placement):
    """Return the placement of a result, where ``settled`` has passed on one that does not fit."""
    if isinstance(placement, Positions) and op.type not in _KEEPING_POSITIONS:
        return Mixed(placement.fallback)
    if placement == Count() and output.shape.ndims == 0 and op.type not in _IN_PROPORTION:
        return rules_sizes.NOT_IN_PROPORTION
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
    rules_values.pointwise: (
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
        "TruncateMod Xlog1py Xlogy ZerosLike Zeta " + rules_text.ON_TEXTS
    ),
    rules_values.extreme: "Maximum Minimum",
    rules_values.added: "AccumulateNV2 Add AddN AddV2 Sub",
    rules_values.multiplied: "Conj Imag Mul MulNoNan Neg Real",
    rules_values.divided: "Div DivNoNan RealDiv Xdivy",
    rules_values.same: (
        "CheckNumerics Identity IdentityN PlaceholderWithDefault PreventGradient "
        "Snapshot StopGradient"
    ),
    rules_shapes.with_sizes: "EnsureShape",
    rules_values.cast: "Cast",
    rules_values.bias: "BiasAdd BiasAddV1",
    rules_values.selected: "Select",
    rules_values.reduced: "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum",
    rules_values.half_of_squares: "L2Loss",
    rules_values.all_but_channels: "BiasAddGrad",
    by_numbers(_rows.along): "Cumprod Cumsum CumulativeLogsumexp ReverseV2",
    by_numbers(_rows.along, 2): "Roll",
    rules_values.along_last(1): (
        "AdjustHue AdjustSaturation FFT HSVToRGB IFFT IRFFT LogSoftmax MatrixDiag MatrixDiagV2 "
        "MatrixDiagV3 RFFT RGBToHSV Softmax TopK TopKV2"
    ),
    rules_values.along_last(2): (
        "Cholesky FFT2D IFFT2D IRFFT2D LogMatrixDeterminant MatrixBandPart MatrixDeterminant "
        "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixInverse MatrixLogarithm "
        "MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd"
    ),
    rules_values.along_last(3): "AdjustContrastv2 FFT3D IFFT3D IRFFT3D RFFT3D",
    rules_values.along_last(2, 1): "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    rules_values.along_last(2, 2): "MatrixSolve MatrixSolveLs MatrixTriangularSolve",
    rules_values.along_last(1, 1): "Cross",
    rules_values.product: "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul SparseMatMul",
    rules_values.einsum: "Einsum",
    rules_values.sparse_product: "SparseTensorDenseMatMul",
    rules_lookups.gathered: "Gather GatherV2 ResourceGather",
    rules_lookups.gathered_by_coordinates: "GatherNd ResourceGatherNd",
    rules_lookups.segments: (
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum"
    ),
    rules_lookups.counted_in: "Bincount DenseBincount",
    of_first(lambda op, values: _rows.scattered(values[:1])): "HistogramFixedWidth",
    rules_lookups.scattered: "ScatterNd",
    rules_lookups.where: "Where",
    rules_lookups.sequences_reversed: "ReverseSequence",
    of_values(_rows.by_row, [0]): (
        "AvgPool AvgPool3D Conv2D Conv3D DepthToSpace "
        "DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches LRN MaxPool "
        "MaxPool3D MaxPoolV2 Multinomial ResizeArea ResizeBicubic ResizeBilinear "
        "ResizeNearestNeighbor SpaceToDepth StatelessMultinomial"
    ),
    of_values(_rows.by_row, [0, 0]): (
        "InTopK InTopKV2 ResizeBicubicGrad ResizeBilinearGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits"
    ),
    of_values(_rows.by_row, [0, 0, 0]): "MaxPoolGrad MaxPool3DGrad LRNGrad",
    rules_values.of_sizes_and_rows: (
        "AvgPoolGrad AvgPool3DGrad Conv2DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNativeBackpropInput"
    ),
    rules_values.of_kernel: (
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"
    ),
    rules_values.normalized: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    rules_lookups.one_hot: "OneHot",
    rules_shapes.made: _MADE,
    rules_values.joined: "Merge",
    rules_values.switched: "Switch",
    rules_sizes.shape: "Shape ShapeN",
    rules_sizes.size: "Size",
    rules_sizes.rank: "Rank",
    rules_shapes.reshape: "Reshape",
    by_numbers(_rows.transposed): "ConjugateTranspose Transpose",
    by_numbers(_rows.expanded): "ExpandDims",
    rules_shapes.squeeze: "Squeeze",
    rules_shapes.pack: "Pack",
    rules_shapes.unpack: "Unpack",
    rules_shapes.concat: "ConcatV2",
    rules_shapes.split_along: "Split SplitV",
    rules_shapes.slice_of: "Slice",
    rules_shapes.strided_slice: "StridedSlice",
    rules_shapes.tile: "Tile",
    rules_shapes.broadcast_to: "BroadcastTo",
    rules_shapes.pad: "MirrorPad Pad PadV2",
    rules_shapes.space_to_batch: "BatchToSpaceND SpaceToBatchND",
}

_CALCULATING = (
    rules_values.pointwise,
    rules_values.added,
    rules_values.multiplied,
    rules_values.divided,
)

#: Rules of sizes, where the result is more than ``Count()`` of them.
_TYPES_OF_SIZES = {
    rules_sizes.picked: "Gather GatherV2 Slice StridedSlice Unpack",
    rules_sizes.joined_sizes: "ConcatV2 Pack",
    rules_sizes.cast_sizes: "Cast",
    rules_sizes.single: "Prod Squeeze",
    rules_values.same: "EnsureShape",
    rules_sizes.with_sizes: "Reshape",
    rules_shapes.made: "BroadcastTo Tile " + _MADE,
    rules_sizes.calculated: " ".join(
        _TYPES[rule] for rule in _CALCULATING + (rules_values.extreme,)
    ),
}


def _by_name(types):
    return {name: rule for rule, names in types.items() for name in names.split()}


RULES, _OF_SIZES = _by_name(_TYPES), _by_name(_TYPES_OF_SIZES)

_ALWAYS_APPLIED = (
    rules_values.same,
    rules_values.joined,
    rules_values.switched,
    rules_sizes.shape,
    rules_sizes.size,
    rules_sizes.rank,
)

_LOOKING_UP = (
    rules_lookups.gathered,
    rules_lookups.gathered_by_coordinates,
    rules_values.sparse_product,
)

_MEETING = _CALCULATING + (rules_values.selected, rules_shapes.pack, rules_shapes.concat)

#: Operations whose inputs' rows meet.
ALIGNED = {name for name, rule in RULES.items() if rule in _MEETING}
