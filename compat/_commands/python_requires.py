"""Which Pythons a project allows: its ``python_requires``, wherever it is written."""

import configparser
import os
import re
from typing import Optional, Tuple

from .. import errors
from .._configuration import verified
from . import specifiers

# A specifier is held against the last release of a Python, as that is what is installed.
_LAST = 99


FILES = "pyproject.toml", "setup.cfg", "setup.py"


def read(folder: str) -> Tuple[str, Optional[str]]:
    """The specifier, as written, and the name of the file that has it, as setuptools prefers them.

    Returns:
        ("", None) where the project sets no limit; ("", a file) where that computes it.
    """
    for name, found in zip(FILES, (_of_pyproject, _of_setup_cfg, _of_setup_py)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            # Names of authors may be in another encoding; what is looked for is in ASCII.
            with open(path, encoding="utf-8", errors="replace") as file:
                specifier = found(file.read(), path)
            if specifier is not None:
                return specifier, name
    return "", None


def _of_pyproject(text, path):
    """From [project], or from Poetry's tables; Python 3.6 has no parser of TOML."""
    tables = [("project", "requires-python"), (r"tool\.poetry\.dependencies", "python")]
    tables.append((r"tool\.poetry\.dependencies\.python", "version"))
    found = (_in_table(text, *each) for each in tables)
    return next((value for value in found if value is not None), None)


def _in_table(text, name, key):
    """The text of a key in a table, or None."""
    head = rf"^\[{name}\][^\n]*\n(.*?)(?=^\[|\Z)"
    table = re.search(head, text, re.MULTILINE | re.DOTALL)
    line = rf"^{key}\s*=\s*(?:\{{.*?\bversion\s*=\s*)?(['\"])(.*?)\1"
    value = table and re.search(line, table.group(1), re.MULTILINE)
    return value and value.group(2)


# Poetry's own: "^3.8" is >=3.8,<4, "~3.8" is >=3.8,<3.9, and "3.8.*" is ==3.8.*.
_POETRYS = re.compile(r"([\^~]?)((\d+)(?:\.(\d+))?(?:\.\d+)*)(?:\.\*)?")


def _of_poetry(clause):
    """A clause of Poetry's as others write it; all else as it is."""
    match = _POETRYS.fullmatch(clause)
    if match is None:
        return "" if clause == "*" else clause
    sign, release, major, minor = match.groups()
    if not sign:
        return f"=={release}.*"
    of_minor = sign == "~" and minor
    until = f"{major}.{int(minor) + 1}" if of_minor else int(major) + 1
    return f">={release},<{until}"


def _alternatives(specifier):
    """The specifiers of which a Python has to satisfy one: Poetry separates them by ``||``."""
    joined = re.sub(r"([=<>~^!])\s+", r"\1", specifier)
    for alternative in re.split(r"\|\|?", joined):
        yield ",".join(map(_of_poetry, re.split(r"[,\s]+", alternative.strip())))


def _of_setup_cfg(text, path):
    setup = configparser.ConfigParser(interpolation=None)
    try:
        setup.read_string(text, path)
    except configparser.Error as error:
        told = " ".join(str(error).split())
        raise errors.ConfigurationFileError(f"{path} cannot be read: {told}") from None
    return setup.get("options", "python_requires", fallback="") or None


def _of_setup_py(text, path):
    value = re.search(r"^[^#\n]*\bpython_requires\s*=\s*(?:(['\"])(.*?)\1)?", text, re.MULTILINE)
    return value and (value.group(2) or "")


def allows(specifier: str, python: "verified.Python", name: Optional[str]) -> bool:
    """Whether a project runs on a Python.

    Arguments:
        name: of the file that has the specifier.

    Raises:
        ConfigurationFileError: the specifier is not understood.
    """
    alternatives = _alternatives(specifier) if name == FILES[0] else [specifier]
    try:  # each of them is read
        return any([specifiers.allow(each, python + (_LAST,)) for each in alternatives])
    except ValueError as error:
        raise errors.ConfigurationFileError(
            f"{name}: {str(error)!r} in {specifier!r} is no version specifier for Python. Write "
            "it as in '>=3.6,<3.9'."
        ) from None
