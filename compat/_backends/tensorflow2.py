"""TensorFlow 2: tf.keras up to 2.15 (and tf_keras), and Keras 3 on TensorFlow.

Devices are chosen through ``tf.config`` before TensorFlow's runtime starts. A model runs on
several devices by a ``call`` of its own: an attribute of the instance that hides its class's
method. It splits the batch, runs the class's ``call`` on each device, and puts the outputs
together, so that loss, metrics and update see the whole batch. See ``ReplicatedCall``.
"""

import contextlib
import functools
import inspect
import os
import sys
import warnings

from .. import _devices, _keras, _keras_steps, _launchers, _replicas, errors
from ..backend import Backend
from . import _tensorflow2_reductions, _tensorflow2_shards, _tensorflow2_state, tensorflow1
from ._tensorflow2_shards import has_rows, rows_of  # noqa: F401  # for _tensorflow2_ranks
from ._tensorflow2_state import is_set  # noqa: F401  # for _tensorflow2_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings
    from .._verification import Verification

# configure_gpu(option=...) -> the function of tf.config that sets it.
_OPTIONS = {
    "allow_soft_placement": "config.set_soft_device_placement",
    "inter_op_parallelism_threads": "config.threading.set_inter_op_parallelism_threads",
    "intra_op_parallelism_threads": "config.threading.set_intra_op_parallelism_threads",
    "log_device_placement": "debugging.set_log_device_placement",
}


