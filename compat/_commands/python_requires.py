"""Which Pythons a project allows: its ``python_requires``, wherever it is written.

Version specifiers, ``>=3.6,<3.9``, are those of releases of plain numbers. The library
``packaging`` knows all of them, but need not be installed.
"""

import configparser
import os
import re
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple, Optional, Tuple

from .. import errors

# A specifier is held against the last release of a Python, as that is what is installed.
_LAST = 99


class PythonRequires(NamedTuple):
    """The ``python_requires`` of a project.

    Attributes:
        specifier: as written; "" where the project sets no limit, or computes it.
        source: the name of the file that has it; None where there is none.
    """

    specifier: str = ""
    source: Optional[str] = None

    def __str__(self):
        return f"python_requires = {self.specifier} in {self.source}"

    def allows(self, python: Tuple[int, int]) -> bool:
        """Whether the project runs on a Python.

        Raises:
            ConfigurationFileError: the specifier is not understood.
        """
        is_poetrys = self.source == "pyproject.toml"
        alternatives = _alternatives(self.specifier) if is_poetrys else [self.specifier]
        try:  # each of them is read
            return any([allow(each, python + (_LAST,)) for each in alternatives])
        except ValueError as error:
            raise errors.ConfigurationFileError(
                f"{self.source}: {str(error)!r} in {self.specifier!r} is no version specifier for "
                "Python. Write it as in '>=3.6,<3.9'."
            ) from None


def read(folder: str) -> PythonRequires:
    """The ``python_requires`` of the project in a folder, from the file that setuptools prefers."""
    for name, found_in in FILES.items():
        text = text_of(folder, name)
        specifier = None if text is None else found_in(text, os.path.join(folder, name))
        if specifier is not None:
            return PythonRequires(specifier, name)
    return PythonRequires()


def text_of(folder: str, name: str) -> Optional[str]:
    """The text of a file of a project, or None where there is none.

    Names of authors may be in another encoding; what is looked for is in ASCII.
    """
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


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


FILES = {"pyproject.toml": _of_pyproject, "setup.cfg": _of_setup_cfg, "setup.py": _of_setup_py}


# Specifiers -----------------------------------------------------------------------------------

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


_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")
_COMPARISONS = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}


def allow(specifiers: str, release: Tuple[int, ...]) -> bool:
    """Whether a release satisfies all clauses of a specifier.

    Raises:
        ValueError: a clause is not one of those above.
    """
    clauses = [clause.strip() for clause in specifiers.split(",")]
    return all([_allows(clause, release) for clause in clauses if clause])  # reads each of them


def _allows(clause, release):
    match = _CLAUSE.fullmatch(clause)
    if match is None or (match.group(3) and match.group(1) not in ("==", "!=")):
        raise ValueError(clause)
    numbers = tuple(int(number) for number in match.group(2).split("."))
    if match.group(1) == "~=":
        if len(numbers) < 2:
            raise ValueError(clause)
        return release >= numbers and release[: len(numbers) - 1] == numbers[:-1]
    width = len(numbers) if match.group(3) else max(len(numbers), len(release))
    padded = [(each + (0,) * width)[:width] for each in (release, numbers)]
    return _COMPARISONS[match.group(1)](*padded)
