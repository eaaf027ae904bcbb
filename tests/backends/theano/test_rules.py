"""The table of Theano's operations, each line proved by computing: on a batch and on its parts."""

import missing_rules
import numpy as np
import row_proof

from compat._rows import Sharded

from . import test_contract

profiles_not_printed = test_contract.profiles_not_printed
RANDOM = np.random.RandomState(0)


def floats(*shape):
    return RANDOM.uniform(0.2, 1.0, shape).astype("float32")


def numbers(most, *shape):
    return RANDOM.randint(0, most, shape)


def gradient(function):
    """Of a sum, each of whose parts counts in another way."""

    def applied(*given):
        import theano

        return theano.grad((function(*given) ** 3).sum(), given[0])

    return applied


def cases():
    """Return (a name of the table, inputs, a function of Theano's variables)."""
    import theano
    from theano import ifelse, sparse, tensor
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor import blas, extra_ops, fft, nnet
    from theano.tensor.opt import Assert
    from theano.tensor.signal import pool

    x, square, cube, wide = floats(3, 4), floats(3, 3), floats(3, 4, 6), floats(3, 6)
    images, filters = floats(3, 3, 6, 6), floats(2, 3, 3, 3)

    def arrays(*shapes):
        return [floats(*shape) for shape in shapes]

    for shapes in (
        [(3, 4), (3, 4)],
        [(3, 4), (4,)],
        [(3, 3), (3,)],
        [(3, 1), (3,)],
        [(6, 3), (1, 3)],
    ):
        yield "Elemwise", arrays(*shapes), lambda a, b: tensor.exp(a) * b
    yield "Elemwise", [x], lambda a: tensor.fill(a, 2.0)
    yield "Elemwise", [x, square[0, 0]], lambda a, b: tensor.switch(a > b, a, 0)
    yield (
        "ScalarOp",
        [floats()],
        lambda a: tensor.tensor_from_scalar(
            theano.scalar.mul(tensor.scalar_from_tensor(a), theano.scalar.constant(2.0))
        ),
    )
    for name in ("ScalarFromTensor", "TensorFromScalar"):
        yield name, [floats()], lambda a: tensor.tensor_from_scalar(tensor.scalar_from_tensor(a))
    for copied in [extra_ops.cpu_contiguous, theano.compile.ops.deep_copy_op]:
        yield type(copied).__name__, [x], copied
    yield "Print", [x], lambda a: theano.printing.Print("", global_fn=lambda *said: None)(a)
    yield "Rebroadcast", [floats(3, 1)], lambda a: tensor.unbroadcast(a, 1)
    yield "ViewOp", [x], theano.gradient.disconnected_grad
    yield "Assert", [x], lambda a: Assert()(a, tensor.all(a > -1e6))
    yield "Assert", [x], lambda a: Assert()(a, tensor.gt(a.shape[0], 2))

    for axis in (None, 0, 1, (0, 2), -1):
        for how in "sum", "mean", "max", "min", "prod", "std":
            yield "CAReduce", [cube], lambda a, how=how, axis=axis: getattr(tensor, how)(a, axis)
        yield "CAReduce", [cube > 0.5], lambda a, axis=axis: tensor.any(a, axis)
        yield "CAReduce", [cube > 0.5], lambda a, axis=axis: tensor.all(a, axis)
        both = lambda a, axis=axis: tensor.max_and_argmax(a, axis)  # noqa: E731
        yield "MaxAndArgmax", [cube], both
        if not isinstance(axis, tuple):
            exact = cube.astype("float64")
            yield "CAReduce", [exact], lambda a, axis=axis: tensor.Mean(axis)(a)
            yield "CumOp", [cube], lambda a, axis=axis: extra_ops.cumsum(a, axis)
            yield "CumOp", [cube], lambda a, axis=axis: extra_ops.cumprod(a, axis)
            yield "SortOp", [cube], lambda a, axis=axis: tensor.sort(a, axis)
            yield "ArgSortOp", [cube], lambda a, axis=axis: tensor.argsort(a, axis)
            yield "RepeatOp", [cube], lambda a, axis=axis: extra_ops.RepeatOp(axis)(a, 2)
    for axis in 0, 1:
        yield "Argmax", [cube], lambda a, axis=axis: tensor.Argmax([axis])(a)
        yield "TopKOp", [wide], lambda a, axis=axis: tensor.topk(a, 2, axis, False)
        yield "DiffOp", [wide], lambda a, axis=axis: extra_ops.DiffOp(1, axis)(a)
        yield "Split", [floats(3, 3)], lambda a, axis=axis: tensor.split(a, [1, 2], 2, axis)
        yield "Join", [square, square], lambda a, b, axis=axis: tensor.join(axis, a, b)
        yield (
            "Join",
            [square],
            lambda a, axis=axis: tensor.join(axis, a, np.ones((3, 3), "float32")),
        )
    for logarithm in nnet.softmax, nnet.logsoftmax:
        yield type(logarithm(tensor.matrix()).owner.op).__name__, [square], logarithm
    yield "SoftmaxGrad", [square], gradient(nnet.softmax)
    yield "SoftmaxWithBias", [square, floats(3)], nnet.softmax_with_bias

    for first, second in [
        [(3, 4), (4, 3)], [(3, 3), (3, 3)], [(3,), (3, 3)], [(3, 3), (3,)], [(3,), (3,)],
    ]:  # fmt: skip
        yield "Dot", arrays(first, second), tensor.dot
    yield "Dot", [square, square], lambda a, b: tensor.dot(a.T, b)
    yield "Dot", [cube, floats(6, 3)], lambda a, b: tensor.tensordot(a, b, [[2], [0]])
    yield "Dot22", [square, square], blas._dot22
    for first, second in [
        [(3, 3, 4), (3, 4, 3)], [(3, 3), (3, 3, 3)], [(3, 3, 3), (3, 3)], [(3, 4), (3, 4)],
    ]:  # fmt: skip
        yield "BatchedDot", arrays(first, second), tensor.batched_dot
    yield (
        "StructuredDot",
        [x, floats(4, 3)],
        lambda a, b: sparse.structured_dot(sparse.csr_from_dense(a), b),
    )
    yield (
        "TrueDot",
        [x, floats(4, 3)],
        lambda a, b: sparse.dense_from_sparse(
            sparse.true_dot(sparse.csr_from_dense(a), sparse.csr_from_dense(b))
        ),
    )
    for name in "DenseFromSparse", "SparseFromDense":
        yield name, [x], lambda a: sparse.dense_from_sparse(sparse.csr_from_dense(a))

    for order in (1, 0, 2), (2, 1, 0), ("x", 0, 2, "x", 1), (0, 1, 2, "x"):
        yield "DimShuffle", [floats(3, 6, 3)], lambda a, order=order: a.dimshuffle(order)
    yield "DimShuffle", [floats(3, 1, 3)], lambda a: a.dimshuffle(2, 0)
    for before, after in [
        ((3, 4, 6), (-1, 6)), ((3, 24), (-1, 4, 6)), ((6, 6), (-1, 4)), ((4, 3, 6), (-1, 6)),
        ((4, 3, 6), (4, -1)), ((3, 6), (-1,)), ((2, 3, 4), (2, -1, 2)), ((12, 5), (3, -1)),
    ]:  # fmt: skip
        yield "Reshape", [floats(*before)], lambda a, after=after: a.reshape(after)
    yield "Reshape", [cube], lambda a: a.reshape((a.shape[0], -1))
    yield "Reshape", [cube], lambda a: a.reshape((a.shape[0] * a.shape[1], a.shape[2]))
    yield "Reshape", [wide], lambda a: a.T.reshape((a.shape[0], 6))
    yield "Flatten", [cube], lambda a: tensor.basic.Flatten(2)(a)
    for index in [
        slice(2), slice(None, None, -1), slice(1, None), (slice(None), 0), (0, slice(1, None)),
        (slice(None), slice(1, 3)), (slice(0, 3), slice(None, None, 2)), slice(0, 10),
    ]:  # fmt: skip
        yield "Subtensor", [floats(3, 3)], lambda a, index=index: a[index]
        for change in tensor.set_subtensor, tensor.inc_subtensor:
            yield (
                "IncSubtensor",
                [floats(3, 3), square[0]],
                (lambda a, b, index=index, change=change: change(a[index], b[:1] * 2)),
            )
    yield "Subtensor", [square], lambda a: a[: a.shape[0]]
    yield "Subtensor", [square], lambda a: a[:, : a.shape[0]]
    yield "IncSubtensor", [cube, wide], lambda a, b: tensor.inc_subtensor(a[:, 1], b)
    yield "IncSubtensor", [cube, x], lambda a, b: tensor.set_subtensor(a[:, :, 2], b)
    yield "MakeVector", [x], lambda a: tensor.stack([a.sum(), a.max() * 0 + 1, a.sum()])
    yield "MakeVector", [x], lambda a: tensor.stack([a.sum(), a.sum()])
    yield "AdvancedSubtensor1", [x, numbers(3, 3)], lambda a, i: a[i]
    convolve = lambda a, w: nnet.conv2d(a, w, border_mode="half")  # noqa: E731
    yield "AbstractConv", [images, filters], convolve
    yield (
        "AbstractConv",
        [images[:, 0], filters[0]],
        lambda a, w: convolve(a.dimshuffle("x", 0, 1, 2), w.dimshuffle("x", 0, 1, 2)),
    )
    yield "AbstractConv_gradInputs", [images, filters], gradient(convolve)
    yield "RFFTOp", [cube], fft.rfft
    yield "IRFFTOp", [floats(3, 4, 2)], fft.irfft
    pooled = lambda a, mode: pool.pool_2d(a, (2, 2), True, mode=mode)  # noqa: E731
    for mode in "max", "average_inc_pad":
        one = lambda a, mode=mode: pooled(a, mode)  # noqa: E731
        yield "Pool", [images[:, :1]], one
        yield "Pool", [images[0]], one
    normalize = nnet.bn.batch_normalization_train
    for axis, shape in (0, (1, 4)), (1, (3, 1)):
        yield (
            "AbstractBatchNormTrain",
            [x, floats(*shape)],
            lambda a, g, axis=axis: normalize(a, g, g, (axis,))[0],
        )
    by_averages = lambda a, m: nnet.bn.batch_normalization_test(a, m, m, m, m)  # noqa: E731
    yield "AbstractBatchNormInference", [x, floats(1, 4)], by_averages

    yield "Alloc", [x], lambda a: tensor.alloc(2.0, a.shape[0], 3)
    yield "Alloc", [x], lambda a: tensor.alloc(a, 2, a.shape[0], 4)
    yield "Alloc", [x], lambda a: tensor.alloc(2.0, a.shape[0] + 1, 3)
    yield "Alloc", [x], lambda a: tensor.tile(a, (2, 3))
    yield "AllocEmpty", [x], lambda a: tensor.AllocEmpty("float32")(a.shape[0], 4) * 0 + 1
    yield "Shape", [x], lambda a: a.shape
    yield "Shape_i", [x], lambda a: theano.compile.ops.Shape_i(1)(a)
    drawn = MRG_RandomStreams(1)
    yield "mrg_uniform", [x], lambda a: 0 * drawn.uniform(a.shape)
    yield "mrg_uniform", [x], lambda a: 0 * drawn.normal(a.shape)
    yield (
        "RandomFunction",
        [x],
        lambda a: 0 * tensor.shared_randomstreams.RandomStreams(1).uniform(a.shape),
    )
    yield "IfElse", [x, x], lambda a, b: ifelse.ifelse(tensor.gt(b.sum(), 5), a, b)
    yield "IfElse", [x, x], lambda a, b: ifelse.ifelse(tensor.constant(1), a, b)

    steps = floats(4, 3, 3)
    total = lambda a: theano.scan(lambda r, t: 0.5 * t + r, a, tensor.zeros_like(a[0]))[0]  # noqa: E731
    yield "Scan", [steps], total
    yield "Scan", [floats(3, 3)], total
    yield "Scan", [steps], lambda a: theano.map(lambda r: r / r.sum(0), [a])[0]
    yield "Scan", [steps], lambda a: theano.map(lambda r: r / r.sum(), [a])[0]
    yield (
        "Scan",
        [square, square],
        lambda a, b: theano.map(lambda r, w: tensor.dot(r, w), [a], [b])[0],
    )
    yield (
        "Scan",
        [steps, square],
        lambda a, b: theano.scan(
            lambda r, t, w: tensor.dot(r, w) + t, a, tensor.zeros_like(a[0]), b
        )[0],
    )


