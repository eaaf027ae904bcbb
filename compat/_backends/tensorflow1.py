"""TensorFlow 1, under standalone Keras 2 or its own ``tf.keras``.

Configuring: TensorFlow 1 takes its devices and its memory from each session's ``ConfigProto``,
and a script makes sessions in many places. So one configuration is laid under every session.

Parallelizing: Keras 2 builds a static graph, so replicas are made in the graph, where every
Keras looks alike. Keras builds the model, its loss and its metrics as ever, for one device. When
it then turns tensors into a function to run (``_make_train_function`` and its two siblings), the
*batch part* of the graph (the operations between the model's inputs and outputs) is replaced:

- it is copied once per device, and each copy reads its shard of the batch;
- a tensor that leaves the batch part, towards outputs, loss, metrics or updates, becomes the
  copies' tensors put together: rows in order, or a mean where it has no rows (BatchNorm's
  statistics), so that the loss sees the whole batch and state is written once a step;
- gradients are computed where the operations they belong to ran.

The undivided batch part stays in the graph, is never run, and is what the model's layers,
``summary``, ``get_config`` and ``save`` go on to see.
"""

import collections
import contextlib
import copy
import itertools
import os
import sys
import threading
import warnings

from .. import _devices, _keras, _replicas, errors
from ..backend import Backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ContextManager, List, Optional, Sequence

    from .._ranks import Launch, Ranks
    from .._settings import Settings

_SESSION_OPTIONS = (
    "allow_soft_placement",
    "inter_op_parallelism_threads",
    "intra_op_parallelism_threads",
    "log_device_placement",
)


