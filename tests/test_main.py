"""The command line, without a framework; ``compat env`` has test_environment.py.

``compat test`` trains, so its tests run with each real backend: ``compat.testing``.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy.random  # noqa: F401  (here, since the fixture site hides site-packages)
import pytest
from conftest import ROOT, Toy, refusal
from outcomes import ended
from terminals import terminal

import compat
from compat import __main__, _verification
from compat._commands import device_comparison, name_of, script_test
from compat._ranks.engines import horovod
from compat._runtime.process import process

pytestmark = pytest.mark.usefixtures("process")


def command(*arguments):
    """``python -m compat`` in a Python without site-packages, so without any backend."""
    program = [sys.executable, "-S", "-m", "compat"]
    return ended(program + list(arguments), {"PYTHONPATH": ROOT, "COLUMNS": "80"})


def here(*arguments):
    """Run a command in this process, which starts and configures nothing; return its outcome."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = __main__.main(list(map(str, arguments)))
            except SystemExit as error:
                status = error.code
    return status, out.getvalue(), err.getvalue()


def refused(*arguments):
    """Return the refusal of a command for its arguments; it prints and does nothing else."""
    status, out, err = here(*arguments)
    assert (status, out) == (2, "")
    return err


def test_standard_output_that_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    job = subprocess.Popen(
        [sys.executable, "-S", "-m", "compat", "pins", "jax", "--python=3.11"],
        env=dict(os.environ, PYTHONPATH=ROOT),
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    assert (job.communicate()[1], job.returncode) == (b"", 128 + signal.SIGPIPE)


# Those that pip can install here, by the oldest Python that has them.
EXTRAS = {
    (3, 6): "cntk, mxnet, tensorflow1, theano",
    (3, 7): "mxnet, tensorflow1, theano",
    (3, 8): "mxnet, tensorflow, theano",
    (3, 9): "tensorflow",
    (3, 11): "jax, tensorflow, torch",
}[max(each for each in [(3, 6), (3, 7), (3, 8), (3, 9), (3, 11)] if each <= sys.version_info)]
NO_BACKEND = (
    "No backend is installed in this Python. Install one of {} with its pins, for example: "
    'pip install "keras-gpu-compat[{}]".\n'.format(
        EXTRAS, "tensorflow1" if "tensorflow1" in EXTRAS else "tensorflow"
    )
)


def test_test_where_no_backend_is_installed():
    assert command("test") == (2, "", "compat test: " + NO_BACKEND)


@pytest.mark.parametrize("number", ["1", "0", "-3", "two", "2.5"])
def test_test_needs_two_devices(number):
    what = "argument --devices: '{}' is not a number of devices, 2 or more".format(number)
    assert refused("test", "--devices=" + number).endswith("compat test: error: {}\n".format(what))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["-n", "1", "x.py"], "'1' is not a number of ranks to compare: 2 or more, or 0 for none"),
        (["-n", "2"], "a script is needed, or -m and a module"),
        (["--sync-batch-norm"], "a script is needed, or -m and a module"),
    ],
)
def test_test_as_ranks(arguments, said):
    text = "compat test: error: argument {}: {}\n".format(arguments[0], said)
    assert refused("test", *arguments).endswith(text)


def test_test_of_a_module(monkeypatch):
    asked = []

    def run(*arguments):
        asked.append(arguments)
        return 3

    monkeypatch.setattr(script_test, "verify_script", run)
    assert __main__.main(["test", "-n", "0", "-m", "package.train", "--epochs", "3"]) == 3
    assert asked == [(["-m", "package.train", "--epochs", "3"], None, None, 0, False, mock.ANY)]
    assert name_of(asked[0][0]) == "package.train"


def test_test_says_which_engine_of_ranks_is_to_be_installed(toy, tmp_path, monkeypatch, capfd):
    """It is not a failure of the script, but then ranks were not compared."""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(type(toy), "distribute", lambda self, model, place: model)
    launcher = lambda self, job: horovod.launcher(job, "mxnet")  # noqa: E731
    monkeypatch.setattr(type(toy), "launcher", launcher)
    for asked in (None, 2):
        outcome = {}  # type: dict
        assert script_test.verify_script([str(script)], None, None, asked, False, outcome) == 3
        assert outcome["ranks"] == {"size": 2, "status": None, "same": None}
        assert capfd.readouterr().out.splitlines()[-1] == (
            "NOT RUN as 2 ranks: Ranks of mxnet train together through Horovod, which is not "
            "installed. Build it where mxnet is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 pip "
            "install --no-build-isolation --no-cache-dir horovod==0.28.1 (that needs a C++ "
            "compiler, setuptools<60 and cmake<4). Or start the script without a launcher (compat "
            "run without -n). -n 0 leaves ranks out."
        )


