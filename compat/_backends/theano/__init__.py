"""Theano, under Keras 2.0 to 2.3: its flags before the import, ``theano.config`` after it."""

import logging
import os
import shutil
import sys
import types

from ... import _keras, _ranks, errors
from ..._configuration import detection
from ...backend import Backend
from . import configuration, flag_problems, flags, gpu_start, theanorc


class Theano(Backend):
    """The backend of Theano.

    GPUs are configured by ``device=cuda0`` and, if several, ``contexts=dev0->cuda0;dev1->cuda1``.

    A Keras model runs on the first GPU, unless ``parallelize`` puts it on all of them; the
    contexts are for other code, too (``theano.shared(..., target="dev1")``).

    ``memory=`` maps to ``gpuarray.preallocate``, which reserves memory when a GPU comes up:
    a fraction (Theano takes .95 at most) or a size. It is no upper limit. "grow" reserves
    nothing, Theano's default.

    ``theano_flags={"optimizer": "fast_compile"}`` sets any other of Theano's flags.

    ``persist=True`` writes the flags to ``~/.theanorc``, or to the last file that ``THEANORC``
    names, which takes precedence. GPUs are numbered there as without compat: inside
    ``CUDA_VISIBLE_DEVICES``, if that is set. A backup of the file stays beside it as
    ``.before-compat``.
    """

    name = "theano"
    framework = "theano"
    distributions = ("theano",)
    extra = "theano"
    synchronizes = ("devices",)
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
        """Return the variables to set before Theano is imported."""
        requested = configuration.requested_flags(
            settings, environ, range(len(settings.devices.gpus))
        )
        before = environ.get("THEANO_FLAGS", "")
        merged = flags.merge_flags(before, requested)
        changed = {} if merged == before else {"THEANO_FLAGS": merged}
        return dict(settings.devices.environ(environ), **changed)

    def overruled(self, settings, environ):
        """Return a warning if flags or files name a GPU that is neither used nor declined."""
        device = flags.Flags(environ).get("device") or "cpu"
        requested = configuration.requested_flags(
            settings, environ, range(len(settings.devices.gpus))
        )
        is_intended = settings.devices.declined or settings.devices.simulated
        if is_intended or requested.get("device") != "cpu" or device.startswith("cpu"):
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
        """Return why it is too late for flags, or None."""
        # Theano reads its flags in this module, first of all.
        if "theano.configparser" not in sys.modules:
            return None
        importer = configuration.importer()
        return "theano was imported" + (f" (by {importer})" if importer else "")

    def import_framework(self):
        """Import Theano; in a rank, leave MPI to the engine."""
        if _ranks.own_place():
            from ..._ranks.engines import mpi  # here for start-up time

            mpi.leave_to_engine()  # Theano imports mpi4py.MPI where it can
        return super().import_framework()

    def configure(self, settings):
        """Import Theano and apply the flags; return lines for the report, and warnings."""
        failure = gpu_start.Failure()
        logger = logging.getLogger("theano.gpuarray")
        logger.addHandler(failure)
        try:
            theano = self.import_framework()
        finally:
            logger.removeHandler(failure)
        devices = settings.devices
        requested = configuration.requested_flags(
            settings, os.environ, devices.ordinals(os.environ)
        )
        parameters = {p.fullname: p for p in theano.configparser._config_var_list}
        lines = self._apply(theano, requested, parameters, settings)
        self.kept["simulated"] = [f"cpu:{number}" for number in range(devices.simulated)]
        if settings.memory and not devices.gpus and "gpuarray.preallocate" not in requested:
            lines.append(f"memory={settings.memory}: there is no GPU to reserve it on")
        started, warnings = gpu_start.check(theano, failure.error, settings)
        lines += started
        in_force = flags.Flags(os.environ)
        # Others may be those of another version, in a file for several: `compat env` lists them.
        version = detection.installed_version(self)
        warnings += flag_problems.unknown(in_force, parameters, version, only_misspelled=True)
        lines += [f"{path} is read, too" for path in in_force.files]
        if settings.persist:
            lines.append(self._written(settings))
        return lines, warnings

    def _written(self, settings):
        """Write ``.theanorc``, without this process' flags; return a line for the report."""
        environ = dict(os.environ, THEANO_FLAGS="")
        requested = configuration.requested_flags(settings, environ, settings.devices.positions)
        path = theanorc.file_to_write(environ)
        before = [other for other in flags.files(environ) if other != path]
        backup = theanorc.write(path, requested, before)
        if backup == path:
            return f"{path} says so already"
        return f"{path} written" + (f", as it was: {backup}" if backup else "")

    def _apply(self, theano, requested, parameters, settings):
        """Apply the flags to ``theano.config``, and return lines for the report.

        Before the import all of them were set; after it some can still be changed.

        Arguments:
            theano: the module.
            requested: the flags, by name.
            parameters: Theano's parameters, by name.
            settings: the ``Settings``.

        Raises:
            TooLateError: some can no longer be changed.
        """
        changes = {}
        for name, text in requested.items():
            try:
                if name not in parameters:
                    raise ValueError(f"Theano {theano.__version__} has no flag {name}")
                value = parameters[name].filter(text) if parameters[name].filter else text
            except ValueError as error:
                raise configuration.invalid(settings.options.get("theano_flags"), error) from error
            if parameters[name].__get__(True, None) != value:
                changes[name] = value
        late = [name for name in changes if not parameters[name].allow_override]
        if late:
            were = "was" if len(late) == 1 else "were"
            raise errors.too_late(
                self.framework,
                f"{' and '.join(late)} {were} fixed when {self.initialised()}",
                "Call it before the first `import theano` or `import keras`.",
            )
        for name, value in changes.items():
            parameters[name].__set__(None, value)
        if settings.floatx and "keras" not in sys.modules:
            # Keras sets theano.config.floatX when it is imported (keras#3772).
            _keras.set_floatx(settings.floatx, self)
            parameters["floatX"].__set__(None, settings.floatx)
        if changes:
            # Theano caches the mode that it makes of mode, optimizer and linker for its first
            # function.
            theano.compile.mode.instantiated_default_mode = None
        return [
            f"theano.config.{name} = {text}" + " (set at run time)" * (name in changes)
            for name, text in requested.items()
        ]

    def devices(self):
        """Return ``["cuda0", ...]`` for the GPUs that came up, ``["cpu"]``, or simulated devices.

        A simulated one (``"cpu:0"``) has its own functions and weights, on the one CPU.
        """
        gpus = list(gpu_start.active_gpus(self.import_framework()))
        return gpus or list(self.kept.get("simulated", ())) or ["cpu"]

    # Parallelizing ----------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Run a model on devices, and return the same object; see ``replicas``.

        BatchNorm normalizes each device's rows by their own statistics unless it is synchronized;
        its moving averages are those of the whole batch. Dropout masks of the devices are
        independent. A stateful RNN keeps one state per row of the batch, as on one device. A sum,
        mean, maximum or minimum of the batch is reduced over the devices. Other cross-batch
        operations, and all that depend on them, run unsplit on the first device, with a warning; so
        does a model whose inputs have different numbers of rows, or that fails on a shard.

        User-defined functions (``K.function``) run unsplit on the first device.

        While a device's functions are made or called, its context is Theano's default one, also
        in other threads.

        Raises:
            UnsupportedError: an input is a user-defined tensor, and not fed. Or, with the first
                batch and under ``strict=True``: a part of the model runs unsplit.
        """
        several = [] if list(devices) == self.devices()[:1] else devices
        contexts = gpu_start.active_gpus(self.import_framework())
        from . import replicas  # imports theano

        replicas.parallelize(model, [(gpu, contexts.get(gpu, "cpu")) for gpu in several])
        return model

    def verify(self, model, verification):
        """Verify the first steps of a model from now on; with None, no longer."""
        from .verification import verify  # imports theano

        verify(model, verification)

    def executed(self, model):
        """Record the functions that Theano calls; see ``executions``."""
        from . import executions  # imports theano

        return executions.executed(vars(model)["_compat_replicas"])

    def launcher(self, job):
        """Return the command that starts ranks by MPI."""
        from ..._ranks.engines import mpi  # here for start-up time

        return mpi.launcher(job)

    def join(self, place):
        """Mark gradients from now on that a script computes before ``parallelize()``."""
        from . import ranks  # here for start-up time

        ranks.watch_gradients()

    def distribute(self, model, place):
        """Install a rank's methods on a model; see ``ranks``.

        Raises:
            NotInstalledError: mpi4py is missing.
        """
        from ..._ranks.engines import mpi  # these import numpy
        from . import ranks

        return ranks.distribute(model, mpi.MPI.join(place))

    # Reporting --------------------------------------------------------------------------------

    def problems(self, environ):
        """Return lines for what is wrong in the environment, each with a remedy."""
        lines = [
            f"THEANORC names {path}, which does not exist. For Theano's own files: unset THEANORC"
            for path in (flags.files(environ) if "THEANORC" in environ else [])
            if not os.path.exists(path)
        ]
        if environ.get("THEANO_GPU_IS_ALREADY_ACTIVE"):
            lines.append(
                "THEANO_GPU_IS_ALREADY_ACTIVE is set: a process that uses a GPU started this one, "
                "and Theano will use none here. If it may: unset THEANO_GPU_IS_ALREADY_ACTIVE"
            )
        if not shutil.which("g++", path=environ.get("PATH")):
            lines.append(
                "g++ is not on PATH: Theano runs everything in Python, slowly. On Debian and "
                "Ubuntu: apt-get install g++"
            )
        return lines + list(flag_problems.problems(environ, detection.installed_version(self)))


backend = Theano()