class TensorFlow2(Backend):
    """TensorFlow from 2.0."""

    name = "tensorflow2"
    framework = "tensorflow"
    distributions = (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-intel",
        "tensorflow-macos",
        "tensorflow-rocm",
    )
    extra = "tensorflow"
    options = tuple(sorted(_OPTIONS))
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_USE_LEGACY_KERAS",
    )

    def __init__(self):
        self._gpu_names = None  # type: Optional[List[str]]  # in the order configured

    def accepts(self, version: str) -> bool:
        return version.startswith("2.")

    # Before the import ------------------------------------------------------------------------

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        variables = dict(super().environ(settings, environ))
        memory = settings.memory
        # TensorFlow lets this variable beat tf.config ("Limiting GPU memory growth").
        said = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
        gpus = settings.devices.gpus or (said and settings.devices.undecided is not None)
        if gpus and memory and memory.grow and said != "true":
            variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return variables

    def initialised(self) -> "Optional[str]":
        """CUDA's variables count until TensorFlow lists its devices for the first time."""
        context = _context()
        if context is None or context._physical_devices is None:
            return None
        return "TensorFlow has listed its devices"

    def problems(self, environ: "Mapping[str, str]") -> "List[str]":
        from .. import _detect

        found = []
        if environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
            if not _detect.distribution_version("tf_keras"):
                found.append(
                    "TF_USE_LEGACY_KERAS is set, but tf_keras is not installed: tf.keras fails. "
                    "Install tf_keras, or remove the variable."
                )
        return found

    # After the import -------------------------------------------------------------------------

    def configure(self, settings: "Settings") -> "List[str]":
        tf = self.import_framework()
        # Apple's and AMD's GPUs have the type "GPU", too.
        settings.devices.settle(len(_config(tf, "list_physical_devices")("GPU")))
        if _in_v1_mode(tf) and tensorflow1.sessions_made():
            v1 = tf.compat.v1
            tensorflow1.make_room_for(v1, tensorflow1.backend.session_config(v1, settings, None))
        gpus = _chosen_gpus(tf, settings.devices)
        visible = _call(tf, "config.set_visible_devices", gpus, "GPU")
        physical = _config(tf, "list_physical_devices")
        applied = [visible] if physical("GPU") else []
        if settings.devices.simulated:
            cpu = physical("CPU")[0]
            applied.append(_split_device(tf, cpu, [None] * settings.devices.simulated))
        elif gpus and settings.memory:
            applied += _limit_memory(tf, gpus, settings)
        for option in sorted(set(settings.options) & set(_OPTIONS)):
            applied.append(_call(tf, _OPTIONS[option], settings.options[option]))
        # V1 mode may come later.
        soft = settings.options.get("allow_soft_placement", True)
        tensorflow1.lay_under_every_session(functools.partial(_session_config, soft))
        # TensorFlow numbers the GPUs it shows in the driver's order, not in the one asked for.
        numbered = sorted(gpus, key=physical("GPU").index)
        self._gpu_names = ["/gpu:{}".format(numbered.index(gpu)) for gpu in gpus]
        return applied

    def devices(self) -> "List[str]":
        """Reads the configuration; starting the runtime would fix it."""
        tf = self.import_framework()
        config = _config(tf, "get_logical_device_configuration", "get_virtual_device_configuration")
        visible = _config(tf, "get_visible_devices")
        for kind in ("GPU", "CPU"):
            count = sum(len(config(device) or [None]) for device in visible(kind))
            if kind == "GPU" and self._gpu_names and len(self._gpu_names) == count:
                return list(self._gpu_names)
            if count:
                return ["/{}:{}".format(kind.lower(), index) for index in range(count)]
        return ["/cpu:0"]

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, launch: "Launch") -> "List[str]":
        """horovodrun where Horovod is installed; else what starts TF_CONFIG's workers."""
        from .. import _start
        from . import _horovod

        if _horovod.is_missing(launch.python):
            return _start.launcher(launch, "--tf-config")
        return _horovod.launcher(launch, self.framework)

    def join(self, ranks: "Ranks") -> None:
        """TensorFlow's workers are joined before TensorFlow starts."""
        tf = self.import_framework()
        if not _runs_eagerly(tf):
            raise errors.workers_without_eager_execution(ranks)
        from . import _tensorflow2_ranks

        _tensorflow2_ranks.join(ranks)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """See ``_tensorflow2_ranks``; after ``disable_v2_behavior()``, ``_tensorflow1_ranks``."""
        tf = self.import_framework()
        if self.is_native(model):
            raise errors.unsupported(
                "tensorflow2",
                "train a model without Keras as one of several ranks",
                "Use a model of tf.keras, or start the script without a launcher.",
            )
        if ranks.launcher == _launchers.TF_CONFIG and not _runs_eagerly(tf):
            raise errors.workers_without_eager_execution(ranks)
        if _in_v1_mode(tf):
            from . import _tensorflow1_ranks

            return _tensorflow1_ranks.distribute(model, ranks)
        if not _runs_eagerly(tf):
            raise errors.unsupported(
                "tensorflow2",
                "train as one of several ranks after tf.compat.v1.disable_eager_execution()",
                "Remove that call.",
            )
        from . import _tensorflow2_ranks

        return _tensorflow2_ranks.distribute(model, ranks)

    # Replicas ---------------------------------------------------------------------------------

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Replace the instance's ``call``, or give the class's own one back.

        A stateful model, or one with a fixed batch size, stays in one piece on the first device,
        with a warning: its state has a row for each row of the batch. One device other than
        the first gets the whole model, as a single replica.
        """
        tf = self.import_framework()
        if self.is_native(model):
            from . import _tensorflow2_native

            if _in_v1_mode(tf) and len(devices) > 1:
                raise errors.unsupported(
                    "tensorflow2",
                    "run a model without Keras on several devices after "
                    "tf.compat.v1.disable_v2_behavior()",
                    "Use a Keras model, or place the model's parts by compat.device().",
                )
            replicated = list(devices) != self.devices()[:1]
            return _tensorflow2_native.parallelize(model, devices, replicated)
        if _in_v1_mode(tf):
            return tensorflow1.backend.parallelize(model, list(map(_full_name, devices)))
        from . import _tensorflow2_device

        replicated = list(devices) != self.devices()[:1]
        if replicated:
            _refuse_strategies(tf, model)
            _keras.warn_of_distribution(model)
            _keras.warn_of_placed_parts(model, _tensorflow2_device.placed_parts(model), devices)
        reason = _keras.undivided(model) if replicated else None
        if reason:
            _keras.warn_not_divided(model, reason, self.devices()[0])
        elif replicated:
            _check(tf, model)
        changed = _remove_replicas(model)
        if replicated and not reason:
            ReplicatedCall(devices).install(model)
            if _keras_steps.has_own_steps(model):
                _keras_steps.WatchedTraining(devices).install(model)
            for part in _keras_steps.called_models(model):
                reason = _keras.undivided(part)
                if reason:
                    _keras.warn_not_divided(part, reason, self.devices()[0])
                elif ReplicatedCall.of(part) is None:
                    ReplicatedCall(devices, belongs_to_step=True).install(part)
        if changed or ReplicatedCall.of(model) is not None:
            forget_compiled_steps(model)
        return model

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        tf = self.import_framework()
        if _in_v1_mode(tf):
            tensorflow1.backend.verify(model, verification)
            return
        if self.is_native(model):
            if not hasattr(tf.keras.Model, "train_step"):
                # TensorFlow 2.0 dies where a thread of its own traces what another one has.
                super().verify(model, verification)
                return
            from . import _tensorflow2_native_verification

            _tensorflow2_native_verification.VerifiedCall.install_on(model, verification)
            return
        from . import _tensorflow2_verification

        if verification is not None and _keras.undivided(model):
            verification = None  # it runs on one device
        _tensorflow2_verification.VerifiedStep.install_on(model, verification)

    def is_native(self, model: "Any") -> bool:
        from . import _tensorflow2_native

        return _tensorflow2_native.is_native(model)

    def build(
        self, strategy: str, function: "Callable[[], Any]", devices: "Sequence[str]"
    ) -> "Any":
        """Under ``tf.distribute.MirroredStrategy``: a copy of each weight on each device.

        ``function`` should compile the model, too: its optimizer belongs into the strategy's
        scope. Batches should divide by the number of devices; TensorFlow averages the replicas'
        gradients without regard to their rows, and Keras 3 refuses others.
        """
        tf = self.import_framework()
        with tf.distribute.MirroredStrategy(list(devices)).scope():
            model = function()
        if _keras.keras_of(model) is None:
            raise errors.builds_no_model(function.__qualname__, model)
        return model

    def device(self, device: str) -> "ContextManager[Any]":
        """Layers called inside run on ``device``, forward and backward, whenever the model does.

        A functional model's layers run where they were called; other operations at once, as in
        ``tf.device``. Inside a subclassed model's ``call`` TensorFlow places the forward pass.
        """
        tf = self.import_framework()
        device = "/cpu:0" if device == "cpu" else device
        if _in_v1_mode(tf):
            return tensorflow1.backend.device(_full_name(device))
        from . import _tensorflow2_device

        return _tensorflow2_device.placed_on(tf, device)


# Configuring ----------------------------------------------------------------------------------


def _context():
    """TensorFlow's runtime as far as it has got, or None before its import."""
    module = sys.modules.get("tensorflow.python.eager.context")
    return getattr(module, "_context", None)


