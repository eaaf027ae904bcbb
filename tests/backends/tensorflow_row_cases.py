"""Each line of the table of TensorFlow's operations, proved by computing it of parts of a batch.

TensorFlow 1 and 2 share the table; each has a test file that runs these cases.
"""

import collections
import itertools
import re

import missing_rules
import numpy as np
import row_proof
import tensorflow as tf

from compat._backends._tensorflow import rules
from compat._backends._tensorflow.graph import v1_names
from compat._rows import REPLICATED, Partial, Sharded, Value

from . import text_row_cases

v1 = v1_names(tf)
raw = tf.raw_ops
# Each graph runs a few times: to optimize it takes longer than that.
UNOPTIMIZED = v1.ConfigProto()
UNOPTIMIZED.graph_options.rewrite_options.disable_meta_optimizer = True
RANDOM = np.random.RandomState(0)

#: A name, arrays, and a function of tensors that returns one or several.
Case = collections.namedtuple("Case", "name inputs function placements")


def array(*shape):
    return RANDOM.uniform(0.2, 0.9, shape).astype("float32")


def whole_numbers(limit, *shape):
    return RANDOM.randint(0, limit, shape).astype("int32")


class Graph:
    """The graph of a case, with the sizes of its inputs known or not."""

    def __init__(self, case, shapes):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.inputs = [
                v1.placeholder(each.dtype, shape) for each, shape in zip(case.inputs, shapes)
            ]
            results = case.function(*self.inputs)
        self.results = list(results) if isinstance(results, (list, tuple)) else [results]
        self.operations = self.graph.get_operations()

    def placements(self, given):
        """Of the results, by the table."""
        known = dict(zip((tensor.name for tensor in self.inputs), given))

        def placement(tensor):
            if tensor.name not in known:
                op = tensor.op
                values = [value_of(each, placement(each)) for each in op.inputs]
                found = rules.placements(op, values)
                known.update(zip((each.name for each in op.outputs), found))
            return known[tensor.name]

        return list(map(placement, self.results))


def value_of(tensor, placement):
    shape = None if tensor.shape.ndims is None else tensor.shape.as_list()
    if shape and isinstance(placement, Sharded):
        shape[placement.axis] = None
    return Value(placement, shape)


def prove(case, found):
    """Add to ``found`` what ``row_proof`` finds of one case; its operations' types."""
    running = Graph(case, [(None,) * each.ndim for each in case.inputs])
    session = v1.Session(graph=running.graph, config=UNOPTIMIZED)
    graphs = {}

    def claim(given):
        shapes = [list(each.shape) for each in case.inputs]
        for shape, placement in zip(shapes, given):
            if isinstance(placement, Sharded):
                shape[placement.axis] = None
        key = repr(shapes)
        graphs[key] = graphs.get(key) or Graph(case, shapes)
        return graphs[key].placements(given)

    def compute(given):
        check_sizes(case, *given)
        return session.run(running.results, dict(zip(running.inputs, given)))

    with session:
        row_proof.prove(
            case.name,
            case.inputs,
            compute,
            claim,
            case.placements,
            found,
        )
    return {op.type for op in running.operations}


def check_sizes(case, first, gradient=None, *_):
    """Refuse gradients of convolutions whose sizes do not fit: TensorFlow 2.18 dies of them."""
    if re.search("Conv.*BackpropInput", case.name):
        inner, outer = first.shape[-2:]
        channels = inner * outer if case.name.startswith("Depthwise") else outer
        assert gradient.shape[1:] == case.inputs[1].shape[1:-1] + (channels,)
    elif re.search("Conv.*BackpropFilter", case.name):
        assert gradient.shape[:1] == first.shape[:1]
        for part, whole in zip((first, gradient), case.inputs):
            assert part.shape[1:] == whole.shape[1:]


def check():
    """Check the proof of the whole table, as a test of each TensorFlow does."""
    found, types = row_proof.Found(), set(NOT_COMPUTED)
    for case in cases():
        types |= prove(case, found)
    assert not found.wrong, "\n".join(found.wrong)
    here = {name for name in rules.RULES if hasattr(raw, name)}
    assert sorted(here - types) == []
    assert found.claimed > 1000
    version = ".".join(tf.__version__.split(".")[:2])
    if version in ("1.15", "2.21"):
        missing_rules.check("TensorFlow " + version, found)


