"""How a batch is split."""

import pytest

from compat._rows.splitting import bounds, run_bounds, sizes


@pytest.mark.parametrize(
    "rows, replicas, expected",
    [
        (61, 3, [20, 20, 21]),
        (63, 8, [7, 8, 8, 8, 8, 8, 8, 8]),
        (2, 3, [0, 1, 1]),
    ],
)
def test_sizes(rows, replicas, expected):
    assert sizes(rows, replicas) == expected


@pytest.mark.parametrize("replicas", range(1, 10))
def test_a_split_is_even_and_whole(replicas):
    for rows in range(70):
        split = [bounds(rows, replicas, replica) for replica in range(replicas)]
        assert [row for start, stop in split for row in range(start, stop)] == list(range(rows))
        assert max(sizes(rows, replicas)) - min(sizes(rows, replicas)) <= 1


@pytest.mark.parametrize("replicas", range(1, 10))
def test_no_replica_runs_empty_or_outside_the_batch(replicas):
    for rows in range(1, 20):
        for replica in range(replicas):
            start, stop = run_bounds(rows, replicas, replica)
            shard = bounds(rows, replicas, replica)
            assert 0 <= start < stop <= rows
            assert (start, stop) == shard or (shard[0] == shard[1] and stop == start + 1)
