"""States that Gluon blocks set, and running statistics: those of one context."""

import warnings

import numpy as np
import pytest

import compat
from compat._backends.mxnet import state
from compat.testing import in_span, span

from ..messages import told
from .gluon_models import (
    MIXED,
    WHOLE,
    array,
    block_of,
    centred,
    check_refusal,
    data,
    running_statistics,
    shards_of,
)
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")


@pytest.mark.parametrize("rows", in_span([61, 2], [61]))
def test_batchnorm_by_numbers(mx, rows, tmp_path):
    """Each shard by its own statistics; one step of the running ones, weighted by shard size."""
    check_refusal(mx)
    norm = mx.gluon.nn.BatchNorm(momentum=0.75, in_channels=8)
    net = mx.gluon.nn.HybridSequential()
    net.add(norm)
    compat.parallelize(net).initialize()
    net.hybridize()
    inputs = data(rows)[0] * 3 + 1
    with mx.autograd.record():
        out = net(mx.nd.array(inputs))
    out.backward()
    normed = [(s - s.mean(axis=0)) / np.sqrt(s.var(axis=0) + 1e-5) for s in shards_of(inputs)]
    np.testing.assert_allclose(out.asnumpy(), np.concatenate(normed), rtol=1e-3, atol=1e-4)
    net.save_parameters(str(tmp_path / "net"))  # what is saved are the united ones
    values = mx.nd.load(str(tmp_path / "net"))
    saved = [values["0.running_" + name].asnumpy() for name in ("mean", "var")]
    np.testing.assert_allclose(saved, running_statistics(inputs), rtol=1e-4, atol=1e-6)
    for parameter in (norm.running_mean, norm.running_var):
        arrays = [array.asnumpy() for array in parameter.list_data()]
        assert all((array == arrays[0]).all() for array in arrays)
    # A row's prediction does not depend on the device that it falls on.
    same = net(mx.nd.array(np.repeat(inputs[:1], 6, axis=0))).asnumpy()
    assert (same == same[0]).all()


def check_running_statistics(mx, block, norm):
    """Do a pass of 61 rows, and check the statistics of its batch normalization after it."""
    inputs = data(61)[0] * 3 + 1
    with mx.autograd.record():
        out = block(mx.nd.array(inputs))
    out.backward()
    found = [p.data().asnumpy() for p in (norm.running_mean, norm.running_var)]
    np.testing.assert_allclose(found, running_statistics(inputs), rtol=1e-4, atol=1e-6)


@span
def test_running_statistics_if_a_context_is_busy(mx):
    """It copies them late, and the backward pass of another context does not wait for that."""

    def occupy(F, x):
        if x.context.device_id == 2:
            large = mx.nd.ones((800, 800), ctx=x.context)
            mx.nd.dot(large, large)
        return x

    check_refusal(mx)
    norm = mx.gluon.nn.BatchNorm(momentum=0.75, in_channels=8)
    net = mx.gluon.nn.Sequential()
    net.add(block_of(mx, occupy, hybrid=False), norm)
    compat.parallelize(net).initialize()
    check_running_statistics(mx, net, norm)


def test_running_statistics_of_a_block_in_a_list(mx):
    """Of which its parent does not know: it is there for the script alone."""
    norm = mx.gluon.nn.BatchNorm(momentum=0.75, in_channels=8)
    norm.initialize()
    norms = [norm]
    block = block_of(mx, lambda F, x: block.norms[0](x), hybrid=False)
    block.norms = norms
    check_refusal(mx)
    compat.parallelize(block)
    check_running_statistics(mx, block, norm)


@pytest.mark.parametrize("is_read", [False, True])
def test_running_statistics_that_are_used_before_the_backward_pass(mx, is_read):
    """They are read, or predicted with, while those of the batch are not there yet."""
    check_refusal(mx)
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(momentum=0.75, in_channels=8))
    compat.parallelize(net).initialize()
    inputs = data(61)[0] * 3 + 1
    with mx.autograd.record():
        out = net(mx.nd.array(inputs))
    if is_read:
        assert not net[0].running_mean.data().asnumpy().any()
    else:
        net(mx.nd.array(inputs))
    out.backward()
    found = [p.data().asnumpy() for p in (net[0].running_mean, net[0].running_var)]
    np.testing.assert_allclose(found, running_statistics(inputs), rtol=1e-4, atol=1e-6)
    assert net[0].running_mean not in state.pending


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
    """Return the block, and its state on all contexts after some calls."""
    check_refusal(mx)
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
def test_states_that_depend_on_rows_run_unsplit(mx, kind, training):
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
    """Add running statistics to a user-defined block."""
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