class TensorFlow1(Backend):
    name = "tensorflow1"
    framework = "tensorflow"
    distributions = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    extra = "tensorflow1"
    options = _SESSION_OPTIONS + ("device_count",)
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH")

    def __init__(self):
        self._settings = None  # type: Optional[Settings]

    def accepts(self, version: str) -> bool:
        return version.startswith("1.")

    def initialised(self) -> "Optional[str]":
        if "tensorflow" in sys.modules:
            return "tensorflow is imported, and may have asked CUDA for its GPUs"
        return None

    # Configuring ------------------------------------------------------------------------------

    def configure(self, settings: "Settings") -> "List[str]":
        late = self.initialised()
        tf = _names(self.import_framework())
        config = self.session_config(tf, settings, late)
        make_room_for(tf, config)
        lay_under_every_session(lambda: config)
        self._settings = settings
        shown = " ".join(str(config).split())
        lines = ["every session, of Keras and others: ConfigProto {}".format(shown)]
        if settings.memory and not settings.devices.gpus:
            lines.append("memory: no GPU is used, so nothing was set")
        lines.append(_switch_resource_variables_on(tf))
        return lines

    def session_config(self, tf, settings, late):
        """What was asked, as TensorFlow's ``ConfigProto``."""
        devices, memory, options = settings.devices, settings.memory, dict(settings.options)
        config = tf.ConfigProto()
        # Keras' own sessions have it: on a GPU, some of its operations have CPU kernels only.
        config.allow_soft_placement = True
        if devices.simulated:
            config.device_count["CPU"] = devices.simulated
        if not devices.gpus:
            config.device_count["GPU"] = 0
        elif late and not devices.are_shown_by(os.environ):
            # The ids count inside CUDA_VISIBLE_DEVICES as TensorFlow found it.
            config.gpu_options.visible_device_list = ",".join(map(str, devices.positions))
        if memory and devices.gpus:
            if memory.grow:
                config.gpu_options.allow_growth = True
            else:
                fraction = memory.fraction or self._fraction(memory, devices)
                config.gpu_options.per_process_gpu_memory_fraction = fraction
        for device, count in (options.pop("device_count", None) or {}).items():
            config.device_count[device] = count
        for option in _SESSION_OPTIONS:
            if option in options:
                setattr(config, option, options[option])
        return config

    def _fraction(self, memory, devices):
        """The fraction of each GPU that is ``memory.size``; TensorFlow 1 takes nothing else."""
        totals = devices.memory_totals()
        if not any(totals):
            raise errors.memory_total_unknown(memory)
        # One fraction holds for all GPUs: that of the largest, so that none takes more.
        return min(1.0, memory.size / float(max(totals)))

    def devices(self) -> "List[str]":
        tf = _names(self.import_framework())
        if self._settings is not None:
            # An own session on an empty graph: it initialises GPUs just as the user's will.
            with tf.Session(graph=tf.Graph()) as session:
                return self._to_train_on(session.list_devices())
        for keras in _imported_kerases():
            if _session_of(keras) is not None:
                return self._to_train_on(_session_of(keras).list_devices())
        # Making a session would initialise every GPU, with memory settings that are not the
        # user's (keras#8353): ask the driver instead.
        chosen = _devices.choose(_devices.parse_gpus(None), None, os.environ)
        gpus = len(chosen) if tf.test.is_built_with_cuda() else 0
        return ["/device:GPU:{}".format(i) for i in range(gpus)] or ["/device:CPU:0"]

    def _to_train_on(self, listed):
        # XLA_GPU and XLA_CPU are further names for the same devices (keras#11644).
        names = {"CPU": [], "GPU": []}
        for device in listed:
            if device.device_type in names:
                names[device.device_type].append(device.name[device.name.index("/device:") :])
        simulated = self._settings.devices.simulated if self._settings else 1
        return names["GPU"] or names["CPU"][: max(1, simulated)]

    # Parallelizing ----------------------------------------------------------------------------

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Run ``model`` on ``devices``, the same object; see the head of this file.

        Raises:
            UnsupportedError: in a loop, an operation's gradient is by ``tf.custom_gradient``.

        BatchNorm normalises each replica's rows by their own statistics, and its moving
        averages take the mean of the replicas' updates, once a step. Dropout masks of replicas
        are independent. A stateful RNN keeps one state per row of the batch, as on one device:
        each replica reads and writes the states of its rows.

        Functions of the user's own (``K.function``, a loss of their own training loop) run the
        undivided graph.
        """
        current = vars(model).get("_compat_functions")
        if current is not None:
            if list(current.devices) == list(devices):
                return model
            with _keras.training_goes_on(_keras.that_makes_functions(model)):
                current.uninstall()
        if len(devices) > 1:
            weights = model.weights if model.built else ()  # a Sequential of unknown input
            if any(weight.dtype._is_ref_dtype for weight in weights):
                warnings.warn(
                    errors.reference_variables(model.name), errors.CompatWarning, stacklevel=3
                )
            parts = _placed_parts(model)
            if parts:
                text = errors.parts_placed(model.name, parts, devices)
                warnings.warn(text, errors.CompatWarning, stacklevel=3)
            with _keras.training_goes_on(_keras.that_makes_functions(model)):
                _ReplicatedFunctions(model, devices).install()
        return model

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, launch: "Launch") -> "List[str]":
        from . import _horovod

        return _horovod.launcher(launch, self.framework)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """See ``_tensorflow1_ranks``."""
        from . import _tensorflow1_ranks

        return _tensorflow1_ranks.distribute(model, ranks)

    # Devices of parts of a model --------------------------------------------------------------

    def device(self, device: str) -> "ContextManager[Any]":
        """Place on ``device`` what is built inside, and its gradients; variables where first used.

        A layer that is called on several devices keeps its weights where it was called first.
        Within, a loop (an RNN) takes the values that weights have before it.
        """
        tf = _names(self.import_framework())
        return _placed_on(tf, "/device:CPU:0" if device == "cpu" else device)


def _names(tensorflow):
    """TensorFlow under its 1.x names, which late versions of it call deprecated elsewhere."""
    return getattr(tensorflow.compat, "v1", tensorflow)


# Sessions -------------------------------------------------------------------------------------


class _UnderEverySession:
    """A function that gives the configuration, and TensorFlow's own constructor."""

    config = None  # type: Any
    constructor = None  # type: Any


_under_every_session = _UnderEverySession()


def lay_under_every_session(config):
    """Give every session made from now on ``config()``; fields of the session's own config win.

    A session is made by Keras, again after ``clear_session``, and by users: all of them through
    ``BaseSession``. None takes the configuration away again.
    """
    from tensorflow.python.client.session import BaseSession

    state = _under_every_session
    state.config = config
    if config is None:
        if state.constructor is not None:
            BaseSession.__init__, state.constructor = state.constructor, None
        return
    if state.constructor is not None:
        return
    state.constructor = BaseSession.__init__

    def __init__(self, target="", graph=None, config=None):
        state.constructor(self, target, graph, _merged(state.config(), config))

    BaseSession.__init__ = __init__


def _merged(config, own):
    """``config``, with what a session's own config says put over it."""
    if own is not None and type(own) is not type(config):
        return own  # TensorFlow's own error says what is wrong
    result = type(config)()
    result.CopyFrom(config)
    if own is not None:
        own = _without_defaults(own)
        limits = getattr(own.gpu_options, "experimental", None)
        if limits is not None and len(limits.virtual_devices):  # merging would add them up
            result.gpu_options.experimental.ClearField("virtual_devices")
        result.MergeFrom(own)
    return result


