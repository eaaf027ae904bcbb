"""``compat run``: what a script is started with, and that it is itself all the rest."""

import argparse
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from outcomes import ended
from test_main import refused

import compat
from compat._commands import run as run_command
from compat._runtime import by_path

pytestmark = pytest.mark.usefixtures("process")

SCRIPT = """\
import os, sys
names = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "KERAS_BACKEND", "THEANO_FLAGS"
for name in names:
    print("%s=%s" % (name, os.environ.get(name)))
print(sys.argv[1:])
print(sys.stdin.read())
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def prepared(gpus, backend, python, environ, ranks=None, hosts=None):
    """Return the command and environment with which ``compat run`` starts a script."""
    asked = argparse.Namespace(gpus=gpus, backend=backend, python=python, ranks=ranks, hosts=hosts)
    return run_command.prepare(asked, environ)


def finished(*arguments, **environ):
    command = (sys.executable, "-m", "compat", "run") + arguments
    return ended(command, dict(environ, PYTHONPATH=ROOT), input="typed")


def test_script_gets_devices_arguments_and_input(machine, script):
    machine.plug(3)
    arguments = "--gpus=2,0", "--backend=theano", "--python=" + sys.executable, script
    assert finished(*(arguments + ("a", "--gpus=1", "-n"))) == (
        7,
        "CUDA_VISIBLE_DEVICES=2,0\n"
        "CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
        "KERAS_BACKEND=theano\n"
        "THEANO_FLAGS=device=cuda0,contexts=dev0->cuda0;dev1->cuda1\n"
        "['a', '--gpus=1', '-n']\n"
        "typed\n",
        "compat run: theano (--backend theano was asked for), GPU 2,0\n"
        "compat run: CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
        "compat run: CUDA_VISIBLE_DEVICES=2,0\n"
        "compat run: KERAS_BACKEND=theano\n"
        "compat run: THEANO_FLAGS=device=cuda0,contexts=dev0->cuda0;dev1->cuda1\n",
    )


def test_fewer_gpus_than_asked_for(script):
    status, out, err = finished(
        "--gpus=0,1", "--python", sys.executable, script, KERAS_BACKEND="mxnet"
    )
    assert status == 7
    # None of NVIDIA's: those of others, which the framework may know, are numbered likewise.
    assert out.startswith("CUDA_VISIBLE_DEVICES=0,1\n")
    assert err.splitlines()[0] == (
        "compat run: mxnet (KERAS_BACKEND=mxnet), CPU, unless the framework lists GPUs"
    )
    assert err.splitlines()[-1] == (
        "compat run: --gpus 0,1 was asked for, but there is no GPU 0 or GPU 1: no GPU is visible. "
        "Going on with CPU, unless the framework lists GPUs."
    )


def test_a_gpu_on_a_machine_without(script):
    """Whether the framework lists one that no command does, only the script will know."""
    arguments = "--gpus=0", "--python", sys.executable, script
    _, out, err = finished(*arguments, KERAS_BACKEND="mxnet")
    assert err == (
        "compat run: mxnet (KERAS_BACKEND=mxnet), CPU, unless the framework lists GPUs\n"
        "compat run: CUDA_VISIBLE_DEVICES=0\n"
        "compat run: --gpus 0 was asked for, but there is no GPU 0: no GPU is visible. Going on "
        "with CPU, unless the framework lists GPUs.\n"
        "compat run: --gpus 0 means the GPU with id 0; ids count from 0. Several are named one "
        "by one, such as --gpus 0,1, and --gpus cpu means none.\n"
    )


def test_one_gpu_that_is_not_there(machine, script):
    """Who asks for two GPUs with ``--gpus 2`` is told what that means."""
    machine.plug(2)
    _, out, err = finished("--gpus=2", "--backend=theano", "--python", sys.executable, script)
    assert out.startswith("CUDA_VISIBLE_DEVICES=-1\n")
    assert err.splitlines()[-2:] == [
        "compat run: --gpus 2 was asked for, but there is no GPU 2: 2 GPUs are visible. "
        "Going on with CPU.",
        "compat run: --gpus 2 means the GPU with id 2; ids count from 0. Several are named one "
        "by one, such as --gpus 0,1, and --gpus cpu means none.",
    ]


@pytest.mark.parametrize("gpus, own", [(None, "0"), ("2,0", "2")])
def test_one_rank_is_the_script_alone_with_a_gpu_of_its_own(machine, script, gpus, own):
    machine.plug(3)
    options = ["-n", "1", "--backend=theano", "--python", sys.executable]
    status, out, err = finished(*(options + (["--gpus", gpus] if gpus else []) + [script, "a"]))
    assert status == 7
    assert out.splitlines()[0] == "CUDA_VISIBLE_DEVICES=" + own
    assert out.splitlines()[-2:] == ["['a']", "typed"]
    assert err.splitlines()[-1] == "compat run: 1 rank: the script alone"


def test_one_rank_is_alone_whatever_an_earlier_job_has_left(tmp_path):
    path = tmp_path / "script.py"
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_ID"
    lines = (
        "import os, compat",
        "print(compat.rank(), compat.size())",
        "print({})".format("[name for name in {} if name in os.environ]".format(names)),
    )
    path.write_text("\n".join(lines))
    left = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", SLURM_JOB_ID="7")
    options = "-n", "1", "--backend=theano", "--python", sys.executable, str(path)
    status, out, err = finished(*options, **left)
    assert (status, out) == (0, "0 1\n['SLURM_JOB_ID']\n"), err
    assert err.splitlines()[-2:] == [
        "compat run: without MASTER_ADDR, RANK, WORLD_SIZE: the place of a process in another job",
        "compat run: 1 rank: the script alone",
    ]


def test_ranks_within_ranks_are_refused_before_anything_is_started(script):
    """Also several machines; RANK and WORLD_SIZE alone start nothing, and are set aside."""
    place = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    options = "--backend=jax", "--python", sys.executable
    for asked in (["-n", "2"], ["--hosts", "first:1,second:1"]):
        torchrun = dict(place, TORCHELASTIC_RUN_ID="none")
        assert finished(*asked, *options, script, **torchrun) == (
            2,
            "",
            "compat run: {} would start ranks here, but this process is itself rank 1 of 2 "
            "(torchrun): each of the 2 would start a job of its own, whose rank 0 writes the same "
            "files. Start the script with one launcher: torchrun alone, with python in place of "
            "compat run, or compat run alone. COMPAT_ALONE=1 starts 2 separate jobs.\n".format(
                " ".join(asked)
            ),
        )
    status, out, err = finished("-n", "2", *options, script, **place)
    assert status == 7 and "] []" in out  # whichever rank was first to end, its arguments: none
    assert (
        "compat run: without LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE: the place of a "
        "process in another job\n" in err
    )


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_module_in_place_of_a_script(tmp_path, monkeypatch, options):
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    options = options + ["--backend=theano", "--python", sys.executable]
    options += ["-m", "mypackage.train", "--epochs", "3", "-n", "5"]
    assert finished(*options)[:2] == (0, "__main__ mypackage ['--epochs', '3', '-n', '5']\n")


def test_script_that_is_killed_is_seen_so(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert finished("--backend=mxnet", "--python", sys.executable, str(path))[0] == -signal.SIGTERM


def test_backend_of_this_python(toy, machine, monkeypatch):
    machine.plug(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = dict(os.environ)
    _, interpreter, environ, lines = prepared(None, None, None, before)
    assert interpreter == sys.executable
    assert environ == dict(before, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert lines == ["toy (the only backend installed), GPU 1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"]
    assert dict(os.environ) == before
    assert "toyframework" not in sys.modules


def test_variable_that_a_backend_removes(toy, monkeypatch):
    monkeypatch.setattr(toy, "environ", lambda settings, environ: {"TOY_FLAGS": None, "A": "b"})
    environ = {"TOY_FLAGS": "x", "PATH": os.environ["PATH"]}
    _, _, started, lines = prepared("cpu", "toy", None, environ)
    assert started == {"PATH": os.environ["PATH"], "A": "b"}
    assert lines[1:] == ["A=b", "without TOY_FLAGS"]
    assert environ["TOY_FLAGS"] == "x"


def test_interpreter_by_name_on_the_path(toy, tmp_path, monkeypatch):
    python = tmp_path / "python0.9"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert prepared(None, "toy", "python0.9", os.environ)[1] == str(python)
    python.chmod(0o644)
    with pytest.raises(compat.PythonNotFoundError):
        prepared(None, "toy", "python0.9", os.environ)


def test_what_cannot_be_started(script):
    assert refused("run", "--python=python0.9", "--backend=theano", script) == (
        "compat run: --python=python0.9: there is no such program. Give the path of an "
        "interpreter, or a name that is on the PATH, such as python2.7.\n"
    )
    assert refused("run", "--python", sys.executable, script) == (
        "compat run: compat does not look into {}, and nothing says which backend the script uses "
        "there. Pass --backend, such as --backend=theano, or set KERAS_BACKEND.\n".format(
            sys.executable
        )
    )
    said = refused("run", "--gpus=two", "--backend=theano", script)
    assert "--gpus two is not understood" in said and "--gpus free:2" in said
    assert "gpus=" not in said and "[]" not in said
    for arguments in (), ("-m",), ("-m", "-n", "2"):
        said = refused("run", "--backend=theano", *arguments)
        assert said.startswith("usage: compat run [options] script.py [its arguments]\n")
        assert "a script is needed" in said or "the name of a module is needed" in said
    assert refused("run", "--backend=theano", "missing.py") == (
        "compat run: there is no file missing.py. Give the path of a script, or -m and the name "
        "of a module; what follows are its own arguments.\n"
    )
    assert refused("run", "--ranks=2", script).endswith(
        "compat run: error: unrecognized arguments: --ranks=2\n"
    )
    assert refused("run", "-n", "2", "--max-restarts", "-1", script).endswith(
        "argument --max-restarts: '-1' is not a number of restarts, 0 or more\n"
    )
    assert refused("run", "--simulate", "0", script).endswith(
        "argument --simulate: '0' is not a number of devices, 1 or more\n"
    )


HOLDS = """\
import os, sys
from compat._configuration import device_choice, gpu_selection
chosen = device_choice.choose(gpu_selection.parse_gpus("free"), None, os.environ)
print(sorted(chosen.gpus), flush=True)
sys.stdin.read()
"""


def test_idle_gpu_stays_claimed_while_the_script_runs(machine, tmp_path):
    """A second job gets another one, and the script itself may ask for idle ones again."""
    machine.plug(2)
    path = tmp_path / "script.py"
    path.write_text(HOLDS)
    jobs = []
    command = [sys.executable, "-m", "compat", "run", "--gpus=free:1", "--backend=theano"]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    for _ in range(2):
        jobs.append(
            subprocess.Popen(
                command + ["--python", sys.executable, str(path)],
                env=dict(os.environ, PYTHONPATH=ROOT),
                universal_newlines=True,
                **pipes,
            )
        )
        answer = jobs[-1].stdout.readline()
        assert answer == "['{}']\n".format(len(jobs) - 1)
    errors = [job.communicate()[1] for job in jobs]
    assert [re.search("CUDA_VISIBLE_DEVICES=(.)", error).group(1) for error in errors] == ["0", "1"]


@pytest.mark.parametrize("option", ["--parallelize", "--report"])
def test_what_wants_an_interpreter_that_compat_runs_in(script, tmp_path, option):
    python = tmp_path / "python2.7"
    python.write_text("#!/bin/sh\nprintf 2.7.18\n")
    python.chmod(0o755)
    options = option, "--backend=theano", "--python={}".format(python)
    assert refused("run", *(options + (script,))).endswith(
        "compat run: {0} runs inside the script's interpreter, which must be Python 3.6 or later; "
        "{1} is Python 2.7.18. Leave {0} out, or use a newer one.\n".format(option, python)
    )


def test_simulated_devices_are_for_the_scripts_configure_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['COMPAT_SIMULATE'])\n")
    options = "--backend=theano", "--python=" + sys.executable
    options += "--gpus", "97,98"  # not a shortage, as in configure_gpu(gpus=[97, 98], simulate=3)
    status, out, err = finished("--simulate", "3", *(options + (str(script),)))
    assert (status, out) == (0, "3\n") and "there is no GPU" not in err
    assert "compat run: COMPAT_SIMULATE=3: CPU devices stand in for GPUs\n" in err


def test_batch_norm_of_the_whole_batch_is_for_the_scripts_calls(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['COMPAT_SYNC_BATCH_NORM'])\n")
    options = "--backend=theano", "--python=" + sys.executable, str(script)
    status, out, err = finished("--sync-batch-norm", *options)
    assert (status, out) == (0, "1\n")
    line = "COMPAT_SYNC_BATCH_NORM=1: batch normalization is that of the whole batch"
    assert f"compat run: {line}\n" in err


def test_options_after_the_script_are_pointed_out(script):
    """Not those that scripts have themselves, nor what is no option of ours."""
    arguments = ["--report", "--epochs", "5", "--simulate=3", "--log-dir", "logs", "--log-dir=x"]
    arguments += ["--gpus=2", "--backend=mxnet", "--quiet", "--simulated", "-n", "run"]
    options = "--backend=theano", "--python=" + sys.executable, script
    _, out, err = finished(*(options + tuple(arguments)))
    assert "{}\n".format(arguments) in out
    text = (
        "compat run: {0} comes after the script's name, so the script gets it; compat run's "
        "own {0} comes before that name"
    )
    told = [line for line in err.splitlines() if " comes after " in line]
    assert told == list(map(text.format, ["--report", "--simulate", "--log-dir"]))


@pytest.mark.parametrize("command", ["run", "test"])
@pytest.mark.parametrize("name", ["train.ipynb", "NB.IPYNB", "-m train.ipynb"])
def test_a_notebook_is_refused(tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.split()[-1]).write_text('{"cells": []}')
    assert refused(command, "--backend=theano", *name.split()) == (
        "compat {}: {} is a notebook, which Python cannot run. Make a script of it with `jupyter "
        "nbconvert --to script`, or call compat.configure_gpu() in its first cell.\n".format(
            command, name.split()[-1]
        )
    )


RANK = """\
import os, sys
rank, restart = os.environ["COMPAT_RANK"], os.environ["COMPAT_RESTART"]
print("restart", restart)
sys.stderr.write("to stderr\\n")
sys.exit(3 if rank == "1" and restart == "0" else 0)
"""


def test_ranks_are_quiet_logged_and_started_again(tmp_path):
    path, logs = tmp_path / "script.py", tmp_path / "logs"
    path.write_text(RANK)
    options = "--backend=jax", "--python", sys.executable, "-n", "2", "--quiet"
    options += "--log-dir", str(logs), "--max-restarts", "1", str(path), "--epochs", "2"
    status, out, err = finished(*options, COMPAT_RESTART="5")
    assert status == 0, err
    assert out.splitlines()[-1] == "[0] restart 1" and "[1]" not in out
    assert err.count("[1] to stderr\n") == 2
    assert err[err.index("compat run: rank 1") :].startswith(
        "compat run: rank 1 of 2 failed with exit status 3; the others were ended.\n"
        "compat run: the last lines that rank 1 printed to standard output:\n"
        "[1] restart 0\n"
        "compat run: restart 1 of 1, because rank 1 of 2 failed with exit status 3.\n"
    )
    lines = (logs / "rank-1.log").read_text().splitlines()
    assert lines[0].endswith(", rank 1 of 2, restart 0: {} --epochs 2".format(path))
    assert sorted(lines[1:3]) == ["restart 0", "to stderr"]
    assert lines[3].endswith(", rank 1 of 2, restart 1: {} --epochs 2".format(path))
    assert sorted(lines[4:]) == ["restart 1", "to stderr"]


def test_logs_that_cannot_be_written_are_told_before_anything_is_started(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("open(__file__ + '.ran', 'w')")
    options = "--backend=jax", "--python", sys.executable, "-n", "2", "--log-dir", str(path)
    assert refused("run", *(options + (path,))).endswith(
        "compat run: --log-dir {0}: {0} cannot be written: File exists. Name a folder in which you "
        "may make files.\n".format(path)
    )
    assert not os.path.exists(str(path) + ".ran")


@pytest.mark.parametrize(
    "options",
    ["--log-dir x", "--log-dir x -n 1", "--max-restarts 1", "--max-restarts 1 -n 1"],
)
def test_what_only_ranks_can_have(script, options):
    assert refused("run", "--backend=theano", *(options.split() + [script])) == (
        "compat run: {0} is for a script that runs as several ranks, and this one runs alone. "
        "Add -n with 2 or more, or --hosts, or leave {0} out.\n".format(options.split()[0])
    )


def test_how_ranks_are_started_is_shown_without_parts_of_compat():
    own = by_path.command("_ranks.launch.starter") + ["2"]
    assert run_command._shown(own, None) == " on this machine"
    threads = ["env", "OMP_NUM_THREADS=1"] + own
    assert run_command._shown(threads, None) == " on this machine, OMP_NUM_THREADS=1"
    hosts = "first:1,second:1"
    assert run_command._shown(own + ["--cluster"], hosts) == " on " + hosts
    assert run_command._shown(["mpirun", "-n", "2"], None) == ": mpirun -n 2"


def test_what_is_the_same_alone(script):
    options = "--backend=theano", "--python", sys.executable
    assert finished("-n", "1", "--quiet", "--max-restarts", "0", *(options + (script,)))[0] == 7
