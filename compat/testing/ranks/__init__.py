"""The tests that the ranks of any backend must pass, as ``compat run -n N`` starts them.

A backend's test file is mostly one subclass::

    from compat.testing.ranks import RanksContract

    class TestMyBackendRanks(RanksContract):
        backend = "mybackend"

Run it as those of ``compat.testing``. One job for each number of ranks trains all models: two
ranks on this machine, three on two machines; a fault ends each. Each other fault has a job of its
own. Most of the time goes into starting processes that import a framework, so that no job has more
ranks than it needs.

``NativeRanksContract`` is the same for models without Keras.
"""

import importlib
import json
import os
import re
import sys
import warnings
from typing import Any, List, Tuple

import numpy as np
import pytest

import compat

from ..._runtime.process import process
from ..contract import contract_of, in_span, span
from ..models import CASES, UNCHANGED
from ..several import NativeModels
from .jobs import FAILING_JOBS, FAULTS, FAULTY, SIZES, Jobs, call, failing, name_of
from .programs import BATCH, POLICIES, ROWS, SCRIPT


class RanksContract(Jobs):
    """Subclass this in a backend's test file for ranks, and set the attributes below."""

    #: How many are compared, at most, of the three epochs' losses and the values of ``evaluate``.
    compared = 9
    #: The ending of files of whole models.
    extension = ".h5"
    #: Cases and optimizers to train: SGD shows the scale of a gradient, Adam hides it. Three ranks
    #: train the first one, and two the others.
    trials = (("multi", "sgd"), ("words", "sgd"), ("dense", "adam"))
    #: Policies of mixed precision that this Keras has on this backend: of ``POLICIES``.
    policies: Tuple[str, ...] = ()
    #: Whether Keras is to compute items of a Sequence in other processes, too.
    processes = False
    functions = ("train", "train_on", "batches")
    last_faults = {2: "exit", 3: "kill"}
    #: Functions that train epochs, and go on from the file of the epoch before.
    going_on = ("go_on",)
    #: How many of the numbers of a batch are compared, of its loss and its metric.
    compared_of_batches = 2

    def script(self):
        """Return the script of a job."""
        return SCRIPT

    def trials_of(self, size):
        """Return the trials of a job by its number of ranks."""
        return {1: self.trials, 2: self.trials[1:], 3: self.trials[:1]}[size]

    def calls(self, size):
        """Return the calls of a job by its number of ranks.

        Three leave out the ones that do not depend on machines.
        """
        calls: List[Any] = [("train", [self.trials_of(size)])]
        for name in self.going_on:
            if size > 1:
                calls.append((name, self.stage(size - 2, size - 1)))
            else:
                left = [fault + self.extension for fault in self.last_faults.values()]
                calls.append((name, self.stage(0, 3)))
                calls.append((name, self.stage(2, 3) + [left], "last_" + name))
        if size < 3:
            calls += [("batches", [self.processes]), ("train_on", [self.extension])]
            calls.append(("normalise", []))
            calls += [("mixed", [self.policies])] if self.policies else []
        if size == 1:
            calls.append(("unchanged", []))
        return calls

    def calls_of(self, config, size):
        """Return the calls of the contract that this run of pytest tests."""
        calls = super().calls_of(config, size)
        if contract_of(config) == "whole":
            return calls
        return [("train", [self.trials_of(2)])] + [call for call in calls if call[0] == "train_on"]

    def stage(self, first, last):
        """Return the arguments of ``programs.go_on`` for a range of epochs.

        The last of ``trials`` has the most state.
        """
        return [self.trials[-1][1], self.extension, first, last]

    def call_of_fault(self, fault):
        """Return the call of ranks one of which has a fault."""
        return "fail", [fault, self.extension]

    # The same numbers -------------------------------------------------------------------------

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_trains_to_the_numbers_of_one_process(self, results, size):
        """From other weights on each rank, with a last batch that is uneven, and trained on."""
        for key in map("-".join, self.trials_of(size)):
            one, ranks = self.same_as_one(results, size, "train", key)
            for facts in ranks:
                expected = one[key][: self.compared]
                assert facts[key][: self.compared] == pytest.approx(expected, abs=1e-4), key
                assert facts[key] == ranks[0][key]

    @pytest.mark.row("shard() of a Sequence or PyDataset")
    @pytest.mark.row("shard() of a generator")
    def test_what_comes_in_batches_trains_to_the_numbers_of_one_process(self, results):
        """Computed in threads and in processes; the generator gives ranks a tiny batch more."""
        _, ranks = self.same_as_one(results, 2, "batches")
        first, second = (dict(facts, **{"same rows": None}) for facts in ranks)
        assert first == second

    def test_ranks_that_train_on_the_same_rows_are_warned_once_on_rank_0(self, results):
        """But not where ``fit()`` splits the data, as under ``compat run --parallelize``."""
        one, (first, second) = self.same_as_one(results, 2, "batches", "unsharded")
        assert first["same rows"] == [
            "All 2 ranks train MODEL on the same rows, so that an epoch takes as long as in one "
            "process: call compat.shard(), as in x, y = compat.shard((x, y)), which gives each "
            "rank its own. (Ignore this if their batches are meant to be the same.)"
        ]
        assert one["same rows"] == second["same rows"] == []
        assert first["reported"] and second["reported"] and not one["reported"]

    def test_a_device_has_the_same_name_on_each_rank(self, results):
        (_, one), *_ = results(1, "batches")
        assert [facts["device"] for _, facts in results(2, "batches")] == [one["device"]] * 2

    @pytest.mark.row("shard() of a Sequence or PyDataset")
    @pytest.mark.row("shard() of a generator")
    def test_other_batches_on_other_ranks_are_an_error(self, results):
        """They may differ from the beginning, or after an epoch."""
        text = (
            "Items gives other batches on rank 1 of 2 than on rank 0. Each rank takes its rows of "
            "the same batches, in the same order: seed what is shuffled or made at random, with "
            "one seed for all ranks."
        )
        for _, facts in results(2, "batches"):
            assert facts["begin"] == facts["epoch"] == text

    @pytest.mark.row("compat.barrier()")
    def test_a_barrier_waits_for_all_ranks(self, results):
        assert all(facts["waited"] for _, facts in results(2, "batches"))

    def test_moving_mean_is_that_of_one_process(self, results):
        """Of the inputs; a moving variance is the mean of the ranks' variances."""
        name = "weight-2"  # after gamma and beta of the first layer
        self.same_as_one(results, 2, "normalise", name)
        ranks = [arrays for arrays, _ in results(2, "normalise")]
        for arrays in ranks:
            assert np.abs(arrays[name]).max() > 1e-3
            self.check_same_bits(arrays, ranks[0])

    def test_batchnorm_of_all_ranks_or_a_warning(self, results):
        """Batch normalization has one process's numbers where it is synchronized."""
        one, _ = results(1, "normalise")[0]
        keys = [key for key in one if key.startswith("synchronized")]
        for arrays, facts in results(2, "normalise"):
            if "ranks" in self.instance().synchronizes:
                assert facts["told"] == []
                self.close(arrays, one, keys)
            else:
                (text,) = facts["told"]
                assert "cannot do on several ranks" in text and "layer" in text
                assert not all(np.allclose(arrays[key], one[key], atol=1e-4) for key in keys)

    def test_a_rank_predicts_alone_by_the_moving_averages(self, results):
        """Its batch normalization has the samples of all ranks in training."""
        for arrays, facts in [results(1, "normalise")[0], results(2, "normalise")[0]]:
            weights = [arrays["synchronized-%d" % place] for place in range(6)]
            scale, offset, mean, variance, kernel, bias = weights
            inputs, _ = CASES["dense"].data(5)
            normalized = (inputs - mean) / np.sqrt(variance + 1e-3) * scale + offset
            expected = normalized.dot(kernel) + bias
            assert np.abs(expected).max() > 0.1
            np.testing.assert_allclose(facts["predicted"], expected, rtol=1e-4, atol=1e-5)

    def test_mixed_precision_trains_to_the_numbers_of_one_process(self, results):
        """With the same loss scale; a step that overflows on one rank is skipped on all."""
        if not self.policies:
            assert not any(facts["mixed precision"] for _, facts in results(2, "train_on"))
            return
        (one, one_facts), *_ = results(1, "mixed")
        ranks = results(2, "mixed")
        for policy in self.policies:
            keys = sorted(key for key in one if key.startswith(policy + "-"))
            before = [key for key in keys if "overflow" not in key]
            after = [key for key in keys if "overflow" in key]
            for arrays, facts in ranks:
                self.close(arrays, one, before, POLICIES[policy])
                assert facts[policy] == one_facts[policy]
                self.check_same_bits(arrays, ranks[0][0])
                for key, skipped in zip(before, after):
                    np.testing.assert_array_equal(arrays[key], arrays[skipped])
            if "float16" in policy.split("_"):
                normal, reduced = one_facts[policy]
                assert reduced == normal / 2

    @span
    def test_goes_on_from_rank_0_after_a_fit(self, results):
        one, ranks = self.same_as_one(results, 2, "train_on")
        for facts in ranks:
            assert facts["losses"] == pytest.approx(one["losses"], abs=1e-4)
            assert facts["learning rate"] == one["learning rate"]
            assert facts["class"] == one["class"]

    @span
    def test_losses_and_metrics_of_a_batch_are_those_of_all_ranks(self, results):
        """Of ``train_on_batch()`` and ``test_on_batch()``, where the ranks' parts are uneven."""
        (_, one), *_ = results(1, "train_on")
        for _, facts in results(2, "train_on"):
            for values, expected in zip(facts["on batches"], one["on batches"]):
                compared = slice(self.compared_of_batches)
                assert values[compared] == pytest.approx(expected[compared], abs=1e-4)

    @span
    def test_one_rank_ends_training_for_all(self, results):
        """By ``stop_training``, within the second epoch or at its end; by a loss that is NaN."""
        for _, facts in results(2, "train_on"):
            assert facts["stopped"] == [2, 2, 1]

    @span
    def test_only_rank_0_saves_and_all_can_load(self, results, folder):
        (_, one_facts), *_ = results(1, "train_on")
        for _, facts in results(2, "train_on"):
            assert facts["saved"] == [True, False]
            assert facts["logged"] == 3
            assert facts["left"] == one_facts["left"]  # 3 in Keras 3.0, which restores no epoch
        (_, facts), *_ = results(2, "train_on")
        assert facts["written"] == one_facts["written"]  # for TensorBoard
        assert facts["saved over"] == [True, 0o600, True, 2]  # as plain Keras leaves them
        left = [name for name in os.listdir(folder) if name.startswith(".")]
        assert not left
        assert os.path.exists(os.path.join(folder, "checkpoint" + self.extension))

    # No edit at all ---------------------------------------------------------------------------

    @pytest.mark.row("compat run --parallelize, ranks")
    def test_a_script_without_compat_trains_to_the_numbers_of_one_process(self, results, tmp_path):
        """Its data is split over the ranks, and its first model parallelized."""
        script, logs = tmp_path / "unchanged.py", tmp_path / "logs"
        script.write_text(UNCHANGED)
        # Whatever the launcher, each rank has a log file of its own.
        path = tmp_path / "report.json"
        options = ["--parallelize", "--quiet", "--log-dir", str(logs), "--report-json", str(path)]
        job = self.run(2, str(script), before=options)
        assert job.status == 0, job.out + job.err
        histories = []
        for rank in range(2):
            printed = (logs / "rank-{}.log".format(rank)).read_text()
            (line,) = re.findall("HISTORY (.*)", printed)
            histories.append([float(value) for value in line.split()])
        assert re.findall(r"\[(\d)\] HISTORY", job.out) == ["0"]
        assert "runs on rank 0 of 2" in job.err
        ((_, alone),) = results(1, "unchanged")
        assert histories[0] == pytest.approx(alone["history"], abs=1e-4)
        assert histories[0] == histories[1]
        # Two epochs of arrays, where 34 of 135 rows are for validation, which each rank does, and
        # two of all rows, in items and in batches.
        trained = 2 * (101 + 135 + 135)
        report = json.loads(path.read_text())
        assert [each["rank"] for each in report["devices"]] == [0, 1]
        assert sum(each["training_rows"] for each in report["devices"]) == trained
        assert sum(each["rows"] for each in report["devices"]) == trained + 2 * 68
        assert "\nAll 2 ranks worked: " in job.err

    # Faults -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("job", failing(slowly=["raise", "short", "sleep"]), ids=name_of)
    def test_fault_ends_the_job_and_names_the_rank(self, failed, job):
        self.check_failed(failed, job)

    def test_goes_on_from_the_files_of_more_and_of_fewer_ranks(self, results):
        """Two ranks, then three, then one process: as one that trains without a break.

        It also loads what failed jobs have left, of which rank 0 was saving after each batch.
        """
        for name in self.going_on:
            ((one, one_facts),) = results(1, name)
            stages = results(2, name), results(3, name), results(1, "last_" + name)
            for epoch, ranks in enumerate(stages):
                for arrays, facts in ranks:
                    assert arrays
                    self.close(arrays, one, sorted(arrays))
                    assert facts["losses"] == pytest.approx([one_facts["losses"][epoch]], abs=1e-4)


