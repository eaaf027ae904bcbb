"""Jobs of several ranks, on this machine or on two, started as a user starts them.

Comparisons of their results that are the same for models of every kind are here, too.
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
import threading
import time
from typing import Dict, Tuple

import numpy as np
import pytest

import compat

from ..._commands import machines
from ..._verification import largest_difference
from ..contract import OfBackend, contract_of, in_span, slow

SIZES = (2, 3)
# A job that has ended.
Finished = collections.namedtuple("Finished", "status out err")

# The rank that has the fault; on two machines it is on the second.
FAULTY = 1


def _raise():
    """Raise an error beside a thread, for which Python, other ranks and the launcher would wait."""
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("this rank's data is bad")


FAULTS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(1000),
    "short": lambda: None,
}

# A job in which a rank has one of these faults.
#     elsewhere: whether that rank is on another machine.
#     said: the report of ``compat run`` on that rank, after its number.
#     last: a pattern of the last line of its report, or None.
FailingJob = collections.namedtuple("FailingJob", "fault size elsewhere said status last")


def name_of(job):
    """Return the name of a failing job."""
    return job.fault + " on another machine" * job.elsewhere


_FAILED = "failed with exit status 1; the others were ended."
_WAITED = r"compat.errors.RankLostError: Rank 0 of 2 waited .* \(\w+.py, line \d+\), but .*"
_SHORT = (
    "compat.errors.RankError: Rank 1 of 2 ran out of batches after 3 batches, but rank 0 had "
    r"more. Give every rank the same number: compat.shard\(\) does."
)
# The first job mostly waits. A rank that is killed leaves two, one of them on its machine, since
# engines distinguish its neighbours from others.
FAILING_JOBS = [
    FailingJob("sleep", 2, False, "did not come to the others, which waited for it", 1, _WAITED),
    FailingJob("kill", 3, True, "was killed by signal 9; the others were ended.", 128 + 9, None),
    FailingJob("raise", 2, True, _FAILED, 1, "ValueError: this rank's data is bad"),
    FailingJob(
        "exit", 2, False, "ended (exit status 0) while others were still training", 1, _WAITED
    ),
    FailingJob("short", 2, False, _FAILED, 1, _SHORT),
]


def failing(slowly):
    """Return the jobs that fail, for ``parametrize``: those with some of the faults are slow."""
    return [pytest.param(job, marks=[slow] if job.fault in slowly else []) for job in FAILING_JOBS]


def call(known, functions, first, folder, before=lambda: None):
    """Call functions by their names, and write their results into a folder.

    Results are stored by the function's name, or by another one that follows its arguments.

    Arguments:
        known: functions by their names.
        functions: a list of those to call, as JSON: the name, its further arguments, and optionally
            the name of the results.
        first: the first argument of each.
        folder: the second argument of each, where the results go.
        before: a function to call before each.
    """
    for name, arguments, *other in json.loads(functions):
        before()
        arrays, facts = known[name](first, folder, *arguments)
        name = (other or [name])[0]
        stem = os.path.join(folder, "{}-{}-{}".format(name, compat.size(), compat.rank()))
        np.savez(stem, **arrays)
        with open(stem + ".json", "w") as file:
            json.dump(dict(facts, host=socket.gethostname()), file)


def read(name, folder, size, rank):
    """Return the arrays and the facts that a rank has written, by the name of its results."""
    stem = os.path.join(folder, "{}-{}-{}".format(name, size, rank))
    with np.load(stem + ".npz") as arrays, open(stem + ".json") as file:
        return dict(arrays), json.load(file)


class Jobs(OfBackend):
    """Base class of tests that start jobs of ranks of one backend."""

    #: Functions whose arrays are the same on all ranks, to the bit.
    functions: Tuple[str, ...] = ("train",)
    #: Options of ``compat run`` for the jobs that train.
    before: Tuple[str, ...] = ()
    #: By the number of ranks, the fault that ends the job which trains.
    last_faults: Dict[int, str] = {}
    #: Whether the engine may abort a process whose peer has left, as Horovod 0.28 sometimes does.
    may_abort = False
    #: Seconds that ranks wait for each other in the tests of faults.
    timeout = 20
    #: How much longer than that a fault may take to end a job, starting Python included.
    patience = 100

    def script(self):
        """Return the script, which takes the folder and the functions to call, as JSON."""
        raise NotImplementedError

    def calls(self, size):
        """Return the calls of a number of ranks: each the name of a function and its arguments.

        A third item is the name of the results, where that is another one.
        """
        raise NotImplementedError

    def calls_of(self, config, size):
        """Return the calls of the contract that this run of pytest tests."""
        return self.calls(size)

    def call_of_fault(self, fault):
        """Return the call of ranks one of which has a fault."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        """Return the folder of the results."""
        return str(tmp_path_factory.mktemp("ranks"))

    def start(self, size, folder, *calls, **options):
        """Call functions in a number of ranks (1: one process): see ``run()``."""
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(self.script())
        return self.run(size, script, folder, json.dumps(calls), **options)

    def run(self, size, script, *arguments, two_machines=False, timeout=120, limit=400, before=()):
        """Run a script by ``compat run`` to its end.

        Arguments:
            size: the number of ranks; 1: one process.
            script: its path.
            *arguments: those of the script.
            two_machines: whether all ranks but the first are on another machine.
            timeout: seconds that ranks wait for each other.
            limit: seconds after which the job counts as hanging.
            before: more options of ``compat run``.
        """
        command = [sys.executable, "-m", "compat", "run"]
        if size > 1:
            command += ["-n", str(size), "--timeout", str(timeout)]
        if two_machines:
            hosts = "node1:1,node2:{}".format(size - 1)
            command = machines.command(2, *(command + ["--hosts", hosts]))
        framework = self.instance().framework
        command += ["--backend", framework, "--gpus", "cpu", *before, script, *arguments]
        process = subprocess.Popen(
            command,
            env=dict(os.environ, KERAS_BACKEND=framework),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail("{} hangs:\n{}\n{}".format([script, *arguments], out, err))
        return Finished(process.returncode, out, err)

    @pytest.fixture(scope="class")
    def trained(self, folder, request):
        """Return a function of a size that returns the ended job, with its results in the folder.

        Three ranks are on two machines.
        """
        whole = contract_of(request.config) == "whole"

        @functools.lru_cache(None)
        def trained(size):
            if whole and size != 2:
                trained(2 if size == 3 else 3)  # from whose files this one goes on
            calls = self.calls_of(request.config, size)
            options = {"two_machines": size == 3, "before": self.before}
            last, fault = calls[-1][0], self.last_faults.get(size)
            if fault:
                calls = calls + [self.call_of_fault(fault)]
            job = self.start(size, folder, *calls, **options)
            expected = {one.fault: one.status for one in FAILING_JOBS}[fault] if fault else 0
            assert job.status == expected or self.aborted(job, fault), job.out + job.err
            done = os.path.join(folder, "{}-{}-0.json".format(last, size))  # before the fault
            assert os.path.exists(done), job.out + job.err
            if size > 1 and "--report" in self.before:
                assert "\nAll {} ranks worked: ".format(size) in job.err, job.err
            return job

        return trained

    @pytest.fixture(scope="class")
    def results(self, folder, trained):
        """Return a function of a size and a name that returns the results of all ranks."""

        def results(size, name):
            trained(size)
            return [read(name, folder, size, rank) for rank in range(size)]

        return results

    def close(self, arrays, one, keys, tolerance=None):
        """Check that arrays of a rank are those of one process."""
        difference = largest_difference([arrays[key] for key in keys], [one[key] for key in keys])
        assert difference <= (tolerance or self.tolerance), (keys, difference)

    def same_as_one(self, results, size, name, prefix=""):
        """Check that ranks' arrays are those of one process, if their names begin with a prefix.

        Returns:
            The facts of that process, and a list of those of each rank.
        """
        ((one, one_facts),) = results(1, name)
        keys = sorted(key for key in one if key.startswith(prefix))
        assert keys
        ranks = results(size, name)
        for arrays, _ in ranks:
            assert sorted(key for key in arrays if key.startswith(prefix)) == keys
            self.close(arrays, one, keys)
        return one_facts, [facts for _, facts in ranks]

    def check_same_bits(self, arrays, others):
        """Check that two ranks have the same arrays."""
        assert sorted(arrays) == sorted(others)
        for key in arrays:
            np.testing.assert_array_equal(arrays[key], others[key], err_msg=key)

    @pytest.mark.parametrize("size", in_span(SIZES, [2]))
    def test_all_ranks_end_with_the_same_bits(self, results, pytestconfig, size):
        called = [call[0] for call in self.calls_of(pytestconfig, size)]
        for name in set(self.functions).intersection(called):
            (chief, _), *others = results(size, name)
            for arrays, _ in others:
                self.check_same_bits(arrays, chief)

    def test_three_ranks_are_on_two_machines(self, results):
        hosts = [facts["host"] for _, facts in results(3, "train")]
        assert hosts == ["node1", "node2", "node2"]

    # Faults -----------------------------------------------------------------------------------

    def fails(self, folder, job, trained):
        """Return a failing job once it has ended in time, with no process of it left."""
        if self.last_faults.get(job.size) == job.fault:
            ended = trained(job.size)
        else:
            call, limit = self.call_of_fault(job.fault), self.timeout + self.patience
            options = {"two_machines": job.elsewhere, "timeout": self.timeout, "limit": limit}
            ended = self.start(job.size, folder, call, **options)
        self.check_no_process_is_left(os.path.join(folder, "script.py"))
        return ended

    def check_no_process_is_left(self, script):
        """Check that no process of a job that has ended is left."""
        for _ in range(50):
            left = [number for number, command in machines.processes() if script in command]
            if not left:
                break
            time.sleep(0.1)
        assert not left

    @pytest.fixture(scope="class")
    def failed(self, request, tmp_path_factory, folder, trained):
        """Yield the end of each failing job that is tested. While one waits, others run."""
        for size in self.last_faults:
            trained(size)
        items = [item for item in request.session.items if request.node in item.listchain()]
        tests = [item.callspec.params for item in items if hasattr(item, "callspec")]
        ends = {}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for job in [test["job"] for test in tests if "job" in test]:
                is_separate = self.last_faults.get(job.size) != job.fault
                place = str(tmp_path_factory.mktemp(job.fault)) if is_separate else folder
                ends[job] = pool.submit(self.fails, place, job, trained)
            yield ends

    def aborted(self, ended, fault):
        """Return whether the engine has aborted a process whose peer has left, as it may."""
        return self.may_abort and fault == "exit" and ended.status == 128 + signal.SIGABRT

    def check_failed(self, failed, job):
        """Check that a fault has ended the job, and that the rank was named."""
        ended = failed[job].result()
        report = ended.err[ended.err.rindex("compat run: rank") :]
        assert "rank {} of {} {}".format(FAULTY, job.size, job.said) in report
        if self.aborted(ended, job.fault):
            assert "compat run: then rank 0 of 2 was killed by signal 6" in ended.err
            return
        assert ended.status == job.status
        if job.last is not None:
            assert re.match(job.last + "$", report.rstrip().split("\n")[-1])
