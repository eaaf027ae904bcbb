"""The comparison of what ranks hold, in threads that stand for ranks; real ones: test_*_ranks."""

import numpy as np
import pytest
from thread_ranks import together

import compat
from compat._ranks import checksum


def verify(*held):
    """Each rank's outcome, an error or how many numbers it has exchanged.

    Arguments:
        held: a dictionary of arrays for each rank, which gets what is set.
    """

    def call(engine):
        mine = held[engine.place.rank]
        names = list(mine)

        def write(place, value):
            mine[names[place]] = value

        checksum.verify(engine, names, list(mine.values()), write, 1)
        return engine.exchanged

    return together(len(held), call)


def variables():
    random = np.random.RandomState(0)
    return {
        "kernel": random.normal(size=(123, 45)).astype("float32"),
        "bias": random.normal(size=45),
        "half": random.normal(size=7).astype("float16"),
        "count": np.array(3),
        "none": np.zeros((0, 4), "float32"),
    }


def test_ranks_that_agree_exchange_a_few_numbers_once():
    assert verify(variables(), variables(), variables()) == [[12]] * 3


def test_not_a_number_is_the_same_as_itself():
    held = [dict(variables(), bias=np.full(45, np.nan)) for _ in range(2)]
    assert verify(*held) == [[8]] * 2


def test_a_rank_that_has_drifted_apart_is_named_with_its_first_variable():
    changed = variables()
    changed["bias"][3] += 0.01
    changed["count"] = np.array(4)
    for outcome in verify(variables(), variables(), changed):
        assert outcome == (
            "The ranks have drifted apart: after 1 step the values of 'bias' and 1 other on rank 2 "
            "of 3 are not those of rank 0. Ranks train to one process's numbers as long as these "
            "are the same. Likely causes: gradients that never reach the other ranks, such as "
            "those of torch.autograd.grad() or of an update made by hand; an initial value drawn "
            "at random after parallelize(); code that depends on a rank's data, such as a step "
            "that is skipped."
        )


def changed_to(value):
    """One number of a kernel."""

    def change(kernel):
        kernel[3, 3] = value
        return kernel

    return change


@pytest.mark.parametrize(
    "change",
    [
        np.negative,
        lambda kernel: kernel[[1, 0] + list(range(2, len(kernel)))],
        lambda kernel: np.ascontiguousarray(kernel[::-1]),
        changed_to(np.inf),
        changed_to(np.nan),
    ],
    ids=["negate", "swap", "reverse", "infinite", "not a number"],
)
def test_no_change_goes_unseen(change):
    """Nor that of one integer: see above."""
    changed = variables()
    changed["kernel"] = change(changed["kernel"])
    for outcome in verify(variables(), changed):
        assert outcome.startswith(
            "The ranks have drifted apart: after 1 step the values of 'kernel' on rank 1 of 2 "
        )


def test_rounding_is_set_to_rank_0s_with_a_warning():
    changed = variables()
    changed["kernel"] *= 1 + 2e-7
    assert (changed["kernel"] != variables()["kernel"]).any()
    held = [variables(), changed]
    with pytest.warns(compat.CompatWarning) as caught:
        verify(*held)
    assert [str(warning.message) for warning in caught] == [
        "The weights of rank 1 ('kernel') are after 1 step not those of rank 0 to the last bit, "
        "but to rounding, as between machines with different processors. All ranks go on with "
        "rank 0's."
    ]
    np.testing.assert_array_equal(held[1]["kernel"], variables()["kernel"])


def test_ranks_with_other_variables_are_an_error():
    other = variables()
    del other["half"]
    _, outcome = verify(variables(), other)
    assert outcome == (
        "The ranks' models have different variables after 1 step: rank 1 of 2 has 4: kernel, "
        "bias, count, none. Build the same model on every rank."
    )


def test_variables_that_change_places_do_not_go_unseen():
    """Small ones are summed up together, large ones each by itself."""
    random = np.random.RandomState(0)
    for shape in ((3, 5), (600, 300)):
        one, other = random.normal(size=(2,) + shape)
        assert checksum.numbers([one, other]) == checksum.numbers([one.copy(), other.copy()])
        assert checksum.numbers([one, other]) != checksum.numbers([other, one])
        assert checksum.numbers([one]) != checksum.numbers([one.reshape(shape[::-1])])


# Several things at once -----------------------------------------------------------------------


def test_several_lists_are_gathered_in_one_exchange():
    def call(engine):
        rank = engine.place.rank
        return engine.gather_each([[rank, 2], [], [7 - rank]]), len(engine.exchanged)

    each = [[[0, 2], [1, 2]], [[], []], [[7], [6]]]
    assert together(2, call) == [(each, 1)] * 2


@pytest.mark.parametrize("expected, exchanges", [(0, 2), (3, 1), (5, 1)])
def test_numbers_are_gathered_and_summed_up_in_one_exchange_if_they_are_expected(
    expected, exchanges
):
    def call(engine):
        rank = engine.place.rank
        rows, sums = engine.gather_and_sum([rank, 9], [1.5, rank, float("nan")], expected)
        return rows, str(list(map(float, sums))), len(engine.exchanged)

    assert together(3, call) == [([[0, 9], [1, 9], [2, 9]], "[4.5, 3.0, nan]", exchanges)] * 3


def test_different_numbers_of_values_are_not_summed_up():
    def call(engine):
        rank = engine.place.rank
        return engine.gather_and_sum([rank], [1.0] * (2 + rank), 2), len(engine.exchanged)

    assert together(2, call) == [(([[0], [1]], None), 1)] * 2
