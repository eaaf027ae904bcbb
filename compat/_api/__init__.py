"""The public calls: normalise the arguments, choose the backend, delegate to it."""

import os

from .. import _ranks, errors
from .._configuration import settings
from .._runtime.process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, ContextManager, Dict, Optional, Union, overload

    from typing_extensions import Unpack

    from .._configuration.settings import Configuration
    from .._configuration.typing import Built, Gpus, Model, Options


def configure_gpu(
    gpus: "Gpus" = None,
    *,
    backend: "Optional[str]" = None,
    memory: "Union[None, float, str]" = None,
    floatx: "Optional[str]" = None,
    simulate: "Optional[int]" = None,
    verify: "Union[int, str, None]" = None,
    persist: bool = False,
    strict: bool = False,
    parallelize: bool = False,
    sync_batch_norm: "Optional[bool]" = None,
    **options: "Unpack[Options]",
) -> "Configuration":
    """Choose this process's GPUs, their memory and the float type, on whichever backend it uses.

    Call it once, at the top of the script: before Keras or the backend is imported everything can
    still be set. A second call with the same settings does nothing. In a process that a launcher
    (torchrun, mpirun, ...) started as one of several ranks, it takes a single device, however many
    ``gpus`` names: the one that belongs to its local rank.

    Arguments:
        gpus: None, -1, ``"all"`` or ``"auto"`` for all visible GPUs, a count, ids as a list or a
            text (``[0, 2]``, ``"0,2"``), GPU or MIG names, ``"free"`` or ``"free:2"`` for idle
            ones, ``0``, ``[]``, ``"cpu"`` or ``"none"`` for none. Ids count inside
            ``CUDA_VISIBLE_DEVICES`` where that is set.
        backend: "theano", "tensorflow", "mxnet", ...; None: the one that Keras will use.
        memory: "grow" or "growth" (take memory as needed), a fraction of each GPU (0.5), or a
            size per GPU ("4GiB"). Each backend maps it to its own setting or says that it cannot.
        floatx: "float16", "float32", "float64" or, with Keras 3, "bfloat16", for Keras and the
            backend.
        simulate: this many CPU devices stand in for GPUs, to test a script for several GPUs
            where there is none.
        verify: how many training steps of each parallelized model, and its first evaluation and
            prediction, are also done on one device from the same state and compared; "every 100":
            one training step in 100, for as long as training goes on. None: what the variable
            ``COMPAT_VERIFY`` says, else 1 under ``simulate``, and 0 on GPUs.
        persist: also write the settings to the backend's configuration file, where it has one
            (Theano's ``.theanorc``).
        strict: raise an error, instead of warning, for fewer devices than asked for, for a model
            that would run unsplit, and with ``parallelize=True`` for one that cannot be
            parallelized.
        parallelize: every Keras model that is compiled from now on is given to ``parallelize()``
            first. A model that the script gives to ``parallelize()`` itself, or that it builds
            under a strategy of TensorFlow's or ``keras.distribution``, is left as it is; so is one
            that cannot be parallelized, with a warning.
        sync_batch_norm: whether batch normalization uses the mean and variance of the whole batch,
            as on one device, rather than those of each device's own samples. None: what the
            variable ``COMPAT_SYNC_BATCH_NORM`` says, else no. Layers that ask for it by
            themselves, such as ``BatchNormalization(synchronized=True)``, need no argument.
        **options: settings of single backends, such as ``log_device_placement`` for TensorFlow 1;
            a backend that does not know an option of another one says so in the report.

    Returns:
        A ``Configuration``; print it for a report.

    Raises:
        InvalidArgumentError: an argument's form or value is not understood (a ``ValueError``).
        NotInstalledError: the backend is not installed (an ``ImportError``).
        TooLateError: the framework has already fixed what was to be set (a ``RuntimeError``).
        AlreadyConfiguredError: an earlier call had other settings (a ``RuntimeError``).
        DevicesNotFoundError: under ``strict=True`` (a ``RuntimeError``).
    """
    from .._configuration import detection, gpu_selection  # for start-up time
    from . import configuring  # for start-up time

    selection = gpu_selection.parse_gpus(gpus)
    simulate = settings.parse_simulate(simulate)
    from_outside = settings.simulated_from_outside(os.environ)
    request = configuring.device_request(selection, simulate, from_outside)
    applied = []
    if from_outside:
        stood_for = "the GPUs" if gpus is None else f"gpus={gpus!r}"
        text = f"COMPAT_SIMULATE={from_outside}: simulated devices stand in for {stood_for}"
        applied, selection, simulate = [text], gpu_selection.parse_gpus(None), from_outside
    switches = dict(persist=persist, strict=strict, parallelize=parallelize)
    parsed: "Dict[str, Any]" = {
        name: settings.parse_switch(name, value) for name, value in switches.items()
    }
    parsed["verify"] = settings.parse_verify(verify, os.environ, simulate)
    parsed["sync_batch_norm"] = settings.parse_sync_batch_norm(sync_batch_norm, os.environ)
    parsed.update(memory=settings.parse_memory(memory), floatx=settings.parse_floatx(floatx))
    parsed["options"] = options
    configuring.check_options(options, configure_gpu)
    chosen, reason = detection.choose(backend)
    call = (chosen.name, selection, simulate, parsed)
    with process.configuring:  # of two threads, one is first, and the other one sees what it did
        is_first = process.configuration is None
        active = configuring.configure_once(call, chosen, reason, request, applied)
        if parsed["parallelize"] and is_first:
            from .._keras import automatic_parallel  # for start-up time

            automatic_parallel.install(chosen, _parallelize_compiled)
        return active


