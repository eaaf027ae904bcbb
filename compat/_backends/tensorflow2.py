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
import threading

from .. import _devices, _keras, _ranks, _replicas, errors
from ..backend import Backend
from . import tensorflow1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence

    from .._ranks import Launch, Ranks
    from .._settings import Settings

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
        if settings.devices.gpus and memory and memory.grow:
            if environ.get("TF_FORCE_GPU_ALLOW_GROWTH") != "true":
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
        if ranks.launcher == _ranks.TF_CONFIG and not _runs_eagerly(tf):
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
            _keras.warn_of_distribution(model)
            _keras.warn_of_placed_parts(model, _tensorflow2_device.placed_parts(model), devices)
        reason = _keras.undivided(model) if replicated else None
        if reason:
            _keras.warn_not_divided(model, reason, self.devices()[0])
        elif replicated:
            _check(tf, model)
        before = ReplicatedCall.of(model)
        if before is not None:
            before.remove(model)
        if replicated and not reason:
            ReplicatedCall(devices).install(model)
        if ReplicatedCall.of(model) is not before:
            forget_compiled_steps(model)
        return model

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
    entries, _ = _devices.visible_entries(os.environ)
    if entries is not None and len(entries) < len(physical):
        raise errors.too_late(
            "tensorflow",
            "CUDA_VISIBLE_DEVICES={} was set after TensorFlow had listed {} GPUs".format(
                os.environ["CUDA_VISIBLE_DEVICES"], len(physical)
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


def _full_name(device):
    """/cpu:1 as TensorFlow's graphs name it: /device:CPU:1."""
    return "/device:" + device.strip("/").upper()


def _check(tf, model):
    """Refuse models that a replicated ``call`` would not reach."""
    keras = _keras.keras_of(model)
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

_replica_running = threading.local()


class ReplicatedCall(_keras.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows ``_replicas.run_bounds`` gives it, under its device. The
    operations of a gradient carry no device, and would all run on the first one; so each replica
    is a function with a gradient of its own (``tf.custom_gradient``), computed under the
    replica's device, too. TensorFlow sums the gradients of the replicas.

    Two things more must be as if there were no replicas. Losses added within ``call`` (activity
    regularizers) leave the replicas as outputs and are added again, each weighted by its share
    of the batch. State (moving averages) starts from the same value in each replica, and is
    set once, to the mean weighted by the shares; integers (random seeds) go from replica to
    replica instead, so that dropout masks are independent.
    """

    # Autograph leaves what carries this mark alone, as it does tf.function's own wrappers.
    autograph_info__ = {}  # type: dict

    supports_jit = None  # what jit_compile="auto" went by, in Keras 3

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
        tf = sys.modules["tensorflow"]
        call = functools.partial(self._unreplicated, tf, model)
        arguments = tf.nest.flatten((args, kwargs))
        batch = next(filter(lambda value: has_rows(tf, value), arguments), None)
        if batch is None or getattr(_replica_running, "now", False) or self._only_traced(tf, model):
            return call(*args, **kwargs)
        if getattr(model, "_jit_compile", None):
            raise errors.several_devices_in_xla()
        state = self._state_of(tf, model)
        state.prepare(call, args, kwargs)
        rows, replicas = rows_of(tf, batch), []
        for index, device in enumerate(self.devices):
            bounds = _replicas.run_bounds(
                rows, len(self.devices), index, max if isinstance(rows, int) else tf.maximum
            )
            first, last = _replicas.bounds(rows, len(self.devices), index)
            shard = tf.nest.map_structure(
                functools.partial(_slice, tf, batch, bounds), (args, kwargs)
            )
            replica = Replica(tf, call, state, last - first)
            replica.run(device, shard)
            replicas.append(replica)
        shares = [_share(tf, replica.size, rows) for replica in replicas]
        state.finish(shares)
        return _merged(tf, replicas, shares)

    def _only_traced(self, tf, model):
        return _only_traced(tf, model)

    def _state_of(self, tf, model):
        return _state_of(tf, model)

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


class Replica:
    """One device's share of a call: its outputs, and what belongs to them.

    ``outputs`` is flat, ``structure`` is what the model returned; ``logits`` and ``masks`` are
    Keras' attributes of the outputs, or None; ``losses`` were added within the call.
    """

    def __init__(self, tf, call, state, size):
        self.tf = tf
        self.call = call
        self.state = state
        self.size = size  # rows kept; none of the one row computed where this is 0

    def run(self, device, arguments):
        tf = self.tf
        masks = [getattr(value, "_keras_mask", None) for value in tf.nest.flatten(arguments)]
        tensors = tf.nest.flatten((arguments, masks), expand_composites=True)
        places = [place for place, value in enumerate(tensors) if tf.is_tensor(value)]

        def compute(*values):
            for place, value in zip(places, values):
                tensors[place] = value
            return self._compute(
                tf.nest.pack_sequence_as((arguments, masks), tensors, expand_composites=True)
            )

        @tf.custom_gradient
        def replica(*values):
            with tf.device(device):
                results, gradients_of = _differentiable(tf, compute, values)

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

        shard = [tensors[place] for place in places]
        if recording():
            results = replica(*shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                results = compute(*shard)
        self._take(list(results))

    def _compute(self, arguments_and_masks):
        """Call the model, and return everything that may get a gradient, flat."""
        tf = self.tf
        (args, kwargs), masks = arguments_and_masks
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        _replica_running.now = True
        try:
            with self.state.replica() as self.losses:
                self.structure = self.call(*args, **kwargs)
        finally:
            _replica_running.now = False
        outputs = tf.nest.flatten(self.structure)
        self.masks = [self._kept(getattr(output, "_keras_mask", None)) for output in outputs]
        self.logits = [_logits(tf, output) for output in outputs]
        self.outputs = outputs
        return [self._kept(value) for value in self._results()]

    def _results(self):
        """The tensors among outputs, logits and losses."""
        values = self.outputs + self.logits + self.losses
        return [value for value in values if self.tf.is_tensor(value)]

    def _take(self, results):
        """Put the results back where ``_results`` found them."""
        for values in (self.outputs, self.logits, self.losses):
            for place, value in enumerate(values):
                if self.tf.is_tensor(value):
                    values[place] = results.pop(0)

    def _kept(self, value):
        """The rows of a result that are this replica's own: all of them, or none."""
        if value is None or value.shape.rank == 0:
            return value
        if isinstance(self.size, int):
            return value if self.size else value[:0]
        return value[: self.tf.shape(value)[0] * self.tf.minimum(self.size, 1)]


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


# Splitting and merging ------------------------------------------------------------------------


def has_rows(tf, value):
    return tf.is_tensor(value) and value.shape.rank != 0


def rows_of(tf, batch):
    """The number of rows: an integer where it is known, else a scalar tensor."""
    if batch.shape.rank is not None and batch.shape[0] is not None:
        return batch.shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return batch.nrows()
    return batch.dense_shape[0] if isinstance(batch, tf.SparseTensor) else tf.shape(batch)[0]


def _slice(tf, batch, bounds, value):
    """A replica's rows of an argument; what has no rows of the batch is passed whole."""
    if not has_rows(tf, value):
        return value
    # As lists: up to TensorFlow 2.3 an unknown dimension of a shape equals no other.
    if value.shape[:1].as_list() != batch.shape[:1].as_list():
        return value
    start, stop = bounds
    if isinstance(value, tf.SparseTensor):
        shape = tf.unstack(value.dense_shape, num=value.shape.rank)
        sizes = [tf.cast(stop - start, tf.int64)] + shape[1:]
        starts = [tf.cast(start, tf.int64)] + [0] * (len(shape) - 1)
        return tf.sparse.slice(value, tf.stack(starts), tf.stack(sizes))
    shard = value[start:stop]
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        shard._keras_mask = mask[start:stop]
    return shard


def _share(tf, size, rows):
    """A function of a dtype that gives a replica's part of the batch, from 0 to 1."""
    return lambda dtype: tf.cast(size, dtype) / tf.cast(rows, dtype)


def _mean(tf, values, shares):
    """The mean weighted by the replicas' shares of the batch."""
    return tf.add_n([value * share(value.dtype) for value, share in zip(values, shares)])


def _merge(tf, values, shares):
    """The replicas' rows together; a scalar is the mean of theirs."""
    if not tf.is_tensor(values[0]):
        return values[0]
    if values[0].shape.rank != 0:
        return tf.concat(values, axis=0)
    return _mean(tf, values, shares) if values[0].dtype.is_floating else values[0]


def _merged(tf, replicas, shares):
    """What the model returns for the whole batch."""

    def merge(name, place):
        return _merge(tf, [getattr(replica, name)[place] for replica in replicas], shares)

    outputs = []
    for place in range(len(replicas[0].outputs)):
        output = merge("outputs", place)
        for name, values in (("_keras_mask", "masks"), ("_keras_logits", "logits")):
            value = merge(values, place)
            if value is not None:
                setattr(output, name, value)
        outputs.append(output)
    for place in range(len(replicas[0].losses)):
        replicas[0].state.add_loss(place, merge("losses", place))
    return tf.nest.pack_sequence_as(replicas[0].structure, outputs)


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


# State ----------------------------------------------------------------------------------------


def _state_of(tf, model):
    """The state of a model or layer of Keras."""
    if hasattr(model, "_eager_losses"):
        return Keras2State(tf, model)

    def mean(values, shares):
        return _mean(tf, [tf.convert_to_tensor(value) for value in values], shares)

    return _keras.StatelessReplicas(sys.modules["keras"], model, mean)


# Operations on a variable that leave it as it is.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def is_set(tf, variable):
    """Whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    handle = tf.compat.v1.get_default_graph().capture(variable.handle)
    return any(user.type not in _READS for user in handle.consumers())


class Keras2State:
    """Losses and state of tf.keras' layers: taken back after each replica."""

    def __init__(self, tf, model):
        self.tf = tf
        self.model = model

    def prepare(self, call, args, kwargs):
        """Note the state as it is before the first replica.

        Eagerly, layers that are not built yet would make their state only then. (A tf.function
        that makes variables is traced twice, so that there the second trace finds them.)
        """
        tf, model = self.tf, self.model
        if tf.executing_eagerly() and not all(layer.built for layer in _keras.all_layers(model)):
            tf.function(call).get_concrete_function(*args, **kwargs)
        self.layers = _keras.all_layers(model)
        self.replicas = 0  # begun
        state = list(model.non_trainable_variables)
        for layer in self.layers:
            state += [v for metric in getattr(layer, "_metrics", ()) for v in metric.variables]
        self.variables = list({id(v): v for v in state if v.dtype.is_floating}.values())
        self.before = [self._read(variable) for variable in self.variables]
        self.after = [[] for _ in self.variables]  # type: List[List[Any]]

    def _read(self, variable):
        """The value in the variable's own dtype, whatever mixed precision casts it to."""
        return self.tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    @contextlib.contextmanager
    def replica(self):
        counts = [len(layer._eager_losses) for layer in self.layers]
        losses, self.owners = [], []  # type: List[Any], List[Any]
        with self._seeds_apart():
            yield losses
        for layer, count in zip(self.layers, counts):
            losses += layer._eager_losses[count:]
            self.owners += [layer] * (len(layer._eager_losses) - count)
            del layer._eager_losses[count:]
        for variable, before, after in zip(self.variables, self.before, self.after):
            if is_set(self.tf, variable):
                after.append(self._read(variable))
                variable.assign(before)

    @contextlib.contextmanager
    def _seeds_apart(self):
        """Give seeded layers other masks in each replica; up to TensorFlow 2.3 they would repeat.

        There a layer hands its seed to an operation, whose random numbers start from it on every
        device. Later it starts a generator of the layer's, which goes on from replica to replica.
        """
        seeds = [(vars(layer), vars(layer).get("seed")) for layer in self.layers]
        seeds = [(attributes, seed) for attributes, seed in seeds if isinstance(seed, int)]
        for attributes, seed in seeds:
            attributes["seed"] = seed + 104729 * self.replicas  # a prime: no neighbour's seed
        self.replicas += 1
        try:
            yield
        finally:
            for attributes, seed in seeds:
                attributes["seed"] = seed

    def finish(self, shares):
        for variable, values in zip(self.variables, self.after):
            if values:
                variable.assign(_mean(self.tf, values, shares))

    def add_loss(self, place, loss):
        self.owners[place]._eager_losses.append(loss)


backend = TensorFlow2()
