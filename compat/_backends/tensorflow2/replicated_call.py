"""The ``call`` of a model on several devices."""

import functools
import inspect

import tensorflow as tf

from ... import _keras, _rows
from ..._keras import steps
from ..._rows import split_rows
from ..._runtime import patching, work
from . import counted_batches, layer_state
from .call_trace import Trace
from .keras_models import refuse_strategies, several_devices_in_xla
from .replicas import Merging, Replica, joining_tables, recording
from .sharding import ShardedArguments, are_arrays, as_tensors

# Graphs that Keras traces for shapes or for saving; nothing is computed in them, or somewhere
# else: what is saved must not name this machine's devices. (``__call__`` is what Keras 3 exports;
# ``tf.function(model)`` has another name.)
_TRACES = (
    "scratch_graph", "build_graph",
    "_layer_call_fn", "_conditional_losses", "_wrapped_model", "__call__", "serving_default",
)  # fmt: skip


class ReplicatedCall(patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows ``split_rows.run_bounds`` gives it, under its device. The
    operations of a gradient carry no device, and would all run on the first one; so each replica
    is a function with a gradient of its own (``tf.custom_gradient``), computed under the
    replica's device, too. TensorFlow sums the gradients of the replicas.

    Losses added within ``call``, outputs without rows and state (counters, moving averages) leave
    the replicas as values of their own rows, and become those of all rows by ``Merging``: sums,
    means, maxima or minima, as a ``Trace`` of the plain call shows. Where it shows that rows are
    mixed, the call runs with the whole batch on the first device. See ``sharding``, ``replicas``,
    ``layer_state`` and ``call_trace``.
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
        layer_state.read_kernels()
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
        steps.note_call()
        call = functools.partial(self._unreplicated, model)
        if split_rows.runs_undivided() or self._only_traced(model):
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
        state = layer_state.ModelState(self._layers(model))
        trace = across = None
        why = "unknown"  # it cannot be traced with an unknown number of rows
        try:
            if len(self.devices) > 1:
                trace = self._trace(call, arguments, state)
                across = trace.across() or _across_in_keras3(model, trace)
            if across is None:
                why = "fails"
                state.watch(trace.variables if trace else [])
                replicas = self._computed(call, arguments, state, trace)
        except Exception as error:
            if len(self.devices) == 1 or _rows.trial.is_fault(error):
                raise
            state.take_back()
            across = _rows.Across(None, why=why)
        if across is not None:
            return self._whole(model, call, arguments, across)
        counted_batches.count(self.devices, arguments.rows, recording())
        merging = Merging(replicas, arguments.rows, trace)
        state.finish(merging)
        results = merging.results()
        for losses, loss in zip(state.added, results["losses"]):
            losses.append(loss)
        for output, mask, logits in zip(*map(results.get, ("outputs", "masks", "logits"))):
            if mask is not None:
                output._keras_mask = mask
            if logits is not None:
                output._keras_logits = logits
        return tf.nest.pack_sequence_as(replicas[0].structure, results["outputs"])

    def _computed(self, call, arguments, state, trace):
        """The devices' shares of the call, each computed there."""
        replicas, count, rows = [], len(self.devices), arguments.rows
        maximum = max if isinstance(rows, int) else tf.maximum
        join = joining_tables(trace.lookups.same() if trace else (), count)
        for index, device in enumerate(self.devices):
            first, last = split_rows.bounds(rows, count, index)
            given = arguments.shard(split_rows.run_bounds(rows, count, index, maximum))
            part = device, last - first, trace, call, state.replica, given
            replicas.append(Replica(*part, functools.partial(join, index)))
        return replicas

    def _whole(self, model, call, arguments, across):
        """The call with the whole batch, on the first device."""
        args, kwargs = arguments.structure
        with tf.device(self.devices[0]), split_rows.undivided():
            results = call(*args, **kwargs)
        counted_batches.count(self.devices, arguments.rows, recording(), work.undivided)
        name = getattr(model, "name", None) or type(model).__name__
        # What it says is true of the model, whatever it is called for.
        _rows.runs_whole(name, across, self.devices[0], "The model", self)
        return results

    def _trace(self, call, arguments, state):
        """The plain call's trace. Eagerly it is kept for calls with arguments of the same kinds."""
        key = arguments.kind() if tf.executing_eagerly() else None
        trace = self.traces.get(key) or Trace(call, arguments, state, self.devices[0])
        if key is not None:
            self.traces[key] = trace
        return trace

    def _given(self, model, given):
        """Keras 3 hands the arrays of an eager step to a functional model as they are."""
        return as_tensors(given) if are_arrays(given) else given

    def _only_traced(self, model):
        """Whether nothing is computed, or somewhere else."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None:
            if any(mark in getattr(graph, "name", "") for mark in _TRACES):
                return True
            graph = getattr(graph, "outer_graph", None)
        # A Keras 3 model as a pure function: the caller's scope holds its state.
        return _keras.in_stateless_scope(_keras.keras_of(model))

    def _layers(self, model):
        """The layers of Keras that a model consists of."""
        return _keras.all_layers(model)

    def _unreplicated(self, model, *args, **kwargs):
        """The call this one hides, converted by autograph where Keras would do so."""
        plain = self.plain(model)
        if self._is_converted(model) and not tf.executing_eagerly():
            # Up to TensorFlow 2.3 nothing public, nor tf.__internal__, leads there.
            from tensorflow.python.autograph.core import ag_ctx
            from tensorflow.python.autograph.impl import api

            plain = api.tf_convert(plain, ag_ctx.control_status_ctx())
        return plain(*args, **kwargs)

    def _is_converted(self, model):
        return hasattr(model, "_eager_losses") and _keras.is_users(type(model))


def _across_in_keras3(model, trace):
    """What an optimizer of Keras 3 would not make of the replicas' gradients, or None."""
    if not hasattr(_keras.keras_of(model), "StatelessScope"):
        return None
    if any(getattr(v, "overwrite_with_gradient", None) for v in model.trainable_variables):
        return _rows.Across(None)  # replicas would add up the largest values of float8
    # It squares the gradients of each lookup by themselves.
    is_mixed = recording() and trace.lookups.are_mixed()
    return _rows.Across(None, why="table") if is_mixed else None
