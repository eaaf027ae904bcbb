"""Configuration of TensorFlow's runtime: its mode, its devices, their memory and their names.

This imports no TensorFlow. Functions that only read have, in all versions, the names in
``tf.config.experimental`` that they have in TensorFlow 2.0.
"""

import functools
import os
import sys

from ... import errors
from ..._configuration.discovery import HIP, visible_entries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional, Sequence

#: Returns an error that says what TensorFlow 2 cannot do, and a remedy.
unsupported = functools.partial(errors.unsupported, "tensorflow2")

# configure_gpu(option=...) -> the function of tf.config that sets it.
OPTIONS = {
    "allow_soft_placement": "config.set_soft_device_placement",
    "inter_op_parallelism_threads": "config.threading.set_inter_op_parallelism_threads",
    "intra_op_parallelism_threads": "config.threading.set_intra_op_parallelism_threads",
    "log_device_placement": "debugging.set_log_device_placement",
}


def session_config(soft: bool) -> "Any":
    """Return the configuration by ``tf.config`` for a session of v1 mode, which gets it only so.

    Arguments:
        soft: the value of ``allow_soft_placement``.
    """
    from tensorflow.python.eager import context

    config = context.context().config
    config.allow_soft_placement = soft  # Keras' own sessions have it
    return config


def apply_setting(tf: "Any", name: str, *arguments: "Any") -> str:
    """Call a function of TensorFlow's configuration, and return a line for the report.

    Raises:
        TooLateError: TensorFlow says that it has started and cannot change this any more.
    """
    module, _, last = name.rpartition(".")
    if module == "config" and not hasattr(tf.config, last):  # some were experimental
        name = "config.experimental." + last
    function = functools.reduce(getattr, name.split("."), tf)
    try:
        function(*arguments)
    except RuntimeError as error:
        imported = [module.split(".")[0] for module in sys.modules]  # in the order of import
        first = next(top for top in imported if top in ("keras", "tf_keras", "tensorflow"))
        raise errors.too_late(
            "tensorflow",
            "TensorFlow started with its first operation (it was imported by `import {}`), and "
            "tf.{} then says: {}".format(first, name, str(error).rstrip(".")),
            "Call it before the first model, variable or tensor is made, best before the first "
            "`import tensorflow` or `import keras`.",
        ) from error
    return "tf.{}({})".format(name, ", ".join(map(_shown, arguments)))


def _shown(argument):
    if isinstance(argument, list):
        return "[{}]".format(", ".join(map(_shown, argument)))
    return getattr(argument, "name", None) or repr(argument)


def chosen_gpus(tf: "Any", devices: "Any") -> "List[Any]":
    """Return TensorFlow's handles of the chosen GPUs, in the order of the request."""
    if not devices.gpus:
        return []
    physical = tf.config.experimental.list_physical_devices("GPU")
    if devices.undecided is not None:
        return [physical[position] for position in devices.positions]
    entries = visible_entries(os.environ)[0]
    if devices.variable == HIP:
        entries = (os.environ.get(HIP) or ",".join(devices.gpus)).split(",")
    if entries is not None and len(entries) < len(physical):
        raise errors.too_late(
            "tensorflow",
            f"{devices.variable}={os.environ.get(devices.variable)} was set after TensorFlow had "
            f"listed {len(physical)} GPUs",
            "Set it before the first `import tensorflow` or `import keras`.",
        )
    return [physical[i] for i in devices.ordinals(os.environ) if i < len(physical)]


def split_device(tf: "Any", device: "Any", limits: "Sequence[Optional[float]]") -> str:
    """Make one logical device per memory limit (MiB, or None) on a physical one."""
    word = "logical" if hasattr(tf.config, "set_logical_device_configuration") else "virtual"
    make = tf.config.experimental.VirtualDeviceConfiguration
    parts = [make(memory_limit=limit) for limit in limits]
    setting = apply_setting(tf, f"config.set_{word}_device_configuration", device, parts)
    size = f" of {limits[0]:g} MiB" if limits[0] else ""
    return "{}: {} of {}{}".format(setting.partition("(")[0], len(limits), device.name, size)


def limit_memory(tf: "Any", gpus: "List[Any]", settings: "Any") -> "List[str]":
    """Limit the memory that TensorFlow takes of each GPU, and return lines for the report."""
    if settings.memory.grow:
        name = "config.experimental.set_memory_growth"
        return [apply_setting(tf, name, gpu, True) for gpu in gpus]
    sizes = [settings.memory.size] * len(gpus)
    if settings.memory.fraction:
        totals = settings.devices.memory_totals()
        sizes = [total * settings.memory.fraction for total in totals]
        if not all(sizes):
            raise unsupported(
                "take a fraction of a GPU whose size the driver does not tell",
                'Give a size, such as memory="4GiB".',
            )
    return [split_device(tf, gpu, [size / 2.0**20]) for gpu, size in zip(gpus, sizes)]


def has_listed_devices() -> bool:
    """Return whether TensorFlow has listed its devices, for which it reads CUDA's variables."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    return context is not None and context._physical_devices is not None


def in_v1_mode(tf: "Any") -> bool:
    """Return whether ``tf.compat.v1.disable_v2_behavior()`` was called, as in TensorFlow 1."""
    return not runs_eagerly(tf) and not tf.compat.v1.control_flow_v2_enabled()


def runs_eagerly(tf: "Any") -> bool:
    """Return whether TensorFlow computes eagerly outside of functions."""
    v1 = tf.compat.v1
    return getattr(v1, "executing_eagerly_outside_functions", v1.executing_eagerly)()


def full_name(device: str) -> str:
    """Return the name of a device in TensorFlow's graphs: /device:CPU:1 for /cpu:1."""
    return "/device:" + device.strip("/").upper()


def short_name(device: str) -> str:
    """Return compat's name: /cpu:1 for /job:localhost/replica:0/task:0/device:CPU:1."""
    return "/" + device.split("device:")[-1].lower()
