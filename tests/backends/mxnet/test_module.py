"""``mx.mod.Module`` on several contexts: its calls give one context's numbers."""

import numpy as np
import pytest

import compat
from compat._backends.mxnet.profiler import products as placement
from compat._configuration import registry
from compat._rows import splitting
from compat.testing import in_span, span

from ..messages import refusal, told
from . import gluon_models
from .gluon_models import DEVICES, check_same, data, difference, running_statistics

mx = gluon_models.mx  # the fixture
pytestmark = pytest.mark.row("MXNet Module")


def symbol(mx, **softmax):
    sym = mx.sym
    x = sym.Activation(
        sym.FullyConnected(sym.var("data"), num_hidden=16, name="a"), act_type="tanh", name="t"
    )
    x = sym.FullyConnected(x, num_hidden=4, name="b")
    return sym.SoftmaxOutput(x, name="softmax", **softmax)


def parameters(mx):
    shapes = [("a_weight", (16, 8)), ("a_bias", (16,)), ("b_weight", (4, 16)), ("b_bias", (4,))]
    random = np.random.RandomState(0)
    return {name: mx.nd.array(random.normal(size=shape) * 0.3) for name, shape in shapes}


def bound(mx, rows, parallel=True, **binding):
    module = mx.mod.Module(symbol(mx))
    if parallel:
        assert compat.parallelize(module) is module
    module.bind([("data", (rows, 8))], [("softmax_label", (rows,))], **binding)
    module.init_params(arg_params=parameters(mx))
    return module


def optimised(module, optimizer="sgd", kvstore="local"):
    settings = {
        "sgd": {"learning_rate": 0.1, "momentum": 0.9},
        "adam": {"learning_rate": 0.01},
    }[optimizer]
    module.init_optimizer(kvstore, optimizer=optimizer, optimizer_params=settings)
    return module


def batch(mx, rows):
    inputs, labels = data(rows)
    return mx.io.DataBatch([mx.nd.array(inputs)], [mx.nd.array(labels)])


def step(mx, module, rows):
    module.forward_backward(batch(mx, rows))
    module.update()
    return module.get_outputs()[0].asnumpy()


def weights(module):
    arguments, states = module.get_params()
    return [held[name].asnumpy() for held in (arguments, states) for name in sorted(held)]


@span
def test_fit_gives_the_numbers_of_one_context(mx):
    """45 rows in batches of 16: the iterator fills the last one up from the first rows."""
    inputs, labels = data(45)
    results, scores = [], []
    for parallel in (False, True):
        for kvstore in ("local", None):
            module = mx.mod.Module(symbol(mx))
            if parallel:
                compat.parallelize(module)
            module.fit(
                mx.io.NDArrayIter(inputs, labels, 16),
                eval_data=mx.io.NDArrayIter(inputs, labels, 16),
                arg_params=parameters(mx),
                kvstore=kvstore,
                optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
                num_epoch=3,
            )
            results.append(weights(module))
            outputs = module.predict(mx.io.NDArrayIter(inputs, batch_size=16)).asnumpy()
            assert outputs.shape == (45, 4)
            results[-1].append(outputs)
            scores.append(module.score(mx.io.NDArrayIter(inputs, labels, 16), ["acc", "ce"]))
    start = [parameters(mx)[name].asnumpy() for name in sorted(parameters(mx))]
    assert difference(start, results[0][:4]) > 1e-2
    for each, score in zip(results[1:], scores[1:]):
        assert difference(results[0], each) < 1e-5
        np.testing.assert_allclose([v for _, v in score], [v for _, v in scores[0]], rtol=1e-5)
    assert [str(context) for context in module._context] == DEVICES