def _without_defaults(own):
    """A session's config without what Keras or TensorFlow put there by themselves."""
    from tensorflow.python.eager import context

    result = type(own)()
    result.CopyFrom(own)
    context = context.context() if hasattr(context, "context") else None
    default = context.config.device_count if hasattr(context, "config") else {}  # 1.14, 1.15
    for device in default:  # tf.keras: one CPU, and every GPU there is
        if result.device_count.get(device) == default[device]:
            del result.device_count[device]
    if str(result.intra_op_parallelism_threads) == os.environ.get("OMP_NUM_THREADS"):
        result.ClearField("intra_op_parallelism_threads")  # keras 2.2
    return result


def _missing(config, other):
    """The fields of ``config`` that ``other`` does not have, as a text."""
    parts = [_only(config, field) for field, _ in config.ListFields()]
    missing = [part for part in parts if other is None or not _has(other, part)]
    return ", ".join(" ".join(str(part).split()) for part in missing)


def _has(message, part):
    both = type(message)()
    both.CopyFrom(message)
    both.MergeFrom(part)
    return both == message


def _only(message, field):
    """A copy of a protocol message with this one field."""
    result = type(message)()
    result.CopyFrom(message)
    for other, _ in message.ListFields():
        if other.name != field.name:
            result.ClearField(other.name)
    return result


def make_room_for(tf, config):
    """See that no session of another configuration is in use, or raise."""
    for keras in _imported_kerases():
        session = _session_of(keras)
        if session is None:
            continue
        missing = _missing(config, session._config)
        if not missing:
            continue
        with session.graph.as_default():
            variables = len(tf.global_variables())
        if variables or any(d.device_type == "GPU" for d in session.list_devices()):
            raise errors.keras_session_exists(variables, missing)
        keras.backend.set_session(None)  # nothing is lost: the next one is configured
    if tf.test.is_built_with_cuda() and config.HasField("gpu_options") and sessions_made():
        under = _under_every_session.config
        if _missing(config, under and under()):
            raise errors.gpus_initialised(" ".join(str(config.gpu_options).split()))


def sessions_made():
    """Whether any session was made in this process: with it, GPUs are initialised."""
    from tensorflow.python.client import session

    counter = getattr(session, "_python_session_create_counter", None)
    return counter is not None and counter.get_cell().value() > 0


def _imported_kerases():
    """The Kerases that are imported: each may have a session."""
    found = [sys.modules[name] for name in ("keras",) if name in sys.modules]
    found = [keras for keras in found if _keras.backend_name(keras) == "tensorflow"]
    if {"tensorflow.python.keras.backend", "keras", "tf_keras"} & set(sys.modules):
        found.append(_names(sys.modules["tensorflow"]).keras)
    return [keras for keras in found if hasattr(keras.backend, "get_session")]


def _session_of(keras):
    """The session that this Keras made for itself, or None. Makes none."""
    module = sys.modules[keras.backend.get_session.__module__]
    session = getattr(module, "_SESSION", None)  # keras 2.3 has none of its own
    if isinstance(session, threading.local):  # from TensorFlow 1.15
        session = getattr(session, "session", None)
    return session


def _switch_resource_variables_on(tf):
    """Switch them on: keras 2.2's reference variables race, and train wrongly.

    An update may overwrite a weight that the gradient, or another replica, has yet to read.
    """
    if hasattr(tf, "enable_resource_variables"):  # from 1.11
        tf.enable_resource_variables()
        call = "tf.enable_resource_variables()"
    else:
        _make_resource_variables(tf.Variable)
        call = "tf.Variable() makes resource variables"
    return call + ", since reference variables race and train wrongly"


