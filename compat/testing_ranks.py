"""The tests that the ranks of any backend must pass, as ``compat run -n N`` starts them.

A backend's test file is mostly one subclass::

    from compat.testing_ranks import RanksContract

    class TestMyBackendRanks(RanksContract):
        backend = "mybackend"

Run it as ``compat.testing``'s. What a rank does is a function of this module, which a script of
two lines calls. All that trains and compares runs in one job for each number of ranks: two on this
machine, three on two machines. Each fault is a job of its own. Most of the time goes into starting
processes that import a framework, so that no job has more ranks than it needs.
"""

import collections
import concurrent.futures
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import compat
from compat import _registry, testing_hosts
from compat._launchers import LAUNCHERS
from compat.testing import (
    CASES,
    in_span,
    initialise,
    keras_under_test,
    largest_difference,
    optimizer,
    span,
)

# Rows of a batch of all ranks, and of the data: two whole batches and one of 13 rows.
BATCH, ROWS = 61, 135
SIZES = (2, 3)
# The rank that has the fault; on two machines it is on the second.
FAULTY = 1

SCRIPT = "import sys\nfrom compat import testing_ranks\ntesting_ranks.main(*sys.argv[1:])\n"


# What a rank, or one process, does ------------------------------------------------------------


def main(folder, functions):
    """Run some of the functions below, and leave their arrays and their facts in the folder.

    Arguments:
        functions: their names and what each is called with, as JSON.
    """
    compat.configure_gpu(gpus="cpu")
    keras = keras_under_test()
    for name, arguments in json.loads(functions):
        arrays, facts = globals()[name](keras, folder, *arguments)
        stem = os.path.join(folder, "{}-{}-{}".format(name, compat.size(), compat.rank()))
        np.savez(stem, **arrays)
        with open(stem + ".json", "w") as file:
            json.dump(dict(facts, host=socket.gethostname()), file)


def read(name, folder, size, rank):
    stem = os.path.join(folder, "{}-{}-{}".format(name, size, rank))
    with np.load(stem + ".npz") as arrays, open(stem + ".json") as file:
        return dict(arrays), json.load(file)


def _data(name):
    """This rank's rows of a case's data, and its batch size."""
    inputs, targets = compat.shard(CASES[name].data(ROWS), BATCH)
    return inputs, targets, compat.local_batch_size(BATCH)


def _fit(model, name, epochs, **options):
    inputs, targets, batch_size = _data(name)
    history = model.fit(
        inputs, targets, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **options
    )
    return [float(loss) for loss in history.history["loss"]]


def _start(keras, name, options):
    """A model with known weights on rank 0, and other ones on each other rank."""
    return initialise(CASES[name].build(keras, **options), seed=compat.rank())


def train(keras, folder, trials, lstm_options):
    """Train every case: two epochs, and then one more.

    Arguments:
        trials: pairs of a case and an optimizer.
        lstm_options: of the LSTM layer.
    """
    arrays, facts = {}, {}
    for number, (name, optimizer_name) in enumerate(trials):
        options = lstm_options if name == "lstm" else {}
        before = number % 2 == 0  # parallelized before it is compiled, or after

        def build():
            return _start(keras, name, options)  # noqa: B023  # called at once

        model = compat.parallelize(build) if before else build()
        model.compile(optimizer(keras, optimizer_name), CASES[name].loss)
        if not before:
            assert compat.parallelize(model) is model
        losses = _fit(model, name, 2) + _fit(model, name, 1)
        key = "{}-{}".format(name, optimizer_name)
        inputs, targets, batch_size = _data(name)
        evaluated = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0)
        facts[key] = losses + [float(value) for value in np.ravel(evaluated)]
        for place, weight in enumerate(model.get_weights()):
            arrays["{}-{}".format(key, place)] = weight
    return arrays, facts


