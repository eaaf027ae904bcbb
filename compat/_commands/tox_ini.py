"""\
Write a tox.ini, and the toxfile.py that it needs, which run the tests of the project in this folder
on each backend, on simulated devices: a row for each backend and Python, of those that
keras-gpu-compat is tested with and the project's python_requires allows. Where the project has a
tox configuration of its own, they are written to a folder of their own, compat-tox, and that
configuration stays in force. No file is overwritten; with --force, those that differ are kept as
tox.ini.before-compat and so on.

exit status: 0, or 2 where nothing was written."""

# ``compat tox``: a project's tests on each backend, as a tox.ini and a workflow of its own.

import argparse
import contextlib
import itertools
import os
import re
import sys
from typing import Dict, List

from .. import errors
from .._configuration import verified
from .._runtime import safe_files
from . import parser as command_parser
from . import pins, python_requires, tox_texts

COMPAT = pins.DISTRIBUTION
LEFT_OUT = ("cntk",)  # needs libraries of OpenMPI, which no package of Python's has
# What is written beside a project's own configuration of tox, which a tox.ini would replace.
ASIDE = "compat-tox"


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Add the command to those of ``compat``."""
    told = "write a tox.ini that runs your tests on each backend"
    parser = command_parser(commands, "tox", _run, told, __doc__)
    told = "such as theano,tensorflow1: names of `compat pins` (default: each backend once)"
    parser.add_argument("--backends", type=_names, metavar="NAMES", help=told)
    told = "a row for every tested pair, not only for the newest Python of each backend"
    parser.add_argument("--all", action="store_true", dest="every", help=told)
    parser.add_argument("--ci", action="store_true", help="also .github/workflows/compat.yml")
    told = "the project's (default: this)"
    parser.add_argument("-o", dest="folder", default=".", metavar="FOLDER", help=told)
    told = "what installs keras-gpu-compat: a requirement, or a path of a checkout or a wheel "
    told += "(default: %(default)s)"
    parser.add_argument("--compat", default=COMPAT, metavar="REQUIREMENT", help=told)
    told = "replace files that are there, which are kept beside"
    parser.add_argument("--force", action="store_true", help=told)


def _names(text):
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no backend")
    return names


def _run(arguments):
    folder = arguments.folder
    if not os.path.isdir(folder):
        raise errors.InvalidArgumentError(
            f"-o {folder}: there is no such folder. Give the one of your project."
        )
    specifier, source = python_requires.read(folder)
    if source and not specifier:
        print(
            f"compat tox: python_requires in {source} is computed there and was not read: rows "
            "are chosen as if it allowed every Python.",
            file=sys.stderr,
        )
    chosen = rows(arguments.backends, arguments.every, specifier, source)
    compat = _requirement(arguments.compat, folder, arguments.ci)
    path = "src" if os.path.isdir(os.path.join(folder, "src")) else ""
    own = _own_configuration(folder)
    aside = ASIDE if own else ""
    texts = chosen, compat, path, aside
    files = {os.path.join(aside, "tox.ini"): tox_texts.tox_ini(*texts)}
    files[os.path.join(aside, "toxfile.py")] = tox_texts.beside("toxfile.py")
    if arguments.ci:
        files[os.path.join(".github", "workflows", "compat.yml")] = tox_texts.workflow(*texts)
    kept = write(folder, files, arguments.force)
    print("wrote  {}".format(", ".join(files)))
    if kept:
        print("kept   what was there, as {}".format(", ".join(kept)))
    if own:
        print(f"kept   the project's own configuration of tox, in {own}")
    if source is None:
        print("python any: no limit in {}".format(", ".join(python_requires.FILES)))
    print("rows   {}".format(", ".join(map(tox_texts.name, chosen))))
    there = LEFT_OUT + tuple(verified.backend(extra) for extra, _ in chosen)
    missing = ", ".join(each for each in verified.ROWS if each not in there)
    if arguments.backends is None and missing:
        print(f"none   {missing}: python_requires = {specifier} in {source}")
    print(f"next   pip install tox tox-uv && {tox_texts.run_command(aside)}")
    return 0


def _own_configuration(folder):
    """The file with a configuration of tox that is not written by this command, or None."""
    for name, configures in _CONFIGURATIONS.items():
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            if re.search(configures, text, re.MULTILINE) and "`compat tox` of" not in text[:500]:
                return name
        elif os.path.lexists(path) and not configures:
            return name
    return None


# What tox reads, in its order, and what in there is for tox.
_CONFIGURATIONS = {
    "tox.ini": "",
    "setup.cfg": r"^\[tox:tox\]",
    "pyproject.toml": r"^\[tool\.tox[].]",
    "tox.toml": "",
    "toxfile.py": "",
}


def rows(extras, every, specifier="", source=None) -> List[tox_texts.Row]:
    """The extras and Pythons to test on.

    Arguments:
        extras: those that were asked for; None: of each backend the first that the project allows,
            or, where ``every`` is true, all.
        every: on all Pythons that the project allows, not only on the newest.
        specifier, source: the project's ``python_requires``, and the file that has it.

    Raises:
        InvalidArgumentError: there is no such extra, no row of it can be generated, or the project
            allows no Python that it is tested on.
    """
    found: List[tox_texts.Row] = []
    if extras is None:
        for brought in (verified.ROWS[name] for name in verified.ROWS if name not in LEFT_OUT):
            options = [_allowed(extra, every, specifier, source) for extra in brought]
            options = [option for option in options if option]
            found += sum(options if every else options[:1], [])
        if not found:
            tested = map(verified.spelled, sorted(set(sum(verified.PYTHONS.values(), ()))))
            raise errors.InvalidArgumentError(
                f"python_requires = {specifier} in {source} allows no Python that a backend is "
                f"tested on: none of {', '.join(tested)}."
            )
        return found
    for extra in dict.fromkeys(map(pins.known, extras)):
        if extra in LEFT_OUT:
            raise errors.InvalidArgumentError(
                f"--backends {extra}: no row can be generated for it, since it needs libraries of "
                f"OpenMPI, which no Python package has. `compat pins {extra} --python "
                f"{verified.spelled(verified.PYTHONS[extra][-1])}` prints its requirements, and "
                "`compat env` the command that installs the libraries."
            )
        pairs = _allowed(extra, every, specifier, source)
        if not pairs:
            raise errors.InvalidArgumentError(
                f"--backends {extra}: it is tested on {verified.phrase(extra)}, which "
                f"python_requires = {specifier} in {source} does not allow."
            )
        found += pairs
    return found


def _allowed(extra, every, specifier, source):
    """The rows of an extra, the newest Python's only unless every one is asked for."""
    pythons = verified.PYTHONS[extra]
    allowed = [each for each in pythons if python_requires.allows(specifier, each, source)]
    return [(extra, python) for python in (allowed if every else allowed[-1:])]


