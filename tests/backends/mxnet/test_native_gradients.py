"""Gradients of Gluon blocks on several contexts, as scripts read and change them between the calls.

And scripts that split their batches by themselves.
"""

import numpy as np
import pytest

import compat
from compat.testing import in_span, span

from ..messages import told
from .gluon_models import check_refusal, check_same, data, dense, initialise, trainer, weights
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")


def parameters(net):
    return list(net.collect_params().values())


def backward(mx, net, rows):
    """Run a backward pass of a loss that is a sum over the rows."""
    with mx.autograd.record():
        loss = (net(mx.nd.array(data(rows)[0])) ** 2).sum()
    loss.backward()
    return loss


def clip(mx, net, steps):
    for rows in (13, 61, 2, 1):
        backward(mx, net, rows)
        norm = mx.gluon.utils.clip_global_norm([p.grad(mx.cpu(0)) for p in parameters(net)], 1.0)
        yield np.array(float(norm))
        steps.step(rows)


def read(mx, net, steps):
    for rows in (13, 2):
        backward(mx, net, rows)
        for p in parameters(net):
            yield from (p.grad().asnumpy(), p.list_grad()[0].asnumpy(), p.data().grad.asnumpy())
        steps.step(rows)


def change(mx, net, steps):
    for rows in (13, 2):
        backward(mx, net, rows)
        for p in parameters(net):
            p.grad()[:] = p.grad().clip(-0.5, 0.5)
            gradient = p.data().grad
            gradient *= 0.5
        steps.step(rows)
    return ()


def accumulate(mx, net, steps):
    """Gradients of three batches for each update; the script makes them 0 by itself."""
    for p in parameters(net):
        p.grad_req = "add"
    for _ in range(2):
        for rows in (13, 1, 5):
            backward(mx, net, rows)
        yield parameters(net)[0].grad().asnumpy()
        steps.step(19)
        for p in parameters(net):
            p.zero_grad()


def reduce_and_update(mx, net, steps):
    for rows in (13, 2):
        backward(mx, net, rows)
        steps.allreduce_grads()
        for p in parameters(net):
            p.grad()[:] = p.grad().sign()
            yield p.grad().asnumpy()
        steps.update(rows)


def by_autograd(mx, net, steps):
    """Update parameters in the script by gradients of autograd, and yield these."""
    for rows in (13, 2):
        with mx.autograd.record():
            loss = (net(mx.nd.array(data(rows)[0])) ** 2).sum()
        held = [p.data() for p in parameters(net)]
        gradients = mx.autograd.grad(loss, held)
        for array, gradient in zip(held, gradients):
            array -= 0.01 * gradient
            yield gradient.asnumpy()


def two_losses(mx, net, steps):
    """One call, and a backward pass of each of two losses of it."""
    for p in parameters(net):
        p.grad_req = "add"
    for rows in (13, 2):
        with mx.autograd.record():
            outputs = net(mx.nd.array(data(rows)[0]))
            losses = [(outputs**2).sum(), outputs.exp().mean()]
        for loss in losses:
            loss.backward(retain_graph=True)
        yield parameters(net)[0].grad().asnumpy()
        steps.step(rows)
        for p in parameters(net):
            p.zero_grad()


LOOPS = [clip, read, change, accumulate, reduce_and_update, by_autograd, two_losses]


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("loop", in_span(LOOPS, [clip]))
def test_gradients_between_backward_and_step_are_those_of_the_batch(mx, loop, hybridize):
    def run(parallel):
        net = initialise(mx, compat.parallelize(dense(mx)) if parallel else dense(mx))
        if hybridize:
            net.hybridize(static_alloc=True, static_shape=True)
        found = list(loop(mx, net, trainer(mx, net)))
        return found + weights(net)

    check_same(run, 2e-4)