def train_on(keras, folder, extension):
    """Parallelize a model that was fitted, with its optimizer's state; then save and load."""
    inputs, targets = CASES["dense"].data(ROWS)

    def build():
        model = _start(keras, "dense", {})
        model.compile(optimizer(keras, "sgd"), CASES["dense"].loss, metrics=["accuracy"])
        # As if rank 0 had loaded a checkpoint, and the others started anew.
        if compat.is_chief():
            model.fit(inputs, targets, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        return model

    model = compat.parallelize(build)
    assert compat.parallelize(model) is model
    callbacks = [keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint" + extension))]
    losses = _fit(model, "dense", 2, callbacks=callbacks)
    paths = [os.path.join(folder, "{}-{}{}".format(compat.size(), rank, extension))
             for rank in range(compat.size())]  # fmt: skip
    model.save(paths[compat.rank()])
    deadline = time.monotonic() + 60
    while not os.path.exists(paths[0]) and time.monotonic() < deadline:
        time.sleep(0.05)  # rank 0 may be later
    loaded = keras.models.load_model(paths[0])
    facts = {
        "losses": losses,
        "saved": [os.path.exists(path) for path in paths],
        "learning rate": float(keras.backend.get_value(_learning_rate(model.optimizer)))
        if hasattr(keras.backend, "get_value")
        else float(model.optimizer.learning_rate),
        "class": type(model).__module__ + "." + type(model).__name__,
        "mixed precision": hasattr(keras, "mixed_precision"),
    }
    arrays = {"loaded": loaded.predict(inputs, verbose=0)}
    arrays.update(("weight%d" % place, w) for place, w in enumerate(model.get_weights()))
    return arrays, facts


def _learning_rate(optimizer):
    return optimizer.lr if hasattr(optimizer, "lr") else optimizer.learning_rate


def normalise(keras, folder):
    """Train a model with batch normalization, whose moving averages are weights, too."""

    def build():
        layers = [keras.layers.BatchNormalization(input_shape=(8,)), keras.layers.Dense(4)]
        return initialise(keras.models.Sequential(layers))

    model = compat.parallelize(build)
    model.compile(optimizer(keras, "sgd"), "mse")
    _fit(model, "dense", 2)
    return {"weight%d" % place: w for place, w in enumerate(model.get_weights())}, {}


# How far weights may be from one process's, whose matrix products sum up in that type, too.
POLICIES = {"mixed_float16": 3e-3, "mixed_bfloat16": 1e-2}


def mixed(keras, folder, policies):
    """Train under policies of mixed precision; then a step that overflows on the last rank."""
    arrays, facts = {}, {}
    for policy in policies:
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = compat.parallelize(lambda: _start(keras, "multi", {}))
        finally:
            keras.mixed_precision.set_global_policy("float32")
        model.compile(optimizer(keras, "sgd"), CASES["multi"].loss)
        _fit(model, "multi", 3)
        scales = [_loss_scale(model.optimizer)]
        for place, weight in enumerate(model.get_weights()):
            arrays["{}-{}".format(policy, place)] = weight
        if scales[0] is not None:
            (left, right), (score, same), batch_size = _data("multi")
            if compat.rank() == compat.size() - 1:
                score = score.copy()
                score[batch_size - 1] = 1e8  # one process has it in the same batch
            rows = slice(batch_size)
            model.train_on_batch([left[rows], right[rows]], [score[rows], same[rows]])
            scales.append(_loss_scale(model.optimizer))
            for place, weight in enumerate(model.get_weights()):
                arrays["{}-overflow-{}".format(policy, place)] = weight
        facts[policy] = scales
    return arrays, facts


def _loss_scale(optimizer):
    """Of mixed_float16's optimizer; other optimizers have none."""
    for name in ("loss_scale", "dynamic_scale"):
        if getattr(optimizer, name, None) is not None:
            return float(np.asarray(getattr(optimizer, name)))
    return None


FAULTS = {
    "raise": lambda: _raise(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(1000),
    "short": lambda: None,
}

# A job in which a rank has one of these faults.
#     elsewhere: whether that rank is on another machine.
#     said: what ``compat run`` says of the rank.
#     last: a pattern of the last line of its report, or None.
FailingJob = collections.namedtuple("FailingJob", "fault size elsewhere said status last")
RAISING = FailingJob(
    "raise", 2, False,
    "rank 1 of 2 failed with exit status 1; the others were ended.", 1,
    "ValueError: this rank's data is bad",
)  # fmt: skip
# The first job mostly waits. A rank that is killed leaves two, since engines tell its neighbours
# apart from others.
FAILING_JOBS = [
    FailingJob(
        "sleep", 2, False,
        "rank 1 of 2 did not come to the others, which waited for it", 1,
        "compat.errors.RankLostError: Rank 0 of 2 waited .*",
    ),
    FailingJob(
        "kill", 3, False,
        "rank 1 of 3 was killed by signal 9; the others were ended.", 128 + 9, None,
    ),
    RAISING,
    RAISING._replace(elsewhere=True),
    FailingJob(
        "exit", 2, False,
        "rank 1 of 2 ended (exit status 0) while others were still training", 1,
        "compat.errors.RankLostError: Rank 0 of 2 waited .*",
    ),
    FailingJob(
        "short", 2, False,
        "rank 1 of 2 failed with exit status 1; the others were ended.", 1,
        "compat.errors.RankError: Rank 1 of 2 ran out of batches after 3 batches, but rank 0 had "
        r"more. Give every rank the same number: compat.shard\(\) does.",
    ),
]  # fmt: skip


def _raise():
    raise ValueError("this rank's data is bad")


def fail(keras, folder, fault, extension):
    """Train, save after each batch, and have one rank fail at its third batch."""
    model = compat.parallelize(lambda: _start(keras, "dense", {}))
    model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)

    class Fault(keras.callbacks.Callback):  # type: ignore  # whichever Keras it is
        def on_batch_end(self, batch, logs=None):
            self.model.save(os.path.join(folder, fault + extension))
            if compat.rank() == FAULTY and batch == 2:
                FAULTS[fault]()

    inputs, targets = compat.shard(CASES["dense"].data(90))
    if fault == "short" and compat.rank() == FAULTY:
        inputs, targets = inputs[:9], targets[:9]
    model.fit(inputs, targets, batch_size=3, epochs=50, verbose=0, callbacks=[Fault()])
    return {}, {}


# The contract ---------------------------------------------------------------------------------


class Finished:
    """A job that has ended."""

    def __init__(self, status, out, err, seconds):
        self.status = status
        self.out = out
        self.err = err
        self.seconds = seconds


class RanksContract:
    """Subclass this in a backend's test file for ranks, and set the attributes below."""

    #: The backend's name.
    backend = ""
    #: How far weights may be from one process's.
    tolerance = 1e-5
    #: Keyword arguments of the LSTM layer, for backends with a trap there.
    lstm_options = {}  # type: dict
    #: How many are compared, at most, of the three epochs' losses and the values of ``evaluate``.
    compared = 9
    #: The ending of files of whole models.
    extension = ".h5"
    #: Cases and optimizers to train: SGD shows the scale of a gradient, Adam hides it; the LSTM's
    #: embedding has a sparse gradient.
    trials = (("dense", "sgd"), ("lstm", "sgd"), ("multi", "sgd"), ("multi", "adam"))
    #: Policies of mixed precision that this Keras has on this backend: of ``POLICIES``.
    policies = ()  # type: tuple
    #: Seconds that ranks wait for each other in the tests of faults.
    timeout = 20
    #: How much longer than that a fault may take to end a job, starting Python included.
    patience = 100

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return str(tmp_path_factory.mktemp("ranks"))

    def start(self, size, folder, *functions, **options):
        """Run functions of this module as so many ranks (1: one process).

        Arguments:
            functions: a name and a list of arguments each.
        """
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(SCRIPT)
        command = [sys.executable, "-m", "compat", "run"]
        if size > 1:
            command += ["-n", str(size), "--timeout", str(options.get("timeout", 120))]
        if options.get("two_machines"):
            hosts = "node1:1,node2:{}".format(size - 1)
            command = testing_hosts.command(2, *(command + ["--hosts", hosts]))
        framework = _registry.load(self.backend).framework
        began = time.monotonic()
        process = subprocess.Popen(
            command
            + ["--backend", framework, "--gpus", "cpu", script, folder, json.dumps(functions)],
            env=dict(os.environ, KERAS_BACKEND=framework),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=options.get("limit", 400))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail("{} hangs:\n{}\n{}".format(functions, out, err))
        return Finished(process.returncode, out, err, time.monotonic() - began)

    def trials_of(self, size):
        return self.trials[::2] if size == 3 else self.trials

    @pytest.fixture(scope="class")
    def results(self, folder):
        """What each rank of each size left, by the function's name; one job for each size.

        Three ranks are on two machines, and train every second case.
        """

        @functools.lru_cache(None)
        def trained(size):
            functions = [
                ("train", [self.trials_of(size), self.lstm_options]),
                ("train_on", [self.extension]),
                ("normalise", []),
            ]
            if self.policies:
                functions.append(("mixed", [self.policies]))
            job = self.start(size, folder, *functions, two_machines=size == 3)
            assert job.status == 0, job.out + job.err

        def results(size, name):
            trained(size)
            return [read(name, folder, size, rank) for rank in range(size)]

        return results

    # The same data ----------------------------------------------------------------------------

    @span
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("batch_size", [7, 20, 61])
    def test_shards_are_parts_of_the_same_batches(self, monkeypatch, size, batch_size):
        """Rank by rank, the k-th batches of all ranks make up the k-th batch of one process."""
        rows = np.arange(ROWS - ROWS % batch_size + size)  # a last batch of one row per rank
        batches = [[] for _ in range(0, len(rows), batch_size)]  # type: list
        for rank in range(size):
            for name, value in zip(LAUNCHERS[0][1].split(), (rank, size, rank, size)):
                monkeypatch.setenv(name, str(value))
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

    # The same numbers -------------------------------------------------------------------------

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_trains_to_the_numbers_of_one_process(self, results, size):
        """From other weights on each rank, with a last batch that is uneven, and trained on."""
        (one, one_facts), *_ = results(1, "train")
        ranks = results(size, "train")
        for name, optimizer_name in self.trials_of(size):
            key = "{}-{}".format(name, optimizer_name)
            weights = [k for k in one if k.startswith(key)]
            assert weights
            for arrays, facts in ranks:
                difference = largest_difference(
                    [arrays[w] for w in weights], [one[w] for w in weights]
                )
                assert difference <= self.tolerance, (key, difference)
                expected = one_facts[key][: self.compared]
                assert facts[key][: self.compared] == pytest.approx(expected, abs=1e-4), key
                assert facts[key] == ranks[0][1][key]

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_all_ranks_end_with_the_same_bits(self, results, size):
        for name in ("train", "train_on", "normalise"):
            (chief, _), *others = results(size, name)
            for arrays, _ in others:
                assert sorted(arrays) == sorted(chief)
                for key in chief:
                    np.testing.assert_array_equal(arrays[key], chief[key], err_msg=key)

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_moving_mean_is_that_of_one_process(self, results, size):
        """Of the inputs; a moving variance is the mean of the ranks' variances."""
        name = "weight2"  # after gamma and beta of the first layer
        (one, _), *_ = results(1, "normalise")
        for arrays, _ in results(size, "normalise"):
            assert np.abs(arrays[name]).max() > 1e-3
            difference = largest_difference([arrays[name]], [one[name]])
            assert difference <= self.tolerance, difference

    @pytest.mark.parametrize("size", SIZES)
    def test_mixed_precision_trains_to_the_numbers_of_one_process(self, results, size):
        """With the same loss scale; a step that overflows on one rank is skipped on all."""
        if not self.policies:
            assert not any(facts["mixed precision"] for _, facts in results(size, "train_on"))
            return
        (one, one_facts), *_ = results(1, "mixed")
        ranks = results(size, "mixed")
        for policy in self.policies:
            keys = sorted(key for key in one if key.startswith(policy + "-"))
            before = [key for key in keys if "overflow" not in key]
            after = [key for key in keys if "overflow" in key]
            for arrays, facts in ranks:
                difference = largest_difference(
                    [arrays[key] for key in before], [one[key] for key in before]
                )
                assert difference <= POLICIES[policy], (policy, difference)
                assert facts[policy] == one_facts[policy]
                for key in keys:
                    np.testing.assert_array_equal(arrays[key], ranks[0][0][key], err_msg=key)
                for key, skipped in zip(before, after):
                    np.testing.assert_array_equal(arrays[key], arrays[skipped])
            if "float16" in policy.split("_"):
                normal, reduced = one_facts[policy]
                assert reduced == normal / 2

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_goes_on_from_rank_0_after_a_fit(self, results, size):
        (one, one_facts), *_ = results(1, "train_on")
        for arrays, facts in results(size, "train_on"):
            difference = largest_difference(
                [arrays[key] for key in sorted(one)], [one[key] for key in sorted(one)]
            )
            assert difference <= self.tolerance, difference
            assert facts["losses"] == pytest.approx(one_facts["losses"], abs=1e-4)
            assert facts["learning rate"] == one_facts["learning rate"]
            assert facts["class"] == one_facts["class"]

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_only_rank_0_saves_and_all_can_load(self, results, folder, size):
        for _, facts in results(size, "train_on"):
            assert facts["saved"] == [True] + [False] * (size - 1)
        left = [name for name in os.listdir(folder) if name.startswith(".")]
        assert not left
        assert os.path.exists(os.path.join(folder, "checkpoint" + self.extension))

    def test_three_ranks_are_on_two_machines(self, results):
        hosts = [facts["host"] for _, facts in results(3, "train")]
        assert hosts == ["node1", "node2", "node2"]

    # Faults -----------------------------------------------------------------------------------

    def fails(self, folder, job):
        """The job, ended: it does so in time, and no process of it is left."""
        ended = self.start(
            job.size,
            folder,
            ("fail", [job.fault, self.extension]),
            two_machines=job.elsewhere,
            timeout=self.timeout,
            limit=self.timeout + self.patience,
        )
        for _ in range(50):
            left = _processes_with(os.path.join(folder, "script.py"))
            if not left:
                break
            time.sleep(0.1)
        assert not left
        return ended

    @pytest.fixture(scope="class")
    def failed(self, tmp_path_factory):
        """Each failing job's folder and its end. While one waits, others run."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            folders = [str(tmp_path_factory.mktemp(job.fault)) for job in FAILING_JOBS]
            ends = [pool.submit(self.fails, *pair) for pair in zip(folders, FAILING_JOBS)]
            yield dict(zip(FAILING_JOBS, zip(folders, ends)))

    @pytest.mark.parametrize(
        "job", FAILING_JOBS, ids=lambda job: job.fault + " on another machine" * job.elsewhere
    )
    def test_fault_ends_the_job_and_names_the_rank(self, failed, job):
        ended = failed[job][1].result()
        report = ended.err[ended.err.rindex("compat run: rank") :]
        assert job.said in report
        assert ended.status == job.status
        if job.last is not None:
            assert re.match(job.last + "$", report.rstrip().split("\n")[-1])

    def test_checkpoints_of_failed_jobs_are_whole(self, failed):
        """Rank 0 was writing one after each batch; a process of its own can load them."""
        paths = []
        for job in FAILING_JOBS:
            folder, ended = failed[job]
            ended.result()
            paths.append(os.path.join(folder, job.fault + self.extension))
        program = (
            "import sys, compat; from compat.testing import keras_under_test\n"
            "compat.configure_gpu(gpus='cpu')\n"
            "for path in sys.argv[1:]: keras_under_test().models.load_model(path)\n"
        )
        framework = _registry.load(self.backend).framework
        subprocess.run(
            [sys.executable, "-c", program] + paths,
            env=dict(os.environ, KERAS_BACKEND=framework),
            check=True,
        )


def _processes_with(argument):
    """The processes that were started with this argument."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open("/proc/{}/cmdline".format(process), "rb") as file:
                if argument.encode() in file.read().split(b"\0"):
                    found.append(process)
        except OSError:  # it has ended since
            pass
    return found
