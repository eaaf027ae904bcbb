"""What Gluon blocks may compute of the rows of a batch, and keep from one to the next."""

import numpy as np
import pytest

import compat
from compat import errors
from compat.testing import span

from . import test_mxnet_gluon
from .test_mxnet_gluon import data, difference

mx = test_mxnet_gluon.mx  # the fixture
pytestmark = pytest.mark.row("Gluon Block")


def block_of(mx, function, hybrid=True):
    class Function(mx.gluon.HybridBlock if hybrid else mx.gluon.Block):
        def forward(self, *args):
            if not hybrid:
                return function(mx.nd, *args)
            return super(Function, self).forward(*args)

        def hybrid_forward(self, F, *args):
            return function(F, *args)

    return Function()


def array(mx, rows, columns=8):
    return mx.nd.array(np.random.RandomState(rows).normal(size=(rows, columns)))


# Across rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize(
    "name, function",
    [
        ("mean", lambda F, x, y: F.broadcast_sub(x, F.mean(x, axis=0, keepdims=True))),
        ("softmax", lambda F, x, y: F.softmax(x, axis=0)),
        ("dot", lambda F, x, y: F.dot(F.softmax(F.dot(x, y, transpose_b=True)), y)),
        ("take", lambda F, x, y: F.take(x, F.sum(F.abs(y), axis=1))),
        ("sequencemask", lambda F, x, y: F.SequenceMask(F.expand_dims(x, 2), F.ones(8), True)),
    ],
)
@span
def test_operations_across_rows_are_refused(mx, name, function, hybridize):
    block = block_of(mx, function)
    block.initialize()
    if hybridize:
        block.hybridize()
    inputs = array(mx, 13), array(mx, 13)
    expected = block(*inputs).asnumpy()
    compat.parallelize(block)
    problem = "its operation {}_{}0 computes across rows".format(block.name, name)
    for _ in range(2):  # not the first time only
        with pytest.raises(compat.UnsupportedError) as error:
            block(*inputs)
        assert str(error.value) == str(errors.rows_cannot_be_cut(block.name, problem))
    compat.parallelize(block, gpus=1)
    assert difference([expected], [block(*inputs).asnumpy()]) == 0


@pytest.mark.parametrize("hybridize", [False, True])
@span
def test_what_computes_each_row_by_itself_is_taken(mx, hybridize):
    """Among it what looks like more: means along other axes, time before rows, whole arrays."""

    def function(F, x, memory):
        steps = F.swapaxes(F.reshape(x, shape=(-1, 4, 2)), 0, 1)
        lengths = F.mean(F.ones_like(x), axis=1) * 2
        masked = F.SequenceMask(steps, lengths, use_sequence_length=True)
        back = F.reshape(F.swapaxes(masked, 0, 1), shape=(-1, 8))
        found = F.dot(F.softmax(F.dot(back, memory, transpose_b=True)), memory)
        table = F.slice_like(F.reshape(F.arange(64), (8, 8)), x, axes=(1,))  # by its shape
        found = found + F.broadcast_mul(F.ones_like(x), F.slice_axis(table, axis=0, begin=1, end=2))
        if hasattr(F.contrib, "arange_like"):
            found = F.broadcast_add(found, F.contrib.arange_like(x, axis=1))
        centred = F.broadcast_sub(found, F.mean(found, axis=1, keepdims=True))
        return F.softmax(F.concat(centred, x, dim=1))

    results = []
    for parallel in (False, True):
        block = block_of(mx, function)
        if parallel:
            compat.parallelize(block)
        block.initialize()
        if hybridize:
            block.hybridize()
        # The last batch has as many rows as the memory, which stays whole.
        results.append([block(array(mx, rows), array(mx, 11)).asnumpy() for rows in (13, 2, 11)])
    assert difference(*results) < 1e-6


def test_operations_across_rows_of_mxnets_numpy(mx):
    """``mx.np`` came with MXNet 1.6; it may hold for the whole process, so it is switched off."""
    if not hasattr(mx, "np"):
        assert mx.__version__ < "1.6"
        return
    mx.npx.set_np()
    try:
        for function in (
            lambda F, x: x - F.np.mean(x),
            lambda F, x: x - F.np.mean(x, axis=0),
            lambda F, x: F.npx.softmax(x, axis=0),
            lambda F, x: F.np.cumsum(x, axis=0),
        ):
            block = compat.parallelize(block_of(mx, function))
            with pytest.raises(compat.UnsupportedError, match="computes across rows"):
                block(mx.np.ones((13, 8)))
        rowwise = compat.parallelize(block_of(mx, lambda F, x: F.npx.softmax(x) - 1))
        assert rowwise(mx.np.ones((13, 8))).shape == (13, 8)
    finally:
        mx.npx.reset_np()


