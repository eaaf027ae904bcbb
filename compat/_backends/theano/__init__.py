"""Theano, under Keras 2.0 to 2.3: its flags before the import, ``theano.config`` after it.

What a flag is, where it is set and which ones say what was asked: ``flags.py``,
``theanorc.py``. How a model runs on several of Theano's contexts: ``replicas.py``.
"""

import logging
import os
import shutil
import sys
import types

from ... import _keras, _ranks, errors
from ..._configuration import detection
from ...backend import Backend
from . import flags as theano_flags
from . import theanorc


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

    # Configuring ------------------------------------------------------------------------------

    def environ(self, settings, environ):
        flags = theano_flags.asked(settings, environ, range(len(settings.devices.gpus)))
        before = environ.get("THEANO_FLAGS", "")
        merged = theano_flags.merge_flags(before, flags)
        changed = {} if merged == before else {"THEANO_FLAGS": merged}
        return dict(settings.devices.environ(environ), **changed)

    def overruled(self, settings, environ):
        """A GPU named in a flag or a file, where none is used, nor was declined."""
        device = theano_flags.Flags(environ).get("device") or "cpu"
        flags = theano_flags.asked(settings, environ, range(len(settings.devices.gpus)))
        asked = settings.devices.declined or settings.devices.simulated
        if asked or flags.get("device") != "cpu" or device.startswith("cpu"):
            return []
        remedy = "`compat env` tells which GPUs are visible."
        if not device.startswith(("cuda", "gpu")):
            option = f'{{"device": "{device}"}}'
            remedy = f"For a device that is no CUDA GPU pass theano_flags={option}."
        return [
            f"Theano's flags say device={device}, but compat chose CPU, so device=cpu was set. "
            + remedy
        ]

    def initialised(self):
        # Theano reads its flags in this module, first of all.
        if "theano.configparser" not in sys.modules:
            return None
        importer = _importer()
        return "theano was imported" + (f" (by {importer})" if importer else "")

    def import_framework(self):
        if _ranks.own_place():
            from ..._ranks.engines import mpi  # here for start-up time

            mpi.leave_to_engine()  # Theano imports mpi4py.MPI where it can
        return super().import_framework()

    def configure(self, settings):
        failure = Failure()
        logger = logging.getLogger("theano.gpuarray")
        logger.addHandler(failure)
        try:
            theano = self.import_framework()
        finally:
            logger.removeHandler(failure)
        devices = settings.devices
        flags = theano_flags.asked(settings, os.environ, devices.ordinals(os.environ))
        known = {p.fullname: p for p in theano.configparser._config_var_list}
        lines = self._apply(theano, flags, known, settings)
        self.kept["simulated"] = [f"cpu:{number}" for number in range(devices.simulated)]
        if settings.memory and not devices.gpus and "gpuarray.preallocate" not in flags:
            lines.append(f"memory={settings.memory}: there is no GPU to reserve it on")
        started, warnings = check(theano, failure.error, settings)
        lines += started
        said = theano_flags.Flags(os.environ)
        # Others may be those of another version, in a file for several: `compat env` tells them.
        version = detection.installed_version(self)
        warnings += theano_flags.unknown(said, known, version, only_misspelled=True)
        lines += [f"{p} is read, too" for p in said.files]
        if settings.persist:
            lines.append(self._written(settings))
        return lines, warnings

    def _written(self, settings):
        """Write the file; a line for the report. It is read without what this process has set."""
        environ = dict(os.environ, THEANO_FLAGS="")
        flags = theano_flags.asked(settings, environ, settings.devices.positions)
        path = theanorc.file_to_write(environ)
        before = [other for other in theano_flags.files(environ) if other != path]
        backup = theanorc.write(path, flags, before)
        if backup == path:
            return f"{path} says so already"
        return f"{path} written" + (f", as it was: {backup}" if backup else "")

    def _apply(self, theano, flags, known, settings):
        """Make ``theano.config`` say what the flags say.

        Before the import all of them were set; after it some can still be changed.

        Arguments:
            known: Theano's parameters, by their names.
        """
        changes = {}
        for name, text in flags.items():
            try:
                if name not in known:
                    raise ValueError(f"Theano {theano.__version__} has no flag {name}")
                value = known[name].filter(text) if known[name].filter else text
            except ValueError as error:
                raise theano_flags.invalid(settings.options.get("theano_flags"), error) from error
            if known[name].__get__(True, None) != value:
                changes[name] = value
        late = [name for name in changes if not known[name].allow_override]
        if late:
            were = "was" if len(late) == 1 else "were"
            raise errors.too_late(
                self.framework,
                f"{' and '.join(late)} {were} fixed when {self.initialised()}",
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
        return [
            f"theano.config.{name} = {text}" + " (set at run time)" * (name in changes)
            for name, text in flags.items()
        ]

    def devices(self):
        """``["cuda0", ...]`` for the GPUs that came up, ``["cpu"]``, or one name for each simulated
        device (``"cpu:0"``): functions and weights of its own, on the one CPU."""
        gpus = list(active_gpus(self.import_framework()))
        return gpus or list(self.kept.get("simulated", ())) or ["cpu"]

    # Parallelizing ----------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Run ``model`` on ``devices``, the same object; see ``replicas.py``.

        BatchNorm normalises each device's rows by their own statistics; its moving averages are
        those of the whole batch. Dropout masks of the devices are independent. A stateful RNN keeps
        one state per row of the batch, as on one device. What computes across the rows of a batch,
        and all that follows from it, runs on the first device, with a warning; so does all of a
        model whose inputs have different numbers of rows, or that fails for a part of a batch.

        Functions of the user's own (``K.function``) run on the first device, undivided.

        While a device's functions are made or called its context is Theano's default one, also
        in other threads.

        Raises:
            UnsupportedError: an input is a tensor of the user's, and not fed. Or, with the first
                batch and under ``strict=True``: what runs on the first device alone.
        """
        several = [] if list(devices) == self.devices()[:1] else devices
        contexts = active_gpus(self.import_framework())
        from . import replicas  # imports theano

        replicas.parallelize(model, [(gpu, contexts.get(gpu, "cpu")) for gpu in several])
        return model

    def verify(self, model, verification):
        from . import replicas  # imports theano

        replicas.verify(model, verification)

    def executed(self, model):
        """From the functions that Theano calls; see ``executed``."""
        from . import executions  # imports theano

        return executions.executed(vars(model)["_compat_functions"])

    def launcher(self, job):
        from ..._ranks.engines import mpi  # here for start-up time

        return mpi.launcher(job)

    def distribute(self, model, place):
        """See ``ranks`` and ``keras2.install``; NotInstalledError where mpi4py is missing."""
        from ..._ranks import keras2
        from ..._ranks.engines import mpi  # these import numpy
        from . import ranks

        kinds = ranks.MakeTheanoTrainFunction, keras2.MakeTestFunction
        keras2.install(model, mpi.MPI.join(place), kinds)
        return model

    # Reporting --------------------------------------------------------------------------------

    def problems(self, environ):
        found = [
            f"THEANORC names {path}, which does not exist. For Theano's own files: unset THEANORC"
            for path in (theano_flags.files(environ) if "THEANORC" in environ else [])
            if not os.path.exists(path)
        ]
        if environ.get("THEANO_GPU_IS_ALREADY_ACTIVE"):
            found.append(
                "THEANO_GPU_IS_ALREADY_ACTIVE is set: a process that uses a GPU started this one, "
                "and Theano will use none here. If it may: unset THEANO_GPU_IS_ALREADY_ACTIVE"
            )
        if not shutil.which("g++", path=environ.get("PATH")):
            found.append(
                "g++ is not on PATH: Theano runs everything in Python, slowly. On Debian and "
                "Ubuntu: apt-get install g++"
            )
        return found + list(theano_flags.problems(environ, detection.installed_version(self)))


backend = Theano()


def _importer():
    """The module that imported Theano, or None: the last one begun before it that refers to it.

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


# Whether the GPUs that Theano's flags name came up when it was imported ---------------------------


class Failure(logging.Handler):
    """Keeps the error that Theano only logs when a GPU does not come up."""

    error = None

    def emit(self, record):
        if record.exc_info:
            self.error = record.exc_info[1] or self.error


def _contexts(theano):
    """Context and GPU, for each that the flags ask for, None is the default; which are active."""
    config, gpuarray = theano.config, getattr(theano, "gpuarray", None)
    asked = [(None, config.device)] if config.device != "cpu" else []
    named = [entry.partition("->") for entry in config.contexts.split(";") if entry]
    asked += [(name.strip(), gpu.strip()) for name, _, gpu in named]
    active = gpuarray.type.list_contexts() if gpuarray and gpuarray.pygpu_activated else ()
    return asked, active


def active_gpus(theano):
    """The GPUs that came up, each with the first of its contexts."""
    asked, active = _contexts(theano)
    found = {}  # type: dict
    for context, gpu in asked:
        if context in active:
            found.setdefault(gpu, context)
    return found


def check(theano, failure, settings):
    """Report a GPU that did not come up: Theano logs it, and goes on with the CPU.

    Returns:
        Lines for the report, and warnings.
    """
    asked, active = _contexts(theano)
    for name, gpu in asked if active else ():
        # Theano 1.0.5 says "Mapped name dev0", but registers no second name for one GPU.
        up = theano.gpuarray.init_dev.devmap
        if name not in active and gpu in up:
            theano.gpuarray.type.reg_context(name, up[gpu])  # which makes it active
    gpus = ", ".join(dict.fromkeys(gpu for context, gpu in asked if context not in active))
    if not gpus:
        return [], []
    problem, remedy = reason(theano, failure)
    error = errors.device_failed("theano", gpus, problem, remedy)
    if settings.strict:
        raise error from failure
    return [f"{gpus} did not come up: {problem}"], [str(error)]


def reason(theano, failure):
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
