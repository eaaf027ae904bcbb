"""Writing Theano's flags into ``.theanorc``, whose other lines stay as they are."""

import collections
import configparser
import contextlib
import errno
import io
import locale
import os
import time

from ... import errors
from ..._runtime.safe_files import NOFOLLOW, plain, replacement
from . import theano_flags
from .theano_flags import read_into, readable, section_and_option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, Optional, Sequence


def file_to_write(environ: "Mapping[str, str]") -> str:
    """The file whose settings win: the last of those that Theano reads.

    Raises:
        ConfigurationFileError: ``THEANORC`` names no file at all, or one in a home that is not set.
    """
    paths = theano_flags.files(environ)
    if not paths:
        raise errors.ConfigurationFileError(
            "persist=True has no file to write: THEANORC is set and names none. Unset it, "
            "for ~/.theanorc, or name a file."
        )
    named = [path for path in environ.get("THEANORC", "~").split(os.pathsep) if path]
    if named[-1][:2] in ("~", "~/") and environ.get("HOME") == "" and os.name == "posix":
        raise errors.ConfigurationFileError(
            "persist=True would write {}: HOME is set and empty. Set HOME to the home "
            "folder, unset it, or name a file in THEANORC.".format(paths[-1])
        )
    if "THEANORC" not in environ:  # on Windows ~/.theanorc.txt only where it is in use
        paths = [path for path in paths if os.path.exists(path)] or paths[:1]
    return paths[-1]


def write(path: str, flags: "Mapping[str, str]", before: "Sequence[str]" = ()) -> "Optional[str]":
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
            _check_defaults(before, text, changed, flags)
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
            "{} could not be written: {}. The file is as it was before.".format(path, error)
        ) from error


# The text of a file ---------------------------------------------------------------------------


def set_options(text: str, flags: "Mapping[str, str]") -> str:
    """The text of a ``.theanorc`` with these flags set and all else as it was.

    Raises:
        configparser.Error: the text has no place for them.
    """
    wanted = {section_and_option(name): value for name, value in flags.items()}
    expected = _options(text)
    for (section, option), value in wanted.items():
        value = value.replace("%", "%%")  # Theano reads %(name)s as a reference
        if expected.setdefault(section, {}).get(option.lower()) != value:
            text = _set_option(text, section, option, value)
            expected[section][option.lower()] = value
    if _options(text) != expected:
        raise configparser.Error("its layout leaves no place for {}".format(", ".join(flags)))
    return text


def _options(text):
    """All that a file's text says, by section and option."""
    parser = configparser.RawConfigParser(default_section=_NO_DEFAULTS, strict=False)
    parser.read_file(io.StringIO(text, newline=None))
    return {section: dict(parser.items(section)) for section in parser.sections()}


_NO_DEFAULTS = "\n"  # no section has such a name, so [DEFAULT] is a section like all others


#: A section's header or an option, with the lines that continue its value.
#:
#: ``option``: None for a header. ``margin``: the spaces before it. ``prefix``: what stands before
#: the value. ``numbers``: those of its lines.
_Entry = collections.namedtuple("_Entry", "section option margin prefix numbers")


def _scan(lines):
    """The headers and options in the lines of a file, by the rules of configparser."""
    found = []  # type: list
    section = None
    for number, line in enumerate(lines):
        content = line.strip()
        if not content or content.startswith(("#", ";")):
            continue
        margin = line[: len(line) - len(line.lstrip())]
        if found and found[-1].option and len(margin) > len(found[-1].margin):
            found[-1].numbers.append(number)
            continue
        header = configparser.RawConfigParser.SECTCRE.match(content)
        name = prefix = None
        if header:
            section = header.group("header")
        else:
            option = configparser.RawConfigParser.OPTCRE.match(content)
            name = option.group("option").rstrip().lower()
            prefix = margin + content[: option.start("value")]
        found.append(_Entry(section, name, margin, prefix, [number]))
    return found


def _set_option(text, section, option, value):
    lines = list(io.StringIO(text, newline=""))  # with their ends, as they are
    end = "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += end
    found = _scan(lines)
    there = [entry for entry in found if entry.section == section]
    same = [entry for entry in there if entry.option == option.lower()]
    if same:
        first, *rest = same[0].numbers
        own_end = lines[first][len(lines[first].rstrip("\r\n")) :]
        lines[first] = same[0].prefix + value + own_end
        lines = [line for number, line in enumerate(lines) if number not in rest]
    elif there:
        # Indented as the line above, so that it continues no value and nothing continues its.
        above = there[-1]
        below = found[found.index(above) + 1 :]
        margin = above.margin if above.option or not below else below[0].margin
        lines.insert(above.numbers[-1] + 1, "{}{} = {}{}".format(margin, option, value, end))
    else:
        lines += [end] * bool(lines) + ["[{}]{}".format(section, end)]
        lines += ["{} = {}{}".format(option, value, end)]
    return "".join(lines)


def _check_defaults(before, old, new, flags):
    """Refuse a new section, for which [DEFAULT] would set what the user has not.

    Arguments:
        before: the files that Theano reads before this one.
        old, new: the file's text as it was, and as it is to be.

    Raises:
        ConfigurationFileError: there is such a section.
    """
    was, becomes = _with_defaults(before, old), _with_defaults(before, new)
    wanted = {section_and_option(name.lower()) for name in flags}
    for section, options in becomes.items():
        more = [o for o in options if o not in was.get(section, ()) and (section, o) not in wanted]
        if more:
            raise errors.ConfigurationFileError(
                "persist=True has written nothing: it needs a section [{0}], and what a "
                "section [DEFAULT] says of {1} would then hold there, where it does not "
                "yet. Move that from [DEFAULT] into the sections that it is for, or add the "
                "line [{0}] yourself.".format(section, " and ".join(sorted(more)))
            )


def _with_defaults(before, text):
    """The options of each section, with those that [DEFAULT] gives it."""
    parser = configparser.RawConfigParser(strict=False)
    for path in before:
        read_into(path, parser)
    parser.read_file(io.StringIO(text, newline=None))
    return {section: set(parser.options(section)) for section in parser.sections()}


# The file itself ------------------------------------------------------------------------------


def _read(path):
    """A file's content and what ``os.stat()`` says of it; None and None where there is none."""
    try:
        with open(plain(path, os.O_RDONLY | NOFOLLOW), "rb") as file:
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
    lock = _locked(path, fcntl)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(lock)


def _locked(path, fcntl):
    until = time.monotonic() + _PATIENCE
    while True:
        lock = plain(path, os.O_RDWR | os.O_CREAT | NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(path), os.fstat(lock)):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its holder has it, or has removed the file meanwhile
        if time.monotonic() > until:
            text = "Another process has held it for {:g} seconds".format(_PATIENCE)
            raise OSError(errno.EBUSY, text, path)
        time.sleep(0.01)
