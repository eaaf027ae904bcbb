"""The rules about rows, each proved by computing with numpy: on a batch and on its parts."""

import functools
import itertools
from functools import partial

import missing_rules
import numpy as np
import pytest
import row_proof

from compat import _rows
from compat._rows import Count, Mixed, Partial, Replicated, Sharded, Unknown, Value

RANDOM = np.random.RandomState(0)


def array(*shape):
    return RANDOM.normal(size=shape)


def values(placements, inputs):
    """Return the values for a rule, whose sizes that grow with the batch are unknown."""
    found = []
    for placement, each in zip(placements, inputs):
        shape = list(each.shape)
        if isinstance(placement, Sharded):
            shape[placement.axis] = None
        found.append(Value(placement, shape))
    return found


def one(rule, *args, **kwargs):
    return lambda given: [rule(given[0], *args, **kwargs)]


def all_of(rule, *args, **kwargs):
    return lambda given: [rule(given, *args, **kwargs)]


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def with_axis(name, compute, rule, shape, axes, **options):
    for axis in axes:
        inputs, computed = [array(*shape)], partial(compute, axis=axis)
        yield "{}({})".format(name, axis), inputs, computed, one(rule, axis, **options)


def cases():
    """(name, inputs, operation, rule): the rule is given the list of the inputs' ``Value``s."""
    x = array(3, 4, 6)
    square = array(3, 3)
    for shapes in [
        [(3, 4), (3, 4)],
        [(3, 4), (4,)],
        [(3, 3), (3,)],
        [(3, 1), (3,)],
        [(6, 3), (1, 3)],
    ]:
        two = [array(*shape) for shape in shapes]
        name = str(shapes)
        yield "exp(x * y) " + name, two, lambda x, y: np.exp(x * y), all_of(_rows.pointwise)
        yield "x + y " + name, two, lambda x, y: x + y, all_of(_rows.added)
        yield "x - y " + name, two, lambda x, y: x - y, all_of(_rows.added)
        yield "x * y " + name, two, lambda x, y: x * y, all_of(_rows.multiplied)
        yield "x / y " + name, two, lambda x, y: x / y, all_of(_rows.divided)
        yield "maximum " + name, two, np.maximum, all_of(_rows.extreme, "max")
        yield "minimum " + name, two, np.minimum, all_of(_rows.extreme, "min")
    yield "-x", [x], lambda x: -x, lambda given: [_rows.multiplied(given)]
    for how in ("sum", "mean", "max", "min"):
        for axes, keep in itertools.product([None, 0, 1, (0, 1), (1, 2), -1], [False, True]):
            compute = partial(getattr(np, how), axis=axes, keepdims=keep)
            yield how + str((axes, keep)), [x], compute, one(_rows.reduced, axes, how, keep)
    for how, axis in itertools.product(["any", "all"], [None, 0, 1]):
        compute = partial(getattr(np, how), axis=axis)
        yield "{}({})".format(how, axis), [x > 0], compute, one(_rows.reduced, axis, how)
    for how in ("prod", "std", "median", "argmax"):
        yield from with_axis(how, getattr(np, how), _rows.reduced, (3, 4), (0, 1), how=how)
    for name, compute in [
        ("softmax", softmax),
        ("cumsum", np.cumsum),
        ("sort", np.sort),
        ("flip", np.flip),
        ("roll", lambda x, axis: np.roll(x, 1, axis)),
        ("fft", lambda x, axis: np.fft.fft(x, axis=axis)),
    ]:
        yield from with_axis(name, compute, _rows.along, (3, 4, 3), (0, 1, -1))
    for letters, result, shapes in [
        (["ij", "jk"], "ik", [(3, 4), (4, 3)]),
        (["ij", "kj"], "ik", [(3, 4), (3, 4)]),
        (["ij", "ij"], "i", [(3, 4), (3, 4)]),
        (["ij", "ij"], "", [(3, 3), (3, 3)]),
        (["bij", "bjk"], "bik", [(3, 3, 4), (3, 4, 3)]),
        (["ij"], "ji", [(3, 6)]),
        (["ii"], "i", [(3, 3)]),
        (["i", "j"], "ij", [(3,), (3,)]),
    ]:
        name, rule = "einsum({} -> {})", all_of(_rows.contracted, letters, result)
        compute = partial(np.einsum, ",".join(letters) + "->" + result)
        yield name.format(letters, result), [array(*shape) for shape in shapes], compute, rule
    for shapes in [
        [(3, 4), (4, 3)], [(3, 3), (3, 3)], [(2, 3, 4), (4, 3)], [(3, 3, 3), (3, 3, 3)],
        [(3,), (3, 3)], [(3, 3), (3,)], [(3,), (3,)], [(3, 2, 4), (1, 4, 3)], [(3, 3, 3), (3, 3)],
    ]:  # fmt: skip
        two, name = [array(*shape) for shape in shapes], "matmul{}".format(tuple(shapes))
        yield name, two, np.matmul, all_of(_rows.product)
    first = all_of(_rows.product, transpose_first=True)
    yield "matmul(x.T, y)", [array(3, 4), array(3, 3)], lambda x, y: x.T @ y, first
    second = all_of(_rows.product, transpose_second=True)
    yield "matmul(x, y.T)", [array(3, 4), array(3, 4)], lambda x, y: x @ y.T, second
    for order in itertools.permutations(range(3)):
        compute = partial(np.transpose, axes=order)
        yield "transpose" + str(order), [array(3, 6, 3)], compute, one(_rows.transposed, order)
    yield from with_axis("expand", np.expand_dims, _rows.expanded, (3, 3), (0, 1, 2, -1))
    yield "squeeze(1)", [array(3, 1, 3)], lambda x: x.squeeze(1), one(_rows.squeezed, 1)
    yield "squeeze()", [array(3, 1, 3)], np.squeeze, one(_rows.squeezed, None)
    for before, after in [
        ((3, 4, 6), (-1, 6)), ((3, 4, 6), (-1, 24)), ((3, 24), (-1, 4, 6)), ((6, 6), (-1, 4)),
        ((3, 6), (-1,)), ((4, 3, 6), (-1, 6)), ((4, 3, 6), (4, -1)), ((4, 6), (4, -1, 2)),
        ((2, 3, 4), (-1,)), ((2, 3, 4), (2, -1, 2)), ((6, 4), (-1, 2, 4)), ((12, 5), (-1, 4, 5)),
        ((6, 4), (2, -1, 4)), ((3, 4), (4, -1)), ((2, 2, 3), (-1, 3)), ((4, 9), (2, -1, 3)),
    ]:  # fmt: skip
        name, rule = "reshape({} -> {})".format(before, after), _rows.reshaped
        sizes = [None if size == -1 else size for size in after]
        yield name, [array(*before)], lambda x, after=after: x.reshape(after), one(rule, sizes)
    for axis in (0, 1, -1):
        two = [array(3, 3), array(3, 3)]
        for join, rule in ((np.concatenate, _rows.concatenated), (np.stack, _rows.stacked)):
            compute = lambda *x, join=join, axis=axis: join(x, axis)  # noqa: E731
            yield "{}({})".format(join.__name__, axis), two, compute, all_of(rule, axis)
    yield "x[:2]", [square], lambda x: x[:2], one(_rows.sliced, {0: "part"})
    yield "x[::-1]", [square], lambda x: x[::-1], one(_rows.sliced, {0: "part"})
    yield "x[:, 0]", [square], lambda x: x[:, 0], one(_rows.sliced, {1: "one"})
    yield "x[0, 1:]", [square], lambda x: x[0, 1:], one(_rows.sliced, {0: "one", 1: "part"})
    yield "x[..., 1]", [x], lambda x: x[..., 1], one(_rows.sliced, {-1: "one"})
    pad = lambda x: np.pad(x, [(0, 0), (1, 1)], "constant")  # noqa: E731
    yield "pad", [square], pad, one(_rows.resized, [1])
    for times in [(2, 1), (1, 2), (3, 3), (2, 1, 1)]:
        yield "tile" + str(times), [square], partial(np.tile, reps=times), one(_rows.tiled, times)
    for axis in (None, 0, 1):
        compute = partial(np.repeat, repeats=2, axis=axis)
        yield "repeat({})".format(axis), [array(3, 6)], compute, one(_rows.repeated, axis, 2)
    spread = lambda x: np.broadcast_to(x, (2,) + x.shape[:1] + (4,))  # noqa: E731
    yield "broadcast", [array(3, 1)], spread, one(_rows.broadcast, 3)
    numbers = np.array([2, 0, 1])
    for axis in (0, 1):
        two = [array(4, 3, 5) if axis == 0 else array(3, 4, 5), numbers]
        taken = partial(np.take, axis=axis)
        yield "take({})".format(axis), two, taken, all_of(_rows.gathered, axis)
    yield (
        "take(batch_dims=1)",
        [array(3, 4), np.array([2, 0, 1])],
        lambda x, n: x[np.arange(len(x)), n] if len(x) == len(n) else x[:, n, None][:, 0, 0, None],
        all_of(_rows.gathered, 1, batch_dims=1),
    )
    yield "bincount", [numbers], lambda n: np.bincount(n, minlength=4), all_of(_rows.scattered)
    summed = lambda n, x: np.bincount(n, x, minlength=4)  # noqa: E731
    yield "segment_sum", [numbers, array(3)], summed, all_of(_rows.scattered)
    two, convolve = [array(3, 8), array(3)], lambda x, w: np.stack([np.convolve(r, w) for r in x])
    yield "convolve", two, convolve, all_of(_rows.by_row, [0, None])
    two = [array(3, 4), array(4, 3)]
    yield "x * y.T", two, lambda x, y: x * y.T, all_of(_rows.by_row, [0, 1])
    yield "x.T * y", two, lambda x, y: x.T * y, all_of(_rows.by_row, [0, 1], result=1)
    condition = [array(3) > 0, array(3, 4), array(3, 4)]
    yield "select", condition, lambda c, x, y: np.where(c[:, None], x, y), all_of(_rows.selected)


