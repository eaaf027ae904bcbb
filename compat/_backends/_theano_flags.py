"""Theano's flags, in ``THEANO_FLAGS`` and in ``.theanorc`` files, as Theano itself reads them.

Source: theano/configparser.py of Theano 1.0.5. A flag's full name is ``[section.]option``.
``THEANO_FLAGS`` goes before the files; of several files named in ``THEANORC`` the last goes
first. Values are plain texts here: what they mean is Theano's business.
"""

import configparser
import contextlib
import errno
import io
import locale
import os
import shlex
import stat
import sys
import time

from .. import errors
from .._files import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

# THEANO_FLAGS ---------------------------------------------------------------------------------


def split_flags(text: str) -> "List[Tuple[str, Optional[str]]]":
    """Name and value of each entry of a ``THEANO_FLAGS`` text; no value where there is no ``=``.

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
        raise errors.theano_flags_unreadable(text, error) from error
    pairs = (entry.partition("=") for entry in entries if entry)
    return [(name, value if equals else None) for name, equals, value in pairs]


def parse_flags(text: str) -> "Dict[str, str]":
    """The flags that Theano takes from a ``THEANO_FLAGS`` text: of duplicates the last."""
    return {name: value for name, value in split_flags(text) if value is not None}


def merge_flags(text: str, flags: "Mapping[str, str]") -> str:
    """A ``THEANO_FLAGS`` text that says what ``text`` said, and ``flags`` where both speak."""
    merged: "Dict[str, Optional[str]]" = {}
    for name, value in split_flags(text) + list(flags.items()):
        if value is not None or name not in merged:
            merged[name] = value
    return ",".join(
        _escaped(name if value is None else "{}={}".format(name, value))
        for name, value in merged.items()
    )


def _escaped(entry):
    return "".join("\\" + c if c in "\\,'\"#" else c for c in entry)


# Files ----------------------------------------------------------------------------------------


def files(environ: "Mapping[str, str]") -> "List[str]":
    """The files that Theano reads, present or not; what a later one says wins.

    Raises:
        ConfigurationFileError: no file can have such a path.
    """
    listed = environ.get("THEANORC")
    paths = (listed if listed is not None else "~/.theanorc").split(os.pathsep)
    if listed is None and sys.platform == "win32":
        paths.append("~/.theanorc.txt")
    paths = [_expanduser(path, environ) for path in paths if path]
    for path in paths:
        if "\0" in path:
            raise errors.theanorc_not_a_path(path)
    return paths


def file_to_write(environ: "Mapping[str, str]") -> str:
    """The file whose settings win: the last of those that Theano reads.

    Raises:
        ConfigurationFileError: ``THEANORC`` names no file at all, or one in a home that is not set.
    """
    paths = files(environ)
    if not paths:
        raise errors.theanorc_names_no_file()
    named = [path for path in environ.get("THEANORC", "~").split(os.pathsep) if path]
    if named[-1][:2] in ("~", "~/") and environ.get("HOME") == "" and os.name == "posix":
        raise errors.theanorc_without_home(paths[-1])
    if "THEANORC" not in environ:  # on Windows ~/.theanorc.txt only where it is in use
        paths = [path for path in paths if os.path.exists(path)] or paths[:1]
    return paths[-1]


def _expanduser(path, environ):
    if path[:2] in ("~", "~/") and "HOME" in environ and os.name == "posix":
        return environ["HOME"].rstrip("/") + path[1:]
    return os.path.expanduser(path)


class Flags:
    """What an environment and the files it names say, as Theano would read it.

    Raises:
        InvalidArgumentError: ``THEANO_FLAGS`` cannot be read.
        ConfigurationFileError: a file cannot be read.
    """

    def __init__(self, environ: "Mapping[str, str]") -> None:
        self._flags = parse_flags(environ.get("THEANO_FLAGS", ""))
        home = _expanduser("~", environ)
        defaults = {"USER": environ.get("USER", os.path.split(home)[-1]), "PID": str(os.getpid())}
        for name in ("LSCRATCH", "TMPDIR", "TEMP", "TMP"):
            defaults[name] = environ.get(name, "")
        self._parser = configparser.ConfigParser(defaults)
        self._raw = configparser.RawConfigParser()
        self.files: "List[str]" = []
        for path in files(environ):
            if _read_into(path, self._parser, self._raw):
                self.files.append(path)

    def get(self, name: str) -> "Optional[str]":
        """The text that Theano would take as this flag's value, or None for its default."""
        if name in self._flags:
            return self._flags[name]
        section, option = _place(name)
        try:
            try:
                return self._parser.get(section, option)
            except configparser.InterpolationError:  # such as compiledir_format's %(platform)s
                return self._raw.get(section, option)
        except (configparser.NoOptionError, configparser.NoSectionError):
            return None

    def __iter__(self) -> "Iterator[Tuple[str, str]]":
        """The flags' names and values, the files' first."""
        for section in self._raw.sections():
            for option in self._raw.options(section):
                prefix = "" if section == "global" else section + "."
                yield prefix + option, self._raw.get(section, option)
        yield from self._flags.items()

    def spelled_as(self, defined: "Iterable[str]") -> "Iterator[Tuple[str, str]]":
        """As ``__iter__``, names in files, where case does not matter, as Theano defines them.

        Without what a file has under [DEFAULT], which stands in each of its sections.
        """
        names = {name.lower(): name for name in defined}
        for name, value in self:
            if name in self._flags:
                continue
            if name.lower() in names or _place(name)[1] not in self._raw.defaults():
                yield names.get(name.lower(), name), value
        yield from self._flags.items()


