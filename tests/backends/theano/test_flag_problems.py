"""Flags that Theano, or Keras, ignores."""

import os

import pytest

from compat._backends.theano import flag_problems
from compat.testing import span

from . import test_contract

theano = test_contract.theano


@pytest.fixture
def problems(theano, tmp_path):
    def problems(**environ):
        environ = dict({"HOME": str(tmp_path), "KERAS_HOME": str(tmp_path)}, **environ)
        return theano.problems(dict({"PATH": os.environ["PATH"]}, **environ))

    return problems


@span
def test_nothing_is_wrong(problems):
    assert problems() == []
    assert problems(THEANO_FLAGS="device=cpu,openmp=true,floatX=32,dnn.enabled=auto") == []


@span
def test_flags_that_theano_ignores(problems, theano):
    unknown = "Theano {} has no flag".format(theano.import_framework().__version__)
    flags = "FloatX=float32,optimiser=fast_run,gpuarray.prealocate=1,bogus=1"
    assert problems(THEANO_FLAGS=flags) == [
        "FloatX=float32: {} FloatX, and ignores it. Did you mean floatX?".format(unknown),
        "optimiser=fast_run: {} optimiser, and ignores it. Did you mean optimizer?".format(unknown),
        "gpuarray.prealocate=1: {} gpuarray.prealocate, and ignores it. Did you mean "
        "gpuarray.preallocate?".format(unknown),
        "bogus=1: {} bogus, and ignores it.".format(unknown),
    ]


@span
def test_the_flags_read_from_the_file_are_theanos(theano):
    parameters = theano.import_framework().configparser._config_var_list
    assert flag_problems.defined() == {parameter.fullname for parameter in parameters}


def test_what_is_wrong(problems, tmp_path):
    assert problems(THEANO_FLAGS="device = cpu,openmp,floatX= float32") == [
        "THEANO_FLAGS: 'device = cpu' has a space beside its '=', Theano does not take it for "
        "device. Write device=cpu.",
        "THEANO_FLAGS: 'openmp' has no value, Theano ignores it.",
        "THEANO_FLAGS: 'floatX= float32' has a space beside its '=', Theano does not take it for "
        "floatX. Write floatX=float32.",
    ]
    assert problems(PATH=str(tmp_path)) == [
        "g++ is not on PATH: Theano runs everything in Python, slowly. On Debian and Ubuntu: "
        "apt-get install g++",
    ]
    assert problems(THEANO_GPU_IS_ALREADY_ACTIVE="Yes", THEANO_FLAGS="a='") == [
        "THEANO_GPU_IS_ALREADY_ACTIVE is set: a process that uses a GPU started this one, and "
        "Theano will use none here. If it may: unset THEANO_GPU_IS_ALREADY_ACTIVE",
        "THEANO_FLAGS=a=' cannot be read: No closing quotation. Theano cannot be imported with "
        "it. Put a backslash before a quote, a comma or a backslash that belongs to a value.",
    ]


def test_what_is_wrong_in_files(problems, tmp_path):
    path = tmp_path / "rc"
    path.write_text("[global]\nfloatX = float64\n")
    keras = tmp_path / "keras.json"
    keras.write_text('{"floatx": "float16"}')
    assert problems(THEANORC="{}:~/missing".format(path)) == [
        "THEANORC names {}, which does not exist. For Theano's own files: unset THEANORC".format(
            tmp_path / "missing"
        ),
        "floatX=float64: Keras sets float16 when it is imported, as {} says or by default. Pass "
        "floatx= to configure_gpu(), which sets both.".format(keras),
    ]
    path.write_text("openmp = True\n")
    found = problems(THEANORC=str(path))
    assert len(found) == 1
    assert found[0].startswith("{} cannot be read: File contains no section".format(path))
