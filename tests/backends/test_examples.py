"""The scripts in examples/: on one device, on three simulated ones, and one without compat in it.

Each runs in two or three processes, one after the other with all that are tested here.
"""

import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

from compat._configuration import packages
from compat.testing import DEVICES, in_span, slow, span

from . import ranks
from .conftest import INSTALLED, IS_TENSORFLOW_20

(BACKEND,) = INSTALLED
if BACKEND.name == "theano":
    from .theano import test_contract  # noqa: F401  # Theano's flags of the tests

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
KERAS = os.environ.get("COMPAT_TEST_KERAS", "keras")
ONE_DEVICE = BACKEND.name == "cntk"
TITLES = {
    "mlp": "MLP",
    "cnn": "CNN with augmentation",
    "siamese": "siamese network",
    "vae": "VAE with add_loss",
    "lstm_text": "LSTM text generation",
    "seq2seq": "seq2seq",
    "multi_output": "multi-output",
    "gan": "GAN",
}
#: Those whose first steps are verified, which tells where they ran. All would take too long.
VERIFIED = ("mlp", "gan")
LOOPS = ("lstm_text", "seq2seq")
#: Left out: Theano's convolutions and loops take minutes here, and so does seq2seq on TensorFlow 1.
LEFT_OUT = {"theano": ("cnn",) + LOOPS, "tensorflow1": ("seq2seq",)}.get(BACKEND.name, ())
#: Those that are not slow. MXNet runs all that its Keras can, JAX the other one, and CNTK all with
#: the newer of its two Keras.
NEWER = packages.version("keras") == "2.3.1"
QUICK = {"jax": ("gan",), "mxnet": TITLES, "cntk": TITLES if NEWER else ()}.get(BACKEND.name, ())
#: What also runs without its lines of compat, in the whole contract, on an old backend and a new
#: one: two models that share layers. A single model does so everywhere, in the contract.
UNEDITED = ("gan",) if BACKEND.name in ("tensorflow1", "torch") else ()
#: What a backend cannot do with them, and who says so: see examples/README.md.
NOT_BY_KERAS = {"mxnet": ["gan"]}.get(BACKEND.name, [])
NOT_BY_COMPAT = ["lstm_text", "seq2seq"] if IS_TENSORFLOW_20 else []