def defined(path: str) -> "Dict[str, Optional[List[str]]]":
    """The flags that Theano's ``configdefaults.py`` defines, and what each takes: None: see there.

    Read from the file, since importing it configures Theano and may bring up a GPU.
    """
    import ast

    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    flags = {}  # type: Dict[str, Optional[List[str]]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "AddConfigVar":
            with contextlib.suppress(ValueError):
                flags[ast.literal_eval(node.args[0])] = _choices(node.args[2])
    return flags


def _choices(parameter):
    """The values that such an expression takes, such as ``EnumStr("low", "high")``, or None."""
    import ast

    with contextlib.suppress(ValueError):
        # convert= makes other spellings of a value one of them.
        if getattr(parameter.func, "id", None) == "EnumStr" and "convert" not in [
            k.arg for k in parameter.keywords
        ]:
            return [ast.literal_eval(argument) for argument in parameter.args]
    return None


def _place(name):
    """The section and option of a flag in a file."""
    section, _, option = name.rpartition(".")
    return section or "global", option


def _read_into(path, *parsers):
    """Have parsers read a file, as their ``read()``; whether there is one that can be read.

    Raises:
        ConfigurationFileError: a parser cannot, or nothing but a file could be read to its end.
    """
    if os.path.realpath(path) == os.devnull:  # THEANORC=/dev/null: no file
        return True
    try:
        for parser in parsers:
            with _readable(path), open(path, opener=plain) as file:
                parser.read_file(file, path)
    except OSError as error:
        if isinstance(error, errors.CompatError):
            raise
        if error.errno == errno.EINVAL:
            raise errors.theanorc_not_a_file(path) from error
        return False
    return True


@contextlib.contextmanager
def _readable(path):
    try:
        yield
    except (configparser.Error, UnicodeError) as error:
        raise errors.theanorc_unreadable(path, str(error).replace("\n", " ")) from error


# Writing a file -------------------------------------------------------------------------------


def set_options(text: str, flags: "Mapping[str, str]") -> str:
    """The text of a ``.theanorc`` with these flags set and all else as it was.

    Raises:
        configparser.Error: the text has no place for them.
    """
    wanted = {_place(name): value for name, value in flags.items()}
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


class _Line:
    """A section's header or an option, with the lines that continue its value."""

    def __init__(self, number, section, option, margin, prefix):
        self.section = section
        self.option = option  # None: a header
        self.margin = margin  # the spaces before it
        self.prefix = prefix  # what stands before the value
        self.numbers = [number]


def _scan(lines):
    """The headers and options in the lines of a file, by the rules of configparser."""
    found = []
    section = None
    for number, line in enumerate(lines):
        content = line.strip()
        if not content or content.startswith(("#", ";")):
            continue
        margin = line[: len(line) - len(line.lstrip())]
        last = found[-1] if found else None
        if last and last.option and len(margin) > len(last.margin):
            last.numbers.append(number)
            continue
        header = configparser.RawConfigParser.SECTCRE.match(content)
        if header:
            section = header.group("header")
            found.append(_Line(number, section, None, margin, ""))
        else:
            option = configparser.RawConfigParser.OPTCRE.match(content)
            name, prefix = option.group("option").rstrip().lower(), content[: option.start("value")]
            found.append(_Line(number, section, name, margin, margin + prefix))
    return found


