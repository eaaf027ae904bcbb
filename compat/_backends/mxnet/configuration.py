"""Contexts of MXNet, the variables that it reads when it is imported, and GPU memory."""

import os
import subprocess

# MXNet reads it when it is imported (its documentation, "Environment Variables").
RESERVE = "MXNET_GPU_MEM_POOL_RESERVE"


def variables(settings, environ):
    """Return the environment variables to set, for ``MXNet.environ()``."""
    changed = settings.devices.environ(environ)
    if settings.memory is not None and settings.memory.fraction:
        reserve = str(int(round(100 * (1 - settings.memory.fraction))))
        if environ.get(RESERVE) != reserve:
            changed[RESERVE] = reserve
    return changed


def contexts(mx, devices):
    """Return the names of the contexts that settings choose."""
    if devices.undecided is not None:
        devices.settle(visible_gpus(mx))
    if devices.simulated:
        return [f"cpu({index})" for index in range(devices.simulated)]
    visible = visible_gpus(mx) if devices.gpus else 0
    ids = [index for index in devices.ordinals(os.environ) if index < visible]
    return [f"gpu({index})" for index in ids] or ["cpu(0)"]


def all_contexts(mx):
    """Return the names of all GPUs that MXNet sees, or of the CPU."""
    return [f"gpu({i})" for i in range(visible_gpus(mx))] or ["cpu(0)"]


def context_named(name):
    """Return the context that MXNet prints as ``name``, such as ``cpu(1)``."""
    import mxnet as mx

    kind, _, index = name.rstrip(")").partition("(")
    return mx.Context(kind, int(index))


def visible_gpus(mx):
    """Return the number of GPUs that MXNet sees."""
    if not hasattr(mx.context, "num_gpus"):
        return _usable_gpus(mx)
    try:
        return mx.context.num_gpus()
    except mx.base.MXNetError:  # built with CUDA, and no driver there
        return 0


def _usable_gpus(mx):
    """Return the number of GPUs that take an array: MXNet before 1.3 does not count them."""
    try:
        listed = len(mx.test_utils.list_gpus())
    except subprocess.CalledProcessError:  # no driver
        return 0
    for index in range(listed):  # the driver's, which may be hidden, or of no use to this build
        try:
            mx.nd.zeros((1,), mx.gpu(index)).wait_to_read()
        except mx.base.MXNetError:
            return index
    return listed


def report_lines(mx, settings, first):
    """Return lines of the configuration's report, and warnings.

    Arguments:
        mx: the module ``mxnet``.
        settings: the arguments of ``configure_gpu()``.
        first: the name of the first context.
    """
    lines, warnings = [f"models not parallelized run on {first}"], []
    if settings.devices.gpus and not visible_gpus(mx):
        lines.append(_no_gpu())
    elif settings.devices.gpus and not settings.devices.are_shown_by(os.environ):
        lines.append("other GPUs stay visible: mxnet was imported before")
    if settings.memory is not None:
        lines.append(_memory_line(settings.memory, warnings))
    return lines, warnings


def _no_gpu():
    try:
        from mxnet.runtime import Features  # no attribute of mxnet before 1.6
    except ImportError:  # before 1.5 it does not report how it was built
        return "mxnet finds no GPU: look at the driver, and that this is an mxnet-cu package"
    if Features().is_enabled("CUDA"):
        return "mxnet was built with CUDA, but finds no GPU: look at the driver and its version"
    return "this mxnet was built without CUDA: install the mxnet-cu package for your CUDA"


def _memory_line(memory, warnings):
    if memory.grow:
        return "memory: MXNet takes it as it is needed, always"
    if memory.size:
        warnings.append(
            f"memory={memory} was asked for, but mxnet limits GPU memory by no size. It takes "
            "memory as it is needed; memory=0.5 makes it give cached memory back while less than "
            "half of a GPU is free."
        )
        return "memory: no limit (MXNet has none by size)"
    free = 1 - memory.fraction
    return f"memory: cached memory is given back while less than {free:.0%} of a GPU is free"