# The cases ------------------------------------------------------------------------------------


def cases():
    for name, inputs, function in _all():
        choices = None
        if name in NEEDING_SQUARES:  # TensorFlow 1.15 dies of a part of a matrix
            choices = [[REPLICATED, Sharded(0)]] * len(inputs)
        elif name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
            # TensorFlow 1.15 writes beyond its memory where the channels are a part of them.
            choices = [[p for p in row_proof.placements_of(*inputs) if p != Sharded(3)]]
        elif len(inputs) > 1:
            choices = [[p for p in row_proof.placements_of(x) if p not in LEFT_OUT] for x in inputs]
        yield Case(name, inputs, function, choices)


def simple(names, *inputs, label=None, **others):
    """Yield cases of operations of one kind.

    Arguments:
        names: those of the operations, in one text.
        *inputs: arrays, for the first of an operation's inputs, in their order.
        label: the name of all cases; None: that of the operation.
        **others: the other inputs, and attributes.
    """
    for name in names.split():
        operation = getattr(raw, name, None)
        if operation is not None:
            parameters = names_of_inputs(name)
            yield (
                label or name,
                list(inputs),
                lambda *tensors, operation=operation, parameters=parameters: operation(
                    **dict(zip(parameters, tensors), **others)
                ),
            )


def names_of_inputs(name):
    from tensorflow.python.framework import op_def_registry

    get = getattr(op_def_registry, "get", None)
    definition = get(name) if get else op_def_registry.get_registered_ops()[name]
    return [argument.name for argument in definition.input_arg]


def _all():
    groups = _pointwise, _reductions, _products, _lookups, _views, _layers
    for group in groups + (text_row_cases.all_cases,):
        yield from group()


def _pointwise():
    x, y, n = array(3, 4), array(3, 4), whole_numbers(4, 3, 4)
    flags = RANDOM.rand(3, 4) > 0.5
    for names, inputs in [
        (
            "Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e Ceil Cos "
            "Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Inv IsFinite IsInf IsNan LeakyRelu "
            "Lgamma Log Log1p Ndtri Neg OnesLike Reciprocal Relu Relu6 Rint Round Rsqrt Selu "
            "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square Tan Tanh ZerosLike "
            "FakeQuantWithMinMaxArgs Identity Snapshot StopGradient PreventGradient",
            [x],
        ),
        (
            "ApproximateEqual Atan2 Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac "
            "Less LessEqual Maximum Minimum NextAfter NotEqual Pow SquaredDifference TruncateMod "
            "Mod Xlog1py Xlogy Zeta Add AddV2 Sub Mul MulNoNan Div DivNoNan RealDiv Xdivy "
            "EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad "
            "SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad Complex",
            [x, y],
        ),
        ("Polygamma", [np.float32(n), y]),
        ("Invert", [n]),
        ("BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift TruncateDiv Div", [n, n + 1]),
        ("LogicalNot", [flags]),
        ("LogicalAnd LogicalOr", [flags, flags.T.reshape(3, 4)]),
        ("Conj Real Imag Angle ComplexAbs", [(x + 1j * y).astype("complex64")]),
        ("Betainc", [x, y, array(3, 4)]),
        ("ClipByValue FakeQuantWithMinMaxVars", [x, np.float32(0.3), np.float32(0.6)]),
        ("SelectV2", [flags, x, y]),
        ("SelectV2", [flags[:, :1], x, y[0]]),
        ("Add AddV2 Sub Mul RealDiv", [x, array(4)]),
        ("Add AddV2 Mul", [array(3, 3), array(3)]),
        ("BiasAdd BiasAddV1", [array(3, 3), array(3)]),
        ("BiasAdd", [array(3, 2, 3, 4), array(4)]),
    ]:
        yield from simple(names, *inputs)
    for each in (flags, flags[:, 0]):
        yield "Select", [each, x, y], lambda c, x, y: raw.Select(condition=c, x=x, y=y)
    yield "AddN", [x, y], lambda *both: raw.AddN(inputs=both)
    yield "IdentityN", [x, y], lambda *both: raw.IdentityN(input=both)
    yield "AccumulateNV2", [x, y], lambda x, y: raw.AccumulateNV2(inputs=[x, y], shape=[3, 4])
    channels_first = {"label": "BiasAdd NCHW", "data_format": "NCHW"}
    yield from simple("BiasAdd", array(3, 3, 2), array(3), **channels_first)
    yield from simple("Bucketize", x, boundaries=[0.3, 0.6])
    yield from simple("CheckNumerics", x, message="")
    yield from simple("EnsureShape PlaceholderWithDefault", x, shape=[None, None])
    for before, after in [
        ("float64", "float32"), ("float32", "int32"), ("int32", "float32"), ("float32", "bool"),
        ("int32", "bool"), ("int32", "int64"), ("bool", "float32"),
    ]:  # fmt: skip
        yield (
            "Cast {} {}".format(before, after),
            [(2 * x).astype(before)],
            lambda x, after=after: tf.cast(x, after),
        )


