"""Replicas of a model on the devices, and the ``call`` that runs them in place of the model's."""

import contextlib
import functools
import inspect
import threading
import weakref
from typing import Any, Dict, Optional, Sequence, Union

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from ... import _keras, _rows
from ..._rows import Fallback, Reason, Sharded, splitting
from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import batch_norm, output_gradients, side_effects, tape_depth
from .arguments import (
    ShardedArguments,
    are_arrays,
    as_tensors,
    rows_between,
    rows_of,
    tensors_of,
    with_tensors,
)
from .batch_counts import count
from .batch_norm import synchronizing
from .call_function import CallFunction, NotSplit
from .call_reductions import not_counting
from .call_trace import FailedTrace, Trace
from .differentiation import differentiable
from .functional_call import as_function
from .gradient_sums import GradientSums, added
from .graph import is_for_xla, only_traced, recording, tapes
from .kept_weights import KeptWeights
from .keras_patches import custom_gradient_without_tape, read_kernels
from .merging import Merging
from .output_gradients import InnerGradients
from .reductions import BatchReductions
from .refusals import not_differentiable, refuse_strategies, several_devices_in_xla
from .state import ModelState
from .table_gradients import TableGradients, dense
from .variable_reads import redirected
from .weight_copies import send


class Replica:
    """One device's shard of a call, computed there.

    Arguments:
        device: the device's name.
        size: how many rows are kept; none of the one row computed where this is 0.
        trace: the ``Trace`` of the call; None for a single replica.
        call: as that of ``as_function``, and so are the following.
        scope: with the losses of one replica.
        tree: with the replica's shards.
        effects: of all replicas.
        join: returns what the gradients of variables become: see ``GradientSums``.
        copies: the ``Copies`` of variables that it reads.

    Attributes:
        structure: of the results, as the function of ``as_function`` returns it.
        values: the results by name, as that function returns them, without the rows of others.
        changes: those of Python objects that its call has made, and that have been undone.
    """

    def __init__(self, device, size, trace, call, scope, tree, effects, join, copies):
        self.size = size
        compute, shard = as_function(call, scope, tree, effects), tensors_of(tree)

        def cropped(value, placement):
            """Return a result without the row that was computed where the shard is empty."""
            if not (tf.is_tensor(value) and isinstance(placement, Sharded)):
                return value
            if isinstance(size, int):
                return value if size else rows_between(value, 0, 0)
            return rows_between(value, 0, rows_of(value) * tf.minimum(size, 1))

        self.shard, self.inner = shard, None  # its ``InnerGradients``, where a tape records

        def results_of(*values):
            if effects is not None:
                effects.restart()
            with redirected(copies):
                self.structure, self.values = compute(*values)
            self.changes = compute.changes
            for name, placements in trace.placements.items() if trace else ():
                # An error where there are more, or fewer, than in the trace.
                self.values[name] = tf.nest.map_structure(cropped, self.values[name], placements)
            return tensors_of(self.values)

        def results():
            """Return the results, without a gradient."""
            with tf.device(device):
                values = shard
                if tf.executing_eagerly():  # the shard moves there, also where nothing is computed
                    values = list(map(tf.identity, values))
                return results_of(*values)

        def differentiated(*values):
            """Return the results, and the function of their gradients.

            It returns the gradients of the values, and of variables.
            """
            with tf.device(device):
                watched = list(values) + list(copies.tensors.values())
                results, gradients_of = differentiable(results_of, values, watched)
            inner = InnerGradients(device, results, gradients_of)
            self.inner = weakref.ref(inner)  # as long as the tape needs it

            def gradients(upstream, variables):
                # Integers and booleans have no gradient.
                pairs = [(r, g) for r, g in zip(inner.results, upstream) if r.dtype.is_floating]
                heads, upstream = [r for r, _ in pairs], [g for _, g in pairs]
                tensors = [copies.tensors.get(id(variable.handle)) for variable in variables]
                copied = [tensor for tensor in tensors if tensor is not None]
                sources = list(values) + variables + copied
                with tf.device(device):
                    gradients = iter([dense(g) for g in gradients_of(heads, sources, upstream)])
                    of_inputs, direct = [[next(gradients) for _ in s] for s in (values, variables)]
                    of_copies = [None if each is None else next(gradients) for each in tensors]
                    of_variables = join(variables, list(map(added, direct, of_copies)))
                return of_inputs, of_variables

            return results, gradients

        self.results, self.differentiated = results, differentiated

    def run(self) -> None:
        """Compute the shard."""
        if not recording():  # predict, evaluate: no gradient to keep intermediate results for
            self.finish(self.results())
            return
        differentiated = self.differentiated

        @tf.custom_gradient
        def replica(*values):
            results, gradients = differentiated(*values)

            def gradient(*upstream, **kwargs):  # up to TensorFlow 2.3 no keyword-only argument
                of_inputs, of_variables = gradients(upstream, list(kwargs.get("variables") or ()))
                return (of_inputs, of_variables) if of_variables else of_inputs

            return results, gradient

        with _listing_no_variables(), custom_gradient_without_tape():
            self.finish(replica(*self.shard))

    def finish(self, tensors: "Sequence[tf.Tensor]") -> None:
        """Set the results to the tensors that the caller's tape has recorded."""
        self.values = with_tensors(self.values, tensors)


