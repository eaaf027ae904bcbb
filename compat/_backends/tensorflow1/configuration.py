"""Configuration of devices and memory that every session of TensorFlow 1 begins with."""

import copy
import ctypes
import os
import sys
import threading

from ... import _keras, errors
from ..._runtime import patching
from .._tensorflow.graph import v1_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List, Optional

    from ..._configuration.settings import Settings

#: Options of ``configure_gpu()``: fields of ``ConfigProto``.
OPTIONS = (
    "allow_soft_placement",
    "inter_op_parallelism_threads",
    "intra_op_parallelism_threads",
    "log_device_placement",
    "device_count",
)

_defaults = None  # a function that returns the ConfigProto


def set_session_defaults(defaults: "Optional[Callable[[], Any]]") -> None:
    """Give every session made from now on ``defaults()``; a config that it is given wins.

    A session is made by Keras, again after ``clear_session``, and by users: all of them through
    ``BaseSession``. None removes the defaults.
    """
    global _defaults
    from tensorflow.python.client.session import BaseSession

    _defaults = defaults
    patch = patching.find(BaseSession, "__init__")
    if defaults is None and patch is not None:
        patch.take_back()
    elif defaults is not None and patch is None:
        plain = BaseSession.__init__

        def __init__(self, target="", graph=None, config=None):
            plain(self, target, graph, merged(_defaults(), config))

        patching.Patch(BaseSession, "__init__", __init__)


def release_callables_of_open_sessions_alone() -> None:
    """Keep TensorFlow 1.8 from crashing where a callable is released after its session.

    Keras' functions are callables. Once ``clear_session()`` has let go of a model and its session,
    Python collects the two in any order. Later versions check it themselves.
    """
    from tensorflow.python.client.session import BaseSession

    kind = getattr(BaseSession, "_Callable", None)
    if kind is None or patching.find(kind, "__del__") is not None:
        return
    release = kind.__del__

    def __del__(self):
        if self._session._session is not None:
            release(self)

    patching.MendingPatch(kind, "__del__", __del__)


def merged(config, overrides):
    """Return a ``ConfigProto`` overridden by the one that a session is given, if any."""
    result = copy.deepcopy(config)
    if overrides is None:
        return result
    if type(overrides) is not type(config):
        return overrides  # TensorFlow's own error says what is wrong
    overrides = _without_defaults(overrides)
    limits = getattr(overrides.gpu_options, "experimental", None)
    if limits is not None and len(limits.virtual_devices):  # merging would add them up
        result.gpu_options.experimental.ClearField("virtual_devices")
    result.MergeFrom(overrides)
    return result


def _without_defaults(config):
    """Return a session's config without the defaults that Keras or TensorFlow have put there."""
    from tensorflow.python.eager import context

    result = copy.deepcopy(config)
    context = context.context() if hasattr(context, "context") else None
    default = context.config.device_count if hasattr(context, "config") else {}  # 1.14, 1.15
    for device in default:  # tf.keras: one CPU, and every GPU there is
        if result.device_count.get(device) == default[device]:
            del result.device_count[device]
    if str(result.intra_op_parallelism_threads) == os.environ.get("OMP_NUM_THREADS"):
        result.ClearField("intra_op_parallelism_threads")  # keras 2.2
    return result


def _missing(config, other):
    """Return the fields of a config that another one lacks, as text."""
    missing = []
    for field, value in config.ListFields():
        part, both = type(config)(**{field.name: value}), copy.deepcopy(other)
        both.MergeFrom(part)
        if both != other:
            missing.append(" ".join(str(part).split()))
    return ", ".join(missing)


def ensure_no_other_session(tf: "Any", config: "Any") -> None:
    """Check that no session with another configuration is in use.

    Raises:
        TooLateError: there is one.
    """
    for keras in imported_keras_packages():
        session = session_of(keras)
        missing = session and _missing(config, session._config or type(config)())
        if not missing:
            continue
        with session.graph.as_default():
            variables = len(tf.global_variables())
        if variables or any(d.device_type == "GPU" for d in session.list_devices()):
            raise errors.too_late(
                "tensorflow",
                f"Keras has made its session already, without {missing}; what a session has cannot "
                f"be changed, and another one would lose the values of its {variables} variables",
                "Call it before the first model is built.",
            )
        keras.backend.set_session(None)  # nothing is lost: the next one is configured
    if tf.test.is_built_with_cuda() and config.HasField("gpu_options") and sessions_made():
        if _missing(config, _defaults() if _defaults else type(config)()):
            raise errors.too_late(
                "tensorflow",
                "a session was made in this process, which fixed GPUs and their memory; "
                "they cannot become {}".format(" ".join(str(config.gpu_options).split())),
                "Call it before the first tf.Session().",
            )