if TYPE_CHECKING:

    @overload
    def parallelize(
        model: "Model",
        gpus: "Gpus" = None,
        *,
        strategy: "Optional[str]" = None,
        sync_batch_norm: "Optional[bool]" = None,
    ) -> "Model": ...
    @overload
    def parallelize(
        model: "Callable[[], Built]",
        gpus: "Gpus" = None,
        *,
        strategy: "Optional[str]" = None,
        sync_batch_norm: "Optional[bool]" = None,
    ) -> "Built": ...


def parallelize(
    model: "Any",
    gpus: "Gpus" = None,
    *,
    strategy: "Optional[str]" = None,
    sync_batch_norm: "Optional[bool]" = None,
) -> "Any":
    """Run a model on several devices: the same object, trained to the same numbers.

    Each batch is split evenly over the devices, in forward and backward pass; losses, metrics
    and the update see the whole batch. Everything else about the model stays as it is. With one
    device nothing changes, and a model that ran on several goes back to plain.

    In a process that a launcher started as one of several ranks, each with one device and its
    own part of the data (see ``shard()``), the model trains together with theirs: it takes rank
    0's weights and optimizer state, gradients and metrics become the means over the rows of all
    ranks, and saving is done on rank 0 alone. ``gpus`` is then ignored.

    Arguments:
        model: a Keras model, compiled or not, fitted or not; a model of the backend's own kind
            (a torch ``nn.Module``, a Gluon ``Block``, an MXNet ``Module``, a ``tf.Module`` or
            ``tf.function``); or a function that builds one of these.
        gpus: which of the configured devices, in the forms of ``configure_gpu(gpus=)``: a
            count, ids counted among them from 0, or names of GPUs; None for all.
        strategy: None for replicas that compat makes in this process; "mirrored" for TensorFlow
            2's own ``MirroredStrategy``, where ``model`` is a function that builds a model (in a
            worker of ``TF_CONFIG`` this is the same as None).
        sync_batch_norm: as for ``configure_gpu()``; None: as configured there.

    Returns:
        The model that was given (or built).

    Raises:
        NotAModelError: ``model`` is none of these (a ``TypeError``).
        InvalidArgumentError: ``gpus``, ``strategy`` or ``sync_batch_norm`` is not understood (a
            ``ValueError``).
        UnsupportedError: the backend cannot run several devices in one process, or has no such
            strategy (a ``NotImplementedError``); after ``configure_gpu(strict=True)``, it cannot
            synchronize batch normalization.
        DevicesNotFoundError: after ``configure_gpu(strict=True)`` (a ``RuntimeError``).
        RankError: the ranks cannot train together (a ``RuntimeError``).
    """
    with _FailureNoted(model):
        parallelized = _parallelize(model, gpus, strategy, sync_batch_norm)
    if process.parallelizes_compiled:
        _split_in_fit(parallelized, lambda: not process.has_sharded)
    return note_by_hand(parallelized)


def _parallelize_compiled(model, gpus=None):
    """Parallelize a model before it is compiled, under ``configure_gpu(parallelize=True)``."""
    with _FailureNoted(model):
        _parallelize(model, gpus)
    _split_in_fit(model, lambda: True)


def _split_in_fit(model, is_due):
    """Have ``fit()`` of a Keras model split its data over the ranks, if there are any.

    Arguments:
        model: the model.
        is_due: a function that returns whether it is to do so, when it is called.
    """
    if _ranks.own_place() is not None:
        from .._ranks import keras_model  # imports numpy

        fit = keras_model.RankedFit.of(model)
        if fit is not None:
            fit.splits = is_due


