"""Theano's flags, in ``THEANO_FLAGS`` and in ``.theanorc`` files, as Theano itself reads them.

Source: theano/configparser.py of Theano 1.0.5. A flag's full name is ``[section.]option``.
``THEANO_FLAGS`` goes before the files; of several files named in ``THEANORC`` the last goes
first. Values are plain texts here: what they mean is Theano's business.
"""

import configparser
import contextlib
import errno
import importlib.util
import os
import re
import shlex
import sys

from ... import errors
from ..._configuration import detection
from ..._ranks import launchers
from ..._runtime.safe_files import plain

# THEANO_FLAGS ---------------------------------------------------------------------------------


def split_flags(text):
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
        raise errors.InvalidArgumentError(
            f"THEANO_FLAGS={text} cannot be read: {error}. Theano cannot be imported with it. Put "
            "a backslash before a quote, a comma or a backslash that belongs to a value."
        ) from error
    pairs = (entry.partition("=") for entry in entries if entry)
    return [(name, value if equals else None) for name, equals, value in pairs]


def merge_flags(text, flags):
    """A ``THEANO_FLAGS`` text that says what ``text`` said, and ``flags`` where both speak.

    What has no value stays: Theano warns that it ignores it.
    """
    merged = {}  # type: dict
    for name, value in split_flags(text) + list(flags.items()):
        if value is not None or name not in merged:
            merged[name] = value
    entries = [name if value is None else f"{name}={value}" for name, value in merged.items()]
    return ",".join(re.sub("[\\\\,'\"#]", r"\\\g<0>", entry) for entry in entries)


# Files ----------------------------------------------------------------------------------------


def files(environ):
    """The files that Theano reads, present or not; what a later one says wins."""
    usual = "~/.theanorc" + f"{os.pathsep}~/.theanorc.txt" * (sys.platform == "win32")
    named = environ.get("THEANORC", usual).split(os.pathsep)
    return [_expanduser(path, environ) for path in named if path]


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

    def __init__(self, environ):
        entries = split_flags(environ.get("THEANO_FLAGS", ""))  # of duplicates the last counts
        self._flags = {name: value for name, value in entries if value is not None}
        home = _expanduser("~", environ)
        defaults = {name: environ.get(name, "") for name in ("LSCRATCH", "TMPDIR", "TEMP", "TMP")}
        defaults.update(USER=environ.get("USER", os.path.split(home)[-1]), PID=str(os.getpid()))
        self._parser = configparser.ConfigParser(defaults)
        self.files = [path for path in files(environ) if read_into(path, self._parser)]

    def get(self, name):
        """The text that Theano would take as this flag's value, or None for its default."""
        if name in self._flags:
            return self._flags[name]
        section, option = section_and_option(name)
        try:
            return self._parser.get(section, option, fallback=None)
        except configparser.InterpolationError:  # such as compiledir_format's %(platform)s
            return self._parser.get(section, option, raw=True)

    def spelled_as(self, defined):
        """The flags' names and values; names in files, where case does not matter, as Theano's.

        The files' first. Without what a file has under [DEFAULT], which stands in each of its
        sections.
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


def section_and_option(name):
    """The section and option of a flag in a file."""
    section, _, option = name.rpartition(".")
    return section or "global", option


def read_into(path, parser):
    """Have a parser read a file, as its ``read()``; whether there is one that can be read.

    Raises:
        ConfigurationFileError: it cannot, or nothing but a file could be read to its end.
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
def readable(path):
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


# What is asked, in Theano's words -------------------------------------------------------------


