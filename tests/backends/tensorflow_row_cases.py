"""Each line of the table of TensorFlow's operations, proved by computing it of parts of a batch.

TensorFlow 1 and 2 share the table; each has a test file that runs these cases.
"""

import collections

import missing_rules
import numpy as np
import tensorflow as tf

from compat._backends.tensorflow1 import row_operations
from compat._backends.tensorflow1.graph import v1_names
from compat._rows import REPLICATED, Partial, Sharded, Value
from compat.testing import rows

v1 = v1_names(tf)
raw = tf.raw_ops
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
                found = row_operations.placements(op, values)
                known.update(zip((each.name for each in op.outputs), found))
            return known[tensor.name]

        return list(map(placement, self.results))


def value_of(tensor, placement):
    shape = None if tensor.shape.ndims is None else tensor.shape.as_list()
    if shape and isinstance(placement, Sharded):
        shape[placement.axis] = None
    return Value(placement, shape)


def prove(case, found):
    """Add to ``found`` what ``compat.testing.rows`` finds of one case; its operations' types."""
    running = Graph(case, [(None,) * each.ndim for each in case.inputs])
    session = v1.Session(graph=running.graph)
    graphs = {}

    def claim(given):
        shapes = [list(each.shape) for each in case.inputs]
        for shape, placement in zip(shapes, given):
            if isinstance(placement, Sharded):
                shape[placement.axis] = None
        key = repr(shapes)
        graphs[key] = graphs.get(key) or Graph(case, shapes)
        return graphs[key].placements(given)

    with session:
        rows.prove(
            case.name,
            case.inputs,
            lambda given: session.run(running.results, dict(zip(running.inputs, given))),
            claim,
            case.placements,
            found,
        )
    return {op.type for op in running.operations}


def check():
    """The proof of the whole table, as a test of each TensorFlow has it."""
    found, types = rows.Found(), set(NOT_COMPUTED)
    for case in cases():
        types |= prove(case, found)
    assert not found.wrong, "\n".join(found.wrong)
    here = {name for name in row_operations.RULES if hasattr(raw, name)}
    assert sorted(here - types) == []
    assert found.claimed > 1000
    version = ".".join(tf.__version__.split(".")[:2])
    if version in ("1.15", "2.15"):
        missing_rules.check("TensorFlow " + version, found)


# The cases ------------------------------------------------------------------------------------


def cases():
    for name, inputs, function in _all():
        choices = None
        if name in NEEDING_SQUARES:  # TensorFlow 1.15 dies of a part of a matrix
            choices = [[REPLICATED, Sharded(0)]] * len(inputs)
        elif len(inputs) > 1:
            choices = [[p for p in rows.placements_of(x) if p not in LEFT_OUT] for x in inputs]
        yield Case(name, inputs, function, choices)


def simple(names, *inputs, **attributes):
    """Operations of one kind, called with tensors alone."""
    for name in names.split():
        operation = getattr(raw, name, None)
        if operation is not None:
            parameters = names_of_inputs(name)
            yield (
                name,
                list(inputs),
                lambda *tensors, operation=operation, parameters=parameters: operation(
                    **dict(zip(parameters, tensors), **attributes)
                ),
            )


def names_of_inputs(name):
    from tensorflow.python.framework import op_def_registry

    get = getattr(op_def_registry, "get", None)
    definition = get(name) if get else op_def_registry.get_registered_ops()[name]
    return [argument.name for argument in definition.input_arg]


def listed(names, *inputs):
    """Operations that take a list."""
    for name in names.split():
        operation = getattr(raw, name, None)
        if operation is not None:
            (parameter,) = names_of_inputs(name)
            yield (
                name,
                list(inputs),
                lambda *x, operation=operation, parameter=parameter: operation(
                    **{parameter: list(x)}
                ),
            )


