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
        for name, value in theano_flags.split_flags(environ.get("THEANO_FLAGS", "")):
            problems.append(_ignored(name, value))
        said = theano_flags.Flags(environ)
        known = defined(version)
        for name, value in said.spelled_as(known):
            name, value = name.strip(), value.strip()
            if known and name not in known:
                problems.append(_no_flag(name, value, known, version))
                continue
            problem = _refused(name, value, known.get(name), has_gpuarray(version))
            if problem is not None:
                problems.append("{}={}: {}: {}".format(name, value, *problem))
        problems.append(_not_up(said.get("device") or "cpu", environ, version))
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
        _no_flag(name.strip(), value, known, version)
        for name, value in said.spelled_as(known)
        if name.strip() not in known and _closest(name.strip(), known)
    ]


def has_gpuarray(version):
    """Whether Theano of this version has the GPU back-end that came with 0.9."""
    return packages.release(version or "1.0") >= (0, 9)


def defined(version):
    """The flags of the installed Theano, and what each takes; none where that is not known."""
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin or not version or packages.release(version) < (1, 0):
        return {}  # of others some flags are defined elsewhere
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    return theano_flags.defined(path)


def _no_flag(name, value, known, version):
    meant = _closest(name, known)
    return "{}={}: Theano {} has no flag {}, and ignores it.{}".format(
        name, value, version, name, " Did you mean {}?".format(meant) if meant else ""
    )


def _closest(name, known):
    from ..._configuration import spelling  # here for start-up time

    return spelling.closest(name, known)


def _not_up(device, environ, version):
    """Why the device of the flags cannot be brought up, as a sentence, or None."""
    if not (has_gpuarray(version) and device.startswith(_DEVICES)):
        return None
    if importlib.util.find_spec("pygpu") is None:
        return (
            "device={}: Theano needs the package pygpu for it, which is not installed, "
            "and goes on with the CPU. Install libgpuarray and pygpu 0.7, in a conda environment: "
            "conda install pygpu=0.7".format(device)
        )
    everything = device_choice.choose(gpu_selection.parse_gpus(None), None, environ)
    if device.startswith("cuda") and not everything.gpus and not everything.shortage:
        return (
            "device={}: no GPU is visible, and Theano goes on with the CPU. To say so: {}".format(
                device, _overruling("device", "cpu")
            )
        )
    return None


def _refused(name, value, choices, gpuarray):
    """Why Theano refuses this value, and what to type for one that it takes; or None.

    Arguments:
        choices: the values that it takes, or None.
        gpuarray: whether it has that back-end.
    """
    if choices and value not in choices:
        why, right = "Theano takes {}. For example".format(" or ".join(choices)), choices[0]
    elif name == "floatX" and value not in _FLOATX:
        why, right = "Theano takes float16, float32 or float64. For example", "float32"
    elif value in _BOOLEANS or name == "dnn.enabled":
        return None
    elif value.lower() in ("yes", "no", "on", "off", "true", "false"):
        why = "Theano takes {} only for yes or no".format(", ".join(_BOOLEANS))
        right = "True" if value.lower() in ("yes", "on", "true") else "False"
    elif name not in ("device", "init_gpu_device"):
        return None
    elif value.startswith("gpu" if gpuarray else "cuda"):
        right = "cuda" + (value[3:] or "0") if gpuarray else "gpu" + (value[4:] or "0")
        why = "this version of Theano calls it {}".format(right)
    elif gpuarray and value not in ("cpu", "") and not value.startswith(_DEVICES):
        why, right = "Theano takes cpu, cuda0 or opencl0:0. For example", "cpu"
    else:
        return None
    return why, _overruling(name, right)


def _overruling(name, value):
    """What to type for another value: of entries of THEANO_FLAGS, and of files, the last counts."""
    return 'export THEANO_FLAGS="$THEANO_FLAGS,{}={}"'.format(name, value)


def _ignored(name, value):
    """Why Theano ignores this entry of THEANO_FLAGS, as a sentence, or None."""
    if value is None:
        return "THEANO_FLAGS: {!r} has no value, Theano ignores it.".format(name)
    if name != name.strip() or value != value.strip():
        return (
            "THEANO_FLAGS: {!r} has a space beside its '=', Theano does not take it for {}. Write "
            "{}={}.".format(name + "=" + value, name.strip(), name.strip(), value.strip())
        )
    return None


def _overruled(floatx, environ):
    """That Keras will not leave ``floatX`` as it is, as a sentence, or None."""
    path = detection.keras_json(environ)
    keras = detection.read_keras_json(path).get("floatx", "float32")
    if floatx not in _FLOATX or floatx[-2:] == keras[-2:]:  # Theano knows "32", too
        return None
    return (
        "floatX={}: Keras sets {} when it is imported, as {} says or by default. Pass floatx= to "
        "configure_gpu(), which sets both.".format(floatx, keras, path)
    )