def examples(names):
    """Parameters of tests, each with its row in docs/support.md."""
    row = "example: {}, on one device" if ONE_DEVICE else "example: {}"
    return [
        pytest.param(
            name, marks=[pytest.mark.row(row.format(TITLES[name]))] + [slow] * (name not in QUICK)
        )
        for name in names
    ]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return the outcomes of the selected scripts, by variant and name; see run_examples.py."""
    chosen = [
        item.callspec.params["example"]
        for item in request.session.items
        if item.originalname == test_the_same_on_several_devices.__name__
    ]
    folder = tmp_path_factory.mktemp("examples")
    found = {"one device": run(folder, chosen)}
    if not ONE_DEVICE:
        simulated = {
            "COMPAT_SIMULATE": str(DEVICES),
            "COMPAT_VERIFY": "1",
            "COMPAT_VERIFY_REPORT": str(folder),
        }
        found["several devices"] = run(folder, chosen, **simulated)
        unedited = [name for name in chosen if name in UNEDITED]
        if unedited:
            options = {"with_compat": False, "command": PARALLELIZED}
            found["without compat in it"] = run(folder, unedited, **options)
    return found


PARALLELIZED = ["-m", "compat", "run", "--backend", BACKEND.framework]
PARALLELIZED += ["--parallelize", "--simulate", str(DEVICES)]


def run(folder, names, with_compat=True, command=(), **environ):
    """Run scripts in one process, with their lines of compat or without; read what they did."""
    paths = [folder / (name + ".py") for name in names]
    for name, path in zip(names, paths):
        path.write_text(source(name, with_compat))
    results = folder / "results"
    program = [os.path.join(HERE, "run_examples.py"), str(results), BACKEND.framework, KERAS]
    completed = subprocess.run(
        [sys.executable, *command, *program, ",".join(VERIFIED), *map(str, paths)],
        env=dict(
            dict(os.environ, KERAS_BACKEND=BACKEND.framework, PYTHONPATH=ROOT, COMPAT_VERIFY="0"),
            **environ,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert completed.returncode == 0, "exit status {}, after:\n{}".format(
        completed.returncode, completed.stdout[-3000:]
    )
    return pickle.loads(results.read_bytes())


def source(name, with_compat):
    """Return a script for the Keras under test; without compat, that is all lines that name it."""
    with open(os.path.join(ROOT, "examples", name + ".py")) as file:
        lines = file.read().splitlines(True)
    return "".join(
        re.sub("^( *)from keras", r"\1from " + KERAS, line)
        for line in lines
        if with_compat or "compat" not in line
    )


@pytest.mark.parametrize(
    "example",
    examples(n for n in TITLES if n not in LEFT_OUT and n not in NOT_BY_KERAS + NOT_BY_COMPAT),
)
def test_the_same_on_several_devices(example, outcomes):
    """It learns, on several devices to the numbers of one, with its lines of compat or not."""
    expected = outcomes["one device"][example]
    for variant in [variant for variant in outcomes if example in outcomes[variant]]:
        outcome = outcomes[variant][example]
        assert outcome["error"] is None, (variant, outcome["error"])
        verdict, final = outcome["printed"][-2:]
        assert re.match(r"learned: \d+\.\d+ (before|in the first epoch)$", verdict), verdict
        assert loss(final) == pytest.approx(loss(expected["printed"][-1]), rel=1e-4)
        assert len(outcome["weights"]) == len(expected["weights"]) > 2
        for ours, theirs in zip(outcome["weights"], expected["weights"]):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=variant)
    if example in VERIFIED and not ONE_DEVICE and not IS_TENSORFLOW_20:
        operations = outcomes["several devices"][example]["operations"]
        assert len(operations) == (2 if example == "gan" else 1)
        for devices in operations:
            assert len(devices) == DEVICES, devices
            assert len(set(devices.values())) == 1, devices
            assert all(forward and backward for forward, backward in devices.values()), devices


def loss(line):
    found = re.match(r"final loss: (\d+\.\d+)$", line)
    assert found, line
    return float(found.group(1))


# Of the environments of TensorFlow with Keras 3 in one, where it is slow: test_workers.py does so
# with tf.keras, and torch and JAX with Keras 3.
on_others = slow if BACKEND.framework == "tensorflow" else (lambda test: test)
if (
    KERAS == "keras"
    and (packages.version("keras") or "").startswith("3.")
    and (BACKEND.framework != "tensorflow" or sys.version_info >= (3, 12))
):

    @span
    @on_others
    def test_compat_test_says_that_all_is_well():
        """Typed as docs/checks.md has it, on simulated devices and as ranks."""
        path = os.path.join(ROOT, "examples", "mlp.py")
        ranks.check_compat_test(path, "--epochs", "1", backend=BACKEND.framework)


if NOT_BY_KERAS:

    @pytest.mark.parametrize("example", NOT_BY_KERAS)
    def test_keras_alone_does_not_learn_it(example, tmp_path):
        """The fault is not compat's: keras-mxnet's compiled models do not share their weights."""
        outcome = run(tmp_path, [example], with_compat=False)[example]
        assert outcome["error"] is None
        before, after = (
            float(re.search(r"(\d+\.\d+)( before)?$", line).group(1))
            for line in (outcome["printed"][-2], outcome["printed"][-3])
        )
        assert outcome["printed"][-2].startswith("NOT learned: ")
        assert before == after  # not one weight of the generator has changed


if NOT_BY_COMPAT:

    @pytest.mark.parametrize("example", in_span(NOT_BY_COMPAT, NOT_BY_COMPAT[:1]))
    def test_what_cannot_be_split_is_a_clear_error(example, tmp_path):
        several = run(tmp_path, [example], COMPAT_SIMULATE=str(DEVICES))[example]
        assert "compat.errors.UnsupportedError: " in several["error"]
        assert "unroll=True" in several["error"]
