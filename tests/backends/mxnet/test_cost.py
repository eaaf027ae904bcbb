"""MXNet: how many operations and copies a training step on several contexts takes, as recorded."""

import collections

import pytest

import compat
from compat._backends.mxnet.profiler import operations
from compat.testing import DEVICES, keras_under_test

from .. import shared_parts

ROWS = 12
COPY = "CopyCPU2CPU"


@pytest.fixture(scope="module", autouse=True)
def devices():
    compat.configure_gpu(simulate=DEVICES)


def counted(step):
    """How often each operation runs in ``step()``, once it is known; freeing memory is none."""
    step()  # is watched
    step()
    found = collections.Counter()
    for (_, name), count in operations(step).items():
        found[name] += count
    del found["DeleteVariable"]
    return found


def keras_step(parallel):
    step, model = shared_parts.keras_step(keras_under_test(), ROWS, parallel)
    return step, len(model.weights)


def gluon_step(parallel):
    import mxnet as mx

    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3, activation="relu"), nn.BatchNorm(), nn.Flatten())
    net.add(nn.Dense(4, activation="relu"), nn.Dense(1))
    net.initialize()
    inputs = mx.nd.ones((ROWS, 2, 6, 6))
    net(inputs)
    if parallel:
        net = compat.parallelize(net)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss = mx.gluon.loss.L2Loss()

    def step():
        with mx.autograd.record():
            losses = loss(net(inputs), inputs[:, 0, 0, :1])
        losses.backward()
        trainer.step(ROWS)

    return step, len(list(net.collect_params()))


@pytest.mark.parametrize("build", [keras_step, gluon_step])
def test_a_step_takes_no_more_operations_than_each_context_has(build):
    (alone, weights), (step, _) = build(False), build(True)
    one, several = counted(alone), counted(step)
    computed = sum(several.values()) - several[COPY]
    # For each weight the gradients are added up, and a running statistic becomes a mean.
    assert computed <= DEVICES * (sum(one.values()) - one[COPY]) + 2 * weights
    # A weight goes to each context, and its gradient back; so do the rows and what comes out.
    assert several[COPY] <= DEVICES * (one[COPY] + 2 * weights + 2)


def test_a_prediction_copies_the_rows_alone():
    """Weights only where they have changed, by whatever means."""
    import mxnet as mx

    net, inputs = mx.gluon.nn.Dense(3, in_units=2), mx.nd.ones((ROWS, 2))
    net.initialize()
    compat.parallelize(net)
    assert counted(lambda: net(inputs))[COPY] <= 2 * (DEVICES - 1)  # and what comes out
    before = net(inputs).asnumpy()
    view = net.bias.data()[1:]  # of the same memory
    view += 1
    assert (net(inputs).asnumpy() - before).round(5).tolist() == [[0, 1, 1]] * ROWS
