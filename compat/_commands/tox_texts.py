"""The texts that ``compat tox`` writes: a tox.ini, and a workflow for GitHub's CI."""

import json
import re
from typing import Dict, Iterable, List, Tuple

from .. import __version__
from .._configuration import verified
from . import pins

Row = Tuple[str, Tuple[int, int]]

IMAGES = ((3, 6), (3, 7))  # that runners no longer have

# Two rows may share the cores.
GENERAL = {"COMPAT_SIMULATE": "3", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

HEAD = """\
# Written by `compat tox` of keras-gpu-compat {version}: your tests on each backend of Keras, in the
# versions with which keras-gpu-compat is tested. Yours to change.
#
#     pip install tox tox-uv
#     {tox}                          all rows whose Python is installed
#     {tox} -e {example}
#     {tox} -e {example} -- -k dense     a part of the tests
#
# Interpreters are found on the PATH. Where pyenv is installed, all of its interpreters are found,
# whichever is active: toxfile.py sees to that. `pyenv install 3.7` adds one. A row whose Python is
# missing is left out, and the report at the end says SKIP; where CI is set, toxfile.py makes that a
# failure. It also gives each row a HOME of its own, so that nobody's ~/.keras/keras.json or
# ~/.theanorc has a say in the tests.
#
# CNTK has no row: it needs libraries of OpenMPI, which no Python package has.
[tox]
requires =
    tox>=4.57
    # Makes environments for Python 3.6 and 3.7, which virtualenv no longer does.
    tox-uv>=1.20
env_list =
{names}
skip_missing_interpreters = true

[testenv]
# Your package is imported from its folder. Installing it would install what it requires, which may
# not be the versions below: `tensorflow` would come in addition to tensorflow-cpu. List under deps
# what else it needs. If it has to be installed, since it is compiled for example, remove this line
# and look at what tox installs.
skip_install = true
deps =
    {compat}
    pytest
# For pyenv's interpreters, which are asked for their versions.
pass_env = PYENV_*
set_env =
    PYTHONPATH = {path}
    # Makes each configure_gpu() one of three simulated devices, on the CPU.
{general}
{change_dir}commands = pytest {{posargs}}
"""

SECTION = """
[testenv:{name}]
deps =
    {{[testenv]deps}}
{pins}
set_env =
    {{[testenv]set_env}}
{variables}
"""


def tox_ini(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """The text of tox.ini.

    Arguments:
        compat: the requirement that installs keras-gpu-compat.
        path: the folder that the project's package is in, from the project's; "": that itself.
        aside: the folder that it is written to, from the project's; "": that itself.
    """
    root = "{tox_root}" + ("/.." if aside else "")
    text = HEAD.format(
        version=__version__,
        tox=run_command(aside),
        example=name(chosen[0]),
        names=_indented(map(name, chosen)),
        compat=compat.replace("{tox_root}", root).replace("#", "\\#"),
        path=root + ("/" + path if path else ""),
        general=_indented(_assignments(GENERAL)),
        change_dir=f"change_dir = {root}\n" if aside else "",
    )
    for row in chosen:
        text += SECTION.format(
            name=name(row),
            pins=_indented(pins.pins(*row)),
            variables=_indented(_assignments(_variables(row))),
        )
    return text


def _indented(lines: Iterable[str], width: int = 4) -> str:
    return "\n".join(" " * width + line for line in lines)


def _assignments(variables: Dict[str, str], sign: str = " = ") -> List[str]:
    return [f"{key}{sign}{value}" for key, value in variables.items()]


WORKFLOW = """\
# Written by `compat tox --ci` of keras-gpu-compat {version}: the rows of tox.ini, a job for each.
name: compat
on: [push, pull_request]
jobs:
"""

JOB = """\
  {name}:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          # The last one runs tox.
          python-version: |
{pythons}
      - run: python -m pip install tox tox-uv
      - run: {tox} -e {name}
"""

CONTAINER = """\
  # Runners no longer have Python {python}, and tox does not run on it: a container of that Python,
  # with the deps and the variables of the row in tox.ini.
  {name}:
    runs-on: ubuntu-latest
    container: python:{python}
    env:
{variables}
    steps:
      - uses: actions/checkout@v4
      - run: >-
          python -m pip install
{requirements}
      - run: PYTHONPATH="$PWD{path}" python -m pytest
"""

RUNS_TOX = 3, 13


def workflow(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """The text of a workflow for GitHub's CI: a job for each row; arguments as ``tox_ini()``."""
    text = WORKFLOW.format(version=__version__)
    compat = compat.replace("{tox_root}", ".")
    for row in chosen:
        python = row[1]
        if python in IMAGES:
            needed = [compat, "pytest"] + pins.pins(*row)
            needed = ['"{}"'.format(re.sub(r'(["$`\\])', r"\\\1", each)) for each in needed]
            variables = dict(GENERAL, **_variables(row))
            quoted = {key: json.dumps(value) for key, value in variables.items()}
            text += CONTAINER.format(
                name=name(row),
                python=verified.spelled(python),
                variables=_indented(_assignments(quoted, ": "), 6),
                requirements=_indented(needed, 10),
                path="/" + path if path else "",
            )
        else:
            pythons = dict.fromkeys([python, RUNS_TOX])
            spelled = _indented(map(verified.spelled, pythons), 12)
            text += JOB.format(name=name(row), pythons=spelled, tox=run_command(aside))
    return text


def name(row: "Row") -> str:
    extra, python = row
    return f"py{python[0]}{python[1]}-{extra}"


def run_command(aside):
    return f"tox run -c {aside}" if aside else "tox run"


def _variables(row):
    """What the tests of a row find in their environment, besides what all find."""
    from .._configuration import registry  # for start-up time

    extra, _ = row
    framework = registry.load(verified.backend(extra)).framework
    variables = {"KERAS_BACKEND": framework}
    if framework == "tensorflow":
        variables["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if extra == "tf_keras":
        variables["TF_USE_LEGACY_KERAS"] = "1"
    return variables