def note_by_hand(model: "Any") -> "Any":
    """Note that the script has chosen this model's devices; return the model."""
    process.uses_devices = True
    if process.parallelizes_compiled:
        from .. import _keras  # for start-up time
        from .._keras import automatic_parallel  # for start-up time
        from .._runtime import patching  # for start-up time

        if _keras.keras_of(model) is not None:
            patching.attach(model, automatic_parallel.BY_HAND, True)
    return model


class _FailureNoted:
    """A block in which a model is parallelized; reports name it if that fails.

    Arguments:
        model: the model, or a function that builds it.
    """

    def __init__(self, model: "Any") -> None:
        name = getattr(model, "name", None) or getattr(model, "__qualname__", None)
        self.name = str(name or type(model).__name__)

    def __enter__(self) -> None:
        process.refused.pop(self.name, None)

    def __exit__(self, kind: "Any", error: "Any", trace: "Any") -> None:
        if isinstance(error, Exception):
            process.refused[self.name] = kind.__name__


def _parallelize(model, gpus=None, strategy=None, sync_batch_norm=None):
    from .. import _keras  # for start-up time
    from .._configuration import gpu_selection  # for start-up time
    from . import batch_norm, use_checks  # for start-up time

    active = process.configuration
    if sync_batch_norm is None and active is not None:
        sync_batch_norm = active.settings.sync_batch_norm
    is_synchronized = settings.parse_sync_batch_norm(sync_batch_norm, os.environ)
    selection = gpu_selection.parse_gpus(gpus)
    place = _ranks.own_place()
    if strategy is not None:
        _check_strategy(strategy, model, place)
        if place is None:
            backend = configured_backend()
            devices = _chosen(backend, selection)
            model = backend.build(strategy, model, devices)
            if is_synchronized:
                batch_norm.check_built(backend, model, devices)
            return model
    model, backend = _built(model, place)
    if process.configuration is not None and process.configuration.backend != backend.name:
        raise errors.InvalidArgumentError(
            f"The model runs on {backend.name}, but configure_gpu() set up "
            f"{process.configuration.backend}. Build the model with the Keras that was "
            f"configured, or pass backend={backend.name!r} to configure_gpu()."
        )
    name = getattr(model, "name", None) or type(model).__name__
    process.unsplit.discard(model)
    batch_norm.ask(backend, model, is_synchronized)
    if place is not None:
        batch_norm.check_ranks(backend, model, name, place)
        model, where = backend.distribute(model, place), str(place)
        use_checks.watch_rank(model, name, place)
        ranks = [f"rank {rank}" for rank in range(place.size)] if backend.verifies_ranks else []
        _verify(backend, model, name, ranks, ranks=True)
    else:
        devices = _chosen(backend, selection)
        if process.configuration is None:
            from . import configuring  # for start-up time

            configuring.refuse_faulty(backend.name, _keras.versions(backend), devices)
            process.parallelized_before.append((name, list(devices)))
        backend.verify(model, None)
        evaluator = _ranks.evaluator()
        if evaluator is not None and _keras.keras_of(model) is not None:
            from .._ranks import saving  # for start-up time

            saving.never_save(model, evaluator)
        batch_norm.check_devices(backend, model, name, devices)
        model, where = backend.parallelize(model, devices), settings.listed(devices)
        use_checks.watch(backend, model, name, devices)
        _verify(backend, model, name, devices)
    if process.configuration is not None:
        process.configuration.parallelized[name] = where
        for callback in process.on_parallelized:
            callback(name, where)
    return model


def _check_strategy(strategy, model, place):
    from .._configuration import registry  # for start-up time

    strategies = {name: text for b in registry.backends() for name, text in b.strategies.items()}
    if strategy not in strategies:
        others = " or ".join('"{}" ({})'.format(*pair) for pair in sorted(strategies.items()))
        raise errors.InvalidArgumentError(
            f"strategy={strategy!r} is not understood. Use None (the model's replicas run in this "
            f"process, split by compat) or {others}."
        )
    if place is not None and not configured_backend().ranks_train_under(strategy, place):
        raise errors.unsupported(
            "compat",
            f"use strategy={strategy!r} in {place}",
            "Leave strategy out, or start the script without a launcher.",
        )
    if not hasattr(model, "__code__"):
        raise errors.NotAModelError(
            f"strategy={strategy!r} takes a function that builds the model, since its variables "
            f"must be made under the strategy; it was given {errors.class_of(model)}. Put the "
            "lines that build the model into a function, and pass that."
        )


