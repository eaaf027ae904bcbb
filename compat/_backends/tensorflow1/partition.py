"""Partition of a model's graph: each replica runs the *batch part*, the rest runs once.

The batch part computes the model's outputs from its inputs, each row from that row alone, and other
costly values likewise, such as those in losses; ``propagation`` infers which operations these are.
The rest is computed once, of the whole batch: losses, metrics, updates of layers and cross-batch
operations. It takes from the batch part only tensors with rows, which are concatenated in order, so
it may be any function of them: sums are sums, counts count once.

Sums, means and extremes over the batch that the batch part needs are reduced over the replicas; see
``reductions``. BatchNorm is the exception, as everywhere, unless it is synchronized: each replica
normalizes by its own rows, and a moving average becomes the mean of the replicas' values.
"""

from typing import Any, List, Set

from ... import _keras, _rows
from ..._rows import Fallback, Reason
from ..._runtime import synchronized
from .._tensorflow.custom_gradients import has_custom_gradient
from .._tensorflow.graph import line_of
from . import arguments, graph
from .propagation import Propagation
from .redistribution import is_costly
from .side_effects import is_call


class BatchPart:
    """The operations that replicas of a model run, and the tensors that they read.

    Arguments:
        model: the model of Keras; the first dimension of its input tensors is the batch.
        losses: the losses it trains on, once it is compiled.
        updates: the updates of the model's layers, as Keras has them.
        tried: placements of tensors that trials found.
        is_synchronized: whether all batch normalization uses the statistics of the whole batch.
        redistributes: whether values may be gathered from replicas and split again.

    Attributes:
        propagation: the ``Propagation`` of the graph.
        fixed: the number of rows, where it is fixed.
        needed: the operations that replicas run.
        operations: those among them that depend on the batch.
        once: operations run once, not by each replica: counters, and Python functions that are not
            called with rows.
        averaged: the tensors that BatchNorm writes, of each replica's rows.
        constants: constant tensors that have a row for each row of the batch.
        redistributes: whether values are gathered from replicas or split again; then all inputs
            have to have the same number of rows.
        split_inputs: the inputs of which replicas read shards.
        fallback: why costly operations on the way to the outputs run unsplit, a ``Fallback``, or
            None.
        scope: the scope of that.
        passed: tensors that have passed a trial.
    """

    def __init__(self, model, losses, updates, tried, is_synchronized=False, redistributes=True):
        # The operations that depend on the batch, and the placements of their results.
        inputs, outputs = list(model.inputs), list(model.outputs)
        values = [update[1] if isinstance(update, tuple) else update for update in updates]
        starts = {part.op for part in graph.dense_parts(*inputs)}
        _, self._consumers = graph.ancestors(outputs + losses + values, starts)
        depending = graph.reached(starts, self._consumers) - starts
        shapes = [tensor.get_shape() for tensor in inputs]
        self.fixed = next((s.as_list()[0] for s in shapes if s.ndims and s.as_list()[0]), None)
        normalizing = [] if is_synchronized else _variables_of_batchnorm(model)
        layers = {part for v in normalizing for part in v.op.name.split("/")[-2:-1]}
        self._starts, inside = starts, set(graph.ancestors(outputs, starts)[0])
        are_fed = all(arguments.is_fed(part) for part in graph.dense_parts(*inputs))
        among = inside & depending if redistributes and are_fed and not self.fixed else ()
        self.propagation = Propagation(inputs, depending, self.fixed, layers, tried, among)
        again = self.propagation.split_again
        self.redistributes = bool(again or self.propagation.gathered)
        # Operations that need the whole batch; of those that write, each device would write another
        # value.
        mixing = self.propagation.mixing + [op for op in inside & depending if graph.writes(op)]
        #: Operations of the whole batch: cross-batch operations, and all that need them.
        self._unsplit_consumers = {
            op: [user for user in users if _goes_on(op, user, again)] if again else users
            for op, users in self._consumers.items()
        }
        self._mixed = graph.reached(mixing, self._unsplit_consumers)
        # The tensors at which the batch part ends, and the operations that compute them.
        written = _values_written(updates, starts, normalizing)
        averaged = [t for t in written if t.op in depending and t.op not in self._mixed]
        self.averaged = set(averaged)
        others = losses + values + [tensor.op for tensor in again]
        targets = self._rows_nearest_to(outputs, others, depending) + averaged
        needed, _ = graph.ancestors(targets, starts, again.__contains__)
        self.scope = _rows.DOWNSTREAM
        self.fallback = self._costly_after(mixing, inside & depending.difference(needed))
        self.once = {op for op in needed if graph.writes(op) or _calls_once(op, depending)}
        needed, consumers = graph.ancestors(targets, starts | self.once, again.__contains__)
        # A custom gradient of a weight is computed once, of the sum of the upstream gradients.
        self.needed = [
            op
            for op in needed
            if not (graph.is_shared(op) or op not in depending and has_custom_gradient(op))
        ]
        starts = starts.union(again)
        self.operations = graph.reached(starts, consumers) - starts
        # The tensors that these read.
        self.constants = list(self.propagation.constants) + self._constants_of_loops()
        taken = {tensor for op in self.operations for tensor in op.inputs}
        self.passed: "Set[Any]" = set()
        self.split_inputs = [
            t for t in inputs if self.redistributes or not taken.isdisjoint(graph.dense_parts(t))
        ]

    def before(self, tensor: "Any") -> "Set[Any]":
        """Return the tensors from which a tensor is computed, and the tensor itself."""
        return {t for op in graph.ancestors([tensor], self._starts)[0] for t in op.outputs}

    def drawn(self) -> "List[Any]":
        """Return the random numbers and the statistics of BatchNorm that replicas compute."""
        random = [op.outputs[0] for op in self.needed if "seed2" in op.node_def.attr]
        return random + [t for t in self.propagation.statistics if t.op in self.operations]

    def _rows_nearest_to(self, outputs, others, depending):
        """Return the tensors at which the batch part ends.

        These are the outputs, or outputs of layers before them if they depend on other rows; and
        the results of layers and of costly operations from which others are computed.

        Arguments:
            outputs: the model's.
            others: tensors and operations: losses and updates.
            depending: the operations that depend on the batch.
        """
        ends = list(outputs)
        for other in others:
            ends += getattr(other, "inputs", [other])

        def is_found(tensor):
            is_end = tensor in outputs or hasattr(tensor, "_keras_history") or is_costly(tensor.op)
            return (
                is_end
                and tensor.op in depending
                and tensor.op not in self._mixed
                and self.propagation.come_first(tensor)
                and not self._needs_other_rows(tensor)
            )

        return _rows.nearest(ends, is_found, lambda t: t.op.inputs if t.op in depending else ())

    def _needs_other_rows(self, target):
        """Return whether a tensor needs rows of other inputs than the model's, such as targets."""
        return any(
            tensor.dtype.name not in ("bool", "resource") and not tensor.shape.is_fully_defined()
            for op in graph.ancestors([target], self._starts)[0]
            if op.type.startswith(("Placeholder", "IteratorGetNext"))
            for tensor in op.outputs
        )

    def _costly_after(self, mixing, operations):
        """Return why costly ones among operations run unsplit, a ``Fallback``, or None."""
        # A last one that is costly is not worth a warning.
        after = [
            op
            for op in operations.intersection(self._mixed)
            if is_costly(op) and (op not in mixing or self._is_split_after(op))
        ]
        again = self.propagation.split_again
        needed = set(graph.ancestors(after, self._starts, again.__contains__)[0])
        needed = needed.intersection(mixing)
        if not needed:
            return None
        op = min(needed, key=lambda op: op._id)
        if self._is_split_after(op):
            self.scope = _rows.IN_BETWEEN
        fallbacks = map(self.propagation.fallback_of, op.outputs)
        reason = next((known.reason for known in fallbacks if known), Reason.CROSS_BATCH)
        return Fallback(reason, f"{op.name} ({op.type})", self._layer_of(op), line_of(op))

    def _is_split_after(self, op):
        """Return whether replicas go on from what is computed from an operation's results."""
        reached = graph.reached([op], self._unsplit_consumers)
        return any(tensor.op in reached for tensor in self.propagation.split_again)

    def _layer_of(self, op):
        """Return the name of the layer whose output is the next one after an operation, or None."""
        pending = [op]
        for reached in pending:  # which grows meanwhile
            for tensor in reached.outputs:
                if hasattr(tensor, "_keras_history"):
                    return tensor._keras_history[0].name
            pending += [user for user in self._consumers.get(reached, ()) if user not in pending]
        return None

    def _constants_of_loops(self):
        """Return initial values of loops that have a fixed number of rows: zeros, not weights."""
        entering = [op for op in self.needed if op.type == "Enter" and op not in self.operations]
        return [
            tensor
            for tensor in (op.inputs[0] for op in entering)
            if tensor.dtype.is_floating
            and self.propagation.has_fixed(tensor)
            and not any(op.type.startswith("Var") for op in graph.ancestors([tensor], ())[0])
        ]


