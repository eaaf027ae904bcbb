"""\
Write a tox.ini, and the toxfile.py that it needs, which run the tests of the project in this folder
on each backend, on simulated devices: a row for each backend and Python, of those that
keras-gpu-compat is tested with and the project's python_requires allows. Where the project has a
tox configuration of its own, they are written to a folder of their own, compat-tox, and that
configuration stays in force. No file is overwritten but those that this command has written.

exit status: 0, or 2 where nothing was written."""

# ``compat tox``: a project's tests on each backend, as a tox.ini and a workflow of its own.

import argparse
import contextlib
import json
import os
import pathlib
import re
import sys
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from .. import __version__, errors
from .._configuration import pip_extras, tested_versions
from .._runtime import safe_files
from . import pins
from .python_requires import PROJECT_FILES, PythonRequires, python_requires, text_of

COMPAT = pins.DISTRIBUTION
LEFT_OUT = ("cntk",)  # needs libraries of OpenMPI, which no package of Python's has
# What is written beside a project's own configuration of tox, which a tox.ini would replace.
ASIDE = "compat-tox"


class Row(NamedTuple):
    """A row of the matrix.

    Attributes:
        extra: the extra that brings the backend.
        python: the first two numbers of the version of Python.
        pair: the versions of the framework and of Keras; None: those of the extra.
    """

    extra: str
    python: Tuple[int, int]
    pair: Optional[tested_versions.Pair] = None

    @property
    def name(self) -> str:
        """The name of its environment: py311-torch, or py311-torch-keras380."""
        keras = "-keras" + self.pair.versions[1].replace(".", "") if self.pair else ""
        return "py{}{}-{}{}".format(*self.python, self.extra, keras)

    def requirements(self) -> List[str]:
        """Return what it installs."""
        return self.pair.requirements if self.pair else pins.pins(self.extra, self.python)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compat tox``."""
    text = "such as theano,tensorflow1: names of `compat pins` (default: each backend once)"
    parser.add_argument("--backends", type=_names, metavar="NAMES", help=text)
    text = "a row for every tested pair, not only for the newest Python of each backend"
    parser.add_argument("--all", action="store_true", dest="every", help=text)
    text = "such as 2.2.4,3.8: rows for these versions of Keras, each with the newest framework "
    text += "that is tested with it (default: the versions of `compat pins`)"
    parser.add_argument("--keras", type=_names, metavar="VERSIONS", help=text)
    parser.add_argument("--ci", action="store_true", help="also .github/workflows/compat.yml")
    text = "the project's (default: this)"
    parser.add_argument("-o", dest="folder", default=".", metavar="FOLDER", help=text)
    text = "what installs keras-gpu-compat: a requirement, or a path of a checkout or a wheel "
    text += "(default: %(default)s)"
    parser.add_argument("--compat", default=COMPAT, metavar="REQUIREMENT", help=text)


def _names(text):
    return text.replace(" ", "").split(",")


def execute(arguments: argparse.Namespace) -> int:
    """Write the files that the options request, and return the exit status."""
    folder = arguments.folder
    if not os.path.isdir(folder):
        raise errors.InvalidArgumentError(
            f"-o {folder}: there is no such folder. Give the one of your project."
        )
    allowed = python_requires(folder)
    if allowed.source and allowed.specifiers is None:
        print(
            f"compat tox: python_requires in {allowed.source} was not read, as it is computed or "
            "no version specifier such as '>=3.6,<3.9': rows are chosen as if it allowed every "
            "Python.",
            file=sys.stderr,
        )
    chosen = rows(arguments.backends, arguments.every, allowed)
    if arguments.keras:
        chosen = rows_with_keras(chosen, arguments.keras, allowed)
    compat = _requirement(arguments.compat, folder, arguments.ci)
    path = "src" if os.path.isdir(os.path.join(folder, "src")) else ""
    existing = _existing_configuration(folder)
    aside = ASIDE if existing else ""
    files = {os.path.join(aside, "tox.ini"): tox_ini(chosen, compat, path, aside)}
    files[os.path.join(aside, "toxfile.py")] = _beside("toxfile.py")
    if arguments.ci:
        files[".github/workflows/compat.yml"] = workflow(chosen, compat, path, aside)
    write(folder, files)
    print("wrote  {}".format(", ".join(files)))
    if existing:
        print(f"kept   the project's own configuration of tox, in {existing}")
    if allowed.source is None:
        print("python any: no limit in {}".format(", ".join(PROJECT_FILES)))
    print("rows   {}".format(", ".join((row.name for row in chosen))))
    backends = LEFT_OUT + tuple(pip_extras.BACKENDS[row.extra] for row in chosen)
    missing = ", ".join(name for name in pip_extras.EXTRAS if name not in backends)
    if arguments.backends is None and missing:
        print(f"none   {missing}: {allowed}")
    print(f"next   pip install tox tox-uv && {_run_command(aside)}")
    return 0


# The files that tox reads, in its order; and its sections in files that have others, too.
_CONFIGURATIONS = "tox.ini", "setup.cfg", "pyproject.toml", "tox.toml", "toxfile.py"
_SECTIONS = {"setup.cfg": r"^\[tox:tox\]", "pyproject.toml": r"^\[tool\.tox[].]"}


def _existing_configuration(folder):
    """Return the file with a configuration of tox that this command did not write, or None."""
    for name in _CONFIGURATIONS:
        if os.path.lexists(os.path.join(folder, name)):
            text = text_of(folder, name)
            is_for_tox = re.search(_SECTIONS.get(name, ""), text, re.MULTILINE)
            if is_for_tox and not _is_ours(text):
                return name
    return None


def _is_ours(text):
    """Return whether this command wrote a file, which says so in its first lines."""
    return "`compat tox` of keras-gpu-compat" in text[:500]


# Rows -----------------------------------------------------------------------------------------


def rows(extras: Optional[List[str]], every: bool, allowed: PythonRequires) -> List[Row]:
    """Return the extras and Pythons to test on.

    Arguments:
        extras: those that were requested; None: of each backend the first that the project allows,
            or, where ``every`` is true, all.
        every: on all Pythons that the project allows, not only on the newest.
        allowed: the Pythons that the project allows.

    Raises:
        InvalidArgumentError: there is no such extra, no row of it can be generated, or the project
            allows no Python that it is tested on.
    """
    rows: List[Row] = []
    requested = [[extra] for extra in dict.fromkeys(map(pins.known, extras or ()))]
    of_each_backend = [extras for name, extras in pip_extras.EXTRAS.items() if name not in LEFT_OUT]
    for alternatives in requested or of_each_backend:
        first = alternatives[0]
        if first in LEFT_OUT:
            raise errors.InvalidArgumentError(
                f"--backends {first}: no row can be generated for it, since it needs libraries of "
                f"OpenMPI, which no Python package has. `compat pins {first} --python "
                f"{pip_extras.spelled(pip_extras.TESTED[first][-1])}` prints its requirements, and "
                "`compat env` the command that installs the libraries."
            )
        options = list(filter(None, (_rows_of(extra, every, allowed) for extra in alternatives)))
        if requested and not options:
            raise errors.InvalidArgumentError(
                f"--backends {first}: it is tested on {pip_extras.tested(first)}, which {allowed} "
                "does not allow."
            )
        rows += sum(options if every else options[:1], [])
    if not rows:
        tested = map(pip_extras.spelled, sorted(set(sum(pip_extras.TESTED.values(), ()))))
        raise errors.InvalidArgumentError(
            f"{allowed} allows no Python that a backend is tested on: none of {', '.join(tested)}."
        )
    return rows


def _rows_of(extra, every, allowed):
    """Return the rows of an extra: that of the newest Python only, unless ``every`` is true."""
    pythons = list(filter(allowed.allows, pip_extras.TESTED[extra]))
    return [Row(extra, python) for python in (pythons if every else pythons[-1:])]


def rows_with_keras(rows: List[Row], versions: List[str], allowed: PythonRequires) -> List[Row]:
    """Return rows of the same backends with these versions of Keras, in place of the pinned ones.

    Arguments:
        rows: those without.
        versions: versions of Keras, or their first numbers.
        allowed: the Pythons that the project allows.

    Raises:
        InvalidArgumentError: a version is not tested with any of the backends.
    """
    extras = list(dict.fromkeys(row.extra for row in rows))
    found = {}
    for version in versions:
        pairs = [_pair(extra, version, allowed) for extra in extras]
        if not any(pairs):
            raise errors.InvalidArgumentError(
                f"--keras {version}: it is not tested with {', '.join(extras)} on a Python that "
                f"the project allows. `compat pins {extras[0]} --keras {version}` says what is."
            )
        for pair in filter(None, pairs):
            row = Row(pair.extra, pair.python, pair)
            found[row.name] = row
    return list(found.values())


def _pair(extra, keras, allowed):
    """Return the newest pair of an extra with a version of Keras, or None."""
    candidates = tested_versions.of_extra(extra)
    return tested_versions.newest((p for p in candidates if allowed.allows(p.python)), keras=keras)


# A distribution, or one with its extras, versions, URL or marker; or a URL.
_REQUIREMENT = re.compile(r"\w[\w.-]*\s*(\[[^][]*\]\s*)?([<>=!~(;@].*)?$|[A-Za-z+]+://.")


def _requirement(compat, folder, ci):
    """Return the requirement on keras-gpu-compat, a path from ``{tox_root}`` or an absolute one."""
    is_path = os.path.exists(compat)
    path = os.path.realpath(compat) if is_path else compat
    if not is_path and not _REQUIREMENT.match(compat):
        raise errors.InvalidArgumentError(
            f"--compat {compat}: there is no such file or folder. Give the path of a checkout or "
            "of a wheel, or a requirement that pip understands."
        )
    root = os.path.realpath(folder)
    if is_path and path.startswith(root + os.sep):
        return "{tox_root}" + path[len(root) :]
    if not is_path or compat == COMPAT:  # or a folder that happens to have the name
        return compat
    if ci:
        raise errors.InvalidArgumentError(
            f"--ci with --compat {compat}: a path outside of the project, which CI does not have. "
            "Give a requirement that pip finds there, or a path within the project."
        )
    return path


# Texts ----------------------------------------------------------------------------------------

IMAGES = ((3, 6), (3, 7))  # that runners no longer have
RUNS_TOX = 3, 13

# Two rows may share the cores.
GENERAL = {"COMPAT_SIMULATE": "3", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _beside(name):
    """Return the text of a file in this folder. Lines of ``%%`` separate templates in a file."""
    return pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")


def tox_ini(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """Return the text of tox.ini.

    Arguments:
        chosen: its rows.
        compat: the requirement that installs keras-gpu-compat.
        path: the folder that the project's package is in, from the project's; "": that itself.
        aside: the folder that it is written to, from the project's; "": that itself.
    """
    head, section = _beside("tox.ini.txt").split("%%\n")
    root = "{tox_root}" + ("/.." if aside else "")
    text = head.format(
        version=__version__,
        tox=_run_command(aside),
        example=chosen[0].name,
        names=_indented((row.name for row in chosen)),
        compat=compat.replace("{tox_root}", root).replace("#", "\\#"),
        path=root + ("/" + path if path else ""),
        general=_indented(map(" = ".join, GENERAL.items())),
        change_dir=f"change_dir = {root}\n" if aside else "",
    )
    for row in chosen:
        variables = _indented(map(" = ".join, _variables(row).items()))
        needed = _indented(row.requirements())
        text += section.format(name=row.name, pins=needed, variables=variables)
    return text


def workflow(chosen: List[Row], compat: str, path: str, aside: str) -> str:
    """Return the text of a workflow for GitHub's CI, with a job for each row.

    The arguments are those of ``tox_ini()``.
    """
    head, job, container = _beside("compat.yml.txt").split("%%\n")
    text = head.format(version=__version__)
    for row in chosen:
        python = pip_extras.spelled(row.python)
        if row.python in IMAGES:
            needed = [compat.replace("{tox_root}", "."), "pytest"] + row.requirements()
            needed = ['"{}"'.format(re.sub(r'(["$`\\])', r"\\\1", pin)) for pin in needed]
            variables = dict(GENERAL, **_variables(row)).items()
            text += container.format(
                name=row.name,
                python=python,
                variables=_indented((f"{key}: {json.dumps(value)}" for key, value in variables), 6),
                requirements=_indented(needed, 10),
                path="/" + path if path else "",
            )
        else:
            pythons = _indented(dict.fromkeys([python, pip_extras.spelled(RUNS_TOX)]), 12)
            text += job.format(name=row.name, pythons=pythons, tox=_run_command(aside))
    return text


def _indented(lines: Iterable[str], width: int = 4) -> str:
    return "\n".join(" " * width + line for line in lines)


def _run_command(aside):
    return f"tox run -c {aside}" if aside else "tox run"


def _variables(row):
    """Return the environment variables of a row's tests, besides those of all rows."""
    from .._configuration import registry  # for start-up time

    variables = {"KERAS_BACKEND": registry.load(pip_extras.BACKENDS[row.extra]).framework}
    if variables["KERAS_BACKEND"] == "tensorflow":
        variables["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if row.extra == "tf_keras":
        variables["TF_USE_LEGACY_KERAS"] = "1"
    return variables


# Files ----------------------------------------------------------------------------------------


def write(folder: str, files: Dict[str, str]) -> None:
    """Write files, all of them or none.

    Arguments:
        folder: the path.
        files: texts, by the paths from the folder.

    Raises:
        ConfigurationFileError: one exists that this command did not write, or cannot be written.
    """
    existing = [path for path in files if os.path.lexists(os.path.join(folder, path))]
    others = [path for path in existing if not _is_ours(text_of(folder, path))]
    if others:
        raise errors.ConfigurationFileError(
            f"{' and '.join(others)} in {os.path.abspath(folder)}: there already, so nothing was "
            "written. Move what is there."
        )
    try:
        with contextlib.ExitStack() as all_or_none:
            for path, text in files.items():
                target = pathlib.Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                file = all_or_none.enter_context(safe_files.written(str(target)))
                file.write(text.encode("utf-8"))
                file.flush()  # an error, where the disk is full
    except OSError as error:
        raise errors.ConfigurationFileError(
            f"the files cannot be written, so none was: {error}. Make {os.path.abspath(folder)} "
            "writable, or name another folder with -o."
        ) from None