def started():
    """Whether TensorFlow's runtime has started, with the first tensor for example."""
    return getattr(_context(), "_context_handle", None) is not None


def _config(tf, *names):
    """The first of these functions of ``tf.config``; some were experimental up to 2.0 or 2.3."""
    places = [tf.config, tf.config.experimental]
    return next(getattr(p, name) for name in names for p in places if hasattr(p, name))


def _session_config(soft):
    """What a session of v1 mode has of tf.config only where it is given no configuration."""
    from tensorflow.python.eager import context

    config = context.context().config
    config.allow_soft_placement = soft  # Keras' own sessions have it
    return config


def _call(tf, name, *arguments):
    """Call a function of TensorFlow's configuration, and return a line for the report.

    Raises:
        TooLateError: TensorFlow says that it has started and cannot change this any more.
    """
    module, _, last = name.rpartition(".")
    if module == "config" and not hasattr(tf.config, last):  # up to TensorFlow 2.0
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


def _chosen_gpus(tf, devices):
    """TensorFlow's handles of the chosen GPUs, in the order asked for."""
    if not devices.gpus:
        return []
    physical = _config(tf, "list_physical_devices")("GPU")
    if devices.undecided is not None:
        return [physical[position] for position in devices.positions]
    entries = _devices.visible_entries(os.environ)[0]
    if devices.variable == _devices.HIP:
        entries = (os.environ.get(_devices.HIP) or ",".join(devices.gpus)).split(",")
    if entries is not None and len(entries) < len(physical):
        raise errors.too_late(
            "tensorflow",
            "{}={} was set after TensorFlow had listed {} GPUs".format(
                devices.variable, os.environ.get(devices.variable), len(physical)
            ),
            "Set it before the first `import tensorflow` or `import keras`.",
        )
    return [physical[i] for i in devices.ordinals(os.environ) if i < len(physical)]


def _split_device(tf, device, limits):
    """Make one logical device per memory limit (MiB, or None) on a physical one."""
    if hasattr(tf.config, "set_logical_device_configuration"):
        name, make = "config.set_logical_device_configuration", tf.config.LogicalDeviceConfiguration
    else:  # up to TensorFlow 2.3
        name = "config.experimental.set_virtual_device_configuration"
        make = tf.config.experimental.VirtualDeviceConfiguration
    logical = [make(memory_limit=limit) if limit else make() for limit in limits]
    _call(tf, name, device, logical)
    made = " of {:g} MiB".format(limits[0]) if limits[0] else ""
    return "tf.{}: {} of {}{}".format(name, len(limits), device.name, made)


