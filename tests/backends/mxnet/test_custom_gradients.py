"""User-defined gradients in Gluon blocks: those that mix rows are found."""

import pytest

import compat
from compat.testing import in_span

from ..messages import told
from .gluon_models import WHOLE, array, block_of, one_contexts_numbers, whole
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")

GRADIENT = (
    "Model {!r} has a custom gradient that needs, or may need, the whole batch, but each device "
    "sees only its shard."
)

#: What becomes of what comes back, and whether it mixes rows.
BACK = {
    "reversed": (lambda nd, gradient: -gradient, False),
    "of length 1": (lambda nd, gradient: gradient / nd.norm(gradient), True),
    "centred": (lambda nd, gradient: gradient - nd.mean(gradient, axis=0, keepdims=True), True),
}


def with_gradient(mx, function):
    """Return a function that returns rows, with the gradient that another function computes."""

    class Own(mx.autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, gradient):
            return function(mx.nd, gradient)

    return lambda F, x: Own()(x)


@pytest.mark.parametrize("has_predicted", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("name", in_span(sorted(BACK), ["of length 1"]))
def test_gradients_of_ones_own(mx, name, hybrid, has_predicted):
    """With symbols, MXNet would end the process, or leave the gradient out."""
    function, mixes = BACK[name]
    function = with_gradient(mx, function)
    texts, net = one_contexts_numbers(mx, function, hybrid=hybrid, has_predicted=has_predicted)
    assert texts == ([GRADIENT.format(net.name) + WHOLE] if mixes else [])


def test_gradients_within_a_block(mx):
    """As a penalty has them. With symbols, MXNet would end the process."""

    def function(F, x):
        if F is mx.nd:
            x = x.detach()
            x.attach_grad()
        with mx.autograd.record():
            (gradient,) = mx.autograd.grad([F.sum(x * x)], [x])
        return gradient

    block = block_of(mx, function)
    assert whole(mx, block, (array(mx, 13),), (array(mx, 7),)) == []


def test_results_without_a_gradient_are_left_out_of_account(mx):
    """Such as what is detached, in a block that is not traced."""
    block = compat.parallelize(block_of(mx, lambda F, x: (2 * x, x.detach()), hybrid=False))
    inputs = array(mx, 13)
    inputs.attach_grad()
    with told() as texts, mx.autograd.record():
        loss = block(inputs)[0].sum()
    loss.backward()
    assert texts == [] and (inputs.grad.asnumpy() == 2).all()
