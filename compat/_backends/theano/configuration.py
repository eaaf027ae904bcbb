"""Theano's flags for the arguments of ``configure_gpu()``."""

import re
import sys
import types

from ... import errors
from ..._ranks import launchers
from .flags import Flags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, Mapping, Optional

    from ..._configuration.settings import Settings


def requested_flags(
    settings: "Settings", environ: "Mapping[str, str]", ids: "Iterable[int]"
) -> "Dict[str, str]":
    """Return the flags for the settings.

    Arguments:
        settings: the ``Settings``.
        environ: the environment, whose flags may name other devices.
        ids: Theano's numbers of the GPUs.
    """
    options = _checked(settings.options.get("theano_flags", {}))
    flags_before = Flags(environ)
    names = list(map("cuda{}".format, ids))
    # OpenCL's GPUs, which no driver's command lists, are kept where the flags name them.
    devices = [flags_before.get(name) or "" for name in ("device", "contexts", "init_gpu_device")]
    keeps = settings.devices.undecided is not None and "opencl" in " ".join(devices)
    flags = {} if keeps else {"device": names[0] if names else "cpu"}
    if len(names) > 1:
        flags["contexts"] = ";".join(map("dev{}->{}".format, range(len(names)), names))
    for other in ("contexts", "init_gpu_device"):  # both would bring up further GPUs
        if other not in flags and flags_before.get(other) and not keeps:
            flags[other] = ""
    if settings.memory and (names or keeps):
        # Up to 1 it is a fraction, at most .95; above 1 megabytes.
        flags["gpuarray.preallocate"] = f"{min(settings.memory.fraction or 0, 0.95):g}"
        if settings.memory.size:
            flags["gpuarray.preallocate"] = f"{max(2, settings.memory.size / 2.0**20):.15g}"
    if settings.floatx:
        flags["floatX"] = settings.floatx
    if launchers.launched(environ):
        # Ranks compile the same functions at the same time, and by default Theano waits 5 to 10
        # seconds before it looks for its lock again. The timeout is Theano's default.
        seconds = {"compile.wait": "1", "compile.timeout": "120"}
        flags.update((name, value) for name, value in seconds.items() if not flags_before.get(name))
    flags.update(options)
    return flags


def _checked(flags):
    """Return ``theano_flags=`` with all values as text.

    Raises:
        InvalidArgumentError: it is not a dictionary of flags.
    """
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
    """Return the error for ``theano_flags=``."""
    return errors.InvalidArgumentError(
        f"theano_flags={flags!r} is not understood: {problem}. Use a dictionary of Theano's flags, "
        'such as {"optimizer": "fast_compile", "openmp": True}.'
    )


def importer() -> "Optional[str]":
    """Return the name of the module that imported Theano, or None.

    It is the last one that was begun before Theano and refers to it. From Python 3.8 on the order
    of modules is that in which their imports ended, so it remains unknown.
    """
    importer = None
    for name, module in list(sys.modules.items()):  # in the order in which they were begun
        if name.partition(".")[0] == "theano":
            return importer if name == "theano" else None
        values = list(getattr(module, "__dict__", {}).values())
        defined = [v for v in values if isinstance(v, (type, types.FunctionType))]
        modules = [getattr(v, "__name__", "") for v in values if isinstance(v, types.ModuleType)]
        modules += [getattr(v, "__module__", "") for v in defined]
        if any(str(module).partition(".")[0] == "theano" for module in modules):
            importer = name
    return None
