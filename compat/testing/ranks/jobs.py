"""Jobs of several ranks, on this machine or on two, started as a user starts them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ... import machines
from ..contract import instance_of


class Finished:
    """A job that has ended."""

    def __init__(self, status, out, err, seconds):
        self.status = status
        self.out = out
        self.err = err
        self.seconds = seconds


class Jobs:
    """What starts jobs of ranks of one backend. Subclasses set ``backend``."""

    #: The backend: its name, or the instance.
    backend = ""  # type: object
    #: How far weights may be from one process's.
    tolerance = 1e-5
    #: Seconds that ranks wait for each other in the tests of faults.
    timeout = 20
    #: How much longer than that a fault may take to end a job, starting Python included.
    patience = 100

    def instance(self):
        """The backend itself."""
        return instance_of(self.backend)

    def run(self, size, script, *arguments, **options):
        """Run a script by ``compat run`` as so many ranks (1: one process), to its end.

        Arguments:
            script: its path.
            arguments: the script's own.
            two_machines: whether all ranks but the first are on another machine.
            timeout: seconds that ranks wait for each other.
            limit: seconds after which the job counts as hanging.
            before: more options of ``compat run``.
        """
        command = [sys.executable, "-m", "compat", "run"]
        if size > 1:
            command += ["-n", str(size), "--timeout", str(options.get("timeout", 120))]
        if options.get("two_machines"):
            hosts = "node1:1,node2:{}".format(size - 1)
            command = machines.command(2, *(command + ["--hosts", hosts]))
        framework = self.instance().framework
        command += ["--backend", framework, "--gpus", "cpu"]
        command += list(options.get("before", ())) + [script]
        began = time.monotonic()
        process = subprocess.Popen(
            command + list(arguments),
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
            pytest.fail("{} hangs:\n{}\n{}".format([script] + list(arguments), out, err))
        return Finished(process.returncode, out, err, time.monotonic() - began)

    def check_no_process_is_left(self, script):
        """Of a job that has ended."""
        for _ in range(50):
            left = _processes_with(script)
            if not left:
                break
            time.sleep(0.1)
        assert not left


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
