"""A backend of another package, found by its entry point: tests/plugin, which tox installs.

    pip install --no-deps tests/plugin

installs it by hand; without it the tests here fail.
"""

import json
import os
import re
import shutil
import sys

import pytest
from outcomes import ended

from compat._configuration import registry
from compat._runtime.process import process
from compat.testing import NativeContract, NativeModels

try:
    import compat_numpy

    BACKEND = compat_numpy.backend
except ImportError:  # all tests fail, and those of other files are run
    BACKEND = "numpy"

pytestmark = pytest.mark.row("third parties' backends")


@pytest.fixture(scope="module", autouse=True)
def configured_here_only():
    """Begin with a process that is not configured, and leave one."""
    environ = dict(os.environ)
    process.start_afresh()
    yield
    process.start_afresh()
    os.environ.clear()
    os.environ.update(environ)


def test_is_installed_and_found_by_its_entry_point():
    assert "numpy" in registry.plugin_names()
    assert registry.plugin("numpy") is BACKEND
    assert BACKEND not in registry.backends()


class Networks(NativeModels):
    """Two layers of ``compat_numpy``'s."""

    backend = BACKEND
    tolerance = 1e-12

    def build(self, seed=0):
        from compat_numpy.networks import Network

        return Network(8, 16, 4, seed=seed)

    def train(self, model, inputs, targets):
        return model.train_on_batch(inputs, targets)

    def predict(self, model, inputs):
        return model.predict(inputs)

    def weights(self, model):
        return [weight.copy() for weight in model.weights]


class TestNumpy(Networks, NativeContract):
    def record(self, model, inputs, targets):
        from compat_numpy.networks import recorded

        with recorded() as record:
            model.train_on_batch(inputs, targets)
        return record

    def placement(self, model, inputs, targets):
        from compat_numpy.verified_steps import products

        return products(self.record(model, inputs, targets))

    def shard_sizes(self, model, inputs, targets):
        sizes = {}
        for device, _, rows in self.record(model, inputs, targets):
            sizes.setdefault(device, rows)
        return list(sizes.values())


SCRIPT = """\
import numpy as np

import compat

configuration = compat.configure_gpu(numpy_errors="raise", floatx="float32")
from compat_numpy.networks import Network

network = compat.parallelize(Network(8, 16, 4))
random = np.random.RandomState(0)
inputs, targets = compat.shard((random.normal(size=(61, 8)), random.normal(size=(61, 4))))
for _ in range(4):
    network.train_on_batch(inputs, targets)
network.predict(inputs)
print(configuration)
"""


def command(name, *arguments):
    """``compat`` with this backend, in a process of its own that has ended."""
    return ended([sys.executable, "-m", "compat", name, "--backend=numpy"] + list(arguments))


def test_a_script_that_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import compat")
    assert command("test", script)[:2] == (
        3,
        "\n" + "-" * 72 + "\n"
        "compat test: train.py on 3 simulated devices of numpy\n"
        "\n"
        "Nothing was verified: no step was seen of a model that compat.parallelize() was given "
        "after compat.configure_gpu(). configure_gpu(parallelize=True) parallelizes each Keras "
        "model that the script compiles.\n"
        "Nothing was compared on several devices.\n"
        "\n"
        "As 2 ranks: all ended well, but nothing was compared: they trained no model together.\n",
    )


ALL_WELL = "As 2 ranks: all ended well, with the same weights.\n"
NOT_WELL = re.compile(
    r"As 2 ranks: NOT well, exit status 3: rank [01] of 2 failed with exit status 3; the others "
    r"were ended\.\nThis shows more: python -m compat run -n 2 --gpus cpu --backend numpy .*\.py\n"
)