def _all():
    for group in (_pointwise(), _reductions(), _products(), _lookups(), _views(), _layers()):
        for case in group:
            yield case


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
        for case in simple(names, *inputs):
            yield case
    for each in (flags, flags[:, 0]):
        yield "Select", [each, x, y], lambda c, x, y: raw.Select(condition=c, x=x, y=y)
    for case in listed("AddN IdentityN", x, y):
        yield case
    yield "AccumulateNV2", [x, y], lambda x, y: raw.AccumulateNV2(inputs=[x, y], shape=[3, 4])
    yield (
        "BiasAdd NCHW",
        [array(3, 3, 2), array(3)],
        lambda x, b: raw.BiasAdd(value=x, bias=b, data_format="NCHW"),
    )
    yield "Bucketize", [x], lambda x: raw.Bucketize(input=x, boundaries=[0.3, 0.6])
    yield "CheckNumerics", [x], lambda x: raw.CheckNumerics(tensor=x, message="")
    yield "EnsureShape", [x], lambda x: raw.EnsureShape(input=x, shape=[None, None])
    yield (
        "PlaceholderWithDefault",
        [x],
        lambda x: raw.PlaceholderWithDefault(input=x, shape=[None, None]),
    )
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
        for name in names.split():
            for axis in axes:
                for kept in (False, True):
                    yield (
                        "{} {} {}".format(name, axis, kept),
                        [given],
                        lambda x, name=name, axis=axis, kept=kept: getattr(raw, name)(
                            input=x, axis=axis, keep_dims=kept
                        ),
                    )
    yield "Mean of integers", [whole_numbers(9, 3, 4)], lambda n: tf.reduce_mean(n, 0)
    yield "Sum of all", [x], lambda x: tf.reduce_sum(x)
    for name in ("ArgMax", "ArgMin"):
        for axis in (0, 1):
            yield (
                name,
                [x],
                lambda x, name=name, axis=axis: getattr(raw, name)(input=x, dimension=axis),
            )
    for case in simple("L2Loss BiasAddGrad", x):
        yield case
    yield (
        "BiasAddGrad NCHW",
        [array(3, 3, 2)],
        lambda x: raw.BiasAddGrad(out_backprop=x, data_format="NCHW"),
    )
    for axis in (0, 1, -1):
        for name in ("Cumprod", "Cumsum", "CumulativeLogsumexp"):
            if hasattr(raw, name):
                yield name, [x], lambda x, name=name, axis=axis: getattr(raw, name)(x=x, axis=axis)
        yield "ReverseV2", [x], lambda x, axis=axis: raw.ReverseV2(tensor=x, axis=[axis])
        yield "Roll", [x], lambda x, axis=axis: raw.Roll(input=x, shift=[1], axis=[axis])
        yield (
            "Reverse",
            [x],
            lambda x, axis=axis: raw.Reverse(tensor=x, dims=[i == axis % 3 for i in range(3)]),
        )
    for batch, along, lengths in [(0, 2, [2, 1, 5]), (1, 2, [3, 4]), (0, 1, [1, 2, 1])]:
        yield (
            "ReverseSequence",
            [x, np.array(lengths, "int32")],
            lambda x, n, batch=batch, along=along: raw.ReverseSequence(
                input=x, seq_lengths=n, seq_dim=along, batch_dim=batch
            ),
        )
    square = array(3, 3)
    for case in simple("Softmax LogSoftmax", square):
        yield case
    pictures = array(3, 3, 3)
    for case in simple("RGBToHSV HSVToRGB", pictures):
        yield case
    yield "TopKV2", [square], lambda x: list(raw.TopKV2(input=x, k=2))
    waves = (array(3, 3, 3, 3) + 1j * array(3, 3, 3, 3)).astype("complex64")
    for case in simple("FFT FFT2D FFT3D IFFT IFFT2D IFFT3D", waves):
        yield case
    for name, count in [("RFFT", 1), ("RFFT2D", 2), ("RFFT3D", 3)]:
        yield (
            name,
            [waves.real],
            lambda x, name=name, count=count: getattr(raw, name)(input=x, fft_length=[3] * count),
        )
        yield (
            "I" + name,
            [waves],
            lambda x, name=name, count=count: getattr(raw, "I" + name)(
                input=x, fft_length=[3] * count
            ),
        )


