"""The steps of ``configure_gpu()`` once its arguments are normalised and the backend is chosen."""

import os

from .. import _keras, _ranks, errors
from .._configuration import detection, device_choice, registry, tested_versions
from .._configuration.settings import Configuration, Settings, listed
from .._ranks import launchers, left_threads
from .._runtime.process import process


def device_request(selection, simulate, from_outside):
    """Return the request for devices, as reports and messages name it."""
    parts = [] if simulate and selection.kind == "all" else [str(selection)]
    parts += [f"simulate={simulate}"] * bool(simulate)
    parts += [f"COMPAT_SIMULATE={from_outside}"] * bool(from_outside)
    return ", ".join(parts)


def configure_once(call, chosen, reason, request, applied):
    """Configure, unless an earlier call did; ``applied``: more lines for the report."""
    _, selection, simulate, parsed = call
    active = process.configuration
    if active is not None and call == process.first_call[0]:
        return active
    if active is not None and process.configured_by is not None:
        errors.warn(
            f"configure_gpu() of the script changes nothing: {process.configured_by} has "
            f"configured this process ({active.settings.request()}). Start the script without it "
            f"for the script's own settings ({request})."
        )
        return active
    # Ids count inside what was visible before the first call narrowed it.
    environ = dict(os.environ) if active is None else process.first_call[1]
    place = launchers.launched(environ) or _ranks.own_place()
    if place is None:
        devices = device_choice.choose(selection, simulate, environ)
    elif simulate:
        devices = device_choice.Devices(simulated=1)
    else:
        devices = device_choice.choose_for_rank(selection, environ, place)
    if place is not None:
        left_threads.end_with_main_thread(place)
    settings = Settings(devices, gpus=request, **parsed)
    if active is not None:
        devices.settle(active.settings.devices.listed or 0)
        if (chosen.name, settings) == (active.backend, active.settings):
            return active
        raise errors.AlreadyConfiguredError(
            "configure_gpu() was called before in this process, with other settings.\n"
            f"first:  {active.backend}, {active.settings}\n"
            f"second: {chosen.name}, {settings}\n"
            "Devices are fixed once per process: make both calls the same, or drop one."
            + errors.in_notebook()
        )
    active = process.configuration = _configure(chosen, reason, settings, place)
    if place is not None:
        chosen.join(place)
    active.applied += applied if place is None else []
    active.warnings += [
        f"parallelize() put the model {name!r} on {listed(devices)} before configure_gpu() was "
        f"called, and there it stays; configured now: {listed(active.devices)}. Call "
        "configure_gpu() at the top of the script, or parallelize() the model again after it."
        for name, devices in process.parallelized_before
        if devices != active.devices
    ]
    process.parallelized_before.clear()
    process.first_call = call, environ
    for warning in active.warnings:
        errors.warn(warning)
    return active


def check_options(options, function):
    """Refuse options that no backend knows; a known one of another backend is no error."""
    all_options = registry.options(list(options)) if options else []
    unknown = sorted(set(options).difference(all_options))
    if unknown:
        from .._configuration import spelling  # for start-up time: it loads difflib

        option, code = unknown[0], function.__code__
        arguments = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        guess = spelling.meant(option, options[option], arguments + all_options)
        hint = f" Did you mean {guess}?" if guess else ""
        raise errors.UnknownOptionError(
            f"configure_gpu() has no argument {option!r}, and no backend has an option of that "
            f"name.{hint} Its arguments: {', '.join(arguments)}. Options of single backends: "
            f"{', '.join(all_options) or 'none'}."
        )


def _configure(chosen, reason, settings, place):
    """Apply the settings, or leave the environment as it was and raise."""
    _keras.check_floatx(settings.floatx, chosen)
    notes = (
        detection.keras_elsewhere(chosen)
        + settings.devices.problems
        + [
            f"The option {option!r} is for other backends: {chosen.name} ignores it."
            for option in sorted(settings.options)
            if option not in chosen.options
        ]
    )
    if settings.persist and not chosen.configuration_file:
        notes.append(f"persist=True writes nothing: {chosen.name} reads no configuration file.")
    undecided = settings.devices.undecided is not None
    if not undecided:
        notes += _shortage(settings.devices.shortage, settings.devices, settings)
    notes += chosen.overruled(settings, os.environ)
    variables = detection.keras_variable(chosen, os.environ)
    if not chosen.initialised():
        variables.update(chosen.environ(settings, os.environ))
    before = {name: os.environ.get(name) for name in set(variables).union(chosen.variables)}
    _set_environ(variables)
    try:
        applied, warnings = chosen.configure(settings)
        notes += warnings
        devices = chosen.devices()
        if undecided:  # a backend that does not choose among its GPUs takes all that it lists
            gpus = [device for device in devices if "cpu" not in device.lower()]
            settings.devices.settle(len(gpus), restricted=True)
            notes += _shortage(settings.devices.shortage, settings.devices, settings)
        only_cpu = settings.devices.gpus and all("cpu" in device.lower() for device in devices)
        if len(devices) < len(settings.devices) or only_cpu:
            names = listed(devices)
            seen = f"{chosen.framework} sees {names}"
            notes += _shortage((str(settings.devices), seen), names, settings)
        versions = _keras.versions(chosen)
        refuse_faulty(chosen.name, versions, devices)
        if settings.floatx:
            applied += _keras.set_floatx(settings.floatx, chosen)
    except BaseException:
        _set_environ(before)
        raise
    notes += tested_versions.outside(chosen.name, versions)
    return Configuration(
        chosen.name, reason, versions, devices, settings, variables, applied, notes, place
    )


def refuse_faulty(backend, versions, devices):
    """Refuse several devices with a framework that by itself trains wrong on them."""
    framework, fault, instead = tested_versions.fault(versions)
    if framework and len(devices) > 1:
        raise errors.unsupported(
            backend,
            f"train on several devices with {framework}: {fault}",
            f"{instead.capitalize()}, or one device: gpus=1.",
        )


def _set_environ(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _shortage(shortage, going_on_with, settings):
    """Return the warning of a shortage, in a list, where there is one."""
    return [errors.fewer(shortage, going_on_with, settings.strict)] if shortage else []