# A distribution, or one with its extras, versions, URL or marker; or a URL.
_REQUIREMENT = re.compile(r"\w[\w.-]*\s*(\[[^][]*\]\s*)?([<>=!~(;@].*)?$|[A-Za-z+]+://.")


def _requirement(compat, folder, ci):
    """What installs keras-gpu-compat, a path as ``{tox_root}`` or an absolute one."""
    path = os.path.realpath(compat) if os.path.exists(compat) else compat
    if not compat.isprintable() or re.search(r"[{}]|\s#|\\$", path):
        raise errors.InvalidArgumentError(
            f"--compat {compat!r} cannot be written to tox.ini, where braces, ' #', a backslash "
            "at the end and what cannot be printed have meanings of their own. Rename what the "
            "path names, or give another requirement."
        )
    if not os.path.exists(compat):
        if not _REQUIREMENT.match(compat):
            raise errors.InvalidArgumentError(
                f"--compat {compat}: there is no such file or folder. Give the path of a checkout "
                "or of a wheel, or a requirement that pip understands."
            )
        return compat
    root = os.path.realpath(folder)
    if path.startswith(root + os.sep):
        return "{tox_root}" + path[len(root) :]
    if compat == COMPAT and os.sep not in compat:
        return compat  # a folder that happens to have the name
    if ci:
        raise errors.InvalidArgumentError(
            f"--ci with --compat {compat}: a path outside of the project, which CI does not have. "
            "Give a requirement that pip finds there, or a path within the project."
        )
    return path


def write(folder: str, files: Dict[str, str], force: bool = False) -> List[str]:
    """Write files, all of them or none.

    Arguments:
        files: texts, by the paths from the folder.
        force: replace those that are there.

    Returns:
        The paths of new files, with what was there and is another text.

    Raises:
        ConfigurationFileError: one is there already, or cannot be written.
    """
    there = [path for path in files if os.path.lexists(os.path.join(folder, path))]
    if there and not force:
        raise errors.ConfigurationFileError(
            f"{' and '.join(there)} in {os.path.abspath(folder)}: there already, so nothing was "
            "written. Move what is there, or overwrite it with --force."
        )
    kept = []
    try:
        with contextlib.ExitStack() as all_or_none:

            def fill(path, content, like=None):
                target = os.path.join(folder, path)
                file = all_or_none.enter_context(safe_files.written(target, like))
                file.write(content)
                file.flush()  # an error, where the disk is full

            for path, text in files.items():
                target, content = os.path.join(folder, path), text.encode("utf-8")
                os.makedirs(os.path.dirname(target), exist_ok=True)
                fill(path, content)
                if os.path.isfile(target):
                    with open(target, "rb") as there_already:
                        old = there_already.read()
                    if old != content:
                        kept.append(_unused(folder, path + ".before-compat"))
                        fill(kept[-1], old, os.stat(target))  # in place before the new one is
        return kept
    except OSError as error:
        raise errors.ConfigurationFileError(
            f"the files cannot be written, so none was: {error}. Make {os.path.abspath(folder)} "
            "writable, or name another folder with -o."
        ) from None


def _unused(folder, path):
    """The path, with a number at its end where it is taken."""
    paths = itertools.chain([path], map((path + ".{}").format, itertools.count(2)))
    return next(each for each in paths if not os.path.lexists(os.path.join(folder, each)))