def _products():
    for first, second, names in [
        ((3, 4), (4, 3), {}), ((3, 3), (3, 3), {}), ((4, 3), (4, 3), {"transpose_a": True}),
        ((3, 4), (3, 4), {"transpose_b": True}),
        ((4, 3), (3, 4), {"transpose_a": True, "transpose_b": True}),
    ]:  # fmt: skip
        for name in ("MatMul", "SparseMatMul"):
            yield (
                "{} {}".format(name, names),
                [array(*first), array(*second)],
                lambda a, b, name=name, names=names: getattr(raw, name)(a=a, b=b, **names),
            )
    for name in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        for first, second, names in [
            ((3, 2, 3), (3, 3, 4), {}), ((3, 3, 3), (3, 3, 3), {"adj_x": True}),
            ((3, 2, 3, 4), (3, 2, 3, 4), {"adj_y": True}), ((2, 3, 4), (4, 3), {}),
            ((3, 2, 4), (1, 4, 3), {}),
        ]:  # fmt: skip
            broadcast = len(first) != len(second) or first[0] != second[0]
            if hasattr(raw, name) and (name != "BatchMatMul" or not broadcast):
                more = {"Tout": tf.float32} if name.endswith("V3") else {}
                yield (
                    "{} {}".format(name, names),
                    [array(*first), array(*second)],
                    lambda x, y, name=name, names=names, more=more: getattr(raw, name)(
                        x=x, y=y, **dict(names, **more)
                    ),
                )
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
    for case in simple(
        "Cholesky MatrixDeterminant LogMatrixDeterminant MatrixDiag MatrixDiagPart "
        "MatrixInverse MatrixSquareRoot Qr SelfAdjointEigV2 Svd",
        matrices,
    ):
        yield case
    yield "MatrixLogarithm", [matrices.astype("complex64")], lambda x: raw.MatrixLogarithm(input=x)
    yield (
        "MatrixBandPart",
        [matrices],
        lambda x: raw.MatrixBandPart(input=x, num_lower=1, num_upper=0),
    )
    for name in ("MatrixSolve", "MatrixTriangularSolve"):
        yield name, [matrices], lambda x, name=name: getattr(raw, name)(matrix=x, rhs=x[..., :2])
    yield (
        "MatrixSolveLs",
        [matrices],
        lambda x: raw.MatrixSolveLs(matrix=x, rhs=x[..., :2], l2_regularizer=np.float64(0.1)),
    )
    for case in simple("MatrixSetDiag", matrices, array(3, 3)):
        yield case
    for version in ("V2", "V3"):
        if hasattr(raw, "MatrixDiag" + version):
            yield (
                "MatrixDiag" + version,
                [array(3, 3)],
                lambda x, version=version: getattr(raw, "MatrixDiag" + version)(
                    diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=np.float32(0)
                ),
            )
            yield (
                "MatrixDiagPart" + version,
                [matrices],
                lambda x, version=version: getattr(raw, "MatrixDiagPart" + version)(
                    input=x, k=0, padding_value=np.float32(0)
                ),
            )
            yield (
                "MatrixSetDiag" + version,
                [matrices, array(3, 3)],
                lambda x, d, version=version: getattr(raw, "MatrixSetDiag" + version)(
                    input=x, diagonal=d, k=0
                ),
            )
    for case in simple("Cross", array(3, 3), array(3, 3)):
        yield case


