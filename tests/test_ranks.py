"""Ranks: what launchers' environments mean, and what the public calls make of it."""

import os

import pytest
from conftest import Toy, refusal

import compat
from compat import _ranks
from compat._ranks import engines, launchers, waiting

pytestmark = pytest.mark.usefixtures("process")


@pytest.fixture
def rank(monkeypatch):
    """Make this process one of several ranks."""

    def rank(number, size, local_rank=None, local_size=None):
        values = number, size, local_rank, local_size
        if local_rank is None:
            values = number, size, number, size
        for name, value in zip(launchers.LAUNCHERS[0][1].split(), values):
            monkeypatch.setenv(name, str(value))

    return rank


def test_alone_all_calls_do_nothing():
    data = [1], {"x": None}
    assert (compat.rank(), compat.size(), compat.local_rank()) == (0, 1, 0)
    assert compat.is_chief() is True
    assert compat.shard(data) is data
    assert compat.local_batch_size(1) == 1
    assert compat.scaled_learning_rate(0.1) == 0.1


def test_calls_tell_the_place(rank):
    rank(5, 8, 1, 4)
    assert (compat.rank(), compat.size(), compat.local_rank()) == (5, 8, 1)
    assert compat.is_chief() is False
    assert compat.scaled_learning_rate(0.25) == 2.0
    rank(0, 8)
    assert compat.is_chief() is True


def test_batches_are_dealt_out(rank):
    sizes = []
    for number in range(3):
        rank(number, 3)
        sizes.append([compat.local_batch_size(batch) for batch in (3, 4, 64, 65, 66)])
    assert list(zip(*sizes)) == [(1, 1, 1), (2, 1, 1), (22, 21, 21), (22, 22, 21), (22, 22, 22)]
    assert refusal(compat.InvalidArgumentError, compat.local_batch_size, 2) == (
        "A batch of 2 rows is too small for 3 ranks. Use 3 rows or more."
    )


class Rows:
    """An array, as far as shard() looks."""

    def __init__(self, rows):
        self.rows = list(rows)
        self.shape = (len(self.rows), 2)

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        return self.rows[rows]


def test_rows_are_dealt_out_evenly(rank):
    data = {"x": (Rows(range(7)), None), "y": [Rows("abcdefg")]}
    parts = []
    for number in range(3):
        rank(number, 3)
        with pytest.warns(compat.CompatWarning) as said:
            parts.append(compat.shard(data))
        assert [str(warning.message) for warning in said] == [
            "The last 1 of 7 rows are left out: they are too few for one on each of 3 ranks."
        ]
        assert said[0].filename == __file__
    assert [part["x"] for part in parts] == [([0, 1], None), ([2, 3], None), ([4, 5], None)]
    assert [part["y"] for part in parts] == [[list("ab")], [list("cd")], [list("ef")]]


