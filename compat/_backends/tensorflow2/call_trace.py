"""The trace of a call, which shows how its results depend on the rows of the batch.

Devices compute their own rows. A number for all rows (a loss added within the call, a scalar
output, a counter) has to be put together from theirs, and how cannot be told from the numbers: on
an even split a counter of rows and a counter of steps look alike. What mixes rows cannot be put
together at all. So the plain call is traced once more, with an unknown number of rows, and its
operations are followed from the batch to the results.
"""

import contextlib
import itertools
import numbers

import numpy as np
import tensorflow as tf

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown
from .._tensorflow.graph import line_of
from . import state as model_state
from .arguments import tensors_of
from .functional_call import as_function
from .graph import captures, eager, may_be_set, tapes
from .keras_patches import normalizing_rows
from .merging import is_merged
from .propagation import Added, Propagation
from .trial import LANES, OpTrial

_PLAIN = (bool, numbers.Number, str, bytes, np.ndarray, type, type(None))


class Trace:
    """The plain call, traced with an unknown number of rows, and how its results depend on them.

    Keras' layers of batch normalization are apart from it: they may mix rows.

    Arguments:
        call: the plain one.
        arguments: its ``ShardedArguments``.
        state: the ``ModelState`` of the model.
        effects: its ``PythonEffects``.
        device: where its operations are tried.

    Attributes:
        placements: lists of these, by the names of those that ``as_function``'s function returns.
        variables: pairs of the handle of one that the call sets, and how its new value depends on
            the rows. States of random numbers are not among them. Handles are compared by
            identity: TensorFlow has no other.
        lookups: what is looked up in variables, as of the ``Propagation``.
        across: what cannot be put together from what the devices have: an ``Across``, or None.
        changes: those that the call made in Python objects, which are taken back.
        fails: whether a call on parts of a batch failed right after it was traced.
    """

    holds = True
    fails = False

    def __init__(self, call, arguments, state, effects, device):
        self._layers = {getattr(layer, "name", None) for layer in state.layers}
        placements = arguments.placements()
        graph, placeholders, results, self.changes = _traced(
            call, arguments, placements, state, effects
        )
        known = {t.name: placement for t, placement in zip(placeholders, placements)}
        handles = {t.name: id(e) for t, e in captures(graph) if t.dtype.name == "resource"}
        with tf.init_scope(), tf.device(device), contextlib.ExitStack() as stack:
            values, copies = _values(graph, stack)
            rows = zip(placeholders, arguments.three_rows())
            values.update((tensor.name, lanes) for tensor, lanes in rows if lanes is not None)
            propagation = Propagation(graph, known, handles, self._across, OpTrial(values, copies))
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
        for handle in model_state.averages(state.layers):
            if id(handle) in changed:
                changed[id(handle)] = Partial("mean")
        for variable in graph.variables:
            if "seed_generator_state" in variable.name:  # Keras 3's, of random numbers
                changed.pop(id(variable.handle), None)
        handles = [handle for _, handle in captures(graph) if id(handle) in changed]
        known = [handle for handle in handles if getattr(handle._handle_data, "is_set", False)]
        self.variables = [(handle, changed[id(handle)]) for handle in known]
        self.across = self._not_merged(results)

    def _not_merged(self, results):
        """Return what ``across`` is."""
        # What is neither of tensors nor the same for any batch may hold a device's rows.
        if not all(tf.is_tensor(each) or isinstance(each, _PLAIN) for each in results["outputs"]):
            return _rows.Across(None, why="opaque")
        found = [
            (value, getattr(value, "dtype", None), placement)
            for name in ("losses", "outputs", "noted")
            for value, placement in zip(results[name], self.placements[name])
        ]
        for handle, placement in self.variables:
            placement = Mixed() if isinstance(placement, Sharded) else placement
            found.append((None, model_state.type_of(handle), placement))
        for value, dtype, placement in found:
            if not is_merged(placement, dtype):
                if hasattr(getattr(placement, "why", None), "operation"):
                    return placement.why
                op = getattr(value, "op", None)
                return _rows.Across(None) if op is None else self._across(op, Mixed())
        return None

    def _across(self, op, placement):
        why = "unknown" if isinstance(placement, Unknown) else "mixed"
        if placement.why in ("tried", "gradient", "compiled"):
            why = placement.why
        scopes = [name for name in op.name.split("/")[:-1] if name in self._layers]
        layer = f"layer {scopes[-1]!r}" if scopes else None
        return _rows.Across(f"{op.name} ({op.type})", layer, line_of(op), why)


class FailedTrace:
    """In place of the trace of a call that cannot be traced.

    Arguments:
        across: why it runs unsplit.
        holds: whether other calls of its kind need not be traced.
    """

    changes = ()
    fails = True

    def __init__(self, across, holds):
        self.across, self.holds = across, holds


def _traced(call, arguments, placements, state, effects):
    """The graph of a call, with an unknown number of rows; its placeholders; and its results."""
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.framework.func_graph import func_graph_from_py_func

    compute, made = as_function(call, state.collected, arguments.given, effects), []

    def traced(*placeholders):
        _, results = compute(*placeholders)
        made.append((placeholders, results))
        return list(placeholders) or tf.constant(0)

    specs = []
    for tensor, placement in zip(tensors_of(arguments.given), placements):
        shape = tensor.shape
        if not isinstance(placement, (Replicated, Count)):
            shape = tf.TensorShape([None] + shape.as_list()[1:])
        specs.append(tf.TensorSpec(shape, tensor.dtype))
    # Code that ran eagerly so far has its branches converted, as within a tf.function.
    # Nothing here is computed, so no tape records it. What makes the graph is not public: in
    # one of tf.compat.v1.wrap_function's name, say, Keras takes no losses.
    converting = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    with normalizing_rows(state.layers), tapes.stop_recording(), converting:
        graph = func_graph_from_py_func(
            "compat_trace", traced, None, None, signature=specs, add_control_dependencies=False
        )
    return (graph,) + made[-1] + (compute.changes,)


def _placement(propagation, value):
    """Return how a result depends on the rows, be it of one tensor or of several."""
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
        stack: an ``ExitStack``, with which the copies end.
    """
    known, copies = {}, {}
    for internal, external in captures(graph):
        value = eager(external)
        if value is None:
            continue
        known[internal.name] = [value] * LANES
        if internal.dtype.name == "resource" and may_be_set(internal):
            known[internal.name] = [_copy(value, stack) for _ in range(LANES)]
            copies.update((id(copy), copy) for copy in known[internal.name])
    return known, copies


def _copy(handle, stack):
    """Return the handle of a variable with the value of another one.

    It is no tf.Variable: the function that is being traced may make none.
    """
    value = model_state.read(handle)
    name = f"compat_copy_{next(_copies)}"
    copy = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
    stack.callback(tf.raw_ops.DestroyResourceOp, resource=copy)
    tf.raw_ops.AssignVariableOp(resource=copy, value=value)
    return copy


_copies = itertools.count()
