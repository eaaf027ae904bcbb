"""``compat tox``: on the project in tests/legacy_project; tox itself is not run here."""

import configparser
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, refusal
from packaging.specifiers import SpecifierSet
from test_main import command, here, refused
from test_pins import NAMES

import compat
from compat import errors
from compat._commands import pins, python_requires
from compat._commands import tox as tox_command
from compat._configuration import pip_extras

# The settings that all rows share; tox's environment `generated` runs what is written.
SETTINGS = {
    "tox": {
        "requires": ["tox>=4.57", "tox-uv>=1.20"],
        "env_list": ["py38-theano", "py37-tensorflow1"],
        "skip_missing_interpreters": "true",
    },
    "testenv": {
        "skip_install": "true",
        "deps": ["keras-gpu-compat", "pytest"],
        "pass_env": "PYENV_*",
        "set_env": [
            "PYTHONPATH = {tox_root}", "COMPAT_SIMULATE = 3", "OMP_NUM_THREADS = 1",
            "OPENBLAS_NUM_THREADS = 1",
        ],
        "commands": "pytest {posargs}",
    },
}  # fmt: skip
VARIABLES = {
    "py38-theano": ["KERAS_BACKEND = theano"],
    "py37-tensorflow1": ["KERAS_BACKEND = tensorflow", "TF_CPP_MIN_LOG_LEVEL = 2"],
}

WORKFLOW = """\
# Written by `compat tox` of keras-gpu-compat {version}, which writes it anew while this line is
# here: the rows of tox.ini, a job for each.
name: compat
on: [push, pull_request]
jobs:
  py38-theano:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          # The last one runs tox.
          python-version: |
            3.8
            3.13
      - run: python -m pip install tox tox-uv
      - run: tox run -e py38-theano
  # Runners no longer have Python 3.7, and tox does not run on it: a container of that Python,
  # with the deps and the variables of the row in tox.ini.
  py37-tensorflow1:
    runs-on: ubuntu-latest
    container: python:3.7
    env:
      COMPAT_SIMULATE: "3"
      OMP_NUM_THREADS: "1"
      OPENBLAS_NUM_THREADS: "1"
      KERAS_BACKEND: "tensorflow"
      TF_CPP_MIN_LOG_LEVEL: "2"
    steps:
      - uses: actions/checkout@v4
      - run: >-
          python -m pip install
          "keras-gpu-compat"
          "pytest"
          "tensorflow-cpu==1.15.0"
          "keras>=2.2.4,<2.4"
          "protobuf<3.21"
          "h5py<3"
          "numpy<1.19"
      - run: PYTHONPATH="$PWD" python -m pytest
"""


@pytest.fixture
def project(tmp_path):
    """Return a copy of the project, which allows Python 3.6 to 3.8."""
    folder = tmp_path / "project"
    shutil.copytree(os.path.join(ROOT, "tests", "legacy_project"), str(folder))
    return folder


def tox(project, *arguments):
    return here("tox", "-o", project, *arguments)


def settings(project, *sections):
    """Sections of a tox.ini: the text of each setting, or its lines."""
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read(str(project / "tox.ini"), encoding="utf-8")
    return {
        section: {
            key: value.split("\n")[1:] if "\n" in value else value
            for key, value in parser[section].items()
        }
        for section in sections
    }


def rows(project):
    """Return the rows of a tox.ini, in their order."""
    names = settings(project, "tox")["tox"]["env_list"]
    found = settings(project, *["testenv:" + name for name in names])
    return dict(zip(names, found.values()))


def test_files(project):
    options = "--backends", "theano,tensorflow1", "--ci"
    status, out, err = tox(project, *options)
    assert (status, err) == (0, "")
    assert out == (
        "wrote  tox.ini, toxfile.py, .github/workflows/compat.yml\n"
        "rows   py38-theano, py37-tensorflow1\n"
        "next   pip install tox tox-uv && tox run\n"
    )
    version = compat.__version__
    assert settings(project, *SETTINGS) == SETTINGS
    for name, row in rows(project).items():
        assert row["set_env"] == ["{[testenv]set_env}"] + VARIABLES[name]
    text = (project / "tox.ini").read_text()
    assert text.startswith("# Written by `compat tox` of keras-gpu-compat {}, ".format(version))
    assert "\n#     tox run -e py38-theano -- -k dense     a part of the tests\n" in text
    written = (project / ".github" / "workflows" / "compat.yml").read_text()
    assert written == WORKFLOW.format(version=version)
    with open(os.path.join(ROOT, "compat", "_commands", "toxfile.py")) as file:
        assert (project / "toxfile.py").read_text() == file.read()
    assert not [name for _, _, names in os.walk(str(project)) for name in names if "tmp" in name]