@pytest.mark.parametrize(
    "data, message",
    [
        (
            (Rows("abc"), Rows("ab")),
            "The arrays given to shard() have different numbers of rows: 2, 3. Give it arrays that "
            "belong together, row by row.",
        ),
        (Rows("a"), "1 rows are too few for 2 ranks. Give shard() one row per rank or more."),
        ([], "There is no array to take rows of in what shard() was given."),
        (
            (Rows("abc"), object()),
            "shard() takes arrays, tables of pandas, tuples, lists and dictionaries of these, "
            "tf.data datasets, Sequences and PyDatasets of Keras, generators of batches, "
            "DataLoaders, and iterators of MXNet; there is 'builtins.object' in what it was given. "
            "Let it read every size()-th item from rank() on.",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_an_error(rank, data, message):
    rank(0, 2)
    assert refusal(compat.InvalidArgumentError, compat.shard, data) == message


def test_timeout():
    assert waiting.timeout({}) == 600.0
    assert waiting.timeout({"COMPAT_TIMEOUT": "2.5"}) == 2.5
    for text in ("", "0", "-1", "soon", "nan", "inf", "1e10"):
        environ = {"COMPAT_TIMEOUT": text}
        assert refusal(compat.InvalidArgumentError, waiting.timeout, environ) == (
            "COMPAT_TIMEOUT={} is not understood. Use a number of seconds above 0, at most 1e9: "
            "how long a rank waits for the others.".format(text)
        )


# configure_gpu() and parallelize() in a rank ------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, visible, gpu",
    [
        (None, None, "1"),
        (8, None, "1"),  # eight GPUs on two machines: the launcher's number counts
        ([3, 2], None, "2"),
        ("3,2", None, "2"),
        (None, "5,4,3", "4"),
        ([2, 1], "5,4,3", "4"),
    ],
)
def test_configure_takes_the_device_of_the_local_rank(
    toy, machine, rank, monkeypatch, gpus, visible, gpu
):
    machine.plug(6)
    rank(3, 4, 1, 2)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    configuration = compat.configure_gpu(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    assert configuration.devices == ["gpu:0"]
    assert not configuration.warnings
    assert "\nranks      rank 3 of 4 (compat run)\n" in str(configuration)
    assert compat.configure_gpu(gpus) is configuration


def test_ranks_that_share_a_gpu_are_told(toy, machine, rank):
    machine.plug(2)
    rank(2, 3)
    with pytest.warns(compat.CompatWarning) as said:
        compat.configure_gpu()
    assert str(said[0].message) == (
        "a GPU for each of 3 ranks was asked for, but 2 GPUs are there: GPU 0,1. "
        "Going on with GPU 0."
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_ranks_that_share_a_gpu_are_an_error_under_strict(toy, machine, rank):
    machine.plug(1)
    rank(1, 2)
    with pytest.raises(compat.DevicesNotFoundError, match="each of 2 ranks was asked for, but 1"):
        compat.configure_gpu(8, strict=True)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_each_rank_claims_an_idle_gpu(toy, machine, rank):
    machine.add(used=40000, busy=True)
    machine.plug(2)
    rank(0, 2)
    compat.configure_gpu("free")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_idle_gpus_that_the_launcher_has_claimed_are_dealt_out(toy, machine, rank, monkeypatch):
    machine.plug(3)
    monkeypatch.setenv("COMPAT_CLAIMS", ",".join(machine.uuids[1:]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    rank(1, 2)
    compat.configure_gpu("free:2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize("asked", [{"gpus": "cpu"}, {"simulate": 3}, {}])
def test_without_gpus_a_rank_has_one_device(toy, rank, asked):
    rank(1, 3)
    configuration = compat.configure_gpu(**asked)
    assert configuration.devices == ["cpu:0"]
    assert not configuration.warnings


class Native:
    pass


class RankedToy(Toy):
    def is_native(self, model):
        return isinstance(model, Native)

    def distribute(self, model, place):
        model.place = str(place)
        return model


@pytest.fixture
def ranked_toy(toy, register):
    backend = RankedToy()
    register(backend)
    return backend


def test_parallelize_makes_the_model_one_of_the_ranks(ranked_toy, rank):
    rank(1, 2)
    model = Native()
    assert compat.parallelize(model, gpus=2) is model
    assert model.place == "rank 1 of 2 (compat run)"
    assert compat.parallelize(lambda: model) is model
    refused = refusal(compat.UnsupportedError, compat.parallelize, Native, strategy="mirrored")
    assert refused == (
        "compat cannot use strategy='mirrored' in rank 1 of 2 (compat run). Leave strategy out, or "
        "start the script without a launcher."
    )


def test_a_backend_without_ranks_never_trains_alone(ranked_toy, rank, monkeypatch):
    rank(1, 2)
    monkeypatch.delattr(RankedToy, "distribute")
    assert refusal(compat.UnsupportedError, compat.parallelize, Native()) == (
        "toy cannot train as one of several ranks yet. Start the script without a launcher (compat "
        "run without -n); parallelize() then uses the devices of one process."
    )


# The protocol of a step --------------------------------------------------------------------------


class Together(engines.Engine):
    """All ranks' engines in one process: what the others say is known beforehand."""

    others = (0.0,)

    def sum(self, values):
        return [mine + other for mine, other in zip(values, self.others)]


@pytest.fixture
def engine(rank):
    rank(1, 3)
    return Together(_ranks.own_place())


def test_steps_are_shared_by_rows(engine):
    engine.others = (30.0, 0.0, 0.0, 0.0)
    assert engine.share(10) == 0.25
    engine.others = (5.0, 1.0, 0.0, 0.0)
    assert refusal(compat.RankLostError, engine.share, 10) == (
        "Rank 1 of 3 has more batches, but rank 0 ran out of them after 1 batch. Give every rank "
        "the same number: compat.shard() does."
    )


def test_numbers_ride_with_the_rows_of_a_step(engine):
    engine.others = (30.0, 0.0, 0.0, 0.0, 1.5, 2.5)
    assert engine.share(10, [0.5, 0.0]) == 0.25
    assert list(engine.totals) == [2.0, 2.5]


def test_epochs_end_on_all_ranks_at_once(engine):
    engine.others = (20.0, 0.0, 0.0, 0.0)
    engine.share(10)
    engine.others = (20.0, 0.0, 0.0, 0.0, 3.0)
    engine.share(10, [1.0])
    engine.others = (0.0, 1.0, 0.0, 1.0, 0.0)  # as many numbers as before
    engine.close()
    assert engine.steps == 0
    engine.others = (10.0, 0.0, 0.0, 1.0)
    assert refusal(compat.RankError, engine.close) == (
        "Rank 1 of 3 ran out of batches after 0 batches, but rank 0 had more. Give every rank the "
        "same number: compat.shard() does."
    )


def test_another_size_than_the_launcher_s_is_an_error(engine):
    engine.check_size(3)
    engine.problem = str  # what an engine raises may be of RankError's own base class
    check_size = engine.waiting("to start")(engine.check_size)
    assert refusal(compat.RankError, check_size, 1) == (
        "compat run started this process as one of 3, but Together sees 1: each would train alone. "
        "Start it with the launcher of Together, or with compat run -n 3."
    )
