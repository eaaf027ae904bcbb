"""What Gluon blocks may compute of the rows of a batch, and keep from one to the next."""

import warnings

import numpy as np
import pytest

import compat
from compat.testing import in_span, span

from ..messages import told
from . import test_native
from .test_native import (
    data,
    difference,
    every_context,
    initialise,
    running_statistics,
    trainer,
    weights,
)

mx = test_native.mx  # the fixture
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


MIXED = (
    "The operation {} of {!r} computes across the rows of a batch, of which each device has a part."
)
TRIED = (
    "Model {!r} gives other numbers for three rows of a batch together than for two of them and "
    "the third, and each device has a part of the batch."
)
UNKNOWN = (
    "Model {!r} may compute across the rows of a batch, of which each device has a part: compat "
    "has no rule for it, and cannot try it."
)
WHOLE = " The block runs on cpu(0) with the whole batch."


class Around:
    """A model with parameters before and after a function of the rows, and its training."""

    def __init__(self, mx, function, hybrid=True, hybridize=False, returns_loss=False):
        self.mx = mx
        nn = mx.gluon.nn
        inner = block_of(mx, function, hybrid)
        self.net = (nn.HybridSequential if hybrid else nn.Sequential)()
        self.net.add(nn.Dense(8, activation="tanh"), inner)
        if not returns_loss:
            self.net.add(nn.Dense(4))
        initialise(mx, self.net)
        if hybridize:
            self.net.hybridize()

    def results(self, optimizer="adam"):
        """Outputs and weights, of batches of several sizes, trained and predicted."""
        mx, found = self.mx, []
        steps = trainer(mx, self.net, optimizer)
        for rows in (13, 2, 1, 11):
            with mx.autograd.record():
                out = self.net(array(mx, rows))
                loss = (out**2).sum()
            loss.backward()
            steps.step(rows)
            found += [out.asnumpy()] + weights(self.net)
            found.append(self.net(array(mx, rows + 20)).asnumpy())
        contexts = every_context(self.net)
        for context in contexts[1:]:  # all contexts have the same weights
            assert difference(weights(self.net), weights(self.net, context)) == 0
        return found


def one_contexts_numbers(mx, *args, has_predicted=False, **options):
    """Train on one context and on three, compare, and return the warnings and the net."""
    expected = Around(mx, *args, **options).results()
    model = Around(mx, *args, **options)
    net = compat.parallelize(model.net)
    with told() as texts:
        if has_predicted:
            net(array(mx, 13))
        found = model.results()
    assert difference(expected, found) < 1e-5
    return texts, net


def centred(F, x):
    return F.broadcast_sub(x, F.mean(x, axis=0, keepdims=True))


@pytest.mark.parametrize("hybridize", [False, True])
@span
def test_operations_across_rows_run_whole(mx, hybridize):
    texts, net = one_contexts_numbers(mx, centred, hybridize=hybridize)
    operation = "{}_mean0".format(net[1].name)
    assert texts == [MIXED.format(operation, net.name) + WHOLE]
    devices = compat.report().devices
    before = [each.rows for each in devices]
    net(array(mx, 13))
    assert [a.rows - b for a, b in zip(compat.report().devices, before)] == [13, 0, 0]


@span
def test_blocks_that_are_not_traced_are_tried(mx):
    texts, net = one_contexts_numbers(mx, centred, hybrid=False)
    assert texts == [TRIED.format(net.name) + WHOLE]
    texts, _ = one_contexts_numbers(mx, lambda F, x: F.softmax(x) - F.mean(x, 1, True), False)
    assert texts == []


LOSSES = {
    "sum": (lambda F, x: F.sum(F.square(x)) * 0.1, None),
    "mean": (lambda F, x: F.mean(F.square(x)) + 0.5 * F.mean(x), None),
    "norm": (lambda F, x: F.norm(x), "norm"),
}


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", in_span(sorted(LOSSES), ["mean"]))
def test_a_loss_that_a_block_returns(mx, name, hybridize):
    """Sums and means of a traced block are put together; all else is computed whole."""
    function, operation = LOSSES[name]
    texts, net = one_contexts_numbers(mx, function, hybridize=hybridize, returns_loss=True)
    name = "{}_{}0".format(net[1].name, operation)
    assert texts == ([MIXED.format(name, net.name) + WHOLE] if operation else [])


