"""The ``call`` of a model on several devices, and that of a layer which ``device()`` placed."""

import functools
import inspect
import itertools
import threading
import weakref

import tensorflow as tf

from ... import _keras, _rows
from ..._rows import split_rows
from ..._runtime import patching, work
from ..._runtime.process import process
from . import between_outputs, merging, side_effects
from .call_trace import Trace
from .replicas import Replica, ShardedArguments, are_arrays, as_tensors, recording
from .runtime import refuse_strategies, several_devices_in_xla

# Graphs that Keras traces for shapes or for saving; nothing is computed in them, or somewhere
# else: what is saved must not name this machine's devices. (``__call__`` is what Keras 3 exports;
# ``tf.function(model)`` has another name.)
_TRACES = (
    "scratch_graph", "build_graph",
    "_layer_call_fn", "_conditional_losses", "_wrapped_model", "__call__", "serving_default",
)  # fmt: skip


#: How often a call that is divided was begun, of any model.
reached = [0]


class ReplicatedCall(patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows ``split_rows.run_bounds`` gives it, under its device. The
    operations of a gradient carry no device, and would all run on the first one; so each replica
    is a function with a gradient of its own (``tf.custom_gradient``), computed under the
    replica's device, too. TensorFlow sums the gradients of the replicas.

    Losses added within ``call``, outputs without rows and state (counters, moving averages) leave
    the replicas as values of their own rows, and become those of all rows by ``Merging``: sums,
    means, maxima or minima, as a ``Trace`` of the plain call shows. Where it shows that rows are
    mixed, the call runs with the whole batch on the first device. See ``replicas``, ``merging``
    and ``call_trace``.
    """

    # Autograph leaves what carries this mark alone, as it does tf.function's own wrappers.
    autograph_info__ = {}  # type: dict

    supports_jit = None  # what jit_compile="auto" went by, in Keras 3
    is_of_keras = True  # only Keras adds losses within a call, and traces for its own purposes

    def __init__(self, devices, belongs_to_step=False):
        super().__init__(devices)
        # Whether it is there for a model around this one, whose step may call this one.
        self.belongs_to_step = belongs_to_step
        self.traces = {}  # type: Dict[Any, Any]  # of eager calls
        self.effects = None  # of the model, which they belong to
        self.lock = threading.RLock()

    def install(self, model):
        super().install(model)
        merging.read_kernels()
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

    def invoke(self, model, *args, **kwargs):
        reached[0] += 1
        call = functools.partial(self._unreplicated, model)
        if split_rows.runs_undivided() or only_traced(model):
            return call(*args, **kwargs)
        args, kwargs = self._given(model, (args, kwargs))
        arguments = ShardedArguments(args, kwargs, len(self.devices))
        if arguments.batch is None:
            return call(*args, **kwargs)
        if getattr(model, "_jit_compile", None):
            raise several_devices_in_xla()
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            refuse_strategies(tf, model)
        if arguments.why:
            return self._whole(model, call, arguments, _rows.Across(None, why=arguments.why))
        with self.lock:  # what is noted of one call is not of another thread's
            return self._divided(model, call, arguments)

    def _divided(self, model, call, arguments):
        """The call on all devices, or on the first one where that is not possible."""
        state = merging.ModelState(_keras.all_layers(model) if self.is_of_keras else [])
        trace = across = effects = watched = None
        why = "unknown"  # it cannot be traced with an unknown number of rows
        key = arguments.kind() if tf.executing_eagerly() and len(self.devices) > 1 else None
        known = self.traces.get(key)
        try:
            if len(self.devices) > 1:
                watched = self._effects(model)
                watched.begin()
                # A call that has left nothing so far is only seen to leave nothing now, either.
                effects = watched if known is None or known.changes else None
                trace = known or self._trace(call, arguments, state, effects)
                if key is not None:
                    self.traces[key] = trace
                across = trace.across or _across_in_keras3(model, trace)
            if across is None:
                why = "fails"
                state.watch(trace.variables if trace else [])
                replicas = self._computed(call, arguments, state, trace, effects)
                if watched is not effects and watched.undo():
                    state.take_back()
                    del self.traces[key]
                    return self._divided(model, call, arguments)
                changes = [replica.changes for replica in replicas]
                if trace is not None and known is None:
                    # What depends on the number of rows is another one there, also where all
                    # replicas have as many.
                    changes.append(trace.changes)
                if not side_effects.are_equal(changes):
                    state.take_back()
                    across = _rows.Across(None, why="effects")
                    trace.across = across  # of all calls of this kind
        except Exception as error:
            if len(self.devices) == 1 or _rows.trial.is_fault(error):
                raise
            state.take_back()
            if known is not None:  # it was traced when the call left something else
                del self.traces[key]
                return self._divided(model, call, arguments)
            across = _rows.Across(None, why=why)
        if across is None:
            return self._merged(arguments, state, effects, trace, replicas)
        if effects is not None:
            effects.restart()
        return self._whole(model, call, arguments, across)

    def _merged(self, arguments, state, effects, trace, replicas):
        """What the call returns, and leaves behind, for the whole batch."""
        count(self.devices, arguments.rows, recording())
        whole = merging.Merging(replicas, arguments.rows, trace)
        state.finish(whole)
        results = whole.results()
        for losses, loss in zip(state.added, results["losses"]):
            losses.append(loss)
        for output, mask, logits in zip(*map(results.get, ("outputs", "masks", "logits"))):
            if mask is not None:
                output._keras_mask = mask
            if logits is not None:
                output._keras_logits = logits
        if trace is not None:
            if effects is not None:
                effects.make(replicas[0].changes, results["noted"])
            between_outputs.relate(replicas, results, trace.placements)
        return tf.nest.pack_sequence_as(replicas[0].structure, results["outputs"])

    def _effects(self, model):
        """The ``PythonEffects`` of a model: deep copies of it share this call."""
        if self.effects is None or self.effects[0]() is not model:
            roots = [self.plain(model), getattr(model, "python_function", None)]
            roots += side_effects.roots_of(model) if self.is_of_keras else [model]
            self.effects = weakref.ref(model), side_effects.PythonEffects(*roots)
        return self.effects[1]

    def _computed(self, call, arguments, state, trace, effects):
        """The devices' shares of the call, each computed there."""
        replicas, number, rows = [], len(self.devices), arguments.rows
        maximum = max if isinstance(rows, int) else tf.maximum
        join = merging.joining_tables(trace.lookups if trace else {}, number)
        for index, device in enumerate(self.devices):
            first, last = split_rows.bounds(rows, number, index)
            given = arguments.shard(split_rows.run_bounds(rows, number, index, maximum))
            part = device, last - first, trace, call, state.replica, given, effects
            if effects is not None:
                effects.restart()
            replicas.append(Replica(*part, functools.partial(join, index)))
        return replicas

    def _whole(self, model, call, arguments, across):
        """The call with the whole batch, on the first device."""
        args, kwargs = arguments.structure
        with tf.device(self.devices[0]), split_rows.undivided():
            results = call(*args, **kwargs)
        count(self.devices, arguments.rows, recording(), work.undivided)
        name = getattr(model, "name", None) or type(model).__name__
        _rows.runs_whole(name, across, self.devices[0], "The model", self)  # said once
        return results

    def _trace(self, call, arguments, state, effects):
        """The plain call's trace. Eagerly it is kept for calls with arguments of the same kinds."""
        return Trace(call, arguments, state, effects, self.devices[0])

    def _given(self, model, given):
        """Keras 3 hands the arrays of an eager step to a functional model as they are."""
        return as_tensors(given) if are_arrays(given) else given

    def _unreplicated(self, model, *args, **kwargs):
        """The call this one hides, converted by autograph where Keras would do so."""
        plain = self.plain(model)
        is_users = hasattr(model, "_eager_losses") and _keras.is_users(type(model))
        if (is_users or not self.is_of_keras) and not tf.executing_eagerly():
            # Up to TensorFlow 2.3 nothing public, nor tf.__internal__, leads there.
            from tensorflow.python.autograph.core import ag_ctx
            from tensorflow.python.autograph.impl import api

            plain = api.tf_convert(plain, ag_ctx.control_status_ctx())
        return plain(*args, **kwargs)


def only_traced(model):
    """Whether nothing is computed where a model is called now, or somewhere else."""
    keras = _keras.keras_of(model) or (_keras.is_layer(model) and tf.keras)
    graph = tf.compat.v1.get_default_graph() if keras and not tf.executing_eagerly() else None
    while graph is not None:
        if any(mark in getattr(graph, "name", "") for mark in _TRACES):
            return True
        graph = getattr(graph, "outer_graph", None)
    # A Keras 3 model as a pure function: the caller's scope holds its state.
    return _keras.in_stateless_scope(keras)


def of(model):
    """What runs a model, of Keras or native, on several devices, or None."""
    return vars(type(model)).get("_compat_call") or ReplicatedCall.of(model)


def _across_in_keras3(model, trace):
    """What an optimizer of Keras 3 would not make of the replicas' gradients, or None."""
    if not hasattr(_keras.keras_of(model), "StatelessScope"):
        return None
    if any(getattr(v, "overwrite_with_gradient", None) for v in model.trainable_variables):
        return _rows.Across(None)  # replicas would add up the largest values of float8
    # It squares the gradients of each lookup by themselves.
    is_mixed = recording() and {True, False} in trace.lookups.values()
    return _rows.Across(None, why="table") if is_mixed else None


# Batches counted where they are computed: in Python, or by the graph that computes them.
#
# A graph's steps do not pass through Python. It counts in a table of its own runtime, by the number
# of rows: an operation that makes its resource when it first runs, so that nothing is captured, and
# what is saved of the graph runs anywhere. A batch costs some microseconds.

_numbers = itertools.count()


def _sizes(devices, rows):
    return split_rows.sizes(rows, len(devices))


def count(devices, rows, training, sizes=_sizes):
    """Count a batch that is split over ``devices``; within a graph, whenever that runs.

    Arguments:
        rows: an integer, or a scalar tensor.
        training: whether gradients are wanted.
        sizes: tells of a number of rows how many each device gets.
    """
    if tf.executing_eagerly():
        work.count(devices, sizes(devices, int(rows)), training)
        return
    from tensorflow.python.ops import control_flow_util

    # The graph of ``tf.function(jit_compile=True)`` is all on one device, and XLA has no tables.
    # What tells it is not public.
    is_xlas = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    if not (is_xlas or work.uncounted):
        key = tuple(devices), training, sizes
        process.graph_counters.setdefault(key, Table(*key)).count(rows)


class Table:
    """How many batches of each number of rows there were, as graphs count them."""

    def __init__(self, devices, training, sizes):
        self.devices, self.training, self.sizes = devices, training, sizes
        self.name = f"compat_batches_{next(_numbers)}"

    def count(self, rows):
        with tf.device("/cpu:0"):
            table = self._resource()
            key = tf.reshape(tf.cast(rows, tf.int64), [1])
            none = tf.constant(0, tf.int64)
            found = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=key, default_value=none)
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=key, values=found + 1)

    def _resource(self):
        """Made in each graph anew, of one name, so that it is the same."""
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self.name
        )

    def __call__(self):
        """Pairs of what ``work.count()`` would be told, and how often."""
        with tf.init_scope(), tf.device("/cpu:0"):
            keys, values = tf.raw_ops.LookupTableExportV2(
                table_handle=self._resource(), Tkeys=tf.int64, Tvalues=tf.int64
            )
        for rows, number in zip(keys.numpy().tolist(), values.numpy().tolist()):
            sizes = tuple(self.sizes(self.devices, rows))
            yield (self.devices, sizes, self.training), number
