"""Writer of ``.theanorc``, which sets flags and keeps all other lines."""

import configparser
import contextlib
import errno
import io
import locale
import os
import time

from ... import errors
from ..._runtime.safe_files import NOFOLLOW, plain, replacement
from .flags import files, read_into, readable, section_and_option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Mapping, Optional


def file_to_write(environ: "Mapping[str, str]") -> str:
    """Return the file that takes precedence: the last of those that Theano reads.

    Raises:
        ConfigurationFileError: ``THEANORC`` is set and empty.
    """
    paths = files(environ)
    if not paths:
        raise errors.ConfigurationFileError(
            "persist=True has no file to write: THEANORC is set and names none. Unset it, "
            "for ~/.theanorc, or name a file."
        )
    if "THEANORC" not in environ:  # on Windows ~/.theanorc.txt only where it is in use
        paths = [path for path in paths if os.path.exists(path)] or paths[:1]
    return paths[-1]


def write(path: str, flags: "Mapping[str, str]", before: "Iterable[str]" = ()) -> "Optional[str]":
    """Set flags in a file, and keep its other contents, its permissions and links to it.

    A crash at any point leaves either the old file or the new one; of two processes that write at
    once one waits for the other. Others may have write access to the folder: new files have
    unpredictable names, and links or special files in their place are neither followed nor opened.

    Arguments:
        path: the file.
        flags: values by the full names of flags.
        before: the files that Theano reads before this one.

    Returns:
        The path of a backup of the file, or None where there was no file. Where the file has these
        flags already, nothing is written, and the result is ``path`` itself.

    Raises:
        ConfigurationFileError: the file cannot be read or written; it is unchanged.
    """
    encoding = locale.getpreferredencoding(False)  # in which Theano reads it
    try:
        path = os.path.realpath(path)
        with _alone(path + ".lock"):
            old, model = _read(path)
            with readable(path):
                text = (old or b"").decode(encoding)
                configparser.RawConfigParser().read_file(io.StringIO(text, newline=None), path)
                changed = set_options(text, flags)
            if old is not None and changed == text:
                return path
            _check_defaults(before, text, flags)
            content, backup = changed.encode(encoding), None
            if old is not None:
                backup = path + ".before-compat"
                _read(backup)  # raises if it is not a regular file
                with replacement(backup, model) as file:
                    file.write(old)
            with replacement(path, model) as file:
                file.write(content)
            return backup
    except errors.CompatError:
        raise
    except (OSError, ValueError) as error:
        raise errors.ConfigurationFileError(
            f"{path} could not be written: {error}. The file is as it was before."
        ) from error


def set_options(text: str, flags: "Mapping[str, str]") -> str:
    """Return the text of a ``.theanorc`` with flags set and all else unchanged.

    Raises:
        configparser.Error: the layout of the text leaves no place for them.
    """
    for name, value in flags.items():
        section, option = section_and_option(name)
        wanted = _options(text)
        value = value.replace("%", "%%")  # Theano reads %(name)s as a reference
        if wanted.setdefault(section, {}).get(option.lower()) != value:
            wanted[section][option.lower()] = value
            candidates = _with_option(text, section, option, value)
            changed = next((t for t in candidates if _options(t) == wanted), None)
            if changed is None:
                raise configparser.Error(f"its layout leaves no place for {name}")
            text = changed
    return text


def _options(text):
    """Return all settings of a file's text, by section and option."""
    parser = configparser.RawConfigParser(default_section=_NO_DEFAULTS, strict=False)
    parser.read_file(io.StringIO(text, newline=None))
    return {section: dict(parser.items(section)) for section in parser.sections()}


_NO_DEFAULTS = "\n"  # no section has such a name, so [DEFAULT] is a section like all others


def _with_option(text, section, option, value):
    """Yield candidates for the text with an option: in some it changes others, or has no effect."""
    lines = list(io.StringIO(text, newline=""))  # with their line ends
    end = "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += end
    # The section's options by the first lines of the file, and the numbers of the lines that
    # change them.
    options = [_options("".join(lines[:count])).get(section) for count in range(len(lines) + 1)]
    of_section = [number for number in range(len(lines)) if options[number] != options[number + 1]]
    key = option.lower()
    same = [n for n in of_section if (options[n] or {}).get(key) != options[n + 1].get(key)]
    if not of_section:
        lines += [end] * bool(lines) + [f"[{section}]{end}", f"{option} = {value}{end}"]
        yield "".join(lines)
        return
    near = same[0] if same else of_section[-1]
    before = lines[:near] if same else lines[: near + 1]
    after = [line for number, line in enumerate(lines) if number > near and number not in same]
    # Indented like another line, so that it neither continues a value nor is continued.
    for line in filter(str.strip, lines[near::-1] + lines[near:]):
        margin = line[: len(line) - len(line.lstrip())]
        yield "".join(before + [f"{margin}{option} = {value}{end}"] + after)


def _check_defaults(before, text, flags):
    """Refuse a new section where [DEFAULT] would set further options in it.

    Arguments:
        before: the files that Theano reads before this one.
        text: the file's text before the change.
        flags: values by the full names of flags.

    Raises:
        ConfigurationFileError: a section is missing, and there are such options.
    """
    parser = configparser.RawConfigParser(strict=False)
    for path in before:
        read_into(path, parser)
    parser.read_file(io.StringIO(text, newline=None))
    for section, _ in map(section_and_option, flags):
        if parser.defaults() and not parser.has_section(section):
            options = " and ".join(sorted(parser.defaults()))
            raise errors.ConfigurationFileError(
                f"persist=True has written nothing: it needs a section [{section}], and what a "
                f"section [DEFAULT] says of {options} would then hold there, where it does not "
                "yet. Move that from [DEFAULT] into the sections that it is for, or add the line "
                f"[{section}] yourself."
            )


def _no_link(path, flags):
    return plain(path, flags | NOFOLLOW)


def _read(path):
    """Return a file's content and its ``os.stat()``; None for both where there is no file."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            return file.read(), os.fstat(file.fileno())
    except FileNotFoundError:
        return None, None


# How long another process may hold the lock, in seconds.
_LOCK_TIMEOUT = 60.0


@contextlib.contextmanager
def _alone(path):
    """Hold a lock file within a block. The system drops the lock of a process that dies."""
    try:
        import fcntl
    except ImportError:  # Windows: of two writers at once the later wins
        yield
        return
    until, is_held = time.monotonic() + _LOCK_TIMEOUT, False
    while not is_held:
        with open(path, "ab", opener=_no_link) as lock:
            # Its holder has it, or has removed the file meanwhile.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = os.path.samestat(os.lstat(path), os.fstat(lock.fileno()))
            if is_held:
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            elif time.monotonic() > until:
                text = f"Another process has held it for {_LOCK_TIMEOUT:g} seconds"
                raise OSError(errno.EBUSY, text, path)
            else:
                time.sleep(0.01)
