"""shard() of what comes in batches, as far as no framework is needed; what ranks compare."""

import itertools
import multiprocessing.pool
import pickle
import sys
import threading
import types
import warnings

import numpy as np
import pytest
from conftest import refusal
from thread_ranks import Threads, together

import compat
from compat._ranks import batch_agreement, keras_model, own_place
from compat._ranks.launchers import LAUNCHERS
from compat._runtime.process import process as own_process

pytestmark = pytest.mark.usefixtures("process")

SIZE = 3
FEW = "A batch of 2 rows is left out: they are too few for one on each of 3 ranks."
# Of batches of 0 to 4, ..., 15 to 19, and 20 to 22.
PARTS = [
    [[0, 1], [5, 6], [10, 11], [15, 16], [20]],
    [[2, 3], [7, 8], [12, 13], [17, 18], [21]],
    [[4], [9], [14], [19], [22]],
]


class Sequence:
    """As Keras has it."""

    def on_epoch_end(self):
        pass


class Items(Sequence):
    """Batches of five rows."""

    classes = 7

    def __init__(self, rows, batch=5):
        self.rows = np.arange(rows)
        self.batch = batch
        self.computed = []
        self.ended = 0

    def __len__(self):
        return -(-len(self.rows) // self.batch)

    def __getitem__(self, index):
        self.computed.append(index)
        x = self.rows[index * self.batch : (index + 1) * self.batch]
        return x, {"y": -x, "none": None}

    def on_epoch_end(self):
        self.ended += 1
        self.rows = self.rows[::-1]


@pytest.fixture
def as_rank(monkeypatch):
    def as_rank(number, size=SIZE):
        for name, value in zip(LAUNCHERS[0][1].split(), (number, size, number, size)):
            monkeypatch.setenv(name, str(value))

    return as_rank


@pytest.fixture
def shards(as_rank):
    """Return the shards of three ranks, and the warnings while they shard and draw."""

    def shards(make, draw=list, batch_size=None):
        found, warned = [], []
        for number in range(SIZE):
            as_rank(number)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found.append(draw(compat.shard(make(), batch_size)))
            warned.append([str(w.message) for w in caught if w.category is compat.CompatWarning])
        return found, warned

    return shards


def of_x(batches):
    for x, y in batches:
        np.testing.assert_array_equal(x, -y["y"])
        assert y["none"] is None
    return [x.tolist() for x, _ in batches]


def drawn(part):
    return [part[index] for index in range(len(part))]


def generate(rows, batch=5):
    items = Items(rows, batch)
    return (items[index] for index in range(len(items)))


class Table:
    """Has rows as a DataFrame has: by ``iloc``, and [] is for columns."""

    def __init__(self, values, index):
        self.values, self.index, self.shape = values, index, values.shape
        self.iloc = self

    def __getitem__(self, rows):
        return Table(self.values[rows], self.index[rows])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch_size", [7, 20, 61])
def test_parts_of_arrays_make_up_the_batches_of_one_process(as_rank, size, batch_size):
    """Rank by rank: the k-th batches of all ranks are the k-th batch of one process."""
    rows = np.arange(135 - 135 % batch_size + size)  # a last batch of one row for each rank
    batches = [[] for _ in range(0, len(rows), batch_size)]
    for number in range(size):
        as_rank(number, size)
        (x, again), y = compat.shard(((rows, rows[:, None]), {"y": -rows}), batch_size)
        np.testing.assert_array_equal(x, again[:, 0])
        np.testing.assert_array_equal(x, -y["y"])
        local = compat.local_batch_size(batch_size)
        for place, batch in enumerate(batches):
            batch.extend(x[place * local : (place + 1) * local])
        assert len(x) <= len(batches) * local
    expected = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    for batch, one in zip(batches, expected):
        np.testing.assert_array_equal(batch, one)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_rows_of_tables_keep_their_index(as_rank, batch_size):
    as_rank(1)
    rows = np.arange(10, 33)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, array = compat.shard([Table(rows, rows + 100), rows], batch_size)
    assert isinstance(table, Table)
    assert table.values.tolist() == array.tolist() == [row - 100 for row in table.index]


def check_parts(shards, whole, few, draw=list):
    """Check that a batch with too few rows is left out on all ranks."""
    for make, expected, told in ((whole, PARTS, []), (few, [part[:4] for part in PARTS], [FEW])):
        found, warned = shards(make, draw)
        assert [of_x(batches) for batches in found] == expected
        assert warned == [told] * SIZE


@pytest.mark.row("shard() of a Sequence or PyDataset")
def test_items_of_a_sequence_become_parts_of_them(shards):
    check_parts(shards, lambda: Items(23), lambda: Items(22), drawn)
    found, _ = shards(lambda: Items(23), drawn, 5)
    assert [of_x(batches) for batches in found] == PARTS


@pytest.mark.row("shard() of a Sequence or PyDataset")
def test_the_part_of_a_sequence_is_one(as_rank):
    as_rank(1)
    items = Items(23)
    part = compat.shard(items)
    assert isinstance(part, Sequence) and not isinstance(part, Items)
    assert items.computed == [4]
    assert part.classes == 7
    drawn(part)
    assert items.computed == [4, 0, 1, 2, 3]  # the last one was kept
    assert part[-1][0].tolist() == [21]
    with pytest.raises(IndexError):
        part[5]
    part.on_epoch_end()
    assert items.ended == 1
    assert part[0][0].tolist() == [20, 19]
    assert not hasattr(part, "no_such_attribute")
    copy = pickle.loads(pickle.dumps(part))
    assert len(copy) == 5 and copy[1][0].tolist() == part[1][0].tolist()


def test_an_epoch_that_keras_ends_twice_ends_once(as_rank):
    """In a thread, and then in fit(), as tf.keras does where threads compute items."""
    as_rank(1)
    items = Items(23)
    part = compat.shard(items)

    def in_thread():
        thread = threading.Thread(target=part.on_epoch_end)
        thread.start()
        thread.join()

    for end, ended in (
        (in_thread, 1),
        (part.on_epoch_end, 1),  # the same end
        (part.on_epoch_end, 2),
        (in_thread, 3),
        (in_thread, 4),
        (part.begin, 4),  # another fit()
        (part.on_epoch_end, 5),
    ):
        end()
        assert items.ended == ended


def test_processes_that_compute_items_leave_their_checksums(as_rank):
    as_rank(0)
    part = compat.shard(Items(23))
    assert part.position() == 0
    first = part.peek()
    child = multiprocessing.get_context("fork").Process(target=part.__getitem__, args=(0,))
    child.start()
    child.join()
    assert (part.position(), part.checksum_at(1)) == (1, first)
    part.on_epoch_end()
    assert part.position() == 1
    part[0]
    assert part.position() == 2
    assert part.checksum_at(2) not in (0, first)
    assert part.checksum_at(1) == first and part.checksum_at(3) == 0


def infinite():
    class PyDataset:
        workers, use_multiprocessing, max_queue_size = 1, False, 10
        num_batches = None

        def __init__(self, **options):
            self.options = options

        def on_epoch_end(self):
            pass

    class Endless(PyDataset):
        def __getitem__(self, index):
            return np.arange(5) + 5 * index

    return Endless()


def test_a_pydataset_may_have_no_end(as_rank):
    as_rank(1)
    whole = infinite()
    whole.workers = 4
    part = compat.shard(whole)
    assert part.num_batches is None
    assert part[2].tolist() == [12, 13]
    assert part.options == {"workers": 4, "use_multiprocessing": False, "max_queue_size": 10}
    assert part.peek() != 0


@pytest.mark.row("shard() of a generator")
@pytest.mark.parametrize("kind", [lambda batches: batches, lambda batches: map(tuple, batches)])
def test_batches_of_a_generator_become_parts_of_them(shards, kind):
    few = itertools.chain
    check_parts(shards, lambda: kind(generate(23)), lambda: few(generate(2), kind(generate(20))))
    # A generator becomes one, which is all that Keras 3 takes.
    given = kind(generate(3))
    (types_of_part, *_), _ = shards(lambda: given, type)
    assert (types_of_part is types.GeneratorType) == (type(given) is types.GeneratorType)


def test_threads_may_share_the_part_of_an_iterator(as_rank):
    """Each batch comes once, and the checksums are those of the order of batches."""
    as_rank(0)
    part = compat.shard(iter(list(generate(500))))
    found = []

    def draw():
        for x, _ in part:
            found.extend(x.tolist())

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [row for row in range(500) if row % 5 < 2]
    alone = compat.shard(generate(500))
    list(alone)
    assert batch_agreement.part_in(alone).checksum_at(100) == part.checksum_at(100) != 0


OTHER_BATCHES = (
    "shard(batch_size={}) was given batches of {} rows. Leave batch_size out: what comes in "
    "batches has its own."
)


@pytest.mark.parametrize(
    "make, batch_size, message",
    [
        (lambda: Items(8, 9), 4, OTHER_BATCHES.format(4, 8)),
        (lambda: generate(10), 4, OTHER_BATCHES.format(4, 5)),
        (
            lambda: Items(20),
            2,
            "A batch of 2 rows is too small for 3 ranks. Use 3 rows or more.",
        ),
        (
            lambda: Items(2),
            None,
            "2 rows are too few for 3 ranks. Give shard() one row per rank or more.",
        ),
        (
            lambda: compat.shard(generate(10)),
            None,
            "shard() was given what it has returned before: this rank's part. Call it once.",
        ),
        (
            lambda: iter([(np.arange(5), np.arange(4))]),
            None,
            "The arrays given to shard() have different numbers of rows: 4, 5. Give it arrays that "
            "belong together, row by row.",
        ),
    ],
)
def test_what_cannot_be_split_is_an_error(as_rank, make, batch_size, message):
    as_rank(0)
    shard = compat.shard
    assert refusal(compat.InvalidArgumentError, lambda: list(shard(make(), batch_size))) == message


def test_only_the_last_item_may_be_small(as_rank):
    as_rank(0)

    class Small(Items):
        def __getitem__(self, index):
            return np.arange(2 if index == 1 else 5)

    part = compat.shard(Small(20))
    assert refusal(compat.InvalidArgumentError, part.__getitem__, 1) == (
        "Item 1 of Small has 2 rows, which are too few for one on each of 3 ranks; only the last "
        "item is left out then. Give all others one row per rank or more."
    )


# What ranks compare -------------------------------------------------------------------------------


def differs(name):
    return (
        "{} gives other batches on rank 1 of 2 than on rank 0. Each rank takes its rows of the "
        "same batches, in the same order: seed what is shuffled or made at random, with one seed "
        "for all ranks.".format(name)
    )


def parts(as_rank, *made):
    found = []
    for number, source in enumerate(made):
        as_rank(number, 2)
        found.append(compat.shard(source))
    return found


def begun(engine, *sources):
    """Return the agreement of a ``fit()`` on its data."""
    agreed = batch_agreement.Agreement(engine, sources)
    agreed.compare(engine.gather(agreed.advance(engine.gather(agreed.positions()))))
    return agreed


def test_fit_begins_with_the_same_batches(as_rank):
    same = parts(as_rank, Items(20), Items(20))
    other = parts(as_rank, generate(20), generate(20, 10))

    def begin(*sources):
        def function(engine):
            begun(engine, *[source[engine.place.rank] for source in sources])

        return together(2, function)

    assert begin(same) == begin(same, [None, None]) == begin([1, 1], same) == [None, None]
    assert begin(other) == [differs("generator")] * 2
    assert begin(same, other) == [differs("generator")] * 2
    # One rank may validate alone.
    assert begin(same, [other[0], None]) == [None, None]
    # What was looked at is not lost.
    assert [x.tolist() for x, _ in other[0]][0] == [0, 1, 2]


def test_a_rank_whose_generator_is_behind_catches_up(as_rank):
    """Keras drops the batches that it has taken ahead when fit() ends."""
    both = parts(as_rank, generate(100), generate(100))
    for _ in range(4):
        next(both[1])

    def function(engine):
        begun(engine, both[engine.place.rank])

    assert together(2, function) == [None, None]
    assert [next(part)[0].tolist() for part in both] == [[20, 21, 22], [23, 24]]


def test_threads_of_an_earlier_fit_draw_no_more(as_rank):
    """Those of Keras' pool, which it does not wait for."""
    as_rank(0)
    part = compat.shard(generate(100))

    def draw():
        return next(part)

    earlier, later = multiprocessing.pool.ThreadPool(1), multiprocessing.pool.ThreadPool(1)
    try:
        assert earlier.apply(draw)[0].tolist() == [0, 1]
        batch_agreement.part_in(part).begin()
        assert earlier.apply(draw) is None
        assert later.apply(draw)[0].tolist() == [5, 6]
        assert draw()[0].tolist() == [10, 11]
        batch_agreement.part_in(part).begin()
        assert draw()[0].tolist() == [15, 16]
    finally:
        earlier.terminate()
        later.terminate()


def test_epochs_end_with_the_same_batches(as_rank):
    """Other ones than at first: an unseeded shuffle, for example, at the end of an epoch.

    Those of a generator here, of a Sequence in the ranks' contract.
    """

    def endless(shift):
        rows = np.arange(20)
        while True:
            for start in range(0, 20, 5):
                yield rows[start : start + 5]
            rows = np.roll(rows, shift)

    both = parts(as_rank, endless(0), endless(1))

    def function(engine):
        part = both[engine.place.rank]
        agreed = begun(engine, part)
        for _ in range(2):
            for _ in range(4 + engine.place.rank):  # which takes one ahead
                assert len(next(part)) in (2, 3)
            position = agreed.parts[0].position()
            agreed.epoch_ended([of_rank[0] for of_rank in engine.gather([position])])

    assert together(2, function) == [differs("generator")] * 2


@pytest.mark.skipif(sys.version_info < (3, 8), reason="of Python 3.8")
def test_arguments_without_a_name_stay_where_they_are():
    """A method that a model has in place of Keras' own ``fit``."""
    own = {}
    exec("def fit(x, /, y=None, callbacks=None): pass", own)
    assert keras_model.arguments_by_name(own["fit"], (1, 2), {"callbacks": 3}) == (
        (1, 2),
        {"callbacks": 3},
    )


@pytest.mark.row("compat.barrier()")
def test_barrier(as_rank, monkeypatch):
    assert compat.barrier() is None
    as_rank(1, 2)
    assert refusal(compat.RankError, compat.barrier) == (
        "compat.barrier() was called before the ranks have joined, so none can wait for the "
        "others. Call it after compat.parallelize(), which joins them."
    )
    asked = []
    engine = Threads(own_place(), None, None)
    monkeypatch.setattr(engine, "sum", lambda values: asked.append(values) or values)
    own_process.engines[Threads] = engine
    assert compat.barrier() is None
    assert len(asked) == 1
