"""\
Print the requirements of a backend, with a Keras that runs on it, in the versions with which
keras-gpu-compat is tested on a Python.

exit status: 0, or 2 where a backend is not known or was not tested on that Python."""

# ``compat pins``: the requirements of a backend, as tested on a Python, for files of others.

import argparse
import configparser
import email.parser
import glob
import os
import re
import sys
from typing import Iterator, List, Tuple

from .. import __version__, errors
from .._configuration import packages, spelling, verified
from . import python_requires

DISTRIBUTION = "keras-gpu-compat"
FORMATS = "requirements", "extras", "constraints"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", help="an extra's name: " + ", ".join(verified.PYTHONS))
    told = "for that Python (default: this one)"
    parser.add_argument("--python", type=_python, metavar="3.7", help=told)
    told = "lines for pip (the default), a part of a setup.cfg, or a file for pip's -c"
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=told)


def _python(text):
    match = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version of Python, such as 3.7")
    return int(match.group(1)), int(match.group(2))


def execute(arguments):
    python = arguments.python or sys.version_info[:2]
    print(formatted(arguments.backend, python, arguments.format))
    return 0


def formatted(extra: str, python: Tuple[int, int], form: str) -> str:
    """The pins as one of ``FORMATS``.

    Raises:
        as ``pins()``.
    """
    extra = known(extra)
    lines = pins(extra, python)
    if form == "constraints":
        lines = [line for line in map(_constraint, lines) if line]
    if form == "extras":
        lines = ["[options.extras_require]", extra + " ="] + ["    " + line for line in lines]
    head = "# {} on Python {}: as keras-gpu-compat {} is tested"
    return "\n".join([head.format(extra, verified.spelled(python), __version__)] + lines)


def _constraint(line):
    """A requirement as pip takes it for a constraint; "" where it leaves the version open."""
    line = re.sub(r"\[.*?\]", "", line)
    return line if re.search(r"[<>=!~]", line) else ""


def known(extra: str) -> str:
    """An extra's name as setup.cfg spells it, from a user's, or from the name of a backend.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    for name in verified.PYTHONS:
        if spelling.plain(name) == spelling.plain(extra):
            return name
    if extra in verified.ROWS:
        return next(iter(verified.ROWS[extra]))
    meant = spelling.closest(extra, verified.PYTHONS)
    meant = f" (did you mean {meant}?)" if meant else ""
    names = ", ".join(verified.PYTHONS)
    raise errors.InvalidArgumentError(
        f"there are no pins for {extra!r}{meant}. Use one of {names}."
    )


def pins(extra: str, python: Tuple[int, int]) -> List[str]:
    """The requirements of an extra on a Python, without markers.

    Arguments:
        python: the first two numbers of its version.

    Raises:
        InvalidArgumentError: there is no such extra, or it is not tested on that Python.
        NotInstalledError: this package is a copy without its metadata.
        UnsupportedError: the metadata has a requirement that is not understood.
    """
    extra = known(extra)
    if python not in verified.PYTHONS[extra]:
        asked, newest = map(verified.spelled, (python, verified.PYTHONS[extra][-1]))
        raise errors.InvalidArgumentError(
            f"{extra} is not tested on Python {asked}, so there are no pins for it. It is tested "
            f"on {verified.phrase(extra)}; choose one of these with --python, such as --python "
            f"{newest}."
        )
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    declared = _declared(folder)
    return [_plain(line) for line, marker in declared if _applies(marker, extra, python, line)]


def _declared(folder: str) -> Iterator[Tuple[str, str]]:
    """Requirements and their markers, of the package in this folder and of no other copy.

    ``importlib.metadata``, which Python 3.6 and 3.7 do not have, takes the first on ``sys.path``.
    In a checkout, which may be installed as editable, setup.cfg is newer than what was installed.
    """
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(os.path.join(folder, "setup.cfg"), encoding="utf-8")
    if setup.get("metadata", "name", fallback="") == DISTRIBUTION:
        for extra, lines in setup["options.extras_require"].items():
            for line in filter(None, lines.splitlines()):
                requirement, _, marker = line.partition(";")
                yield requirement, " and ".join(filter(None, [marker, 'extra == "%s"' % extra]))
        return
    stem = DISTRIBUTION.replace("-", "_")
    paths = glob.glob(os.path.join(glob.escape(folder), stem + "-*.dist-info", "METADATA"))
    if not paths:
        raise errors.NotInstalledError(
            f"the pins are in the metadata of keras-gpu-compat, which {folder} does not have. "
            "Install it with pip, not by copying its files."
        )
    with open(paths[0], encoding="utf-8") as file:
        metadata = email.parser.HeaderParser().parse(file)
    for line in metadata.get_all("Requires-Dist", []):
        yield line.partition(";")[::2]


_MARKER = re.compile(r"(python_version|extra)\s*(<=|>=|<|>|==|!=)\s*(['\"])([\w.-]+)\3")


def _applies(marker, extra, python, requirement):
    """Whether a marker, clauses joined by ``and``, is true for an extra on a Python."""
    clauses = re.sub(r"[()]", " ", marker).split(" and ")  # `or` fails below
    matches = [_MARKER.fullmatch(clause.strip()) for clause in clauses if clause.strip()]
    of_extra, on_python = False, True  # without a clause about extras it is the package's own
    for match in matches:
        if match is None or (match.group(1) == "extra" and match.group(2) != "=="):
            raise errors.UnsupportedError(
                f"the marker {marker.strip()!r} of {requirement.strip()!r} is not understood: "
                "`compat pins` reads comparisons of python_version and extra, joined by `and`. "
                "Install this version of keras-gpu-compat anew; if that does not help, please "
                "report it."
            )
        name, comparison, _, value = match.groups()
        if name == "extra":  # which setuptools may have normalised
            of_extra = packages.normalised(value) == extra
        else:
            on_python = on_python and python_requires.allow(comparison + value, python)
    return of_extra and on_python


_REQUIREMENT = re.compile(r"([\w.-]+(?:\[[\w., -]*\])?)\s*\(?([^()@]*)\)?")


def _plain(requirement):
    """A requirement as one writes it: the lower bound first, without spaces and parentheses."""
    match = _REQUIREMENT.fullmatch(requirement.strip())
    if match is None:
        raise errors.UnsupportedError(
            f"the requirement {requirement.strip()!r} in the metadata of keras-gpu-compat is not "
            "understood. Install this version of it anew; if that does not help, please report it."
        )
    clauses = [re.sub(r"\s", "", clause) for clause in match.group(2).split(",")]
    return match.group(1) + ",".join(sorted(clauses, reverse=True))