def test_strict_makes_it_an_error(mx, monkeypatch):
    monkeypatch.setattr(compat._runtime.process.process.configuration.settings, "strict", True)
    net = compat.parallelize(block_of(mx, centred))
    for _ in range(2):  # not the first time only
        with pytest.raises(compat.UnsupportedError, match="computes across the rows of a batch"):
            net(array(mx, 13))


def test_random_blocks(mx):
    """Known by their operations, where they can be traced; else nothing tells."""

    def noisy(F, x):
        return x + 0 * F.random.normal_like(x) if hasattr(F.random, "normal_like") else x

    def plain(F, x):
        return x + F.random.normal(shape=x.shape)

    net = compat.parallelize(block_of(mx, plain, hybrid=False))
    with told() as texts:
        assert net(array(mx, 13)).shape == (13, 8)
    assert texts == [UNKNOWN.format(net.name) + WHOLE]
    texts, _ = one_contexts_numbers(mx, noisy)
    assert texts == []


def whole(mx, block, *calls):
    """The block's results for the calls, those of one context; and the warnings."""
    expected = [block(*args).asnumpy() for args in calls]
    compat.parallelize(block)
    with told() as texts:
        found = [block(*args).asnumpy() for args in calls]
    assert difference(expected, found) < 1e-5
    return texts


GRADIENT = (
    "Model {!r} has a gradient of its own that computes, or may compute, across the rows of a "
    "batch, of which each device has a part."
)
#: What becomes of what comes back, and whether it mixes rows.
BACK = {
    "reversed": (lambda nd, gradient: -gradient, False),
    "of length 1": (lambda nd, gradient: gradient / nd.norm(gradient), True),
    "centred": (lambda nd, gradient: gradient - nd.mean(gradient, axis=0, keepdims=True), True),
}


def with_gradient(mx, function):
    """A function of rows: themselves, and the gradient that a function makes."""

    class Own(mx.autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, gradient):
            return function(mx.nd, gradient)

    return lambda F, x: Own()(x)


