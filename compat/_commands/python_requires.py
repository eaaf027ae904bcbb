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
    """The specifier and the name of the file that has it, in setuptools' order of precedence.

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
    """From [project], or from Poetry's table; Python 3.6 has no parser of TOML."""
    found = _in_table(text, r"project", "requires-python")
    if found is None:
        found = _in_table(text, r"tool\.poetry\.dependencies", "python")
        found = ">=3" if found == "*" else found and _CARET_OR_TILDE.sub(_range, found)
    return found


def _in_table(text, name, key):
    """The text of a key in a table, or None."""
    head = r"^\[{}\][^\n]*\n(.*?)(?=^\[|\Z)".format(name)
    table = re.search(head, text, re.MULTILINE | re.DOTALL)
    line = r"^{}\s*=\s*(['\"])(.*?)\1".format(key)
    value = table and re.search(line, table.group(1), re.MULTILINE)
    return value and value.group(2)


# Poetry's own: "^3.8" is >=3.8,<4, and "~3.8" is >=3.8,<3.9.
_CARET_OR_TILDE = re.compile(r"([\^~])\s*(\d+)((?:\.\d+)*)")


def _range(match):
    sign, major, rest = match.groups()
    if sign == "~" and rest:
        until = "{}.{}".format(major, int(rest.split(".")[1]) + 1)
    else:
        until = str(int(major) + 1)
    return ">={}{},<{}".format(major, rest, until)


def _of_setup_cfg(text, path):
    setup = configparser.ConfigParser(interpolation=None)
    try:
        setup.read_string(text, path)
    except configparser.Error as error:
        raise errors.ConfigurationFileError(
            "{} cannot be read: {}".format(path, " ".join(str(error).split()))
        ) from None
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
    try:
        return specifiers.allow(specifier, python + (_LAST,))
    except ValueError as error:
        raise errors.ConfigurationFileError(
            "{}: {!r} in {!r} is no version specifier for Python. Write it as in "
            "'>=3.6,<3.9'.".format(name, str(error), specifier)
        ) from None
