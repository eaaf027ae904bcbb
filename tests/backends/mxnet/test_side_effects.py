"""What calls of Gluon blocks leave outside of their results: attributes, containers, parameters."""

import numpy as np
import pytest

import compat
from compat.testing import in_span

from ..messages import told
from .gluon_models import check_refusal, data, difference, trainer
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")

ROWS = (7, 7, 2, 7)
COUNTED = {"rows": 0, "last": None}  # a global, which a block changes
WHOLE = " The block runs unsplit on cpu(0)."
MIXED = "The operation that {} of {!r} needs the whole batch, but each device sees only its shard."


def block_of(mx, forward, **attributes):
    """Return a block with two layers, and a ``forward(self, x)``."""

    class Own(mx.gluon.Block):
        def __init__(self):
            super(Own, self).__init__()
            with self.name_scope():
                self.first = mx.gluon.nn.Dense(5, in_units=8, activation="tanh")
                self.second = mx.gluon.nn.Dense(3, in_units=5)
                self.momentum = mx.gluon.nn.Dense(5, in_units=8, activation="tanh")
            for name, value in attributes.items():
                setattr(self, name, value() if callable(value) else value)

    Own.forward = forward
    return Own()


def plain_forward(self, x):
    return self.second(self.first(x))


# Observers ------------------------------------------------------------------------------------


class Case:
    """What is built, trained and read, alike on one context and on several."""

    def build(self, mx):
        return block_of(mx, plain_forward)

    def loss(self, net, outputs):
        return (outputs**2).sum()

    def read(self, net):
        return []


class Hook(Case):
    """A hook of a layer within, the values of which the loss takes."""

    def build(self, mx):
        net, self.found = block_of(mx, plain_forward), {}
        net.first.register_forward_hook(lambda block, x, y: self.found.__setitem__("first", y))
        return net

    def loss(self, net, outputs):
        return (outputs**2).sum() + (self.found["first"] ** 3).sum()

    def read(self, net):
        return [self.found["first"].asnumpy()]


class PreHook(Hook):
    def build(self, mx):
        net, self.found = block_of(mx, plain_forward), {}
        net.second.register_forward_pre_hook(lambda block, x: self.found.__setitem__("first", x[0]))
        return net


class Attribute(Case):
    def build(self, mx):
        def forward(self, x):
            self.hidden = [self.first(x)]
            self.mean = self.hidden[0].mean()
            return self.second(self.hidden[0])

        return block_of(mx, forward)

    def loss(self, net, outputs):
        return (outputs**2).sum() + (net.hidden[0] ** 3).sum() + net.mean

    def read(self, net):
        return [net.hidden[0].asnumpy(), net.mean.asnumpy()]


class Lists(Case):
    """What is noted of all batches."""

    def build(self, mx):
        def forward(self, x):
            y = plain_forward(self, x)
            self.seen.append(y.detach())
            self.log["n"] += len(x)
            self.log.setdefault("sums", []).append(float(y.sum().asscalar()))
            self.calls += 1
            COUNTED["rows"] += x.shape[0]
            COUNTED["last"] = y.detach()
            return y

        COUNTED.update(rows=0, last=None)
        return block_of(mx, forward, seen=list, log=lambda: {"n": 0}, calls=3)

    def read(self, net):
        found = [net.log["n"], net.calls, COUNTED["rows"]] + net.log["sums"]
        arrays = [each.asnumpy() for each in net.seen + [COUNTED["last"]]]
        return [np.array(number) for number in found] + arrays


class Averages(Case):
    """Moving averages and totals of the batch, as attributes."""

    def build(self, mx):
        def forward(self, x):
            hidden = self.first(x)
            self.average = 0.9 * self.average + 0.1 * hidden.mean(axis=0).detach()
            self.total = self.total + hidden.sum(axis=0).detach()
            return self.second(hidden)

        return block_of(mx, forward, average=lambda: mx.nd.ones(5), total=lambda: mx.nd.ones(5))

    def read(self, net):
        return [net.average.asnumpy(), net.total.asnumpy()]


class Closure(Case):
    def build(self, mx):
        calls, last = 0, None

        def forward(self, x):
            nonlocal calls, last
            calls, last = calls + 1, self.first(x)
            return self.second(last)

        self.state = lambda: (calls, last)
        return block_of(mx, forward)

    def read(self, net):
        calls, last = self.state()
        return [np.array(calls), last.asnumpy()]


class InTraining(Case):
    """What is changed in training alone."""

    def build(self, mx):
        def forward(self, x):
            if mx.autograd.is_training():
                self.rows += len(x)
                self.kept = self.first(x)
            return plain_forward(self, x)

        return block_of(mx, forward, rows=0)

    def read(self, net):
        return [np.array(net.rows), net.kept.asnumpy()]


class Momentum(Case):
    """Parameters that a call moves, as momentum encoders do."""

    def moved(self, parameter, value):
        parameter.set_data(value)

    def build(self, mx):
        moved = self.moved

        def forward(self, x):
            with mx.autograd.pause():
                pairs = zip(self.momentum.params.values(), self.first.params.values())
                for ours, its in pairs:
                    moved(ours, ours.data() * 0.5 + its.data() * 0.5)
            return self.second(self.first(x) - self.momentum(x))

        net = block_of(mx, forward)
        net.momentum.collect_params().setattr("grad_req", "null")
        return net