@pytest.mark.parametrize("has_predicted", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("name", in_span(sorted(BACK), ["of length 1"]))
def test_gradients_of_ones_own(mx, name, hybrid, has_predicted):
    """With symbols, MXNet would end the process, or leave the gradient out."""
    function, mixes = BACK[name]
    function = with_gradient(mx, function)
    texts, net = one_contexts_numbers(mx, function, hybrid=hybrid, has_predicted=has_predicted)
    assert texts == ([GRADIENT.format(net.name) + WHOLE] if mixes else [])


def test_gradients_within_a_block(mx):
    """As a penalty has them. With symbols, MXNet would end the process."""

    def function(F, x):
        if F is mx.nd:
            x = x.detach()
            x.attach_grad()
        with mx.autograd.record():
            (gradient,) = mx.autograd.grad([F.sum(x * x)], [x])
        return gradient

    block = block_of(mx, function)
    assert whole(mx, block, (array(mx, 13),), (array(mx, 7),)) == []


def test_results_without_a_gradient_are_left_out_of_account(mx):
    """Such as what is detached, in a block that is not traced."""
    block = compat.parallelize(block_of(mx, lambda F, x: (2 * x, x.detach()), hybrid=False))
    inputs = array(mx, 13)
    inputs.attach_grad()
    with told() as texts, mx.autograd.record():
        loss = block(inputs)[0].sum()
    loss.backward()
    assert texts == [] and (inputs.grad.asnumpy() == 2).all()


@pytest.mark.parametrize("hybrid", [False, True])
def test_an_array_that_was_split_and_now_has_other_rows(mx, hybrid):
    """A memory, which had as many rows as the first batch by chance."""

    def function(F, x, memory):
        return F.broadcast_add(x, F.mean(F.sum(memory, axis=1) * 0) + 0 * F.sum(x))

    def rowwise(F, x, memory):
        return F.concat(x, F.broadcast_add(0 * x, F.slice_axis(memory, axis=0, begin=0, end=1)))

    for each in (function, rowwise):
        block = block_of(mx, each, hybrid)
        args = [(array(mx, rows), array(mx, 13)) for rows in (13, 11, 13)]
        assert len(whole(mx, block, *args)) == 1
    # One that was whole stays so.
    args = [(array(mx, rows), array(mx, 13)) for rows in (11, 2, 13)]
    assert whole(mx, block_of(mx, rowwise, hybrid), *args) == []


def test_shapes_that_change_later_run_whole(mx):
    """What a shard cannot compute, and the trial did not see."""

    def function(F, x):
        return x + F.ones((13, 8)) if len(x) > 3 else x

    block = block_of(mx, function, hybrid=False)
    texts = whole(mx, block, (array(mx, 13),), (array(mx, 13),))
    assert texts == [UNKNOWN.format(block.name) + WHOLE]


def test_errors_of_the_users_own_stay(mx):
    def function(F, x):
        raise ValueError("no such token")

    block = compat.parallelize(block_of(mx, function, hybrid=False))
    with pytest.raises(ValueError, match="no such token"):
        block(array(mx, 13))


@pytest.mark.parametrize("rows", [13, 3, 2])
@pytest.mark.parametrize("hybrid", [False, True])
def test_one_number_for_a_batch_of_few_rows_too(mx, rows, hybrid):
    """One row a replica, and one number each: that looked like three rows."""
    block = block_of(mx, lambda F, x: F.mean(x), hybrid)
    texts = whole(mx, block, (array(mx, rows),))
    assert texts == ([] if hybrid else [TRIED.format(block.name) + WHOLE])
    rowwise = compat.parallelize(block_of(mx, lambda F, x: F.mean(x, axis=1), hybrid))
    assert rowwise(array(mx, rows)).shape == (rows,)


def test_time_first(mx):
    """A layer whose first dimension is time is not divided by it; between transposes it is."""
    inputs = mx.nd.array(np.random.RandomState(0).normal(size=(13, 4, 6)))
    gru = mx.gluon.rnn.GRU(5, input_size=6)
    gru.initialize()
    texts = whole(mx, gru, (inputs,))
    assert len(texts) == 1 and "computes across the rows of a batch" in texts[0]
    net = mx.gluon.nn.HybridSequential()
    swapped = mx.gluon.nn.HybridLambda(lambda F, x: F.swapaxes(x, 0, 1))
    net.add(swapped, mx.gluon.rnn.GRU(5, input_size=6))
    net.initialize()
    assert whole(mx, net, (inputs,)) == []  # the rows are in the second dimension of what it gives


@pytest.mark.parametrize("layers", [1, 4])
def test_hidden_states_given_from_outside_run_whole(mx, layers):
    """Their rows are in the second dimension."""
    lstm = mx.gluon.rnn.LSTM(5, layout="NTC", input_size=6, num_layers=layers)
    lstm.initialize()
    inputs, states = mx.nd.array(np.random.RandomState(0).normal(size=(4, 3, 6))), None
    states = lstm.begin_state(4)
    expected = lstm(inputs, states)[0].asnumpy()
    with pytest.warns(compat.CompatWarning, match="with the whole batch"):
        found = compat.parallelize(lstm)(inputs, states)[0].asnumpy()
    assert difference([expected], [found]) < 1e-6


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


def counted(mx, kind, parallel, training):
    """The block, and what all contexts have of its state after some calls."""
    block = counting(mx, kind)
    if parallel:
        compat.parallelize(block)
    block.initialize()
    for rows in (13, 2, 1, 13):
        with mx.autograd.record() if training else mx.autograd.pause():
            loss = block(array(mx, rows)).sum()
        if training:
            loss.backward()
    return block, [a.asscalar() for a in block.collect_params()[block.state.name].list_data()]


@pytest.mark.parametrize("kind", ["steps, set", "steps, in place", "nothing"])
@span
def test_step_counters_count_once(mx, kind):
    counts = [counted(mx, kind, parallel, training=True)[1] for parallel in (False, True)]
    assert counts == [[0 if kind == "nothing" else 4]] * 2


@pytest.mark.parametrize("kind", ["sum, set", "sum, in place"])
@pytest.mark.parametrize("training", [False, True])
def test_states_that_depend_on_rows_run_whole(mx, kind, training):
    """All contexts then have one context's state."""
    _, (expected,) = counted(mx, kind, False, training)
    with told() as texts:
        block, found = counted(mx, kind, True, training)
    assert max(abs(value - expected) for value in found) < 1e-4
    operation = "that sets the parameter {!r}".format(block.state.name)
    assert texts == [MIXED.format(operation, block.name) + WHOLE]


def test_running_statistics_behind_an_operation_across_rows(mx):
    """Those of the whole batch, on all contexts, though the backward pass writes one's alone."""
    results = []
    for parallel in (False, True):
        net = mx.gluon.nn.HybridSequential()
        net.add(block_of(mx, centred), mx.gluon.nn.BatchNorm(momentum=0.5))
        if parallel:
            compat.parallelize(net)
        net.initialize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.CompatWarning)
            for rows in (13, 5):
                with mx.autograd.record():
                    loss = (net(array(mx, rows)) ** 2).sum()
                loss.backward()
        results.append([p.list_data() for p in net.collect_params().values()])
    for (expected,), found in zip(*results):
        for each in found:
            np.testing.assert_allclose(each.asnumpy(), expected.asnumpy(), atol=1e-5)