def _make_resource_variables(variable):
    """Have ``tf.Variable()`` give an instance of its subclass for resource variables."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    def __new__(cls, *args, **options):
        # What a resource variable cannot be: read from a file, or of a shape not known yet.
        others = {"variable_def", "expected_shape"} & set(options)
        if cls is variable and len(args) < 7 and not others and options.get("validate_shape", True):
            cls = ResourceVariable
        return object.__new__(cls)

    variable.__new__ = staticmethod(__new__)


# A model's functions --------------------------------------------------------------------------


class _ReplicatedFunctions:
    """The three functions of a Keras model, made to run its batch part on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    methods of its own for that, which call Keras' and rewire what it made.
    """

    def __init__(self, model, devices):
        self.owner = model
        self.model = _keras.that_makes_functions(model)
        self.devices = list(devices)
        self._rewired = {}  # type: Dict[str, Any]
        self._replicas = None  # type: Optional[_Replicas]
        self._replicas_key = None  # type: Any

    def install(self):
        vars(self.owner)["_compat_functions"] = self
        if _keras.wraps_a_model(self.owner):
            vars(self.owner)["build"] = self._build
        if self.model is not None:
            for function in _keras.FUNCTIONS:
                vars(self.model)["_make_" + function] = self._maker(function)

    def uninstall(self):
        vars(self.owner).pop("build", None)
        del vars(self.owner)["_compat_functions"]
        for function in _keras.FUNCTIONS if self.model is not None else ():
            del vars(self.model)["_make_" + function]

    def _build(self, input_shape=None):
        """What an old Sequential does to make its inner model anew, when layers were added."""
        type(self.owner).build(self.owner, input_shape)
        self.model = _keras.that_makes_functions(self.owner)
        self.install()

    def _maker(self, function):
        make = getattr(self.model, "_make_" + function)

        def make_replicated():
            with self._training_on_replicas() if "train" in function else _nothing():
                make()
            made = getattr(self.model, function)
            if made is not self._rewired.get(function):
                replicas = self._replicas_now()
                made.outputs = [replicas.whole(tensor) for tensor in made.outputs]
                made.updates_op = replicas.whole(made.updates_op)
                self._rewired[function] = made

        return make_replicated

    def _replicas_now(self):
        """The replicas of the model as it is now: layers may have been added or frozen."""
        model = self.model
        updates = list(model.updates) + list(model.state_updates)
        key = list(model.inputs) + list(model.outputs) + updates
        if self._replicas is None or not _same(key, self._replicas_key):
            self._replicas = _Replicas(
                model.inputs, model.outputs, updates, _keras.states(model, "handle"), self.devices
            )
            self._replicas_key = key
        return self._replicas

    @contextlib.contextmanager
    def _training_on_replicas(self):
        """Within, the optimizer takes its gradients from the replicas, each on its device."""
        optimizer = vars(self.model.optimizer)
        get_updates = self.model.optimizer.get_updates

        def get_updates_on_replicas(loss, params):
            replicas = self._replicas_now()
            counter = getattr(self.model.optimizer, "iterations", None)
            with replicas.gradients_beside_forward(), reading_after_counting(counter):
                return get_updates(loss=replicas.whole(loss), params=params)

        optimizer["get_updates"] = get_updates_on_replicas
        try:
            yield
        finally:
            del optimizer["get_updates"]


@contextlib.contextmanager
def reading_after_counting(counter):
    """Within, what reads an optimizer's step counter does so after its increment.

    In keras 2.2 and 2.3 nothing orders the two, and Adam takes either number; on one device
    it is mostly the incremented one.
    """

    def uses(kind):
        consumers = counter.handle.consumers() if hasattr(counter, "handle") else ()
        return [op for op in consumers if op.type == kind]

    # Those that others made, such as the one that saves the counter, must not count.
    before = uses("ReadVariableOp")
    yield
    for read in uses("ReadVariableOp"):
        for write in uses("AssignAddVariableOp"):
            if read not in before and read not in _ancestors([write], ())[0]:
                read._add_control_input(write)


@contextlib.contextmanager
def _nothing():
    yield


def _same(first, second):
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


# Replicas in the graph ------------------------------------------------------------------------


class _Replicas:
    """The batch part of a model's graph, copied once per device.

    Arguments:
        inputs: the model's input tensors; their first dimension is the batch.
        outputs: the model's output tensors.
        updates: the updates of the model's layers, as Keras has them.
        states: variables that hold a row for each row of the batch.
        devices: the devices, as TensorFlow names them.
    """

    def __init__(self, inputs, outputs, updates, states, devices):
        import tensorflow

        self.tf = _names(tensorflow)
        self.devices = devices
        self.graph = outputs[0].graph
        self.inputs = list(inputs)
        self.states = [_value(state.handle) for state in states]
        self._replaced = {}  # type: Dict[Any, Any]
        targets = list(outputs) + _written_values(updates, _starts(inputs))
        needed, consumers = _ancestors(targets, _starts(inputs))
        needed = [op for op in needed if not _is_shared(op)]
        for op in needed:
            if _has_custom_gradient(op) and _loop_of(op) is not None:
                raise errors.custom_gradient(op.name)
        #: The operations that depend on the batch; what they need besides is copied, too.
        self.batch_part = _reached(_starts(inputs), consumers) - _starts(inputs)
        with self._apart():
            self.sizes = _replicas.sizes(self._rows(self.inputs[0]), len(devices))
            self.copies = [self._replica(index, needed) for index in range(len(devices))]
        device_of = {
            copied: device
            for device, replica in zip(devices, self.copies)
            for copied in replica.operations.values()
        }
        loops = [op for op in device_of if op.type == "Enter"]
        device_of.update((_loop_of(op).name, device_of[op]) for op in loops)
        self._beside = _Beside(device_of, sums=True)

    def _replica(self, index, needed):
        """Copy the operations ``needed`` to the device, there to compute its shard."""
        tf = self.tf
        replaced = {}  # type: dict
        for tensor in self.inputs + self.states:
            with self._where_it_lies(tensor):
                count = self._rows(tensor)
                first, end = _replicas.run_bounds(count, len(self.devices), index, tf.maximum)
                shard = self._shard(tensor, first, end)
                replaced.update(zip(_parts(tensor), _parts(shard)))
        return _copy(
            needed,
            replaced,
            "replica_{}".format(index),
            lambda op: "" if _follows_its_input(op) else self.devices[index],
            seed=index,
            fixed_batch=self.inputs[0].get_shape()[:1].as_list()[0],
        )

    @contextlib.contextmanager
    def _apart(self):
        """Within, operations are made apart from where Keras is just making its own."""
        with self.graph.as_default(), self.graph.name_scope(None):
            with self.tf.control_dependencies(None), self.tf.device(None):
                yield

    def _where_it_lies(self, tensor):
        # Slicing on the replica would send the whole batch to every device.
        if tensor.op.type.startswith("Placeholder"):
            return self.tf.device("/cpu:0")
        return self.tf.colocate_with(tensor.op)

    def _rows(self, tensor):
        if isinstance(tensor, self.tf.SparseTensor):
            return self.tf.cast(tensor.dense_shape[0], self.tf.int32)
        return self.tf.shape(tensor)[0]

    def _shard(self, tensor, first, end):
        tf = self.tf
        if not isinstance(tensor, tf.SparseTensor):
            return tensor[first:end]
        first, rows = tf.cast(first, tf.int64), tf.cast(end - first, tf.int64)
        start = tf.concat([[first], tf.zeros_like(tensor.dense_shape[1:])], axis=0)
        size = tf.concat([[rows], tensor.dense_shape[1:]], axis=0)
        return tf.sparse_slice(tensor, start, size)

    # Tensors of the whole batch ---------------------------------------------------------------

    def whole(self, fetch):
        """The tensor or operation, computed from the replicas' batch parts.

        What lies between the batch part and ``fetch`` is copied; so it is computed once, of the
        whole batch.
        """
        ops, consumers = _ancestors([fetch], self.batch_part)
        crossing = [op for op in consumers if op in self.batch_part]
        between = _reached(crossing, consumers) - self.batch_part
        new = [op for op in ops if op in between and op not in self._replaced]
        if new:
            boundary = {
                tensor: self.whole_tensor(tensor)
                for op in new
                for tensor in op.inputs
                if tensor.op not in between or tensor.op in self._replaced
            }
            copies = _copy(new, boundary, "whole_batch", None, controls=self._control)
            self._replaced.update(copies.operations)
        if isinstance(fetch, self.tf.Operation):
            return self._replaced.get(fetch, fetch)
        return self.whole_tensor(fetch)

    def _control(self, op):
        """Operations to wait for where the undivided graph waits for ``op``."""
        if op in self.batch_part:
            return [replica.operations[op] for replica in self.copies if op in replica.operations]
        return [self._replaced.get(op, op)]

    def whole_tensor(self, tensor):
        if tensor.op in self._replaced:
            return self._replaced[tensor.op].outputs[tensor.value_index]
        if tensor.op not in self.batch_part:
            return tensor
        key = tensor.name
        if key not in self._replaced:
            with self._apart():
                self._replaced[key] = self._merge([c.tensor(tensor) for c in self.copies])
        return self._replaced[key]

    def _merge(self, parts):
        """Put the replicas' tensors together: rows in order, or the mean where there are none."""
        tf = self.tf
        if parts[0].shape.ndims is None or parts[0].shape[:1].as_list() == [None]:
            kept = []
            for part, size, device in zip(parts, self.sizes, self.devices):
                with tf.device(device):
                    # A replica without rows of its own has computed one, to be dropped.
                    kept.append(part[: tf.shape(part)[0] * tf.minimum(size, 1)])
            return tf.concat(kept, axis=0, name="rows_in_order")
        if not parts[0].dtype.is_floating:
            return parts[0]
        rows = tf.cast(sum(self.sizes), parts[0].dtype)
        weights = [tf.cast(size, parts[0].dtype) / rows for size in self.sizes]
        return tf.add_n([w * part for w, part in zip(weights, parts)], name="mean_by_rows")

    @contextlib.contextmanager
    def gradients_beside_forward(self):
        """Within, a gradient's operations go where the operation ran that they belong to.

        Keras 2 asks TensorFlow for that (``colocate_gradients_with_ops``), tf.keras does not.
        """
        with self.graph.as_default(), self.tf.device(self._beside):
            yield


