"""What Theano will not take as it was meant: flags of its environment and its files."""

import contextlib
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
    try:
        yield from _ignored(theano_flags.split_flags(environ.get("THEANO_FLAGS", "")))
        said, known = theano_flags.Flags(environ), defined(version)
        for name, value in said.spelled_as(known):
            yield from _wrong(name, value, known, version)
        if theano_flags.has_gpuarray(version):
            yield from _not_up(said.get("device") or "cpu", environ)
        yield from _overruled((said.get("floatX") or "").strip(), environ)
    except errors.CompatError as error:
        yield str(error)


def misspelled(said, known, version):
    """A sentence for each flag that is none of Theano's, but close to one.

    Others may be those of another version, in a file for several: ``compat env`` tells them.

    Arguments:
        said: the flags, a ``theano_flags.Flags``.
        known: the names of those that the imported Theano has.
    """
    unknown = [pair for pair in said.spelled_as(known) if pair[0] not in known]
    problems = [_no_flag(*pair, known, version) for pair in unknown]
    return [problem for problem in problems if problem.endswith("?")]


def defined(version):
    """The flags of the installed Theano, and the values that each takes, or None: see there.

    Read from its ``configdefaults.py``, since importing that configures Theano and may bring up a
    GPU. No flags where they are not known.
    """
    import ast  # here for start-up time

    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin or not version or packages.release(version) < (1, 0):
        return {}  # of others some flags are defined elsewhere
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    flags = {}  # type: dict
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "AddConfigVar":
            with contextlib.suppress(ValueError):  # not written out
                name = ast.literal_eval(node.args[0])
                flags[name] = None
                parameter = node.args[2]  # type: Any
                # convert= makes other spellings of a value one of them.
                spelled = "convert" in [keyword.arg for keyword in parameter.keywords]
                if getattr(parameter.func, "id", None) == "EnumStr" and not spelled:
                    flags[name] = [ast.literal_eval(argument) for argument in parameter.args]
    return flags


def _no_flag(name, value, known, version):
    from ..._configuration import spelling  # here for start-up time

    meant = spelling.closest(name, known)
    text = f"{name}={value}: Theano {version} has no flag {name}, and ignores it."
    return text + (f" Did you mean {meant}?" if meant else "")


def _not_up(device, environ):
    """Why the device of the flags cannot be brought up, if it cannot."""
    if not device.startswith(_DEVICES):
        return
    if importlib.util.find_spec("pygpu") is None:
        yield (
            f"device={device}: Theano needs the package pygpu for it, which is not installed, "
            "and goes on with the CPU. Install libgpuarray and pygpu 0.7, in a conda environment: "
            "conda install pygpu=0.7"
        )
        return
    everything = device_choice.choose(gpu_selection.parse_gpus(None), None, environ)
    if device.startswith("cuda") and not everything.gpus and not everything.shortage:
        yield (
            f"device={device}: no GPU is visible, and Theano goes on with the CPU. To say so: "
            + _overruling("device", "cpu")
        )


def _wrong(name, value, known, version):
    """Why Theano does not take this value, if so, and what to type for one that it takes.

    Arguments:
        known: Theano's flags, and the values that each takes, or None.
    """
    if known and name not in known:
        yield _no_flag(name, value, known, version)
        return
    choices, is_device = known.get(name), name in ("device", "init_gpu_device")
    gpuarray = theano_flags.has_gpuarray(version)
    of_gpuarray = is_device and gpuarray
    is_word = value.lower() in ("yes", "no", "on", "off", "true", "false")
    if choices and value not in choices:
        why, right = f"Theano takes {' or '.join(choices)}. For example", choices[0]
    elif name == "floatX" and value not in _FLOATX:
        why, right = "Theano takes float16, float32 or float64. For example", "float32"
    elif is_word and value not in _BOOLEANS and name != "dnn.enabled":
        why = f"Theano takes {', '.join(_BOOLEANS)} only for yes or no"
        right = str(value.lower() in ("yes", "on", "true"))
    elif is_device and value.startswith("gpu" if gpuarray else "cuda"):
        right = "cuda" + (value[3:] or "0") if gpuarray else "gpu" + (value[4:] or "0")
        why = f"this version of Theano calls it {right}"
    elif of_gpuarray and value not in ("cpu", "", *_BOOLEANS) and not value.startswith(_DEVICES):
        why, right = "Theano takes cpu, cuda0 or opencl0:0. For example", "cpu"
    else:
        return
    yield f"{name}={value}: {why}: {_overruling(name, right)}"


def _overruling(name, value):
    """What to type for another value: of entries of THEANO_FLAGS, and of files, the last counts."""
    return f'export THEANO_FLAGS="$THEANO_FLAGS,{name}={value}"'


def _ignored(entries):
    """Why Theano ignores entries of THEANO_FLAGS."""
    for name, value in entries:
        if value is None:
            yield f"THEANO_FLAGS: {name!r} has no value, Theano ignores it."
        elif name != name.strip() or value != value.strip():
            entry, name, value = f"{name}={value}", name.strip(), value.strip()
            yield (
                f"THEANO_FLAGS: {entry!r} has a space beside its '=', Theano does not take it for "
                f"{name}. Write {name}={value}."
            )


def _overruled(floatx, environ):
    """That Keras will not leave ``floatX`` as it is, if so."""
    path = detection.keras_json(environ)
    keras = detection.read_keras_json(path).get("floatx", "float32")
    if floatx in _FLOATX and floatx[-2:] != keras[-2:]:  # Theano knows "32", too
        yield (
            f"floatX={floatx}: Keras sets {keras} when it is imported, as {path} says or by "
            "default. Pass floatx= to configure_gpu(), which sets both."
        )
