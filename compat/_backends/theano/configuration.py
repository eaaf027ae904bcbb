"""The flags that say what was asked, with Theano's numbers of the GPUs."""

import re
import sys
import types

from ... import errors
from ..._ranks import launchers
from .flags import Flags


def requested_flags(settings, environ, ids):
    """Return the flags that configure what was requested, with Theano's numbers of the GPUs."""
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
    """Return ``theano_flags=`` with all values as texts."""
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


def importer():
    """Return the module that imported Theano, or None: the last begun before that refers to it.

    From Python 3.8 on, modules stand in the order in which they were done, which does not tell.
    """
    importer = None
    for name, module in list(sys.modules.items()):  # in the order in which they were begun
        if name.partition(".")[0] == "theano":
            return importer if name == "theano" else None
        values = list(getattr(module, "__dict__", {}).values())
        made = [v for v in values if isinstance(v, (type, types.FunctionType))]
        found = [getattr(v, "__name__", "") for v in values if isinstance(v, types.ModuleType)]
        found += [getattr(v, "__module__", "") for v in made]
        if any(str(each).partition(".")[0] == "theano" for each in found):
            importer = name
    return None
