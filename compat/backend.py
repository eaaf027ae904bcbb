"""The contract between compat and a backend: the class to subclass, and the types that it uses.

A backend is configured in two phases, since that is this field's central difficulty: by settings
before the framework is imported (``environ``, pure), and by others afterwards (``configure``).
Methods not overridden raise ``UnsupportedError``; overriding one *is* the capability. The types
of arguments and results are here alone: those of compat's own backends are the same.

All types that compat passes to a backend, and those that it subclasses, are importable from here:

- ``Settings``, ``Memory`` and ``Devices``: the arguments of ``configure_gpu()``, and the choice
  of devices.
- ``Place`` and ``Job``: a process's place among the ranks; the ranks that a launcher is to start.
- ``Engine``: the means by which ranks communicate. ``own_launcher`` makes the command of compat's
  own launcher, for frameworks that bring none.
- ``Verification`` and ``Step``: a step on several devices compared with the same step on one;
  ``Incomparable``: why it cannot be.
- ``Operation``: an operation that a device has executed, for timelines.
- ``UsageCheck``: compares the operations that a model's devices executed with counted batches.
- ``count_batch``: to be called for each batch that the replicas, or a rank, have computed.
- ``compare_ranks``: to be called by all ranks at once, to compare their weights.
- ``FirstBatch``: detects ranks that all train on the same rows, and so gain nothing.

``compat.testing`` has the tests that a backend must pass.
"""

import sys

from . import errors
from ._configuration.settings import Memory, Settings
from ._ranks import Job
from ._ranks.place import Place
from ._runtime.process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import (
        Any,
        Callable,
        Collection,
        ContextManager,
        Dict,
        List,
        Mapping,
        Optional,
        Sequence,
        Tuple,
    )

    from ._configuration.device_choice import Devices
    from ._ranks.checksum import verify as compare_ranks
    from ._ranks.engines import Engine
    from ._ranks.launch.starter import launcher as own_launcher
    from ._ranks.same_rows import FirstBatch
    from ._runtime.operation_times import Operation
    from ._runtime.usage import UsageCheck
    from ._runtime.work import count as count_batch
    from ._verification import Incomparable, Step, Verification

__all__ = ["Backend", "Job", "Memory", "Place", "Settings"]
__all__ += ["Devices", "Engine", "FirstBatch", "Incomparable", "Operation", "Step", "UsageCheck"]
__all__ += ["Verification", "compare_ranks", "count_batch", "own_launcher"]

# Imported on demand, so that ``import compat`` stays cheap.
_LAZY = {
    "Devices": ("._configuration.device_choice", "Devices"),
    "Engine": ("._ranks.engines", "Engine"),
    "FirstBatch": ("._ranks.same_rows", "FirstBatch"),
    "Incomparable": ("._verification", "Incomparable"),
    "Operation": ("._runtime.operation_times", "Operation"),
    "Step": ("._verification", "Step"),
    "UsageCheck": ("._runtime.usage", "UsageCheck"),
    "Verification": ("._verification", "Verification"),
    "compare_ranks": ("._ranks.checksum", "verify"),
    "count_batch": ("._runtime.work", "count"),
    "own_launcher": ("._ranks.launch.starter", "launcher"),
}


