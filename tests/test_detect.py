"""Which backend is chosen, and the reason that is given."""

import os
import sys

import pytest
from conftest import Toy, refusal

import compat
from compat._configuration import detection, packages, pip_extras

pytestmark = pytest.mark.usefixtures("process")


class Theano(Toy):
    name = framework = extra = "theano"
    distributions = ("theano",)


class Mxnet(Toy):
    name = framework = extra = "mxnet"
    distributions = ("mxnet", "mxnet-cu112")


class Tensorflow1(Toy):
    name = extra = "tensorflow1"
    framework = "tensorflow"
    distributions = ("tensorflow", "tensorflow-cpu")

    def accepts(self, version):
        return version.startswith("1.")


class Tensorflow2(Tensorflow1):
    name = "tensorflow2"
    extra = "tensorflow"

    def accepts(self, version):
        return version.startswith("2.")


class Torch(Toy):
    name = framework = extra = "torch"


@pytest.fixture(autouse=True)
def four(register, site, on_python):
    register(Theano(), Mxnet(), Tensorflow1(), Tensorflow2())
    on_python("3.8")


@pytest.fixture
def on_python(monkeypatch):
    """Let this be another Python, for what is said of extras."""

    def on_python(version):
        parts = tuple(map(int, version.split(".")))
        monkeypatch.setattr(pip_extras, "here", lambda: parts)

    return on_python


def choice(asked=None):
    backend, reason = detection.choose(asked)
    return backend.name, reason


def refused(kind, asked=None, **options):
    return refusal(kind, detection.choose, asked, **options)


# What is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, name",
    [("1.15.5", "tensorflow1"), ("2.15.1", "tensorflow2"), ("2.0.0rc1", "tensorflow2")],
)
def test_asked_by_framework_the_installed_version_decides(site, version, name):
    site.install("tensorflow-cpu", version)
    assert choice("tensorflow") == (name, "backend='tensorflow' was asked for")


def test_what_is_asked_beats_all_else(site, monkeypatch):
    site.install_all(theano="1.0.5", tensorflow="1.15.5", Keras="2.2.4")
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    assert choice("tensorflow1") == ("tensorflow1", "backend='tensorflow1' was asked for")


def test_asked_for_the_unknown():
    assert refused(compat.InvalidArgumentError, "cntk") == (
        "backend='cntk' was asked for, but compat does not know that backend. Known backends: "
        "mxnet, tensorflow, tensorflow1, tensorflow2, theano."
    )


@pytest.mark.parametrize(
    "name, meant",
    [
        ("tensroflow", "tensorflow"),
        ("Theano", "theano"),
        ("tensorflow3", "tensorflow"),
        ("pytorch", "torch"),
        ("tf", "tensorflow"),
        ("mx", "mxnet"),
    ],
)
def test_asked_for_a_misspelled_one(name, meant, register):
    register(Theano(), Mxnet(), Tensorflow1(), Tensorflow2(), Torch())
    text = "does not know that backend. Did you mean {!r}? Known backends: ".format(meant)
    assert text in refused(compat.InvalidArgumentError, name)


@pytest.mark.parametrize("asked", [5, ["torch"], b"torch"])
def test_asked_for_what_is_no_name(asked, register):
    register(Torch())
    told = "backend={!r} was asked for, but compat does not know that backend. Known backends: "
    assert refused(compat.InvalidArgumentError, asked).startswith(told.format(asked))


def test_asked_for_what_is_not_installed():
    assert refused(compat.NotInstalledError, "theano") == (
        "theano is not installed, but backend='theano' was asked for. Choose another backend, or "
        'install it: pip install "keras-gpu-compat[theano]".'
    )


@pytest.mark.parametrize("asked", ["tensorflow1", "tensorflow"])
def test_asked_for_a_version_that_no_backend_accepts(site, asked):
    site.install("tensorflow", "0.12")
    assert refused(compat.UnsupportedError, asked) == (
        "tensorflow 0.12 is installed, which no backend of compat accepts. Known backends: mxnet, "
        "tensorflow1, tensorflow2, theano."
    )


# The Keras that is imported -------------------------------------------------------------------

# While it is imported, its backend is not yet decided; afterwards, keras.backend.backend() is.
KERAS = """\
from types import SimpleNamespace
from compat._configuration import detection, packages
backend = SimpleNamespace(backend=lambda: "theano")
chosen_meanwhile = detection.choose()
"""


def test_the_imported_keras_decides(site, monkeypatch):
    site.install_all(theano="1.0.5", mxnet="1.9.1")
    site.install("Keras", "2.2.4", "keras", KERAS)
    monkeypatch.setenv("KERAS_BACKEND", "mxnet")
    import keras

    meanwhile, reason = keras.chosen_meanwhile
    assert (meanwhile.name, reason) == ("mxnet", "KERAS_BACKEND=mxnet")
    assert choice() == ("theano", "the imported keras runs on theano")


