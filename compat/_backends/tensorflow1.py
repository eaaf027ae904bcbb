"""TensorFlow 1, under standalone Keras 2 or its own ``tf.keras``.

Configuring: TensorFlow 1 takes its devices and its memory from each session's ``ConfigProto``,
and a script makes sessions in many places. So one configuration is laid under every session.

Parallelizing: Keras 2 builds a static graph, so replicas are made in the graph, where every
Keras looks alike. Keras builds the model, its loss and its metrics as ever, for one device. When
it then turns tensors into a function to run (``_make_train_function`` and its two siblings), the
*batch part* of the graph (the operations between the model's inputs and outputs) is replaced:

- it is copied once per device, and each copy reads its shard of the batch;
- a tensor that leaves the batch part, towards outputs, loss, metrics or updates, becomes the
  copies' rows in order, so that all of these see the whole batch and state is written once a step;
- what computes across rows is no part of it, as far as the graph tells, BatchNorm excepted;
- gradients are computed where the operations they belong to ran.

The undivided batch part stays in the graph, is never run, and is what the model's layers,
``summary``, ``get_config`` and ``save`` go on to see.
"""

import contextlib
import os
import sys
import threading
import warnings

from .. import _devices, _keras, errors
from ..backend import Backend
from ._tensorflow1_device import placed_on, placed_parts
from ._tensorflow1_errors import explain
from ._tensorflow1_graph import ancestors, writing_operations  # noqa: F401  # for the ranks
from ._tensorflow1_graph import v1_names as _names
from ._tensorflow1_replicas import Replicas

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ContextManager, List, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings
    from .._verification import Verification

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
        if settings.devices.undecided is not None:
            gpus = [name for name in self.devices() if "GPU" in name]
            settings.devices.settle(len(gpus), restricted=True)
            if gpus and settings.memory and settings.memory.size:
                raise errors.memory_total_unknown(settings.memory)
            if not gpus:
                config.CopyFrom(self.session_config(tf, settings, late))
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
            UnsupportedError: in a loop, an operation's gradient is by ``tf.custom_gradient``; an
                input is a variable; a call writes a variable by what depends on the batch; all of
                these when Keras makes the model's functions.

        BatchNorm normalises each replica's rows by their own statistics, and its moving
        averages take the mean of the replicas' updates, once a step. Dropout masks of replicas
        are independent. A stateful RNN keeps one state per row of the batch, as on one device:
        each replica reads and writes the states of its rows.

        What computes across rows, and all that needs it, runs undivided, with a warning where
        that costs something; see ``_tensorflow1_rows`` for how it is found.

        Functions of the user's own (``K.function``, a loss of their own training loop) run the
        undivided graph.
        """
        current = vars(model).get("_compat_functions")
        if current is not None:
            if list(current.devices) == list(devices):
                return model
            with _keras.training_goes_on(_keras.that_makes_functions(model)):
                current.uninstall()
        maker = _keras.that_makes_functions(model)
        if maker is not None and OrderedCounting.of(maker) is not None:
            if len(devices) == 1:
                return model
            OrderedCounting.of(maker).remove(maker)
        if len(devices) > 1:
            weights = model.weights if model.built else ()  # a Sequential of unknown input
            if any(weight.dtype._is_ref_dtype for weight in weights):
                warnings.warn(
                    errors.reference_variables(model.name), errors.CompatWarning, stacklevel=3
                )
            parts = placed_parts(model)
            if parts:
                text = errors.parts_placed(model.name, parts, devices)
                warnings.warn(text, errors.CompatWarning, stacklevel=3)
            with _keras.training_goes_on(_keras.that_makes_functions(model)):
                _ReplicatedFunctions(model, devices).install()
        elif maker is not None and _counts_without_order(maker):
            with _keras.training_goes_on(maker):
                OrderedCounting(devices).install(maker)
        return model

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        from . import _tensorflow1_verification

        maker = _keras.that_makes_functions(model)
        if maker is not None:
            _tensorflow1_verification.VerifiedStep.install_on(maker, verification)

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
        return placed_on(tf, "/device:CPU:0" if device == "cpu" else device)


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
    _let_resource_variables_add_in_place()
    if hasattr(tf, "enable_resource_variables"):  # from 1.11
        tf.enable_resource_variables()
        call = "tf.enable_resource_variables()"
    else:
        _make_resource_variables(tf.Variable)
        call = "tf.Variable() makes resource variables"
    return call + ", since reference variables race and train wrongly"


def _let_resource_variables_add_in_place():
    """Give ``loss += tensor`` its old meaning, a tensor, which resource variables refuse (1.12 on).

    Losses of Keras' own examples begin as ``K.variable(0.)``: deep_dream, neural_style_transfer.
    """
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    for operator in ("add", "sub", "mul", "div", "truediv", "realdiv", "pow"):
        name = "__i{}__".format(operator)
        for parent in ResourceVariable.__mro__:
            if name in vars(parent):
                delattr(parent, name)  # Python then takes __add__, and binds what that returns


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
        self._replicas = None  # type: Optional[Replicas]
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
                explain(made, self.model.name, replicas.divided)
                self._rewired[function] = made

        return make_replicated

    def _replicas_now(self):
        """The replicas of the model as it is now: layers may have been added or frozen."""
        model = self.model
        updates = list(model.updates) + list(model.state_updates)
        loss = getattr(model, "total_loss", None)  # once compiled
        losses = [] if loss is None else [loss]
        key = list(model.inputs) + list(model.outputs) + updates + losses
        if self._replicas is None or not _same(key, self._replicas_key):
            self._replicas = Replicas(
                model.name,
                model.inputs,
                model.outputs,
                losses,
                updates,
                _keras.states(model, "handle"),
                _variables_of_batchnorm(model),
                self.devices,
            )
            self._replicas_key = key
        return self._replicas

    @contextlib.contextmanager
    def _training_on_replicas(self):
        """Within, the optimizer takes its gradients from the replicas, each on its device."""
        optimizer = self.model.optimizer
        get_updates = optimizer.get_updates

        def get_updates_on_replicas(loss, params):
            replicas = self._replicas_now()
            counter = getattr(optimizer, "iterations", None)
            with replicas.gradients_beside_forward(), counting_after_reading(counter):
                return get_updates(loss=replicas.whole(loss), params=params)

        with _updating_by(optimizer, get_updates_on_replicas):
            yield


@contextlib.contextmanager
def _updating_by(optimizer, get_updates):
    """Within, an optimizer of Keras has another method ``get_updates``."""
    known = vars(optimizer)
    hidden = known.get("get_updates")
    known["get_updates"] = get_updates
    try:
        yield
    finally:
        del known["get_updates"]
        if hidden is not None:
            known["get_updates"] = hidden


class OrderedCounting(_keras.InstanceMethod):
    """How a model on one device makes its training function, so that its first step is step 1."""

    method = "_make_train_function"

    def __call__(self, model):
        optimizer = model.optimizer
        get_updates = optimizer.get_updates

        def get_updates_in_order(loss, params):
            with counting_after_reading(getattr(optimizer, "iterations", None)):
                return get_updates(loss=loss, params=params)

        # Not around all of it: a session that has run knows no new order (keras 2.3).
        with _updating_by(optimizer, get_updates_in_order):
            self.plain(model)()


def _counts_without_order(model):
    """Whether an Adam of this model's Keras may read its step counter before or after it grows."""
    return "get_updates" in vars(
        _keras.keras_of(model).optimizers.Adam
    )  # not that of all later optimizers


