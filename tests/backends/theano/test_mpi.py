"""Ranks on Theano: MPI. What ranks on CNTK share with it is tested here."""

import os
import subprocess
import sys
import time

import pytest

from compat import _ranks
from compat._backends.theano import backend
from compat._configuration import device_choice, gpu_selection
from compat._configuration.settings import Settings
from compat._ranks import launchers
from compat._ranks.launch import processes
from compat.testing import slow

from .. import rank_decisions, rank_gradients, rank_state, ranks
from ..exchanges import RankedParts

# As in test_contract.py: implementations in Python, which are not compiled for each rank.
os.environ.setdefault("KERAS_BACKEND", "theano")
os.environ.setdefault(
    "THEANO_FLAGS",
    "optimizer=fast_compile,optimizer_excluding=conv_gemm:AbstractConvCheck,cxx=",
)


@pytest.mark.row("ranks: MPI")
class TestTheanoRanks(RankedParts):
    backend = "theano"
    exempt_hooks = {"theano.grad": "Keras calls theano.tensor.grad, which is the same function"}
    exchanges = (20, 6)  # each is two of MPI's: what ranks come for, and what they exchange


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process and two ranks for the programs of all backends."""
    programs = {"losses": "REDUCTIONS = False\n" + ranks.LOSSES, "generator": ranks.GENERATOR}
    programs.update(own_losses=ranks.OWN_LOSSES, of_keras_2=ranks.OF_KERAS_2, drift=ranks.DRIFT)
    programs.update(lookahead=ranks.LOOKAHEAD)
    programs.update(state=rank_state.KERAS_2, optimizers=rank_gradients.OPTIMIZERS)
    programs.update(rank_decisions.programs(), own=rank_gradients.OWN_FUNCTIONS)
    ranks_alone = ["own_losses", "of_keras_2", "drift", "lookahead", *rank_decisions.programs()]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "theano", ranks_alone)


def test_losses_are_those_of_all_rows_and_what_cannot_be_is_told(jobs):
    ranks.check_losses(jobs)
    ranks.check_own_losses(jobs)
    ranks.check_of_keras_2(jobs)
    ranks.check_drift(jobs)


def test_a_train_function_of_another_librarys_is_told(jobs):
    ranks.check_lookahead(jobs)


def test_what_optimizers_make_of_gradients_is_of_all_ranks(jobs):
    """They clip, normalise, or look at the loss."""
    rank_gradients.check_optimizers(jobs)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=slow)])
def test_gradients_of_the_loss_are_of_all_ranks_wherever_they_are_taken(tmp_path, size):
    """In metrics and in functions of the script; where they are not, that is reported."""
    rank_gradients.check_taken(tmp_path, "theano", size)


@slow
def test_gradients_of_all_ranks_on_one_rank_alone_are_an_error(tmp_path):
    rank_gradients.check_taken_alone(tmp_path, "theano")


def test_functions_of_a_script_that_train_a_model_are_refused(jobs):
    rank_gradients.check_own_functions(jobs)


@pytest.mark.row("ranks: MPI")
def test_generators(jobs):
    """Which Keras 2 has methods of their own for."""
    said = ranks.check_same(jobs, "generator")
    assert said[0] == said[1]
    assert said[0]["evaluated"] == pytest.approx(said[0]["val_loss"][-1], abs=1e-6)


# Flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_rank", [0, 1])
def test_flags_of_a_rank(machine, local_rank):
    """The one GPU it sees, and short waits for the folder that ranks share."""
    machine.plug(gpus=2)
    environ = {
        "OMPI_COMM_WORLD_RANK": str(2 + local_rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    place = launchers.launched(environ)
    devices = device_choice.choose_for_rank(gpu_selection.parse_gpus(None), environ, place)
    variables = backend.environ(Settings(devices), environ)
    assert variables["CUDA_VISIBLE_DEVICES"] == str(local_rank)
    assert variables["THEANO_FLAGS"] == "device=cuda0,compile.wait=1,compile.timeout=120"
    environ["THEANO_FLAGS"] = "compile.wait=7"
    variables = backend.environ(Settings(devices), environ)
    assert variables["THEANO_FLAGS"] == "compile.wait=7,device=cuda0,compile.timeout=120"


# The engine, without a framework --------------------------------------------------------------

PROGRAM = """\
import os, sys, time
from compat import _ranks
from compat._ranks.engines import mpi
ranks = _ranks.own_place()
{}
"""


def job(tmp_path, program, size=2, timeout=100):
    """Run the program as so many ranks, which wait so many seconds for each other."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(program))
    return subprocess.run(
        backend.launcher(_ranks.Job(size, sys.executable, os.environ))
        + [sys.executable, str(script)],
        env=dict(os.environ, COMPAT_TIMEOUT=str(timeout)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=200,
    )


def test_sums_and_broadcasts(tmp_path):
    program = """
engine = mpi.MPI.join(ranks)
assert engine is mpi.MPI.join(ranks)
import numpy
big = numpy.arange(300000, dtype="float32") * (ranks.rank + 1)
before = engine.done
summed = engine.sum_array(big.reshape(3, 100000))
assert summed.base is big and (big == numpy.arange(300000, dtype="float32") * 6).all()
assert engine.done - before == 6  # what all come for, and pieces of 256 KiB
assert list(engine.sum([1, ranks.rank])) == [3, 3]
mpi._PIECE = 24
sent = engine.broadcast(["text", numpy.arange(5)] if ranks.rank == 0 else None)
assert sent[0] == "text" and list(sent[1]) == [0, 1, 2, 3, 4]
assert engine.share(ranks.rank) == ranks.rank / 3
engine.close()
print("done")
"""
    completed = job(tmp_path, program, 3)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("done") == 3


def test_rank_that_has_nothing_left_to_say_may_end_before_the_others(tmp_path):
    program = """
engine = mpi.MPI.join(ranks)
engine.close()
engine.timeout = 1
time.sleep(3 if ranks.rank else 0)
print("done")
"""
    completed = job(tmp_path, program)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("done") == 2


@pytest.mark.parametrize(
    "fault, timeout, said",
    [
        ("raise ValueError('bad')", 100, "\nValueError: bad"),
        (
            "sys.exit(3)",
            100,
            "Rank 0 of 2 waited for the others (script.py, line 9), but rank 1 failed, ended or "
            "did not come: its script has ended. Look at what rank 1 printed. (COMPAT_TIMEOUT, or "
            "compat run --timeout, sets how many seconds ranks wait.)",
        ),
        pytest.param(
            *(
                "time.sleep(100)",
                2,
                "but rank 1 failed, ended or did not come: 2 seconds are over.",
            ),
            marks=slow,  # as the contract's
        ),
    ],
)
def test_rank_that_fails_ends_the_job(tmp_path, fault, timeout, said):
    program = """
engine = mpi.MPI.join(ranks)
engine.timeout = {}
if ranks.rank == 1: {}
engine.close()
"""
    completed = job(tmp_path, program.format(timeout, fault))
    assert completed.returncode
    assert said in completed.stderr


def test_rank_that_goes_on_after_an_error_ends_the_job(tmp_path):
    program = """
engine = mpi.MPI.join(ranks)
try:
    if ranks.rank == 1: engine.close()
except RuntimeError as error:
    print(error)
"""
    completed = job(tmp_path, program)
    assert completed.returncode
    told = "Rank 1 of 2 waited for the others (script.py, line 8), but rank 0 failed"
    assert told in completed.stdout


def test_evaluation_on_one_rank_is_named_by_its_line(tmp_path):
    ranks.check_evaluation_on_one_rank(tmp_path, "theano")


@slow
def test_a_rank_that_leaves_is_named(tmp_path):
    """``mpirun`` ends the others, which can say nothing of it."""
    ranks.check_a_rank_that_leaves(tmp_path, "theano")


def test_ranks_in_different_calls_are_told_which(tmp_path):
    """MPI adds up what is of one size, and ends the process without a word where sizes differ."""
    ranks.check_different_calls(tmp_path, "theano")


def test_rank_that_does_not_start_ends_the_job(tmp_path):
    """``MPI_Init`` has no timeout."""
    completed = job(tmp_path, "if ranks.rank: time.sleep(100)\nmpi.MPI.join(ranks)", timeout=2)
    assert completed.returncode == 1
    assert "Traceback" in completed.stderr
    assert (
        "\ncompat.errors.RankLostError: Rank 0 of 2 waited to start (script.py, line 6), but "
        in completed.stderr
    )


@slow
def test_a_rank_that_fails_early_is_named(tmp_path):
    ranks.check_a_rank_that_fails_early(tmp_path, "theano")


@slow  # as one that does not start
def test_a_rank_that_is_stopped_before_it_joins_is_named(tmp_path):
    ranks.check_a_rank_that_is_stopped_before_it_joins(tmp_path, "theano")


STARTS_A_CHILD = """
import subprocess, time
print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
time.sleep(60)
"""


def test_what_ranks_have_started_ends_if_compat_run_is_killed(tmp_path):
    """``mpirun`` is killed with it, and tells the ranks nothing."""
    script = tmp_path / "script.py"
    script.write_text(STARTS_A_CHILD)
    command = [sys.executable, "-m", "compat", "run", "-n", "2", "--gpus", "cpu", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    children = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 15
    while any(map(processes.runs, children)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(processes.runs, children))


@pytest.mark.parametrize("faulty, said", [(None, ""), (1, "ValueError: bad")])
def test_script_that_began_mpi_itself(tmp_path, faulty, said):
    """mpi4py ends MPI then, and waits for all ranks; one that fails does not wait."""
    program = """
from mpi4py import MPI
engine = mpi.MPI.join(ranks)
if ranks.rank == {}: raise ValueError("bad")
engine.close()
"""
    completed = job(tmp_path, program.format(faulty))
    assert completed.returncode == (faulty is not None), completed.stderr
    assert said in completed.stderr


def alone(run, first):
    """Return the outcome of a process that torchrun started, without MPI around it."""
    join = "\ntry: mpi.MPI.join(ranks)\nexcept Exception as error: print(error)\n"
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return run(PROGRAM.format(first + join), **variables)


def test_another_launcher_is_an_error(run):
    assert alone(run, "") == (
        "torchrun started this process as one of 2, but MPI sees 1: each would train alone. Start "
        "it with the launcher of MPI, or with compat run -n 2.\n"
    )


def test_missing_mpi4py_is_an_error(run):
    out = alone(run, "sys.modules['mpi4py'] = None")  # as if it were not installed
    assert out == (
        "Rank 0 of 2 (torchrun) needs mpi4py, which is not installed here, to train with the "
        "others. Install it for the MPI of the launcher: pip install mpi4py, which compiles it "
        "where there is no wheel (on Debian and Ubuntu that needs apt-get install libopenmpi-dev "
        "openmpi-bin).\n"
    )


def test_state_that_updates_set_is_that_of_all_rows(jobs):
    rank_state.check_of_keras_2(jobs)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1])