def test_a_keras_without_a_backend_decides_nothing(site):
    site.install("theano", "1.0.5")
    site.install("other", "1", "keras", "")
    import keras  # noqa: F401

    assert choice() == ("theano", "the only backend installed")


# What the installed Keras would choose --------------------------------------------------------


def test_keras_backend(site, monkeypatch):
    site.install_all(theano="1.0.5", tensorflow="1.15.5", Keras="2.3.1")
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    assert choice() == ("theano", "KERAS_BACKEND=theano")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert choice() == ("tensorflow1", "KERAS_BACKEND=tensorflow")
    monkeypatch.setenv("KERAS_BACKEND", "cntk")
    assert refused(compat.InvalidArgumentError) == (
        "KERAS_BACKEND=cntk, but compat does not know that backend. Known backends: mxnet, "
        "tensorflow, tensorflow1, tensorflow2, theano."
    )
    monkeypatch.setenv("KERAS_BACKEND", "mxnet")
    assert refused(compat.NotInstalledError) == (
        "mxnet is not installed, but KERAS_BACKEND=mxnet. Use backend='tensorflow1', or install "
        'it: pip install "keras-gpu-compat[mxnet]".'
    )
    monkeypatch.setenv("KERAS_BACKEND", "")  # as if it were not set
    assert choice() == ("tensorflow1", "it is the default of keras 2.3.1")


@pytest.mark.parametrize("theano", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_default_that_is_not_installed(site, keras_json, theano, written):
    """Also where Keras has written it into its file: it does so on every backend."""
    site.install("Keras", "2.2.4")
    if written:
        keras_json('{"backend": "tensorflow"}')
    site.install("mxnet", "1.9.1")
    if not theano:
        assert choice() == ("mxnet", "the only backend installed")
        mxnet = detection.choose()[0]
        assert detection.keras_variable(mxnet, os.environ) == {"KERAS_BACKEND": "mxnet"}
        return
    site.install("theano", "1.0.5")
    assert refused(compat.NotInstalledError).startswith("tensorflow is not installed, but ")


@pytest.fixture
def keras_json(tmp_path):
    """Write keras.json in the home folder, or in another one."""

    def write(content, folder=".keras"):
        path = tmp_path / folder / "keras.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return str(path)

    return write


def test_keras_json(site, monkeypatch, tmp_path, keras_json):
    site.install_all(theano="1.0.5", mxnet="1.9.1", tensorflow="1.15.5", Keras="2.2.4")
    assert choice() == ("tensorflow1", "it is the default of keras 2.2.4")
    keras_json('{"floatx": "float32"}')
    assert choice() == ("tensorflow1", "it is the default of keras 2.2.4")
    path = keras_json('{"backend": "theano"}')
    assert choice() == ("theano", "{} names it".format(path))
    path = keras_json('{"backend": "mxnet"}', "elsewhere")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "elsewhere"))
    assert choice() == ("mxnet", "{} names it".format(path))
    monkeypatch.setenv("KERAS_HOME", "~/elsewhere")
    assert choice() == ("mxnet", "{} names it".format(path))
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    assert choice() == ("theano", "KERAS_BACKEND=theano")


def test_keras_home_is_unknown_to_keras_before_2_2(site, monkeypatch, tmp_path, keras_json):
    site.install_all(theano="1.0.5", mxnet="1.9.1", Keras="2.1.6")
    path = keras_json('{"backend": "theano"}')
    keras_json('{"backend": "mxnet"}', "elsewhere")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "elsewhere"))
    assert choice() == ("theano", "{} names it".format(path))


def test_a_home_that_cannot_be_written_is_none_for_keras(site, monkeypatch, tmp_path):
    site.install("Keras", "2.2.4")
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert detection.keras_json({}) == "/tmp/.keras/keras.json"


@pytest.mark.parametrize(
    "content, problem",
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ('{"backend": "theano"', "Expecting ',' delimiter: line 1 column 21 (char 20)"),
        ('["theano"]', "it holds no object"),
    ],
)
def test_keras_json_unreadable(site, monkeypatch, keras_json, content, problem):
    site.install_all(theano="1.0.5", Keras="2.2.4")
    path = keras_json(content)
    assert refused(compat.ConfigurationFileError) == (
        "{} cannot be read: {}. Keras would ignore it silently. Correct it, set KERAS_BACKEND, or "
        "move it away: mv {} {}".format(path, problem, path, str(path) + ".wrong")
    )
    monkeypatch.setenv("KERAS_BACKEND", "theano")  # then Keras does not need the file
    assert choice() == ("theano", "KERAS_BACKEND=theano")