def _built(model, place):
    """Return a model that was given, or that a given function builds, and its backend."""
    backend = backend_of(model)
    # Functions and bound methods have __code__; a class, or what can be called, does not.
    if backend is None and hasattr(model, "__code__"):
        if place is not None:
            configured_backend().join(place)
        function, model = model, model()
        backend = backend_of(model)
        if backend is None:
            raise errors.builds_no_model(function.__qualname__, model)
    if backend is None:
        raise errors.NotAModelError(
            "parallelize() takes a Keras model, a model of the backend's own kind, or a function "
            f"that builds one; it was given {errors.class_of(model)}."
        )
    return model, backend


def _verify(backend, model, name, devices, ranks=False):
    """Have the first steps of a model on several devices compared with one device."""
    active = process.configuration
    steps = active.settings.verify if active else settings.parse_verify(None, os.environ, None)
    if steps and len(devices) > 1:
        from .. import _verification  # for start-up time

        _verification.report_at_exit(os.environ)
        backend.verify(model, _verification.Verification(name, devices, steps, ranks))


def device(which: "Union[int, str]") -> "ContextManager[Any]":
    """Place the parts of a model that are built inside ``with compat.device(which):``.

    For device parallelism: branches of one model on different devices::

        with compat.device(0):
            encoded_a = shared_lstm(tweet_a)
        with compat.device(1):
            encoded_b = shared_lstm(tweet_b)
        with compat.device("cpu"):
            merged = keras.layers.concatenate([encoded_a, encoded_b])

    Arguments:
        which: a number counted among the configured devices from 0, one of their names
            (``Configuration.devices``), or "cpu". Where there are fewer devices, a warning says
            so and they are used in turn, so that the script runs on one device, too.

    Returns:
        A context manager.

    Raises:
        InvalidArgumentError: ``which`` is not understood (a ``ValueError``).
        UnsupportedError: the backend cannot place parts of a model (a ``NotImplementedError``).
        DevicesNotFoundError: after ``configure_gpu(strict=True)`` (a ``RuntimeError``).
    """
    backend = configured_backend()
    devices = backend.devices()
    if isinstance(which, int) and not isinstance(which, bool) and which >= 0:
        name = devices[which % len(devices)]
        if which >= len(devices):
            _warn_of_fewer(f"device({which})", devices, name)
        which = name
    elif which != "cpu" and which not in devices:
        raise errors.InvalidArgumentError(
            f"device({which!r}) is not understood. Use a number, counted among the configured "
            f'devices from 0, one of their names ({settings.listed(devices)}), or "cpu".'
        )
    if len(devices) == 1 and (which != "cpu" or "cpu" in devices[0].lower()):
        from contextlib import ExitStack

        return ExitStack()  # all of the model is there: nothing to place
    process.uses_devices = True
    return backend.device(which)


def configured_backend():
    """Return the backend that ``configure_gpu()`` set up; before that, the one it would."""
    from .._configuration import detection  # for start-up time

    active = process.configuration
    return detection.choose(None if active is None else active.backend)[0]


def backend_of(model):
    """Return the backend that runs this model, or None where it is no model."""
    from .. import _keras  # for start-up time
    from .._configuration import detection  # for start-up time

    keras = _keras.keras_of(model)
    if keras is not None:
        return detection.choose(_keras.backend_name(keras))[0]
    return detection.native_to(model)


def _chosen(backend, selection):
    """Return the devices that ``selection`` asks for, of those that the backend has."""
    devices = backend.devices()
    wanted = _wanted(devices, selection)
    chosen = [devices[position] for position in wanted if position < len(devices)]
    if len(chosen) < len(wanted):
        chosen = chosen or devices[:1]
        _warn_of_fewer(str(selection), devices, settings.listed(chosen))
    return chosen


def _warn_of_fewer(asked, devices, going_on_with):
    shortage = asked, f"these are configured: {settings.listed(devices)}"
    strict = process.configuration is not None and process.configuration.settings.strict
    errors.warn(errors.fewer(shortage, going_on_with, strict))


def _wanted(devices, selection):
    """Positions among the configured devices; one past the end where a device is not there."""
    if selection.kind == "none":
        return [0]
    if selection.kind in ("count", "free") and selection.count:
        return range(selection.count)
    if selection.kind == "ids":
        active = process.configuration

        def index_of(wanted: "Union[int, str]") -> "Optional[int]":
            if isinstance(wanted, int):
                return wanted
            return active.settings.devices.index(wanted) if active else None

        indices = map(index_of, selection.ids)
        return [len(devices) if index is None else index for index in indices]
    return range(len(devices))
