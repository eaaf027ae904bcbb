"""``configure_gpu(parallelize=True)``: every Keras model is parallelized when it is compiled."""

import contextlib
import functools
import os
from typing import Any, Callable, Dict, Mapping, Optional

from .. import _keras, errors
from .._runtime import on_import, patching
from .._runtime.process import process
from .._runtime.within import Within
from . import wrappers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend import Backend

#: The modules whose classes define ``compile``, in every Keras since 2.0.
MODULES = [
    package + module
    for package in (
        "keras.",  # keras 2, keras-mxnet, tf.keras from 2.6 to 2.12
        "keras.src.",  # tf.keras from 2.13
        "tf_keras.src.",
        "tensorflow.python.keras.",
        "tensorflow.python.keras._impl.keras.",  # TensorFlow 1.4
        "tensorflow_core.python.keras.",  # TensorFlow 1.15 and 2.0
    )
    for module in ("engine.training", "engine.training_v1", "models")
] + ["keras.src.trainers.trainer"]  # Keras 3
CLASSES = ("Model", "Sequential", "Trainer")

#: The attribute of models for which the script has called ``parallelize()``.
BY_HAND = "_compat_by_hand"

# Models that are compiled within are parts of another one: an old Sequential compiles its inner
# model.
_compiling = Within()


def install(backend: "Backend", parallelize: "Callable[..., Any]") -> None:
    """Call ``parallelize`` with every Keras model from now on, before it is compiled.

    Arguments:
        backend: the configured one.
        parallelize: takes a model and the argument ``gpus``.
    """
    process.parallelizes_compiled = True
    environ = {name: os.environ.get(name) for name in backend.variables}

    def prepare(model: "Any", arguments: "Mapping[str, Any]") -> bool:
        process.uses_devices = True  # or a warning says why not
        _warn_of_changes(environ)
        if BY_HAND in vars(model):
            return False
        reason = _choice_of_script(model, arguments, backend) or _obstacle(model, parallelize)
        if reason is not None:
            errors.warn(
                f"parallelize=True leaves the model {model.name!r} as it is, because {reason}"
            )
        return reason is None

    def patch(module: "Any") -> None:
        for owner in [vars(module)[name] for name in CLASSES if name in vars(module)]:
            # A module may have another one's class; keras-mxnet's has its backend's Model.
            if "compile" in vars(owner) and patching.find(owner, "compile") is None:
                patching.Patch(owner, "compile", _compiling_after(prepare, owner.compile))
                if hasattr(owner, "__setstate__"):
                    patching.Patch(owner, "__setstate__", _unpickling(prepare, owner.__setstate__))

    for name in MODULES:
        on_import.call(patch, name)


def _compiling_after(
    prepare: "Callable[[Any, Mapping[str, Any]], bool]", compile: "Callable[..., Any]"
) -> "Callable[..., Any]":
    @functools.wraps(compile)  # with its attributes: Keras marks the method as its own
    def compile_parallelized(model: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        prepared = not _compiling.here() and prepare(model, kwargs)
        with _compiling:
            result = compile(model, *args, **kwargs)
        if prepared and kwargs.get("jit_compile") is True:
            prepare(model, kwargs)  # again: some backends refuse a model that is compiled so
        return result

    return compile_parallelized


def _unpickling(
    prepare: "Callable[[Any, Mapping[str, Any]], bool]", set_state: "Callable[..., Any]"
) -> "Callable[..., Any]":
    """Return a ``__setstate__`` that prepares the model afterwards.

    Keras 2 unpickles and compiles another model, whose attributes it copies to this one.
    """

    @functools.wraps(set_state)
    def set_state_parallelized(model: "Any", state: "Any") -> None:
        with _compiling:
            set_state(model, state)
        if getattr(model, "optimizer", None) is not None:
            prepare(model, {})

    return set_state_parallelized


def _obstacle(model: "Any", parallelize: "Callable[..., Any]") -> "Optional[str]":
    """Parallelize a model; return why that is impossible, as a sentence's end, or None.

    Whatever is raised, the script would run without it: the model becomes plain again. Under
    ``strict=True`` that is an error, and on ranks, each of which would train a separate model.
    """
    try:
        parallelize(model)
        return None
    except Exception as error:
        configuration = process.configuration
        if configuration is not None and (configuration.settings.strict or configuration.place):
            raise
        # In Keras 3 a layer may be a Trainer as well.
        if isinstance(error, errors.NotAModelError):
            return "its class is no keras.Model."
        with contextlib.suppress(Exception):
            parallelize(model, gpus=1)
        if isinstance(error, errors.CompatError):
            return f"it cannot run on several devices: {error}"
        return f"preparing it failed: {type(error).__name__}: {error}"


def _choice_of_script(
    model: "Any", arguments: "Mapping[str, Any]", backend: "Backend"
) -> "Optional[str]":
    """Return the script's own choice of devices for a model, as a sentence's end, or None."""
    if arguments.get("context") is not None:  # keras-mxnet
        return "it is compiled with context={!r}.".format(arguments["context"])
    strategy = arguments.get("distribute")  # tf.keras before 1.14
    for name in ("_distribution_strategy", "distribute_strategy"):
        strategy = strategy or getattr(model, name, None)
    if getattr(strategy, "num_replicas_in_sync", 1) > 1:  # there is always a default one
        return f"it was built under a {type(strategy).__name__}."
    distribution = getattr(_keras.keras_of(model), "distribution", None)
    if distribution is not None and distribution.distribution() is not None:
        return "keras.distribution.set_distribution() was called."
    if wrappers.splits_batches(model):
        return "it is a wrapper such as multi_gpu_model() makes, which splits batches itself."
    if any(hasattr(tensor, "assign") for tensor in getattr(model, "inputs", None) or ()):
        return "one of its inputs is a variable, which has no batch to split."
    placed = backend.placed_parts(model)
    if placed:
        return "parts of it were placed on {} by device().".format(", ".join(placed))
    return None


def _warn_of_changes(environ: "Dict[str, Optional[str]]") -> None:
    for name, before in sorted(environ.items()):
        now = os.environ.get(name)
        if now != before:
            environ[name], was = now, "not set" if before is None else before
            errors.warn(
                f"{name}={now} was set after configure_gpu() had chosen the devices (then it was "
                f"{was}), which stay as they are. Set it before, or leave it out."
            )
