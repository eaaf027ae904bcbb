"""Gluon blocks on several contexts, with the user's training loop as it is on one."""

import numpy as np
import pytest

import compat
from compat._backends.mxnet.profiler import products as placement
from compat._configuration import registry
from compat.testing import in_span, span

from .gluon_models import (
    BATCHES,
    DEVICES,
    Unfollowed,
    array,
    assert_refused,
    check_refusal,
    check_same,
    contexts,
    convolutional,
    data,
    dense,
    difference,
    every_context,
    initialise,
    recurrent,
    train,
    trainer,
    weights,
)
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize(
    "build, optimizer",
    in_span([(dense, "adam"), (convolutional, "sgd"), (recurrent, "sgd")], [(dense, "adam")]),
)
def test_trains_to_the_numbers_of_one_context(mx, build, optimizer, hybridize):
    nets = []
    for parallel in (False, True):
        net = build(mx)
        if parallel:
            assert compat.parallelize(net) is net
        initialise(mx, net)
        start = weights(net)
        if hybridize:
            net.hybridize()
        nets.append(train(mx, net, trainer(mx, net, optimizer)))
    plain, parallel = nets
    assert contexts(parallel)[0] == ["cpu(0)"]
    assert difference(start, weights(plain)) > 1e-2
    assert difference(weights(plain), weights(parallel)) < 1e-5
    inputs = mx.nd.array(data(61)[0])
    assert difference([plain(inputs).asnumpy()], [parallel(inputs).asnumpy()]) < 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_sparse_gradients_of_an_embedding(mx, optimizer):
    """Words that several contexts look up count once."""

    def run(parallel):
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Embedding(9, 4, sparse_grad=True))
        net.add(mx.gluon.nn.Dense(3))
        if parallel:
            compat.parallelize(net)
        words = mx.nd.array(np.arange(16 * 8).reshape(16, 8) % 5)
        steps = trainer(mx, initialise(mx, net), optimizer)
        for rows in (16, 13, 2):
            with mx.autograd.record():
                loss = net(words[:rows]).square().sum(axis=1)
            loss.backward()
            steps.step(rows)
        return weights(net)

    check_same(run, 1e-6)


@pytest.mark.parametrize("moment", ["before", "between", "after", "training"])
def test_trainer_made_before_or_after(mx, moment):
    """And in the middle of training, with the optimizer's state; and back to one context."""
    plain, net = initialise(mx, dense(mx)), initialise(mx, dense(mx))
    if moment == "before":  # parallelize() comes before the Trainer
        compat.parallelize(net)
    steps = trainer(mx, net, "adam")
    if moment == "between":
        compat.parallelize(net)
    if moment == "after":
        net(mx.nd.array(data(4)[0]))
        compat.parallelize(net)
    plain_steps = trainer(mx, plain, "adam")
    for devices in ([0], [0, 1, 2], [2, 1], [1]):
        if devices != [0] or moment == "training":
            compat.parallelize(net, gpus=devices)
        for each, its in ((plain, plain_steps), (net, steps)):
            train(mx, each, its, (61, 2))
        assert difference(weights(plain), weights(net)) < 1e-5
    assert contexts(net)[0] == ["cpu(1)"]
    assert not [name for name in vars(net) if name.startswith("_compat")]
    assert "forward" not in vars(net)


@pytest.mark.parametrize("hybridize", [False, True])
@span
def test_each_context_computes_its_shard_forward_and_backward(mx, hybridize):
    check_refusal(mx)
    net = initialise(mx, compat.parallelize(dense(mx)))
    if hybridize:
        net.hybridize(forward_bulk_size=0, backward_bulk_size=0)  # one operation a record
    steps = trainer(mx, net)
    train(mx, net, steps, [64])
    placed = placement(lambda: train(mx, net, steps, [64]))
    assert placed == {device: (2, 2) for device in DEVICES}


def test_report_says_what_each_context_did(mx):
    net = compat.parallelize(initialise(mx, dense(mx)))
    steps = trainer(mx, net)
    before = {each.device: each.rows for each in compat.report().devices}
    trained = {each.device: each.training_rows for each in compat.report().devices}
    train(mx, net, steps, [61, 2])
    net(mx.nd.array(data(13)[0]))
    found = compat.report().devices
    assert [each.device for each in found] == DEVICES
    assert [each.rows - before[each.device] for each in found] == [20 + 4, 20 + 1 + 4, 21 + 1 + 5]
    assert [each.training_rows - trained[each.device] for each in found] == [20, 21, 22]