@pytest.mark.parametrize(
    "first, optimizer", in_span([(64, "sgd"), (61, "adam"), (1, "sgd")], [(61, "adam")])
)
def test_steps_of_any_size(mx, first, optimizer):
    """Bound to one size, and given others; less rows than contexts, too."""
    modules = [optimised(bound(mx, first, parallel), optimizer) for parallel in (False, True)]
    for rows in (first, 61, 2, 1, 64, 5, 13):
        outputs = [step(mx, module, rows) for module in modules]
        assert outputs[0].shape == outputs[1].shape == (rows, 4)
        assert difference(outputs[:1], outputs[1:]) < 1e-5
        metrics = [mx.metric.CrossEntropy() for _ in modules]
        for module, metric in zip(modules, metrics):
            module.update_metric(metric, batch(mx, rows).label)
        assert metrics[0].num_inst == metrics[1].num_inst == rows
        np.testing.assert_allclose(metrics[0].get()[1], metrics[1].get()[1], rtol=1e-4)
    assert difference(*[weights(module) for module in modules]) < 1e-5
    group = modules[1]._exec_group
    for arrays in group.param_arrays:
        assert [str(array.context) for array in arrays] == DEVICES
        assert all((array.asnumpy() == arrays[0].asnumpy()).all() for array in arrays)


def test_report_says_what_each_context_did(mx):
    module = optimised(bound(mx, 61))
    before = [(each.rows, each.training_rows) for each in compat.report().devices]
    step(mx, module, 61)
    module.forward(batch(mx, 2), is_train=False)
    found = [(each.rows, each.training_rows) for each in compat.report().devices]
    done = [(a - c, b - d) for (a, b), (c, d) in zip(found, before)]
    assert done == [(20, 20), (20 + 1, 20), (21 + 1, 21)]


def test_gradients_of_inputs_and_added_gradients(mx):
    """``inputs_need_grad``, and ``grad_req="add"``, where an empty shard must add nothing."""

    def run(parallel):
        found = []
        module = bound(mx, 61, parallel, inputs_need_grad=True, grad_req="add")
        for rows in (61, 2, 1):
            # What an input gradient was added to has another shape with each batch.
            for arrays in module._exec_group.input_grad_arrays:
                for array in arrays:
                    array[:] = 0
            module.forward_backward(batch(mx, rows))
            found.append(module.get_input_grads()[0].asnumpy())
            assert found[-1].shape == (rows, 8)
        for arrays in module._exec_group.grad_arrays:
            found.append(sum(array.asnumpy() for array in arrays))
        assert min(np.abs(each).max() for each in found) > 1e-3
        return found

    check_same(run)


def test_gradients_given_from_outside(mx):
    """A module without a loss of its own, as in a GAN."""

    def run(parallel):
        module = mx.mod.Module(symbol(mx).get_internals()["b_output"], label_names=None)
        if parallel:
            compat.parallelize(module)
        module.bind([("data", (61, 8))])
        module.init_params(arg_params=parameters(mx))
        optimised(module)
        for rows in (61, 2, 64):
            module.forward(mx.io.DataBatch([mx.nd.array(data(rows)[0])], None), is_train=True)
            module.backward([module.get_outputs()[0] ** 2])
            module.update()
        return weights(module)

    check_same(run)


@span
def test_each_context_computes_its_shard_forward_and_backward(mx):
    module = optimised(bound(mx, 61))
    step(mx, module, 61)
    assert [e.outputs[0].shape[0] for e in module._exec_group.execs] == splitting.sizes(61, 3)
    placed = placement(lambda: step(mx, module, 61))
    assert placed == {device: (2, 2) for device in DEVICES}
    assert placement(lambda: step(mx, module, 2)) == {d: (2, 2) for d in DEVICES[1:]}


@pytest.mark.parametrize("rows", [61, 2])
def test_batchnorm_by_numbers(mx, rows):
    """Each shard by its own statistics; one step of the running ones, weighted by shard size."""
    net = mx.sym.BatchNorm(mx.sym.var("data"), momentum=0.75, name="norm")
    module = mx.mod.Module(
        mx.sym.LinearRegressionOutput(net, name="lin"), label_names=["lin_label"]
    )
    compat.parallelize(module)
    module.bind([("data", (rows, 8))], [("lin_label", (rows, 8))])
    module.init_params()
    inputs = data(rows)[0] * 3 + 1
    module.forward_backward(mx.io.DataBatch([mx.nd.array(inputs)], [mx.nd.array(inputs)]))
    group = module._exec_group
    for name, expected in zip(("mean", "var"), running_statistics(inputs)):
        first, *others = group.aux_arrays[group.aux_names.index("norm_moving_" + name)]
        np.testing.assert_allclose(first.asnumpy(), expected, rtol=1e-4, atol=1e-6)
        assert all((array.asnumpy() == first.asnumpy()).all() for array in others)


