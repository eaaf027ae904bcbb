"""The rules about rows: what the proofs of the backends' tables of operations do not tell."""

import numpy as np
import pytest

from compat import _rows
from compat._rows import Count, Mixed, Partial, Replicated, Sharded, Unknown, Value
from compat.testing import rows

RANDOM = np.random.RandomState(0)


def array(*shape):
    return RANDOM.normal(size=shape)


def test_the_proof_finds_a_wrong_rule():
    found = rows.prove("mean", [array(3, 4)], lambda x: [x[0].mean(0)], lambda given: given)
    assert any("was said to be Sharded" in text for text in found.wrong)


def test_shapes_count_rows():
    x = Value(Sharded(1), (4, None, 5))
    sizes = _rows.shape_of(x)
    assert sizes == Count([1])
    assert _rows.counted(sizes, 1) == Count()
    assert _rows.counted(sizes, 0) == Replicated()
    assert _rows.counted(sizes, [2, 1]) == Count([1])
    assert _rows.counted(sizes, [0, 2]) == Replicated()
    assert _rows.made(sizes, 3) == Sharded(1, inner=None)
    assert isinstance(_rows.made(Count(), 3), Unknown)
    assert _rows.size_of(x) == Partial("sum")
    assert _rows.size_of(Value(sizes, (3,))) == Replicated()
    assert _rows.size_of(Value(Count(), ())) == Replicated()
    assert _rows.size_of(Value(Count(), (None,))) == Count()


def test_what_rows_are_divided_by_comes_out_as_a_weighted_mean():
    x, mask = Value(Sharded(0), (None, 4)), object()
    divided = _rows.divided_by_total([x, Value(Partial("sum"), ())], mask)
    assert _rows.reduced(Value(divided, (None, 4)), None, "sum") == Partial("mean", mask)
    assert isinstance(_rows.pointwise([Value(divided, (None, 4))]), Mixed)
    doubled = _rows.multiplied([Value(divided, (None, 4)), Value(Replicated(), ())])
    assert _rows.reduced(Value(doubled, (None, 4)), 0, "sum") == Partial("mean", mask)
    assert _rows.divided_by_total([Value(Partial("sum"), ())], mask) == Partial("mean", mask)
    weighted, constant = Value(Partial("mean", mask), ()), Value(Replicated(), ())
    assert _rows.added([weighted, weighted]) == Partial("mean", mask)
    assert _rows.added([weighted, constant]) == Mixed()  # the weights need not add up


def test_unknown_and_mixed_go_through_every_rule():
    unknown, mixed = Value(Unknown(), (None, 4)), Value(Mixed(), (None, 4))
    constant = Value(Replicated(), (4,))
    for rule in (_rows.pointwise, _rows.added, _rows.multiplied):
        assert rule([unknown, constant]) == Unknown()
        assert rule([unknown, mixed]) == Mixed()
    assert _rows.reduced(unknown, 0, "sum") == Unknown()
    assert _rows.by_row([mixed, constant], [0, None]) == Mixed()
    assert _rows.normalized([mixed], [0], True, 2) == [Mixed()] * 3


def test_rows_of_unknown_sizes_meet_others_in_products():
    known, unknown = Value(Sharded(0), (None, 3, 4)), Value(Sharded(0, inner=None), (None, 4, 5))
    assert _rows.product([known, unknown]) == Sharded(0)
    uneven = Value(Sharded(0, inner=None, even=False), (None, 4))
    assert _rows.product([uneven, Value(Replicated(), (4, 2))]) == uneven.placement
    assert _rows.product([uneven, uneven], transpose_first=True) == Mixed()


def test_branches_agree_or_are_mixed():
    assert _rows.chosen(Replicated(), [Sharded(0), Sharded(0)]) == Sharded(0)
    assert _rows.chosen(Replicated(), [Sharded(0, inner=None), Sharded(0)]) == Sharded(0)
    assert _rows.chosen(Replicated(), [Sharded(0), Replicated()]) == Mixed()
    assert _rows.chosen(Partial("max"), [Sharded(0), Sharded(0)]) == Mixed()


def test_rows_that_are_sorted_by_chance_are_told_from_those_that_are_left_where_they_are():
    batch = np.arange(12.0).reshape(3, 4)

    def compute(chosen):
        x = batch[list(chosen)]
        return [np.sort(x, 0), x[x[:, 0].argsort()], np.maximum.accumulate(x), x.reshape(-1, 2)]

    mixed = [Mixed()] * 3
    assert _rows.trial.tried(compute) == mixed + [Sharded(0, inner=2)]


def test_a_trial_tells_rows_from_what_needs_all_of_them():
    batch = array(5, 4).astype("float32")

    def compute(chosen):
        x = batch[[row % 5 for row in chosen]]
        return [
            np.exp(x), x - x.mean(0), x.sum(0), x.mean(0), x.max(0), x.mean(0) ** 2, np.ones(2),
            np.random.rand(3), x.T, x[x > 0], np.tile(x, (2, 1)),
        ]  # fmt: skip

    assert _rows.trial.tried(compute) == [
        Sharded(0), Mixed(), Partial("sum"), Partial("mean"), Partial("max"), Mixed(), Replicated(),
        Unknown(), Sharded(1), Sharded(0, None, even=False), Sharded(0, copies=2),
    ]  # fmt: skip


def test_faults_of_the_rules_are_told_from_what_they_are_given():
    for compute, is_fault in (
        (lambda: _rows.trial.cut(None, Sharded(0)), True),
        (lambda: _rows.trial.cut(array(4), Sharded(0, copies=3)), False),  # numpy's
        (lambda: _rows.trial.tried(lambda rows: rows.missing), False),  # another
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
            compute()
        assert _rows.trial.is_fault(caught.value) == is_fault
