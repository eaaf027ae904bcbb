"""The names that scripts for several GPUs were written with, on every backend and every Keras.

``multi_gpu_model`` (Keras 2.0.9 to 2.3, tf.keras to 2.3) and ``make_parallel`` (kuza55's script
of 2016) returned another model, which held the old one as a layer. So do these, since scripts
rely on it: ``parallel.layers[-2]`` and ``parallel.get_layer(template.name)`` give the template.
What they return is given to ``parallelize()``; the template stays a model of its own, with the
same weights.
"""

import sys

from .. import _api, _ranks, errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Sequence, Union


def multi_gpu_model(
    model: "Any",
    gpus: "Union[None, int, Sequence[int]]" = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> "Any":
    """Return a model that trains and predicts as ``model`` does, on several devices.

    It has the signature, the meaning of ``gpus`` and the errors of ``keras.utils.multi_gpu_model``
    (Keras 2.3). It differs where that was wrong: a batch is split evenly, whatever its size, and
    the result can be saved whole. New code should call ``parallelize()``, which returns the model
    that it was given.

    Arguments:
        model: a Keras model with symbolic inputs (functional, or Sequential with an input shape).
        gpus: a number of devices, 2 or more, or a list of their ids; None, 0 and [] are all.
        cpu_merge: accepted; where the outputs are merged is the backend's choice.
        cpu_relocation: accepted; the weights stay the template's. (Keras cloned the template, so
            that its weights were no longer trained: keras#11313.)

    Returns:
        Another model, not compiled: ``model`` is one of its layers and shares its weights.

    Raises:
        InvalidArgumentError: fewer than two devices, or some that are not there, in Keras' words
            (a ``ValueError``).
        NotAModelError: ``model`` is not a Keras model with symbolic inputs (a ``TypeError``).
        UnsupportedError: the backend cannot run several devices in one process.
    """
    backend = _backend(model, "multi_gpu_model")
    if _ranks.own_place() is not None:  # each rank has one device, whatever ``gpus``
        return _api.parallelize(_wrapped(model))
    devices = backend.devices()
    available = _as_gpus(devices)
    if not gpus:
        gpus = len(available)
    if isinstance(gpus, (list, tuple)):
        number, ids = "len(gpus)", list(gpus)
    elif isinstance(gpus, int):
        number, ids = "gpus", list(range(gpus))
    else:
        raise errors.invalid_number_option("gpus", gpus)
    whole = [i for i in ids if isinstance(i, int)]
    count = max([2, len(ids)] + [i + 1 for i in whole])
    simulated = (
        f" On a machine with fewer, `compat run --simulate {count} script.py` lets {count} CPU "
        "devices stand in for GPUs, on all backends but CNTK."
    )
    if len(ids) < 2:  # in the words of keras/utils/multi_gpu_utils.py, which users search for
        raise errors.InvalidArgumentError(
            f"For multi-gpu usage to be effective, call `multi_gpu_model` with `{number} >= 2`. "
            f"Received: `gpus={gpus}`.{simulated}"
        )
    wanted = [f"/gpu:{i}" for i in ids]
    if not set(wanted) <= set(available):
        raise errors.InvalidArgumentError(
            f"To call `multi_gpu_model` with `gpus={gpus}`, we expect the following devices to be "
            f"available: {['/cpu:0'] + wanted}. However this machine only has: "
            f"{['/cpu:0'] + available}. Try reducing `gpus`.{simulated}"
        )
    # An id that stands twice, two replicas on one GPU in Keras, is one here: the same numbers.
    chosen = [devices[i] for i in sorted(set(ids), key=ids.index)]
    return _api.note_by_hand(backend.parallelize(_wrapped(model), chosen))


def make_parallel(model: "Any", gpu_count: int) -> "Any":
    """Return a model that trains and predicts as ``model`` does, on the first devices.

    As kuza55's ``make_parallel``, with two differences: no row of a batch is dropped, and the
    outputs keep their names. As there, more devices than the machine has are no error; a warning
    says so.

    Arguments:
        model: a Keras model with symbolic inputs (functional, or Sequential with an input shape).
        gpu_count: a number of devices, 1 or more.

    Returns:
        Another model, not compiled: ``model`` is one of its layers and shares its weights.

    Raises:
        InvalidArgumentError: ``gpu_count`` is not such a number (a ``ValueError``).
        NotAModelError: ``model`` is not a Keras model with symbolic inputs (a ``TypeError``).
        UnsupportedError: the backend cannot run several devices in one process.
        DevicesNotFoundError: after ``configure_gpu(strict=True)``.
    """
    if isinstance(gpu_count, bool) or not isinstance(gpu_count, int) or gpu_count < 1:
        raise errors.invalid_number_option("gpu_count", gpu_count)
    _backend(model, "make_parallel")
    return _api.parallelize(_wrapped(model), gpu_count)


def unwrap(model: "Any") -> "Any":
    """Return the model inside of a wrapper that ``multi_gpu_model`` or ``make_parallel`` made.

    This works for the wrappers of Keras, TensorFlow and compat, and for copies of kuza55's recipe.
    For old files, ``compat unwrap old.h5`` does the same without loading them.

    Arguments:
        model: a Keras model.

    Returns:
        The model inside, the very object: it has the trained weights, and is compiled only if it
        was compiled by itself. A model that is not a wrapper is returned as it is, so that
        ``compat.unwrap(model).save(...)`` works in scripts that wrap on some machines only.

    Raises:
        NotAModelError: ``model`` is not a Keras model (a ``TypeError``).
    """
    from .. import _keras  # for start-up time
    from .._keras import wrappers  # for start-up time

    if _keras.keras_of(model) is None:
        raise errors.NotAModelError(
            f"unwrap() takes a Keras model; it was given {errors.class_of(model)}. For a file "
            "there is the command compat unwrap."
        )
    inner = wrappers.inside(model)
    return model if inner is None else inner


def _backend(model, function):
    """Return the backend of a model that can be wrapped."""
    from .. import _keras  # for start-up time

    if _keras.keras_of(model) is None or not getattr(model, "outputs", None):
        raise errors.NotAModelError(
            f"{function}() takes a Keras model with symbolic inputs, functional or Sequential "
            "with an input shape, to make another one around it; it was given "
            f"{errors.class_of(model)}. compat.parallelize() takes any Keras model."
        )
    return _api.backend_of(model)


def _as_gpus(devices):
    """Return the devices to train on, by Keras' names; a lone CPU is none."""
    if len(devices) == 1 and "cpu" in devices[0].lower():
        return []
    return [f"/gpu:{i}" for i in range(len(devices))]


def _wrapped(template):
    """Return a model with the template's inputs whose only layer with weights is the template.

    An identity per output stands where Keras concatenated the replicas' outputs, and has the
    output's name, as theirs had.
    """
    from .. import _keras  # for start-up time

    keras = _keras.keras_of(template)
    outputs = template(template.inputs if len(template.inputs) > 1 else template.inputs[0])
    several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    named = [
        _keras.identity(keras, name)(output)
        for name, output in zip(_numbered(_keras.output_names(template)), several)
    ]
    return keras.models.Model(template.inputs, named)


def _numbered(names):
    """Return the names, numbered where they occur more than once: _1, _2, as Keras does."""
    return [
        f"{name}_{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


# Names of old scripts -----------------------------------------------------------------------


def install_legacy_names() -> "List[str]":
    """Give old Keras scripts their names for devices and sessions, on any Keras and backend.

    ``keras.utils.multi_gpu_model``, and the modules it was imported from
    (``keras.utils.multi_gpu_utils``, ``keras.utils.training_utils``), get compat's function. That
    replaces Keras' own, where Keras still has it, which needs TensorFlow and real GPUs.
    ``keras.backend.set_session`` and ``get_session``, also in ``keras.backend.tensorflow_backend``,
    are put back where Keras has lost them. All this in ``keras`` and in ``tf.keras``, if these run
    on the configured backend. Call it after ``configure_gpu()``, since it imports Keras, and before
    the script imports the names.

    Returns:
        The names that were set, such as "keras.utils.multi_gpu_model".

    Raises:
        NotInstalledError, BrokenInstallError: as ``configure_gpu()``.
    """
    from .. import _keras  # for start-up time

    functions = {
        multi_gpu_model: ["utils", "utils.multi_gpu_utils", "utils.training_utils"],
        get_session: ["backend", "backend.tensorflow_backend"],
        set_session: ["backend", "backend.tensorflow_backend"],
        _get_available_gpus: ["backend.tensorflow_backend"],
    }
    installed: "List[str]" = []
    for keras in _keras.keras_packages(_api.configured_backend()):
        for function, places in functions.items():
            for parent in (f"{keras}.{place}" for place in places):
                installed += _install(parent, function.__name__, function)
    return installed


def _install(parent, name, function):
    """Set an attribute of modules, unless Keras' own is to stay; return its path, in a list."""
    modules = _modules(parent)
    if function is multi_gpu_model:
        lacking = [m for m in modules if getattr(m, name, None) is not function]
    else:  # TensorFlow 1.15 warns where a deprecated name is read
        lacking = [m for m in modules if name not in dir(m)]
    for module in lacking:
        setattr(module, name, function)
    return [f"{parent}.{name}"] if lacking else []


def _modules(path):
    """Return the modules of that dotted path; an empty one is made where Keras has lost it.

    ``tf.keras.utils`` and what ``import tensorflow.keras.utils`` gives are not always the same.
    """
    import importlib
    import types

    parent, _, name = path.rpartition(".")
    parents = _modules(parent) if parent else []
    modules = [getattr(module, name) for module in parents if hasattr(module, name)]
    try:
        modules.append(importlib.import_module(path))
    except ImportError:
        if not modules:
            modules.append(types.ModuleType(path, "Lost in this Keras; compat put it back."))
        sys.modules[path] = modules[0]
    for module in parents:
        if not hasattr(module, name):
            setattr(module, name, modules[-1])
    return modules


def _session_functions():
    """Return tf.keras' functions for its session, or None where nothing runs in sessions."""
    tf = sys.modules.get("tensorflow")
    if tf is None or getattr(tf, "executing_eagerly", bool)():  # came with TensorFlow 1.7
        return None
    functions = getattr(tf.compat, "v1", tf).keras.backend
    return functions if hasattr(functions, "set_session") else None  # not in Keras 3


def get_session() -> "Any":
    """Return Keras' session, where TensorFlow runs in sessions.

    Raises:
        UnsupportedError: it does not, or Keras runs on another framework.
    """
    functions = _session_functions()
    if functions is None:
        raise errors.UnsupportedError(
            "get_session() has nothing to return: this Keras runs in no TensorFlow session. Call "
            "models and functions directly; compat.configure_gpu() has what a session's "
            "ConfigProto set."
        )
    return functions.get_session()


def set_session(session: "Any") -> None:
    """Make this Keras' session, where TensorFlow runs in sessions; else warn that none does."""
    functions = _session_functions()
    if functions is not None:
        return functions.set_session(session)

    errors.warn(
        "set_session() does nothing here: this Keras runs in no TensorFlow session, and the "
        "session's settings have no effect. Pass them to compat.configure_gpu(), such as "
        'memory="grow" for allow_growth.'
    )


def _get_available_gpus():
    return _as_gpus(_api.configured_backend().devices())
