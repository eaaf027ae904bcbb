"""Configuration of TensorFlow's runtime: its mode, its devices, their memory and their names.

This imports no TensorFlow. What only reads has its name of TensorFlow 2.0, in
``tf.config.experimental``, in all later ones.
"""

import functools
import os
import sys

from ... import errors
from ..._configuration.discovery import HIP, visible_entries

#: What TensorFlow 2 cannot do, and a remedy, as an error.
unsupported = functools.partial(errors.unsupported, "tensorflow2")

# configure_gpu(option=...) -> the function of tf.config that sets it.
OPTIONS = {
    "allow_soft_placement": "config.set_soft_device_placement",
    "inter_op_parallelism_threads": "config.threading.set_inter_op_parallelism_threads",
    "intra_op_parallelism_threads": "config.threading.set_intra_op_parallelism_threads",
    "log_device_placement": "debugging.set_log_device_placement",
}


def session_config(soft):
    """What a session of v1 mode has of tf.config only where it is given no configuration."""
    from tensorflow.python.eager import context

    config = context.context().config
    config.allow_soft_placement = soft  # Keras' own sessions have it
    return config


def apply_setting(tf, name, *arguments):
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


def chosen_gpus(tf, devices):
    """TensorFlow's handles of the chosen GPUs, in the order asked for."""
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


def split_device(tf, device, limits):
    """Make one logical device per memory limit (MiB, or None) on a physical one."""
    known = "logical" if hasattr(tf.config, "set_logical_device_configuration") else "virtual"
    make = tf.config.experimental.VirtualDeviceConfiguration
    made = [make(memory_limit=limit) for limit in limits]
    setting = apply_setting(tf, f"config.set_{known}_device_configuration", device, made)
    size = f" of {limits[0]:g} MiB" if limits[0] else ""
    return "{}: {} of {}{}".format(setting.partition("(")[0], len(limits), device.name, size)


def limit_memory(tf, gpus, settings):
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


def has_listed_devices():
    """Return whether TensorFlow has listed its devices, in which it looks at CUDA's variables."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    return context is not None and context._physical_devices is not None


def in_v1_mode(tf):
    """Return whether ``tf.compat.v1.disable_v2_behavior()`` was called, as in TensorFlow 1."""
    return not runs_eagerly(tf) and not tf.compat.v1.control_flow_v2_enabled()


def runs_eagerly(tf):
    """Return whether TensorFlow computes eagerly where no function is traced."""
    v1 = tf.compat.v1
    return getattr(v1, "executing_eagerly_outside_functions", v1.executing_eagerly)()


def full_name(device):
    """/cpu:1 as TensorFlow's graphs name it: /device:CPU:1."""
    return "/device:" + device.strip("/").upper()


def short_name(device):
    """/job:localhost/replica:0/task:0/device:CPU:1 as compat names it."""
    return "/" + device.split("device:")[-1].lower()
