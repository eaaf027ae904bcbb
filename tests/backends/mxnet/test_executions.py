"""MXNet: which contexts executed operations is checked, whatever stands in place of ``forward``."""

import pytest

import compat
from compat._backends.mxnet import executions
from compat._runtime import patching
from compat._runtime.process import process
from compat._runtime.unsplit_models import UnsplitModels

from .. import hooks
from ..messages import refusal, told
from . import test_module
from .gluon_models import DEVICES, data, dense, initialise, train, trainer
from .gluon_models import mx as mx  # the fixture
from .test_side_effects import Hook, Momentum, run

NOT_REACHED = (
    "In the first {} of model {!r} (forward()) no batch was split over cpu(0), cpu(1), cpu(2). {} "
    "Another library has replaced it, or this version of the framework takes another way: call "
    "parallelize() after such libraries have changed the model, and report it with the output of "
    "`python -m compat env` if there is none."
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Keep the problems found here out of the reports of other tests."""
    for name, empty in (("unused", {}), ("idle_devices", set()), ("unsplit", UnsplitModels())):
        monkeypatch.setattr(process, name, empty)


def fitted(mx, parallel=True, kvstore="local", **options):
    """Return a module that was trained, scored, and has predicted."""
    inputs, labels = data(11)
    module = mx.mod.Module(test_module.symbol(mx, **options))
    if parallel:
        compat.parallelize(module)
    batches = mx.io.NDArrayIter(inputs, labels, 4, label_name="softmax_label")
    module.fit(batches, num_epoch=1, kvstore=kvstore)
    module.score(batches, "acc")
    module.predict(batches)
    return module


@pytest.mark.parametrize("hybridize", [False, True])
def test_operations_are_counted_by_the_contexts_of_their_results(mx, hybridize):
    net = compat.parallelize(initialise(mx, dense(mx)))
    if hybridize:
        net.hybridize()
    inputs = mx.nd.array(data(11)[0])
    net(inputs)
    with executions.executed(net, DEVICES) as counts:
        net(inputs)
    assert counts["cpu(1)"] == counts["cpu(2)"] == (1 if hybridize else 3)
    before = dict(counts)
    net(inputs)
    assert counts == before and not patching.find(mx.nd.register, "_imperative_invoke")


def test_only_the_first_step_of_executors_is_recorded(mx):
    module = compat.parallelize(mx.mod.Module(test_module.symbol(mx)))
    module.bind([("data", (11, 8))], [("softmax_label", (11,))])
    module.init_params()
    with executions.executed(module, DEVICES) as counts:
        for _ in range(3):
            module.forward(test_module.batch(mx, 11), is_train=False)
            assert set(counts.values()) == {1}
        assert not patching.find(mx.executor.Executor, "forward")


# Hooks left out -----------------------------------------------------------------------------------


# A trial sets these for as long as it runs, and nothing else depends on them.
OF_TRIALS = {"Function.__call__", "mxnet.autograd.c_handle_array"}
OF_TRIALS.update(
    f"{kind}.{name}"
    for kind in ("HybridSequential", "Dense", "Activation", "Own")
    for name in ("_active", "_forward_hooks", "_forward_pre_hooks")
    if (kind, name[:8]) != ("Own", "_forward")  # it is no HybridBlock: it takes no symbols
)


def test_a_hook_of_gluon_that_is_not_reached_is_never_silent(mx):
    """Of blocks that are compiled and that are not, with hooks and parameters that they move."""

    def program():
        for name in ("_check_and_get", "set_data"):  # they are made once
            patch = patching.find(mx.gluon.Parameter, name)
            if patch is not None:
                patch.take_back()
        for hybridize in (False, True):
            net = compat.parallelize(initialise(mx, dense(mx)))
            if hybridize:
                net.hybridize()
            train(mx, net, trainer(mx, net), (11, 4))
            net(mx.nd.array(data(11)[0]))
        for case in (Hook(), Momentum()):
            run(mx, case, True)

    found = hooks.left_out_one_by_one(program, dict.fromkeys(OF_TRIALS, "only a trial's"))
    print("\n".join(f"{name}: {text}" for name, text in found.items()))
    assert {"model.forward", "Parameter._check_and_get", "Parameter.set_data"} <= set(found)
    assert [name for name, text in found.items() if text is None] == []


@pytest.mark.parametrize("kind", ["train", "predict"])
def test_a_forward_that_another_library_replaces_is_told(mx, kind):
    net = compat.parallelize(initialise(mx, dense(mx)))
    net.forward = lambda x: type(net).forward(net, x)
    step = {"train": "training step", "predict": "prediction"}[kind]
    with told() as texts:
        for _ in range(2):
            if kind == "train":
                train(mx, net, trainer(mx, net), (11,))
            else:
                net(mx.nd.array(data(11)[0]))
    unreached = "Something else runs the model in place of what parallelize() set up."
    assert texts == [NOT_REACHED.format(step, net.name, unreached)]


def test_a_call_that_fails_is_followed_by_one_that_is_checked(mx):
    net = compat.parallelize(initialise(mx, dense(mx)))
    with pytest.raises(Exception):  # noqa: B017  # of another kind by version
        net(mx.nd.ones((3, 5)))
    assert not patching.find(mx.nd.register, "_imperative_invoke")
    with told() as texts:
        net(mx.nd.array(data(11)[0]))
    assert texts == [] and not patching.find(mx.nd.register, "_imperative_invoke")
    compat.parallelize(net, gpus=1)
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_a_module_without_a_kvstore_is_refused(mx):
    module = compat.parallelize(mx.mod.Module(test_module.symbol(mx)))
    module.bind([("data", (11, 8))], [("softmax_label", (11,))])
    module.init_params()
    type(module).init_optimizer(module, kvstore=None)
    batch = test_module.batch(mx, 11)
    assert refusal(compat.UnsupportedError, module.forward_backward, batch) == (
        "The optimizer of Module 'softmax' was initialized without a kvstore in a way that "
        "parallelize() does not know, so the gradients of its devices would not be summed. Call "
        "its method init_optimizer()."
    )


def test_a_hook_of_module_that_is_not_reached_is_never_silent(mx):
    found = hooks.left_out_one_by_one(lambda: fitted(mx, kvstore=None), {})
    print("\n".join(f"{name}: {text}" for name, text in found.items()))
    assert {"model.bind", "model.init_optimizer", "Executor.forward"} <= set(found)
    assert [name for name, text in found.items() if text is None] == []
