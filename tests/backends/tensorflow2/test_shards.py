"""shard() of a tf.data.Dataset."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._ranks.launchers import LAUNCHERS
from compat.testing import in_span, span

from ..messages import refusal

SIZE, BATCH = 3, 5


@pytest.fixture
def shards(monkeypatch):
    """Return the shards of a dataset on three ranks, as lists, and the warnings."""

    def shards(make, batch_size):
        found, warned = [], []
        for rank in range(SIZE):
            for name, value in zip(LAUNCHERS[0][1].split(), (rank, SIZE, rank, SIZE)):
                monkeypatch.setenv(name, str(value))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dataset = compat.shard(make(), batch_size)
                found.append([tf.nest.map_structure(_list, element) for element in dataset])
            told = [warning for warning in caught if warning.category is compat.CompatWarning]
            warned.append([str(warning.message) for warning in told])
            assert {warning.filename for warning in told} <= {__file__}
        return found, warned

    return shards


def _list(tensor):
    return tensor.numpy().tolist()


def pairs(rows):
    return tf.data.Dataset.from_tensor_slices((np.arange(rows), -np.arange(rows)))


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(range(23)), tf.int32, tf.TensorShape([]))


# Of batches of 0 to 4, ..., 15 to 19, and 20 to 22.
PARTS = [
    [[0, 1], [5, 6], [10, 11], [15, 16], [20]],
    [[2, 3], [7, 8], [12, 13], [17, 18], [21]],
    [[4], [9], [14], [19], [22]],
]


@pytest.mark.row("shard() of a tf.data dataset")
@pytest.mark.parametrize("batch_size", in_span([BATCH, None], [BATCH]))
@pytest.mark.parametrize(
    "make",
    [
        lambda: pairs(23).batch(BATCH).prefetch(1),
        lambda: pairs(23).shuffle(1, seed=1).batch(BATCH),
        lambda: pairs(23).repeat().take(23).batch(BATCH),
    ],
)
def test_batches_become_this_ranks_parts_of_them(shards, make, batch_size):
    found, warned = shards(make, batch_size)
    assert [[batch[0] for batch in rank] for rank in found] == PARTS
    assert all(x == [-y for y in ys] for rank in found for x, ys in rank)
    assert warned == [[], [], []]


@span
@pytest.mark.parametrize("make", [lambda: pairs(23).map(lambda x, y: x), generated])
def test_rows_become_those_that_batches_are_parts_of(shards, make):
    """Whether the number of rows is known or not."""
    found, warned = shards(make, BATCH)
    assert found == [sum(rank, []) for rank in PARTS]
    assert warned == [[], [], []]


@pytest.mark.parametrize("batched", [False, True])
def test_a_last_batch_with_too_few_rows_is_left_out_on_all_ranks(shards, batched):
    def make():
        dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(22)})
        return dataset.batch(BATCH) if batched else dataset

    found, warned = shards(make, BATCH)
    whole = [rank[:4] if batched else sum(rank[:4], []) for rank in PARTS]
    assert [[element["x"] for element in rank] for rank in found] == whole
    text = "The last 2 of 22 rows are left out: they are too few for one on each of 3 ranks."
    if batched:
        text = "A batch of 2 rows is left out: they are too few for one on each of 3 ranks."
    assert warned == [[text]] * SIZE


@pytest.mark.parametrize("make", [lambda: pairs(23).map(lambda x, y: x), generated])
def test_without_a_batch_size_all_ranks_get_equally_many_elements(shards, make):
    found, warned = shards(make, None)
    assert found == [list(range(rank, 21, 3)) for rank in range(SIZE)]
    text = "The last 2 of 23 elements are left out: they are too few for one on each of 3 ranks."
    assert warned == [[] if make is generated else [text]] * SIZE


@span
def test_a_shuffle_that_differs_between_ranks_is_told(shards):
    tf.random.set_seed(None)  # other tests set one, which makes shuffles the same
    _, warned = shards(lambda: pairs(20).shuffle(20).batch(BATCH), BATCH)
    text = (
        "shard() was given a dataset that is shuffled without a seed: each rank shuffles it in "
        "another order, so that they train on some rows several times and on others never. Call "
        "shuffle() after shard(), or give it the same seed on all ranks."
    )
    assert warned == [[text]] * SIZE


def test_what_cannot_be_told_or_does_not_fit_is_an_error(shards):
    assert refusal(compat.InvalidArgumentError, shards, lambda: pairs(20).batch(4), BATCH) == (
        "shard(batch_size=5) was given a dataset in batches of 4. Give its own batch size, or "
        "shard the dataset before its batch()."
    )
    assert (
        refusal(compat.InvalidArgumentError, shards, lambda: pairs(20).batch(2), None)
        == "A batch of 2 rows is too small for 3 ranks. Use 3 rows or more."
    )
    batches = (np.ones((rows, 2)) for rows in (3, 4))
    unknown = tf.data.Dataset.from_generator(lambda: batches, tf.float32, tf.TensorShape([None, 2]))
    assert refusal(compat.InvalidArgumentError, shards, lambda: unknown, BATCH) == (
        "shard() cannot tell whether the elements of this dataset are rows or batches: the length "
        "of their first axis is not known. Batches: call its unbatch() before. Rows: call shard() "
        "after batch(), or without batch_size."
    )
