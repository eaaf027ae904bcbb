"""The flags that say in Theano's words what ``configure_gpu()`` was asked."""

import re

from ... import errors
from ..._ranks import launchers
from . import theano_flags


def flags_for(settings, environ, ids, has_gpuarray):
    """The flags that say what was asked, with Theano's numbers of the GPUs."""
    options = _checked(settings.options.get("theano_flags", {}))
    said = theano_flags.Flags(environ)
    names = ["{}{}".format("cuda" if has_gpuarray else "gpu", i) for i in ids]
    # OpenCL's GPUs, of which no command of a driver tells, are kept where the flags name them.
    asked = [said.get(name) or "" for name in ("device", "contexts", "init_gpu_device")]
    keeps = settings.devices.undecided is not None and "opencl" in " ".join(asked)
    flags = {} if keeps else {"device": names[0] if names else "cpu"}
    if len(names) > 1 and has_gpuarray:
        flags["contexts"] = ";".join(map("dev{}->{}".format, range(len(names)), names))
    for other in ("contexts", "init_gpu_device"):  # both would bring up further GPUs
        if other not in flags and said.get(other) and not keeps:
            flags[other] = ""
    if settings.memory and (names or keeps):
        name = "gpuarray.preallocate" if has_gpuarray else "lib.cnmem"
        flags[name] = _megabytes(settings.memory)
    if settings.floatx:
        flags["floatX"] = settings.floatx
    if launchers.launched(environ):
        # Ranks compile the same at the same time, and by itself Theano waits 5 to 10 seconds
        # before it looks for its lock again; so long it stays another's, as ever.
        for name, seconds in (("compile.wait", "1"), ("compile.timeout", "120")):
            if not said.get(name):
                flags[name] = seconds
    flags.update(options)
    return flags


def _checked(flags):
    """``theano_flags=`` with all values as texts."""
    if not isinstance(flags, dict):
        raise theano_flags_invalid(flags, f"it is a {type(flags).__name__}")
    for name, value in flags.items():
        if not (isinstance(name, str) and re.match(r"[A-Za-z_]\w*(\.\w+)*\Z", name)):
            raise theano_flags_invalid(flags, f"{name!r} is no name of a flag")
        if name == "floatX":
            raise theano_flags_invalid(flags, "floatX is set by floatx=")
        text = str(value)
        if not isinstance(value, (str, bool, int, float)) or text != text.strip() or "\n" in text:
            raise theano_flags_invalid(
                flags, f"{value!r} is neither a number, True, False, nor one line of text"
            )
    return {name: str(value) for name, value in flags.items()}


def _megabytes(memory):
    """What ``gpuarray.preallocate`` takes: up to 1 a fraction, at most .95; above 1 megabytes."""
    if memory.size:
        return f"{max(2, memory.size / 2.0**20):.15g}"
    return f"{min(memory.fraction or 0, 0.95):g}"


def theano_flags_invalid(flags, problem):
    return errors.InvalidArgumentError(
        f"theano_flags={flags!r} is not understood: {problem}. Use a dictionary of Theano's flags, "
        'such as {"optimizer": "fast_compile", "openmp": True}.'
    )