# Models of the framework's own kind ----------------------------------------------------------

# A rank finds the test file where this process has found it.
NATIVE_SCRIPT = """\
import sys
sys.path[:] = {!r}
from compat.testing import ranks
ranks.main({!r}, {!r}, *sys.argv[1:])
"""


def main(module, name, folder, functions):
    """Call ``train`` with a test class, and write its arrays into a folder.

    Arguments:
        module: that of the test class.
        name: that of the test class.
        folder: the path.
        functions: as ``programs.main()`` takes them.
    """
    compat.configure_gpu(gpus="cpu")
    call({"train": train}, functions, getattr(importlib.import_module(module), name)(), folder)


def train(contract, folder, fault=""):
    """Train a test class's model for two epochs.

    Arguments:
        contract: an instance of the class.
        folder: that of the job.
        fault: the one of ``FAULTS`` that one rank has at its third batch; empty: none.
    """
    model = contract.build(seed=compat.rank())  # on all ranks but rank 0 other weights
    assert compat.parallelize(model) is model
    inputs, targets = compat.shard(contract.data(ROWS), BATCH)
    rows = compat.local_batch_size(BATCH)
    step = 0
    for _ in range(2):
        for start in range(0, len(inputs), rows):
            step += 1
            if fault and step == 3 and compat.rank() == FAULTY:
                FAULTS[fault]()
            contract.train(model, inputs[start : start + rows], targets[start : start + rows])
    weights = {"weight%d" % place: w for place, w in enumerate(contract.weights(model))}
    return weights, {"same rows": _unsharded(contract)}


