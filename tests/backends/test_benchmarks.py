"""The benchmarks of this environment, for one step each, as ``benchmarks/run.py`` starts them.

Theano compiles nothing, as in its own tests; of ``many_models.py`` one candidate of three runs.
"""

import json
import os
import shlex
import subprocess

import pytest

from compat.testing import slow, span

from .conftest import BENCHMARKS, ROOT, benchmarks_run

TIMEOUT = 300


def commands():
    """Parameters of the test. All are slow but ranks of torch against a peer."""
    for command in BENCHMARKS:
        yield pytest.param(command, marks=[] if "ranks_torch" in command else [slow])


@span
@pytest.mark.parametrize("command", commands())
def test_a_step_is_measured(command):
    done = subprocess.run(
        shlex.split(
            command
            + " --rounds 1 --steps 1"
            + " --work dense" * ("first_step" in command)
            + " --work small" * ("first_fit" in command)
            + " --candidate compat" * ("many_models" in command)
        ),
        cwd=ROOT,
        env=dict(os.environ, THEANO_FLAGS="cxx=", BENCHMARKS_LARGEST="8"),
        stdout=subprocess.PIPE,
        universal_newlines=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if benchmarks_run.MARK in line]
    measured = json.loads(line.partition(benchmarks_run.MARK)[2])
    if "seconds" in measured:
        assert len(measured["seconds"]) == 2 and "compat" in measured["seconds"]
        assert benchmarks_run.ratios([measured])["wall"][0] > 0