def sessions_made() -> bool:
    """Return whether this process has made a session, which initializes GPUs."""
    from tensorflow.python.client import session

    counter = getattr(session, "_python_session_create_counter", None)
    return counter is not None and counter.get_cell().value() > 0


def imported_keras_packages() -> "List[Any]":
    """Return the imported Keras packages, each of which may have a session."""
    keras = sys.modules.get("keras")
    packages = [keras] if keras and _keras.backend_name(keras) == "tensorflow" else []
    if {"tensorflow.python.keras.backend", "keras", "tf_keras"} & set(sys.modules):
        packages.append(v1_names(sys.modules["tensorflow"]).keras)
    # TensorFlow 1.15 warns of the name where it is read, also in tf.compat.v1.
    return [keras for keras in packages if "get_session" in dir(keras.backend)]


def backend_module(keras: "Any") -> "Any":
    """Return the module that defines a Keras package's functions for TensorFlow."""
    return sys.modules[keras.backend.clear_session.__module__]


def session_of(keras: "Any") -> "Any":
    """Return the session that a Keras package has made for itself, or None."""
    module = backend_module(keras)
    session = getattr(module, "_SESSION", None)  # keras 2.3 has none of its own
    is_local = isinstance(session, threading.local)  # from TensorFlow 1.15
    return getattr(session, "session", None) if is_local else session


def sessions_in_use() -> "List[Any]":
    """Return the open sessions of Keras packages, and the default one."""
    from tensorflow.python.client.session import BaseSession

    sessions = {session_of(keras) for keras in imported_keras_packages()}
    sessions.add(v1_names().get_default_session())
    return [each for each in sessions if isinstance(each, BaseSession) and not each._closed]


def session_config(tf: "Any", settings: "Settings", late: "Optional[str]") -> "Any":
    """Return the settings as a ``ConfigProto``.

    Arguments:
        tf: TensorFlow, with the names of version 1.
        settings: the ``Settings``.
        late: a reason why TensorFlow may have read ``CUDA_VISIBLE_DEVICES`` already, or None.
    """
    devices, memory, options = settings.devices, settings.memory, dict(settings.options)
    config = tf.ConfigProto()
    # Keras' own sessions have it: on a GPU, some of its operations have CPU kernels only.
    config.allow_soft_placement = True
    if devices.simulated:
        config.device_count["CPU"] = devices.simulated
    unlisted = devices.undecided is not None and devices.listed is None
    ids = devices.wanted() if unlisted else None
    if ids and ids == list(range(len(ids))):
        config.device_count["GPU"] = len(ids)  # at most
    elif ids:
        config.gpu_options.visible_device_list = ",".join(map(str, ids))
    elif not devices.gpus and not unlisted:
        config.device_count["GPU"] = 0
    elif late and not devices.are_shown_by(os.environ):
        # The ids count inside CUDA_VISIBLE_DEVICES as TensorFlow found it.
        config.gpu_options.visible_device_list = ",".join(map(str, devices.positions))
    if memory and (devices.gpus or (unlisted and not memory.size)):
        if memory.grow:
            config.gpu_options.allow_growth = True
        else:
            fraction = memory.fraction or _fraction(memory, devices)
            config.gpu_options.per_process_gpu_memory_fraction = fraction
    config.device_count.update(options.pop("device_count", None) or {})
    for option in set(options).intersection(OPTIONS):
        setattr(config, option, options[option])
    return config


def _fraction(memory, devices):
    """Return ``memory.size`` as a fraction of each GPU, the only form that TensorFlow 1 takes."""
    totals = devices.memory_totals()
    if not any(totals):
        raise memory_total_unknown(memory)
    # One fraction holds for all GPUs: that of the largest, so that none takes more.
    return min(1.0, memory.size / float(max(totals)))


def memory_total_unknown(memory):
    """Return the error for a size of memory on GPUs whose total memory is unknown."""
    return errors.unsupported(
        "tensorflow1",
        f"limit memory to {memory}: it takes a fraction of each GPU only, and nvidia-smi does "
        "not tell how much memory the GPUs have",
        'Use a fraction such as memory=0.5, or memory="grow".',
    )


def devices_to_train_on(session: "Any", simulated: int) -> "List[str]":
    """Return the names of a session's GPUs, or else of its CPUs."""

    # XLA_GPU and XLA_CPU are further names for the same devices (keras#11644).
    def named(kind):
        names = [device.name for device in session.list_devices() if device.device_type == kind]
        return [name[name.index("/device:") :] for name in names]

    return named("GPU") or named("CPU")[: max(1, simulated)]


def may_list_gpus(tf: "Any") -> bool:
    """Return whether there may be GPUs: on Linux CUDA needs the driver's library for them."""
    if not tf.test.is_built_with_cuda():
        return getattr(tf.test, "is_built_with_rocm", lambda: True)()
    if not sys.platform.startswith("linux"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
        return True
    except OSError:
        return False
