"""Placements of the tensors of a static graph, inferred operation by operation.

The table of operations is ``_tensorflow.rules``. Operations without a rule (loops, functions, rare
ones) have unknown placements: the output of a layer is then *assumed* to have the batch dimension
first, which is the convention of Keras, and ``trial`` checks that before it is used.
"""

import re
from typing import Any, Dict, List, Set

from ..._rows import (
    REPLICATED,
    Count,
    Fallback,
    Mixed,
    Partial,
    Placement,
    Reason,
    Replicated,
    Sharded,
    Unknown,
    Value,
    gathering,
    redistributed,
)
from .._tensorflow.custom_gradients import CustomGradient, has_custom_gradient, recomputes
from .._tensorflow.graph import sizes_of
from .._tensorflow.reductions import can_be_reduced, first_mixed
from .._tensorflow.rules import ALIGNED, placements
from .._tensorflow.rules_common import Positions
from . import graph
from .redistribution import WholeShapes, can_be_gathered, is_costly
from .reductions import joint_operation


class Propagation:
    """Placements of the tensors that depend on a batch, inferred operation by operation.

    Arguments:
        inputs: the tensors whose rows are the batch's.
        operations: the operations that depend on them.
        fixed: the number of rows, where it is fixed.
        normalizing: the names of layers that take statistics of each device's rows.
        tried: placements of tensors that a trial found.
        inside: the operations among which values are gathered from replicas and split again.

    Attributes:
        reduced: the tensors that replicas reduce, since what follows needs them of the whole batch,
            and how: ``Partial``.
        joint: operations that replicas compute jointly, and functions that do so; see
            ``reductions``.
        gathered: the position of the input that each replica has of the whole batch, by operation.
        split_again: tensors that are computed once, of the whole batch, and from which replicas go
            on, and how: ``Sharded``, or ``Replicated`` where each reads all of it.
        mixing: the first operations whose results need the whole batch.
        assumed: tensors of unknown placement that are assumed to have rows.
        statistics: those that operations of ``normalizing`` take, and what they normalize at once.
        constants: tensors that have a row for each of a fixed number, but do not depend on them.
        shapes: by tensors that give Reshape a fixed number of rows, sizes for any number.
    """

    def __init__(self, inputs, operations, fixed, normalizing, tried, inside=()):
        self.fixed, self.tried = fixed, tried
        self._normalizing = _scopes_of(normalizing)
        #: Whether values may be reduced: not where a backward pass computes them once more.
        self._reduces = not any(map(recomputes, operations))
        self._inside = set(inside if self._reduces else ())
        self._useless: "Set[Any]" = set()
        self._shapes: "Any" = None
        self.reduced: "Dict[Any, Partial]" = {}
        self.split_again: "Dict[Any, Placement]" = {}
        self._ordered = ordered = _in_order(operations)
        self._worthwhile = self._before_costly()
        pending = True
        while pending:  # what follows one that is reduced, for example, has another placement
            before = dict(self.reduced)
            self._infer(inputs, ordered)
            pending = before != self.reduced or self._splits_again() or self._finds_useless()

    def _infer(self, inputs, ordered):
        """Infer the placements of all results of operations, which are in order."""
        self.joint: "Dict[Any, Any]" = {}
        self.gathered: "Dict[Any, int]" = {}
        self._mixed: "Dict[Any, Mixed]" = {}
        self.mixing: "List[Any]" = []
        self.assumed: "Set[Any]" = set()
        self.statistics: "List[Any]" = []
        self.constants: "Set[Any]" = set()
        self.shapes: "Dict[Any, List[Any]]" = {}
        self._placements: "Dict[Any, Placement]" = {}
        sparse = [Positions(Sharded(0)), Sharded(0, inner=None, even=False), Count([0])]
        for tensor in inputs:
            parts = graph.dense_parts(tensor)
            self._placements.update(zip(parts, sparse if len(parts) > 1 else [Sharded(0)]))
        for op in ordered:
            self._place(op)
            if self._begins_mixing(op):
                self.mixing.append(op)

    def placement_of(self, tensor: "Any") -> "Placement":
        """Return the placement of a tensor."""
        return self._placements.get(tensor, REPLICATED)

    def come_first(self, tensor: "Any") -> bool:
        """Return whether the devices' values, concatenated, are that of the whole batch."""
        return graph.is_outermost(tensor.op) and is_in_order(self._assumed(tensor))

    def _assumed(self, tensor):
        """Return the placement of a tensor, assumed to have rows where it is unknown."""
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

    def _place(self, op, reducing=True):
        """Infer the placements of an operation's results from those of its inputs.

        Arguments:
            op: the operation.
            reducing: whether its inputs can be reduced over the replicas.
        """
        inputs = [self.placement_of(tensor) for tensor in op.inputs]
        of_each_device = self._normalizing and any(map(self._normalizing, op.name.split("/")))
        if graph.loop_of(op) is not None:
            mixed = [placement for placement in inputs if isinstance(placement, Mixed)]
            results = [mixed[0] if mixed else Unknown()] * len(op.outputs)
        else:
            inputs = self._with_rows_of_constants(op, inputs)
            reducing = reducing and self._reduces and not of_each_device
            results = self._by_rule(op, inputs, reducing)
        if of_each_device:
            results = self._of_each_device(op, results)
        elif self._mixes_back(op, inputs, results):
            results = [Mixed(Fallback(Reason.CUSTOM_GRADIENT))] * len(results)
        for tensor, result in zip(op.outputs, results):
            self._placements[tensor] = result = self.tried.get(tensor, result)
            if tensor in self.split_again and isinstance(result, Mixed):
                self._mixed[tensor] = result
                self._placements[tensor] = self.split_again[tensor]
            if tensor in self.reduced:
                how = Partial("sum") if result == Count() else result
                del self.reduced[tensor]
                if isinstance(how, Partial):
                    self.reduced[tensor], self._placements[tensor] = how, REPLICATED
            if hasattr(tensor, "_keras_history"):
                self._placements[tensor] = self._assumed(tensor)

    def _of_each_device(self, op, results):
        """Return placements where statistics of each device's rows count as those of the batch.

        The statistics are recorded; some operations take them and normalize by them, all in one.
        """
        normalizes = op.type.startswith("FusedBatchNorm") and op.get_attr("is_training")
        for tensor, result in zip(op.outputs, results):
            if normalizes or not isinstance(result, (Replicated, Sharded, Count)):
                self.statistics.append(tensor)
        return [
            result if isinstance(result, (Sharded, Count)) else REPLICATED for result in results
        ]

    def _mixes_back(self, op, inputs, results):
        """Return whether an operation has a user-defined gradient, and that mixes rows."""
        # The gradient of a reduced value is a sum over the replicas.
        followed = any(
            isinstance(result, Sharded)
            or isinstance(result, Replicated)
            and tensor.dtype.is_floating
            for tensor, result in zip(op.outputs, results)
        )
        if not followed or graph.loop_of(op) is not None or not has_custom_gradient(op):
            return False
        try:
            gradient = CustomGradient(op, results)
        except Exception:  # whatever a user-defined function does
            return True
        self._placements.update(gradient.upstream)
        for of_gradient in gradient.operations:
            self._place(of_gradient, reducing=False)
        return gradient.mixes(inputs, self.placement_of)

    def _by_rule(self, op, inputs, reducing):
        """Return the placements of an operation's results by the rule for its type."""
        if all(isinstance(placement, Replicated) for placement in inputs):
            return [REPLICATED] * len(op.outputs)
        values = [self._value(*pair) for pair in zip(op.inputs, inputs)]
        joint = joint_operation(op, values) if reducing else None
        if joint is not None:
            self.joint[op], results = joint
            return results
        if reducing and any(isinstance(placement, (Partial, Count)) for placement in inputs):
            return self._by_rule_of_whole(op, values)
        return self._by_rule_of_gathered(op, values) if reducing else placements(op, values)

    def _value(self, tensor, placement):
        if self.split_again.get(tensor) == REPLICATED:
            return Value(placement, self._whole_shapes().sizes(tensor))
        return _value(tensor, placement)

    def _by_rule_of_gathered(self, op, values):
        """Return the placements of an operation's results, one input gathered if that helps."""
        results = placements(op, values)
        if op not in self._worthwhile or op in self._useless or len(op.outputs) > 1:
            return results
        result, place = gathering(lambda values: placements(op, values)[0], values)
        if place is None or not graph.is_outermost(op) or has_custom_gradient(op):
            return results
        if not can_be_gathered(op.inputs[place], self.placement_of):
            return results
        self.gathered[op] = place
        return [result]

    def _by_rule_of_whole(self, op, values):
        """Return the placements of an operation's results, some inputs reduced if that helps."""
        results = placements(op, values)
        if not any(isinstance(result, (Mixed, Unknown)) for result in results):
            return results
        # Numbers of rows add up, too. They are left as they are where sums alone are to be reduced.
        with_counts = [
            Value(Partial("sum"), v.shape) if isinstance(v.placement, Count) else v for v in values
        ]
        for candidates in (values, with_counts):
            _, places = redistributed(
                lambda values: first_mixed(placements(op, values)), candidates
            )
            sources = self._reducible([op.inputs[place] for place in places])
            if sources:
                self.reduced.update(sources)
                for place in places:
                    values[place] = Value(REPLICATED, values[place].shape)
                return placements(op, values)
        return results

    def _reducible(self, tensors):
        """Return the tensors to reduce, and how, that others may be of the whole batch; or none.

        These are the first sums, means and extremes over the rows from which others are computed;
        and numbers of rows, as soon as they are fractions, which are the size of no tensor.
        """
        found, pending = {}, list(tensors)
        for tensor in pending:  # which grows meanwhile
            placement = self.placement_of(tensor)
            if placement == Count() and tensor.dtype.is_floating and tensor.shape.ndims == 0:
                found[tensor] = Partial("sum")
                continue
            kind = Count if isinstance(placement, Count) else Partial
            before = [t for t in tensor.op.inputs if isinstance(self.placement_of(t), kind)]
            pending += [t for t in before if t not in pending]
            if not before and kind is Count:
                return {}
            if not before:
                found[tensor] = placement
        return found if all(can_be_reduced(*pair) for pair in found.items()) else {}

    def _begins_mixing(self, op):
        """Return whether an operation is the first whose results are those of the whole batch."""
        mixes = any(self._is_mixed(t) or t in self._mixed for t in op.outputs)
        return mixes and not any(map(self._is_mixed, op.inputs))

    def _before_costly(self):
        """Return operations inside whose results costly ones need, and these."""
        found: "Set[Any]" = set()
        for op in reversed(list(self._ordered)):
            users = (user for tensor in op.outputs for user in tensor.consumers())
            if op in self._inside and (is_costly(op) or any(user in found for user in users)):
                found.add(op)
        return found

    def _splits_again(self):
        """Find tensors from which replicas can go on; return whether there are others than before.

        Each is the first one with rows after an operation that mixes them, or something of a fixed
        size that an operation needs beside rows.
        """
        found, after = {}, set()
        for op in self._ordered:
            mixed = [t for t in op.outputs if type(self.placement_of(t)) is Mixed]
            if not mixed or op not in self._worthwhile:
                continue
            if any(t in found or t in after for t in op.inputs):
                after.update(op.outputs)
                continue
            found.update(self._read_by_all(op) or self._with_rows(mixed))
        self.split_again.update(found)
        return bool(found)

    def _whole_shapes(self):
        """Return the shapes of what depends on several rows, inferred when they are first needed.

        The placements of some may change later, but not their shapes.
        """
        if self._shapes is None:
            mixed = [op for op in self._worthwhile if any(map(self._is_mixed, op.outputs))]
            self._shapes = WholeShapes(mixed, self.placement_of)
        return self._shapes

    def _with_rows(self, tensors):
        """Return those of an operation's results that have a row for each row of the batch."""
        able = filter(self._can_be_split_again, tensors)
        rows = {tensor: self._whole_shapes().placement(tensor) for tensor in able}
        return {t: placement for t, placement in rows.items() if isinstance(placement, Sharded)}

    def _can_be_split_again(self, tensor):
        is_value = tensor.dtype.name not in ("bool", "resource", "variant")
        return is_value and graph.is_outermost(tensor.op) and tensor not in self._useless

    def _read_by_all(self, op):
        """Return inputs of the whole batch that replicas would read for an operation on rows."""
        mixed = [t for t in op.inputs if type(self.placement_of(t)) is Mixed]
        if not mixed or not all(map(self._can_be_split_again, [*mixed, *op.outputs])):
            return {}
        shapes = self._whole_shapes()
        whole = {tensor: shapes.placement(tensor) for tensor in mixed}
        if set(whole.values()) != {REPLICATED}:
            return {}
        values = [
            Value(REPLICATED, shapes.sizes(t)) if t in whole else _value(t, self.placement_of(t))
            for t in op.inputs
        ]
        results = placements(op, values)
        return whole if any(isinstance(result, (Sharded, Partial)) for result in results) else {}

    def _finds_useless(self):
        """Undo what no costly operation of the replicas follows; return whether there was any."""
        for tensor in set(self.split_again).difference(self._mixed):
            del self.split_again[tensor]  # by now replicas compute it themselves
        useless = {t for t in self.split_again if not self._leads_to_costly(t)}
        useless |= {
            op
            for op in self.gathered
            if not (is_costly(op) or self._leads_to_costly(op.outputs[0]))
        }
        self._useless |= useless
        for tensor in useless.intersection(self.split_again):
            del self.split_again[tensor]
        return bool(useless)

    def _leads_to_costly(self, tensor):
        """Return whether a tensor is needed by a costly operation that replicas run."""
        pending = [tensor]
        for source in pending:  # which grows meanwhile
            for op in source.consumers():
                mixed = any(self._is_mixed(t) or t in self._mixed for t in op.outputs)
                if op in self._inside and not mixed:
                    if is_costly(op):
                        return True
                    pending += [t for t in op.outputs if t not in pending]
        return False

    def fallback_of(self, tensor: "Any") -> "Any":
        """Return why a tensor is computed of the whole batch, a ``Fallback``, or None."""
        return getattr(self._mixed.get(tensor, self.placement_of(tensor)), "fallback", None)

    def _is_mixed(self, tensor):
        placement = self.placement_of(tensor)
        mixed = isinstance(placement, Mixed) and not isinstance(placement, Positions)
        # A bool is a condition on all rows, by which RNNs choose among implementations.
        return mixed and tensor.dtype.name != "bool"

    def _with_rows_of_constants(self, op, inputs):
        """Return the placements of an operation's inputs, constants for a fixed batch among them.

        Where the number of rows is fixed, TensorFlow makes constants of zeros and shapes. They are
        recorded in ``constants`` and ``shapes``.
        """
        inputs = list(inputs)
        if op.type == "Reshape" and isinstance(inputs[0], Sharded):
            reshaped = all(consumer.type == "Reshape" for consumer in op.inputs[1].consumers())
            if reshaped and self.has_fixed(op.outputs[0]):
                self.shapes[op.inputs[1]] = [-1] + op.outputs[0].shape.as_list()[1:]
                inputs[1] = Count([0])
        elif op.type in ALIGNED:
            ranks = {
                tensor.shape.ndims
                for tensor, placement in zip(op.inputs, inputs)
                if isinstance(placement, Sharded) and placement.axis == 0
            }
            for index, tensor in enumerate(op.inputs):
                # Not what is reduced, or computed from it.
                is_apart = inputs[index] == REPLICATED and tensor not in self._placements
                if is_apart and tensor.shape.ndims in ranks and self.has_fixed(tensor):
                    inputs[index] = Sharded(0)
                    self.constants.add(tensor)
        return inputs

    def has_fixed(self, tensor):
        """Return whether the first dimension of a tensor is the fixed number of rows."""
        return self.fixed not in (None, 1) and (sizes_of(tensor) or [])[:1] == [self.fixed]


def is_in_order(placement):
    """Return whether devices' values of a placement, concatenated, are that of the whole batch."""
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
    """Return operations in the order of computation, apart from the back edges of loops.

    The Switch that lets a tensor into a condition is made after the operation that takes it.
    """
    pending = sorted(operations, key=lambda op: op._id, reverse=True)
    ordered: "Dict[Any, None]" = {}
    entered: "Set[Any]" = set()
    while pending:
        op = pending[-1]
        entered.add(op)
        before = [t.op for t in op.inputs if t.op in operations and t.op not in entered]
        pending += before
        if not before:
            ordered[pending.pop()] = None
    return ordered