def _lookups():
    x, places = array(3, 3, 4), np.array([2, 0, 1], "int32")
    yield "Gather", [x, places], lambda x, n: raw.Gather(params=x, indices=n)
    for axis in (0, 1):
        yield (
            "GatherV2 {}".format(axis),
            [x, places],
            lambda x, n, axis=axis: raw.GatherV2(params=x, indices=n, axis=axis),
        )
    yield (
        "GatherV2 batch_dims",
        [x],
        lambda x: tf.gather(x, tf.cast(3 * x[:, :2, 0], "int32"), axis=1, batch_dims=1),
    )
    yield "GatherNd", [x, places[:, None]], lambda x, n: raw.GatherNd(params=x, indices=n)
    yield (
        "GatherNd 2",
        [x, np.array([[2, 0], [0, 1], [1, 2]], "int32")],
        lambda x, n: raw.GatherNd(params=x, indices=n),
    )
    yield (
        "GatherNd of constants",
        [array(5, 4), whole_numbers(5, 3, 3, 1)],
        lambda x, n: raw.GatherNd(params=x, indices=n),
    )
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
    for name in ("Max", "Min", "Sum", "Prod"):
        yield (
            "UnsortedSegment" + name,
            [x, places],
            lambda x, n, name=name: getattr(raw, "UnsortedSegment" + name)(
                data=x, segment_ids=n, num_segments=4
            ),
        )
    yield "Bincount", [places], lambda n: raw.Bincount(arr=n, size=4, weights=np.float32([]))
    yield (
        "Bincount weighted",
        [places, array(3)],
        lambda n, w: raw.Bincount(arr=n, size=4, weights=w),
    )
    if hasattr(raw, "DenseBincount"):
        for given in (places, whole_numbers(4, 3, 3)):
            for binary in (False, True):
                yield (
                    "DenseBincount {} {}".format(given.ndim, binary),
                    [given],
                    lambda n, binary=binary: raw.DenseBincount(
                        input=n, size=4, weights=np.float32([]), binary_output=binary
                    ),
                )
    yield (
        "HistogramFixedWidth",
        [x],
        lambda x: raw.HistogramFixedWidth(values=x, value_range=np.float32([0, 1]), nbins=4),
    )
    yield (
        "ScatterNd",
        [places[:, None], array(3, 4)],
        lambda n, x: raw.ScatterNd(indices=n, updates=x, shape=[5, 4]),
    )
    yield (
        "OneHot",
        [whole_numbers(4, 3, 3)],
        lambda n: [
            raw.OneHot(indices=n, depth=4, on_value=1.0, off_value=0.0, axis=axis)
            for axis in (-1, 0, 1)
        ],
    )
    yield (
        "InTopK",
        [array(3, 4), places],
        lambda x, n: [
            raw.InTopK(predictions=x, targets=n, k=2),
            raw.InTopKV2(predictions=x, targets=n, k=2),
        ],
    )


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
        yield "Concat", two, lambda x, y, axis=axis: raw.Concat(concat_dim=axis % 2, values=[x, y])
        yield (
            "Unpack",
            [array(2, 3, 3)],
            lambda x, axis=axis: raw.Unpack(value=x, num={0: 2, 1: 3, -1: 3}[axis], axis=axis),
        )
        yield (
            "Split",
            [array(3, 6, 3)],
            lambda x, axis=axis: raw.Split(axis=axis, value=x, num_split=3),
        )
        yield (
            "SplitV",
            [array(3, 6, 3)],
            lambda x, axis=axis: raw.SplitV(value=x, size_splits=[1, -1], axis=axis, num_split=2),
        )
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
        yield (
            "Pad",
            [array(3, 4)],
            lambda x, pads=pads: [
                raw.Pad(input=x, paddings=pads),
                raw.PadV2(input=x, paddings=pads, constant_values=np.float32(1)),
                raw.MirrorPad(input=x, paddings=pads, mode="REFLECT"),
            ],
        )
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
    yield "a condition", [array(3, 4), np.array(True)], either
    yield "a condition of rows", [array(3, 4)], lambda x: either(x, tf.reduce_mean(x) > 0.6)
    blocks = [array(3, 4, 4, 2), array(12, 2, 2, 2)]
    for name, given in [("SpaceToBatchND", blocks[0]), ("BatchToSpaceND", blocks[1])]:
        sizes = "paddings" if name.startswith("Space") else "crops"
        yield (
            name,
            [given],
            lambda x, name=name, sizes=sizes: getattr(raw, name)(
                input=x, block_shape=[2, 2], **{sizes: [[0, 0], [0, 0]]}
            ),
        )
        name = name[:-2]
        yield (
            name,
            [given],
            lambda x, name=name, sizes=sizes: getattr(raw, name)(
                input=x, block_size=2, **{sizes: [[0, 0], [0, 0]]}
            ),
        )
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
    yield "Conv2D", [pictures, kernel], lambda x, k: raw.Conv2D(input=x, filter=k, **plain)
    yield "Conv3D", [volumes, thick], lambda x, k: raw.Conv3D(input=x, filter=k, **deep)
    yield (
        "dilated",
        [array(3, 4, 4, 3)],
        lambda x: v1.nn.convolution(x, kernel, "SAME", dilation_rate=[2, 2]),
    )
    yield (
        "DepthwiseConv2dNative",
        [pictures, kernel],
        lambda x, k: raw.DepthwiseConv2dNative(input=x, filter=k, **plain),
    )
    yield (
        "Dilation2D",
        [pictures, array(2, 2, 3)],
        lambda x, k: raw.Dilation2D(
            input=x, filter=k, strides=[1] * 4, rates=[1] * 4, padding="SAME"
        ),
    )
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
    for name in ("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"):
        yield name, [pictures], lambda x, name=name: getattr(raw, name)(images=x, size=[2, 5])
    yield (
        "pooling of volumes",
        [volumes],
        lambda x: [
            raw.AvgPool3D(input=x, ksize=[1, 2, 2, 2, 1], **deep),
            raw.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], **deep),
            raw.ExtractVolumePatches(
                input=x, ksizes=[1, 2, 2, 2, 1], strides=[1] * 5, padding="SAME"
            ),
        ],
    )
    yield "DepthToSpace", [array(3, 2, 2, 4)], lambda x: [
        raw.DepthToSpace(input=x, block_size=2), raw.SpaceToDepth(input=x, block_size=2)
    ]  # fmt: skip
    yield (
        "Conv2DBackpropInput",
        [kernel, pictures],
        lambda k, x: raw.Conv2DBackpropInput(
            input_sizes=tf.stack([tf.shape(x)[0], 3, 3, 3]), filter=k, out_backprop=x, **plain
        ),
    )
    yield (
        "Conv3DBackpropInputV2",
        [thick, array(3, 3, 3, 3, 3)],
        lambda k, x: raw.Conv3DBackpropInputV2(
            input_sizes=tf.stack([tf.shape(x)[0], 3, 3, 3, 2]), filter=k, out_backprop=x, **deep
        ),
    )
    yield (
        "DepthwiseConv2dNativeBackpropInput",
        [kernel, array(3, 3, 3, 9)],
        lambda k, x: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=tf.stack([tf.shape(x)[0], 3, 3, 3]), filter=k, out_backprop=x, **plain
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
    yield (
        "Conv2DBackpropFilter",
        [pictures, array(3, 3, 3, 3)],
        lambda x, g: raw.Conv2DBackpropFilter(
            input=x, filter_sizes=[2, 2, 3, 3], out_backprop=g, **plain
        ),
    )
    yield (
        "DepthwiseConv2dNativeBackpropFilter",
        [pictures, array(3, 3, 3, 9)],
        lambda x, g: raw.DepthwiseConv2dNativeBackpropFilter(
            input=x, filter_sizes=[2, 2, 3, 3], out_backprop=g, **plain
        ),
    )
    yield (
        "Conv3DBackpropFilterV2",
        [volumes, array(3, 3, 3, 3, 3)],
        lambda x, g: raw.Conv3DBackpropFilterV2(
            input=x, filter_sizes=[2, 2, 2, 2, 3], out_backprop=g, **deep
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
    yield (
        "cross-entropy",
        [array(3, 3), array(3, 3)],
        lambda x, y: list(raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y)),
    )
    yield (
        "cross-entropy by number",
        [array(3, 3), np.array([2, 0, 1])],
        lambda x, n: list(raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=n)),
    )


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