def add_statistics(block):
    """Running statistics of its own, for a block of the user's."""
    options = {"shape": (8,), "grad_req": "null", "differentiable": False}
    block.mean = block.params.get("mean", init="zeros", **options)
    block.var = block.params.get("var", init="ones", **options)


def test_running_statistics_of_operations(mx):
    """Of an imported graph and of a block of the user's: known by their operation, BatchNorm."""

    class Own(mx.gluon.HybridBlock):
        def __init__(self):
            super(Own, self).__init__()
            with self.name_scope():
                for name, value in (("gamma", "ones"), ("beta", "zeros")):
                    setattr(self, name, self.params.get(name, shape=(8,), init=value))
                add_statistics(self)

        def hybrid_forward(self, F, x, gamma, beta, mean, var):
            return F.BatchNorm(x, gamma, beta, mean, var, momentum=0.75, fix_gamma=False)

    def imported():
        symbol = mx.sym.BatchNorm(mx.sym.var("data"), name="norm", momentum=0.75)
        return mx.gluon.SymbolBlock(symbol, mx.sym.var("data"))

    inputs = data(61)[0] * 3 + 1
    expected, _ = running_statistics(inputs)
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
                add_statistics(self)

        def forward(self, x):
            one = mx.nd.ones(8, ctx=x.context)
            mean, var = self.mean.data(x.context), self.var.data(x.context)
            return mx.nd.BatchNorm(x, one, one, mean, var)

    block = compat.parallelize(Own())
    block.initialize()
    inputs = array(mx, 13)
    inputs.attach_grad()
    with pytest.raises(compat.UnsupportedError) as error:
        for _ in range(2):
            with mx.autograd.record():
                loss = (block(inputs) ** 2).sum()
            loss.backward()
    assert str(error.value) == (
        "The replicas of the block {!r} set its parameter {!r} to different values, each from its "
        "own rows, and whether these are to be added up or averaged only the block knows. Set it "
        "outside of the block, from results for the whole batch; or run the block on one device: "
        "parallelize(block, gpus=1).".format(block.name, block.mean.name)
    )
