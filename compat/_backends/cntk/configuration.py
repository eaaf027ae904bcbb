"""Default device of CNTK, which is fixed by its first use."""

import os

from ... import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

    from ..._configuration.settings import Settings


def name_of(device: "Any") -> str:
    """Return a device's name as CNTK's functions are written: "cpu()", "gpu(0)"."""
    return "cpu()" if device.type() == 0 else f"gpu({device.id()})"


def wanted_device(cntk: "Any", settings: "Settings", warnings: "List[str]") -> "Any":
    """Return the device to make the default one; None where CNTK is to choose.

    Arguments:
        cntk: the module.
        settings: the ``Settings``.
        warnings: a list to which warnings are added.
    """
    devices = settings.devices
    gpus = sum(device.type() != 0 for device in cntk.device.all_devices())
    devices.settle(gpus)
    if not gpus and (devices.gpus or devices.shortage):  # gpu(0) would be a ValueError
        warnings.append(
            "This CNTK shows no GPU: it is a build for the CPU, or CUDA's driver is not "
            "there. The package cntk-gpu is the build for GPUs."
        )
    elif devices.gpus:
        return cntk.device.gpu(devices.ordinals(os.environ)[0])
    if devices.gpus or devices.declined or devices.simulated or devices.shortage:
        return cntk.device.cpu()
    return None


def set_default(cntk: "Any", device: "Any", imported: "List[str]") -> str:
    """Fix the default device, and check that it is the requested one.

    ``try_set_default_device`` may return False for a device that it does not take, and True for
    one that it does not use.

    Arguments:
        cntk: the module.
        device: the device.
        imported: the modules that were imported before and may have fixed another device.

    Returns:
        A line for the report.
    """
    fixed = errors.too_late(
        "cntk",
        f"its default device was fixed when {(imported or ['cntk'])[0]} was imported, and cannot "
        f"become {name_of(device)}",
        "Call it before the first `import keras`.",
    )
    try:
        taken = cntk.device.try_set_default_device(device)
    except RuntimeError as error:  # another device is fixed
        raise fixed from error
    try:
        default, excluded = cntk.device.use_default_device(), None
        problem = f"its default device is {name_of(default)}"
    except RuntimeError as error:  # all devices are excluded
        default, excluded = None, error
        problem = str(error).partition("\n")[0].rstrip(".")
    if taken and default == device:
        return f"cntk.device.try_set_default_device({name_of(device)})"
    if imported and default is not None:
        raise fixed
    raise errors.device_failed(
        "cntk",
        name_of(device),
        problem,
        "See that cntk.device.set_excluded_devices() does not name it, and that no other process "
        "holds it.",
    ) from excluded