CASES = list(cases())


@functools.lru_cache(None)
def proved(place):
    """Return the results of the proof of a case, made once for two tests."""
    name, inputs, operation, rule = CASES[place]
    return row_proof.prove(
        name,
        inputs,
        lambda given: [np.asarray(operation(*given))],
        lambda placements: rule(values(placements, inputs)),
    )


@pytest.mark.parametrize("place", range(len(CASES)), ids=[case[0] for case in CASES])
def test_a_rule_claims_nothing_but_the_truth(place):
    assert not proved(place).wrong


@pytest.mark.parametrize("place", range(len(CASES)), ids=[case[0] for case in CASES])
def test_rules_are_true_of_inputs_that_are_gathered(place):
    """Devices have all rows of one input, of an unknown number, and their own of the others."""
    name, inputs, operation, rule = CASES[place]
    for gathered, axis in itertools.product(range(len(inputs)), range(2)):
        if len(inputs) == 1 or inputs[gathered].shape[axis : axis + 1] != (row_proof.ROWS,):
            continue
        choices = [
            [Replicated()]
            if each is inputs[gathered]
            else [p for p in row_proof.placements_of(each) if not isinstance(p, Partial)]
            for each in inputs
        ]

        def claim(placements, gathered=gathered, axis=axis):
            given = values(placements, inputs)
            shape = list(given[gathered].shape)
            shape[axis] = None
            given[gathered] = Value(Replicated(), shape)
            return rule(given)

        found = row_proof.prove(
            name, inputs, lambda given: [np.asarray(operation(*given))], claim, choices
        )
        assert not found.wrong