def run_together(replicas: "Sequence[Replica]", reductions: BatchReductions, layers: "Any") -> None:
    """Compute the shards of replicas that need values of one another.

    For the caller's tape they are one function. The backward passes take turns, too.

    Arguments:
        replicas: the replicas.
        reductions: those of the call.
        layers: the layers that normalize the whole batch.
    """
    shards = [replica.shard for replica in replicas]
    if not recording() and tf.executing_eagerly():
        with synchronizing(layers, reductions):
            results = reductions.run([replica.results for replica in replicas])
    else:
        functions = [replica.differentiated for replica in replicas]
        with _listing_no_variables(), custom_gradient_without_tape():
            flat = _together(functions, list(map(len, shards)), reductions, layers)(
                *sum(shards, [])
            )
        results = _divided(flat, [len(tensors_of(replica.values)) for replica in replicas])
    for replica, tensors in zip(replicas, results):
        replica.finish(tensors)


def _together(functions, lengths, reductions, layers):
    """Return replicas' functions, of as many values as ``lengths`` has, as one."""
    present = [weakref.ref(layer) for layer in layers]  # the function of a gradient is kept
    del layers

    @tf.custom_gradient
    def together(*values):
        parts = _divided(values, lengths)
        with synchronizing([layer() for layer in present], reductions):
            outcomes = reductions.run(
                [functools.partial(_noting_reads, *part) for part in zip(functions, parts)]
            )
        results, backward, variables = zip(*outcomes)
        for variable in {id(v): v for read in variables for v in read}.values():
            resource_variable_ops.variable_accessed(variable)
        counts = list(map(len, results))

        def gradient(*upstream, **kwargs):
            if recording() and reductions.are_here():
                raise not_differentiable()
            variables = list(kwargs.get("variables") or ())
            layers = [layer() for layer in present if layer() is not None]
            with synchronizing(layers, reductions):
                passes = [
                    functools.partial(each, part, variables)
                    for each, part in zip(backward, _divided(upstream, counts))
                ]
                outcomes = reductions.run(passes)
            of_inputs = [g for inputs, _ in outcomes for g in inputs]
            of_variables = list(map(_total, zip(*[each for _, each in outcomes])))
            return (of_inputs, of_variables) if variables else of_inputs

        return [tensor for each in results for tensor in each], gradient

    return together


def _noting_reads(function, values):
    """Return a function's two results, and the variables that it has read in this thread."""
    watcher = tapes.VariableWatcher if hasattr(tapes, "VariableWatcher") else None
    if watcher is None:  # before TensorFlow 2.3; in graphs see ``custom_gradient_without_tape``
        watcher = tf.GradientTape if tf.executing_eagerly() else None
    with watcher() if watcher else contextlib.ExitStack() as noted:
        results, gradients = function(*values)
    return results, gradients, noted.watched_variables() if watcher else ()


def _divided(values, lengths):
    remaining = iter(values)
    return [[next(remaining) for _ in range(length)] for length in lengths]