def _unsharded(contract):
    """Return the warnings of a step with a batch that is the same on all ranks."""
    model = compat.parallelize(contract.build())
    inputs, targets = contract.data(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contract.train(model, inputs, targets)
    process.same_rows.clear()  # the report of the job is about the other model
    return [str(each.message) for each in caught if each.category is compat.CompatWarning]


class NativeRanksContract(NativeModels, Jobs):
    """Tests to subclass in a backend's test file, with the methods of ``NativeModels``."""

    before = ("--report",)
    # In a custom loop the end of an epoch is not known, where batches run short.
    failing_jobs = tuple(job for job in FAILING_JOBS if job.fault != "short")

    def script(self):
        """Return the script of a job."""
        return NATIVE_SCRIPT.format(sys.path, type(self).__module__, type(self).__name__)

    def calls(self, size):
        """Return the functions that ranks call."""
        return [("train", [])]

    def call_of_fault(self, fault):
        """Return the function that ranks call when one of them has a fault."""
        return "train", [fault]

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_trains_to_the_numbers_of_one_process(self, results, size):
        """From other weights on each rank, with a last batch that is uneven."""
        self.same_as_one(results, size, "train")

    def test_ranks_that_train_on_the_same_rows_are_warned_once_on_rank_0(self, results):
        (_, one), *_ = results(1, "train")
        (_, first), (_, second) = results(2, "train")
        (text,) = first["same rows"]
        assert re.match(r"All 2 ranks train '\w+' on the same rows, so that an epoch ", text)
        assert one["same rows"] == second["same rows"] == []

    @pytest.mark.parametrize("job", failing_jobs, ids=name_of)
    def test_fault_ends_the_job_and_names_the_rank(self, failed, job):
        self.check_failed(failed, job)
