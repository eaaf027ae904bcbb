"""The contract of ranks that train a model of the framework's own kind, without Keras."""

import importlib
import sys

import pytest

import compat

from ..native import NativeModels
from ..spans import in_span
from .faults import FAILING_JOBS, FAULTS, FAULTY, name_of
from .jobs import SIZES, Jobs
from .programs import BATCH, ROWS, call

# A rank finds the test file where this process has found it.
SCRIPT = """\
import sys
sys.path[:] = {!r}
from compat.testing.ranks import native
native.main({!r}, {!r}, *sys.argv[1:])
"""


def main(module, name, folder, functions):
    """Call ``train`` with a test class, and leave its arrays in the folder.

    Arguments:
        module, name: of the test class.
        functions: as ``programs.main()`` takes them.
    """
    compat.configure_gpu(gpus="cpu")
    call({"train": train}, functions, getattr(importlib.import_module(module), name)(), folder)


def train(contract, folder, fault=""):
    """Train a test class's model for two epochs.

    Arguments:
        fault: what happens to one rank at its third batch: of ``FAULTS``, or nothing.
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
    return {"weight%d" % place: w for place, w in enumerate(contract.weights(model))}, {}


class NativeRanksContract(NativeModels, Jobs):
    """Subclass this in a backend's test file: methods of ``NativeModels`` say how."""

    before = ("--report",)
    # In a loop of one's own nothing tells that an epoch has ended, where batches run short.
    failing_jobs = tuple(job for job in FAILING_JOBS if job.fault != "short")

    def script(self):
        return SCRIPT.format(sys.path, type(self).__module__, type(self).__name__)

    def calls(self, size):
        return [("train", [])]

    def call_of_fault(self, fault):
        return "train", [fault]

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_trains_to_the_numbers_of_one_process(self, results, size):
        """From other weights on each rank, with a last batch that is uneven."""
        ((one, _),) = results(1, "train")
        assert one
        for arrays, _ in results(size, "train"):
            self.close(arrays, one, sorted(one))

    @pytest.mark.parametrize("job", failing_jobs, ids=name_of)
    def test_fault_ends_the_job_and_names_the_rank(self, failed, job):
        self.check_failed(failed, job)