def test_an_input_is_gathered_where_rows_then_stay_apart():
    rows, columns = Value(Sharded(0), (None, 4)), Value(Sharded(1), (4, None))
    assert _rows.gathering(_rows.product, [rows, columns]) == (Sharded(0), 1)
    assert _rows.gathering(_rows.product, [rows, rows]) == (Sharded(0), 1)
    weights = Value(Replicated(), (4, 5))
    assert _rows.gathering(_rows.product, [rows, weights]) == (Sharded(0), None)
    side_by_side = [Value(Sharded(1), (1, None, 4)), Value(Sharded(0), (None, 1, 4))]
    assert _rows.gathering(_rows.pointwise, side_by_side) == (Sharded(0), 0)
    for rule, given in [
        (_rows.pointwise, [rows, Value(Sharded(1), (None, None))]),
        (partial(_rows.concatenated, axis=0), [rows, columns]),
        (_rows.product, [rows, Value(Count([0]), (2,)), columns]),
    ]:
        assert _rows.gathering(rule, given) == (Mixed(), None)


def test_what_is_of_the_whole_batch_is_split_again_by_its_sizes():
    few, some, many = _rows.SAMPLES
    assert _rows.resharding({n: [n, 4] for n in _rows.SAMPLES}) == Sharded(0)
    assert _rows.resharding({n: [1, 4] for n in _rows.SAMPLES}) == Replicated()
    assert _rows.resharding({few: None, some: [some], many: [many]}) == Sharded(0)
    for shapes in [
        {few: [few], some: [some], many: [100]},
        {few: [few], some: [some + 1], many: [many + 1]},
        {few: [few], some: [some], many: None},
        {few: [few], some: [some]},
        {few: [1], some: [2], many: [2]},
        {n: [None] for n in _rows.SAMPLES},
    ]:
        assert _rows.resharding(shapes) is None