@pytest.mark.parametrize(
    "condition, statuses, verdicts",
    [
        pytest.param("True", (3, 3), (True, None), marks=pytest.mark.slow),  # for its own reason
        ("compat.size() > 1", (0, 3), (True, False)),
        ("compat.rank() == 5", (0, 0), (True, True)),
    ],
)
def test_a_script_is_verified_on_three_devices_and_then_as_two_ranks(
    tmp_path, condition, statuses, verdicts
):
    """What was compared is told apart from how the script ended."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "\nraise SystemExit(3 * ({}))".format(condition))
    status, out, err = command("test", "--json", script)
    assert status == any(statuses)
    told = json.loads(out)
    assert (told["simulated"]["status"], told["ranks"]["status"]) == statuses
    assert (told["simulated"]["same"], told["ranks"]["same"]) == verdicts
    assert told["same"] == next((each for each in (False, None) if each in verdicts), True)
    said, _, verdict = err.partition("-" * 72)
    assert "backend    numpy (" in said and "numpy.seterr(all='raise')" in said
    assert "compat test: train.py on 3 simulated devices of numpy" in verdict
    assert "verified: 3 training steps, 1 prediction step" in verdict
    assert "cpu:0 2 + 3, cpu:1 2 + 3, cpu:2 2 + 3" in verdict
    assert "The same on several devices.\n" in verdict
    assert ("The script ended with exit status 3.\n" in verdict) == bool(statuses[0])
    assert (ALL_WELL in verdict) == (not statuses[1])
    assert bool(NOT_WELL.search(verdict)) == bool(statuses[1])


RANDOM = SCRIPT.replace(
    "network = compat.parallelize(Network(8, 16, 4))",
    """
class Noisy(Network):
    def gradients(self, inputs, targets):
        loss, gradients = super().gradients(inputs, targets)
        noise = [np.random.normal(0, each.std(), each.shape) for each in gradients]
        return loss + np.random.uniform(), noise

network = compat.parallelize(Noisy(8, 16, 4))""",
)


@pytest.mark.parametrize("predicts", [True, False])
def test_a_step_that_is_random_is_not_called_the_same(tmp_path, predicts):
    """Neither in the text nor in JSON, nor by the exit status."""
    script = tmp_path / "train.py"
    script.write_text(RANDOM if predicts else RANDOM.replace("network.predict(inputs)", ""))
    status, out, err = command("test", "--json", "-n", "0", script)
    outcome = json.loads(out)
    (record,) = outcome["simulated"]["models"]
    verdict = re.sub(r"\S+ of its size.*", "... of its size", err.partition("-" * 72)[2])
    assert verdict == (
        "\ncompat test: train.py on 3 simulated devices of numpy\n"
        "\n"
        "model 'Noisy' on cpu:0, cpu:1, cpu:2\n"
        "  verified: {}\n"
        "  largest difference: ... of its size\n"
        "  products ran, forward + backward: cpu:0 2 + 3, cpu:1 2 + 3, cpu:2 2 + 3\n"
        "  not compared: 3 training steps (it is random)\n"
        "    compared instead: 3 values of the outputs in inference\n"
        "NOT COMPARED on several devices: training steps. All else is the same.\n"
    ).format("1 prediction step; 9 values" if predicts else "no step")
    assert status == 3
    assert outcome["same"] is outcome["simulated"]["same"] is record["same"] is None
    assert record["steps"] == {"train": 0, "evaluate": 0, "predict": int(predicts)}


REFUSED = """\
import compat
if compat.size() > 1:
    {} compat.UnsupportedError("numpy cannot do this.")
"""


def test_ranks_that_compat_refuses_have_not_differed(tmp_path):
    """An engine that is missing is found out by the ranks, too. Other errors: a script failed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + REFUSED.format("raise"))
    status, out, err = command("test", "--json", script)
    outcome = json.loads(out)
    assert err.endswith(
        "The same on several devices.\n"
        "\n"
        "NOT RUN as 2 ranks: numpy cannot do this. -n 0 leaves ranks out.\n"
        "This shows more: python -m compat run -n 2 --gpus cpu --backend numpy {}\n".format(script)
    )
    assert status == 3 and outcome["same"] is None and outcome["simulated"]["same"] is True
    assert outcome["ranks"] == {"size": 2, "status": None, "same": None}


