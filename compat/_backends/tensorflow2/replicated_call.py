"""The ``call`` of a model on several devices."""

import contextlib
import functools
import inspect
import sys

from ... import _keras, _keras_steps, _patching, _replicas, errors
from . import counted_batches, layer_state
from .call_trace import Trace
from .merging import Merging
from .refusals import refuse_strategies, several_devices_in_xla
from .replicas import Replica, as_function, recording
from .row_kinds import Rows
from .sharding import Arguments

# Graphs that Keras traces for shapes or for saving; nothing is computed in them, or somewhere
# else: what is saved must not name this machine's devices. (``__call__`` is what Keras 3 exports;
# ``tf.function(model)`` has another name.)
_TRACES = (
    "scratch_graph", "build_graph",
    "_layer_call_fn", "_conditional_losses", "_wrapped_model", "__call__", "serving_default",
)  # fmt: skip


class ReplicatedCall(_patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows ``_replicas.run_bounds`` gives it, under its device. The
    operations of a gradient carry no device, and would all run on the first one; so each replica
    is a function with a gradient of its own (``tf.custom_gradient``), computed under the
    replica's device, too. TensorFlow sums the gradients of the replicas.

    Losses added within ``call``, outputs without rows and state (counters, moving averages) leave
    the replicas as values of their own rows, and become those of all rows by ``Merging``: sums,
    means or neither, as a ``Trace`` of the plain call shows. See ``sharding``,
    ``merging``, ``layer_state`` and ``call_trace``.
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
        arguments = Arguments(tf, args, kwargs, len(self.devices))
        if arguments.batch is None:
            return call(*args, **kwargs)
        if getattr(model, "_jit_compile", None):
            raise several_devices_in_xla()
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            refuse_strategies(tf, model)
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
        counted_batches.count(tf, self.devices, rows, recording())
        merging = Merging(tf, _name(model), replicas, rows, trace)
        state.finish(merging)
        return _merged(tf, merging, state)

    def _trace(self, tf, model, call, arguments, state, made):
        """The plain call's trace, made once for each call.

        Eagerly it is kept for calls with arguments of the same kinds.
        """
        if made:
            return made[0]
        tensors, places, compute = as_function(tf, call, state.traced, arguments.structure)
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
            return layer_state.Keras2State(tf, model, len(self.devices))
        return layer_state.Keras3State(tf, sys.modules["keras"], model)

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


def _traced(tf, model, compute, tensors, flags, state):
    """The ``Trace`` of a call, which Keras' layers of batch normalization are apart from."""
    normalizations = layer_state.normalizations(state.layers)
    with layer_state.noting_operations(tf, normalizations) as noted:

        def function(*placeholders):
            results = compute(*placeholders)
            return {
                "outputs": results.outputs,
                "losses": results.losses,
                "updates": state.traced_updates,
            }

        try:
            trace = Trace(tf, function, tensors, flags, noted)
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
        errors.warn(
            "model {!r} computes each row of an output from other rows of the batch, too, besides "
            "batch normalization. On several devices these are the rows of one device's part, so "
            "the numbers differ from one device's. Compute this in the loss, which sees the "
            "whole batch, or run this model on one device, with parallelize(model, "
            "gpus=1).".format(_name(model))
        )
    return trace


def _name(model):
    return getattr(model, "name", None) or type(model).__name__


@contextlib.contextmanager
def _explained(tf, model, call, arguments, state):
    """Explain that the batch was split where a replica fails and the whole model would not."""
    try:
        yield
    except errors.CompatError:
        raise
    except Exception as error:
        tensors, _, compute = as_function(tf, call, state.traced, arguments.structure)
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
        if not isinstance(kind, Rows) or kind.axis != 0:
            return merging.value(values, kind_in, "output {}".format(place + 1))
    output = merging.concatenated(values) if len(values) > 1 else values[0]
    for name, attribute in (("masks", "_keras_mask"), ("logits", "_keras_logits")):
        parts = [getattr(result, name)[place] for result in results]
        if parts[0] is not None and len(values) > 1:
            setattr(output, attribute, merging.concatenated(parts))
        elif parts[0] is not None:
            setattr(output, attribute, parts[0])
    return output