def _limit_memory(tf, gpus, settings):
    if settings.memory.grow:
        name = "config.experimental.set_memory_growth"
        return [_call(tf, name, gpu, True) for gpu in gpus]
    sizes = [settings.memory.size] * len(gpus)
    if settings.memory.fraction:
        totals = settings.devices.memory_totals()
        sizes = [total * settings.memory.fraction for total in totals]
        if not all(sizes):
            raise errors.unsupported(
                "tensorflow2",
                "take a fraction of a GPU whose size the driver does not tell",
                'Give a size, such as memory="4GiB".',
            )
    return [_split_device(tf, gpu, [size / 2.0**20]) for gpu, size in zip(gpus, sizes)]


# Models ---------------------------------------------------------------------------------------


def _in_v1_mode(tf):
    """Whether ``tf.compat.v1.disable_v2_behavior()`` was called: graphs are TensorFlow 1's."""
    return not _runs_eagerly(tf) and not tf.compat.v1.control_flow_v2_enabled()


def _runs_eagerly(tf):
    """Whether TensorFlow computes eagerly where no function is traced."""
    v1 = tf.compat.v1
    return getattr(v1, "executing_eagerly_outside_functions", v1.executing_eagerly)()


def _in_graph_of_ones_own(tf):
    """Whether TensorFlow would compute eagerly, were it not for a ``tf.Graph`` around."""
    from tensorflow.python.eager import context

    return not _runs_eagerly(tf) and context.default_execution_mode == context.EAGER_MODE


def _full_name(device):
    """/cpu:1 as TensorFlow's graphs name it: /device:CPU:1."""
    return "/device:" + device.strip("/").upper()


def _check(tf, model):
    """Refuse models that a replicated ``call`` would not reach."""
    keras = _keras.keras_of(model)
    if _in_graph_of_ones_own(tf):
        raise errors.unsupported(
            "tensorflow2",
            "run a model on several devices within tf.Graph().as_default()",
            "Build the model outside of that graph, or write tf.compat.v1.disable_v2_behavior() "
            "at the top of the script, to have TensorFlow 1.",
        )
    if not _runs_eagerly(tf):
        raise errors.unsupported(
            "tensorflow2",
            "run a model on several devices after tf.compat.v1.disable_eager_execution()",
            "Remove that call, or use TensorFlow 1.",
        )
    if not hasattr(model, "train_step") and keras.__name__ == "keras":
        raise errors.unsupported(
            "tensorflow2",
            "run a model of keras {} on several devices".format(keras.__version__),
            "Use tf.keras, or Keras 3, or train on one device, with parallelize(model, gpus=1).",
        )
    refuse_loops(tf, _keras.all_layers(model))
    if (
        getattr(model, "_jit_compile", None)
        and _keras.compiled_with(model).get("jit_compile") != "auto"
    ):
        raise errors.several_devices_in_xla()


def _refuse_strategies(tf, model):
    """Refuse a model that a strategy of TensorFlow's replicates already, or will."""
    scope = tf.distribute.has_strategy()
    variables = [] if scope or _is_unbuilt(model) else model.weights
    # A Keras 3 variable has one of TensorFlow's.
    variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    parents = [parent for variable in variables for parent in type(variable).__mro__]
    if scope or any(parent.__name__ == "DistributedValues" for parent in parents):
        raise errors.UnsupportedError(
            "parallelize() and tf.distribute both run a model on several devices: {}. Build the "
            "model and call parallelize() outside of the strategy's scope, or write "
            'compat.parallelize(build_model, strategy="mirrored").'.format(
                "it was called within the scope of a {}".format(
                    type(tf.distribute.get_strategy()).__name__
                )
                if scope
                else "the variables of {!r} were made in the scope of a strategy".format(model.name)
            )
        )


def _is_unbuilt(model):
    """Whether asking for a model's variables would be an error."""
    return hasattr(model, "_eager_losses") and not model.built


def _remove_replicas(model):
    """Make a model plain, and the models within that became replicated with it."""
    changed = False
    for part in _keras.all_layers(model):
        call = ReplicatedCall.of(part)
        if call is not None and (part is model or call.belongs_to_step):
            call.remove(part)
            changed = True
    watched = _keras_steps.WatchedTraining.of(model)
    if watched is not None:
        watched.remove(model)
    return changed