# Devices --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _placed_on(tf, device):
    """Within, operations go to ``device``; later, their gradients' operations do."""
    graph = tf.get_default_graph()
    if not _gradients_follow(graph):
        graph._apply_device_functions = _GradientsFollow(graph._apply_device_functions)
    with tf.device(device), _variables_read_before_loops():
        yield


def _placed_parts(model):
    """The devices that ``device()`` gave to parts of ``model``."""
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs or not _gradients_follow(outputs[0].graph):
        return []
    starts = _starts(inputs)
    _, consumers = _ancestors(outputs, starts)
    return sorted({op.device for op in _reached(starts, consumers) - starts if op.device})


def _gradients_follow(graph):
    return isinstance(getattr(graph, "_apply_device_functions", None), _GradientsFollow)


class _GradientsFollow:
    """What a graph does to give each operation its device; gradients follow from then on.

    tf.keras does not ask TensorFlow to place gradients at all, and loops' counters and stacks
    stay behind in every Keras: a loop on two devices waits at each step.
    """

    def __init__(self, apply):
        self.apply = apply
        self.beside = _Beside({}, sums=False)

    def __call__(self, op):
        self.apply(op)
        if not op.device:
            device = self.beside(op)
            if device:
                op._set_device(device)


@contextlib.contextmanager
def _variables_read_before_loops():
    """Within, loops take the value of a variable in, instead of reading it at each step.

    It is read where the variable lies. Inside a loop that is elsewhere, the read would draw with
    it what the gradient keeps of it, and then the products (they share a stack).
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    variable = next(c for c in ResourceVariable.__mro__ if "value" in vars(c))
    value = variable.value

    def value_before_loops(self):
        with ops.control_dependencies(None):  # out of all loops
            return value(self)

    variable.value = value_before_loops
    try:
        yield
    finally:
        variable.value = value


class _Beside:
    """Tells the device of a gradient's operation: where the operation ran that it belongs to.

    Arguments:
        device_of: devices of operations, and of loops by name, where operations have no device
            that says so.
        sums: whether all operations are gradients', so that those which belong to none sum up
            gradients, of one device or of several.
    """

    def __init__(self, device_of, sums):
        self.device_of = device_of
        self.sums = sums

    def __call__(self, op):
        if _follows_its_input(op):
            return ""
        forward, loop = op._original_op, _loop_of(op)
        if forward is not None:
            device = self._device_of(forward)
        elif loop is not None:  # one of its counters
            device = self._device_of_loop(_forward_loop(loop))
            self.device_of[loop.name] = device
        elif op.type == "Enter":
            device = self.device_of.get(op.get_attr("frame_name").decode(), "")
        elif self.sums:
            devices = {self._device_of(tensor.op) for tensor in op.inputs}
            device = devices.pop() if len(devices) == 1 else ""
        else:
            device = ""
        if device:
            self.device_of[op] = device
            if op.type == "Enter":
                self._place_constant_of_loop(op, device)
        return device

    def _device_of(self, op):
        return self.device_of.get(op, op.device)

    def _device_of_loop(self, loop):
        # A loop has a pivot as soon as it has a condition.
        pivot = loop.pivot.op.device if loop.pivot is not None else ""
        return self.device_of.get(loop.name, pivot)

    def _place_constant_of_loop(self, enter, device):
        """Put a loop's own constants where the loop is.

        They are made before the loop, and tell nothing of it. Left elsewhere, TensorFlow's
        constant folding moves them into the loop, which then waits for them forever.
        """
        constant = enter.inputs[0].op
        if constant.type == "Const" and not constant.device:
            constant._set_device(device)


def _loop_of(op):
    """The context of the innermost loop that ``op`` is in, or None."""
    context = op._get_control_flow_context()
    while context is not None and not _is_loop(context):
        context = context.outer_context
    return context


def _is_loop(context):
    from tensorflow.python.ops.control_flow_ops import WhileContext

    return isinstance(context, WhileContext)


def _forward_loop(context):
    """The loop whose gradient this loop computes, or the loop itself."""
    return context if context.grad_state is None else context.grad_state.forward_context


# Graphs ---------------------------------------------------------------------------------------

_WRITES = ("Assign", "ResourceScatter", "Scatter", "ResourceApply", "Apply")


def _parts(tensor):
    """The dense tensors that a tensor consists of: three, for a sparse one."""
    if hasattr(tensor, "dense_shape"):
        return [tensor.indices, tensor.values, tensor.dense_shape]
    return [tensor]


def _starts(inputs):
    return {part.op for tensor in inputs for part in _parts(tensor)}


def _ancestors(fetches, stop):
    """The operations that ``fetches`` need, those in ``stop`` left out, and who consumes what."""
    pending = [getattr(fetch, "op", fetch) for fetch in fetches]
    found, consumers = set(), collections.defaultdict(list)  # type: Any, Any
    ordered = []
    while pending:
        op = pending.pop()
        if op in found or op in stop:
            continue
        found.add(op)
        ordered.append(op)
        for needed in [tensor.op for tensor in op.inputs] + op.control_inputs:
            consumers[needed].append(op)
            pending.append(needed)
        context = op._get_control_flow_context()
        if _is_loop(context):
            # A loop's gradient needs all its variables, those too whose result nobody does.
            pending.extend(tensor.op for tensor in context.loop_exits)
    return ordered, consumers


def _reached(starts, consumers):
    """The operations that depend on ``starts``, themselves left in."""
    found, pending = set(), list(starts)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending.extend(consumers.get(op, ()))
    return found


def _is_shared(op):
    """Whether all replicas use this very operation: variables, their values, what is fed."""
    if op.type.startswith(("Placeholder", "VarHandle", "Variable")):
        return True
    reads = op.type in ("ReadVariableOp", "Identity") and not op.control_inputs
    return reads and op.inputs[0].op.type.startswith(("VarHandle", "Variable"))


def _follows_its_input(op):
    """Whether TensorFlow wants ``op`` on the device of what it reads: a variable or an array."""
    return any(t.dtype._is_ref_dtype or t.dtype.name == "resource" for t in op.inputs)


def _value(variable):
    """The value of a variable's handle: one tensor, so that it goes to each device once."""
    from tensorflow.python.ops import gen_resource_variable_ops

    for op in variable.consumers():
        reads = op.type == "ReadVariableOp" and not op.control_inputs
        if reads and op._get_control_flow_context() is None:
            return op.outputs[0]
    dtype = variable.op.get_attr("dtype")
    return gen_resource_variable_ops.read_variable_op(variable, dtype)


