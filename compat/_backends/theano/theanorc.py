"""Writing Theano's flags into ``.theanorc``, whose other lines stay as they are."""

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


def file_to_write(environ):
    """Return the file that takes precedence: the last of those that Theano reads.

    Raises:
        ConfigurationFileError: ``THEANORC`` names no file at all.
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


def write(path, flags, before=()):
    """Set these flags in a file, and keep all else in it, its rights and links to it.

    A crash at any point leaves the old file or the new one, complete; two processes that write
    at once wait for each other. Others may write to its folder, too: new files have unpredictable
    names, and nothing that stands in the way is followed or waited for.

    Arguments:
        before: the files that Theano reads before this one.

    Returns:
        The path of a copy of the file as it was, or None where there was no file. Where the
        file says all this already nothing is written, and the path is ``path`` itself.

    Raises:
        ConfigurationFileError: the file cannot be read, or not be written; it is as it was.
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
                _read(backup)  # an error: something is there that is no file
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


def set_options(text, flags):
    """Return the text of a ``.theanorc`` with these flags set and all else as it was.

    Raises:
        configparser.Error: the text has no place for them.
    """
    for name, value in flags.items():
        section, option = section_and_option(name)
        wanted = _options(text)
        value = value.replace("%", "%%")  # Theano reads %(name)s as a reference
        if wanted.setdefault(section, {}).get(option.lower()) != value:
            wanted[section][option.lower()] = value
            texts = _with_option(text, section, option, value)
            found = next((each for each in texts if _options(each) == wanted), None)
            if found is None:
                raise configparser.Error(f"its layout leaves no place for {name}")
            text = found
    return text


def _options(text):
    """Return all settings of a file's text, by section and option."""
    parser = configparser.RawConfigParser(default_section=_NO_DEFAULTS, strict=False)
    parser.read_file(io.StringIO(text, newline=None))
    return {section: dict(parser.items(section)) for section in parser.sections()}


_NO_DEFAULTS = "\n"  # no section has such a name, so [DEFAULT] is a section like all others


def _with_option(text, section, option, value):
    """Yield texts with this option, one of which has it and nothing else besides."""
    lines = list(io.StringIO(text, newline=""))  # with their ends, as they are
    end = "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += end
    said = [_options("".join(lines[:count])).get(section) for count in range(len(lines) + 1)]
    # The numbers of the lines up to which it says otherwise than up to the one before.
    of_section = [number for number in range(len(lines)) if said[number] != said[number + 1]]
    key = option.lower()
    same = [n for n in of_section if (said[n] or {}).get(key) != said[n + 1].get(key)]
    if not of_section:
        lines += [end] * bool(lines) + [f"[{section}]{end}", f"{option} = {value}{end}"]
        yield "".join(lines)
        return
    near = same[0] if same else of_section[-1]
    before = lines[:near] if same else lines[: near + 1]
    after = [line for number, line in enumerate(lines) if number > near and number not in same]
    # Indented like another line, so that it continues no value and nothing continues its.
    for line in filter(str.strip, lines[near::-1] + lines[near:]):
        margin = line[: len(line) - len(line.lstrip())]
        yield "".join(before + [f"{margin}{option} = {value}{end}"] + after)


def _check_defaults(before, text, flags):
    """Refuse a new section, for which [DEFAULT] would set what the user has not.

    Arguments:
        before: the files that Theano reads before this one.
        text: the file's, as it was.

    Raises:
        ConfigurationFileError: there is such a section.
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
    """Return a file's content and its ``os.stat()``; None and None where there is none."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            return file.read(), os.fstat(file.fileno())
    except FileNotFoundError:
        return None, None


# How long another process may hold the lock, in seconds.
_PATIENCE = 60.0


@contextlib.contextmanager
def _alone(path):
    """Hold this lock file, waiting for it. The system drops the lock of a process that dies."""
    try:
        import fcntl
    except ImportError:  # Windows: of two writers at once the later wins
        yield
        return
    until, is_held = time.monotonic() + _PATIENCE, False
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
                text = f"Another process has held it for {_PATIENCE:g} seconds"
                raise OSError(errno.EBUSY, text, path)
            else:
                time.sleep(0.01)