def test_an_array_that_was_split_and_now_has_other_rows_is_refused(mx):
    block = compat.parallelize(block_of(mx, lambda F, x, y: F.concat(x, y, dim=1)))
    assert block(array(mx, 13), array(mx, 13)).shape == (13, 16)
    with pytest.raises(compat.UnsupportedError) as error:
        block(array(mx, 13), array(mx, 11))
    problem = (
        "the array of shape (11, 8) among its arguments had a row for each of a batch before, and "
        "has not in one of 13 rows"
    )
    assert str(error.value) == str(errors.rows_cannot_be_cut(block.name, problem))


def test_shape_errors_of_a_shard_say_that_the_batch_was_cut(mx):
    """A graph's nodes, and the matrix of their edges."""
    block = compat.parallelize(block_of(mx, lambda F, x, edges: F.dot(edges, x), hybrid=False))
    with pytest.raises(compat.UnsupportedError) as error:
        block(array(mx, 13), array(mx, 13, 13))
    text = str(error.value)
    assert text.startswith("'{}' cannot be computed on a part of a batch: ".format(block.name))
    assert "with 4 rows, MXNet says: " in text and "[4,13] X [4,8]" in text
    assert "parallelize() cuts each batch by rows" in text


def test_errors_of_the_users_own_stay(mx):
    def function(F, x):
        raise ValueError("no such token")

    block = compat.parallelize(block_of(mx, function, hybrid=False))
    with pytest.raises(ValueError, match="no such token"):
        block(array(mx, 13))


@pytest.mark.parametrize("rows", [13, 3, 2])
@pytest.mark.parametrize("hybrid", [False, True])
def test_one_number_for_a_batch_is_refused_for_few_rows_too(mx, rows, hybrid):
    """One row a replica, and one number each: that looked like three rows."""
    block = compat.parallelize(block_of(mx, lambda F, x: F.mean(x), hybrid))
    with pytest.raises(compat.UnsupportedError, match="a row for each of the batch"):
        block(array(mx, rows))
    rowwise = compat.parallelize(block_of(mx, lambda F, x: F.mean(x, axis=1), hybrid))
    assert rowwise(array(mx, rows)).shape == (rows,)


@pytest.mark.parametrize("layout", ["TNC", "NTC"])
def test_cells_unrolled_with_time_first(mx, layout):
    """The cells take a step at a time; unrolled, ``layout`` says where the rows are."""

    class Unrolled(mx.gluon.HybridBlock):
        def __init__(self):
            super(Unrolled, self).__init__()
            with self.name_scope():
                self.cell = mx.gluon.rnn.LSTMCell(5, input_size=6)

        def hybrid_forward(self, F, x):
            return self.cell.unroll(4, x, layout=layout, merge_outputs=True)[0]

    shape = (13, 4, 6) if layout == "NTC" else (4, 13, 6)
    inputs = mx.nd.array(np.random.RandomState(0).normal(size=shape))
    block = Unrolled()
    block.initialize()
    expected = block(inputs).asnumpy()
    compat.parallelize(block)
    if layout == "NTC":
        assert difference([expected], [block(inputs).asnumpy()]) < 1e-6
        return
    with pytest.raises(compat.UnsupportedError, match="parallelize\\(\\) cuts each batch by rows"):
        block(inputs)


@pytest.mark.parametrize("layers", [1, 4])
def test_hidden_states_given_from_outside_are_refused(mx, layers):
    """Their rows are in the second dimension."""
    lstm = mx.gluon.rnn.LSTM(5, layout="NTC", input_size=6, num_layers=layers)
    net = compat.parallelize(lstm)
    net.initialize()
    with pytest.raises(compat.UnsupportedError):
        net(mx.nd.ones((4, 3, 6)), net.begin_state(4))


# States -----------------------------------------------------------------------------------------


def counting(mx, kind):
    class Counting(mx.gluon.Block):
        def __init__(self):
            super(Counting, self).__init__()
            with self.name_scope():
                self.state = self.params.get(
                    "state", shape=(1,), init="zeros", grad_req="null", differentiable=False
                )
                self.inner = mx.gluon.nn.Dense(8, in_units=8)

        def forward(self, x):
            here = self.state.data(x.context)
            if kind == "steps, set":
                self.state.set_data(here + 1)
            elif kind == "steps, in place":
                here[:] += 1
            elif kind == "sum, set":
                self.state.set_data(here + x.sum())
            elif kind == "sum, in place":
                here[:] += x.sum()
            return self.inner(x)

    return Counting()


