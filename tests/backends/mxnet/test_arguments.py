"""Arguments of Gluon blocks: which arrays are split, however they are nested."""

import numpy as np
import pytest

import compat
from compat._rows import splitting

from .gluon_models import DEVICES, Unfollowed, array, block_of, data, difference, whole
from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("Gluon Block")


@pytest.mark.parametrize("rows", [64, 61, 2, 1])
def test_shards_are_those_of_every_backend(mx, rows):
    seen = Unfollowed()

    class Watched(mx.gluon.Block):
        def forward(self, x, more):
            whole = more["whole"]
            seen.append((str(x.context), x.shape[0], str(whole.context), whole.shape))
            return None, [x * 2, {"more": (x + whole.sum(),)}], 3

    net = compat.parallelize(Watched())
    inputs, whole = mx.nd.array(data(rows)[0]), mx.nd.ones((7, 9))
    net(inputs, {"whole": whole})
    sizes = 3, 3, 2, 1, 2, 1  # of its trial
    assert [each[:2] for each in seen[:6]] == [("cpu(0)", n) for n in sizes]
    with mx.autograd.record():
        net(inputs, {"whole": whole})  # its gradients are tried, too
    for recording in (False, True):
        del seen[:]
        with mx.autograd.record() if recording else mx.autograd.pause():
            nothing, (twice, named), three = net(inputs, {"whole": whole})
        assert nothing is None and three == 3
        (more,) = named["more"]
        assert (twice.asnumpy() == inputs.asnumpy() * 2).all()
        assert (more.asnumpy() == inputs.asnumpy() + 63).all()
        assert str(twice.context) == "cpu(0)"
        expected = [
            (device, size, device, (7, 9))
            for device, size in zip(DEVICES, splitting.sizes(rows, 3))
            if size
        ]
        assert seen == expected


@pytest.mark.parametrize("hybrid", [False, True])
def test_an_array_that_was_split_and_now_has_other_rows(mx, hybrid):
    """A memory, which had as many rows as the first batch by chance."""

    def function(F, x, memory):
        return F.broadcast_add(x, F.mean(F.sum(memory, axis=1) * 0) + 0 * F.sum(x))

    def rowwise(F, x, memory):
        return F.concat(x, F.broadcast_add(0 * x, F.slice_axis(memory, axis=0, begin=0, end=1)))

    for each in (function, rowwise):
        block = block_of(mx, each, hybrid)
        args = [(array(mx, rows), array(mx, 13)) for rows in (13, 11, 13)]
        assert len(whole(mx, block, *args)) == 1
    # One that was whole stays so.
    args = [(array(mx, rows), array(mx, 13)) for rows in (11, 2, 13)]
    assert whole(mx, block_of(mx, rowwise, hybrid), *args) == []


@pytest.mark.parametrize("layers", [1, 4])
def test_hidden_states_given_from_outside_run_unsplit(mx, layers):
    """Their rows are in the second dimension."""
    lstm = mx.gluon.rnn.LSTM(5, layout="NTC", input_size=6, num_layers=layers)
    lstm.initialize()
    inputs, states = mx.nd.array(np.random.RandomState(0).normal(size=(4, 3, 6))), None
    states = lstm.begin_state(4)
    expected = lstm(inputs, states)[0].asnumpy()
    with pytest.warns(compat.CompatWarning, match="runs unsplit on"):
        found = compat.parallelize(lstm)(inputs, states)[0].asnumpy()
    assert difference([expected], [found]) < 1e-6