def test_gradients_reach_the_inputs(mx):
    def run(parallel):
        net, found = dense(mx), []
        initialise(mx, compat.parallelize(net) if parallel else net)
        for rows in (61, 2):
            inputs = mx.nd.array(data(rows)[0])
            inputs.attach_grad()
            with mx.autograd.record():
                total = (net(inputs) ** 2).sum()
            total.backward()
            found.append(inputs.grad.asnumpy())
        assert np.abs(found[0]).max() > 0.1
        return found

    check_same(run)


@pytest.mark.parametrize("build", ["before", "after"])
def test_initialised_after_parallelize(mx, build):
    net = dense(mx)
    compat.parallelize(net)
    if build == "before":
        net.collect_params().initialize(mx.init.Xavier(), ctx=mx.cpu(0))
    else:
        net.initialize(ctx=[mx.cpu(1)])
    steps = trainer(mx, net)  # the shapes are not known as yet
    train(mx, net, steps, [5])
    assert contexts(net) == [["cpu(1)" if build == "after" else "cpu(0)"]] * 4


@span
def test_saves_and_loads(mx, tmp_path):
    check_refusal(mx)
    net = train_net = initialise(mx, compat.parallelize(dense(mx)))
    net.hybridize()
    train(mx, train_net, trainer(mx, net), [64, 5])
    inputs = mx.nd.array(data(61)[0])
    expected = net(inputs).asnumpy()
    path = str(tmp_path / "net")
    net.save_parameters(path + ".params")
    net.export(path)
    plain = dense(mx)
    plain.load_parameters(path + ".params")
    assert difference([expected], [plain(inputs).asnumpy()]) < 1e-5
    imported = mx.gluon.SymbolBlock.imports(path + "-symbol.json", ["data"], path + "-0000.params")
    assert difference([expected], [imported(inputs).asnumpy()]) < 1e-5
    # What was imported can be run on several, too, and what was saved be loaded into it.
    compat.parallelize(imported)
    assert difference([expected], [imported(inputs).asnumpy()]) < 1e-5
    assert contexts(imported)[0] == ["cpu(0)"]
    train(mx, net, trainer(mx, net), [64])
    assert difference([expected], [net(inputs).asnumpy()]) > 1e-3
    net.load_parameters(path + ".params")
    assert difference([expected], [net(inputs).asnumpy()]) < 1e-5
    assert contexts(net)[0] == ["cpu(0)"]


def test_trainer_state_is_saved_and_loaded(mx, tmp_path):
    path = str(tmp_path / "states")
    plain, net = initialise(mx, dense(mx)), compat.parallelize(initialise(mx, dense(mx)))
    for each in (plain, net):
        steps = trainer(mx, each, "adam")
        train(mx, each, steps)
        steps.save_states(path)
        again = trainer(mx, each, "adam")
        again.load_states(path)
        train(mx, each, again)
    assert difference(weights(plain), weights(net)) < 1e-5


@pytest.mark.parametrize("options", [{"kvstore": None}, {"kvstore": "local"}])
@pytest.mark.parametrize("moment", ["before", "training"])
def test_kvstores(mx, options, moment):
    plain, net = initialise(mx, dense(mx)), initialise(mx, dense(mx))
    if moment == "before":
        compat.parallelize(net)
    steps, plain_steps = trainer(mx, net, **options), trainer(mx, plain, **options)
    for _ in range(2):
        for each, its in ((plain, plain_steps), (net, steps)):
            train(mx, each, its)
        compat.parallelize(net)
    assert difference(weights(plain), weights(net)) < 1e-5


def test_gradients_clipped_between_allreduce_and_update(mx):
    def run(parallel):
        net = initialise(mx, dense(mx))
        if parallel:
            compat.parallelize(net)
        steps = trainer(mx, net)
        for rows in BATCHES:
            inputs, _ = data(rows)
            with mx.autograd.record():
                total = (net(mx.nd.array(inputs)) ** 2).sum()
            total.backward()
            steps.allreduce_grads()
            for context in every_context(net):
                gradients = [p.grad(context) for p in net.collect_params().values()]
                mx.gluon.utils.clip_global_norm(gradients, 1.0)
            steps.update(rows)
        return weights(net)

    check_same(run)


