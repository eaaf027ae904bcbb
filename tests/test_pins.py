"""``compat pins``: against setup.cfg, read by the library ``packaging``, which pytest brings."""

import configparser
import os

import pytest
from conftest import ROOT, refusal
from packaging.requirements import Requirement
from test_main import command, here, refused

import compat
from compat._commands import pins
from compat._configuration import pip_extras, tested_versions

PAIRS = [(extra, python) for extra in pip_extras.TESTED for python in pip_extras.TESTED[extra]]


def declared(extra, python):
    """Return the names and specifiers that setup.cfg has for an extra on a Python."""
    setup = configparser.ConfigParser()
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    lines = filter(None, setup["options.extras_require"][extra].splitlines())
    environment = {"python_version": pip_extras.spelled(python)}
    requirements = [Requirement(line) for line in lines]
    return {
        (each.name, each.specifier)
        for each in requirements
        if each.marker is None or each.marker.evaluate(environment)
    }


def parsed(lines):
    return {(each.name, each.specifier) for each in map(Requirement, lines)}


@pytest.mark.parametrize("extra, python", PAIRS)
def test_pins_are_those_of_setup_cfg(extra, python):
    lines = pins.pins(extra, python)
    assert parsed(lines) == declared(extra, python)
    assert len(lines) == len(set(lines)) and not any(";" in line for line in lines)


def test_pins_differ_by_python():
    assert "keras==2.2.4" in pins.pins("theano", (3, 7))
    assert "keras==2.3.1" in pins.pins("theano", (3, 8))


HEAD = "# {} on Python {}: as keras-gpu-compat " + compat.__version__ + " is tested\n"


def test_what_is_printed():
    lines = "tensorflow-cpu==1.15.0\nkeras>=2.2.4,<2.4\nprotobuf<3.21\nh5py<3\nnumpy<1.19\n"
    printed = HEAD.format("tensorflow1", "3.7") + lines
    assert command("pins", "tensorflow1", "--python", "3.7") == (0, printed, "")


@pytest.mark.parametrize(
    "name, extra", [("tf-keras", "tf_keras"), ("tensorflow2", "tensorflow"), ("Theano", "theano")]
)
def test_other_spellings_and_names_of_backends(name, extra):
    python = pip_extras.spelled(pip_extras.TESTED[extra][-1])
    assert here("pins", name, "--python", python)[1].startswith(HEAD.format(extra, python))


NAMES = (
    "tensorflow, tensorflow23, tensorflow20, keras3, tf_keras, tensorflow1, tensorflow112, "
    "tensorflow14, jax, torch, mxnet, mxnet16, mxnet15, theano, cntk"
)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["caffe"], "there are no pins for 'caffe'. Use one of {}.".format(NAMES)),
        (
            ["theano", "--python", "3.13"],
            "theano is not tested on Python 3.13, so there are no pins for it. It is tested on "
            "Python 3.6, 3.7 and 3.8; choose one of these with --python, such as --python 3.8.",
        ),
        (
            ["jax", "--python=3.12.1"],
            "jax is not tested on Python 3.12, so there are no pins for it. It is tested on "
            "Python 3.11; choose one of these with --python, such as --python 3.11.",
        ),
    ],
)
def test_what_has_no_pins(arguments, text):
    assert refused("pins", *arguments) == "compat pins: {}\n".format(text)


@pytest.mark.parametrize("pair", tested_versions.pairs(), ids=str)
def test_pins_of_each_tested_pair(pair):
    framework, keras = pair.versions
    options = ["--framework", framework, "--keras", keras]
    if pair.fault:
        assert " is not tested with " in refused("pins", pair.extra, *options)
        return
    python = pip_extras.spelled(pair.python)
    printed = HEAD.format(pair.extra, python) + "\n".join(pair.requirements) + "\n"
    assert here("pins", pair.extra, *options) == (0, printed, "")