def refuse_loops(tf, layers):
    """Up to TensorFlow 2.1 a loop fails on another device than the function around it."""
    for layer in layers:
        recurrent = any(c.__name__ == "RNN" for c in type(layer).__mro__)
        if recurrent and not layer.unroll and not hasattr(tf.keras.Model, "train_step"):
            raise errors.unsupported(
                "tensorflow2",
                "run the loop of layer {!r} on several devices in TensorFlow {}, which "
                "takes loops in functions apart".format(layer.name, tf.__version__),
                "Make the layer with unroll=True, or use TensorFlow 2.3 or later.",
            )


def forget_compiled_steps(model):
    """Have Keras trace its steps again: the ones it has hold the call that was.

    The optimizer and its state stay.
    """
    if _keras.compiled_with(model).get("jit_compile") == "auto":
        model._jit_compile = None  # Keras 3 asks again whether the model supports XLA
    for name in ("train_function", "train_tf_function", "test_function", "predict_function"):
        if hasattr(model, name):
            setattr(model, name, None)
    vars(model).pop("_distributed_function_cache", None)  # TensorFlow 2.0's


# Replicas -------------------------------------------------------------------------------------

# Graphs that Keras traces for shapes or for saving; nothing is computed in them, or somewhere
# else: what is saved must not name this machine's devices. (``__call__`` is what Keras 3 exports;
# ``tf.function(model)`` has another name.)
_TRACES = (
    "scratch_graph", "build_graph",
    "_layer_call_fn", "_conditional_losses", "_wrapped_model", "__call__", "serving_default",
)  # fmt: skip