@span
def test_saves_and_loads(mx, tmp_path):
    module = optimised(bound(mx, 61))  # with momentum; MXNet does not save Adam's step count
    step(mx, module, 61)
    prefix = str(tmp_path / "module")
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    step(mx, module, 61)
    loaded = mx.mod.Module.load(prefix, 1, load_optimizer_states=True)
    compat.parallelize(loaded)
    loaded.bind([("data", (61, 8))], [("softmax_label", (61,))])
    optimised(loaded)
    step(mx, loaded, 61)
    assert difference(weights(module), weights(loaded)) < 1e-5
    plain = mx.mod.Module.load(prefix, 1)
    plain.bind([("data", (61, 8))], for_training=False)
    assert len(plain._exec_group.execs) == 1


# What cannot be ---------------------------------------------------------------------------------


def test_once_it_is_bound_it_stays_where_it_is(mx):
    module = bound(mx, 61, parallel=False)
    before = dict(vars(module))
    assert refusal(compat.UnsupportedError, compat.parallelize, module) == (
        "This Module is bound to its devices already. Call parallelize() before bind() or fit()."
    )
    assert vars(module) == before
    assert compat.parallelize(module, gpus=1) is module  # it is there


def losses(mx):
    """Symbols that mix rows, each with the operation that does."""
    sym = mx.sym
    plain = symbol(mx).get_internals()["b_output"]
    return {
        "softmax": symbol(mx, normalization="batch"),
        "mean_loss": sym.MakeLoss(sym.mean(plain * plain), name="mean_loss"),
    }


@pytest.mark.parametrize("name", in_span(["softmax", "mean_loss"], ["softmax"]))
def test_modules_with_cross_batch_operations_run_unsplit(mx, name):
    """With one context's numbers, for batches of any size, and a warning."""
    loss = losses(mx)[name]
    labels = ["softmax_label"] if "softmax_label" in loss.list_arguments() else None
    results = []
    for parallel in (False, True):
        module = mx.mod.Module(loss, label_names=labels)
        if parallel:
            compat.parallelize(module)
        with told() as texts:
            module.bind([("data", (61, 8))], labels and [("softmax_label", (61,))])
        module.init_params(arg_params=parameters(mx))
        optimised(module)
        found = []
        for rows in (61, 2, 13):
            inputs, targets = [mx.nd.array(array) for array in data(rows)]
            fed = mx.io.DataBatch([inputs / 10], [targets] if labels else None)
            module.forward_backward(fed)
            module.update()
            found.append(module.get_outputs()[0].asnumpy())
        results.append(found + weights(module))
    assert difference(*results) < 1e-5
    assert texts == [
        "The operation {} of 'Module' needs the whole batch, but each device sees only its shard. "
        "The Module runs unsplit on cpu(0).".format(name)
    ]
    before = {each.device: each.rows for each in compat.report().devices}
    module.forward(fed)
    done = [each.rows - before[each.device] for each in compat.report().devices]
    assert done == [13, 0, 0]


def custom(mx, name, backward):
    """Return a custom operation for symbols: its input, and a function of upstream gradients."""

    class Own(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], backward(out_grad[0]))

    @mx.operator.register(name)
    class Properties(mx.operator.CustomOpProp):
        def create_operator(self, context, shapes, types):
            return Own()

    return lambda x, **options: mx.sym.Custom(x, op_type=name, **options)


@span
@pytest.mark.parametrize("mixes", [False, True])
def test_operations_without_a_rule_are_tried(mx, mixes):
    """Before there is a batch, with random numbers."""
    net, inputs = mx.sym.L2Normalization(mx.sym.var("data")), data(13)[0]
    expected = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
    if mixes:
        if not hasattr(mx.sym.contrib, "foreach"):
            pytest.skip("MXNet has loops since 1.3")
        net, _ = mx.sym.contrib.foreach(
            lambda row, total: (row + total, row + total), mx.sym.var("data"), mx.sym.zeros((8,))
        )
        expected = np.cumsum(inputs, axis=0)
    module = compat.parallelize(mx.mod.Module(net, label_names=None))
    with told() as texts:
        module.bind([("data", (13, 8))], for_training=False)
    module.init_params()
    module.forward(mx.io.DataBatch([mx.nd.array(inputs)], None))
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), expected, atol=1e-5)
    assert len(texts) == mixes
    assert len(module._exec_group.execs) == (1 if mixes else 3)


