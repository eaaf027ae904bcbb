"""Theano, under Keras 2.0 to 2.3: its flags before the import, ``theano.config`` after it.

What a flag is and which files hold it: ``_theano_flags.py``. How a model runs on several of
Theano's contexts: ``_theano_contexts.py``.
"""

import logging
import os
import re
import shutil
import sys
import types

from .. import _detect, _keras, _launchers, _ranks, errors
from ..backend import Backend
from . import _theano_flags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings
    from .._verification import Verification

_DEVICES = "cuda", "opencl"
_FLOATX = "float16", "float32", "float64", "16", "32", "64"
_BOOLEANS = ("True", "true", "1", "False", "false", "0")


class Theano(Backend):
    """GPUs as ``device=cuda0`` and, for several, ``contexts=dev0->cuda0;dev1->cuda1``, too.

    A Keras model runs on the first GPU, unless ``parallelize`` puts it on all of them; the
    contexts are for other code, too (``theano.shared(..., target="dev1")``).

    ``memory=`` maps to ``gpuarray.preallocate``, which reserves memory when a GPU comes up:
    a fraction (Theano takes .95 at most) or a size. It is no upper limit. "grow" reserves
    nothing, Theano's default.

    ``theano_flags={"optimizer": "fast_compile"}`` sets any other of Theano's flags.

    ``persist=True`` writes what was chosen to ``~/.theanorc``, or to the last file that
    ``THEANORC`` names, which goes before the others. GPUs are numbered there as without compat:
    inside ``CUDA_VISIBLE_DEVICES``, if that is set. The file as it was stays beside it as
    ``.before-compat``.
    """

    name = "theano"
    framework = "theano"
    distributions = ("theano",)
    extra = "theano"
    options = ("theano_flags",)
    configuration_file = "~/.theanorc"
    variables = (
        "THEANO_FLAGS",
        "THEANORC",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_ROOT",
        "OMP_NUM_THREADS",
        "THEANO_GPU_IS_ALREADY_ACTIVE",
    )

    def __init__(self) -> None:
        self._simulated = 0

    # Configuring ------------------------------------------------------------------------------

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        variables = dict(settings.devices.environ(environ))
        flags = self._flags(settings, environ, range(len(settings.devices.gpus)))
        before = environ.get("THEANO_FLAGS", "")
        merged = _theano_flags.merge_flags(before, flags)
        if merged != before:
            variables["THEANO_FLAGS"] = merged
        return variables

    def overruled(self, settings: "Settings", environ: "Mapping[str, str]") -> "List[str]":
        """A GPU named in a flag or a file, where none is used, nor was declined."""
        if settings.devices.declined or settings.devices.simulated:
            return []
        said = _theano_flags.Flags(environ).get("device") or "cpu"
        if _keeps_devices(settings, _theano_flags.Flags(environ)):
            return []
        device = self._flags(settings, environ, range(len(settings.devices.gpus)))["device"]
        if device == "cpu" and not said.startswith("cpu"):
            return [errors.theano_device_overruled(said, "CPU")]
        return []

    def initialised(self) -> "Optional[str]":
        # Theano reads its flags in this module, first of all.
        if "theano.configparser" not in sys.modules:
            return None
        importer = _importer()
        return "theano was imported" + (" (by {})".format(importer) if importer else "")

    def import_framework(self) -> "Any":
        if _ranks.own_place():
            from . import _mpi

            _mpi.leave_to_engine()  # Theano imports mpi4py.MPI where it can
        return super().import_framework()

    def configure(self, settings: "Settings") -> "List[str]":
        failure = _Failure()
        logger = logging.getLogger("theano.gpuarray")
        logger.addHandler(failure)
        try:
            theano = self.import_framework()
        finally:
            logger.removeHandler(failure)
        devices = settings.devices
        flags = self._flags(settings, os.environ, devices.ordinals(os.environ))
        lines = self._apply(theano, flags, settings)
        self._simulated = devices.simulated
        if settings.memory and not devices.gpus and "gpuarray.preallocate" not in flags:
            lines.append("memory={}: there is no GPU to reserve it on".format(settings.memory))
        lines += _check_gpus(theano, failure.error, settings)
        said = _theano_flags.Flags(os.environ)
        settings.warnings += self._misspelled(theano, said)
        lines += ["{} is read, too".format(p) for p in said.files]
        if settings.persist:
            # The file is read without what this process has set.
            environ = dict(os.environ, THEANO_FLAGS="")
            flags = self._flags(settings, environ, devices.positions)
            path = _theano_flags.file_to_write(environ)
            before = [other for other in _theano_flags.files(environ) if other != path]
            lines.append(_written(path, _theano_flags.write(path, flags, before)))
        return lines

    def _flags(self, settings, environ, ids):
        """The flags that say what was asked, with Theano's numbers of the GPUs."""
        options = _checked(settings.options.get("theano_flags", {}))
        said = _theano_flags.Flags(environ)
        gpuarray = self._gpuarray()
        names = ["{}{}".format("cuda" if gpuarray else "gpu", i) for i in ids]
        flags = {"device": names[0] if names else "cpu"}
        keeps = _keeps_devices(settings, said)
        if keeps:
            del flags["device"]
        if len(names) > 1 and gpuarray:
            pairs = ("dev{}->{}".format(*pair) for pair in enumerate(names))
            flags["contexts"] = ";".join(pairs)
        for other in ("contexts", "init_gpu_device"):  # both would bring up further GPUs
            if other not in flags and said.get(other) and not keeps:
                flags[other] = ""
        if settings.memory and (names or keeps):
            name = "gpuarray.preallocate" if gpuarray else "lib.cnmem"
            flags[name] = _megabytes(settings.memory)
        if settings.floatx:
            flags["floatX"] = settings.floatx
        if _launchers.launched(environ):
            # Ranks compile the same at the same time, and by itself Theano waits 5 to 10 seconds
            # before it looks for its lock again; so long it stays another's, as ever.
            for name, seconds in (("compile.wait", "1"), ("compile.timeout", "120")):
                if not said.get(name):
                    flags[name] = seconds
        flags.update(options)
        return flags

    def _misspelled(self, theano, said):
        """A sentence for each flag that is none of Theano's, but close to one.

        Others may be those of another version, in a file for several: ``compat env`` tells them.
        """
        defined = [parameter.fullname for parameter in theano.configparser._config_var_list]
        wrong = [pair for pair in said.spelled_as(defined) if pair[0].strip() not in defined]
        if not wrong:
            return []
        from .. import _spelling

        return [
            self._no_flag(name.strip(), value, defined)
            for name, value in wrong
            if _spelling.closest(name, defined)
        ]

    def _gpuarray(self):
        """Whether this Theano has the GPU back-end that came with 0.9."""
        return _detect.release(_detect.installed_version(self) or "1.0") >= (0, 9)

    def _apply(self, theano, flags, settings):
        """Make ``theano.config`` say what the flags say.

        Before the import all of them were set; after it some can still be changed.
        """
        known = {p.fullname: p for p in theano.configparser._config_var_list}
        changes, late = {}, []
        for name, text in flags.items():
            parameter = known.get(name)
            try:
                if parameter is None:
                    raise ValueError("Theano {} has no flag {}".format(theano.__version__, name))
                value = parameter.filter(text) if parameter.filter else text
            except ValueError as error:
                asked = settings.options.get("theano_flags")
                raise errors.theano_flags_invalid(asked, error) from error
            if parameter.__get__(True, None) == value:
                continue
            if parameter.allow_override:
                changes[name] = value
            else:
                late.append(name)
        if late:
            raise errors.too_late(
                self.framework,
                "{} {} fixed when {}".format(
                    " and ".join(late), "was" if len(late) == 1 else "were", self.initialised()
                ),
                "Call it before the first `import theano` or `import keras`.",
            )
        for name, value in changes.items():
            known[name].__set__(None, value)
        if settings.floatx and "keras" not in sys.modules:
            # Keras gives theano.config.floatX its own value when it is imported (keras#3772).
            _keras.set_floatx(settings.floatx, self)
            known["floatX"].__set__(None, settings.floatx)
        if changes:
            # Theano keeps the mode that it made of mode, optimizer and linker for its first
            # function, and would not look at them again.
            theano.compile.mode.instantiated_default_mode = None
        how = {name: " (set at run time)" for name in changes}
        return ["theano.config.{} = {}{}".format(n, t, how.get(n, "")) for n, t in flags.items()]

    def devices(self) -> "List[str]":
        """``["cuda0", ...]`` for the GPUs that came up, ``["cpu"]``, or one name for each simulated
        device (``"cpu:0"``): functions and weights of its own, on the one CPU."""
        theano = self.import_framework()
        up = [gpu for context, gpu in _contexts(theano.config) if context in _active(theano)]
        simulated = ["cpu:{}".format(number) for number in range(self._simulated)]
        return sorted(set(up), key=up.index) or simulated or ["cpu"]

    def _target(self, device):
        """What Theano calls the place of ``device``: a context, or the CPU."""
        contexts = {
            gpu: context for context, gpu in reversed(_contexts(self.import_framework().config))
        }
        return contexts.get(device, "cpu")

    # Parallelizing ----------------------------------------------------------------------------

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Run ``model`` on ``devices``, the same object; see ``_theano_contexts.py``.

        BatchNorm normalises each device's rows by their own statistics; its moving averages are
        those of the whole batch. Dropout masks of the devices are independent. A stateful RNN keeps
        one state per row of the batch, as on one device. What computes across the rows of a batch,
        and all that follows from it, runs on the first device, with a warning.

        Functions of the user's own (``K.function``) run on the first device, undivided.

        While a device's functions are made or called its context is Theano's default one, also
        in other threads.

        Raises:
            UnsupportedError: an input is a tensor of the user's, and not fed. Or, with the first
                batch: the inputs have different numbers of rows, or a part of a batch fails.
        """
        from . import _theano_contexts  # imports numpy

        current = vars(model).get("_compat_functions")
        plain = self.devices()[:1]
        if list(devices) == ([d.name for d in current.devices] if current else plain):
            return model
        if any(hasattr(tensor, "get_value") for tensor in model.inputs or ()):
            raise errors.theano_input_not_fed(model.name)
        with _keras.training_goes_on(model):
            if current is not None:
                current.uninstall()
            if list(devices) != plain:
                replicas = [_theano_contexts.Device(name, self._target(name)) for name in devices]
                _theano_contexts.ReplicatedFunctions(model, replicas).install()
        return model

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        from . import _theano_verification

        _theano_verification.VerifiedStep.install_on(model, verification)

    def launcher(self, launch: "Launch") -> "List[str]":
        from . import _mpi

        return _mpi.launcher(launch)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """Train ``model`` together with the other ranks; see ``_theano_ranks.py``.

        BatchNorm normalises each rank's rows by their own statistics, and its moving averages take
        one step to the mean of theirs.

        Raises:
            NotInstalledError: mpi4py is missing.
            RankError: MPI sees other ranks than the launcher started.
        """
        from . import _theano_ranks  # imports numpy

        return _theano_ranks.distribute(model, ranks)

    # Reporting --------------------------------------------------------------------------------

    def problems(self, environ: "Mapping[str, str]") -> "List[str]":
        found = []
        for path in _theano_flags.files(environ) if "THEANORC" in environ else []:
            if not os.path.exists(path):
                found.append("THEANORC names {}, which does not exist.".format(path))
        if environ.get("THEANO_GPU_IS_ALREADY_ACTIVE"):
            found.append(
                "THEANO_GPU_IS_ALREADY_ACTIVE is set: a process that uses a GPU started this one, "
                "and Theano will use none here."
            )
        if not shutil.which("g++", path=environ.get("PATH")):
            found.append("g++ is not on PATH: Theano runs everything in Python, slowly.")
        try:
            flags = _theano_flags.split_flags(environ.get("THEANO_FLAGS", ""))
            for name, value in flags:
                found += _ignored("THEANO_FLAGS", name, value)
            said = _theano_flags.Flags(environ)
            defined = self._defined()
            for name, value in said.spelled_as(defined):
                name, value = name.strip(), value.strip()
                if defined and name not in defined:
                    found.append(self._no_flag(name, value, defined))
                else:
                    found += self._refused(name, value, defined.get(name))
            found += self._not_up(said.get("device") or "cpu", environ)
            if not any(problem.startswith("floatX=") for problem in found):
                found += _overruled(said.get("floatX"), environ)
        except errors.CompatError as error:
            found.append(str(error))
        return found

    def _defined(self):
        """The flags of the installed Theano, and what each takes; none where that is not known."""
        import importlib.util

        spec = importlib.util.find_spec("theano")
        version = _detect.installed_version(self)
        if spec is None or not spec.origin or not version or _detect.release(version) < (1, 0):
            return {}  # of others some flags are defined elsewhere
        path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
        return _theano_flags.defined(path)

    def _no_flag(self, name, value, defined):
        from .. import _spelling

        version = _detect.installed_version(self)
        return errors.theano_has_no_flag(name, value, version, _spelling.closest(name, defined))

    def _not_up(self, device, environ):
        """Why the device of the flags cannot be brought up, in no sentence or one."""
        import importlib.util

        from .. import _devices

        if not (self._gpuarray() and device.startswith(("cuda", "opencl"))):
            return []
        if importlib.util.find_spec("pygpu") is None:
            return [errors.theano_device_without_pygpu(device)]
        everything = _devices.choose(_devices.parse_gpus(None), None, environ)
        if device.startswith("cuda") and not everything.gpus and not everything.shortage:
            return [errors.theano_device_without_gpu(device)]
        return []

    def _refused(self, name, value, choices):
        """Why Theano refuses this value, in no sentence or one.

        Arguments:
            choices: the values that it takes, or None.
        """
        if choices and value not in choices:
            return ["{}={}: Theano takes {}.".format(name, value, " or ".join(choices))]
        if name == "floatX" and value not in _FLOATX:
            return ["floatX={}: Theano takes float16, float32 or float64.".format(value)]
        if value in _BOOLEANS or name == "dnn.enabled":
            return []
        if value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return [
                "{}={}: Theano takes {} only for yes or no.".format(
                    name, value, ", ".join(_BOOLEANS)
                )
            ]
        if name in ("device", "init_gpu_device"):
            wrong, right = ("gpu", "cuda") if self._gpuarray() else ("cuda", "gpu")
            if value.startswith(wrong):
                return [
                    "{}={}: this version of Theano calls it {}.".format(
                        name, value, right + (value[len(wrong) :] or "0")
                    )
                ]
            if self._gpuarray() and value not in ("cpu", "") and not value.startswith(_DEVICES):
                return ["{}={}: Theano takes cpu, cuda0 or opencl0:0.".format(name, value)]
        return []


backend = Theano()


# Flags ----------------------------------------------------------------------------------------


def _keeps_devices(settings, said):
    """Whether the user's flags name OpenCL's GPUs, of which no command of a driver tells."""
    names = ("device", "contexts", "init_gpu_device")
    opencl = any("opencl" in (said.get(name) or "") for name in names)
    return settings.devices.undecided is not None and opencl


def _checked(flags):
    """``theano_flags=`` with all values as texts."""
    if not isinstance(flags, dict):
        raise errors.theano_flags_invalid(flags, "it is a {}".format(type(flags).__name__))
    for name, value in flags.items():
        if not (isinstance(name, str) and re.match(r"[A-Za-z_]\w*(\.\w+)*\Z", name)):
            raise errors.theano_flags_invalid(flags, "{!r} is no name of a flag".format(name))
        if name == "floatX":
            raise errors.theano_flags_invalid(flags, "floatX is set by floatx=")
        text = str(value)
        if not isinstance(value, (str, bool, int, float)) or text != text.strip() or "\n" in text:
            raise errors.theano_flags_invalid(
                flags, "{!r} is neither a number, True, False, nor one line of text".format(value)
            )
    return {name: str(value) for name, value in flags.items()}


def _megabytes(memory):
    """What ``gpuarray.preallocate`` takes: up to 1 a fraction, at most .95; above 1 megabytes."""
    if memory.size:
        return "{:.15g}".format(max(2, memory.size / 2.0**20))
    return "{:g}".format(min(memory.fraction or 0, 0.95))


def _written(path, backup):
    if backup == path:
        return "{} says so already".format(path)
    return "{} written{}".format(path, ", as it was: {}".format(backup) if backup else "")


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


def _importer():
    """The module that imported Theano, or None: the last one begun before it that refers to it.

    From Python 3.8 on, modules stand in the order in which they were done, which does not tell.
    """
    importer = None
    for name, module in list(sys.modules.items()):  # in the order in which they were begun
        if name == "theano":
            return importer
        if name.startswith("theano."):
            return None
        if any(map(_is_theanos, list(getattr(module, "__dict__", {}).values()))):
            importer = name
    return None


def _is_theanos(value):
    if isinstance(value, types.ModuleType):
        name = value.__dict__.get("__name__")
    elif isinstance(value, (type, types.FunctionType)):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "theano"


# GPUs -----------------------------------------------------------------------------------------


class _Failure(logging.Handler):
    """Keeps the error that Theano only logs when a GPU does not come up."""

    error = None  # type: Optional[BaseException]

    def emit(self, record: "logging.LogRecord") -> None:
        if record.exc_info:
            self.error = record.exc_info[1] or self.error


def _contexts(config):
    """Context and GPU, for each that the flags ask for; None is the default context."""
    asked = [(None, config.device)] if config.device != "cpu" else []
    for entry in filter(None, getattr(config, "contexts", "").split(";")):
        name, _, gpu = entry.partition("->")
        asked.append((name.strip(), gpu.strip()))
    return asked


def _active(theano):
    """The contexts whose GPU came up."""
    if theano.config.device.startswith("gpu"):  # the back-end of Theano 0.8
        cuda = sys.modules.get("theano.sandbox.cuda")
        return {None} if getattr(cuda, "cuda_enabled", False) else set()
    gpuarray = getattr(theano, "gpuarray", None)
    if gpuarray is None or not gpuarray.pygpu_activated:
        return set()
    return set(gpuarray.type.list_contexts())


def _check_gpus(theano, failure, settings):
    """Say aloud that a GPU did not come up: Theano logs it, and goes on with the CPU.

    Returns:
        Lines for the report.
    """
    active = _active(theano)
    if active and hasattr(theano, "gpuarray"):
        # Theano 1.0.5 says "Mapped name dev0", but registers no second name for one GPU.
        up = theano.gpuarray.init_dev.devmap
        for name, gpu in _contexts(theano.config):
            if name not in active and gpu in up:
                theano.gpuarray.type.reg_context(name, up[gpu])
        active = _active(theano)
    down = [gpu for context, gpu in _contexts(theano.config) if context not in active]
    if not down:
        return []
    gpus = ", ".join(sorted(set(down), key=down.index))
    problem, remedy = _reason(theano, failure)
    error = errors.device_failed("theano", gpus, problem, remedy)
    if settings.strict:
        raise error from failure
    settings.warnings.append(str(error))
    return ["{} did not come up: {}".format(gpus, problem)]


def _reason(theano, failure):
    """Why a GPU did not come up, and what to do."""
    if failure is not None:
        texts = [a.decode("utf-8", "replace") if isinstance(a, bytes) else a for a in failure.args]
        return (
            ", ".join(map(str, texts)),
            "Look at the driver (nvidia-smi) and at CUDA (CUDA_ROOT), or choose the CPU: gpus=0.",
        )
    if getattr(getattr(theano, "gpuarray", None), "pygpu", theano) is None:
        return (
            "the package pygpu is missing, or older than 0.7",
            "Install libgpuarray and pygpu 0.7, or choose the CPU: gpus=0.",
        )
    return (
        "theano logged the reason when it was imported",
        "Look at its log, or call configure_gpu() before `import theano`.",
    )
