"""Theano's flags, in ``THEANO_FLAGS`` and in ``.theanorc`` files, as Theano itself reads them.

Source: theano/configparser.py of Theano 1.0.5. A flag's full name is ``[section.]option``.
``THEANO_FLAGS`` overrides the files; of several files named in ``THEANORC`` the last overrides
the others. Values are plain text here, which only Theano interprets.
"""

import configparser
import contextlib
import errno
import os
import re
import shlex
import sys

from ... import errors
from ..._runtime.safe_files import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Tuple


def split_flags(text: str) -> "List[Tuple[str, Optional[str]]]":
    """Return name and value of each entry of ``THEANO_FLAGS``, with None for a value without ``=``.

    Commas separate; a backslash or quotes take them, and each other, literally; ``#`` begins a
    comment. Spaces around ``=`` belong to name and value.

    Raises:
        InvalidArgumentError: a quote is not closed, as Theano would find (a ``ValueError``).
    """
    splitter = shlex.shlex(text, posix=True)
    splitter.whitespace = ","
    splitter.whitespace_split = True
    try:
        entries = [entry.strip() for entry in splitter]
    except ValueError as error:
        raise errors.InvalidArgumentError(
            f"THEANO_FLAGS={text} cannot be read: {error}. Theano cannot be imported with it. Put "
            "a backslash before a quote, a comma or a backslash that belongs to a value."
        ) from error
    pairs = (entry.partition("=") for entry in entries if entry)
    return [(name, value if equals else None) for name, equals, value in pairs]


def merge_flags(text: str, flags: "Mapping[str, str]") -> str:
    """Return a ``THEANO_FLAGS`` text with the settings of ``text``, overridden by ``flags``.

    Entries without a value stay: Theano warns that it ignores them.
    """
    merged: "Dict[str, Optional[str]]" = {}
    for name, value in split_flags(text) + list(flags.items()):
        if value is not None or name not in merged:
            merged[name] = value
    entries = [name if value is None else f"{name}={value}" for name, value in merged.items()]
    return ",".join(re.sub("[\\\\,'\"#]", r"\\\g<0>", entry) for entry in entries)


def files(environ: "Mapping[str, str]") -> "List[str]":
    """Return the files that Theano reads, present or not; a later one takes precedence."""
    usual = "~/.theanorc" + f"{os.pathsep}~/.theanorc.txt" * (sys.platform == "win32")
    named = environ.get("THEANORC", usual).split(os.pathsep)
    return [_expanduser(path, environ) for path in named if path]


def _expanduser(path, environ):
    if path[:2] in ("~", "~/") and "HOME" in environ and os.name == "posix":
        return environ["HOME"].rstrip("/") + path[1:]
    return os.path.expanduser(path)


class Flags:
    """Flags set by an environment and the files it names, as Theano would read them.

    Arguments:
        environ: the environment.

    Attributes:
        files: the files that are there.

    Raises:
        InvalidArgumentError: ``THEANO_FLAGS`` cannot be read.
        ConfigurationFileError: a file cannot be read.
    """

    def __init__(self, environ):
        entries = split_flags(environ.get("THEANO_FLAGS", ""))  # of duplicates the last counts
        self._flags = {name: value for name, value in entries if value is not None}
        home = _expanduser("~", environ)
        defaults = {name: environ.get(name, "") for name in ("LSCRATCH", "TMPDIR", "TEMP", "TMP")}
        defaults.update(USER=environ.get("USER", os.path.split(home)[-1]), PID=str(os.getpid()))
        self._parser = configparser.ConfigParser(defaults)
        self.files = [path for path in files(environ) if read_into(path, self._parser)]

    def get(self, name: str) -> "Optional[str]":
        """Return the text that Theano would take as this flag's value, or None for its default."""
        if name in self._flags:
            return self._flags[name]
        section, option = section_and_option(name)
        try:
            return self._parser.get(section, option, fallback=None)
        except configparser.InterpolationError:  # such as compiledir_format's %(platform)s
            return self._parser.get(section, option, raw=True)

    def spelled_as(self, defined: "Iterable[str]") -> "Iterator[Tuple[str, str]]":
        """Yield names and values of the flags, those in files first.

        Names in files ignore case, and are yielded as Theano spells them. Options of [DEFAULT],
        which a parser repeats in each section, are left out.

        Arguments:
            defined: the names of Theano's flags.
        """
        names = {name.lower(): name for name in defined}
        for section in self._parser.sections():
            for option in self._parser.options(section):
                name = option if section == "global" else f"{section}.{option}"
                defined_as = names.get(name.lower())
                if name in self._flags or not defined_as and option in self._parser.defaults():
                    continue
                yield defined_as or name, self._parser.get(section, option, raw=True).strip()
        for name, value in self._flags.items():
            yield name.strip(), value.strip()


def section_and_option(name: str) -> "Tuple[str, str]":
    """Return the section and option of a flag in a file."""
    section, _, option = name.rpartition(".")
    return section or "global", option


def read_into(path: str, parser: "configparser.RawConfigParser") -> bool:
    """Have a parser read a file, as its ``read()``; return whether there is a readable one.

    Raises:
        ConfigurationFileError: the file is not a regular file, or cannot be parsed.
    """
    if os.path.realpath(path) == os.devnull:  # THEANORC=/dev/null: no file
        return True
    with readable(path):
        try:
            with open(path, opener=plain) as file:
                parser.read_file(file, path)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise
            return False
    return True


@contextlib.contextmanager
def readable(path: str) -> "Iterator[None]":
    """Convert errors of reading a file, within a block, to ``ConfigurationFileError``."""
    try:
        yield
    except (configparser.Error, UnicodeError, OSError) as error:
        problem = str(error).replace("\n", " ").rstrip(".")
        remedy = (
            "Theano cannot be imported with it. Fix the file: each option stands once, as "
            "`name = value`, under a section such as [global]."
        )
        if isinstance(error, OSError):
            problem = "it is not a regular file"
            remedy = (
                "Theano would wait for what it says when it is imported. Put a file there, "
                "or name one in THEANORC."
            )
        raise errors.ConfigurationFileError(
            f"{path} cannot be read: {problem}. {remedy}"
        ) from error