def test_of_ranks_that_fail_the_error_is_told_and_no_traceback(tmp_path):
    """What they print besides is shown, and warnings where they do not fail."""
    script = tmp_path / "train.py"
    fails = "if compat.size() > 1:\n    raise ValueError('bad\\nin two lines')\n"
    script.write_text(SCRIPT + "print('trained', compat.size())\n" + fails)
    status, out, err = command("test", script)
    assert status == 1 and "[0] trained 2\n" in out
    assert "Traceback" not in out + err
    assert out.endswith(
        "\nAs 2 ranks: NOT well, exit status 1: ValueError: bad\nThis shows more: python -m "
        "compat run -n 2 --gpus cpu --backend numpy {}\n".format(script)
    )
    script.write_text(SCRIPT + "import sys\nprint('to stderr', file=sys.stderr)\n")
    status, out, err = command("test", script)
    assert status == 0 and "[0] to stderr\n" in err and out.endswith(ALL_WELL)


def test_ranks_that_train_on_the_same_rows_are_told_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(re.sub(r"compat\.shard\((.*)\)\n", r"\1\n", SCRIPT))
    status, out, err = command("test", script)
    assert status == 0
    assert out.splitlines()[-1] == (
        "As 2 ranks: all ended well, with the same weights, but trained on the same rows, so that "
        "nothing is gained: call compat.shard()."
    )
    assert err.count("CompatWarning: All 2 ranks train 'Network' on the same rows, ") == 1
    assert "All 2 ranks computed rows: 244 rows each. Model 'Network' was trained on the\n" in err


CONFIGURED = "import compat; compat.configure_gpu()\n"
PARALLELIZED = CONFIGURED + (
    "from compat_numpy.networks import Network\ncompat.parallelize(Network(8, 16, 4))\n"
)
WITH_PARALLELIZE = " With --parallelize, its Keras models run on the simulated devices."
OVER_NONE = (
    "no model was given to compat.parallelize(), so none was split over cpu:0, cpu:1, cpu:2."
)


@pytest.mark.parametrize(
    "options, script, said",
    [
        (
            [],
            "print('alone')",
            "--simulate had no effect: the script never called compat.configure_gpu()."
            + WITH_PARALLELIZE,
        ),
        ([], CONFIGURED, OVER_NONE + WITH_PARALLELIZE),
        pytest.param(
            ["--parallelize"],
            "",
            OVER_NONE.replace("given", "compiled or given"),
            marks=pytest.mark.slow,
        ),
        (
            [],
            CONFIGURED + "try:\n    compat.parallelize(1)\nexcept TypeError:\n    pass\n",
            "compat.parallelize() failed for 'int' (NotAModelError)"
            + OVER_NONE[OVER_NONE.index(",") :],
        ),
        ([], PARALLELIZED, None),
        pytest.param(["--simulate=1"], CONFIGURED, None, marks=pytest.mark.slow),
    ],
)
def test_simulated_devices_that_nothing_is_divided_over(tmp_path, options, script, said):
    path = tmp_path / "script.py"
    path.write_text(script)
    status, _, err = command("run", "--simulate", "3", *(options + [path]))
    assert status == 0, err
    last = err.splitlines()[-1]
    if said is None:
        assert "CPU devices stand in for GPUs" in last
    else:
        assert last == "compat run: " + said


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_processes_that_the_script_starts_find_its_functions(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "def twice(number):\n"
        "    return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context({!r}).Pool(2) as pool:\n"
        "        print(pool.map(twice, range(3)))\n".format(method)
    )
    status, out, err = command("run", "--simulate", "3", script)
    assert (status, out) == (0, "[0, 2, 4]\n"), err
    assert err.count("--simulate had no effect") == 1  # said by the script's own process


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_or_an_archive_runs_on_simulated_devices_too(tmp_path, packed):
    """With a ``__main__.py``, as Python runs them."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 7\n")
    (folder / "__main__.py").write_text(
        "import sys, beside\nprint(__name__, beside.value, sys.argv[1:])\n"
    )
    program = shutil.make_archive(str(folder), "zip", str(folder)) if packed else str(folder)
    status, out, err = command("run", "--simulate", "3", program, "a")
    assert (status, out) == (0, "__main__ 7 ['a']\n"), err


def test_without_keras_the_test_of_keras_says_so():
    status, _, err = command("test")
    assert status != 0 and "No Keras that runs on numpy is installed" in err
