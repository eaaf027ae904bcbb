"""Placements checked on three samples: of Gluon blocks and of operations without a rule."""

import functools

import pytest

import compat
from compat import _rows
from compat._backends.mxnet import rules
from compat.testing import span

from .. import graph_cases
from ..messages import told
from .gluon_models import (
    TRIED,
    UNKNOWN,
    WHOLE,
    array,
    block_of,
    centred,
    one_contexts_numbers,
    whole,
)
from .gluon_models import mx as mx  # the fixture
from .keras_models import keras as keras  # the fixture
from .keras_models import lambda_model
from .test_module import custom


@pytest.mark.row("Gluon Block")
@span
def test_blocks_that_are_not_traced_are_tried(mx):
    texts, net = one_contexts_numbers(mx, centred, hybrid=False)
    assert texts == [TRIED.format(net.name) + WHOLE]
    texts, _ = one_contexts_numbers(mx, lambda F, x: F.softmax(x) - F.mean(x, 1, True), False)
    assert texts == []


@pytest.mark.row("Gluon Block")
def test_strict_makes_it_an_error(mx, monkeypatch):
    monkeypatch.setattr(compat._runtime.process.process.configuration.settings, "strict", True)
    net = compat.parallelize(block_of(mx, centred))
    for _ in range(2):  # not the first time only
        with pytest.raises(compat.UnsupportedError, match="needs the whole batch"):
            net(array(mx, 13))


@pytest.mark.row("Gluon Block")
def test_random_blocks(mx):
    """Known by their operations, where they can be traced; else nothing tells."""

    def noisy(F, x):
        return x + 0 * F.random.normal_like(x) if hasattr(F.random, "normal_like") else x

    def plain(F, x):
        return x + F.random.normal(shape=x.shape)

    net = compat.parallelize(block_of(mx, plain, hybrid=False))
    with told() as texts:
        assert net(array(mx, 13)).shape == (13, 8)
    assert texts == [UNKNOWN.format(net.name) + WHOLE]
    texts, _ = one_contexts_numbers(mx, noisy)
    assert texts == []


@pytest.mark.row("Gluon Block")
def test_shapes_that_change_later_run_unsplit(mx):
    """What a shard cannot compute, and the trial did not see."""

    def function(F, x):
        return x + F.ones((13, 8)) if len(x) > 3 else x

    block = block_of(mx, function, hybrid=False)
    texts = whole(mx, block, (array(mx, 13),), (array(mx, 13),))
    assert texts == [UNKNOWN.format(block.name) + WHOLE]


@pytest.mark.row("Gluon Block")
def test_errors_of_the_users_own_stay(mx):
    def function(F, x):
        raise ValueError("no such token")

    block = compat.parallelize(block_of(mx, function, hybrid=False))
    with pytest.raises(ValueError, match="no such token"):
        block(array(mx, 13))


@pytest.mark.row("Gluon Block")
@pytest.mark.parametrize("rows", [13, 3, 2])
@pytest.mark.parametrize("hybrid", [False, True])
def test_one_number_for_a_batch_of_few_rows_too(mx, rows, hybrid):
    """One row a replica, and one number each: that looked like three rows."""
    block = block_of(mx, lambda F, x: F.mean(x), hybrid)
    texts = whole(mx, block, (array(mx, rows),))
    assert texts == ([] if hybrid else [TRIED.format(block.name) + WHOLE])
    rowwise = compat.parallelize(block_of(mx, lambda F, x: F.mean(x, axis=1), hybrid))
    assert rowwise(array(mx, rows)).shape == (rows,)


@pytest.mark.parametrize("kind", ["rows", "mixed", "own"])
def test_operations_without_a_rule_are_tried(keras, kind, monkeypatch):
    """And divided, or left to the first device, as one with a gradient of the user's is."""
    import mxnet as mx

    known = {name: rule for name, rule in rules.RULES.items() if name != "softmax"}
    monkeypatch.setattr(rules, "RULES", known)
    function = functools.partial(mx.sym.softmax, axis=0 if kind == "mixed" else 1)
    if kind == "own":
        function = custom(mx, "compat_own", lambda gradient: 2 * gradient)
    build = functools.partial(lambda_model, keras, lambda x: function(x, name="it"), "own")
    reasons = {
        "own": "has a custom gradient that needs, or may need, the whole batch, but each device "
        "sees only its shard.",
        "mixed": "gives different results for three samples at once than for two of them and the "
        "third, but each device sees only its shard.",
    }
    text = (
        "The operation it of 'own' {} It, and everything computed from it, runs unsplit on cpu(0)."
    )
    expected = [] if kind == "rows" else [text.format(reasons[kind])]
    assert graph_cases.one_devices_numbers(keras, build) == expected


def test_a_rule_that_is_wrong_is_found_by_the_trial(keras, monkeypatch):
    """As for a table that errs: what three rows of the first batch give has the last word."""
    wrong = dict(rules.RULES, softmax=lambda op, values: _rows.pointwise(values))
    monkeypatch.setattr(rules, "RULES", wrong)
    function = graph_cases.across_rows(keras.backend)["softmax"]
    texts = graph_cases.one_devices_numbers(keras, lambda: graph_cases.model_of(keras, function))
    assert len(texts) == 1 and "gives different results for three samples at once" in texts[0]
