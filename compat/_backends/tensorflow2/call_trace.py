"""The trace of a call, from which the placements of its results are inferred.

Each device computes its shard. A value for all rows (a loss added within the call, a scalar output,
a counter) has to be merged from those of the shards, and the values do not show how: on an even
split a counter of rows and a counter of steps look alike. What mixes rows cannot be merged at all.
So the plain call is traced once more, with an unknown number of rows, and placements are propagated
from the batch to the results.
"""

import contextlib
import itertools
import numbers
import re
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..._rows import (
    REPLICATED,
    Count,
    Fallback,
    Mixed,
    Partial,
    Reason,
    Replicated,
    Sharded,
    Unknown,
)
from .._tensorflow.custom_gradients import recomputes
from .._tensorflow.graph import line_of
from . import state as model_state
from .arguments import ShardedArguments
from .call_reductions import CallReductions, can_count, watching
from .functional_call import as_function, converting
from .graph import TRACE, bodies_of, captures, eager, may_be_set, tapes
from .keras_patches import normalizing_rows
from .merging import is_merged
from .propagation import Added, Propagation
from .side_effects import PythonEffects
from .trial import LANES, OpTrial, SampleValues
from .weight_copies import weights_of

#: How often placements are inferred at most, until no more values are reduced.
_ROUNDS = 20

#: Why a call cannot be split, where reductions may help.
_REDUCIBLE = (Reason.CROSS_BATCH, Reason.TRIAL_DIFFERS, Reason.NO_RULE)

_PLAIN = (bool, numbers.Number, str, bytes, np.ndarray, type, type(None))


