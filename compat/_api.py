"""The public calls: normalise the arguments, choose the backend, delegate to it."""

import os
from _thread import RLock  # threading costs an import

from . import errors
from ._settings import (
    Configuration,
    Settings,
    parse_floatx,
    parse_memory,
    parse_simulate,
    parse_verify,
    simulated_from_outside,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ContextManager, List, Optional, Sequence, Tuple, Union

    from ._launchers import Ranks
    from .backend import Backend

    Gpus = Union[None, int, str, Sequence[Union[int, str]]]

STRATEGIES = ("mirrored",)

_active = None  # type: Optional[Configuration]
_first_call = None  # type: Any
_configuring = RLock()
# Models parallelized before configure_gpu(): their names, and the devices.
_parallelized_before = []  # type: List[Tuple[str, List[str]]]


def configure_gpu(
    gpus: "Gpus" = None,
    *,
    backend: "Optional[str]" = None,
    memory: "Union[None, float, str]" = None,
    floatx: "Optional[str]" = None,
    simulate: "Optional[int]" = None,
    verify: "Optional[int]" = None,
    persist: bool = False,
    strict: bool = False,
    **options: "Any",
) -> "Configuration":
    """Choose this process's GPUs, their memory and the float type, on whichever backend it uses.

    Call it once, at script top: before Keras or the backend is imported everything can still
    be set. A second call with the same settings does nothing. In a process that a launcher
    (torchrun, mpirun, ...) started as one of several ranks it takes one device, the local rank's
    of those that ``gpus`` names, whatever their number.

    Arguments:
        gpus: None, -1, ``"all"`` or ``"auto"`` for all visible GPUs, a count, ids as a list or a
            text (``[0, 2]``, ``"0,2"``), GPU or MIG names, ``"free"`` or ``"free:2"`` for idle
            ones, ``0``, ``[]``, ``"cpu"`` or ``"none"`` for none. Ids count inside
            ``CUDA_VISIBLE_DEVICES`` where that is set.
        backend: "theano", "tensorflow", "mxnet", ...; None: the one that Keras will use.
        memory: "grow" or "growth" (take memory as needed), a fraction of each GPU (0.5), or a
            size per GPU ("4GiB"). Each backend maps it to its own setting or says that it cannot.
        floatx: "float16", "float32" or "float64", for Keras and the backend.
        simulate: this many CPU devices stand in for GPUs, to test a script for several GPUs
            where there is none.
        verify: how many training steps of each parallelized model, and its first evaluation and
            prediction, are also done on one device from the same state and compared; None: what
            the variable ``COMPAT_VERIFY`` says, else 1 under ``simulate``, and 0 on GPUs.
        persist: also write the settings to the backend's configuration file, where it has one
            (Theano's ``.theanorc``).
        strict: fewer devices than asked for are an error, not a warning.
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
    from . import _detect, _devices

    selection = _devices.parse_gpus(gpus)
    simulate = parse_simulate(simulate)
    from_outside = simulated_from_outside(os.environ)
    asked = _asked(selection, simulate, from_outside)
    applied = []
    if from_outside:
        text = "COMPAT_SIMULATE={}: simulated devices stand in for gpus={!r}"
        applied.append(text.format(from_outside, gpus))
        selection, simulate = _devices.parse_gpus(None), from_outside
    verify = parse_verify(verify, os.environ, simulate)
    parsed = (
        parse_memory(memory), parse_floatx(floatx), bool(persist), bool(strict), options, verify,
    )  # fmt: skip
    _check_options(options)
    chosen, reason = _detect.choose(backend)
    call = (chosen.name, selection, simulate, parsed)
    with _configuring:  # of two threads, one is first, and the other one sees what it did
        return _configure_once(call, chosen, reason, asked, applied)


def _asked(selection, simulate, from_outside):
    """How the devices were asked for."""
    parts = [] if simulate and selection.kind == "all" else [str(selection)]
    parts += ["simulate={}".format(simulate)] * bool(simulate)
    parts += ["COMPAT_SIMULATE={}".format(from_outside)] * bool(from_outside)
    return ", ".join(parts)


def _configure_once(call, chosen, reason, asked, applied):
    """Configure, unless an earlier call did; ``applied``: more lines for the report."""
    global _active, _first_call
    from . import _devices, _launchers, _ranks

    _, selection, simulate, parsed = call
    if _active is not None and call == _first_call[0]:
        return _active
    # Ids count inside what was visible before the first call narrowed it.
    environ = dict(os.environ) if _active is None else _first_call[1]
    ranks = _launchers.launched(environ) or _ranks.own_place()
    if ranks is None:
        devices = _devices.choose(selection, simulate, environ)
    elif simulate:
        devices = _devices.Devices(simulated=1)
    else:
        devices = _devices.choose_for_rank(selection, environ, ranks)
    settings = Settings(devices, *parsed + (asked,))
    if _active is not None:
        devices.settle(_active.settings.devices.listed or 0)
        if (chosen.name, settings) == (_active.backend, _active.settings):
            return _active
        raise errors.already_configured(
            "{}, {}".format(_active.backend, _active.settings),
            "{}, {}".format(chosen.name, settings),
        )
    _active = _configure(chosen, reason, settings, ranks)
    _active.applied += applied if ranks is None else []
    _active.warnings += _parallelized_too_early(_active.devices)
    _first_call = call, environ
    for warning in _active.warnings:
        _warn(warning, depth=1)
    return _active


def _parallelized_too_early(devices):
    """Warnings of models that configure_gpu() came too late for."""
    early = [(name, its) for name, its in _parallelized_before if its != devices]
    _parallelized_before.clear()
    return [errors.parallelized_before(name, its, devices) for name, its in early]


def _check_options(options):
    """Refuse options that no backend knows; a known one of another backend is no error."""
    if options:
        from . import _registry

        known = sorted({option for b in _registry.backends() for option in b.options})
        for option in sorted(options):
            if option not in known:
                from . import _spelling

                code = configure_gpu.__code__
                arguments = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
                meant = _spelling.meant(option, options[option], arguments + known)
                raise errors.unknown_option(option, meant, arguments, known)


def _configure(
    chosen: "Backend", reason: str, settings: "Settings", ranks: "Optional[Ranks]"
) -> "Configuration":
    """Apply the settings, or leave the environment as it was and raise."""
    from . import _detect, _keras

    notes = (
        _detect.keras_elsewhere(chosen)
        + settings.devices.problems
        + [
            errors.option_of_others(option, chosen.name)
            for option in sorted(settings.options)
            if option not in chosen.options
        ]
    )
    if settings.persist and not chosen.configuration_file:
        notes.append(errors.nothing_to_persist(chosen.name))
    undecided = settings.devices.undecided is not None
    if settings.devices.shortage and not undecided:
        notes.append(fewer(settings.devices.shortage, settings.devices, settings.strict))
    notes += chosen.overruled(settings, os.environ)
    variables = _detect.keras_variable(chosen, os.environ)
    if not chosen.initialised():
        variables.update(chosen.environ(settings, os.environ))
    before = {name: os.environ.get(name) for name in set(variables).union(chosen.variables)}
    _set_environ(variables)
    try:
        applied = list(chosen.configure(settings))
        notes += settings.warnings
        devices = chosen.devices()
        if undecided:  # a backend that does not choose among its GPUs takes all that it lists
            gpus = [device for device in devices if "cpu" not in device.lower()]
            settings.devices.settle(len(gpus), restricted=True)
            if settings.devices.shortage:
                notes.append(fewer(settings.devices.shortage, settings.devices, settings.strict))
        if len(devices) < len(settings.devices) or _only_cpu(devices, settings):
            shortage = (
                str(settings.devices),
                "{} sees {}".format(chosen.framework, ", ".join(devices)),
            )
            notes.append(fewer(shortage, ", ".join(devices), settings.strict))
        if settings.floatx:
            applied += _keras.set_floatx(settings.floatx, chosen)
    except BaseException:
        _set_environ(before)
        raise
    versions = _keras.versions(chosen)
    return Configuration(
        chosen.name, reason, versions, devices, settings, variables, applied, notes, ranks
    )


def _set_environ(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _only_cpu(devices, settings):
    return settings.devices.gpus and all("cpu" in device.lower() for device in devices)


def fewer(shortage, going_on_with, strict):
    """The warning that there are fewer devices than asked for; under ``strict`` the error.

    Arguments:
        shortage: what was asked for, and what was found.
    """
    asked, found = shortage
    if strict:
        raise errors.devices_not_found(asked, found)
    return errors.fewer_devices(asked, found, "Going on with {}".format(going_on_with))


def _warn(text, depth=0):
    import warnings

    # Shown at the line that called the public function, which called this one at that depth.
    warnings.warn(text, errors.CompatWarning, stacklevel=3 + depth)


def parallelize(model: "Any", gpus: "Gpus" = None, *, strategy: "Optional[str]" = None) -> "Any":
    """Run a model on several devices: the same object, trained to the same numbers.

    Each batch is split evenly over the devices, in forward and backward pass; losses, metrics
    and the update see the whole batch. Everything else about the model stays as it is. With one
    device nothing changes, and a model that ran on several goes back to plain.

    In a process that a launcher started as one of several ranks, each with one device and its
    own part of the data (see ``shard()``), the model trains together with theirs: it takes rank
    0's weights and optimizer state, gradients and metrics become the means over the rows of all
    ranks, and saving is done on rank 0 alone. ``gpus`` then does not matter. In a worker of
    TensorFlow's ``TF_CONFIG`` the first model is given as a function that builds it, called once
    all workers have come: TensorFlow cannot join them any later.

    Arguments:
        model: a Keras model, compiled or not, fitted or not; a model of the backend's own kind
            (a torch ``nn.Module``, a Gluon ``Block``, an MXNet ``Module``, a ``tf.Module`` or
            ``tf.function``); or a function that builds one of these.
        gpus: which of the configured devices, in the forms of ``configure_gpu(gpus=)``: a
            count, ids counted among them from 0, or names of GPUs; None for all.
        strategy: None for replicas that compat makes in this process; "mirrored" for TensorFlow
            2's own ``MirroredStrategy``, where ``model`` is a function that builds a model (in a
            worker of ``TF_CONFIG`` this is the same as None).

    Returns:
        The model that was given (or built).

    Raises:
        NotAModelError: ``model`` is none of these (a ``TypeError``).
        InvalidArgumentError: ``gpus`` or ``strategy`` is not understood (a ``ValueError``).
        UnsupportedError: the backend cannot run several devices in one process, or has no such
            strategy (a ``NotImplementedError``).
        DevicesNotFoundError: after ``configure_gpu(strict=True)`` (a ``RuntimeError``).
        RankError: the ranks cannot train together (a ``RuntimeError``).
    """
    from . import _devices, _keras, _launchers, _ranks

    selection = _devices.parse_gpus(gpus)
    ranks = _ranks.own_place()
    if strategy is not None:
        if strategy not in STRATEGIES:
            raise errors.invalid_strategy(strategy)
        if ranks is not None and ranks.launcher != _launchers.TF_CONFIG:
            raise errors.strategy_in_rank(strategy, ranks)
        if not _is_function(model):
            raise errors.strategy_needs_function(strategy, model)
        if ranks is None:
            backend = configured_backend()
            return backend.build(strategy, model, _chosen(backend, selection))
    backend = backend_of(model)
    if backend is None and _is_function(model):
        if ranks is not None and ranks.launcher == _launchers.TF_CONFIG:
            configured_backend().join(ranks)
        function, model = model, model()
        backend = backend_of(model)
        if backend is None:
            raise errors.builds_no_model(function.__qualname__, model)
    if backend is None:
        raise errors.not_a_model(model)
    if _active is not None and _active.backend != backend.name:
        raise errors.wrong_backend(backend.name, _active.backend)
    if ranks is not None:
        return backend.distribute(model, ranks)
    devices = _chosen(backend, selection)
    if _active is None:
        _parallelized_before.append((_name_of(model), list(devices)))
    backend.verify(model, None)
    if _launchers.is_evaluator(os.environ) and _keras.keras_of(model) is not None:
        from . import _keras_ranks

        _keras_ranks.never_save(model, _launchers.Ranks(-1, 1, 0, 1, _launchers.TF_CONFIG))
    return _verified(backend, backend.parallelize(model, devices), devices)


def _verified(backend, model, devices):
    """The model, whose first steps on several devices will be compared with one device."""
    if _active is not None:
        steps = _active.settings.verify
    else:
        steps = parse_verify(None, os.environ, None)
    if steps and len(devices) > 1:
        from . import _verification

        _verification.report_at_exit(os.environ)
        backend.verify(model, _verification.Verification(_name_of(model), devices, steps))
    return model


def _name_of(model):
    return getattr(model, "name", None) or type(model).__name__


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
        if which >= len(devices):
            name = devices[which % len(devices)]
            asked = "device({})".format(which), _these(devices)
            _warn(fewer(asked, name, _is_strict()))
            which = name
        else:
            which = devices[which]
    elif which != "cpu" and which not in devices:
        raise errors.invalid_device(which, devices)
    if len(devices) == 1 and (which != "cpu" or "cpu" in devices[0].lower()):
        from contextlib import ExitStack

        return ExitStack()  # all of the model is there: nothing to place
    return backend.device(which)


def configured_backend():
    """The backend that ``configure_gpu()`` set up; before that, the one it would."""
    from . import _detect

    return _detect.choose(None if _active is None else _active.backend)[0]


def _is_strict():
    return _active is not None and _active.settings.strict


def _is_function(model):
    return hasattr(model, "__code__")  # also a bound method


def backend_of(model):
    """The backend that runs this model, or None where it is no model."""
    from . import _detect, _keras

    keras = _keras.keras_of(model)
    if keras is not None:
        return _detect.choose(_keras.backend_name(keras))[0]
    return next((b for b in _detect.installed() if b.is_native(model)), None)


def _chosen(backend, selection):
    """The devices that ``selection`` asks for, of those that the backend has."""
    devices, shortage = _among(backend.devices(), selection)
    if shortage:
        _warn(fewer(shortage, ", ".join(devices), _is_strict()), depth=1)
    return devices


def _among(devices: "List[str]", selection: "Any") -> "Tuple[List[str], Optional[Tuple[str, str]]]":
    """Those of the configured devices that ``selection`` asks for, and what is short."""
    wanted = _wanted(devices, selection)
    chosen = [devices[position] for position in wanted if position < len(devices)]
    if len(chosen) == len(wanted):
        return chosen, None
    return chosen or devices[:1], (str(selection), _these(devices))


def _these(devices):
    return "these are configured: {}".format(", ".join(devices))


def _index(name, missing):
    index = None if _active is None else _active.settings.devices.index(name)
    return missing if index is None else index


def _wanted(devices, selection):
    """Positions among the configured devices; one past the end where a device is not there."""
    if selection.kind == "none":
        return [0]
    if selection.kind in ("count", "free") and selection.count:
        return range(selection.count)
    if selection.kind == "ids":
        return [i if isinstance(i, int) else _index(i, len(devices)) for i in selection.ids]
    return range(len(devices))