def asked(settings, environ, ids):
    """The flags that say what was asked, with Theano's numbers of the GPUs."""
    options = _checked(settings.options.get("theano_flags", {}))
    said = Flags(environ)
    names = list(map("cuda{}".format, ids))
    # OpenCL's GPUs, of which no command of a driver tells, are kept where the flags name them.
    named = [said.get(name) or "" for name in ("device", "contexts", "init_gpu_device")]
    keeps = settings.devices.undecided is not None and "opencl" in " ".join(named)
    flags = {} if keeps else {"device": names[0] if names else "cpu"}
    if len(names) > 1:
        flags["contexts"] = ";".join(map("dev{}->{}".format, range(len(names)), names))
    for other in ("contexts", "init_gpu_device"):  # both would bring up further GPUs
        if other not in flags and said.get(other) and not keeps:
            flags[other] = ""
    if settings.memory and (names or keeps):
        # Up to 1 it is a fraction, at most .95; above 1 megabytes.
        flags["gpuarray.preallocate"] = f"{min(settings.memory.fraction or 0, 0.95):g}"
        if settings.memory.size:
            flags["gpuarray.preallocate"] = f"{max(2, settings.memory.size / 2.0**20):.15g}"
    if settings.floatx:
        flags["floatX"] = settings.floatx
    if launchers.launched(environ):
        # Ranks compile the same at the same time, and by itself Theano waits 5 to 10 seconds
        # before it looks for its lock again; so long it stays another's, as ever.
        seconds = {"compile.wait": "1", "compile.timeout": "120"}
        flags.update((name, value) for name, value in seconds.items() if not said.get(name))
    flags.update(options)
    return flags


def _checked(flags):
    """``theano_flags=`` with all values as texts."""
    if not isinstance(flags, dict):
        raise invalid(flags, f"it is a {type(flags).__name__}")
    for name, value in flags.items():
        if not (isinstance(name, str) and re.match(r"[A-Za-z_]\w*(\.\w+)*\Z", name)):
            raise invalid(flags, f"{name!r} is no name of a flag")
        if name == "floatX":
            raise invalid(flags, "floatX is set by floatx=")
        text = str(value)
        if not isinstance(value, (str, bool, int, float)) or text != text.strip() or "\n" in text:
            raise invalid(
                flags, f"{value!r} is neither a number, True, False, nor one line of text"
            )
    return {name: str(value) for name, value in flags.items()}


def invalid(flags, problem):
    return errors.InvalidArgumentError(
        f"theano_flags={flags!r} is not understood: {problem}. Use a dictionary of Theano's flags, "
        'such as {"optimizer": "fast_compile", "openmp": True}.'
    )


# What Theano will not take as it was meant. A value that it refuses is its own error when it is
# imported, which names those that it takes.

_FLOATX = "float16", "float32", "float64", "16", "32", "64"


def problems(environ, version):
    """A sentence for each flag that Theano, or Keras, ignores.

    Arguments:
        version: Theano's, or None.
    """
    try:
        for name, value in split_flags(environ.get("THEANO_FLAGS", "")):
            if value is None:
                yield f"THEANO_FLAGS: {name!r} has no value, Theano ignores it."
            elif name != name.strip() or value != value.strip():
                entry, name, value = f"{name}={value}", name.strip(), value.strip()
                yield (
                    f"THEANO_FLAGS: {entry!r} has a space beside its '=', Theano does not take it "
                    f"for {name}. Write {name}={value}."
                )
        said, known = Flags(environ), defined()
        if known:
            yield from unknown(said, known, version)
        path, floatx = detection.keras_json(environ), (said.get("floatX") or "").strip()
        keras = detection.read_keras_json(path).get("floatx", "float32")
        if floatx in _FLOATX and floatx[-2:] != keras[-2:]:  # Theano knows "32", too
            yield (
                f"floatX={floatx}: Keras sets {keras} when it is imported, as {path} says or by "
                "default. Pass floatx= to configure_gpu(), which sets both."
            )
    except errors.CompatError as error:
        yield str(error)


def unknown(said, known, version, only_misspelled=False):
    """A sentence for each flag that is none of Theano's.

    Arguments:
        said: the flags, a ``Flags``.
        known: the names of Theano's.
        only_misspelled: leave out those that are like none of Theano's.
    """
    from ..._configuration import spelling  # here for start-up time

    for name, value in said.spelled_as(known):
        meant = None if name in known else spelling.closest(name, known)
        if meant or name not in known and not only_misspelled:
            hint = f" Did you mean {meant}?" if meant else ""
            yield f"{name}={value}: Theano {version} has no flag {name}, and ignores it.{hint}"


def defined():
    """The names of the installed Theano's flags; none where they are not known.

    Read from its ``configdefaults.py``, since importing that configures Theano and may bring up a
    GPU.
    """
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin:
        return set()
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    with open(path, encoding="utf-8") as file:
        return set(re.findall(r"AddConfigVar\(\s*['\"]([\w.]+)", file.read()))