@pytest.mark.parametrize("kind", ["steps, set", "steps, in place", "nothing"])
@span
def test_step_counters_count_once(mx, kind):
    counts = []
    for parallel in (False, True):
        block = counting(mx, kind)
        if parallel:
            compat.parallelize(block)
        block.initialize()
        for rows in (13, 2, 1, 13):
            with mx.autograd.record():
                loss = block(array(mx, rows)).sum()
            loss.backward()
        counts.append([a.asscalar() for a in block.collect_params()[block.state.name].list_data()])
    assert counts == [[0 if kind == "nothing" else 4], [counts[0][0]] * 3]


@pytest.mark.parametrize("kind", ["sum, set", "sum, in place"])
@pytest.mark.parametrize("training", [False, True])
def test_states_that_depend_on_rows_are_refused(mx, kind, training):
    block = compat.parallelize(counting(mx, kind))
    block.initialize()
    with pytest.raises(compat.UnsupportedError) as error:
        with mx.autograd.record() if training else mx.autograd.pause():
            block(array(mx, 13))
    assert str(error.value) == (
        "The replicas of the block {!r} set its parameter {!r} to different values, each from its "
        "own rows, and whether these are to be added up or averaged only the block knows. Set it "
        "outside of the block, from results for the whole batch; or run the block on one device: "
        "parallelize(block, gpus=1).".format(block.name, block.state.name)
    )


def test_running_statistics_of_operations(mx):
    """Of an imported graph and of a block of the user's: known by their operation, BatchNorm."""

    class Own(mx.gluon.HybridBlock):
        def __init__(self):
            super(Own, self).__init__()
            with self.name_scope():
                for name, value in (("gamma", "ones"), ("beta", "zeros")):
                    setattr(self, name, self.params.get(name, shape=(8,), init=value))
                for name, value in (("mean", "zeros"), ("var", "ones")):
                    own = self.params.get(
                        name, shape=(8,), init=value, grad_req="null", differentiable=False
                    )
                    setattr(self, name, own)

        def hybrid_forward(self, F, x, gamma, beta, mean, var):
            return F.BatchNorm(x, gamma, beta, mean, var, momentum=0.75, fix_gamma=False)

    def imported():
        symbol = mx.sym.BatchNorm(mx.sym.var("data"), name="norm", momentum=0.75)
        return mx.gluon.SymbolBlock(symbol, mx.sym.var("data"))

    inputs = data(61)[0] * 3 + 1
    shards = [inputs[:20], inputs[20:40], inputs[40:]]
    expected = sum(len(shard) * shard.mean(axis=0) for shard in shards) / 61 * 0.25
    for block in (Own(), imported()):
        compat.parallelize(block).initialize()
        block(mx.nd.array(inputs))
        name = [name for name in block.collect_params() if name.endswith("mean")][0]
        block.collect_params()[name].set_data(mx.nd.zeros(8))
        with mx.autograd.record():
            loss = (block(mx.nd.array(inputs)) ** 2).sum()
        loss.backward()
        arrays = [a.asnumpy() for a in block.collect_params()[name].list_data()]
        np.testing.assert_allclose(arrays[0], expected, rtol=1e-4, atol=1e-6)
        assert all((other == arrays[0]).all() for other in arrays)


def test_states_that_a_backward_pass_sets_by_rows_are_refused(mx):
    """Which is seen at the next use; a Block is not traced, so nobody knows its operations."""

    class Own(mx.gluon.Block):
        def __init__(self):
            super(Own, self).__init__()
            with self.name_scope():
                for name, value in (("mean", "zeros"), ("var", "ones")):
                    own = self.params.get(
                        name, shape=(8,), init=value, grad_req="null", differentiable=False
                    )
                    setattr(self, name, own)

        def forward(self, x):
            one = mx.nd.ones(8, ctx=x.context)
            mean, var = self.mean.data(x.context), self.var.data(x.context)
            return mx.nd.BatchNorm(x, one, one, mean, var)

    block = compat.parallelize(Own())
    block.initialize()
    inputs = array(mx, 13)
    inputs.attach_grad()
    with pytest.raises(compat.UnsupportedError, match="to different values"):
        for _ in range(2):
            with mx.autograd.record():
                loss = (block(inputs) ** 2).sum()
            loss.backward()
