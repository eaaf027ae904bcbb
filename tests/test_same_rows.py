"""Ranks that train on the same rows: their arrays, and the first batches of their models."""

import types
import warnings

import numpy as np
import pytest
from thread_ranks import together

from compat._ranks import same_rows
from compat._ranks.place import Place
from compat._runtime import reporting
from compat._runtime.process import process

pytestmark = pytest.mark.usefixtures("process")

TEXT = (
    "All 3 ranks train 'net' on the same rows, so that an epoch takes as long as in one process: "
    "call compat.shard(), as in x, y = compat.shard((x, y)), which gives each rank its own. "
    "(Ignore this if their batches are meant to be the same.)"
)
ROWS = np.arange(24.0).reshape(6, 4)


def warned(of_rank, name="net"):
    """Return the warnings of three ranks whose batches a function of the rank returns.

    They are separate processes elsewhere, and know what they have warned of.
    """
    gathered, found = [same_rows.numbers(of_rank(rank)) for rank in range(3)], []
    for rank in range(3):
        before = dict(process.same_rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = types.SimpleNamespace(place=Place(rank, 3, rank, 3, "test"))
            same_rows.note(engine, name, gathered)
        found.append([str(each.message) for each in caught])
        if rank < 2:
            process.same_rows = before
    assert found[1:] == [[], []]
    return found[0]


def test_batches_that_are_equal_are_a_warning_on_rank_0():
    assert warned(lambda rank: (ROWS, {"y": ROWS[:, 0]})) == [TEXT]
    assert process.same_rows == {"net": TEXT}
    assert warned(lambda rank: ROWS, "other") == []  # no second time
    assert list(process.same_rows) == ["net", "other"]


def test_the_first_batch_alone_is_compared():
    def train(engine):
        first = same_rows.FirstBatch(engine)
        for batch in ROWS[engine.place.rank :], ROWS, ROWS:
            first.see(batch)
            first.compare("net")
        return len(engine.exchanged)

    assert together(3, train) == [1, 1, 1] and process.same_rows == {}


@pytest.mark.parametrize(
    "of_rank",
    [
        lambda rank: ROWS[2 * rank : 2 * rank + 2],
        lambda rank: ROWS[:2] if rank < 2 else ROWS[2:4],
        lambda rank: (ROWS, np.full(6, rank)),
        lambda rank: (np.ones((6, 4)), np.zeros(6)),  # whoever has which rows
        lambda rank: None,
        lambda rank: types.SimpleNamespace(shape=["rows"]),  # as a nested tensor of torch
    ],
    ids=["parts", "two of three", "targets", "constant", "none", "unreadable"],
)
def test_other_first_batches_are_none(of_rank):
    assert warned(of_rank) == [] and process.same_rows == {}


@pytest.mark.parametrize("row", [np.array([["a", "b"]], "O"), np.ones((1, 3))])
def test_texts_and_single_rows_are_compared(row):
    assert warned(lambda rank: row) == [TEXT]
    process.same_rows.clear()
    other = np.array([["a", "c"]], "O")
    assert warned(lambda rank: other if rank == 2 else row) == []


def test_a_report_does_not_say_that_such_ranks_worked():
    uses = [reporting.DeviceUse("cpu", rank, 8, 8, 2) for rank in range(3)]
    begin = "All 3 ranks computed rows: 8 rows each. "
    parts = [{"net": TEXT}, {"net": TEXT, "other": TEXT}]
    verdicts = [
        begin + "Model 'net' was trained on the same rows by all ranks: see below.",
        begin + "Models 'net', 'other' were trained on the same rows by all ranks: see below.",
    ]
    for found, verdict in zip(parts, verdicts):
        report = reporting.Report(uses, {"net": "rank 0 of 3"}, same_rows=found)
        assert not report.all_worked and report.verdict == verdict
        assert " ".join(str(report).split("\n")).endswith(" ".join([verdict] + [TEXT] * len(found)))
        joined = reporting.joined([report.as_dict()])
        assert joined.same_rows == found and TEXT.split(":")[0].replace("'", "&#x27;") in (
            joined.to_html()
        )