def _only_lets_a_variable_in(op):
    """Whether ``op`` brings a variable into a loop, which only reads it there.

    The variable may as well be read before: else the loop runs on two devices, and sends the
    variable from one to the other at each of its steps.
    """
    return (
        op.type == "Enter"
        and op.inputs[0].op.type == "VarHandleOp"
        and all(consumer.type == "ReadVariableOp" for consumer in op.outputs[0].consumers())
    )


def _written_values(updates, stop):
    """The tensors that layers' updates write into variables, or derive from the batch for it."""
    values = [update[1] for update in updates if isinstance(update, tuple)]
    updates = [update for update in updates if not isinstance(update, tuple)]
    ops, consumers = _ancestors(updates, stop)
    writing = _reached([op for op in ops if op.type.startswith(_WRITES)], consumers)
    return values + [t for op in writing for t in op.inputs if t.op not in writing]


def writing_operations(updates):
    """The operations that write variables when ``updates`` are run."""
    return [op for op in _ancestors(updates, ())[0] if op.type.startswith(_WRITES)]


class _Copy:
    """Copied operations, by the operations they were copied from."""

    def __init__(self, operations, replaced):
        self.operations = operations
        self.replaced = replaced

    def tensor(self, tensor):
        """The copy of a tensor, or what was put in its place."""
        if tensor.op in self.operations:
            return self.operations[tensor.op].outputs[tensor.value_index]
        return self.replaced.get(tensor, tensor)