def test_rows_of_a_project_of_python_3_6_to_3_8(project):
    status, out, err = tox(project)
    assert (status, err) == (0, "")
    assert out.splitlines()[1:3] == [
        "rows   py38-tensorflow, py37-tensorflow1, py38-mxnet, py38-theano",
        "none   jax, torch: python_requires = >=3.6,<3.9 in setup.cfg",
    ]
    for name, row in rows(project).items():
        python, _, extra = name.partition("-")
        assert row["deps"] == ["{[testenv]deps}"] + pins.pins(extra, (3, int(python[3:]))), name
        assert row["set_env"][1] == "KERAS_BACKEND = " + extra.rstrip("1")


def test_all_rows_of_a_project_without_limits(project):
    (project / "setup.cfg").unlink()
    status, out, _ = tox(project, "--all")
    assert status == 0
    assert out.splitlines()[1] == "python any: no limit in pyproject.toml, setup.cfg, setup.py"
    expected = {
        "py{}{}-{}".format(*python + (extra,))
        for extra, pythons in pip_extras.TESTED.items()
        for python in pythons
    }
    assert set(rows(project)) == expected - {"py36-cntk"}
    assert "TF_USE_LEGACY_KERAS = 1" in rows(project)["py311-tf_keras"]["set_env"]


def test_all_pythons_of_some_backends(project):
    assert tox(project, "--all", "--backends", "theano, mxnet16,mxnet")[0] == 0
    assert list(rows(project)) == [
        "py36-theano", "py37-theano", "py38-theano", "py36-mxnet16", "py37-mxnet", "py38-mxnet"
    ]  # fmt: skip


def test_rows_with_other_versions_of_keras(project):
    (project / "setup.cfg").unlink()
    assert (
        tox(project, "--ci", "--keras", "3.8,2.2.4,2.18", "--backends", "torch,tf_keras,theano")[0]
        == 0
    )
    names = {"torch": "py311-torch-keras380", "tf_keras": "py311-tf_keras-keras2180"}
    names["theano"] = "py36-theano-keras224"
    assert set(rows(project)) == set(names.values())
    for extra, name in names.items():
        pair = pins.tested_pair(extra, {"torch": "3.8", "theano": "2.2.4"}.get(extra, "2.18"))
        row = rows(project)[name]
        assert row["deps"] == ["{[testenv]deps}"] + pair.requirements
        assert ("TF_USE_LEGACY_KERAS = 1" in row["set_env"]) == (extra == "tf_keras")
    workflow = (project / ".github" / "workflows" / "compat.yml").read_text()
    assert "\n  py311-torch-keras380:\n" in workflow


def test_the_first_extra_that_a_project_allows(project):
    (project / "setup.cfg").write_text("[options]\npython_requires = ==3.7.*\n")
    assert tox(project)[0] == 0
    chosen = ["py37-tensorflow23", "py37-tensorflow1", "py37-mxnet", "py37-theano"]
    assert list(rows(project)) == chosen


THERE = "compat tox: {} in {}: there already, so nothing was written. Move what is there.\n"


def test_only_files_that_it_wrote_are_replaced(project):
    assert tox(project, "--ci")[0] == 0
    assert tox(project, "--ci", "--backends=theano,mxnet")[0] == 0
    assert list(rows(project)) == ["py38-theano", "py38-mxnet"]
    (project / "tox.ini").write_text("[pytest]\n")  # from now on it is the project's
    assert tox(project)[0] == 0
    changed = ["compat-tox/tox.ini", ".github/workflows/compat.yml"]
    texts = [(project / name).read_text().partition("\n")[2] for name in changed]
    for name, text in zip(changed, texts):
        (project / name).write_text(text)
    told = THERE.format(" and ".join(changed), project)
    assert refused("tox", "-o", project, "--ci", "--all") == told
    assert [(project / name).read_text() for name in changed] == texts