@pytest.mark.parametrize("of", ["rows", "weights"])
def test_gradients_of_ones_own_run_unsplit(mx, of):
    own = custom(mx, "compat_module_" + of, lambda gradient: gradient / mx.nd.norm(gradient))

    def run(parallel):
        if of == "rows":
            x = own(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="a"))
        else:
            weight = own(mx.sym.var("a_weight", shape=(4, 8), dtype="float32"))
            x = mx.sym.FullyConnected(mx.sym.var("data"), weight, num_hidden=4, name="a")
        module = mx.mod.Module(mx.sym.SoftmaxOutput(x, name="softmax"))
        with told() as texts:
            if parallel:
                compat.parallelize(module)
            module.bind([("data", (13, 8))], [("softmax_label", (13,))])
            start = np.random.RandomState(0).normal(size=(4, 8)) * 0.3
            module.init_params(arg_params={"a_weight": mx.nd.array(start)}, allow_missing=True)
            optimised(module)
            outputs = [step(mx, module, 13) for _ in range(3)]
        assert len(texts) == parallel
        assert all("has a custom gradient that needs" in text for text in texts)
        return outputs + weights(module)

    check_same(run)


def test_another_module_shares_the_executors_of_one_that_ran_on_few_rows(mx):
    net, outputs, modules = (
        mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="a"),
        [],
        [],
    )
    for options in ({}, {"shared_module": 0}):
        options = {name: modules[number] for name, number in options.items()}
        module = compat.parallelize(mx.mod.Module(net, label_names=None))
        module.bind([("data", (13, 8))], for_training=False, **options)
        if not modules:
            module.init_params(mx.init.Uniform())
        modules.append(module)
        for rows in (13, 2):
            module.forward(mx.io.DataBatch([mx.nd.array(data(rows)[0])], None))
            outputs.append(module.get_outputs()[0].asnumpy())
    np.testing.assert_allclose(outputs[0], outputs[2], atol=1e-6)
    np.testing.assert_allclose(outputs[1], outputs[3], atol=1e-6)
    assert len(module._exec_group.execs) == 3  # also those without rows


def test_a_bind_that_the_module_has_of_its_own_is_called_and_kept(mx):
    net, calls = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="a"), []
    module = mx.mod.Module(net, label_names=None)
    bind = module.bind

    def own(*args, **kwargs):
        calls.append(args)
        return bind(*args, **kwargs)

    module.bind = own
    compat.parallelize(module)
    assert compat.parallelize(module, gpus=1).bind is own
    compat.parallelize(module).bind([("data", (13, 8))], for_training=False)
    assert len(calls) == 1 and len(module._exec_group.execs) == 3


def test_rows_in_another_dimension(mx):
    """``layout`` says where: time first, and no operation across rows for that."""
    shapes = [mx.io.DataDesc("data", (5, 13, 4), layout="TNC")]
    net = mx.sym.softmax(mx.sym.square(mx.sym.var("data")), axis=0)
    net._set_attr(__layout__="TNC")
    inputs = np.random.RandomState(0).normal(size=(5, 13, 4))

    def run(parallel):
        module = mx.mod.Module(net, label_names=None)
        if parallel:
            compat.parallelize(module)
        module.bind(shapes, for_training=False)
        module.init_params()
        module.forward(mx.io.DataBatch([mx.nd.array(inputs)], None))
        assert module.get_outputs()[0].shape == (5, 13, 4)
        return [module.get_outputs()[0].asnumpy()]

    check_same(run, 1e-6)


@span
def test_bound_for_inference_it_takes_new_weights(mx):
    """Fused operations of oneDNN keep those of their first batch, on the first context."""
    sym = mx.sym
    net = sym.Activation(
        sym.Convolution(sym.var("data"), num_filter=3, kernel=(2, 2), name="c"), act_type="relu"
    )
    module = compat.parallelize(mx.mod.Module(net, label_names=None))
    inputs = mx.nd.array(np.random.RandomState(0).normal(size=(13, 2, 5, 5)))
    module.bind([("data", inputs.shape)], for_training=False)
    assert not module.for_training
    kernel = np.random.RandomState(1).normal(size=(3, 2, 2, 2))
    for factor, rows in ((1, 13), (-2, 13), (3, 7), (4, 7)):
        weight = mx.nd.array(factor * kernel)
        module.set_params({"c_weight": weight, "c_bias": mx.nd.zeros(3)}, {})
        module.forward(mx.io.DataBatch([inputs[:rows]], None))
        expected = mx.nd.Convolution(
            inputs[:rows], weight, mx.nd.zeros(3), kernel=(2, 2), num_filter=3
        ).relu()
        outputs = module.get_outputs()[0].asnumpy()
        np.testing.assert_allclose(outputs, expected.asnumpy(), atol=1e-5)


