"""Gluon blocks on several contexts: their first calls, compared with one context."""

import functools
import warnings

import pytest

import compat
from compat import _verification
from compat._backends.mxnet import merging
from compat._configuration import registry
from compat._rows import splitting
from compat._runtime.process import process
from compat.testing import in_span, span

from . import gluon_models
from .gluon_models import (
    DEVICES,
    block_of,
    data,
    dense,
    difference,
    initialise,
    recurrent,
    train,
    trainer,
    weights,
)

mx = gluon_models.mx  # the fixture
pytestmark = pytest.mark.row("Gluon Block")


def verified(net, steps=1):
    """Have the block's first calls verified, and return the record of what was."""
    verification = _verification.Verification(net.name, DEVICES, steps)
    registry.load("mxnet").verify(net, verification)
    return verification.record


@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}])
@pytest.mark.parametrize("build", in_span([dense, recurrent], [dense]))
def test_first_calls_are_verified_and_change_nothing(mx, monkeypatch, build, hybridize):
    """Weights and counted batches, two of three verified, are those of a block not verified."""
    nets, counted = [], []
    for is_verified in (False, True):
        monkeypatch.setattr(process, "batches", {})
        net = compat.parallelize(initialise(mx, build(mx)))
        if hybridize is not None:
            net.hybridize(**hybridize)
        if is_verified:
            record = verified(net, 2)
        steps = trainer(mx, net)
        train(mx, net, steps, (61, 2, 13, 61))
        net(mx.nd.array(data(13)[0]))
        nets.append(weights(net))
        counted.append(process.batches)
    assert counted[0] == counted[1] and sum(counted[0].values()) == 5
    assert record.steps == {"train": 2, "evaluate": 0, "predict": 1}
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    # Each call: an output, the parameters and their gradients.
    assert record.compared == 2 * (1 + 2 * len(parameters)) + 1 + len(parameters)
    assert not record.incomparable and record.failure is None
    assert 0 < record.largest[0] < 1e-3
    assert difference(*nets) < 1e-6


class Counted:
    """Built by ``build``: a block that sets a counter, a Python attribute and has a part unused."""

    @staticmethod
    def build(mx):
        class Block(mx.gluon.Block):
            def __init__(self):
                super().__init__()
                self.calls = 0
                with self.name_scope():
                    self.weight = self.params.get("weight", shape=(8, 4))
                    self.unused = self.params.get("unused", shape=(2,))
                    self.steps = self.params.get("steps", shape=(1,), init="zeros", grad_req="null")

            def forward(self, x):
                self.calls += 1
                with mx.autograd.pause():
                    steps = self.steps.data(x.context) + 1
                    self.steps.set_data(steps)
                return mx.nd.dot(x, self.weight.data(x.context)), mx.nd.argmax(x, axis=1)

        return Block()


def test_states_inputs_gradients_and_parts_unused(mx):
    """What autograd recorded before the block is left alone, and gradients that add up."""
    found = []
    for is_verified in (False, True):
        net = Counted.build(mx)
        net.initialize()
        net.weight.set_data(mx.nd.array(data(8)[0][:, :4]))
        compat.parallelize(net)
        net.weight.grad_req = "add"
        if is_verified:
            record = verified(net)
        inputs = mx.nd.array(data(14)[0])
        inputs.attach_grad("add")
        for _ in range(2):
            with mx.autograd.record():
                before = inputs * inputs  # recorded, and to be gone through again
                outputs, _ = net(before)
                loss = (outputs**2).sum() + before.sum()
            loss.backward()
        gradients = [array.asnumpy() for array in net.weight.list_grad()]
        found.append([inputs.grad.asnumpy(), net.steps.data(mx.cpu(0)).asnumpy()] + gradients)
        calls = net.calls
    assert record.steps["train"] == 1 and not record.incomparable
    assert difference(*found) < 1e-4
    assert found[1][1] == [2]
    assert calls == 2  # in two steps: what replicas and verification count is one call


def centred(mx):
    """Each row less the mean of all, but not of the few rows that a block is tried with."""

    def function(F, x):
        return x - x.mean(axis=0, keepdims=True) if len(x) > 3 else x

    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(16), block_of(mx, function, hybrid=False), mx.gluon.nn.Dense(4))
    return net