def _reductions():
    x, flags = array(3, 2, 6), RANDOM.rand(3, 2, 6) > 0.5
    axes = [[0], [1], [0, 1], [1, 2], [0, 1, 2], [-1]]
    for names, given in [("Max Mean Min Prod Sum EuclideanNorm", x), ("All Any", flags)]:
        for name, axis, kept in itertools.product(names.split(), axes, (False, True)):
            label = "{} {} {}".format(name, axis, kept)
            yield from simple(name, given, label=label, axis=axis, keep_dims=kept)
    yield "Mean of integers", [whole_numbers(9, 3, 4)], lambda n: tf.reduce_mean(n, 0)
    yield "Sum of all", [x], lambda x: tf.reduce_sum(x)
    for axis in (0, 1):
        yield from simple("ArgMax ArgMin", x, dimension=axis)
    yield from simple("L2Loss BiasAddGrad", x)
    channels_first = {"label": "BiasAddGrad NCHW", "data_format": "NCHW"}
    yield from simple("BiasAddGrad", array(3, 3, 2), **channels_first)
    for axis in (0, 1, -1):
        yield from simple("Cumprod Cumsum CumulativeLogsumexp", x, axis=axis)
        yield from simple("ReverseV2", x, axis=[axis])
        yield from simple("Roll", x, shift=[1], axis=[axis])
    for batch, along, lengths in [(0, 2, [2, 1, 5]), (1, 2, [3, 4]), (0, 1, [1, 2, 1])]:
        lengths = np.array(lengths, "int32")
        yield from simple("ReverseSequence", x, lengths, seq_dim=along, batch_dim=batch)
    square = array(3, 3)
    yield from simple("Softmax LogSoftmax", square)
    yield from simple("RGBToHSV HSVToRGB", array(3, 3, 3))
    yield from simple("TopKV2", square, k=2)
    waves = (array(3, 3, 3, 3) + 1j * array(3, 3, 3, 3)).astype("complex64")
    yield from simple("FFT FFT2D FFT3D IFFT IFFT2D IFFT3D", waves)
    for name, count in [("RFFT", 1), ("RFFT2D", 2), ("RFFT3D", 3)]:
        yield from simple(name, waves.real, fft_length=[3] * count)
        yield from simple("I" + name, waves, fft_length=[3] * count)