@contextlib.contextmanager
def counting_after_reading(counter):
    """Within, the increment of an optimizer's step counter waits for what reads the counter.

    In keras 2.2 and 2.3 nothing orders the two. Adam adds 1 to what it reads, so it means the
    number before: with reference variables it mostly gets that, with resource variables the other
    one. tf.keras has an order of its own, which stays.
    """

    def uses(kind):
        consumers = counter.handle.consumers() if hasattr(counter, "handle") else ()
        return [op for op in consumers if op.type == kind]

    # Those that others made, such as the one that saves the counter, must not count.
    reads, writes = uses("ReadVariableOp"), uses("AssignAddVariableOp")
    yield
    for read in uses("ReadVariableOp"):
        for write in uses("AssignAddVariableOp"):
            if read not in reads and write not in writes + ancestors([read], ())[0]:
                write._add_control_input(read)


@contextlib.contextmanager
def _nothing():
    yield


def _variables_of_batchnorm(model):
    """The variables of the BatchNorm layers that a model consists of, at any depth."""
    found, pending = [], list(model.layers)
    while pending:
        layer = pending.pop()
        pending += getattr(layer, "layers", None) or ()
        for part in ("layer", "forward_layer", "backward_layer"):  # of wrappers
            pending += [getattr(layer, part)] if hasattr(layer, part) else []
        if any(parent.__name__.startswith("BatchNormalization") for parent in type(layer).__mro__):
            found += layer.weights
    return found


def _same(first, second):
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


backend = TensorFlow1()
