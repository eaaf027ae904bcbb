"""How results of TensorFlow's operations depend on the rows of a batch: one table.

TensorFlow 1 and 2 have the same operations, and share it. What changes variables, calls functions
and loops is not in it.
"""

from ... import _rows
from ..._rows import Count, Mixed, Unknown
from . import row_rules, row_sizes, row_views
from .row_sizes import Positions


def placements(op, values):
    """The placements of an operation's outputs.

    Arguments:
        op: a ``tf.Operation``.
        values: a ``Value`` for each of its inputs.
    """
    rule, kinds = RULES.get(op.type), [value.placement for value in values]
    at_positions = any(isinstance(kind, Positions) for kind in kinds)
    if rule in (None, row_views.strided_slice):
        kinds = [Unknown() if isinstance(kind, Positions) else kind for kind in kinds]
    found = _rows.settled(kinds, [value.rank for value in values])
    if rule is None:
        stateful = op.op_def is None or op.op_def.is_stateful
        results = Unknown("it is not known") if stateful or found is None else found
    elif found is None or rule in _ASKED_ALWAYS or at_positions and rule in _LOOKING_UP:
        try:
            results = rule(op, values)
        except row_sizes.NotKnown:
            results = Unknown("an axis or a size is not known")
    elif isinstance(found, Count) and op.type in _OF_SIZES:
        results = _OF_SIZES[op.type](op, values)
    else:
        results = found
    results = results if isinstance(results, list) else [results] * len(op.outputs)
    return [_as_meant(op, *pair) for pair in zip(op.outputs, results)]


def _as_meant(op, output, placement):
    """A result, where ``without_rows`` passed on what its operation does not keep."""
    if isinstance(placement, Positions) and op.type not in _KEEPING_POSITIONS:
        return Mixed(placement.why)
    if placement == Count() and output.shape.ndims == 0 and op.type not in _IN_PROPORTION:
        return row_sizes.NOT_IN_PROPORTION
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
        "TruncateMod Xlog1py Xlogy ZerosLike Zeta"
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
    row_rules.along: "Cumprod Cumsum CumulativeLogsumexp Reverse ReverseV2 Roll",
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
    row_rules.counted_in: "Bincount DenseBincount HistogramFixedWidth",
    row_rules.scattered: "ScatterNd",
    row_rules.where: "Where",
    row_rules.sequences_reversed: "ReverseSequence",
    row_rules.by_row(0): (
        "AvgPool AvgPool3D Conv2D Conv3D DepthToSpace "
        "DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches LRN MaxPool "
        "MaxPool3D MaxPoolV2 Multinomial ResizeArea ResizeBicubic ResizeBilinear "
        "ResizeNearestNeighbor SpaceToDepth StatelessMultinomial"
    ),
    row_rules.by_row(0, 0): (
        "InTopK InTopKV2 ResizeBicubicGrad ResizeBilinearGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits"
    ),
    row_rules.by_row(0, 0, 0): "MaxPoolGrad MaxPool3DGrad LRNGrad",
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
    row_sizes.shape: "Shape ShapeN",
    row_sizes.size: "Size",
    row_sizes.rank: "Rank",
    row_views.reshape: "Reshape",
    row_views.transpose: "ConjugateTranspose Transpose",
    row_views.expand_dims: "ExpandDims",
    row_views.squeeze: "Squeeze",
    row_views.pack: "Pack",
    row_views.unpack: "Unpack",
    row_views.concat: "Concat ConcatV2",
    row_views.split_along: "Split SplitV",
    row_views.slice_of: "Slice",
    row_views.strided_slice: "StridedSlice",
    row_views.tile: "Tile",
    row_views.broadcast_to: "BroadcastTo",
    row_views.pad: "MirrorPad Pad PadV2",
    row_rules.space_to_batch: "BatchToSpace BatchToSpaceND SpaceToBatch SpaceToBatchND",
}

#: What becomes of sizes, where that is more than something that depends on the number of rows.
_TYPES_OF_SIZES = {
    row_sizes.picked: "Gather GatherV2 Slice StridedSlice Unpack",
    row_sizes.joined: "Concat ConcatV2 Pack",
    row_sizes.cast: "Cast",
    row_sizes.single: "Prod Squeeze",
    row_rules.same: "EnsureShape",
    row_views.with_sizes: "Reshape",
    row_rules.made: "BroadcastTo Tile " + _MADE,
}


def _by_name(types):
    return {name: rule for rule, names in types.items() for name in names.split()}


RULES, _OF_SIZES = _by_name(_TYPES), _by_name(_TYPES_OF_SIZES)
_CALCULATING = (row_rules.pointwise, row_rules.added, row_rules.multiplied, row_rules.divided)
_MEETING = _CALCULATING + (row_rules.selected, row_views.pack, row_views.concat)
_ASKED_ALWAYS = (
    row_rules.same, row_rules.joined, row_rules.switched, row_sizes.shape, row_sizes.size,
    row_sizes.rank,
)  # fmt: skip
_LOOKING_UP = (row_rules.gathered, row_rules.gathered_by_coordinates, row_rules.sparse_product)
for _name, _rule in RULES.items():
    if _rule in _CALCULATING + (row_rules.extreme,):
        _OF_SIZES[_name] = row_sizes.calculated
#: Operations whose inputs' rows meet.
ALIGNED = {name for name, rule in RULES.items() if rule in _MEETING}