def _products():
    for first, second, names in [
        ((3, 4), (4, 3), {}), ((3, 3), (3, 3), {}), ((4, 3), (4, 3), {"transpose_a": True}),
        ((3, 4), (3, 4), {"transpose_b": True}),
        ((4, 3), (3, 4), {"transpose_a": True, "transpose_b": True}),
    ]:  # fmt: skip
        for name in ("MatMul", "SparseMatMul"):
            label = "{} {}".format(name, names)
            yield from simple(name, array(*first), array(*second), label=label, **names)
    for name in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        for first, second, names in [
            ((3, 2, 3), (3, 3, 4), {}), ((3, 3, 3), (3, 3, 3), {"adj_x": True}),
            ((3, 2, 3, 4), (3, 2, 3, 4), {"adj_y": True}), ((2, 3, 4), (4, 3), {}),
            ((3, 2, 4), (1, 4, 3), {}),
        ]:  # fmt: skip
            broadcast = len(first) != len(second) or first[0] != second[0]
            if name != "BatchMatMul" or not broadcast:
                more = {"Tout": tf.float32} if name.endswith("V3") else {}
                more["label"] = "{} {}".format(name, names)
                yield from simple(name, array(*first), array(*second), **names, **more)
    for equation, shapes in [
        ("ij,jk->ik", [(3, 4), (4, 3)]), ("id,jd->ij", [(3, 4), (3, 4)]),
        ("bij,bjk->bik", [(3, 3, 4), (3, 4, 2)]), ("ij,ij->i", [(3, 3), (3, 3)]),
        ("bhqd,bhkd->bhqk", [(3, 2, 3, 4), (3, 2, 3, 4)]), ("ij->ji", [(3, 4)]),
        ("ij,ij->", [(3, 4), (3, 4)]),
    ]:  # fmt: skip
        function = lambda *x, equation=equation: tf.einsum(equation, *x)  # noqa: E731
        yield "tf.einsum " + equation, [array(*shape) for shape in shapes], function
        if hasattr(raw, "Einsum"):
            yield (
                "Einsum " + equation,
                [array(*shape) for shape in shapes],
                lambda *x, equation=equation: raw.Einsum(inputs=list(x), equation=equation),
            )
    matrices = np.stack([np.eye(3) * 2 + 0.1 * m @ m.T for m in array(3, 3, 3)]).astype("float32")
    yield from simple(
        "Cholesky MatrixDeterminant LogMatrixDeterminant MatrixDiag MatrixDiagPart "
        "MatrixInverse MatrixSquareRoot Qr SelfAdjointEigV2 Svd",
        matrices,
    )
    yield from simple("MatrixLogarithm", matrices.astype("complex64"))
    yield from simple("MatrixBandPart", matrices, num_lower=1, num_upper=0)
    for name in ("MatrixSolve", "MatrixTriangularSolve"):
        yield name, [matrices], lambda x, name=name: getattr(raw, name)(matrix=x, rhs=x[..., :2])
    yield (
        "MatrixSolveLs",
        [matrices],
        lambda x: raw.MatrixSolveLs(matrix=x, rhs=x[..., :2], l2_regularizer=np.float64(0.1)),
    )
    diagonals, none = array(3, 3), np.float32(0)
    yield from simple("MatrixSetDiag", matrices, diagonals)
    for version in ("V2", "V3"):
        sizes = {"num_rows": -1, "num_cols": -1}
        yield from simple("MatrixDiag" + version, diagonals, k=0, padding_value=none, **sizes)
        yield from simple("MatrixDiagPart" + version, matrices, k=0, padding_value=none)
        yield from simple("MatrixSetDiag" + version, matrices, diagonals, k=0)
    yield from simple("Cross", array(3, 3), array(3, 3))