class MomentumOfTrained(Momentum):
    """That are trained, besides."""

    def build(self, mx):
        net = super().build(mx)
        net.momentum.collect_params().setattr("grad_req", "write")
        return net


def run(mx, case, parallel, hybridize=False):
    check_refusal(mx)
    net = case.build(mx)
    if parallel:
        compat.parallelize(net)
    net.initialize()
    for seed, p in enumerate(net.collect_params().values()):
        p.set_data(mx.nd.array(np.random.RandomState(seed).normal(size=p.shape) * 0.3))
    steps, found = trainer(mx, net), []
    for rows in ROWS:
        inputs = mx.nd.array(data(rows)[0])
        with mx.autograd.record():
            loss = case.loss(net, net(inputs))
        loss.backward()
        steps.step(rows, ignore_stale_grad=True)
        found += case.read(net)
    found.append(net(inputs).asnumpy())
    found += case.read(net)
    return net, found + [p.data().asnumpy() for p in net.collect_params().values()]


SPLIT = [
    Hook, PreHook, Attribute, Lists, Averages, Closure, InTraining, Momentum, MomentumOfTrained,
]  # fmt: skip


@pytest.mark.parametrize("kind", in_span(SPLIT, [Hook, Lists, Momentum]))
def test_what_a_call_leaves_is_that_of_the_batch(mx, kind):
    with told() as texts:
        plain, parallel = [run(mx, kind(), parallel)[1] for parallel in (False, True)]
    assert texts == []
    assert [each.shape for each in plain] == [each.shape for each in parallel]
    assert difference(plain, parallel) < 1e-4


# What cannot be put together ----------------------------------------------------------------------


class Largest(Case):
    """The largest number of the batch, as an array."""

    says = "changes attribute 'largest' of Own"

    def build(self, mx):
        def forward(self, x):
            self.largest = self.first(x).max(axis=0)
            return plain_forward(self, x)

        return block_of(mx, forward)

    def read(self, net):
        return [net.largest.asnumpy()]


class InPlace(Case):
    says = "changes an array in place"

    def build(self, mx):
        def forward(self, x):
            self.total[:] = 0.5 * self.total + x.sum(axis=0).as_in_context(mx.cpu(0))
            return plain_forward(self, x)

        return block_of(mx, forward, total=lambda: mx.nd.ones(8))

    def read(self, net):
        return [net.total.asnumpy()]


class MovedInPlace(Momentum):
    says = "sets the parameter {weight!r}"

    def moved(self, parameter, value):
        parameter.data()[:] = value


class MovedByRows(Momentum):
    """By the values of the batch, on which the results depend."""

    says = None

    def build(self, mx):
        def forward(self, x):
            with mx.autograd.pause():
                centre = self.momentum.bias
                centre.set_data(0.5 * centre.data() + 0.5 * self.first(x).mean(axis=0))
            return self.second(self.first(x) - self.momentum(x))

        return block_of(mx, forward)


class NoisyCount(Lists):
    """Of a block that mixes rows: its trial leaves nothing behind either."""

    says = None

    def build(self, mx):
        net = super().build(mx)
        forward = type(net).forward
        type(net).forward = lambda self, x: forward(self, x - x.mean(axis=0, keepdims=True))
        return net


@pytest.mark.parametrize(
    "kind", in_span([Largest, InPlace, MovedInPlace, MovedByRows, NoisyCount], [InPlace])
)
def test_side_effects_that_cannot_be_merged_run_unsplit(mx, kind):
    _, plain = run(mx, kind(), False)
    with told() as texts:
        net, parallel = run(mx, kind(), True)
    assert difference(plain, parallel) < 1e-4
    if kind.says is None:
        start = (
            f"Model {net.name!r} gives different results for three samples at once than for two of "
            "them and the third, but each device sees only its shard."
        )
    else:
        start = MIXED.format(kind.says.format(weight=net.momentum.weight.name), net.name)
    assert texts == [start + WHOLE]


# Compiled blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hybridize", [False, True])
def test_what_a_hybrid_block_sets(mx, hybridize):
    """Where Gluon compiles it, its code runs once, with symbols. Hooks of the block see arrays."""

    class Own(mx.gluon.HybridBlock):
        def __init__(self):
            super(Own, self).__init__()
            self.calls, self.names = 0, []
            with self.name_scope():
                self.inner = mx.gluon.nn.Dense(4, in_units=8)

        def hybrid_forward(self, F, x):
            self.calls += 1
            self.names.append(F.__name__)
            self.hidden = self.inner(x)
            return self.hidden * 2

    found = []
    for parallel in (False, True):
        net, seen = Own(), []
        net.initialize(mx.init.One())
        net.register_forward_hook(lambda block, x, y, seen=seen: seen.append(y.asnumpy()))
        if parallel:
            compat.parallelize(net)
        if hybridize:
            net.hybridize()
        with told() as texts:
            for rows in ROWS:
                net(mx.nd.array(data(rows)[0]))
        assert texts == []
        hidden = net.hidden if hybridize else net.hidden.asnumpy()
        found.append((net.calls, net.names, type(hidden), len(seen), seen[-1]))
    plain, parallel = found
    assert plain[:4] == parallel[:4]
    np.testing.assert_allclose(plain[4], parallel[4], rtol=1e-5)