def test_keras_json_that_is_no_file_is_not_waited_for(tmp_path):
    """In /tmp/.keras, Keras' second choice, anybody may have put it."""
    path = str(tmp_path / "keras.json")
    os.mkfifo(path)
    with pytest.raises(compat.ConfigurationFileError, match="It is not a regular file"):
        detection.read_keras_json(path)


def test_keras_mxnet(site, monkeypatch, keras_json):
    site.install_all(mxnet="1.9.1", theano="1.0.5")
    site.install("keras-mxnet", "2.2.4.3")
    assert choice() == ("mxnet", "it is the default of keras-mxnet 2.2.4.3")
    path = keras_json('{"backend": "theano"}')
    assert choice() == ("theano", "{} names it".format(path))
    assert detection.problems({}) == []
    site.install("Keras", "2.2.4")
    assert detection.problems({}) == [
        "keras and keras-mxnet are both installed; they overwrite each other's files. Uninstall "
        "both, then install one: pip uninstall -y keras keras-mxnet && pip install "
        "keras-mxnet=={}".format("2.2.4.3")
    ]


@pytest.mark.parametrize("version", ["2.4.3", "2.10.0", "2.15.0", "2.13.1rc0"])
def test_keras_of_tensorflow_reads_neither_variable_nor_file(
    site, monkeypatch, keras_json, version
):
    site.install_all(theano="1.0.5", tensorflow="2.10.1")
    site.install("keras", version)
    keras_json('{"backend": "theano"}')
    assert detection.problems(os.environ) == []
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    assert choice() == ("tensorflow2", "keras {} runs on TensorFlow only".format(version))
    assert detection.problems(os.environ) == [
        "KERAS_BACKEND=theano is ignored: keras {} runs on TensorFlow only. Install another Keras, "
        "or drop the variable: unset KERAS_BACKEND".format(version)
    ]


def test_keras_3_reads_both_again(site, monkeypatch):
    site.install_all(tensorflow="2.21.0", keras="3.15.0")
    assert choice() == ("tensorflow2", "it is the default of keras 3.15.0")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert detection.problems(os.environ) == []
    assert "KERAS_BACKEND=jax, but compat does not" in refused(compat.InvalidArgumentError)


# Without Keras --------------------------------------------------------------------------------


def test_several_installed_are_not_guessed_from(site, monkeypatch):
    site.install_all(mxnet="1.9.1", theano="1.0.5")
    start = (
        "Several backends are installed and nothing says which one this script uses: mxnet, "
        "theano. "
    )
    assert refused(compat.AmbiguousBackendError) == (
        start + "Pass backend=..., set KERAS_BACKEND, or import keras first."
    )
    assert refused(compat.AmbiguousBackendError, typed=True) == (
        start + "Pass --backend, such as --backend mxnet, or set KERAS_BACKEND."
    )


def test_none_installed():
    assert refused(compat.NotInstalledError) == (
        "No backend is installed in this Python. Install one of mxnet, tensorflow, theano with "
        'its pins, for example: pip install "keras-gpu-compat[tensorflow]".'
    )


@pytest.mark.parametrize(
    "python, variable, extras, example",
    [
        ("3.7", None, "mxnet, tensorflow1, theano", "tensorflow1"),
        ("3.7", "theano", "mxnet, tensorflow1, theano", "theano"),
        ("3.11", None, "tensorflow", "tensorflow"),
        ("3.11", "theano", "tensorflow", "tensorflow"),
    ],
)
def test_none_installed_names_what_installs_here(
    on_python, monkeypatch, python, variable, extras, example
):
    on_python(python)
    if variable:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    said = refused(compat.NotInstalledError)
    assert "Install one of {} with".format(extras) in said
    assert said.endswith(': pip install "keras-gpu-compat[{}]".'.format(example))


def test_none_installed_on_a_python_that_no_extra_knows(on_python):
    on_python("3.99")
    said = refused(compat.NotInstalledError)
    assert said == (
        "No backend is installed in this Python, and no extra of keras-gpu-compat installs on "
        "Python 3.99. Use another Python, or install a framework and a Keras that runs on it "
        "yourself."
    )