def _lookups():
    x, places = array(3, 3, 4), np.array([2, 0, 1], "int32")
    yield from simple("Gather", x, places)
    for axis in (0, 1):
        yield from simple("GatherV2", x, places, label="GatherV2 {}".format(axis), axis=axis)
    yield (
        "GatherV2 batch_dims",
        [x],
        lambda x: tf.gather(x, tf.cast(3 * x[:, :2, 0], "int32"), axis=1, batch_dims=1),
    )
    pairs = np.array([[2, 0], [0, 1], [1, 2]], "int32")
    constants = array(5, 4), whole_numbers(5, 3, 3, 1)
    yield from simple("GatherNd", x, places[:, None])
    yield from simple("GatherNd", x, pairs, label="GatherNd 2")
    yield from simple("GatherNd", *constants, label="GatherNd of constants")
    yield (
        "rows at positions",
        [x, places],
        lambda x, n: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), n], axis=1)),
    )
    chosen = np.float32([0.7, 0.2, 0.9])
    yield "boolean_mask", [array(3, 4), chosen], lambda x, y: tf.boolean_mask(x, y > 0.5)
    yield "boolean_mask of numbers", [array(3, 4)], lambda x: tf.boolean_mask(x, x > 0.5)
    yield "where", [array(3, 4)], lambda x: v1.where(x > 0.5)
    yield "gather_nd(where)", [array(3, 4)], lambda x: tf.gather_nd(x, v1.where(x > 0.5))
    yield "gather(where)", [array(3, 3)], lambda x: tf.gather(x, v1.where(x > 0.5))
    yield "where, times 0", [array(3, 3)], lambda x: tf.gather(x, 0 * v1.where(x[:, 0] > 0.1)[:, 0])
    segments = "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentSum UnsortedSegmentProd"
    yield from simple(segments, x, places, num_segments=4)
    unweighted = {"size": 4, "weights": np.float32([])}
    yield from simple("Bincount", places, **unweighted)
    yield (
        "Bincount weighted",
        [places, array(3)],
        lambda n, w: raw.Bincount(arr=n, size=4, weights=w),
    )
    for given, binary in itertools.product((places, whole_numbers(4, 3, 3)), (False, True)):
        label = "DenseBincount {} {}".format(given.ndim, binary)
        yield from simple("DenseBincount", given, label=label, binary_output=binary, **unweighted)
    yield from simple("HistogramFixedWidth", x, value_range=np.float32([0, 1]), nbins=4)
    yield from simple("ScatterNd", places[:, None], array(3, 4), shape=[5, 4])
    classes = whole_numbers(4, 3, 3)
    for axis in (-1, 0, 1):
        yield from simple("OneHot", classes, depth=4, on_value=1.0, off_value=0.0, axis=axis)
    yield from simple("InTopK InTopKV2", array(3, 4), places, k=2)


def either(x, condition):
    branches = raw.Switch(data=x, pred=condition)
    return raw.Merge(inputs=[tf.exp(branches[1]), 2 * branches[0]])[0]