def _set_option(text, section, option, value):
    lines = list(io.StringIO(text, newline=""))  # with their ends, as they are
    end = "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += end
    found = _scan(lines)
    there = [line for line in found if line.section == section]
    same = [line for line in there if line.option == option.lower()]
    if same:
        first = same[0].numbers[0]
        own_end = lines[first][len(lines[first].rstrip("\r\n")) :]
        lines[first] = same[0].prefix + value + own_end
        for number in reversed(same[0].numbers[1:]):
            del lines[number]
    elif there:
        # Indented as the line above, so that it continues no value and nothing continues its.
        above = there[-1]
        below = [line for line in found if line.numbers[0] > above.numbers[-1]]
        margin = above.margin if above.option or not below else below[0].margin
        lines.insert(above.numbers[-1] + 1, "{}{} = {}{}".format(margin, option, value, end))
    else:
        lines += [end] * bool(lines) + ["[{}]{}".format(section, end)]
        lines += ["{} = {}{}".format(option, value, end)]
    return "".join(lines)


def _check_defaults(before, old, new, flags):
    """Refuse a new section, into which [DEFAULT] says something that nobody wrote there.

    Arguments:
        before: the files that Theano reads before this one.
        old, new: the file's text as it was, and as it is to be.

    Raises:
        ConfigurationFileError: there is such a section.
    """
    was, becomes = _with_defaults(before, old), _with_defaults(before, new)
    wanted = {_place(name.lower()) for name in flags}
    for section, options in becomes.items():
        more = [o for o in options if o not in was.get(section, ()) and (section, o) not in wanted]
        if more:
            raise errors.theanorc_defaults(section, sorted(more))


def _with_defaults(before, text):
    """The options of each section, with those that [DEFAULT] gives it."""
    parser = configparser.RawConfigParser(strict=False)
    for path in before:
        _read_into(path, parser)
    parser.read_file(io.StringIO(text, newline=None))
    return {section: set(parser.options(section)) for section in parser.sections()}


def write(path: str, flags: "Mapping[str, str]", before: "Sequence[str]" = ()) -> "Optional[str]":
    """Set these flags in a file, and keep all else in it, its rights and links to it.

    A crash at any point leaves the old file or the new one, complete; two processes that write
    at once wait for each other. Others may write to its folder, too: new files have names that
    nobody foresees, and nothing that stands in the way is followed or waited for.

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
            with _readable(path):
                text = (old or b"").decode(encoding)
                configparser.RawConfigParser().read_file(io.StringIO(text, newline=None), path)
                changed = set_options(text, flags)
            if old is not None and changed == text:
                return path
            _check_defaults(before, text, changed, flags)
            backup = path + ".before-compat" if old is not None else None
            if backup:
                _replace(backup, old, model)
            _replace(path, changed.encode(encoding), model)
            return backup
    except (OSError, ValueError) as error:
        if isinstance(error, errors.CompatError):
            raise
        raise errors.unwritable_file(path, error) from error


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


def _read(path):
    """A file's content and what ``os.stat()`` says of it; None and None where there is none."""
    try:
        with open(plain(path, os.O_RDONLY | _NOFOLLOW), "rb") as file:
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
        lock = plain(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW)
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


def _replace(path, content, model):
    """Write a whole file in one step.

    Arguments:
        model: ``os.stat()`` of the file whose rights and owner it is to have; None: a new one's.
    """
    temporary = "{}.{}.tmp".format(path, os.urandom(8).hex())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW
    rights = 0o666 if model is None else 0o600  # less what the process withholds (umask)
    descriptor = os.open(temporary, flags, rights)
    try:
        with open(descriptor, "wb") as file:
            if model is not None:
                _give(file.fileno(), temporary, model)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(path))


def _give(descriptor, path, model):
    """Give a file the owner, where this process may, and the rights of another one."""
    if os.name != "posix":
        os.chmod(path, stat.S_IMODE(model.st_mode))
        return
    if (model.st_uid, model.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, model.st_uid, model.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(model.st_mode))


def _sync_folder(path):
    """Make the change of name last through a power cut, where the system can."""
    if os.name == "posix":
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