def _copy(operations, replaced, scope, device, seed=0, controls=None, fixed_batch=None):
    """Copy operations into their own graph.

    Arguments:
        operations: what to copy; may hold loops and conditions, if whole.
        replaced: tensors of other operations, and the ones to use in their place.
        scope: a name to put before those of the operations.
        device: a device function for the copies; None: as the originals.
        seed: a number that sets apart the random numbers of several copies.
        controls: tells, for an operation that is not copied, which ones to wait for instead;
            None: no need to wait.
        fixed_batch: the number of rows the originals were made for, where it is fixed; the
            copies compute other numbers.
    """
    import tensorflow

    tf = _names(tensorflow)
    graph = operations[0].graph
    # Before 1.8 TensorFlow infers shapes as it imports, so inputs have to come first.
    operations = sorted(operations, key=lambda op: op._id)
    copied = set(operations)
    with graph.as_default(), graph.name_scope(scope) as prefix:
        pass  # the scope is ours, as it was made unique
    definition = tf.GraphDef()
    definition.versions.CopyFrom(graph.graph_def_versions)
    outside = {}
    waiting = []
    copies = _Copy({}, replaced)
    entering = {op for op in operations if _only_lets_a_variable_in(op)}
    for op in operations:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop("_class", None)  # colocated with originals
        if op in entering:
            replaced[op.inputs[0]] = value = _value(op.inputs[0])
            node.attr["T"].type = value.dtype.as_datatype_enum
        elif op.type == "ReadVariableOp" and op.inputs[0].op in entering:
            node.op = "Identity"
            node.attr["T"].type = node.attr["dtype"].type
            del node.attr["dtype"]
        if device is not None:
            node.device = ""
        if op.type in ("Enter", "RefEnter"):  # loops with one name would run as one
            node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
        if "element_shape" in node.attr and node.attr["element_shape"].shape.dim:
            node.attr["element_shape"].shape.dim[0].size = -1  # of a loop's array: a fixed batch
        for tensor in op.inputs:
            if tensor.op not in copied:
                if tensor.op.type == "ReadVariableOp" and _is_shared(tensor.op):
                    inside = _value(tensor.op.inputs[0])
                else:
                    inside = tensor
                outside[tensor.name] = replaced.get(inside, inside)
        for other in op.control_inputs:
            if other not in copied:
                node.input.remove("^" + other.name)
                waiting.append((op, other))
        if _has_custom_gradient(op):
            node.attr["_gradient_op_type"].s = _gradient_of_copy(op, copies)
        if seed and "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
            node.attr["seed2"].i = (node.attr["seed2"].i + seed * 104729) % 2**31
    with graph.as_default(), tf.device(None), tf.device(device):
        results = tf.import_graph_def(
            definition, outside, [op.name for op in operations], name=prefix
        )
    copies.operations.update(zip(operations, results))
    for op, result in copies.operations.items():
        for tensor, copied in zip(op.outputs, result.outputs if op not in entering else ()):
            # Keras tells TensorFlow shapes that it does not see by itself, of RNNs for example.
            if tensor.shape.ndims is not None:
                shape = [None if size == fixed_batch else size for size in tensor.shape.as_list()]
                if fixed_batch and shape and shape[0] and shape[0] % fixed_batch == 0:
                    shape[0] = None  # as many rows for each row of the batch: steps, for example
                copied.set_shape(shape)
    if controls is not None:
        for op, other in waiting:
            copies.operations[op]._add_control_inputs(controls(other))
    _copy_contexts(copies, prefix)
    return copies