def test_pins_of_the_newest_pair_that_begins_so():
    assert here("pins", "tensorflow1", "--keras", "2.2")[1].splitlines()[1:3] == [
        "tensorflow-cpu==1.15.0",
        "keras==2.2.4",
    ]
    assert "tensorflow-cpu==2.8.4" in here("pins", "tensorflow", "--keras", "2.8")[1]
    assert "\nkeras==3.10" in here("pins", "torch", "--keras", "3.10")[1]  # and not 3.1
    assert "\nkeras==3.1." in here("pins", "torch", "--keras", "3.1")[1]


def test_a_pair_that_is_not_tested():
    said = refused("pins", "theano", "--keras", "2.5", "--framework", "1", "--python", "3.6")
    start = "compat pins: theano is not tested with Keras 2.5 and framework 1 on Python 3.6. It is "
    assert said.startswith(start + "tested with keras 2.0.8, ")
    assert said.endswith(" keras 2.3.1 on Python 3.6.\n")
    assert refused("pins", "torch", "--keras", "new").endswith(
        "compat pins: error: argument --keras: 'new' is not a version, such as 3.8\n"
    )


def test_a_version_that_is_none():
    what = "argument --python: 'new' is not a version of Python, such as 3.7"
    assert refused("pins", "jax", "--python", "new").endswith(
        "compat pins: error: {}\n".format(what)
    )


def test_help():
    assert (
        "Print the requirements of a backend, with a Keras that runs on it, in the versions with "
        "which\nkeras-gpu-compat is tested on a Python. With --keras or --framework: in the newest "
        "tested versions\nthat begin so.\n\nexit status: 0, or 2 where a backend is not known, or "
        "is not tested on that Python or in these\nversions."
    ) in here("pins", "--help")[1]


# As setuptools writes them, and as it did in 2019.
NEW = """\
Requires-Dist: keras<2.4,>=2.2.4; extra == "tf-keras"
Requires-Dist: numpy==1; (python_version > "3.8" and python_version < "4") and extra == "tf-keras"
Requires-Dist: numpy==2; python_version < "3.9" and extra == "tf-keras"
Requires-Dist: theano; extra == "theano"
"""
OLD = """\
Requires-Dist: keras (<2.4,>=2.2.4) ; extra == 'tf_keras'
Requires-Dist: numpy (==1) ; (python_version>"3.8" and python_version<"4") and extra == 'tf_keras'
Requires-Dist: numpy (==2) ; (python_version < "3.9") and extra == 'tf_keras'
Requires-Dist: theano ; extra == 'theano'
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function of metadata that returns the pins of an installed copy of this package."""

    def pins_of(metadata):
        folder = tmp_path / "keras_gpu_compat-0.1.0.dist-info"
        folder.mkdir()
        text = "Metadata-Version: 2.1\nName: keras-gpu-compat\n" + metadata + "\nA text.\n"
        (folder / "METADATA").write_text(text)
        return pins.pins("tf_keras", (3, 11))

    monkeypatch.setattr(pins, "__file__", str(tmp_path / "compat" / "_commands" / "pins.py"))
    return pins_of


@pytest.mark.parametrize("metadata", [NEW, OLD])
def test_metadata_of_an_installed_package(installed, metadata):
    assert installed(metadata) == ["keras>=2.2.4,<2.4", "numpy==1"]


def test_a_copy_without_metadata(installed, tmp_path):
    assert refusal(compat.NotInstalledError, pins.pins, "tf_keras", (3, 11)) == (
        "the pins are in the metadata of keras-gpu-compat, which {} does not "
        "have. Install it with pip, not by copying its files.".format(tmp_path)
    )


@pytest.mark.parametrize(
    "line",
    [
        'numpy==1; sys_platform == "linux" and extra == "tf-keras"',
        'numpy==1; (python_version < "3.9" or extra == "tf-keras")',
        'numpy==1; extra != "tf-keras"',
        'numpy @ file:///tmp/n ; extra == "tf-keras"',
    ],
)
def test_a_requirement_that_is_not_understood(installed, line):
    assert refusal(compat.UnsupportedError, installed, "Requires-Dist: " + line) == (
        "the requirement {!r} in the metadata of keras-gpu-compat is not understood. Install this "
        "version of it anew; if that does not help, please report it.".format(line)
    )