def test_rules_say_as_much_as_is_true_of_rows():
    """What is true and not claimed of rows is little, so that no rule gives up in silence.

    Of sums and means over the rows more is missing, which backends do not need.
    """
    found = row_proof.Found()
    for each in map(proved, range(len(CASES))):
        found.missing += each.missing
        found.claimed += each.claimed
    missing_rules.check("The rules", found)
    assert found.claimed > 400


def test_the_proof_finds_a_wrong_rule():
    found = row_proof.prove("mean", [array(3, 4)], lambda x: [x[0].mean(0)], lambda given: given)
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


def test_weighted_means_are_added_to_one_another_alone():
    mask = object()
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
    batch = np.random.RandomState(1).normal(size=(5, 4)).astype("float32")

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


def test_two_rows_that_belong_together_by_chance_are_not_taken_for_rows_alone():
    """The first two here have one class, whose mean they get, and are equal."""
    values, classes = np.array([1.0, 3.0, 8.0]), np.array([0, 0, 1])

    def compute(rows):
        x, c = values[list(rows)], classes[list(rows)]
        means = np.array([x[c == each].mean() for each in c])
        return [means, np.unique(np.array([5.0, 5.0, 7.0])[list(rows)]), x * 2]

    assert _rows.trial.tried(compute) == [Mixed(), Mixed(), Sharded(0)]


def test_rows_are_told_from_what_depends_on_their_places():
    batch = np.random.RandomState(1).normal(size=(3, 2))

    def compute(rows):
        x = batch[list(rows)]
        # The third row is the first of a part, whose factor is that of the first row.
        return [x * (1 + np.arange(len(x))[:, None] % 2), x[x[:, 0] > 0]]

    assert _rows.trial.tried(compute) == [Mixed(), Sharded(0, None, even=False)]


def test_faults_of_the_rules_are_told_from_what_they_are_given():
    for compute, is_fault in (
        (lambda: _rows.trial.cut(None, Sharded(0)), True),
        (lambda: _rows.trial.cut(array(4), Sharded(0, copies=3)), False),  # numpy's
        (lambda: _rows.trial.tried(lambda rows: rows.missing), False),  # another
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
            compute()
        assert _rows.trial.is_fault(caught.value) == is_fault