@span
def test_two_blocks_with_two_trainers(mx):
    """Adversarial training: gradients of one block come through the other, and are discarded."""

    def run(parallel):
        check_refusal(mx)
        found, nn = [], mx.gluon.nn
        generator, critic = dense(mx), nn.HybridSequential()
        critic.add(nn.Dense(8, activation="tanh"), nn.Dense(1))
        for net, width in ((generator, 8), (critic, 4)):
            if parallel:
                compat.parallelize(net)
            net.initialize()
            net(mx.nd.zeros((2, width)))
            for seed, p in enumerate(parameters(net)):
                p.set_data(mx.nd.array(np.random.RandomState(seed).normal(size=p.shape) * 0.3))
        its, others = trainer(mx, generator, "adam"), trainer(mx, critic)
        for rows in (13, 5, 2):
            noise, _ = data(rows)
            noise, real = mx.nd.array(noise), mx.nd.array(noise[:, :4] * 2)
            with mx.autograd.record():
                fake = generator(noise).detach()
                loss = (critic(fake) - critic(real)).sum()
            loss.backward()
            found.append(parameters(critic)[0].grad().asnumpy())
            for p in parameters(critic):
                p.grad()[:] = p.grad().clip(-1, 1)
            others.step(rows)
            with mx.autograd.record():
                loss = -critic(generator(noise)).sum()
            loss.backward()
            found += [parameters(net)[0].grad().asnumpy() for net in (generator, critic)]
            its.step(rows)
        return found + weights(generator) + weights(critic)

    check_same(run, 1e-4)


def test_gradients_of_an_argument_without_rows_add_up(mx):
    """Also where one row is computed on another context than that of the argument."""

    class Scaled(mx.gluon.Block):
        def forward(self, x, scale):
            return x * scale

    def run(parallel):
        block = compat.parallelize(Scaled()) if parallel else Scaled()
        scale = mx.nd.ones((1, 1, 8))[0]
        scale.attach_grad("add")
        for rows in (5, 1, 1):
            with mx.autograd.record():
                loss = block(mx.nd.array(data(rows)[0]).reshape((rows, 1, 8)), scale).sum()
            loss.backward()
        return [scale.grad.asnumpy()]

    check_same(run)


# Scripts that split by themselves -----------------------------------------------------------------


def split_by_script(mx, net, several, together):
    """Train by the loop of Gluon's documentation, on several contexts."""
    steps = trainer(mx, net)
    for rows in (12, 6):
        inputs, labels = data(rows)
        parts = mx.gluon.utils.split_and_load(mx.nd.array(inputs), several)
        with mx.autograd.record():
            losses = [(net(part) ** 2).sum() for part in parts]
        if together:
            mx.autograd.backward(losses)
        for loss in () if together else losses:
            loss.backward()
        steps.step(rows)
    return [p.list_data()[0].asnumpy() for p in parameters(net)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_script_with_parameters_on_several_contexts_splits_by_itself(mx, together, moment):
    """Its arrays run where they lie."""
    several, found = [mx.cpu(0), mx.cpu(1)], []
    for parallel in (False, True):
        net = dense(mx)
        if parallel and moment == "before":
            compat.parallelize(net)
        net.initialize(ctx=several)
        with told() as texts:
            for part in several:
                net(mx.nd.array(data(4)[0], ctx=part))
            for seed, p in enumerate(parameters(net)):
                p.set_data(mx.nd.array(np.random.RandomState(seed).normal(size=p.shape) * 0.3))
            if parallel and moment == "after":
                compat.parallelize(net)
            found.append(split_by_script(mx, net, several, together))
    assert texts == [
        "Model {!r} has its parameters on several contexts: the script splits its batches itself. "
        "Each array runs unsplit on cpu(0), cpu(1).".format(net.name)
    ]
    for plain, parallel in zip(*found):
        np.testing.assert_array_equal(plain, parallel)


def test_parts_of_a_batch_on_other_contexts_are_refused(mx):
    """The gradients of one part would overwrite those of another."""
    net = initialise(mx, compat.parallelize(dense(mx)))
    with pytest.raises(compat.UnsupportedError) as error:
        split_by_script(mx, net, [mx.cpu(0), mx.cpu(1)], False)
    assert str(error.value) == (
        "The block {!r} was given an array on cpu(1), but its parameters are on cpu(0): "
        "parallelize() splits each batch by itself. Give the block whole batches on cpu(0), "
        "without gluon.utils.split_and_load(); or initialize it on all contexts of the script, "
        "which then runs as if it were not parallelized.".format(net.name)
    )