@span
@pytest.mark.parametrize("recording", [True, False])
def test_operation_across_rows_is_found(mx, recording):
    net = compat.parallelize(initialise(mx, centred(mx)))
    start = weights(net)
    record = verified(net)
    inputs = mx.nd.array(data(14)[0])
    with pytest.raises(compat.ResultsDifferError, match="output 1.*several rows") as caught:
        if recording:
            train(mx, net, trainer(mx, net), (14,))
        else:
            net(inputs)
    assert record.failure == str(caught.value)
    assert difference(start, weights(net)) == 0
    registry.load("mxnet").verify(net, None)
    train(mx, net, trainer(mx, net), (14,))  # it can be trained on
    assert difference(start, weights(net)) > 1e-3


def test_wrong_gradient_is_found(mx, monkeypatch):
    """Of a replica that got other rows than it has to keep; and of one whose gradient is lost."""
    net = compat.parallelize(initialise(mx, dense(mx)))
    verified(net)
    bounds = splitting.run_bounds
    with monkeypatch.context() as patch:
        patch.setattr(splitting, "run_bounds", lambda rows, n, i: bounds(rows, n, min(i, 1)))
        with pytest.raises(compat.ResultsDifferError, match="output 1"):
            train(mx, net, trainer(mx, net), (12,))
    verified(net)
    merged = merging.merged

    def without_gradient(placements, results, sizes, context):
        lost = [mx.nd.BlockGrad(each) if i == 1 else each for i, each in enumerate(results)]
        return merged(placements, lost, sizes, context)

    monkeypatch.setattr(merging, "merged", without_gradient)
    with pytest.raises(compat.ResultsDifferError, match="gradient of dense"):
        train(mx, net, trainer(mx, net), (12,))


@span
@pytest.mark.parametrize("recording", [False, True])
def test_randomness_and_batch_normalization_are_no_alarm(mx, monkeypatch, recording):
    """They are compared in inference, and running statistics take one step as ever.

    Also where it is recorded what ran where, as ``compat test`` does, by one more step.
    """
    monkeypatch.setattr(process, "records_operations", recording)
    nn = mx.gluon.nn
    normalizes = "block '{}' normalizes each device's rows by their own statistics"
    dropout = functools.partial(nn.Dropout, 0.5)
    for layer, why in ((dropout, "block '{1}' draws random numbers"), (nn.BatchNorm, normalizes)):
        nets = []
        for is_verified in (False, True):
            net = nn.HybridSequential()
            net.add(nn.Dense(16), layer(), nn.Dense(4))
            compat.parallelize(initialise(mx, net))
            if is_verified:
                record = verified(net)
            with warnings.catch_warnings():
                warnings.simplefilter("error", compat.CompatWarning)
                with mx.autograd.record():
                    loss = (net(mx.nd.array(data(16)[0])) ** 2).sum()
                loss.backward()  # a trainer's first step would make the contexts' states equal
            nets.append(weights(net))
        assert record.steps["train"] == 0 and record.compared == 0
        assert record.uncompared["train"]["reason"] == why.format(net.name, net[1].name)
        assert record.uncompared["train"]["instead"] == 1
        if why == normalizes:
            assert difference(*nets) < 1e-5


def test_parallelize_verifies_as_configured(mx, monkeypatch):
    """And no more on one device; the trial has made all parameters by then."""
    monkeypatch.setattr(process.configuration.settings, "verify", 1)
    net = compat.parallelize(centred(mx))
    net.initialize()
    inputs = mx.nd.array(data(14)[0])
    with pytest.raises(compat.ResultsDifferError):
        net(inputs)
    net = compat.parallelize(initialise(mx, centred(mx)))
    compat.parallelize(net, gpus=1)
    net(inputs)
    monkeypatch.setattr(process.configuration.settings, "verify", 0)
    compat.parallelize(net)
    net(inputs)


def test_parameters_of_training_alone_are_verified(mx):
    class Block(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense, self.trained = mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(4)

        def forward(self, x):
            x = self.dense(x)
            return self.trained(x) if mx.autograd.is_training() else x

    net = Block()
    net.initialize()
    compat.parallelize(net)
    record = verified(net)
    with mx.autograd.record():
        net(mx.nd.array(data(13)[0]))
    assert record.steps["train"] == 1
    assert record.compared == 1 + 2 * 4  # the output, four parameters and their gradients
