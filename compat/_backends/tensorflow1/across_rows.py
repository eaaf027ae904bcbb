"""Which tensors of a static graph have a row for each row of the batch.

Replicas are right where every operation computes each row from that row alone. Whether it does
is written in the graph: here each type of operation has a rule, which tells from where its inputs
have the rows where its results have them. What no rule covers (loops, functions, unusual
operations) is unknown; the output of a layer of Keras then counts as having rows first, which is
Keras' own convention.
"""

from .graph import loop_of
from .row_rules import (
    CONSTANT,
    COUNT,
    MIXED,
    RULES,
    SPARSE,
    UNKNOWN,
    concatenated,
    elementwise,
    is_axis,
    rank_of,
    stacked,
)


class Rows:
    """What is known of the tensors that depend on a batch.

    Arguments:
        inputs: the dense tensors whose rows are the batch's.
        sparse: the parts of those that are sparse.
        operations: the operations that depend on them.
        fixed: the number of rows, where it is fixed.

    Attributes:
        mixing: operations that compute numbers across rows.
        constants: tensors that have a row for each of a fixed number, but do not depend on them.
        shapes: tensors that tell Reshape to give a fixed number of rows, and those for any number.
    """

    def __init__(self, inputs, sparse, operations, fixed=None):
        self.fixed = fixed
        self.mixing = []
        self.constants, self.shapes = set(), {}
        self._known = dict.fromkeys(inputs, 0)
        self._known.update(dict.fromkeys(sparse, SPARSE))
        for op in _in_order(operations):
            self._look_at(op)

    def known(self, tensor):
        """The dimension of ``tensor`` that has the rows, or one of the constants above."""
        return self._known.get(tensor, CONSTANT)

    def come_first(self, tensor):
        """Whether the rows are the first dimension of a tensor that depends on them.

        Where no rule tells, they are if that dimension has no fixed size.
        """
        known = self.known(tensor)
        return known == 0 or known == UNKNOWN and self._may_come_first(tensor)

    def _may_come_first(self, tensor):
        if tensor.shape.ndims is None:
            return True
        first = tensor.shape.as_list()[:1]
        return first == [None] or bool(self.fixed and first and first[0] % self.fixed == 0)

    def _look_at(self, op):
        kinds = [self.known(tensor) for tensor in op.inputs]
        if self.fixed and self.fixed > 1:
            self._look_at_constants(op, kinds)
        if loop_of(op) is not None:
            results = UNKNOWN
        elif all(kind == CONSTANT for kind in kinds):
            return
        elif op.type in RULES:
            results = RULES[op.type](op, kinds, self.known)
        else:
            results = COUNT if set(kinds) <= {CONSTANT, COUNT} else UNKNOWN
        if not isinstance(results, list):
            results = [results] * len(op.outputs)
        for tensor, result in zip(op.outputs, results):
            if result == UNKNOWN and hasattr(tensor, "_keras_history"):
                result = 0 if self._may_come_first(tensor) else UNKNOWN
            self._known[tensor] = result
        if MIXED in results and any(map(is_axis, kinds)):
            # Whether all rows are so, or any is: RNNs choose among implementations by that.
            if any(tensor.dtype.name != "bool" for tensor in op.outputs):
                self.mixing.append(op)

    def _look_at_constants(self, op, kinds):
        """TensorFlow makes constants of zeros and shapes where the number of rows is fixed."""
        if op.type == "Reshape" and kinds[0] == 0:
            reshaped = all(consumer.type == "Reshape" for consumer in op.inputs[1].consumers())
            if reshaped and self.has_fixed(op.outputs[0]):
                self.shapes[op.inputs[1]] = [-1] + op.outputs[0].shape.as_list()[1:]
        elif RULES.get(op.type) in (elementwise, stacked, concatenated):
            ranks = {rank_of(tensor) for tensor, kind in zip(op.inputs, kinds) if kind == 0}
            for index, tensor in enumerate(op.inputs):
                if kinds[index] == CONSTANT and rank_of(tensor) in ranks and self.has_fixed(tensor):
                    kinds[index] = 0
                    self.constants.add(tensor)

    def has_fixed(self, tensor):
        """Whether the first dimension of ``tensor`` has as many rows as are fixed."""
        return (
            self.fixed not in (None, 1)
            and bool(rank_of(tensor))
            and tensor.shape.as_list()[0] == self.fixed
        )


def _in_order(operations):
    """Operations after those whose results they take; ways back in loops left out."""
    left, entered, ordered = set(operations), set(), []
    for first in sorted(operations, key=lambda op: op._id):
        path = [first]
        while path:
            op = path[-1]
            inputs = [] if op in entered else [t.op for t in op.inputs if t.op in left]
            inputs = [other for other in inputs if other not in entered]
            entered.add(op)
            if inputs:
                path += inputs
            else:
                path.pop()
                if op in left:
                    left.remove(op)
                    ordered.append(op)
    return ordered
