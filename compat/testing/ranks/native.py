"""The contract of ranks that train a model of the framework's own kind, without Keras."""

import functools
import importlib
import os
import re
import socket
import sys

import numpy as np
import pytest

import compat

from ..models import largest_difference
from ..native import NativeModels
from ..spans import in_span
from .faults import FAILING_JOBS, FAULTS, FAULTY
from .jobs import Jobs
from .programs import BATCH, ROWS

SIZES = (2, 3)
# A rank finds the test file where this process has found it.
SCRIPT = """\
import sys
sys.path[:] = {!r}
from compat.testing.ranks import native
native.main({!r}, {!r}, *sys.argv[1:])
"""


def main(module, name, folder, fault=""):
    """Train a test class's model for two epochs, and leave its weights in the folder.

    Arguments:
        module, name: of the test class.
        fault: what happens to one rank at its third batch: of ``FAULTS``, or nothing.
    """
    compat.configure_gpu(gpus="cpu")
    contract = getattr(importlib.import_module(module), name)()
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
    arrays = {"weight%d" % place: w for place, w in enumerate(contract.weights(model))}
    arrays["host"] = np.array(socket.gethostname())
    np.savez(os.path.join(folder, "{}-{}".format(compat.size(), compat.rank())), **arrays)


class NativeRanksContract(NativeModels, Jobs):
    """Subclass this in a backend's test file: methods of ``NativeModels`` say how."""

    def start(self, size, folder, *arguments, **options):
        """Train as so many ranks (1: one process)."""
        script = os.path.join(str(folder), "script.py")
        with open(script, "w") as file:
            file.write(SCRIPT.format(sys.path, type(self).__module__, type(self).__name__))
        return self.run(size, script, str(folder), *arguments, **options)

    @pytest.fixture(scope="class")
    def results(self, tmp_path_factory):
        """What each rank of each size left; three ranks are on two machines."""
        folder = tmp_path_factory.mktemp("ranks")

        @functools.lru_cache(None)
        def results(size):
            job = self.start(size, folder, two_machines=size == 3, before=["--report"])
            assert job.status == 0, job.out + job.err
            if size > 1:
                assert "\nAll {} ranks worked: ".format(size) in job.err, job.err
            found = []
            for rank in range(size):
                with np.load(str(folder / "{}-{}.npz".format(size, rank))) as arrays:
                    found.append(dict(arrays))
            return found

        return results

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_trains_to_the_numbers_of_one_process(self, results, size):
        """From other weights on each rank, with a last batch that is uneven."""
        (one,) = results(1)
        names = sorted(name for name in one if name.startswith("weight"))
        assert names
        for arrays in results(size):
            difference = largest_difference(
                [arrays[name] for name in names], [one[name] for name in names]
            )
            assert difference <= self.tolerance, difference

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_all_ranks_end_with_the_same_bits(self, results, size):
        chief, *others = results(size)
        for arrays in others:
            for name in (name for name in chief if name.startswith("weight")):
                np.testing.assert_array_equal(arrays[name], chief[name], err_msg=name)

    def test_three_ranks_are_on_two_machines(self, results):
        assert [str(arrays["host"]) for arrays in results(3)] == ["node1", "node2", "node2"]

    @pytest.mark.parametrize(
        "job",
        # In a loop of one's own nothing tells that an epoch has ended, where batches run short.
        [job for job in FAILING_JOBS if job.fault != "short"],
        ids=lambda job: job.fault + " on another machine" * job.elsewhere,
    )
    def test_fault_ends_the_job_and_names_the_rank(self, tmp_path, job):
        ended = self.start(
            job.size,
            tmp_path,
            job.fault,
            two_machines=job.elsewhere,
            timeout=self.timeout,
            limit=self.timeout + self.patience,
        )
        self.check_no_process_is_left(str(tmp_path / "script.py"))
        report = ended.err[ended.err.rindex("compat run: rank") :]
        assert job.said in report
        assert ended.status == job.status
        if job.last is not None:
            assert re.match(job.last + "$", report.rstrip().split("\n")[-1])
