"""What Theano will not take as it was meant: flags of its environment and its files."""

import importlib.util
import os

from ... import errors
from ..._configuration import detection, device_choice, gpu_selection, packages
from . import theano_flags

_DEVICES = "cuda", "opencl"
_FLOATX = "float16", "float32", "float64", "16", "32", "64"
_BOOLEANS = ("True", "true", "1", "False", "false", "0")


def found(environ, version):
    """A sentence for each flag that Theano ignores or refuses, or that comes to nothing.

    Arguments:
        version: Theano's, or None.
    """
    problems = []
    try:
        entries = theano_flags.split_flags(environ.get("THEANO_FLAGS", ""))
        problems += [_ignored(name, value) for name, value in entries]
        said, known = theano_flags.Flags(environ), defined(version)
        for name, value in said.spelled_as(known):
            problems.append(_wrong(name, value, known, version))
        problems.append(_not_up(said.get("device") or "cpu", environ))
        problems.append(_overruled((said.get("floatX") or "").strip(), environ))
    except errors.CompatError as error:
        problems.append(str(error))
    return [problem for problem in problems if problem]


def misspelled(said, known, version):
    """A sentence for each flag that is none of Theano's, but close to one.

    Others may be those of another version, in a file for several: ``compat env`` tells them.

    Arguments:
        said: the flags, a ``theano_flags.Flags``.
        known: the names of those that the imported Theano has.
    """
    return [
        _no_flag(name, value, known, version)
        for name, value in said.spelled_as(known)
        if name not in known and _closest(name, known)
    ]


def defined(version):
    """The flags of the installed Theano, and what each takes; none where that is not known."""
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin or not version or packages.release(version) < (1, 0):
        return {}  # of others some flags are defined elsewhere
    return theano_flags.defined(os.path.join(os.path.dirname(spec.origin), "configdefaults.py"))


def _no_flag(name, value, known, version):
    meant = _closest(name, known)
    text = f"{name}={value}: Theano {version} has no flag {name}, and ignores it."
    return text + (f" Did you mean {meant}?" if meant else "")


def _closest(name, known):
    from ..._configuration import spelling  # here for start-up time

    return spelling.closest(name, known)


def _not_up(device, environ):
    """Why the device of the flags cannot be brought up, as a sentence, or None."""
    if not device.startswith(_DEVICES):
        return None
    if importlib.util.find_spec("pygpu") is None:
        return (
            f"device={device}: Theano needs the package pygpu for it, which is not installed, "
            "and goes on with the CPU. Install libgpuarray and pygpu 0.7, in a conda environment: "
            "conda install pygpu=0.7"
        )
    everything = device_choice.choose(gpu_selection.parse_gpus(None), None, environ)
    if device.startswith("cuda") and not everything.gpus and not everything.shortage:
        return (
            f"device={device}: no GPU is visible, and Theano goes on with the CPU. To say so: "
            + _overruling("device", "cpu")
        )
    return None


def _wrong(name, value, known, version):
    """Why Theano does not take this value, and what to type for one that it takes; or None.

    Arguments:
        known: Theano's flags, and the values that each takes, or None.
    """
    if known and name not in known:
        return _no_flag(name, value, known, version)
    choices, lower = known.get(name), value.lower()
    if choices and value not in choices:
        why, right = f"Theano takes {' or '.join(choices)}. For example", choices[0]
    elif name == "floatX" and value not in _FLOATX:
        why, right = "Theano takes float16, float32 or float64. For example", "float32"
    elif value in _BOOLEANS or name == "dnn.enabled":
        return None
    elif lower in ("yes", "no", "on", "off", "true", "false"):
        why = f"Theano takes {', '.join(_BOOLEANS)} only for yes or no"
        right = str(lower in ("yes", "on", "true"))
    elif name not in ("device", "init_gpu_device"):
        return None
    elif value.startswith("gpu"):  # as before Theano 0.9
        right = "cuda" + (value[3:] or "0")
        why = f"this version of Theano calls it {right}"
    elif value not in ("cpu", "") and not value.startswith(_DEVICES):
        why, right = "Theano takes cpu, cuda0 or opencl0:0. For example", "cpu"
    else:
        return None
    return f"{name}={value}: {why}: {_overruling(name, right)}"


def _overruling(name, value):
    """What to type for another value: of entries of THEANO_FLAGS, and of files, the last counts."""
    return f'export THEANO_FLAGS="$THEANO_FLAGS,{name}={value}"'


def _ignored(name, value):
    """Why Theano ignores this entry of THEANO_FLAGS, as a sentence, or None."""
    if value is None:
        return f"THEANO_FLAGS: {name!r} has no value, Theano ignores it."
    entry, name, value = f"{name}={value}", name.strip(), value.strip()
    if entry != f"{name}={value}":
        return (
            f"THEANO_FLAGS: {entry!r} has a space beside its '=', Theano does not take it for "
            f"{name}. Write {name}={value}."
        )
    return None


def _overruled(floatx, environ):
    """That Keras will not leave ``floatX`` as it is, as a sentence, or None."""
    path = detection.keras_json(environ)
    keras = detection.read_keras_json(path).get("floatx", "float32")
    if floatx not in _FLOATX or floatx[-2:] == keras[-2:]:  # Theano knows "32", too
        return None
    return (
        f"floatX={floatx}: Keras sets {keras} when it is imported, as {path} says or by default. "
        "Pass floatx= to configure_gpu(), which sets both."
    )
