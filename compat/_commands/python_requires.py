"""Which Pythons a project allows: its ``python_requires``, wherever it is written."""

import os
import re
from typing import Any, NamedTuple, Optional, Tuple

from .. import errors

# A specifier is held against the last release of a Python, as that is what is installed.
_LAST = 99


class PythonRequires(NamedTuple):
    """The ``python_requires`` of a project.

    Attributes:
        source: the name of the file that has it; None where the project sets no limit.
        text: as written there; None where it is computed.
        specifiers: a ``SpecifierSet``; None where the text could not be read.
    """

    source: Optional[str] = None
    text: Optional[str] = None
    specifiers: Any = None

    def __str__(self):
        return f"python_requires = {self.text} in {self.source}"

    def allows(self, python: Tuple[int, int]) -> bool:
        """Return whether the project runs on a Python; every one where no limit is known."""
        return self.specifiers is None or "{}.{}.{}".format(*python, _LAST) in self.specifiers


# In a file of TOML, for which Python 3.6 has no parser, and of Python: a text in quotes. Anything
# else is computed.
_QUOTED = r"\s*=\s*(?:(['\"])(?P<specifier>.*?)\1)?"
_WITHIN = r"^\[(?:{})\][^\n]*\n(?:(?!\[).*\n)*?"
# The files that may have it, in the order of setuptools.
PROJECT_FILES = {
    "pyproject.toml": _WITHIN.format(r"project|tool\.poetry\.dependencies")
    + r"(?:requires-python|python)" + _QUOTED,
    "setup.cfg": _WITHIN.format("options")
    + r"python_requires[ \t]*[=:][ \t]*(?:\n[ \t]+)?(?P<specifier>.+(?:\n[ \t]+[^\s#].*)*)",
    "setup.py": r"^[^#\n]*\bpython_requires" + _QUOTED,
}  # fmt: skip


def python_requires(folder: str) -> PythonRequires:
    """Return the ``python_requires`` of the project in a folder.

    Raises:
        NotInstalledError: there is one, and ``packaging`` is not installed.
    """
    for name, pattern in PROJECT_FILES.items():
        match = re.search(pattern, text_of(folder, name), re.MULTILINE)
        if match is not None:
            text = match.group("specifier")
            return PythonRequires(name, text, _specifiers(text))
    return PythonRequires()


def text_of(folder: str, name: str) -> str:
    """Return the text of a regular file of a project, or "" where there is none.

    Names of authors may be in another encoding; keywords are in ASCII.
    """
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _specifiers(text):
    try:
        from packaging import specifiers
    except ImportError as error:
        raise errors.NotInstalledError(
            "python_requires is read with the library packaging, which cannot be imported here "
            f"({error}). Install it: pip install packaging"
        ) from error
    try:
        return None if text is None else specifiers.SpecifierSet(text)
    except specifiers.InvalidSpecifier:
        return None