class Trace:
    """The placements of a call's results, inferred from a trace with an unknown number of rows.

    Keras' layers of batch normalization are an exception: they may mix rows, or replicas exchange
    their statistics.

    Arguments:
        call: the plain call.
        arguments: its ``ShardedArguments``.
        state: the ``ModelState`` of the model.
        effects: the ``PythonEffects`` of the model.
        device: the device on which its operations are tried.

    Attributes:
        placements: lists of placements, by the names of the results of ``as_function``'s function.
        variables: pairs of the handle of a variable that the call sets, and the placement of its
            new value. States of random numbers are not among them. Handles are compared by
            identity, since TensorFlow has nothing else to compare.
        lookups: those of the ``Propagation``.
        averages: handles of the moving averages that the call sets of layers that normalize the
            whole batch.
        weights: weak references to the variables that it reads as a whole and does not set.
        fallback: what cannot be merged from the shards: a ``Fallback``, or None.
        changes: those of Python objects that the call has made, and that have been undone.
        reductions: the ``CallReductions`` by which it can be split; None if it needs none.
        unreduced: as ``fallback``, where nothing is reduced.
        functions: for eager calls that reduce: whether a tape records, and whether batches do not
            count -> the ``CallFunction``.
        fails: whether a call on parts of a batch failed right after the trace.
    """

    holds = True
    fails = False

    def __init__(
        self,
        call: "Callable[..., Any]",
        arguments: "ShardedArguments",
        state: "model_state.ModelState",
        effects: "PythonEffects",
        device: str,
    ) -> None:
        self._layers = {getattr(layer, "name", None) for layer in state.layers}
        self.device = device
        self.reductions: "Optional[CallReductions]" = None
        self.functions: "Dict[Tuple[bool, bool], Any]" = {}
        self._infer(_traced(call, arguments, state, effects), arguments, state)
        self.unreduced = self.fallback
        if self.fallback is not None and self.fallback.reason in _REDUCIBLE and can_count():
            self._infer_with_reductions(call, arguments, state, effects)

    def _infer(self, traced, arguments, state, reductions=None):
        """Infer the placements in a graph that was traced."""
        graph, placeholders, results, self.changes = traced
        placements = arguments.placements()
        by_name = {t.name: placement for t, placement in zip(placeholders, placements)}
        keys = {t.name: id(e) for t, e in captures(graph) if t.dtype.name == "resource"}
        with tf.init_scope(), tf.device(self.device), contextlib.ExitStack() as stack:
            values, copies = _values(graph, stack)
            rows = zip(placeholders, arguments.three_rows())
            values.update((tensor.name, each) for tensor, each in rows if each is not None)
            trial = OpTrial(values, copies)
            propagation = Propagation(graph, by_name, keys, self._fallback, trial, reductions)
        outputs = [_placement(propagation, value) for value in results["outputs"]]
        losses = [_placement(propagation, value) for value in results["losses"]]
        noted = [
            _placement(propagation, value) if getattr(value, "graph", graph) is graph else Mixed()
            for value in results["noted"]
        ]
        self.placements = dict(
            outputs=outputs, masks=outputs, logits=outputs, losses=losses, noted=noted
        )
        self.lookups, changed = propagation.lookups, propagation.state
        for handle in model_state.averages(state.normalizations):
            if id(handle) in changed:
                changed[id(handle)] = Partial("mean")
        of_synchronized = model_state.averages(state.synchronized)
        self.averages = [h for h in of_synchronized if changed.pop(id(h), None) is not None]
        for variable in graph.variables:
            if "seed_generator_state" in variable.name:  # Keras 3's, of random numbers
                changed.pop(id(variable.handle), None)
        handles = [handle for _, handle in captures(graph) if id(handle) in changed]
        handles = [
            h for h in handles if getattr(h._handle_data, "is_set", False)
        ]  # of a known type
        self.variables = [(handle, changed[id(handle)]) for handle in handles]
        self.weights = weights_of(graph)
        self.fallback = self._not_synchronized(graph) or self._not_merged(results)

    def _infer_with_reductions(self, call, arguments, state, effects):
        """Infer the placements where replicas reduce values of the whole batch, if that serves."""
        inferred, operations = dict(vars(self)), []
        note = watching(call, lambda *operation: operations.append(operation))
        traced = _traced(note, arguments, state, effects)
        if any(map(recomputes, traced[0].get_operations())):
            return
        reductions = CallReductions(operations)
        for _ in range(_ROUNDS):  # what follows a value that is reduced has another placement
            before = dict(reductions.reduced), list(reductions.joint)
            reductions.joint.clear()
            self._infer(traced, arguments, state, reductions)
            if before == (reductions.reduced, reductions.joint):
                break
        else:
            self.fallback = self.unreduced
        if self.fallback is not None or not reductions:
            vars(self).update(inferred)
            return
        self._signature = _signature(traced[0])
        reductions.settle()
        self.reductions = reductions

    @property
    def takes_turns(self) -> bool:
        """True if replicas need values of one another."""
        return bool(self.averages or self.reductions)

    def matches(
        self,
        call: "Callable[..., Any]",
        arguments: "ShardedArguments",
        state: "model_state.ModelState",
        effects: "PythonEffects",
    ) -> bool:
        """Return whether a call makes the graph that was traced, as far as that matters.

        With reductions, eager calls run as a function that was made from it. The arguments are
        those of the class.
        """
        if not self.reductions:
            return True
        try:
            graph = _traced(call, arguments, state, effects)[0]
        except Exception:  # it is traced once more, and that is treated
            return False
        return _signature(graph) == self._signature

    def _not_synchronized(self, graph):
        """Return why a layer cannot normalize the whole batch, or None.

        What a function of the call's own contains is traced once for all replicas.
        """
        averages = set(map(id, self.averages))
        for internal, external in captures(graph):
            calls = [op for op in internal.consumers() if bodies_of(op)]
            if id(external) in averages and calls:
                return self._fallback(calls[0], Mixed())
        return None

    def _not_merged(self, results):
        """Return the value of the attribute ``fallback``."""
        # An object that is not made of tensors may hold a device's rows.
        if not all(tf.is_tensor(o) or isinstance(o, _PLAIN) for o in results["outputs"]):
            return Fallback(Reason.OPAQUE_RESULT)
        values = [
            (value, getattr(value, "dtype", None), placement)
            for name in ("losses", "outputs", "noted")
            for value, placement in zip(results[name], self.placements[name])
        ]
        for handle, placement in self.variables:
            placement = Mixed() if isinstance(placement, Sharded) else placement
            values.append((None, model_state.type_of(handle), placement))
        for value, dtype, placement in values:
            if not is_merged(placement, dtype):
                fallback = getattr(placement, "fallback", None)
                if fallback is not None and fallback.operation is not None:
                    return fallback
                op = getattr(value, "op", None)
                return Fallback(Reason.CROSS_BATCH) if op is None else self._fallback(op, Mixed())
        return None

    def _fallback(self, op, placement):
        reason = Reason.NO_RULE if isinstance(placement, Unknown) else Reason.CROSS_BATCH
        if placement.fallback is not None:
            reason = placement.fallback.reason
        scopes = [name for name in op.name.split("/")[:-1] if name in self._layers]
        layer = f"layer {scopes[-1]!r}" if scopes else None
        return Fallback(reason, f"{op.name} ({op.type})", layer, line_of(op))


