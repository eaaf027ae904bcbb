"""What Theano will not take as it was meant: flags of its environment and its files."""

import importlib.util
import os

from ... import _detect, _devices, _distributions, _selection, errors
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
            problems += _ignored("THEANO_FLAGS", name, value)
        said = theano_flags.Flags(environ)
        known = defined(version)
        for name, value in said.spelled_as(known):
            name, value = name.strip(), value.strip()
            if known and name not in known:
                problems.append(_no_flag(name, value, known, version))
            else:
                problems += _refused(name, value, known.get(name), has_gpuarray(version))
        problems += _not_up(said.get("device") or "cpu", environ, version)
        if not any(problem.startswith("floatX=") for problem in problems):
            problems += _overruled(said.get("floatX"), environ)
    except errors.CompatError as error:
        problems.append(str(error))
    return problems


def misspelled(said, known, version):
    """A sentence for each flag that is none of Theano's, but close to one.

    Others may be those of another version, in a file for several: ``compat env`` tells them.

    Arguments:
        said: the flags, a ``theano_flags.Flags``.
        known: the names of those that the imported Theano has.
    """
    wrong = [pair for pair in said.spelled_as(known) if pair[0].strip() not in known]
    if not wrong:
        return []
    from ... import _spelling  # here for start-up time

    return [
        _no_flag(name.strip(), value, known, version)
        for name, value in wrong
        if _spelling.closest(name, known)
    ]


def has_gpuarray(version):
    """Whether Theano of this version has the GPU back-end that came with 0.9."""
    return _distributions.release(version or "1.0") >= (0, 9)


def defined(version):
    """The flags of the installed Theano, and what each takes; none where that is not known."""
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin or not version or _distributions.release(version) < (1, 0):
        return {}  # of others some flags are defined elsewhere
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    return theano_flags.defined(path)


def _no_flag(name, value, known, version):
    from ... import _spelling  # here for start-up time

    meant = _spelling.closest(name, known)
    return "{}={}: Theano {} has no flag {}, and ignores it.{}".format(
        name, value, version, name, " Did you mean {}?".format(meant) if meant else ""
    )


def _not_up(device, environ, version):
    """Why the device of the flags cannot be brought up, in no sentence or one."""
    if not (has_gpuarray(version) and device.startswith(("cuda", "opencl"))):
        return []
    if importlib.util.find_spec("pygpu") is None:
        return [
            "device={}: Theano needs the package pygpu for it, which is not installed, "
            "and goes on with the CPU. Install libgpuarray and pygpu 0.7, in a conda environment: "
            "conda install pygpu=0.7".format(device)
        ]
    everything = _devices.choose(_selection.parse_gpus(None), None, environ)
    if device.startswith("cuda") and not everything.gpus and not everything.shortage:
        return [
            "device={}: no GPU is visible, and Theano goes on with the CPU. To say so: {}".format(
                device, _overruling("device", "cpu")
            )
        ]
    return []


def _refused(name, value, choices, gpuarray):
    """Why Theano refuses this value, in no sentence or one.

    Arguments:
        choices: the values that it takes, or None.
        gpuarray: whether it has that back-end.
    """
    if choices and value not in choices:
        return [
            "{}={}: Theano takes {}. For example: {}".format(
                name, value, " or ".join(choices), _overruling(name, choices[0])
            )
        ]
    if name == "floatX" and value not in _FLOATX:
        return [
            "floatX={}: Theano takes float16, float32 or float64. For example: {}".format(
                value, _overruling("floatX", "float32")
            )
        ]
    if value in _BOOLEANS or name == "dnn.enabled":
        return []
    if value.lower() in ("yes", "no", "on", "off", "true", "false"):
        meant = "True" if value.lower() in ("yes", "on", "true") else "False"
        return [
            "{}={}: Theano takes {} only for yes or no: {}".format(
                name, value, ", ".join(_BOOLEANS), _overruling(name, meant)
            )
        ]
    if name in ("device", "init_gpu_device"):
        wrong, right = ("gpu", "cuda") if gpuarray else ("cuda", "gpu")
        if value.startswith(wrong):
            right += value[len(wrong) :] or "0"
            return [
                "{}={}: this version of Theano calls it {}: {}".format(
                    name, value, right, _overruling(name, right)
                )
            ]
        if gpuarray and value not in ("cpu", "") and not value.startswith(_DEVICES):
            return [
                "{}={}: Theano takes cpu, cuda0 or opencl0:0. For example: {}".format(
                    name, value, _overruling(name, "cpu")
                )
            ]
    return []


def _overruling(name, value):
    """What to type for another value: of entries of THEANO_FLAGS, and of files, the last counts."""
    return 'export THEANO_FLAGS="$THEANO_FLAGS,{}={}"'.format(name, value)


def _ignored(where, name, value):
    """Why Theano ignores this entry, in no sentence or one."""
    if value is None:
        return ["{}: {!r} has no value, Theano ignores it.".format(where, name)]
    if name != name.strip() or value != value.strip():
        return [
            "{}: {!r} has a space beside its '=', Theano does not take it for {}. Write "
            "{}={}.".format(where, name + "=" + value, name.strip(), name.strip(), value.strip())
        ]
    return []


def _overruled(floatx, environ):
    """That Keras will not leave ``floatX`` as it is, in no sentence or one."""
    path = _detect.keras_json(environ)
    keras = _detect.read_keras_json(path).get("floatx", "float32")
    if floatx is None or floatx.strip()[-2:] == keras[-2:]:  # Theano knows "32", too
        return []
    return [
        "floatX={}: Keras sets {} when it is imported, as {} says or by default. Pass floatx= to "
        "configure_gpu(), which sets both.".format(floatx, keras, path)
    ]