def _views():
    x = array(3, 2, 6)
    for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        yield "Transpose", [x], lambda x, order=order: [
            tf.transpose(x, order), raw.ConjugateTranspose(x=x, perm=order)
        ]  # fmt: skip
    yield "Transpose of all", [array(3, 4)], lambda x: tf.transpose(x)
    for before, after in [
        ((3, 4, 6), (-1, 6)), ((3, 4, 6), (-1, 24)), ((3, 24), (-1, 4, 6)), ((6, 6), (-1, 4)),
        ((3, 6), (-1,)), ((4, 3, 6), (-1, 6)), ((4, 3, 6), (4, -1)), ((2, 3, 4), (2, -1, 2)),
        ((12, 5), (-1, 4, 5)), ((6, 4), (2, -1, 4)), ((3, 4), (4, -1)), ((3, 4), (12,)),
    ]:  # fmt: skip
        yield (
            "Reshape {} {}".format(before, after),
            [array(*before)],
            lambda x, after=after: tf.reshape(x, after),
        )
    yield "Reshape by shape", [array(3, 4)], lambda x: tf.reshape(x, [tf.shape(x)[0], 2, 2])
    yield "Reshape by shape and rest", [array(3, 4)], lambda x: tf.reshape(x, [tf.shape(x)[0], -1])
    yield "Reshape to half", [array(6, 4)], lambda x: tf.reshape(x, [tf.shape(x)[0] // 2, 8])
    yield "Reshape like", [array(3, 4)], lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x))
    yield "Reshape transposed", [array(3, 4)], lambda x: tf.reshape(tf.transpose(x), tf.shape(x))
    yield (
        "Flatten",
        [array(3, 2, 4)],
        lambda x: tf.reshape(x, tf.stack([-1, tf.reduce_prod(tf.shape(x)[1:])])),
    )
    for axis in (0, 1, -1):
        yield "ExpandDims", [x], lambda x, axis=axis: tf.expand_dims(x, axis)
        two = [array(3, 3), array(3, 3)]
        yield "Pack", two, lambda x, y, axis=axis: tf.stack([x, y], axis)
        yield "ConcatV2", two, lambda x, y, axis=axis: tf.concat([x, y], axis)
        yield from simple("Unpack", array(2, 3, 3), num={0: 2, 1: 3, -1: 3}[axis], axis=axis)
        six = array(3, 6, 3)
        yield "Split", [six], lambda x, axis=axis: raw.Split(axis=axis, value=x, num_split=3)
        yield from simple("SplitV", six, size_splits=[1, -1], axis=axis, num_split=2)
    yield "Squeeze", [array(3, 1, 4)], lambda x: tf.squeeze(x, [1])
    yield "Squeeze of all", [array(3, 1, 4)], lambda x: tf.squeeze(x)
    for name, take in [
        ("x[:, 0]", lambda x: x[:, 0]), ("x[0]", lambda x: x[0]), ("x[1:]", lambda x: x[1:]),
        ("x[::-1]", lambda x: x[::-1]), ("x[..., 1]", lambda x: x[..., 1]),
        ("x[..., None]", lambda x: x[..., None]), ("x[:, None, 1:]", lambda x: x[:, None, 1:]),
        ("x[None, :, 0, ..., 2]", lambda x: x[None, :, 0, ..., 2]), ("x[0:3]", lambda x: x[0:3]),
        ("x[:2, 1]", lambda x: x[:2, 1]), ("x[:n]", lambda x: x[: tf.shape(x)[0]]),
        ("x[:n-1]", lambda x: x[: tf.shape(x)[0] - 1]), ("x[:, -1]", lambda x: x[:, -1]),
        ("x[:, ::-1]", lambda x: x[:, ::-1]), ("x[-2:]", lambda x: x[-2:]),
        ("x[1, ..., None, :2]", lambda x: x[1, ..., None, :2]),
    ]:  # fmt: skip
        yield name, [array(3, 3, 6)], take
    for begin, size in [
        ([0, 0], [-1, 2]), ([0, 1], [-1, -1]), ([1, 0], [-1, -1]), ([0, 0], [2, -1]),
        ([0, 0], [3, 4]),
    ]:  # fmt: skip
        yield "Slice", [array(3, 4)], lambda x, begin=begin, size=size: tf.slice(x, begin, size)
    yield "Slice of n rows", [array(3, 4)], lambda x: tf.slice(x, [0, 1], [tf.shape(x)[0], 2])
    for times in ([2, 1], [1, 2], [3, 3]):
        yield "Tile", [array(3, 3)], lambda x, times=times: tf.tile(x, times)
    yield (
        "Tile by n",
        [array(1, 4), array(3, 2)],
        lambda x, y: tf.concat([tf.tile(x, [tf.shape(y)[0], 1]), y], 1),
    )
    if hasattr(tf, "broadcast_to"):
        yield "BroadcastTo", [array(3, 1)], lambda x: tf.broadcast_to(x, [2, tf.shape(x)[0], 4])
        yield "BroadcastTo fixed", [array(3, 1)], lambda x: tf.broadcast_to(x, [2, 3, 4])
    for pads in ([[0, 0], [1, 1]], [[1, 0], [0, 0]]):
        padded = array(3, 4)
        yield from simple("Pad", padded, paddings=pads)
        yield from simple("PadV2", padded, paddings=pads, constant_values=np.float32(1))
        yield from simple("MirrorPad", padded, paddings=pads, mode="REFLECT")
    yield (
        "Shape",
        [array(3, 4)],
        lambda x: [
            tf.zeros(tf.shape(x)) + x,
            tf.fill(tf.stack([tf.shape(x)[0], 4]), 2.0) * x,
            raw.ShapeN(input=[x, x])[1][1],
            raw.Rank(input=x),
            raw.Size(input=x),
            raw.Shape(input=x),
        ],
    )
    yield "Fill n + 1", [array(3, 4)], lambda x: tf.zeros([tf.shape(x)[0] + 1, 4])
    yield "Fill 2n", [array(3, 4)], lambda x: tf.zeros([2 * tf.shape(x)[0], 4])
    yield "Fill n, n", [array(3, 4)], lambda x: tf.zeros([tf.shape(x)[0], tf.shape(x)[0]])
    yield (
        "Fill by parts of a shape",
        [array(3, 2, 4)],
        lambda x: tf.zeros(tf.concat([tf.shape(x)[:1], [5], tf.shape(x)[1:2]], 0)),
    )
    yield "Fill by tf.gather", [array(3, 2, 4)], lambda x: tf.zeros(tf.gather(tf.shape(x), [2, 0]))
    yield "Fill by tf.slice", [array(3, 2, 4)], lambda x: tf.zeros(tf.slice(tf.shape(x), [0], [2]))
    yield "Fill by unstacked", [array(3, 4)], lambda x: tf.zeros(tf.unstack(tf.shape(x))[::-1])
    yield (
        "Empty",
        [array(3, 4)],
        lambda x: 0 * raw.Empty(shape=tf.shape(x), dtype=tf.float32, init=True),
    )
    yield (
        "Range",
        [array(3, 4)],
        lambda x: x + tf.cast(tf.range(tf.shape(x)[0]), "float32")[:, None],
    )
    yield "pairs", [array(3, 4)], lambda x: tf.reshape(tf.range(2 * tf.shape(x)[0]), [-1, 2])
    yield "a condition", [array(3, 4), np.array(True)], either
    rising = np.linspace(0.2, 0.9, 12, dtype="float32").reshape(3, 4)  # its parts differ
    yield "a condition of rows", [rising], lambda x: either(x, tf.reduce_mean(x) > 0.6)
    blocks = [array(3, 4, 4, 2), array(12, 2, 2, 2)]
    for name, given in [("SpaceToBatch", blocks[0]), ("BatchToSpace", blocks[1])]:
        edges = {"paddings" if name == "SpaceToBatch" else "crops": [[0, 0], [0, 0]]}
        yield from simple(name + "ND", given, block_shape=[2, 2], **edges)
    yield (
        "there and back",
        [blocks[0]],
        lambda x: raw.BatchToSpaceND(
            input=tf.exp(
                raw.SpaceToBatchND(input=x, block_shape=[2, 2], paddings=[[0, 0], [0, 0]])
            ),
            block_shape=[2, 2],
            crops=[[0, 0], [0, 0]],
        ),
    )