@pytest.mark.parametrize(
    "name, text",
    [
        ("tox.ini", "[pytest]\naddopts = -x\n"),
        ("setup.cfg", "[options]\npython_requires = >=3.6,<3.9\n[tox:tox]\nenv_list = py38\n"),
        ("pyproject.toml", '[tool.tox]\nenv_list = ["py38"]\n'),
        ("pyproject.toml", "[tool.tox.env_run_base]\nskip_install = true\n"),
        ("tox.toml", 'env_list = ["py38"]\n'),
        ("toxfile.py", "import tox\n"),
    ],
)
def test_a_configuration_of_tox_that_is_there_stays_in_force(project, name, text):
    """A tox.ini would come before it, and what is in there would be gone."""
    (project / name).write_text(text)
    before = sorted(os.listdir(str(project)))
    (project / "vendor").mkdir()
    options = ["--backends=theano,tensorflow1", "--ci", "--compat", str(project / "vendor")]
    status, out, err = tox(project, *options)
    assert (status, err) == (0, "")
    assert out == (
        "wrote  compat-tox/tox.ini, compat-tox/toxfile.py, .github/workflows/compat.yml\n"
        "kept   the project's own configuration of tox, in {}\n"
        "rows   py38-theano, py37-tensorflow1\n"
        "next   pip install tox tox-uv && tox run -c compat-tox\n".format(name)
    )
    assert (project / name).read_text() == text
    assert sorted(os.listdir(str(project))) == sorted(before + ["vendor", ".github", "compat-tox"])
    written = (project / "compat-tox" / "tox.ini").read_text()
    assert "#     tox run -c compat-tox -e py38-theano\n" in written
    assert "    {tox_root}/../vendor\n    pytest\n" in written
    assert "    PYTHONPATH = {tox_root}/..\n" in written
    assert "change_dir = {tox_root}/..\ncommands = pytest {posargs}\n" in written
    text = (project / ".github" / "workflows" / "compat.yml").read_text()
    assert "      - run: tox run -c compat-tox -e py38-theano\n" in text


def test_a_link_stays_and_what_is_no_file_is_not_written_to(project):
    (project / "tox.ini").write_text("[pytest]\n")
    assert tox(project)[0] == 0
    aside = project / "compat-tox"
    (aside / "tox.ini").rename(project / "linked.ini")
    (aside / "tox.ini").symlink_to(project / "linked.ini")
    assert tox(project, "--backends=theano")[0] == 0
    assert (aside / "tox.ini").is_symlink()
    assert "env_list =\n    py38-theano\n" in (project / "linked.ini").read_text()
    (aside / "toxfile.py").unlink()
    os.mkfifo(str(aside / "toxfile.py"))
    assert refused("tox", "-o", project) == THERE.format("compat-tox/toxfile.py", project)


def test_nothing_is_written_where_one_file_cannot_be(tmp_path):
    (tmp_path / "folder").write_text("no folder")
    text = (
        "the files cannot be written, so none was: {}. Make {} writable, or name another folder "
        "with -o."
    )
    kind, write = errors.ConfigurationFileError, tox_command.write
    problem = "[Errno 17] File exists: {!r}".format(str(tmp_path / "folder"))
    told = refusal(kind, write, str(tmp_path), {"a": "1", os.path.join("folder", "b"): "2"})
    assert told == text.format(problem, tmp_path)
    assert os.listdir(str(tmp_path)) == ["folder"]


def test_a_package_in_src_and_compat_in_the_project(project):
    (project / "src").mkdir()
    (project / "vendor" / "compat").mkdir(parents=True)
    path = str(project / "vendor" / "compat")
    assert tox(project, "--backends=theano,tensorflow1", "--ci", "--compat", path)[0] == 0
    text = (project / "tox.ini").read_text()
    assert "    {tox_root}/vendor/compat\n    pytest\n" in text
    assert "    PYTHONPATH = {tox_root}/src\n" in text
    text = (project / ".github" / "workflows" / "compat.yml").read_text()
    assert '          "./vendor/compat"\n' in text
    assert '      - run: PYTHONPATH="$PWD/src" python -m pytest\n' in text