class FailedTrace:
    """A stand-in for the trace of a call that cannot be traced.

    Arguments:
        fallback: the reason why it runs unsplit.
        holds: whether other calls of its kind are not worth tracing.
    """

    changes: "Sequence[Any]" = ()
    fails = True
    reductions = None

    def __init__(self, fallback: Fallback, holds: bool) -> None:
        self.fallback, self.holds = fallback, holds

    def matches(self, *_: "Any") -> bool:
        """Return True: there is no graph to compare."""
        return True


#: Names of branches and bodies of loops, which have other numbers in each graph.
_BRANCH = re.compile(r"_(true|false|body|cond)_\d+")


def _signature(graph):
    """Return what two graphs have in common that compute the same."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    for node in itertools.chain(definition.node, *[each.node_def for each in functions]):
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                attribute.func.name = _BRANCH.sub(r"_\1", attribute.func.name)
    for function in functions:
        function.signature.name = _BRANCH.sub(r"_\1", function.signature.name)
    parts = [each.SerializeToString(deterministic=True) for each in functions]
    parts = [each.SerializeToString(deterministic=True) for each in definition.node] + sorted(parts)
    return parts, [_Captured(external) for _, external in captures(graph)]


class _Captured:
    """A tensor that a graph captures, equal to itself alone; it is held, so that its id stays."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return self.tensor is other.tensor


def _traced(call, arguments, state, effects):
    """Return the graph of a call with an unknown number of rows, and what belongs to it.

    Returns:
        The graph; its placeholders; the results of the call, by name; and its changes of Python
        objects.
    """
    from tensorflow.python.framework.func_graph import func_graph_from_py_func

    compute, made = as_function(call, state.collected, arguments.tree, effects), []

    def traced(*placeholders):
        _, results = compute(*placeholders)
        made.append((placeholders, results))
        return list(placeholders) or tf.constant(0)

    # Nothing here is computed, so no tape records it. The function that makes the graph is not
    # public: in a graph named by tf.compat.v1.wrap_function, say, Keras takes no losses.
    normalizing = normalizing_rows(state.layers, state.normalizations)
    with normalizing, tapes.stop_recording(), converting():
        graph = func_graph_from_py_func(
            TRACE, traced, None, None, signature=arguments.specs(), add_control_dependencies=False
        )
    return (graph,) + made[-1] + (compute.changes,)


def _placement(propagation, value):
    """Return the placement of a result, be it of one tensor or of several."""
    parts = tf.nest.flatten(value, expand_composites=True)
    placements = [propagation.placement_of(part) for part in parts if hasattr(part, "name")]
    if len(parts) > 1:
        return REPLICATED if all(isinstance(p, Replicated) for p in placements) else Mixed()
    placement = placements[0] if placements else REPLICATED
    # Numbers of rows add up. Positions of rows do not, nor do old values and sums.
    is_array = isinstance(placement, Count) and parts[0].shape.rank != 0
    return Mixed() if is_array or isinstance(placement, Added) else placement


def _values(graph, stack):
    """Return the values that a graph captures, and the copies of variables that it may set.

    Arguments:
        graph: a ``FuncGraph``.
        stack: an ``ExitStack``, which destroys the copies when it is closed.
    """
    values, copies = {}, {}
    for internal, external in captures(graph):
        value = eager(external)
        if value is None:
            continue
        values[internal.name] = SampleValues(value)
        if internal.dtype.name == "resource" and may_be_set(internal):
            of_variable = [_copy(value, stack) for _ in range(LANES)]
            values[internal.name] = SampleValues(of_variable[0], of_variable[1:])
            copies.update((id(copy), copy) for copy in of_variable)
    return values, copies


def _copy(handle, stack):
    """Return the handle of a new variable with the value of another one.

    It is not a tf.Variable: the function that is being traced may not make one.
    """
    value = model_state.read(handle)
    name = f"compat_copy_{next(_copies)}"
    copy = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
    stack.callback(tf.raw_ops.DestroyResourceOp, resource=copy)
    tf.raw_ops.AssignVariableOp(resource=copy, value=value)
    return copy


_copies = itertools.count()