def test_frozen_parameters_stay_exactly(mx):
    net = initialise(mx, dense(mx))
    compat.parallelize(net)
    net[0].collect_params().setattr("grad_req", "null")
    before = weights(net)
    train(mx, net, trainer(mx, net))
    changed = [np.abs(a - b).max() for a, b in zip(before, weights(net))]
    assert [c == 0 for c in changed] == [True, True, False, False]


def test_dropout_masks_differ_between_replicas(mx):
    net = compat.parallelize(mx.gluon.nn.Dropout(0.5))
    with mx.autograd.record():
        out = net(mx.nd.ones((30, 200))).asnumpy() != 0
    masks = [out[start : start + 10] for start in (0, 10, 20)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (masks[first] == masks[second]).mean() < 0.6


def test_arrays_of_mxnets_numpy(mx):
    """``mx.np`` came with MXNet 1.6; it may hold for the whole process, so it is switched off."""
    if not hasattr(mx, "np"):
        assert mx.__version__ < "1.6"
        return
    results = []
    mx.npx.set_np()
    try:
        for parallel in (False, True):
            net = compat.parallelize(dense(mx), gpus=3 if parallel else 1)
            net.initialize()
            net(mx.np.ones((1, 8)))
            for seed, parameter in enumerate(net.collect_params().values()):
                values = np.random.RandomState(seed).normal(size=parameter.shape) * 0.3
                parameter.set_data(mx.np.array(values, dtype="float32"))
            steps = trainer(mx, net)
            for rows in BATCHES:
                inputs = mx.np.array(data(rows)[0])
                with mx.autograd.record():
                    out = net(inputs)
                    loss = (out**2).sum()
                assert isinstance(out, mx.np.ndarray) and out.shape == (rows, 4)
                loss.backward()
                steps.step(rows)
            results.append(weights(net))
    finally:
        mx.npx.reset_np()
    assert difference(*results) < 1e-5


def test_blocks_within_blocks_do_not_split_again(mx):
    inner = dense(mx)
    outer = mx.gluon.nn.HybridSequential()
    outer.add(inner)
    initialise(mx, outer)
    expected = outer(mx.nd.array(data(61)[0])).asnumpy()
    compat.parallelize(inner)
    compat.parallelize(outer)
    seen = Unfollowed()
    inner[0].register_forward_hook(lambda block, inputs, out: seen.append(out.shape[0]))
    for _ in range(2):
        del seen[:]
        assert difference([expected], [outer(mx.nd.array(data(61)[0])).asnumpy()]) < 1e-5
    assert seen == [20, 20, 21]
    compat.parallelize(outer, gpus=1)
    del seen[:]
    assert difference([expected], [outer(mx.nd.array(data(61)[0])).asnumpy()]) < 1e-5


def test_is_native(mx):
    backend = registry.load("mxnet")
    assert backend.is_native(dense(mx)) and backend.is_native(mx.gluon.loss.L2Loss())
    assert not backend.is_native(mx.nd.ones(1)) and not backend.is_native(None)


def test_a_part_that_is_there_twice(mx):
    net, shared = mx.gluon.nn.HybridSequential(), mx.gluon.nn.Dense(8)
    net.add(shared, mx.gluon.nn.Dense(8, activation="tanh"), shared, mx.gluon.nn.Dense(4))
    initialise(mx, net)
    inputs = mx.nd.array(data(61)[0])
    expected = net(inputs).asnumpy()
    assert difference([expected], [compat.parallelize(net)(inputs).asnumpy()]) < 1e-5


def test_a_function_in_place_of_the_replaced_forward_stays_on_one_device(mx):
    net = initialise(mx, dense(mx))
    compat.parallelize(net)
    forward = net.forward
    net.forward = lambda x: forward(x) + 1
    inputs = array(mx, 6)
    both = net(inputs).asnumpy()
    compat.parallelize(net, gpus=1)
    np.testing.assert_allclose(net(inputs).asnumpy(), both, rtol=1e-5)
    compat.parallelize(net)
    np.testing.assert_allclose(net(inputs).asnumpy(), both, rtol=1e-5)


def test_blocks_are_refused_before_mxnet_1_3(mx, monkeypatch):
    """Its blocks have no hooks either."""
    monkeypatch.delattr(mx.gluon.Block, "register_forward_hook", raising=False)
    assert_refused(mx)