def test_compat_from_elsewhere(project, tmp_path):
    assert tox(project, "--compat", str(tmp_path / "project" / ".."))[0] == 0
    assert "deps =\n    {}\n    pytest\n".format(tmp_path) in (project / "tox.ini").read_text()
    assert tox(project, "--compat=keras-gpu-compat @ git+https://x.org/y")[0] == 0
    written = (project / "tox.ini").read_text()
    assert "deps =\n    keras-gpu-compat @ git+https://x.org/y\n    pytest\n" in written


@pytest.mark.parametrize(
    "requirement, in_tox_ini, in_workflow",
    [
        ('keras-gpu-compat[x] ; python_version < "4"',) * 2
        + (r"keras-gpu-compat[x] ; python_version < \"4\"",),
        (
            "https://x.org/$HOME/`id`.whl#sha256=0",
            r"https://x.org/$HOME/`id`.whl\#sha256=0",
            r"https://x.org/\$HOME/\`id\`.whl#sha256=0",
        ),
    ],
)
def test_a_requirement_reaches_pip_as_it_is(project, requirement, in_tox_ini, in_workflow):
    assert tox(project, "--backends=tensorflow1", "--ci", "--compat", requirement)[0] == 0
    assert "deps =\n    {}\n    pytest\n".format(in_tox_ini) in (project / "tox.ini").read_text()
    written = (project / ".github" / "workflows" / "compat.yml").read_text()
    (line,) = re.findall(r"install\n +(.*)\n", written)
    assert line == '"{}"'.format(in_workflow)
    shown = subprocess.check_output(["sh", "-c", "printf %s " + line])
    assert shown.decode() == requirement


NO_REQUIREMENT = (
    "--compat {}: there is no such file or folder. Give the path of a checkout or of a wheel, or a "
    "requirement that pip understands."
)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            ["--backends", "cntk"],
            "--backends cntk: no row can be generated for it, since it needs libraries of OpenMPI, "
            "which no Python package has. `compat pins cntk --python 3.6` prints its requirements, "
            "and `compat env` the command that installs the libraries.",
        ),
        (["--backends", ""], "there are no pins for ''. Use one of {}.".format(NAMES)),
        (
            ["--backends", "theano,jax"],
            "--backends jax: it is tested on Python 3.11, which python_requires = >=3.6,<3.9 in "
            "setup.cfg does not allow.",
        ),
        (
            ["--backends", "theano", "--keras", "2.2.4,3.8"],
            "--keras 3.8: it is not tested with theano on a Python that the project allows. "
            "`compat pins theano --keras 3.8` says what is.",
        ),
        (["--compat", "/no/such"], NO_REQUIREMENT.format("/no/such")),
        (["--compat", "py37: keras-gpu-compat"], NO_REQUIREMENT.format("py37: keras-gpu-compat")),
        (["--compat=-rother.txt"], NO_REQUIREMENT.format("-rother.txt")),
        (["--compat", ""], NO_REQUIREMENT.format("")),
        (
            ["--ci", "--compat", ROOT],
            "--ci with --compat {}: a path outside of the project, which CI does not have. Give a "
            "requirement that pip finds there, or a path within the project.".format(ROOT),
        ),
        (["-o", "/no/such"], "-o /no/such: there is no such folder. Give the one of your project."),
    ],
)
def test_what_cannot_be_generated(project, arguments, text):
    before = sorted(os.listdir(str(project)))
    assert refused("tox", "-o", project, *arguments) == "compat tox: {}\n".format(text)
    assert sorted(os.listdir(str(project))) == before


def test_help():
    assert (
        "Write a tox.ini, and the toxfile.py that it needs, which run the tests of the project in "
        "this folder\non each backend, on simulated devices: a row for each backend and Python, of "
        "those that\nkeras-gpu-compat is tested with and the project's python_requires allows. "
        "Where the project has a\ntox configuration of its own, they are written to a folder of "
        "their own, compat-tox, and that\nconfiguration stays in force. No file is "
        "overwritten but those that this command has written.\n\nexit status: 0, or 2 where "
        "nothing was written."
    ) in here("tox", "--help")[1]