@pytest.mark.parametrize(
    "python, keras, asked, extra",
    [
        ("3.11", None, "tensorflow", "tensorflow"),
        ("3.11", "3.15.0", "tensorflow", "keras3"),
        ("3.10", "3.10.0", "tensorflow", "tensorflow"),  # that of the extra is newer
        ("3.11", "2.2.4", "tensorflow", "tensorflow"),
        ("3.11", "2.15.0", "tensorflow2", "tensorflow"),
        ("3.13", "3.15.0", "tensorflow2", "keras3"),
        ("3.7", None, "tensorflow", "tensorflow1"),
        ("3.7", "2.2.4", "tensorflow", "tensorflow1"),
        ("3.7", "2.2.4", "tensorflow2", "tensorflow23"),
        ("3.7", "2.4.3", "tensorflow", "tensorflow23"),
        ("3.7", "2.1.6", "tensorflow", "tensorflow1"),
        ("3.6", "2.1.6", "tensorflow", "tensorflow112"),
        ("3.6", "2.0.8", "tensorflow1", "tensorflow14"),
        ("3.8", "2.2.4", "tensorflow", "tensorflow"),
    ],
)
def test_the_extra_that_installs_here_and_fits_the_keras(
    on_python, site, python, keras, asked, extra
):
    on_python(python)
    if keras:
        site.install("Keras", keras)
    said = refused(compat.NotInstalledError, asked)
    assert said.endswith('install it: pip install "keras-gpu-compat[{}]".'.format(extra))


@pytest.mark.parametrize(
    "python, asked, framework, pythons",
    [
        ("3.11", "theano", "theano", "Python 3.6 to 3.8"),
        ("3.9", "tensorflow1", "tensorflow", "Python 3.6 or 3.7"),
    ],
)
def test_no_extra_for_it_installs_here(on_python, python, asked, framework, pythons):
    on_python(python)
    text = (
        "{} is not installed, but {} was asked for. Choose another backend, or run the script on "
        '{}, where pip install "keras-gpu-compat[{}]" brings it: this is Python {}.'
    )
    for typed, said in ((False, "backend={!r}"), (True, "--backend {}")):
        assert refused(compat.NotInstalledError, asked, typed=typed) == text.format(
            framework, said.format(asked), pythons, asked, python
        )


def test_a_version_that_is_not_accepted_is_not_chosen(site):
    site.install_all(tensorflow="0.12", mxnet="1.9.1")
    assert choice() == ("mxnet", "the only backend installed")


# Versions -------------------------------------------------------------------------------------


def test_versions_are_those_that_are_installed(monkeypatch):
    """Against the standard's own reading, for everything in this Python."""
    if sys.version_info >= (3, 8):
        from importlib.metadata import distributions  # novm
    else:
        from importlib_metadata import distributions  # pytest brings it along

    monkeypatch.undo()  # the real sys.path
    found = {d.metadata["Name"]: d.version for d in distributions()}
    assert "pytest" in found
    assert {name: packages.version(name) for name in found} == found


def test_a_development_install_tells_its_version_in_a_file(site):
    folder = site.folder / "Theano.egg-info"
    folder.mkdir()
    assert packages.version("theano") is None
    (folder / "PKG-INFO").write_text("Metadata-Version: 1.2\nName: Theano\nVersion: 1.0.5+dev\n")
    assert packages.version("theano") == "1.0.5+dev"


def test_an_egg_info_has_the_python_in_its_name(site):
    (site.folder / "Keras_Applications-1.0.8-py3.7.egg-info").mkdir()
    assert packages.version("keras-applications") == "1.0.8"
    assert packages.version("keras") is None


def test_folders_and_files_that_are_no_distribution(site, monkeypatch):
    for name in ("theano-1.0.4", "theano-1.0.4.txt", "theano"):
        (site.folder / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(site.folder / "missing")] + sys.path)
    assert packages.version("theano") is None
    later = site.folder / "later"
    (later / "theano-1.0.5.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", sys.path + [str(later)])
    assert packages.version("theano") == "1.0.5"


def test_what_is_imported_tells_its_version_itself(site):
    site.install("theano", "1.0.4", "theano", "__version__ = '1.0.5'")
    assert detection.installed_version(Theano()) == "1.0.4"
    import theano  # noqa: F401

    assert detection.installed_version(Theano()) == "1.0.5"


@pytest.mark.parametrize(
    "version, release",
    [("2.2.4", (2, 2)), ("2.4rc0", (2, 4)), ("3", (3,)), ("2.10.0.dev1+cpu", (2, 10))],
)
def test_release(version, release):
    assert packages.release(version) == release


# Not installed, and installed but broken ------------------------------------------------------


@pytest.mark.parametrize(
    "source, problem",
    [
        ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
        ("raise OSError('libgfortran.so.3: cannot open')", "libgfortran.so.3: cannot open"),
        ("1 / 0", "division by zero"),
    ],
)
def test_installed_but_broken(site, source, problem):
    site.install("theano", "1.0.5", "theano", source)
    with pytest.raises(ImportError) as caught:
        compat.configure_gpu(backend="theano")
    assert type(caught.value) is compat.BrokenInstallError
    assert str(caught.value) == (
        "theano is installed, but importing it fails: {}. Run `python -c 'import theano'` to see "
        "all of it.".format(problem)
    )
    assert str(caught.value.__cause__) == problem
