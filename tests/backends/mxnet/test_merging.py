"""Results of Gluon blocks, merged by their placements."""

import numpy as np
import pytest

from compat.testing import in_span

from .gluon_models import MIXED, WHOLE, one_contexts_numbers, whole
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")

LOSSES = {
    "sum": (lambda F, x: F.sum(F.square(x)) * 0.1, None),
    "mean": (lambda F, x: F.mean(F.square(x)) + 0.5 * F.mean(x), None),
    "norm": (lambda F, x: F.norm(x), "norm"),
}


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", in_span(sorted(LOSSES), ["mean"]))
def test_a_loss_that_a_block_returns(mx, name, hybridize):
    """Sums and means of a traced block are put together; all else is computed whole."""
    function, operation = LOSSES[name]
    texts, net = one_contexts_numbers(mx, function, hybridize=hybridize, returns_loss=True)
    name = "{}_{}0".format(net[1].name, operation)
    assert texts == ([MIXED.format(name, net.name) + WHOLE] if operation else [])


def test_time_first(mx):
    """A layer whose first dimension is time is not divided by it; between transposes it is."""
    inputs = mx.nd.array(np.random.RandomState(0).normal(size=(13, 4, 6)))
    gru = mx.gluon.rnn.GRU(5, input_size=6)
    gru.initialize()
    texts = whole(mx, gru, (inputs,))
    assert len(texts) == 1 and "needs the whole batch" in texts[0]
    net = mx.gluon.nn.HybridSequential()
    swapped = mx.gluon.nn.HybridLambda(lambda F, x: F.swapaxes(x, 0, 1))
    net.add(swapped, mx.gluon.rnn.GRU(5, input_size=6))
    net.initialize()
    assert whole(mx, net, (inputs,)) == []  # the rows are in the second dimension of what it gives