def _layers():
    pictures, kernel = array(3, 3, 3, 3), array(2, 2, 3, 3)
    plain = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    pool = dict(plain, ksize=[1, 2, 2, 1])
    volumes, thick = array(3, 3, 3, 3, 2), array(2, 2, 2, 2, 3)
    deep = {"strides": [1] * 5, "padding": "SAME"}
    yield from simple("Conv2D DepthwiseConv2dNative", pictures, kernel, **plain)
    yield from simple("Conv3D", volumes, thick, **deep)
    yield (
        "dilated",
        [array(3, 4, 4, 3)],
        lambda x: v1.nn.convolution(x, kernel, "SAME", dilation_rate=[2, 2]),
    )
    yield from simple("Dilation2D", pictures, array(2, 2, 3), rates=[1] * 4, **plain)
    yield (
        "pooling",
        [pictures],
        lambda x: [
            raw.AvgPool(value=x, **pool),
            raw.MaxPool(input=x, **pool),
            raw.MaxPoolV2(input=x, **pool),
            raw.LRN(input=x),
            raw.ExtractImagePatches(
                images=x, ksizes=[1, 2, 2, 1], strides=[1] * 4, rates=[1] * 4, padding="SAME"
            ),
            raw.AdjustContrastv2(images=x, contrast_factor=np.float32(2)),
            raw.AdjustHue(images=x, delta=np.float32(0.1)),
            raw.AdjustSaturation(images=x, scale=np.float32(0.1)),
        ],
    )
    resizing = "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor"
    yield from simple(resizing, pictures, size=[2, 5])
    yield from simple("AvgPool3D MaxPool3D", volumes, ksize=[1, 2, 2, 2, 1], **deep)
    yield from simple("ExtractVolumePatches", volumes, ksizes=[1, 2, 2, 2, 1], **deep)
    yield from simple("DepthToSpace SpaceToDepth", array(3, 2, 2, 4), block_size=2)
    for name, weights, gradient, sizes, options in [
        ("Conv2DBackpropInput", kernel, (3, 3, 3, 3), [3, 3, 3], plain),
        ("Conv3DBackpropInputV2", thick, (3, 3, 3, 3, 3), [3, 3, 3, 2], deep),
        ("DepthwiseConv2dNativeBackpropInput", kernel, (3, 3, 3, 9), [3, 3, 3], plain),
    ]:
        yield (
            name,
            [weights, array(*gradient)],
            lambda k, x, name=name, sizes=sizes, options=options: getattr(raw, name)(
                input_sizes=tf.stack([tf.shape(x)[0]] + sizes), filter=k, out_backprop=x, **options
            ),
        )
    yield (
        "AvgPoolGrad",
        [pictures],
        lambda x: raw.AvgPoolGrad(orig_input_shape=tf.shape(x), grad=x, **pool),
    )
    yield (
        "AvgPool3DGrad",
        [volumes],
        lambda x: raw.AvgPool3DGrad(
            orig_input_shape=tf.shape(x), grad=x, ksize=[1, 2, 2, 2, 1], **deep
        ),
    )
    # TensorFlow 1.15 dies where these have other rows than those.
    yield (
        "MaxPoolGrad",
        [pictures],
        lambda x: raw.MaxPoolGrad(
            orig_input=x, orig_output=raw.MaxPool(input=x, **pool), grad=2 * x, **pool
        ),
    )
    yield (
        "MaxPool3DGrad",
        [volumes],
        lambda x: raw.MaxPool3DGrad(
            orig_input=x,
            orig_output=raw.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], **deep),
            grad=2 * x,
            ksize=[1, 2, 2, 2, 1],
            **deep,
        ),
    )
    yield (
        "LRNGrad",
        [pictures],
        lambda x: raw.LRNGrad(input_grads=2 * x, input_image=x, output_image=raw.LRN(input=x)),
    )
    yield (
        "ResizeGrad",
        [array(3, 4, 5, 3), pictures],
        lambda g, x: [
            raw.ResizeBilinearGrad(grads=g, original_image=x),
            raw.ResizeBicubicGrad(grads=g, original_image=x),
        ],
    )
    for name, given, gradient, sizes, options in [
        ("Conv2DBackpropFilter", pictures, (3, 3, 3, 3), [2, 2, 3, 3], plain),
        ("DepthwiseConv2dNativeBackpropFilter", pictures, (3, 3, 3, 9), [2, 2, 3, 3], plain),
        ("Conv3DBackpropFilterV2", volumes, (3, 3, 3, 3, 3), [2, 2, 2, 2, 3], deep),
    ]:
        yield (
            name,
            [given, array(*gradient)],
            lambda x, g, name=name, sizes=sizes, options=options: getattr(raw, name)(
                input=x, filter_sizes=sizes, out_backprop=g, **options
            ),
        )
    for name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
        # In training each device normalizes by its own rows.
        yield name, [pictures], lambda x, name=name: getattr(raw, name)(
            x=x, scale=kernel[0, 0, 0], offset=kernel[0, 0, 1], mean=kernel[0, 0, 2],
            variance=kernel[0, 1, 0], is_training=False,
        )[0]  # fmt: skip
    if not hasattr(tf, "Session"):  # whose CPU does not take channels first
        yield (
            "FusedBatchNormV3 by channel",
            [array(1, 3, 3, 3), array(3)],
            lambda x, s: raw.FusedBatchNormV3(
                x=x, scale=tf.sin(s), offset=tf.sin(s), mean=[], variance=[], data_format="NCHW"
            )[0],
        )
    yield from simple("SoftmaxCrossEntropyWithLogits", array(3, 3), array(3, 3))
    yield from simple("SparseSoftmaxCrossEntropyWithLogits", array(3, 3), np.array([2, 0, 1]))


#: Of operations with several inputs there is no time for all kinds.
LEFT_OUT = (Partial("mean"), Partial("min"))
NEEDING_SQUARES = set(
    "Cholesky MatrixDeterminant LogMatrixDeterminant MatrixInverse MatrixLogarithm "
    "MatrixSquareRoot MatrixSolve MatrixTriangularSolve SelfAdjointEigV2".split()
)
#: Operations whose numbers are random, or that need what is no array, and so are not computed.
NOT_COMPUTED = set(
    "Multinomial StatelessMultinomial RandomStandardNormal RandomUniform RandomUniformInt "
    "StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomUniform "
    "StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2 "
    "StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal SparseTensorDenseMatMul "
    "LookupTableFindV2 ResourceGather ResourceGatherNd TopK".split()
)
