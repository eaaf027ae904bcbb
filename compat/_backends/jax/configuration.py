"""Devices of JAX, their memory, and differences between its versions."""

import os
import re
import sys

import jax

try:
    from jax.extend.core import Literal as Literal
    from jax.extend.core import Primitive as Primitive
except ImportError:  # JAX before 0.4.27
    from jax.core import Literal as Literal
    from jax.core import Primitive as Primitive

from ... import errors
from ..._configuration.settings import listed

_SIMULATED = "--xla_force_host_platform_device_count"


def simulate(number):
    """Have the CPU stand in for a number of devices, before JAX makes them.

    JAX 0.5 has an option for it. Before, XLA reads a variable when JAX makes its devices.

    Returns:
        What was set, a line of ``Configuration.applied``.
    """
    if hasattr(jax.config, "jax_num_cpu_devices"):
        jax.config.update("jax_num_cpu_devices", number)
        return f"jax.config.update('jax_num_cpu_devices', {number})"
    flags = re.sub(rf"{_SIMULATED}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{_SIMULATED}={number}"])
    return f"XLA_FLAGS={os.environ['XLA_FLAGS']}"


def simulated():
    """Return the number of CPU devices that JAX will make; 0 where that was not set."""
    if hasattr(jax.config, "jax_num_cpu_devices"):
        return max(jax.config.jax_num_cpu_devices, 0)
    numbers = re.findall(rf"{_SIMULATED}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(numbers[-1]) if numbers else 0


def reads_profiles():
    """Return whether profiles can be read and include CPU devices: since JAX 0.7.2."""
    return jax.__version_info__ >= (0, 7, 2)


def device_name(device):
    """Return compat's name of a device of JAX's.

    In a rank, the ids of CPU devices are those of all ranks: 2048 is rank 1's first.
    """
    number = device.local_hardware_id if device.platform == "cpu" else None
    return f"{device.platform}:{device.id if number is None else number}"


def devices_by_name():
    """Return JAX's devices, by Keras' names for them."""
    return {device_name(device): device for device in jax.local_devices()}


def gpus():
    """Return JAX's devices other than CPUs."""
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def check_devices_made(settings):
    """Raise an error if settings differ from the devices that JAX has made already."""
    made, chosen = jax.local_devices(), settings.devices
    on_cpu = made[0].platform == "cpu"
    if chosen.simulated:
        as_asked = on_cpu and len(made) == chosen.simulated
    elif chosen.gpus:
        everything = list(chosen.positions) == list(range(len(made)))
        as_asked = not on_cpu and everything and not settings.memory
    else:
        as_asked = on_cpu or not chosen.declined
    if as_asked:
        return
    imported = [module.split(".")[0] for module in sys.modules]  # in the order of import
    first = next(top for top in imported if top in ("keras", "jax"))
    raise errors.too_late(
        "jax",
        f"JAX made its devices ({listed(list(devices_by_name()))}) with its first operation (it "
        f"was imported by `import {first}`), and cannot change them or their memory any more "
        f"({settings})",
        "Call it before the first model, variable or array is made, best before the first "
        "`import jax` or `import keras`.",
    )


def fraction(settings):
    """Return the requested size, as a fraction of each GPU."""
    totals = set(settings.devices.memory_totals())
    if len(totals) != 1 or 0 in totals:
        raise one_fraction_for_all_gpus(settings.memory)
    return min(1.0, settings.memory.size / float(totals.pop()))


def one_fraction_for_all_gpus(memory):
    """Return the error of a memory limit that is not one fraction for all GPUs."""
    return errors.unsupported(
        "jax",
        f"limit memory to {memory}: it takes one fraction for all GPUs, and nvidia-smi does not "
        "tell that they all have the same amount",
        'Use a fraction such as memory=0.5, or memory="grow".',
    )