def _total(gradients):
    """Return the sum of the gradients that replicas have of a variable; slices stay slices."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) > 1 and all(isinstance(g, tf.IndexedSlices) for g in present):
        values, indices = (tf.concat(p, 0) for p in zip(*((g.values, g.indices) for g in present)))
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    return functools.reduce(added, present, None)


@contextlib.contextmanager
def _listing_no_variables():
    """Hide the variables that the graph lists.

    For a custom gradient TensorFlow 2.0 makes sets of those that layers have made within any
    tf.function, and fails: they have no hash.
    """
    key = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
    variables = tf.compat.v1.get_default_graph().get_collection_ref(key)
    before = list(variables)
    del variables[:]
    try:
        yield
    finally:
        variables[:0] = before


#: How often a call of any model that has replicas was begun.
reached = [0]

#: How many traces of eager calls are kept for a model: an argument may be another one each time.
TRACES = 100


class ReplicatedCall(patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Replica i computes the rows of ``splitting.run_bounds`` on its device. The operations of a
    gradient carry no device, and would all run on the first one; so each replica is a function
    with a custom gradient (``tf.custom_gradient``), which is computed on the replica's device, too.
    Weights go from device to device, and their gradients back: see ``weight_copies`` and
    ``gradient_sums``.

    Where a call needs values of the whole batch, replicas run in threads that take turns: see
    ``run_together``.

    Losses added within ``call``, outputs without a batch dimension and state (counters, moving
    averages) leave the replicas as values of their shards, and are merged into those of the whole
    batch by ``Merging``, according to the placements in a ``Trace`` of the plain call. Where this
    shows that rows are mixed, the call runs unsplit on the first device. See ``merging`` and
    ``call_trace``.

    Arguments:
        devices: the devices of the replicas.
        belongs_to_step: whether it is there for a model around this one, whose step may call it.
    """

    # Autograph does not convert what has this attribute, such as tf.function's wrappers.
    autograph_info__: "Dict[str, Any]" = {}

    supports_jit = None  # the model's attribute, which decides on jit_compile="auto" in Keras 3
    is_of_keras = True  # only Keras adds losses within a call, and traces for its own purposes

    def __init__(self, devices: "Sequence[str]", belongs_to_step: bool = False) -> None:
        super().__init__(devices)
        self.belongs_to_step = belongs_to_step
        self.traces: "Dict[Any, Union[Trace, FailedTrace]]" = {}  # of eager calls, by their kind
        self.effects = None  # of the model, which they belong to
        self.kept = KeptWeights(self.devices)
        self.lock = threading.RLock()
        tape_depth.watch_tapes()

    def install(self, model):
        super().install(model)
        read_kernels()
        plain = self.plain(model)
        # tf.keras looks up its arguments when it saves a model.
        self.__signature__ = inspect.signature(getattr(plain, "__func__", plain))
        self.supports_jit = vars(model).get("supports_jit")
        if self.supports_jit:
            patching.attach(model, "supports_jit", False)

    def remove(self, model):
        super().remove(model)
        self.kept.free()
        if self.supports_jit:
            patching.attach(model, "supports_jit", True)

    def invoke(self, model, *args, **kwargs):
        reached[0] += 1
        call = functools.partial(self._unreplicated, model)
        if unsplit.here() or only_traced(model):
            return call(*args, **kwargs)
        args, kwargs = self._converted(model, (args, kwargs))
        arguments = ShardedArguments(args, kwargs, len(self.devices))
        if arguments.batch is None:
            return call(*args, **kwargs)
        if getattr(model, "_jit_compile", None):
            raise several_devices_in_xla()
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            refuse_strategies(tf, model)
        if arguments.fallback is not None:
            return self._run_unsplit(model, call, arguments, arguments.fallback)
        with self.lock:  # effects are recorded of one thread's call at a time
            return self._split(model, call, arguments)

    def _split(self, model, call, arguments):
        """Run the call on all devices, or on the first one where that is not possible."""
        layers = list(_keras.all_layers(model)) if self.is_of_keras else []
        state = ModelState(layers, batch_norm.requested(model, layers))
        if len(self.devices) == 1:
            replicas = self._computed(call, arguments, state, None, None)
            return self._merged(arguments, state, None, None, replicas)
        effects = self._effects(model)
        effects.begin()
        is_eager, last = tf.executing_eagerly(), None
        if is_eager:
            kind = arguments.kind(), tuple(layer.trainable for layer in state.synchronized)
            settings = effects.settings()
            # Kept again below, if it still holds.
            last = self.traces.pop((kind, effects.lasting(settings)), None)
        matches = last is not None and last.holds
        is_new = not (matches and last.matches(call, arguments, state, effects))
        trace = last
        if is_new:
            trace = self._traced(call, arguments, state, effects, is_second=last is not None)
        fallback = trace.fallback or _fallback_in_keras3(model, trace)
        if fallback is None and trace.reductions:
            # Changes of Python objects would be made by the function, and only once.
            if tape_depth.number() > 1 or is_eager and trace.changes:
                fallback = trace.unreduced
        in_function = is_eager and trace.reductions
        if fallback is None and in_function:
            results, fallback = self._run_function(model, call, arguments, state, effects, trace)
        elif fallback is None:
            replicas, fallback = self._attempt(call, arguments, state, effects, trace, is_new)
            fails_again = trace.fails and fallback == Fallback(Reason.FAILS_ON_SHARD)
            if fallback is not None and not is_new and not fails_again:
                # It was traced when the call had other side effects, or none.
                return self._split(model, call, arguments)
        if fallback is None and not in_function:
            results = self._merged(arguments, state, effects, trace, replicas)
        elif fallback is not None:
            effects.restart()
            results = self._run_unsplit(model, call, arguments, fallback)
        if is_eager:
            self.traces[kind, effects.lasting(settings)] = trace
            if len(self.traces) > TRACES:
                del self.traces[next(iter(self.traces))]  # the one unused for the longest time
        return results

    def _traced(self, call, arguments, state, effects, is_second):
        """Return the plain call's trace, or a ``FailedTrace``."""
        try:
            return self._trace(call, arguments, state, effects)
        except Exception as error:  # whatever a call raises with an unknown number of rows
            if not _may_be_of_split(error):
                raise
            # A first call may make what its trace misses.
            return FailedTrace(Fallback(Reason.NO_RULE), holds=is_second)

    def _attempt(self, call, arguments, state, effects, trace, is_new):
        """Run the call on all devices.

        ``is_new`` says whether the trace was made for this call, not for an earlier one.

        Returns:
            The replicas and None; or None and a ``Fallback``, if they fail or have side effects
            that cannot be merged. Then the state is restored.
        """
        # A call that has had no side effects is only checked for them afterwards. Where replicas
        # take turns, isolation would take time at each of them.
        isolated = effects if trace.changes or (is_new and not trace.takes_turns) else None
        try:
            state.watch(trace.variables, trace.averages)  # which may be gone since the trace
            replicas = self._computed(call, arguments, state, trace, isolated)
            if isolated is None:
                agree = not effects.undo()
            else:
                changes = [replica.changes for replica in replicas]
                if is_new:
                    # A change that depends on the number of rows differs in the trace, even where
                    # all replicas have as many.
                    changes.append(trace.changes)
                agree = side_effects.are_equal(changes)
        except BaseException as error:  # Ctrl-C, too
            state.restore()
            if not _may_be_of_split(error):
                raise
            trace.fails = is_new or trace.fails
            # Replicas that reduce may have computed something else than the trace.
            return None, trace.unreduced or Fallback(Reason.FAILS_ON_SHARD)
        if agree:
            return replicas, None
        state.restore()
        fallback = Fallback(Reason.SIDE_EFFECTS)
        if is_new:
            trace.fallback = fallback  # of all calls of this kind
        return None, fallback

    def _merged(self, arguments, state, effects, trace, replicas):
        """Return the results for the whole batch, and make its side effects once."""
        count(self.devices, arguments.rows, recording())
        merging = Merging(replicas, trace)
        state.finish(merging)
        results = merging.results()
        if trace is not None:
            if effects is not None:
                effects.make(replicas[0].changes, results["noted"])
            output_gradients.relate(replicas, results, trace.placements)
        return self._kept(replicas[0].structure, results, state)

    def _kept(self, structure, results, state):
        """Return the results of the whole batch as the call does, which has added its losses."""
        state.add(results["losses"])
        for output, mask, logits in zip(*map(results.get, ("outputs", "masks", "logits"))):
            if mask is not None:
                output._keras_mask = mask
            if logits is not None:
                output._keras_logits = logits
        return tf.nest.pack_sequence_as(structure, results["outputs"])

    def _run_function(self, model, call, arguments, state, effects, trace):
        """Run an eager call as a function, whose graph the replicas need to reduce.

        Returns:
            The results and None; or None and a ``Fallback``.
        """

        def split(*args, **kwargs):
            part = ShardedArguments(args, kwargs, len(self.devices))
            within = ModelState(state.layers, batch_norm.requested(model, state.layers))
            replicas, fallback = self._attempt(call, part, within, effects, trace, False)
            if fallback is not None:
                raise NotSplit(fallback)
            return self._merged(part, within, effects, trace, replicas)

        kind = recording(), bool(work.uncounted)  # which a graph made within never counts
        try:
            if kind not in trace.functions:
                trace.functions[kind] = CallFunction(split, arguments, state)
        except NotSplit as error:
            trace.fallback = error.fallback  # of all calls of this kind
            return None, error.fallback
        return self._kept(*trace.functions[kind](arguments, state), state), None

    def _effects(self, model):
        """Return the ``PythonEffects`` of a model: deep copies of it share this call."""
        if self.effects is None or self.effects[0]() is not model:
            roots = [self.plain(model), getattr(model, "python_function", None)]
            roots += side_effects.roots_of(model) if self.is_of_keras else [model]
            self.effects = weakref.ref(model), side_effects.PythonEffects(*roots)
        return self.effects[1]

    def _computed(self, call, arguments, state, trace, effects):
        """Return the replicas, each of which has computed its shard on its device."""
        replicas, number, rows = [], len(self.devices), arguments.rows
        maximum = max if isinstance(rows, int) else tf.maximum
        bounds = [splitting.bounds(rows, number, index) for index in range(number)]
        sizes = [last - first for first, last in bounds]
        copies = self._copies(trace)
        tables = TableGradients(trace.lookups if trace else {}, sizes)
        sums = GradientSums(self.devices, copies, tables)
        takes_turns = trace is not None and trace.takes_turns
        reductions = BatchReductions(self.devices, sizes) if takes_turns else None
        are_counted = takes_turns and trace.reductions
        if are_counted:
            call = trace.reductions.reducing(call, reductions)
        for index, (device, size) in enumerate(zip(self.devices, sizes)):
            tree = arguments.shard(splitting.run_bounds(rows, number, index, maximum))
            tree = arguments.without_number(tree) if are_counted else tree
            scope = functools.partial(state.replica, index)
            join = functools.partial(sums.joined, index)
            part = device, size, trace, call, scope, tree, effects
            replicas.append(Replica(*part, join, copies[index]))
        if takes_turns:
            with not_counting(state.normalizations if are_counted else ()):
                run_together(replicas, reductions, state.synchronized)
        else:
            for replica in replicas:
                replica.run()
        return replicas

    def _copies(self, trace):
        """Return the copies of weights that each replica reads."""
        are_sent = trace is not None and (tf.executing_eagerly() or not is_for_xla())
        weights = [weight() for weight in trace.weights] if are_sent else []
        present = [weight for weight in weights if weight is not None]
        return send(present, self.devices) if recording() else self.kept.send(present)

    def _run_unsplit(self, model, call, arguments, fallback):
        """Run the call unsplit, on the first device."""
        args, kwargs = arguments.structure
        with tf.device(self.devices[0]), unsplit:
            results = call(*args, **kwargs)
        count(self.devices, arguments.rows, recording(), work.unsplit_sizes)
        name = getattr(model, "name", None) or type(model).__name__
        _rows.warn_unsplit(model, name, fallback, self.devices[0], "The model", self)  # said once
        return results

    def _trace(self, call, arguments, state, effects):
        """Return the plain call's trace."""
        return Trace(call, arguments, state, effects, self.devices[0])

    def _converted(self, model, arguments):
        """Return arguments with tensors for arrays, which Keras 3 passes in an eager step."""
        return as_tensors(arguments) if are_arrays(arguments) else arguments

    def _unreplicated(self, model, *args, **kwargs):
        """Run the call this one hides, converted by autograph where Keras would do so."""
        plain = self.plain(model)
        is_users = hasattr(model, "_eager_losses") and _keras.is_users(type(model))
        if (is_users or not self.is_of_keras) and not tf.executing_eagerly():
            # Up to TensorFlow 2.3 nothing public, nor tf.__internal__, leads there.
            from tensorflow.python.autograph.core import ag_ctx
            from tensorflow.python.autograph.impl import api

            plain = api.tf_convert(plain, ag_ctx.control_status_ctx())
        return plain(*args, **kwargs)


def _may_be_of_split(error):
    """Return whether a call may have failed because it was traced or split.

    If so, it runs unsplit. Not if it ran out of memory: unsplit, it takes more on one device.
    """
    out_of_memory = isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))
    return isinstance(error, Exception) and not (out_of_memory or _rows.trial.is_fault(error))


def of(model: "Any") -> "Optional[ReplicatedCall]":
    """Return the call that runs a model, of Keras or native, on several devices, or None."""
    return vars(type(model)).get("_compat_call") or ReplicatedCall.of(model)


def _fallback_in_keras3(model, trace):
    """Return why an optimizer of Keras 3 cannot use the replicas' gradients, or None."""
    if not hasattr(_keras.keras_of(model), "StatelessScope"):
        return None
    if any(getattr(v, "overwrite_with_gradient", None) for v in model.trainable_variables):
        return Fallback(Reason.CROSS_BATCH)  # replicas would add up the largest values of float8
    # It squares the gradients of each lookup separately.
    is_mixed = recording() and {True, False} in trace.lookups.values()
    return Fallback(Reason.SHARED_TABLE) if is_mixed else None