def _values_written(updates, stop, variables):
    """Return the tensors that updates write to some variables, or from which they compute these."""
    # Keras' moving averages have variables besides: "moving_mean/biased".
    scopes = tuple(variable.op.name + "/" for variable in variables)

    def is_of_them(variable):
        return (variable.name + "/").startswith(scopes)

    pairs = [update for update in updates if isinstance(update, tuple)]
    ops, consumers = graph.ancestors([u for u in updates if not isinstance(u, tuple)], stop)
    writes = [op for op in ops if graph.writes(op) and is_of_them(graph.source_of(op.inputs[0]))]
    writing = graph.reached(writes, consumers)
    values = [value for variable, value in pairs if is_of_them(variable.op)]
    return values + [t for op in writing for t in op.inputs if t.op not in writing]


def _calls_once(op, depending):
    return is_call(op) and op not in depending and graph.is_outermost(op)


def _goes_on(op, user, again):
    """Return whether an operation takes what another one computes of the whole batch as it is."""
    taken = [tensor for tensor in user.inputs if tensor.op is op]
    return op in user.control_inputs or any(tensor not in again for tensor in taken)


def _variables_of_batchnorm(model):
    """Return the variables of a model's BatchNorm layers, at any depth, that do not synchronize."""
    return [
        weight
        for layer in _keras.all_layers_of_keras2(model)
        if any(parent.__name__.startswith("BatchNormalization") for parent in type(layer).__mro__)
        and not synchronized.asks(layer)
        for weight in layer.weights
    ]