class _Module(type(sys)):  # type: ignore[misc]  # the class of modules, which mypy does not see in it
    """This module's class: modules have no ``__getattr__`` of their own before Python 3.7."""

    def __getattr__(self, name: str) -> "Any":
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module, attribute = _LAZY[name]
        value = getattr(importlib.import_module(module, __package__), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> "List[str]":
        return sorted(set(super().__dir__()).union(_LAZY))


sys.modules[__name__].__class__ = _Module


class Backend:
    """One framework that Keras runs on. Creating one imports nothing."""

    #: The name users pass as ``backend=``: that of the backend's package, or of its entry point.
    name: str = ""
    #: The module to import, and Keras' name of the backend (``KERAS_BACKEND``).
    framework: str = ""
    #: Distributions that install the framework; the first one found has its version.
    distributions: "Sequence[str]" = ()
    #: The extra of ``keras-gpu-compat`` that installs it; empty for a backend of a third party.
    extra: str = ""
    #: Keyword options of ``configure_gpu()`` that this backend knows.
    options: "Sequence[str]" = ()
    #: Whether ``verify()`` compares ranks with one process, too: ``verification.ranks``.
    verifies_ranks = False
    #: Where batch normalization uses the statistics of the whole batch, for models of which
    #: ``compat._runtime.synchronized.is_asked()``, and layers that ask for it: on several
    #: "devices" of a process, on "ranks", or on both.
    synchronizes: "Collection[str]" = ()
    #: The framework's strategies that ``build()`` takes: descriptions by name.
    strategies: "Mapping[str, str]" = {}
    #: The file that ``persist=True`` writes; empty where the framework reads none.
    configuration_file: str = ""
    #: Environment variables worth showing in a report.
    variables: "Sequence[str]" = ()
    #: Environment variables with which the framework records each operation by itself.
    recording: "Mapping[str, str]" = {}

    @property
    def kept(self) -> "Dict[str, Any]":
        """State from ``configure()`` for this backend's other methods; empty before it is called.

        All state of the process is in one place, so that tests can forget it at once.
        """
        return process.of_backends.setdefault(self, {})

    def _cannot(
        self, action: str, remedy: str = "Use another backend."
    ) -> "errors.UnsupportedError":
        return errors.unsupported(self.name, action, remedy)

    def accepts(self, version: str) -> bool:
        """Return whether this backend is the one for ``version`` of its framework."""
        return True

    def import_framework(self) -> "Any":
        """Import the framework.

        Raises:
            BrokenInstallError: it is installed, but importing it fails.
        """
        import importlib

        try:
            return importlib.import_module(self.framework)
        except Exception as error:  # whatever an installation can do wrong
            raise errors.broken_install(self.framework, error) from error

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        """Return environment variables to set before the framework is imported. Pure.

        Arguments:
            settings: the arguments, normalised, and the devices chosen.
            environ: the environment as it is.

        Returns:
            Variables and their new values; ``None`` removes a variable.
        """
        return settings.devices.environ(environ)

    def overruled(self, settings: "Settings", environ: "Mapping[str, str]") -> "List[str]":
        """Return a sentence for each of the user's settings that ``settings`` overrule. Pure."""
        return []

    def initialised(self) -> "Optional[str]":
        """Return why environment variables come too late now, or None while they still work."""
        raise self._cannot("be configured")

    def configure(self, settings: "Settings") -> "Tuple[List[str], List[str]]":
        """Apply settings to the framework, importing it if needed.

        Where no driver lists a GPU, ``settings.devices.undecided`` is the request: hide none, and
        call ``settings.devices.settle()`` with the number that the framework lists; it sets
        ``positions``.

        Returns:
            Lines for the report: the framework's settings that were changed. And warnings, a
            sentence each: deviations from the request.

        Raises:
            TooLateError: something that must change can no longer be changed.
        """
        raise self._cannot("be configured")

    def devices(self) -> "List[str]":
        """Return the devices to train on, as the framework names them, in the order configured.

        GPUs where there are any, simulated devices under ``simulate=``, else one CPU.
        """
        raise self._cannot("list its devices")

    def is_native(self, model: "Any") -> bool:
        """Return whether ``model`` is a model of the framework's own kind, made without Keras.

        Imports nothing: the class of ``model`` decides.
        """
        return False

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Run ``model`` on ``devices`` (one or more of ``self.devices()``) and return it.

        ``model`` is a Keras model, or one that ``is_native``. One device restores the plain
        behaviour. Each batch that the replicas have computed goes to ``count_batch()``.
        """
        raise self._cannot("run one model on several devices", "Use one device: gpus=1.")

    def batch_norm_layers(self, model: "Any") -> "Dict[str, Any]":
        """Return the layers of a model that ``is_native`` that are batch normalization, by name.

        One that asks for the statistics of the whole batch by itself has ``synchronized = True``,
        or a class named ``SyncBatchNormalization`` or ``SyncBatchNorm``.
        """
        return {}

    def synchronizes_on_ranks(self, layer: "Any") -> bool:
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        return "ranks" in self.synchronizes

    def executed(self, model: "Any") -> "ContextManager[Dict[str, int]]":
        """Have the framework record how many operations each device executes within a block.

        Only the first step within needs to be recorded; later ones should cost nothing. The
        numbers are compared with the counted batches, after a model's first training step,
        evaluation and prediction.

        Arguments:
            model: one that ``parallelize`` has returned.

        Returns:
            A context manager that yields a dictionary, which has the numbers by the names of
            ``devices()`` when the block ends.

        Raises:
            UnsupportedError: the framework does not report which devices execute what.
        """
        raise self._cannot("report which devices execute what")

    def watch(self, model: "Any", check: "Optional[UsageCheck]") -> None:
        """Have each step of a model that ``is_native`` checked, by ``with check.step(kind):``.

        It must not depend on the methods that ``parallelize`` replaces: whether they are reached
        is checked. Keras models are watched at their public methods already.

        Arguments:
            model: one that ``parallelize`` has returned.
            check: to be entered around each step; None: stop checking.
        """

    def watch_loops(self, model: "Any", check: "Optional[UsageCheck]") -> None:
        """Have steps of a Keras model checked that are not its methods: ``model(batch)``.

        As ``watch``; optional.
        """

    def placed_parts(self, model: "Any") -> "List[str]":
        """Return the devices that ``device()`` gave to parts of ``model``."""
        return []

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        """Have the first steps of a model that runs on several devices compared with one device.

        A backend that cannot do so does not override this method, which warns.

        Arguments:
            model: one that ``parallelize`` has returned.
            verification: selects steps, and compares them; None: stop verifying.
        """
        if verification is not None:
            errors.warn(
                f"verify={verification.requested}: the backend {self.name} cannot compare several "
                "devices with one, so nothing is verified."
            )

    def build(
        self, strategy: str, function: "Callable[[], Any]", devices: "Sequence[str]"
    ) -> "Any":
        """Call ``function``, which builds a model, under the framework's own strategy.

        Arguments:
            strategy: its name, one of ``strategies``.
            function: builds the model and returns it.
            devices: one or more of ``self.devices()``.
        """
        raise self._cannot(
            f"build a model with strategy={strategy!r}",
            "Leave strategy out: parallelize() then runs the replicas in this process by itself.",
        )

    def device(self, device: str) -> "ContextManager[Any]":
        """Return a context in which the parts of a model that are built are placed on ``device``.

        Arguments:
            device: one of ``self.devices()``, or "cpu" for the host.
        """
        raise self._cannot(
            "place parts of a model on a device of their own",
            "Leave compat.device() out; parallelize() may run the whole model on several.",
        )

    def launcher(self, job: "Job") -> "List[str]":
        """Return the command that starts the ranks of the command that follows it.

        It sets, for each rank, the variables of one of the launchers that compat knows
        (docs/launchers.md), ends all ranks when one fails, and passes on their output.
        ``own_launcher(job)`` is such a command, of compat's own.

        Arguments:
            job: how many ranks, in which interpreter and environment, on which machines.
        """
        raise errors.no_ranks(self.name)

    def join(self, place: "Place") -> None:
        """Join the other ranks, before a model is built, if the engine cannot be joined later.

        Methods that have to be replaced before a script uses a model are replaced here, too.

        Called in a rank by ``configure_gpu()``, and by ``parallelize()`` with a function that
        builds the model. A second call has no effect.
        """

    def ranks_train_under(self, strategy: str, place: "Place") -> bool:
        """Return whether ranks at this place train under a strategy in any case."""
        return False

    def distribute(self, model: "Any", place: "Place") -> "Any":
        """Make ``model`` train together with the other ranks, and return it.

        It begins with the weights and the optimizer's state of rank 0; gradients become the mean
        over the rows of all ranks. Each batch goes to ``count_batch([""], [rows], training)``;
        after the first step, and rarely later on, ``compare_ranks()`` detects ranks that diverge.
        ``engine.count("gradients")`` counts each time that gradients have become that mean: the
        steps of a Keras model, as Keras reports them, are compared with it. A ``FirstBatch`` of
        each model sees the batches, and is compared after the first step.

        Arguments:
            model: as for ``parallelize``.
            place: this process's place among them.
        """
        raise errors.no_ranks(self.name)

    def memory_peaks(self) -> "Dict[str, int]":
        """Return the peak of the framework's memory on each GPU, in bytes, by its name.

        Empty where the framework does not report it. Called in a configured process.
        """
        return {}

    def profiled(self) -> "ContextManager[List[Operation]]":
        """Have the framework's profiler record the configured devices within a block.

        Returns:
            A context manager that yields a list, to which the operations are added when its block
            ends, after all of them have finished.

        Raises:
            UnsupportedError: the framework does not record when its devices execute what.
        """
        raise self._cannot(
            "record when each device executes what",
            "compat.report() shows what each device has computed.",
        )

    def problems(self, environ: "Mapping[str, str]") -> "List[str]":
        """Return problems of the environment for this backend, a text each. Pure.

        Where a command fixes it, the text ends with a colon and that command, from which ``compat
        env`` takes it: ``X is set: unset X``.
        """
        return []