class ReplicatedCall(_keras.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows ``_replicas.run_bounds`` gives it, under its device. The
    operations of a gradient carry no device, and would all run on the first one; so each replica
    is a function with a gradient of its own (``tf.custom_gradient``), computed under the
    replica's device, too. TensorFlow sums the gradients of the replicas.

    Losses added within ``call``, outputs without rows and state (counters, moving averages) leave
    the replicas as values of their own rows, and become those of all rows by ``Merging``: sums,
    means or neither, as a ``Trace`` of the plain call shows. See ``_tensorflow2_shards``,
    ``_tensorflow2_state`` and ``_tensorflow2_reductions``.
    """

    # Autograph leaves what carries this mark alone, as it does tf.function's own wrappers.
    autograph_info__ = {}  # type: dict

    supports_jit = None  # what jit_compile="auto" went by, in Keras 3

    def __init__(self, devices, belongs_to_step=False):
        super().__init__(devices)
        # Whether it is there for a model around this one, whose step may call this one.
        self.belongs_to_step = belongs_to_step
        self.traces = {}  # type: Dict[Any, Any]  # of eager calls

    def install(self, model):
        super().install(model)
        plain = self.plain(model)
        # tf.keras looks up its arguments when it saves a model.
        self.__signature__ = inspect.signature(getattr(plain, "__func__", plain))
        self.supports_jit = model.__dict__.get("supports_jit")
        if self.supports_jit:
            model.__dict__["supports_jit"] = False

    def remove(self, model):
        super().remove(model)
        if self.supports_jit:
            model.__dict__["supports_jit"] = True

    def __call__(self, model, *args, **kwargs):
        _keras_steps.note_call()
        tf = sys.modules["tensorflow"]
        call = functools.partial(self._unreplicated, tf, model)
        if _replicas.runs_undivided() or self._only_traced(tf, model):
            return call(*args, **kwargs)
        arguments = _tensorflow2_shards.Arguments(tf, args, kwargs, len(self.devices))
        if arguments.batch is None:
            return call(*args, **kwargs)
        if getattr(model, "_jit_compile", None):
            raise errors.several_devices_in_xla()
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            _refuse_strategies(tf, model)
        state = self._state_of(tf, model)
        trace = functools.partial(self._trace, tf, model, call, arguments, state, [])
        state.prepare(call, args, kwargs, trace)
        rows, replicas = arguments.rows, []
        for index, device in enumerate(self.devices):
            bounds = _replicas.run_bounds(
                rows, len(self.devices), index, max if isinstance(rows, int) else tf.maximum
            )
            first, last = _replicas.bounds(rows, len(self.devices), index)
            replica = Replica(tf, call, state, last - first)
            with _explained(tf, model, call, arguments, state):
                replica.run(device, arguments.shard(bounds), arguments.has_others)
            replicas.append(replica)
        merging = _tensorflow2_shards.Merging(tf, _name(model), replicas, rows, trace)
        state.finish(merging)
        return _merged(tf, merging, state)

    def _trace(self, tf, model, call, arguments, state, made):
        """The plain call's trace, made once for each call.

        Eagerly it is kept for calls with arguments of the same kinds.
        """
        if made:
            return made[0]
        tensors, places, compute = _as_function(tf, call, state.traced, arguments.structure)
        flags = arguments.traced()
        flags = [flags[place] for place in places]
        key = None
        if tf.executing_eagerly():
            plain = [v for v in arguments.leaves if not tf.is_tensor(v)]
            shapes = [(str(t.dtype), str(t.shape[1:]), f) for t, f in zip(tensors, flags)]
            key = repr((shapes, plain))
        if key is None or key not in self.traces:
            self.traces[key] = _traced(tf, model, compute, tensors, flags, state)
        trace = self.traces[key]
        if key is None:
            del self.traces[key]
        made.append(trace)
        return trace

    def _only_traced(self, tf, model):
        return _only_traced(tf, model)

    def _state_of(self, tf, model):
        """The state of a model or layer of Keras."""
        if hasattr(model, "_eager_losses"):
            return _tensorflow2_state.Keras2State(tf, model, len(self.devices))
        return _tensorflow2_state.Keras3State(tf, sys.modules["keras"], model)

    def _unreplicated(self, tf, model, *args, **kwargs):
        """The call this one hides, converted by autograph where Keras would do so."""
        plain = self.plain(model)
        package = type(model).__module__.split(".")[0]
        by_user = package not in ("keras", "tf_keras", "tensorflow", "tensorflow_core")
        if by_user and hasattr(model, "_eager_losses") and not tf.executing_eagerly():
            # Up to TensorFlow 2.3 nothing public, nor tf.__internal__, leads there.
            from tensorflow.python.autograph.core import ag_ctx
            from tensorflow.python.autograph.impl import api

            plain = api.tf_convert(plain, ag_ctx.control_status_ctx())
        return plain(*args, **kwargs)


def _only_traced(tf, model):
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if any(mark in getattr(graph, "name", "") for mark in _TRACES):
            return True
        graph = getattr(graph, "outer_graph", None)
    # A Keras 3 model as a pure function: the caller's scope holds its state.
    return _keras.in_stateless_scope(_keras.keras_of(model))


class Results:
    """What a call returns, flat, and what belongs to that.

    ``structure`` is what the model returned, ``outputs`` that, flat; ``logits`` and ``masks`` are
    Keras' attributes of the outputs, or None; ``losses`` were added within the call.
    """

    def __init__(self, tf, structure, losses):
        self.tf = tf
        self.structure = structure
        self.losses = losses
        self.outputs = tf.nest.flatten(structure)
        self.masks = [getattr(output, "_keras_mask", None) for output in self.outputs]
        self.logits = [_logits(tf, output) for output in self.outputs]

    def differentiable(self):
        """All that may get a gradient: the tensors that ``outputs``, ... consist of."""
        values = self.tf.nest.flatten(self._values(), expand_composites=True)
        return [value for value in values if self.tf.is_tensor(value)]

    def take(self, tensors):
        """Put the tensors back where ``differentiable`` found them."""
        tf, tensors = self.tf, iter(tensors)
        values = self._values()
        flat = tf.nest.flatten(values, expand_composites=True)
        flat = [next(tensors) if tf.is_tensor(value) else value for value in flat]
        self.outputs, self.logits, self.losses = tf.nest.pack_sequence_as(
            values, flat, expand_composites=True
        )

    def _values(self):
        return [self.outputs, self.logits, self.losses]


def _as_function(tf, call, scope, structure):
    """A call as a function of the tensors that its arguments and their masks consist of.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.

    Returns:
        The tensors, all tensors and what else is among them, and the function, which returns
        ``Results``.
    """
    masks = [getattr(value, "_keras_mask", None) for value in tf.nest.flatten(structure)]
    flat = tf.nest.flatten((structure, masks), expand_composites=True)
    places = [place for place, value in enumerate(flat) if tf.is_tensor(value)]

    def compute(*values):
        given = list(flat)
        for place, value in zip(places, values):
            given[place] = value
        (args, kwargs), given_masks = tf.nest.pack_sequence_as(
            (structure, masks), given, expand_composites=True
        )
        for value, mask in zip(tf.nest.flatten((args, kwargs)), given_masks):
            if mask is not None:
                value._keras_mask = mask
        with _replicas.undivided(), scope() as losses:
            outputs = call(*args, **kwargs)
        return Results(tf, outputs, losses)

    return [flat[place] for place in places], places, compute


class Replica:
    """One device's share of a call, and its results."""

    def __init__(self, tf, call, state, size):
        self.tf = tf
        self.call = call
        self.state = state
        self.size = size  # rows kept; none of the one row computed where this is 0

    def run(self, device, arguments, check_rows):
        """Compute.

        Arguments:
            check_rows: make sure that the outputs follow the rows of the batch.
        """
        tf = self.tf
        self.device = device
        self.batch = next(v for v in tf.nest.flatten(arguments) if has_rows(tf, v))
        self.shard, _, compute = _as_function(tf, self.call, self.state.replica, arguments)

        def results_of(*values):
            self.results = compute(*values)
            if check_rows:
                self._check_rows()
            self._keep()
            return self.results.differentiable()

        @tf.custom_gradient
        def replica(*values):
            with tf.device(device):
                results, gradients_of = _differentiable(tf, results_of, values)

            def gradient(*upstream, **kwargs):  # up to TensorFlow 2.3 no keyword-only argument
                variables = list(kwargs.get("variables") or ())
                # Integers and booleans have no gradient.
                pairs = [(r, g) for r, g in zip(results, upstream) if r.dtype.is_floating]
                with tf.device(device):
                    gradients = gradients_of(
                        [result for result, _ in pairs],
                        list(values) + variables,
                        [gradient for _, gradient in pairs],
                    )
                if not variables:
                    return gradients
                return gradients[: len(values)], gradients[len(values) :]

            return results, gradient

        if recording():
            tensors = replica(*self.shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                tensors = results_of(*self.shard)
        self.results.take(tensors)

    def _keep(self):
        """Keep this replica's own rows here, where their number is not known before."""
        if isinstance(self.size, int):
            return
        results = self.results
        for values in (results.outputs, results.masks, results.logits):
            for place, value in enumerate(values):
                if self.tf.is_tensor(value) and self.has_same_rows(value):
                    values[place] = _tensorflow2_shards.kept(self.tf, value, self.size)

    def kept(self, value):
        """A result's rows that are this replica's own."""
        if isinstance(self.size, int):
            return _tensorflow2_shards.kept(self.tf, value, self.size)
        return value  # see _keep

    def _check_rows(self):
        for place, output in enumerate(self.results.outputs):
            if self.tf.is_tensor(output) and self.has_same_rows(output):
                self.results.outputs[place] = _tensorflow2_shards.checked(
                    self.tf, output, self.batch
                )

    def has_same_rows(self, value):
        return _tensorflow2_shards.has_same_rows(value, self.batch)


def _differentiable(tf, compute, values):
    """``compute(*values)``, and the function (results, sources, upstream) -> gradients of it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Loops and branches make their variables inputs of another name; the tape knows them.
    if type(graph).__name__ != "FuncGraph":
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([value for value in values if value.dtype.is_floating])
            results = compute(*values)
        return results, tape.gradient

    # Within the caller's tape another one would have TensorFlow trace gradients of gradients of
    # the functions in the model (an LSTM's): twice the time, and in 2.3 without an end where the
    # number of rows is unknown. So a function's graph is walked. This is what tf.gradients()
    # calls, which has no argument for a graph other than the one that gets the gradients.
    from tensorflow.python.ops import gradients_util

    def gradients_of(results, sources, upstream):
        inner = [graph.capture(getattr(source, "handle", source)) for source in sources]
        return gradients_util._GradientsHelper(results, inner, upstream, src_graph=graph)

    return compute(*values), gradients_of


def recording():
    """Whether a gradient tape is recording: TensorFlow's own test, private to it."""
    for name in ("tensorflow.python.eager.record", "tensorflow.python.eager.tape"):
        test = getattr(sys.modules.get(name), "could_possibly_record", None)
        if test is not None:
            return test()
    return True


def _traced(tf, model, compute, tensors, flags, state):
    """The ``Trace`` of a call, which Keras' layers of batch normalization are apart from."""
    normalizations = _tensorflow2_state.normalizations(state.layers)
    with _tensorflow2_state.noting_operations(tf, normalizations) as noted:

        def function(*placeholders):
            results = compute(*placeholders)
            return {
                "outputs": results.outputs,
                "losses": results.losses,
                "updates": state.traced_updates,
            }

        try:
            trace = _tensorflow2_reductions.Trace(tf, function, tensors, flags, noted)
        except Exception as error:
            raise errors.UnsupportedError(
                "parallelize() cannot tell how losses, state and outputs without rows of model "
                "{!r} are put together from the devices' parts: its call cannot be traced for a "
                "batch with an unknown number of rows. {}: {}\nTake the number of rows from "
                "tf.shape(x)[0], or run this model on one device, with parallelize(model, "
                "gpus=1).".format(_name(model), type(error).__name__, error)
            ) from error
    trace.updates = dict(zip(state.traced_ids, trace.kinds["updates"]))
    if any(
        getattr(kind, "mixes", False) or getattr(kind, "mixed", False)
        for kind in trace.kinds["outputs"]
    ):
        warnings.warn(
            "model {!r} computes each row of an output from other rows of the batch, too, besides "
            "batch normalization. On several devices these are the rows of one device's part, so "
            "the numbers differ from one device's. Compute this in the loss, which sees the "
            "whole batch, or run this model on one device, with parallelize(model, "
            "gpus=1).".format(_name(model)),
            errors.CompatWarning,
            stacklevel=2,
        )
    return trace


def _name(model):
    return getattr(model, "name", None) or type(model).__name__


@contextlib.contextmanager
def _explained(tf, model, call, arguments, state):
    """Say that a batch was cut where a replica fails on its rows, and the whole model would not."""
    try:
        yield
    except errors.CompatError:
        raise
    except Exception as error:
        tensors, _, compute = _as_function(tf, call, state.traced, arguments.structure)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        try:
            tf.function(lambda *values: compute(*values).differentiable()).get_concrete_function(
                *specs
            )
        except Exception:
            raise error from None  # as on one device
        raise errors.UnsupportedError(
            "model {!r} fails on a part of the batch's rows, though not on all of them. "
            "parallelize() cuts every input by its first dimension, so each row has to be "
            "computed by itself: a matrix of rows by rows (a graph's adjacency, a similarity) "
            "or of time by time cannot be cut. Make such a matrix an attribute of the model or "
            "compute it in the loss, or run this model on one device, with parallelize(model, "
            "gpus=1). {}: {}".format(_name(model), type(error).__name__, error)
        ) from error


def _merged(tf, merging, state):
    """What the model returns for the whole batch."""
    results = [replica.results for replica in merging.replicas]
    outputs = []
    for place, output in enumerate(results[0].outputs):
        if tf.is_tensor(output):
            output = _merged_output(merging, results, place)
        outputs.append(output)
    for place in range(len(results[0].losses)):
        values = [result.losses[place] for result in results]

        def kind_in(trace, place=place):
            return trace.kinds["losses"][place]

        state.add_loss(place, merging.value(values, kind_in, state.name_of_loss(place)))
    return tf.nest.pack_sequence_as(results[0].structure, outputs)


def _merged_output(merging, results, place):
    values = [result.outputs[place] for result in results]
    replicas = merging.replicas

    def kind_in(trace):
        return trace.kinds["outputs"][place]

    same_rows = all(replica.has_same_rows(value) for replica, value in zip(replicas, values))
    if not same_rows and len(values) > 1:
        kind = kind_in(merging.trace())
        if not isinstance(kind, _tensorflow2_reductions.Rows) or kind.axis != 0:
            return merging.value(values, kind_in, "output {}".format(place + 1))
    output = merging.concatenated(values) if len(values) > 1 else values[0]
    for name, attribute in (("masks", "_keras_mask"), ("logits", "_keras_logits")):
        parts = [getattr(result, name)[place] for result in results]
        if parts[0] is not None and len(values) > 1:
            setattr(output, attribute, merging.concatenated(parts))
        elif parts[0] is not None:
            setattr(output, attribute, parts[0])
    return output


def _logits(tf, output):
    """What went into a final softmax or sigmoid, where Keras' cross-entropy would look for it.

    Keras computes cross-entropy from logits if the output carries them, or comes straight from
    such an operation (``_get_logits`` in its backend).
    """
    logits = getattr(output, "_keras_logits", None)
    if logits is None and tf.is_tensor(output) and not tf.executing_eagerly():
        operation = getattr(output, "op", None)
        if operation is not None and operation.type in ("Softmax", "Sigmoid"):
            logits = operation.inputs[0]
    return logits


backend = TensorFlow2()
