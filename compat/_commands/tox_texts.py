"""The texts that ``compat tox`` writes: a tox.ini, and a workflow for GitHub's CI."""

import json
import os
import re
from typing import Dict, Iterable, List, Tuple

from .. import __version__
from .._configuration import verified
from . import pins

Row = Tuple[str, Tuple[int, int]]

IMAGES = ((3, 6), (3, 7))  # that runners no longer have
RUNS_TOX = 3, 13

# Two rows may share the cores.
GENERAL = {"COMPAT_SIMULATE": "3", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def beside(name: str) -> str:
    """The text of a file in this folder. In those of templates lines of ``%%`` are between them."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def tox_ini(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """The text of tox.ini.

    Arguments:
        compat: the requirement that installs keras-gpu-compat.
        path: the folder that the project's package is in, from the project's; "": that itself.
        aside: the folder that it is written to, from the project's; "": that itself.
    """
    head, section = beside("tox.ini.txt").split("%%\n")
    root = "{tox_root}" + ("/.." if aside else "")
    text = head.format(
        version=__version__,
        tox=run_command(aside),
        example=name(chosen[0]),
        names=_indented(map(name, chosen)),
        compat=compat.replace("{tox_root}", root).replace("#", "\\#"),
        path=root + ("/" + path if path else ""),
        general=_indented(map(" = ".join, GENERAL.items())),
        change_dir=f"change_dir = {root}\n" if aside else "",
    )
    for row in chosen:
        variables = _indented(map(" = ".join, _variables(row).items()))
        needed = _indented(pins.pins(*row))
        text += section.format(name=name(row), pins=needed, variables=variables)
    return text


def _indented(lines: Iterable[str], width: int = 4) -> str:
    return "\n".join(" " * width + line for line in lines)


def workflow(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """The text of a workflow for GitHub's CI: a job for each row; arguments as ``tox_ini()``."""
    head, job, container = beside("compat.yml.txt").split("%%\n")
    text = head.format(version=__version__)
    for row in chosen:
        python = verified.spelled(row[1])
        if row[1] in IMAGES:
            needed = [compat.replace("{tox_root}", "."), "pytest"] + pins.pins(*row)
            needed = ['"{}"'.format(re.sub(r'(["$`\\])', r"\\\1", each)) for each in needed]
            variables = dict(GENERAL, **_variables(row)).items()
            text += container.format(
                name=name(row),
                python=python,
                variables=_indented((f"{key}: {json.dumps(value)}" for key, value in variables), 6),
                requirements=_indented(needed, 10),
                path="/" + path if path else "",
            )
        else:
            pythons = _indented(dict.fromkeys([python, verified.spelled(RUNS_TOX)]), 12)
            text += job.format(name=name(row), pythons=pythons, tox=run_command(aside))
    return text


def name(row: "Row") -> str:
    extra, (major, minor) = row
    return f"py{major}{minor}-{extra}"


def run_command(aside):
    return f"tox run -c {aside}" if aside else "tox run"


def _variables(row: "Row") -> Dict[str, str]:
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