def test_ctrl_c_is_no_traceback(monkeypatch):
    def run(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(device_comparison, "compare_devices", run)
    assert __main__.main(["test"]) == 130


# What ``compat test`` uses of Keras; these weights never change.
KERAS = """\
from types import SimpleNamespace
import numpy

class Model(object):
    layers = ()
    def __init__(self, inputs, outputs):
        self.values = [numpy.ones(2)]
    def get_weights(self):
        return self.values
    def set_weights(self, values):
        self.values = values
    def compile(self, optimizer, loss):
        pass
    def train_on_batch(self, inputs, targets):
        return 0.5

Model.__module__ = "keras.engine.training"
models = SimpleNamespace(Model=Model)
layers = SimpleNamespace(
    Input=lambda shape: shape, Dense=lambda units, activation: lambda inputs: inputs)
optimizers = SimpleNamespace(SGD=lambda rate, momentum: None)
backend = SimpleNamespace(
    backend=lambda: "toyframework", floatx=lambda: "float32", set_floatx=lambda floatx: None)
"""


class VerifiedToy(Toy):
    """One product forward and two backward on each device."""

    def parallelize(self, model, devices):
        if len(devices) > 1:
            record = _verification.report.Record("model", devices)
            record.operations = {device: (1, 2) for device in devices}
            process.verified.append(record)
        return model

    def verify(self, model, verification):
        pass


@pytest.fixture
def verified_toy(toy, site, register, monkeypatch):
    backend = VerifiedToy()
    register(backend)
    site.install("Keras", "2.2.4", "keras", KERAS)
    monkeypatch.setenv("KERAS_BACKEND", "toyframework")
    return backend


def test_test_says_what_each_device_did(verified_toy, capsys, monkeypatch):
    """Where one does nothing, or weights differ: the contract."""
    monkeypatch.setattr(device_comparison, "BATCHES", (64, 1))
    assert device_comparison.compare_devices(2, None, True, {})
    assert capsys.readouterr().out.partition("warnings   none\n")[2] == (
        "\n"
        "One dense model on cpu:0, the same on 2 devices, SGD with momentum:\n"
        "\n"
        "step  rows  loss on 1  loss on 2  largest difference of a weight\n"
        "   1    64  0.5000000   0.5000000  0.0e+00\n"
        "   2     1  0.5000000   0.5000000  0.0e+00\n"
        "\n"
        "The same: no weight ever differs by more than 1e-05.\n"
        "\n"
        "Matrix products of a step that each device ran, forward + backward:\n"
        "  cpu:0: 1 + 2\n"
        "  cpu:1: 1 + 2\n"
    )


def test_test_shows_that_it_goes_on(verified_toy, monkeypatch):
    trained = device_comparison._train
    monkeypatch.setattr(
        device_comparison, "_train", lambda *given: time.sleep(0.05) or trained(*given)
    )
    with terminal(monkeypatch) as printed:
        assert device_comparison.compare_devices(2, None, True, {})
    line, report = printed
    assert line == "comparing one device with several"
    assert report.endswith("\n  cpu:0: 1 + 2\n  cpu:1: 1 + 2\n") and "\x1b" not in report


def test_test_as_json(verified_toy, capfd, monkeypatch):
    monkeypatch.setattr(device_comparison, "BATCHES", (64, 1))
    monkeypatch.setattr(
        device_comparison, "_train", lambda *arguments: os.write(1, b"a library\n") and float("nan")
    )
    assert __main__.main(["test", "--json", "--devices", "2", "--simulate"]) == 0
    out, err = capfd.readouterr()
    losses = [None, None]  # JSON has no NaN
    assert json.loads(out) == {
        "same": True,
        "error": None,
        "backend": "toy",
        "devices": ["cpu:0", "cpu:1"],
        "tolerance": 1e-05,
        "steps": [
            {"rows": 64, "losses": losses, "difference": 0.0},
            {"rows": 1, "losses": losses, "difference": 0.0},
        ],
        "products": {"cpu:0": [1, 2], "cpu:1": [1, 2]},
    }
    assert err.count("a library\n") == 4 and "  cpu:1: 1 + 2\n" in err
    print("again")
    assert capfd.readouterr() == ("again\n", "")


def test_test_as_json_where_nothing_can_be_compared():
    status, out, err = command("test", "--json")
    assert (status, err) == (2, "compat test: " + NO_BACKEND)
    assert json.loads(out) == {"same": None, "error": NO_BACKEND.rstrip("\n")}


def test_test_prints_no_json_where_it_is_interrupted(verified_toy, capfd, monkeypatch):
    monkeypatch.setattr(
        device_comparison, "compare_devices", mock.Mock(side_effect=KeyboardInterrupt)
    )
    status = __main__.main(["test", "--json", "--devices", "2", "--simulate"])
    assert (status, capfd.readouterr().out) == (130, "")


def test_test_of_a_script_as_json(toy, capfd, monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import compat, importlib.util\n"
        "print('my own', compat.__file__, importlib.util.find_spec('errors'))\n"
        "raise SystemExit(3)"
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert __main__.main(["test", "--json", "-n", "0", str(script)]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "same": None,
        "error": None,
        "backend": "toy",
        "script": str(script),
        "simulated": {"devices": 3, "status": 3, "models": [], "same": None},
        "ranks": None,
    }
    assert "my own {} None\n".format(compat.__file__) in err  # and not the package's modules
    assert "The script ended with exit status 3.\n" in err


def test_test_needs_as_many_devices_as_were_asked_for(verified_toy, monkeypatch):
    monkeypatch.setattr(verified_toy, "devices", lambda: ["cpu:0"])
    assert refusal(
        compat.DevicesNotFoundError, device_comparison.compare_devices, 3, None, True, {}
    ) == ("3 devices are needed for the comparison, but the framework shows cpu:0.")


def test_test_of_a_script_that_is_not_there():
    assert refused("test", "missing.py") == (
        "compat test: there is no file missing.py. Give the path of a script, or -m and the name "
        "of a module; what follows are its own arguments.\n"
    )


def test_a_command_is_needed_and_told():
    assert refused().endswith(
        "compat: error: a command is needed: env, run, test, machines, pins, tox or unwrap\n"
    )


def test_version():
    assert command("--version") == (0, "compat {}\n".format(compat.__version__), "")


def test_help_says_what_the_exit_status_means():
    assert "report what is installed, set and wrong" in here("--help")[1]
    assert "0 all is well, 1 something is wrong" in here("env", "--help")[1]
    assert (
        "Write a file of multi_gpu_model or make_parallel, a whole model or weights, as one of the "
        "model\ninside, its optimizer's state included. Needs h5py, runs nothing of the file.\n\n"
        "exit status: 0 written, 2 it could not be."
    ) in here("unwrap", "--help")[1]
    assert (
        "Run a command as if on the first of several machines, node1, from where `ssh node2` and "
        "so on reach\nthe others. They are network namespaces on this machine (Linux): they share "
        "its disk, and their only\nnetwork is the one between them. No root privileges are needed, "
        "and nothing outside is changed.\n\nexit status: the command's own; 1 where it left "
        "processes running, which are named and ended."
    ) in here("machines", "--help")[1]
    assert (
        "exit status: 0 the same, 1 something differs, only one device worked or the script "
        "failed, 2 wrong\narguments or no backend, 3 nothing differs, but some training, test or "
        "prediction steps were not\ncompared (batch normalization, dropout), or the script did "
        "not run as ranks."
    ) in here("test", "--help")[1]


def test_help_where_there_are_no_signals_of_unix():
    program = (
        "import signal\n"
        "del signal.SIGHUP, signal.SIGKILL\n"
        "from compat import __main__\n"
        "__main__.main({!r})\n"
    )
    for name in ("run", "test"):
        python = [sys.executable, "-c", program.format([name, "--help"])]
        status, out, err = ended(python, {"PYTHONPATH": ROOT})
        assert (status, err) == (0, "") and out.startswith("usage: compat " + name)


def test_help_says_what_else_takes_a_call():
    """Simulated devices do not: there is ``--simulate``."""
    assert "only a call inside the script can set, such as memory," in here("run", "--help")[1]
