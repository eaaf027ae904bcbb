"""First calls of eight threads at once, as far as MXNet may be used by several threads.

Its documentation ("Multi Threaded Inference API"): its engine may, executors and what Gluon has
compiled may not. With compat calls of one model wait for one another.
"""

import copy
import threading

import numpy as np
import pytest

import compat
from compat.testing import CASES, keras_under_test, span

from ..messages import told
from .gluon_models import data, dense, difference, initialise
from .gluon_models import mx as mx  # the fixture
from .test_side_effects import block_of, plain_forward

THREADS = 8


def at_once(action):
    """Return an action's results for several numbers, in threads that begin at once."""
    barrier, found = threading.Barrier(THREADS), [None] * THREADS

    def run(number):
        barrier.wait()
        found[number] = action(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@span
@pytest.mark.parametrize("hybridize", [False, True])
def test_first_calls_of_a_block(mx, hybridize):
    plain, net = initialise(mx, dense(mx)), initialise(mx, dense(mx))
    compat.parallelize(net)
    if hybridize:
        net.hybridize()
    inputs = [mx.nd.array(data(11 + number)[0]) for number in range(THREADS)]
    expected = [plain(each).asnumpy() for each in inputs]

    def call(number):
        if number % 2:
            with mx.autograd.record():
                loss = net(inputs[number])
            return loss.asnumpy()
        return net(inputs[number]).asnumpy()

    with told() as texts:
        found = at_once(call)
    assert texts == []
    assert difference(expected, found) < 1e-5


def test_first_calls_of_blocks_that_are_tried(mx):
    """Of eight blocks: their trials replace something of MXNet's. What they note is right."""

    def forward(self, x):
        y = plain_forward(self, x)
        self.seen.append(y.detach())
        self.log["n"] += len(x)
        self.calls += 1
        return y

    def build():
        return block_of(mx, forward, seen=list, log=lambda: {"n": 0}, calls=3)

    nets = [compat.parallelize(build()) for _ in range(THREADS)]
    inputs = mx.nd.array(data(7)[0])
    for net in nets:
        net.initialize()
    with told() as texts:
        at_once(lambda number: nets[number](inputs).asnumpy())
    assert texts == []
    assert [(net.log["n"], net.calls, len(net.seen)) for net in nets] == [(7, 4, 1)] * THREADS


def test_first_predictions_of_a_keras_model(mx):
    keras = keras_under_test()
    model = CASES["dense"].build(keras)
    inputs, _ = CASES["dense"].data(16)
    expected = model.predict(inputs)
    compat.parallelize(model)
    model._make_predict_function()
    for found in at_once(lambda number: model.predict(inputs)):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)


def test_a_copy_of_a_block_has_a_lock_of_its_own(mx):
    net = compat.parallelize(initialise(mx, dense(mx)))
    lock = net._compat_replicas._calling
    with lock:
        for other in (copy.copy(lock), copy.deepcopy(lock)):

            def entered(number, other=other):
                with other:
                    return number

            assert at_once(entered) == list(range(THREADS))
