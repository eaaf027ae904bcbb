"""The public calls: normalise the arguments, choose the backend, delegate to it."""

import os

from . import errors
from ._settings import Configuration, Settings, parse_floatx, parse_memory, parse_simulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional, Sequence, Tuple, Union

    from .backend import Backend

    Gpus = Union[None, int, str, Sequence[Union[int, str]]]

_active = None  # type: Optional[Configuration]
_first_call = None  # type: Any


def configure_gpu(
    gpus: "Gpus" = None,
    *,
    backend: "Optional[str]" = None,
    memory: "Union[None, float, str]" = None,
    floatx: "Optional[str]" = None,
    simulate: "Optional[int]" = None,
    persist: bool = False,
    strict: bool = False,
    **options: "Any",
) -> "Configuration":
    """Choose this process's GPUs, their memory and the float type, on whichever backend it uses.

    Call it once, at script top: before Keras or the backend is imported everything can still
    be set. A second call with the same settings does nothing.

    Arguments:
        gpus: None for all visible GPUs, a count, -1 for all, ids as a list or a text
            (``[0, 2]``, ``"0,2"``), GPU or MIG names, ``"free"`` or ``"free:2"`` for idle ones,
            ``0``, ``[]`` or ``"cpu"`` for none. Ids count inside ``CUDA_VISIBLE_DEVICES`` where
            that is set.
        backend: "theano", "tensorflow", "mxnet", ...; None: the one that Keras will use.
        memory: "grow" (take memory as needed), a fraction of each GPU (0.5), or a size per GPU
            ("4GiB"). Each backend maps it to its own setting or says that it cannot.
        floatx: "float16", "float32" or "float64", for Keras and the backend.
        simulate: this many CPU devices stand in for GPUs, to test a script for several GPUs
            where there is none.
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
    global _active, _first_call
    from . import _detect, _devices

    selection = _devices.parse_gpus(gpus)
    parsed = parse_memory(memory), parse_floatx(floatx), bool(persist), bool(strict), options
    simulate = parse_simulate(simulate)
    _check_options(options)
    chosen, reason = _detect.choose(backend)
    call = (chosen.name, selection, simulate, parsed)
    if _active is not None and call == _first_call[0]:
        return _active
    # Ids count inside what was visible before the first call narrowed it.
    environ = dict(os.environ) if _active is None else _first_call[1]
    settings = Settings(_devices.choose(selection, simulate, environ), *parsed)
    if _active is not None:
        if (chosen.name, settings) == (_active.backend, _active.settings):
            return _active
        raise errors.already_configured(
            "{}, {}".format(_active.backend, _active.settings),
            "{}, {}".format(chosen.name, settings),
        )
    _active = _configure(chosen, reason, settings)
    _first_call = call, environ
    for warning in _active.warnings:
        _warn(warning)
    return _active


def _check_options(options):
    """Refuse options that no backend knows; a known one of another backend is no error."""
    if options:
        from . import _registry

        known = sorted({option for b in _registry.backends() for option in b.options})
        for option in sorted(options):
            if option not in known:
                raise errors.unknown_option(option, known)


def _configure(chosen: "Backend", reason: str, settings: "Settings") -> "Configuration":
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
    if settings.devices.shortage:
        notes.append(_fewer(settings.devices.shortage, settings.devices, settings.strict))
    notes += chosen.overruled(settings, os.environ)
    variables = _detect.keras_variable(chosen, os.environ)
    if not chosen.initialised():
        variables.update(chosen.environ(settings, os.environ))
    before = {name: os.environ.get(name) for name in variables}
    _set_environ(variables)
    try:
        applied = list(chosen.configure(settings))
        notes += settings.warnings
        devices = chosen.devices()
        if len(devices) < len(settings.devices) or _only_cpu(devices, settings):
            shortage = (
                str(settings.devices),
                "{} sees {}".format(chosen.framework, ", ".join(devices)),
            )
            notes.append(_fewer(shortage, ", ".join(devices), settings.strict))
        if settings.floatx:
            applied += _keras.set_floatx(settings.floatx, chosen)
    except BaseException:
        _set_environ(before)
        raise
    versions = _keras.versions(chosen)
    return Configuration(
        chosen.name, reason, versions, devices, settings, variables, applied, notes
    )


def _set_environ(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _only_cpu(devices, settings):
    return settings.devices.gpus and all("cpu" in device.lower() for device in devices)


def _fewer(shortage, going_on_with, strict):
    asked, found = shortage
    if strict:
        raise errors.devices_not_found(asked, found)
    return errors.fewer_devices(asked, found, "Going on with {}".format(going_on_with))


def _warn(text):
    import warnings

    # Shown at the line that called the public function, which called this one.
    warnings.warn(text, errors.CompatWarning, stacklevel=3)


def parallelize(model: "Any", gpus: "Gpus" = None, *, strategy: "Optional[str]" = None) -> "Any":
    """Run a model on several devices: the same object, trained to the same numbers.

    Each batch is split evenly over the devices, in forward and backward pass; losses, metrics
    and the update see the whole batch. Everything else about the model stays as it is. With one
    device nothing changes, and a model that ran on several goes back to plain.

    Arguments:
        model: a Keras model, compiled or not, fitted or not; or a function that builds one.
        gpus: which of the configured devices, in the forms of ``configure_gpu(gpus=)``: a
            count, ids counted among them from 0, or names of GPUs; None for all.
        strategy: None, the only value so far: replicas in this process.

    Returns:
        The model that was given (or built).

    Raises:
        NotAModelError: ``model`` is neither a Keras model nor a function (a ``TypeError``).
        InvalidArgumentError: ``gpus`` is not understood (a ``ValueError``).
        UnsupportedError: the backend cannot run several devices in one process
            (a ``NotImplementedError``).
        DevicesNotFoundError: after ``configure_gpu(strict=True)`` (a ``RuntimeError``).
    """
    from . import _detect, _devices, _keras

    selection = _devices.parse_gpus(gpus)
    if strategy is not None:
        raise errors.invalid_strategy(strategy)
    keras = _keras.keras_of(model)
    if keras is None and hasattr(model, "__code__"):  # a function or a bound method
        function, model = model, model()
        keras = _keras.keras_of(model)
        if keras is None:
            raise errors.builds_no_model(function.__qualname__, model)
    if keras is None:
        raise errors.not_a_model(model)
    backend, _ = _detect.choose(_keras.backend_name(keras))
    if _active is not None and _active.backend != backend.name:
        raise errors.wrong_backend(backend.name, _active.backend)
    devices, shortage = _among(backend.devices(), selection)
    if shortage:
        _warn(_fewer(shortage, ", ".join(devices), _active is not None and _active.settings.strict))
    return backend.parallelize(model, devices)


def _among(devices: "List[str]", selection: "Any") -> "Tuple[List[str], Optional[Tuple[str, str]]]":
    """Those of the configured devices that ``selection`` asks for, and what is short."""
    wanted = _wanted(devices, selection)
    chosen = [devices[position] for position in wanted if position < len(devices)]
    if len(chosen) == len(wanted):
        return chosen, None
    configured = "these are configured: {}".format(", ".join(devices))
    return chosen or devices[:1], (str(selection), configured)


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