def test_other_modules_are_refused(mx):
    module = mx.mod.BucketingModule(lambda key: (symbol(mx), ["data"], ["softmax_label"]), 1)
    assert registry.load("mxnet").is_native(module)
    assert refusal(compat.UnsupportedError, compat.parallelize, module) == (
        "parallelize() runs an mx.mod.Module on several devices, not a {}. Give "
        "context=[...] to the {} itself.".format("BucketingModule", "BucketingModule")
    )


@pytest.fixture
def chained(monkeypatch):
    """Have three contexts count as many."""
    from compat._backends.mxnet import gradient_store

    monkeypatch.setattr(gradient_store, "_FEW", 2)


@pytest.mark.parametrize("updates_on", ["1", "0"])
def test_gradients_are_summed_along_the_chain(mx, chained, updates_on, monkeypatch, tmp_path):
    """In a store of "device", on which the optimizer runs or not."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", updates_on)
    modules = [optimised(bound(mx, 61, on), "adam", "device") for on in (False, True)]
    assert type(modules[1]._kvstore).__name__ == "ChainedStore"
    assert modules[1]._update_on_kvstore == (updates_on == "1")
    for rows in (61, 2, 1, 13):
        outputs = [step(mx, module, rows) for module in modules]
        assert difference(outputs[:1], outputs[1:]) < 1e-5
    assert difference(*[weights(module) for module in modules]) < 1e-5
    for arrays in modules[1]._exec_group.param_arrays:
        assert all((array.asnumpy() == arrays[0].asnumpy()).all() for array in arrays)
    modules[1].save_optimizer_states(str(tmp_path / "states"))
    modules[1].load_optimizer_states(str(tmp_path / "states"))
    outputs = [step(mx, module, 61) for module in modules]
    outputs = [step(mx, module, 61) for module in modules]
    assert difference(outputs[:1], outputs[1:]) < 1e-5


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_row_sparse_gradients_of_a_module(mx, chained, kvstore):
    def run(parallel):
        x = mx.sym.Embedding(
            mx.sym.var("data"),
            mx.sym.var("words_weight"),
            input_dim=9,
            output_dim=4,
            sparse_grad=True,
        )
        x = mx.sym.FullyConnected(x, num_hidden=4, name="dense")
        module = mx.mod.Module(mx.sym.SoftmaxOutput(x, name="softmax"))
        if parallel:
            compat.parallelize(module)
        module.bind([("data", (16, 8))], [("softmax_label", (16,))])
        module.init_params(mx.init.Constant(0.1))
        module.init_optimizer(kvstore, optimizer_params={"learning_rate": 0.1})
        words, labels = np.arange(16 * 8).reshape(16, 8) % 5, np.arange(16) % 4
        for rows in (16, 13, 2):
            arrays = [[mx.nd.array(each[:rows])] for each in (words, labels)]
            module.forward_backward(mx.io.DataBatch(*arrays))
            module.update()
        return weights(module)

    check_same(run, 1e-6)


def test_other_stores_are_left_as_they_are(mx, monkeypatch):
    from compat._backends.mxnet import gradient_store

    store_for = gradient_store.store_for
    module = compat.parallelize(mx.mod.Module(symbol(mx)))
    assert store_for(module, "device") == "device"  # on three contexts
    monkeypatch.setattr(gradient_store, "_FEW", 2)
    assert store_for(module, "device").type == "device"
    mine = mx.kv.create("device")
    assert [store_for(module, kvstore) for kvstore in ("local", mine)] == ["local", mine]
    compressed = mx.mod.Module(symbol(mx), compression_params={"type": "2bit"})
    assert store_for(compat.parallelize(compressed), "device") == "device"
    monkeypatch.setenv("MXNET_KVSTORE_USETREE", "1")
    assert store_for(module, "device") == "device"