def prove(name, inputs, function, found):
    """Prove a case, and return whether anything was claimed to have rows."""
    import theano
    from theano import tensor

    from compat._backends.theano.propagation import Propagation
    from compat._backends.theano.sizes import ROWS, Sizes

    given = [tensor.TensorType(a.dtype, [n == 1 for n in np.shape(a)])() for a in inputs]
    outputs = function(*given)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    compute = theano.function(given, outputs, on_unused_input="ignore", profile=False)
    with_rows = []

    def computed(parts):
        return compute(*[np.asarray(part, array.dtype) for part, array in zip(parts, inputs)])

    def claim(placements):
        sizes = {}
        for variable, array, placement in zip(given, inputs, placements):
            axis = getattr(placement, "axis", None)
            sizes[variable] = [
                [n * size // row_proof.ROWS if place == axis else size for n in ROWS]
                for place, size in enumerate(np.shape(array))
            ]
        followed = Propagation(dict(zip(given, placements)), Sizes(sizes), outputs)
        claims = [followed.value(output).placement for output in outputs]
        with_rows.extend(each for each in claims if isinstance(each, Sharded))
        return claims

    row_proof.prove(name, inputs, computed, claim, found=found)
    return bool(with_rows)


def test_the_table_claims_nothing_but_the_truth(monkeypatch):
    from compat._backends.theano.rules import RULES

    test_contract.few_streams(monkeypatch)
    found, with_rows, names = row_proof.Found(), set(), set()
    for name, inputs, function in cases():
        names.add(name)
        if prove(name, inputs, function, found):
            with_rows.add(name)
    assert found.wrong == []
    assert names == set(RULES)
    assert names - with_rows == {
        "MakeVector", "ScalarFromTensor", "ScalarOp", "Shape", "Shape_i", "TensorFromScalar"
    }  # fmt: skip
    missing_rules.check("Theano", found)
