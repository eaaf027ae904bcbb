"""Diagnosis of GPUs that Theano's flags name and that did not come up when it was imported."""

import logging

from ... import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional, Tuple


class Failure(logging.Handler):
    """Handler that keeps the error that Theano only logs when a GPU does not come up."""

    error = None

    def emit(self, record):
        """Keep the error of a record, if it has one."""
        if record.exc_info:
            self.error = record.exc_info[1] or self.error


def _contexts(theano):
    """Return contexts and GPUs that the flags name (None: the default), and the active ones."""
    config, gpuarray = theano.config, getattr(theano, "gpuarray", None)
    requested = [(None, config.device)] if config.device != "cpu" else []
    named = [entry.partition("->") for entry in config.contexts.split(";") if entry]
    requested += [(name.strip(), gpu.strip()) for name, _, gpu in named]
    active = gpuarray.type.list_contexts() if gpuarray and gpuarray.pygpu_activated else ()
    return requested, active


def active_gpus(theano: "Any") -> "Dict[str, Optional[str]]":
    """Return the GPUs that came up, each with the first of its contexts."""
    requested, active = _contexts(theano)
    contexts: "Dict[str, Optional[str]]" = {}
    for context, gpu in requested:
        if context in active:
            contexts.setdefault(gpu, context)
    return contexts


def check(theano, failure, settings):
    """Report a GPU that did not come up: Theano logs it, and goes on with the CPU.

    Arguments:
        theano: the module.
        failure: the error that Theano has logged, or None.
        settings: the ``Settings``.

    Returns:
        Lines for the report, and warnings.
    """
    requested, active = _contexts(theano)
    for name, gpu in requested if active else ():
        # Theano 1.0.5 says "Mapped name dev0", but registers no second name for one GPU.
        up = theano.gpuarray.init_dev.devmap
        if name not in active and gpu in up:
            theano.gpuarray.type.reg_context(name, up[gpu])  # which makes it active
    gpus = ", ".join(dict.fromkeys(gpu for context, gpu in requested if context not in active))
    if not gpus:
        return [], []
    problem, remedy = reason(theano, failure)
    error = errors.device_failed("theano", gpus, problem, remedy)
    if settings.strict:
        raise error from failure
    return [f"{gpus} did not come up: {problem}"], [str(error)]


def reason(theano: "Any", failure: "Optional[BaseException]") -> "Tuple[str, str]":
    """Return why a GPU did not come up, and what to do."""
    if failure is not None:
        texts = [a.decode("utf-8", "replace") if isinstance(a, bytes) else a for a in failure.args]
        return (
            ", ".join(map(str, texts)),
            "Look at the driver (nvidia-smi) and at CUDA (CUDA_ROOT), or choose the CPU: gpus=0.",
        )
    if getattr(getattr(theano, "gpuarray", None), "pygpu", theano) is None:
        return (
            "the package pygpu is missing, or older than 0.7",
            "Install libgpuarray and pygpu 0.7, or choose the CPU: gpus=0.",
        )
    return (
        "theano logged the reason when it was imported",
        "Look at its log, or call configure_gpu() before `import theano`.",
    )