def _has_custom_gradient(op):
    """Whether the gradient of ``op`` is a function of the user's, by ``tf.custom_gradient``."""
    attributes = op.node_def.attr  # before 1.8 no copy: asking for one not there adds it
    name = "_gradient_op_type" in attributes and attributes["_gradient_op_type"].s
    return bool(name) and name.startswith(b"CustomGradient")


_numbers = itertools.count()


def _gradient_of_copy(op, copies):
    """Register a gradient for the copy of ``op``, and return its name.

    The user's function holds tensors of the original. What it computes of them is copied, to be
    computed of the copies.
    """
    from tensorflow.python.framework import ops

    gradient = ops.get_gradient_function(op)
    name = "CustomGradientOfCopy{}".format(next(_numbers))

    @ops.RegisterGradient(name)
    def gradient_of_copy(_, *upstream):
        results = gradient(op, *upstream)
        tensors = [result for result in results if result is not None]
        starts = set(copies.operations) | {tensor.op for tensor in copies.replaced}
        found, consumers = _ancestors(tensors, starts | {tensor.op for tensor in upstream})
        moving = _reached([start for start in starts if start in consumers], consumers) - starts
        if not moving:
            return results
        boundary = {
            tensor: copies.tensor(tensor)
            for each in moving
            for tensor in each.inputs
            if tensor.op not in moving
        }
        with op.graph.name_scope(None), ops.control_dependencies(None):
            moved = _copy([op for op in found if op in moving], boundary, "gradient", None)
        return [None if result is None else moved.tensor(result) for result in results]

    return name.encode()


def _copy_contexts(copies, prefix):
    """Give copies of loops and conditions contexts of their own, which gradients need."""
    import tensorflow
    from tensorflow.python.ops.control_flow_ops import ControlFlowContext

    tf = _names(tensorflow)
    contexts = {}  # type: Dict[Any, Any]
    names = {
        tensor.name: copies.tensor(tensor).name for op in copies.operations for tensor in op.outputs
    }

    def convert(value):
        if isinstance(value, tf.Tensor):
            return copies.tensor(value)
        if isinstance(value, tf.Operation):
            return copies.operations.get(value, value)
        if isinstance(value, ControlFlowContext):
            return context_of(value)
        if isinstance(value, set):
            return {names.get(name, name) for name in value}
        if isinstance(value, dict):
            return {names.get(name, name): convert(item) for name, item in value.items()}
        if isinstance(value, list):
            return [convert(v) for v in value if getattr(v, "op", None) in copies.operations]
        return value

    def context_of(context):
        if context not in contexts:
            contexts[context] = result = copy.copy(context)
            for name, value in list(vars(context).items()):
                setattr(result, name, convert(value))
            result._name = prefix + context._name
            if _is_loop(context):
                result._grad_state = None
        return contexts[context]

    for op, copied in copies.operations.items():
        context = op._get_control_flow_context()
        if context is not None:
            copied._set_control_flow_context(context_of(context))


backend = TensorFlow1()