# python_requires ------------------------------------------------------------------------------

PYPROJECT = (
    '[project]\nname = "p"\nrequires-python = ">=3.7"  # so\n\n[tool.x]\nrequires-python = 1\n'
)
POETRY = '[tool.poetry]\nname = "p"\n\n[tool.poetry.dependencies]\npython = {}\nkeras = "*"\n'


@pytest.mark.parametrize(
    "files, source, text",
    [
        ({}, None, None),
        ({"pyproject.toml": PYPROJECT}, "pyproject.toml", ">=3.7"),
        ({"pyproject.toml": '[tool.x]\nrequires-python = ">=3.7"\n'}, None, None),
        ({"pyproject.toml": "[build-system]\n", "setup.py": "setup()"}, None, None),
        ({"pyproject.toml": POETRY.format('">=3.6,<3.9"')}, "pyproject.toml", ">=3.6,<3.9"),
        (
            {"setup.cfg": "[options]\npython_requires = >=3.6,\n    <4\n"},
            "setup.cfg",
            ">=3.6,\n    <4",
        ),
        ({"setup.cfg": "[options]\npython_requires: >=3.6\n  # or\n"}, "setup.cfg", ">=3.6"),
        ({"setup.cfg": "[options]\npython_requires =\nzip_safe = no\n"}, None, None),
        ({"setup.cfg": "[metadata]\nname = 100%\npython_requires = 3\n"}, None, None),
        ({"setup.py": "setup(\n    python_requires='>=2.7, <4',\n)"}, "setup.py", ">=2.7, <4"),
        ({"setup.py": "# python_requires='>=2.7'\nsetup()"}, None, None),
        (
            {"setup.cfg": "[options]\npython_requires = >=3.6\n", "pyproject.toml": PYPROJECT},
            "pyproject.toml",
            ">=3.7",
        ),
    ],
)
def test_python_requires(tmp_path, files, source, text):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    expected = None if text is None else SpecifierSet(text)
    assert python_requires.python_requires(str(tmp_path)) == (source, text, expected)


NO_PYTHON = (
    "compat tox: python_requires = >=3.14 in setup.cfg allows no Python that a backend is tested "
    "on: none of 3.6, 3.7, 3.8, 3.11, 3.13.\n"
)


def test_python_requires_that_no_row_has(project):
    (project / "setup.cfg").write_text("[options]\npython_requires = >=3.14\n")
    assert refused("tox", "-o", project) == NO_PYTHON


def test_python_requires_beside_text_in_another_encoding(tmp_path):
    (tmp_path / "setup.py").write_bytes(b"setup(author='Ren\xe9', python_requires='>=3.6')")
    assert python_requires.python_requires(str(tmp_path)).text == ">=3.6"


@pytest.mark.parametrize(
    "name, content",
    [
        ("setup.py", "setup(python_requires=PYTHON)"),
        ("setup.cfg", "[options]\npython_requires = ^3.6\n"),
        ("pyproject.toml", POETRY.format('"~2.7 || ^3.6"')),
        ("pyproject.toml", POETRY.format('{ version = "^3.7", optional = false }')),
    ],
)
def test_python_requires_that_is_not_read(project, name, content):
    (project / "setup.cfg").unlink()
    (project / name).write_text(content)
    status, out, err = tox(project)
    assert status == 0
    assert out.splitlines()[1] == (
        "rows   py311-tensorflow, py37-tensorflow1, py311-jax, py311-torch, py38-mxnet, py38-theano"
    )
    assert err == (
        "compat tox: python_requires in {} was not read, as it is computed or no version specifier "
        "such as '>=3.6,<3.9': rows are chosen as if it allowed every Python.\n".format(name)
    )


def test_without_packaging(project):
    assert command("tox", "-o", str(project)) == (
        2,
        "",
        "compat tox: python_requires is read with the library packaging, which cannot be imported "
        "here (No module named 'packaging'). Install it: pip install packaging\n",
    )
