"""Gluon blocks that tests train on several contexts, and how they train and compare them."""

import numpy as np
import pytest

import compat
from compat._rows import splitting

from ..messages import refusal, told

BATCHES = (64, 61, 2, 1, 64, 13)

DEVICES = ["cpu(0)", "cpu(1)", "cpu(2)"]


@pytest.fixture(scope="module")
def mx():
    compat.configure_gpu(simulate=3)
    import mxnet

    return mxnet


def data(rows):
    random = np.random.RandomState(rows)
    return random.normal(size=(rows, 8)).astype("float32"), random.randint(4, size=rows)


def dense(mx, hybrid=True):
    nn = mx.gluon.nn
    net = (nn.HybridSequential if hybrid else nn.Sequential)()
    net.add(nn.Dense(16, activation="relu"), nn.Dense(4))
    return net


def convolutional(mx, **options):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.HybridLambda(lambda F, x: F.reshape(x, shape=(-1, 2, 2, 2))))
    net.add(nn.Conv2D(4, 2, activation="relu"), nn.Dense(4))
    return net


def recurrent(mx):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.HybridLambda(lambda F, x: F.reshape(x, shape=(-1, 4, 2))))
    net.add(mx.gluon.rnn.LSTM(5, layout="NTC", input_size=2), nn.Dense(4))
    return net


def check_refusal(mx):
    """Skip a test where MXNet is older than 1.3, and refuses blocks on several devices."""
    if not hasattr(mx.gluon.Block, "register_forward_hook"):
        assert_refused(mx)
        pytest.skip("blocks run on several devices since MXNet 1.3")


def assert_refused(mx):
    net = dense(mx)
    net.initialize()
    assert refusal(compat.UnsupportedError, compat.parallelize, net) == (
        "mxnet cannot run a Gluon block on cpu(0), cpu(1), cpu(2): before MXNet 1.3 a parameter "
        "does not know its trainer. Install MXNet 1.3 or newer, or leave the block where it is."
    )
    assert compat.parallelize(net, gpus=1) is net


def initialise(mx, net):
    """Known weights, whatever the contexts; the shapes are known from a first batch."""
    check_refusal(mx)
    net.initialize()
    net(mx.nd.array(data(4)[0]))
    for seed, parameter in enumerate(net.collect_params().values()):
        if parameter._differentiable:
            values = np.random.RandomState(seed).normal(size=parameter.shape) * 0.3
            parameter.set_data(mx.nd.array(values))
    return net


def trainer(mx, net, name="sgd", **options):
    settings = {
        "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
        "adam": {"learning_rate": 0.01},
        "adagrad": {"learning_rate": 0.1},
    }[name]
    return mx.gluon.Trainer(net.collect_params(), name, settings, **options)


def train(mx, net, steps, batches=BATCHES):
    """Train by the loop of Gluon's documentation, on one context."""
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    first = every_context(net)[0]
    for rows in batches:
        inputs, labels = [mx.nd.array(array, ctx=first) for array in data(rows)]
        with mx.autograd.record():
            losses = loss(net(inputs), labels)
        losses.backward()
        steps.step(rows)
    return net


def weights(net, context=None):
    return [
        (p.list_data()[0] if context is None else p.data(context)).asnumpy()
        for p in net.collect_params().values()
    ]


def difference(first, second):
    assert len(first) == len(second)
    return max(np.abs(a - b).max() for a, b in zip(first, second))


def check_same(run, tolerance=1e-5):
    """Check that ``run(parallel)`` gives the same arrays on one context and on several."""
    assert difference(run(False), run(True)) < tolerance


class Unfollowed(list):
    """What blocks note here is what each replica does: it is not put together."""

    __module__ = "mxnet.tests"


def shards_of(inputs):
    """Return the rows that each replica has, if any."""
    parts = [inputs[slice(*splitting.bounds(len(inputs), 3, i))] for i in range(3)]
    return [part for part in parts if len(part)]


def running_statistics(inputs):
    """Return mean and variance after one step with momentum 0.75: of shards, weighted by size."""
    shards = shards_of(inputs)
    mean, variance = [
        sum(statistic(shard, axis=0) * len(shard) for shard in shards) / len(inputs)
        for statistic in (np.mean, np.var)
    ]
    return 0.25 * mean, 0.75 + 0.25 * variance


def every_context(net):
    return list(net.collect_params().values())[0].list_ctx()


def contexts(net):
    return [[str(c) for c in p.list_ctx()] for p in net.collect_params().values()]


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


MIXED = "The operation {} of {!r} needs the whole batch, but each device sees only its shard."

TRIED = (
    "Model {!r} gives different results for three samples at once than for two of them and the "
    "third, but each device sees only its shard."
)

UNKNOWN = (
    "Model {!r} may need the whole batch, but each device sees only its shard: compat has no rule "
    "for it, and cannot try it."
)

WHOLE = " The block runs unsplit on cpu(0)."


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
        """Train on batches of several sizes, predict, and return the outputs and weights."""
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


def whole(mx, block, *calls):
    """Return the block's results for the calls, equal to those of one context; and the warnings."""
    expected = [block(*args).asnumpy() for args in calls]
    compat.parallelize(block)
    with told() as texts:
        found = [block(*args).asnumpy() for args in calls]
    assert difference(expected, found) < 1e-5
    return texts
