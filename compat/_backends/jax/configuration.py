"""Differences between versions of JAX and of Keras 3 on JAX, in one place."""

import os
import re

import jax

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
    """The number of CPU devices that JAX will make; 0 where that was not set."""
    if hasattr(jax.config, "jax_num_cpu_devices"):
        return max(jax.config.jax_num_cpu_devices, 0)
    found = re.findall(rf"{_SIMULATED}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 0


def reads_profiles():
    """Whether a profile can be read, and has the operations of CPU devices: since JAX 0.7.2."""
    return jax.__version_info__ >= (0, 7, 2)
