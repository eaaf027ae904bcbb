"""How the tensors of a static graph depend on the rows of the batch, operation by operation.

The table of operations is ``_tensorflow.rules``. What it does not know (loops, functions, unusual
operations) is unknown: the output of a layer is then *assumed* to have rows first, which is Keras'
own convention, and ``trial`` asks before anything is made of it.
"""

import re

from ..._rows import REPLICATED, Count, Fallback, Mixed, Reason, Replicated, Sharded, Unknown, Value
from .._tensorflow.custom_gradients import CustomGradient, has_custom_gradient
from .._tensorflow.graph import sizes_of
from .._tensorflow.rules import ALIGNED, placements
from .._tensorflow.rules_common import Positions
from . import graph


class Propagation:
    """Placements of the tensors that depend on a batch, inferred operation by operation.

    Arguments:
        inputs: the tensors whose rows are the batch's.
        operations: the operations that depend on them.
        fixed: the number of rows, where it is fixed.
        normalizing: the names of layers that take statistics of each device's own rows.
        tried: placements of tensors that a trial found.

    Attributes:
        mixing: operations whose results are right only where the whole batch is.
        assumed: tensors taken for rows, since nothing tells.
        statistics: those of the operations of ``normalizing``, and what they normalize at once.
        constants: tensors that have a row for each of a fixed number, but do not depend on them.
        shapes: tensors that tell Reshape to give a fixed number of rows, and those for any number.
    """

    def __init__(self, inputs, operations, fixed, normalizing, tried):
        self.fixed, self.tried = fixed, tried
        self._normalizing = _scopes_of(normalizing)
        self.mixing, self.assumed = [], set()
        self.statistics, self.constants, self.shapes = [], set(), {}
        self._placements = {}
        sparse = [Positions(Sharded(0)), Sharded(0, inner=None, even=False), Count([0])]
        for tensor in inputs:
            parts = graph.dense_parts(tensor)
            self._placements.update(zip(parts, sparse if len(parts) > 1 else [Sharded(0)]))
        for op in _in_order(operations):
            self._look_at(op)

    def placement_of(self, tensor):
        """Return how a tensor depends on the rows of the batch."""
        return self._placements.get(tensor, REPLICATED)

    def come_first(self, tensor):
        """Return whether the devices' values, one after the other, are those of the whole batch."""
        return graph.is_outermost(tensor.op) and is_in_order(self._assumed(tensor))

    def _assumed(self, tensor):
        """Return the placement of a tensor, taken for rows where nothing shows it."""
        placement = self.placement_of(tensor)
        if not isinstance(placement, Unknown) or not self._may_come_first(tensor):
            return placement
        self.assumed.add(tensor)
        return Sharded(0, inner=None)

    def _may_come_first(self, tensor):
        if tensor.dtype.name in ("resource", "variant"):
            return False
        if tensor.shape.ndims is None:
            return hasattr(tensor, "_keras_history")
        first = sizes_of(tensor)[:1]
        return first == [None] or bool(self.fixed and first and first[0] % self.fixed == 0)

    def _look_at(self, op):
        given = [self.placement_of(tensor) for tensor in op.inputs]
        results = self._results(op, given)
        if self._normalizing is not None and any(map(self._normalizing, op.name.split("/"))):
            # Some take statistics of their rows and normalize by them, all in one.
            normalizes = op.type.startswith("FusedBatchNorm") and op.get_attr("is_training")
            for place, (tensor, result) in enumerate(zip(op.outputs, results)):
                if normalizes or not isinstance(result, (Replicated, Sharded, Count)):
                    self.statistics.append(tensor)
                if not isinstance(result, (Sharded, Count)):
                    results[place] = REPLICATED
        elif self._mixes_back(op, given, results):
            results = [Mixed(Fallback(Reason.CUSTOM_GRADIENT))] * len(results)
        for tensor, result in zip(op.outputs, results):
            self._placements[tensor] = self.tried.get(tensor, result)
            if hasattr(tensor, "_keras_history"):
                self._placements[tensor] = self._assumed(tensor)
        # Whether all rows are so, or any is: RNNs choose among implementations by that.
        if any(map(self._is_mixed, op.outputs)) and not any(map(self._is_mixed, op.inputs)):
            self.mixing.append(op)

    def _mixes_back(self, op, given, results):
        """Return whether an operation has a user-defined gradient, and that mixes rows."""
        rows = any(isinstance(each, Sharded) for each in results)
        if not rows or graph.loop_of(op) is not None or not has_custom_gradient(op):
            return False
        mixing = list(self.mixing)
        try:
            gradient = CustomGradient(op, results)
        except Exception:  # whatever a function of the user's does
            return True
        self._placements.update(gradient.upstream)
        for each in gradient.operations:
            self._look_at(each)
        self.mixing = mixing
        return gradient.mixes(given, self.placement_of)

    def _is_mixed(self, tensor):
        known = self.placement_of(tensor)
        mixed = isinstance(known, Mixed) and not isinstance(known, Positions)
        return mixed and tensor.dtype.name != "bool"

    def _results(self, op, given):
        if graph.loop_of(op) is not None:
            mixed = [each for each in given if isinstance(each, Mixed)]
            return [mixed[0] if mixed else Unknown()] * len(op.outputs)  # in a loop
        self._look_at_constants(op, given)
        if all(isinstance(each, Replicated) for each in given):
            return [REPLICATED] * len(op.outputs)
        values = [_value(tensor, kind) for tensor, kind in zip(op.inputs, given)]
        return placements(op, values)

    def _look_at_constants(self, op, given):
        """TensorFlow makes constants of zeros and shapes where the number of rows is fixed."""
        if op.type == "Reshape" and isinstance(given[0], Sharded):
            reshaped = all(consumer.type == "Reshape" for consumer in op.inputs[1].consumers())
            if reshaped and self.has_fixed(op.outputs[0]):
                self.shapes[op.inputs[1]] = [-1] + op.outputs[0].shape.as_list()[1:]
                given[1] = Count([0])
        elif op.type in ALIGNED:
            ranks = {
                tensor.shape.ndims
                for tensor, kind in zip(op.inputs, given)
                if isinstance(kind, Sharded) and kind.axis == 0
            }
            for index, tensor in enumerate(op.inputs):
                replicated = given[index] == REPLICATED and tensor.shape.ndims in ranks
                if replicated and self.has_fixed(tensor):
                    given[index] = Sharded(0)
                    self.constants.add(tensor)

    def has_fixed(self, tensor):
        """Return whether the first dimension of ``tensor`` has as many rows as are fixed."""
        return self.fixed not in (None, 1) and (sizes_of(tensor) or [])[:1] == [self.fixed]


def is_in_order(placement):
    """Return whether devices' values of this placement, put together in order, are the whole's."""
    return isinstance(placement, Sharded) and (placement.axis, placement.copies) == (0, 1)


def _scopes_of(layers):
    """Return a function that recognizes the scopes of layers of these names, used once or more."""
    names = "|".join(map(re.escape, layers))
    return re.compile(rf"(?:{names})(_\d+)?$").match if names else None


def _value(tensor, placement):
    shape = sizes_of(tensor)
    if shape and isinstance(placement, Sharded):
        shape[placement.axis] = None
    return Value(placement, shape)


def _in_order(operations):
    """Return operations after those whose results they take; ways back in loops left out.

    The Switch that lets a tensor into a condition is made after the operation that takes it.
    """
    pending = sorted(operations, key=lambda op: op._id, reverse=True)
    ordered, entered = {}, set()  # type: Any, Any
    while pending:
        op = pending[-1]
        entered.add(op)
        before = [t.op for t in op.inputs if t.op in operations and t.op not in entered]
        pending += before
        if not before:
            ordered[pending.pop()] = None
    return ordered
