"""A walk through a traced graph: the kind of each tensor, and of each variable's new value."""

from .row_kinds import (
    COUNT,
    FIXED,
    FIXED_VALUE,
    MEAN,
    MIXED_MEAN,
    OLD,
    OLD_VALUE,
    ROW_COUNT,
    ROW_SUM,
    SUM,
    Denominator,
    Handle,
    Reduced,
    Rows,
    Sizes,
    Whole,
    free_axes,
    is_fixed,
    mean_of,
    scaled,
)
from .row_operations import LINEAR, QUOTIENTS, SAME, SUMS, RowOperations

_REDUCTIONS = {"All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"}
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_CONDITIONS = {"If", "StatelessIf"}


class Walk(RowOperations):
    """Follows the operations of one graph.

    Arguments:
        kinds: the kinds of the graph's inputs, by the tensors' names.
        state: what became of each variable, by the key of its handle; is written.
        alone: ranges of operations in which mixing rows is meant (batch normalization).
    """

    def __init__(self, graph, kinds, state, alone=()):
        super().__init__(graph, kinds)
        self.state = state
        self.sums = {}  # name of a tensor -> that of the sum from which alone it is computed
        self.inverses = {}  # name of a tensor -> the Denominator whose inverse it is
        for place, operation in enumerate(graph.get_operations()):
            self.mixing_is_meant = any(first <= place < last for first, last in alone)
            self._follow(operation)

    def kind(self, tensor):
        return self.kinds.get(tensor.name, FIXED_VALUE)

    def _follow(self, op):
        known = [output.name in self.kinds for output in op.outputs]
        if known and all(known):
            return
        inputs = [self.kind(tensor) for tensor in op.inputs]
        results = self._results(op, inputs)
        if not isinstance(results, list):
            results = [results] * len(op.outputs)
        for output, result in zip(op.outputs, results):
            self.kinds[output.name] = result
            if result in (ROW_COUNT, ROW_SUM) and op.type in _REDUCTIONS | {"Size", "StridedSlice"}:
                self.sums[output.name] = output.name
            elif isinstance(result, (Reduced, Whole)) and not is_fixed(result):
                sums = {
                    self.sums.get(tensor.name)
                    for tensor, kind in zip(op.inputs, inputs)
                    if not is_fixed(kind)
                }
                if len(sums) == 1 and None not in sums:
                    self.sums[output.name] = sums.pop()

    def _results(self, op, inputs):
        kind = op.type
        handles = [i for i in inputs if isinstance(i, Handle)]
        if handles and kind not in _CALLS | _CONDITIONS and not kind.endswith("While"):
            return self._on_variable(op, handles[0], inputs)
        if kind in _CALLS:
            return self._called(op, inputs)
        if kind in _CONDITIONS:
            return self._chosen(op, inputs)
        if all(map(is_fixed, inputs)) or kind == "Rank":
            return FIXED_VALUE
        if any(isinstance(i, Rows) for i in inputs):
            inputs = [self._beside_rows(t, i) for t, i in zip(op.inputs, inputs)]
        whole = next((i for i in inputs if isinstance(i, Whole)), None)
        if kind in ("Mul", "MulNoNan") and len(inputs) == 2:
            return self._product(op, inputs)
        if kind in QUOTIENTS and not isinstance(inputs[0], Whole):
            return self._quotient(op, inputs)
        if whole is not None and not (kind.endswith("While") and self._has_free(op)):
            return whole
        if kind == "Shape":
            return self._shape(inputs[0])
        if kind == "Size":
            (rows,) = inputs
            if isinstance(rows, Rows):
                return ROW_COUNT if rows.even else ROW_SUM
        if any(isinstance(i, Sizes) for i in inputs):
            return self._of_sizes(op, inputs)
        if kind == "Pack" and op.outputs[0].dtype.is_integer:
            if any(isinstance(i, Reduced) and COUNT in i.parts for i in inputs):
                return Sizes(frozenset(n for n, i in enumerate(inputs) if not is_fixed(i)))
        if kind in _REDUCTIONS:
            return self._reduced(op, inputs)
        if kind == "L2Loss" and isinstance(inputs[0], Rows):
            return ROW_SUM if inputs[0].per is None and not inputs[0].mixed else self._whole(op)
        if kind.startswith("FusedBatchNorm") and isinstance(inputs[0], Rows):
            mean = Reduced(frozenset([MEAN]))
            return [inputs[0]._replace(per=None)] + [mean] * (len(op.outputs) - 1)
        if any(isinstance(i, Rows) for i in inputs):
            return self._of_rows(op, inputs)
        return self._linear(op, inputs)

    def _beside_rows(self, tensor, kind):
        """A statistic of the whole batch as something that goes into each row."""
        if tensor.name in self.sums or tensor.name in self.inverses:
            return kind  # rows may be divided by it
        if self.mixing_is_meant and isinstance(kind, (Reduced, Whole)):
            return FIXED_VALUE
        if isinstance(kind, Whole) and tensor.shape.rank is not None and not free_axes(tensor):
            return Reduced(frozenset([MIXED_MEAN]))
        return kind

    # Numbers without rows -----------------------------------------------------------------------

    def _linear(self, op, inputs):
        """An operation on what is reduced, on sizes of its own or not."""
        if op.type == "Cast":
            integer = not op.outputs[0].dtype.is_floating
            if integer and op.inputs[0].dtype.is_floating:
                return self._whole(op)
            return inputs[0]
        if op.type in SAME:
            return inputs[0]
        if op.type in SUMS:
            return self._sum(op.inputs, inputs)
        if op.type in LINEAR:
            return scaled(Reduced(frozenset().union(*(i.parts for i in inputs))))
        return self._whole(op)

    def _sum(self, tensors, inputs):
        parts = frozenset()  # type: frozenset
        for tensor, each in zip(tensors, inputs):
            if each != FIXED_VALUE or not self._is_zero(tensor):
                parts |= each.parts
        return Reduced(parts)

    def _is_zero(self, tensor):
        value = self.value(tensor)
        return value is not None and not value.any()

    def _product(self, op, inputs):
        for place in (0, 1):
            factor, other = op.inputs[place], inputs[1 - place]
            if is_fixed(inputs[place]):
                if isinstance(other, Whole):
                    inverse = self.inverses.get(op.inputs[1 - place].name)
                    if inverse is not None:
                        self.inverses[op.outputs[0].name] = inverse
                    return other
                if isinstance(other, Reduced):
                    return scaled(other)
            inverse = self.inverses.get(factor.name)
            if inverse is not None:
                return self._divided(op, other, inverse)
            if inputs[place] == ROW_COUNT and isinstance(other, Reduced):
                if other.parts == {MEAN}:
                    return ROW_SUM
        if any(isinstance(i, Whole) for i in inputs):
            return next(i for i in inputs if isinstance(i, Whole))
        if any(isinstance(i, Rows) for i in inputs):
            return self._of_rows(op, inputs)
        return self._whole(op)

    def _quotient(self, op, inputs):
        denominator = inputs[1]
        if is_fixed(denominator):
            if isinstance(inputs[0], Reduced):
                return scaled(inputs[0])
            return self._of_rows(op, inputs)
        by = self._denominator(op.inputs[1], denominator)
        if by is not None and is_fixed(inputs[0]):
            self.inverses[op.outputs[0].name] = by
            return self._whole(op)
        if by is not None:
            return self._divided(op, inputs[0], by)
        if isinstance(denominator, Whole):
            return denominator
        if any(isinstance(i, Rows) for i in inputs):
            return self._of_rows(op, inputs)
        return self._whole(op)

    def _denominator(self, tensor, kind):
        """What a mean is weighted by that is a sum divided by this; None if that is no mean."""
        if kind == ROW_COUNT:
            return Denominator(None, None)
        known = self.sums.get(tensor.name)
        if known is None:
            return None
        return Denominator(tensor.name, known)

    def _divided(self, op, numerator, by):
        if isinstance(numerator, Rows) and numerator.per is None:
            rows = self._spread(op, op.outputs[0], [(op.inputs[0], numerator)], numerator)
            return rows._replace(per=by) if isinstance(rows, Rows) else rows
        if numerator == ROW_COUNT and by.tensor is None:
            return FIXED_VALUE
        if isinstance(numerator, Reduced) and numerator.parts <= {SUM, COUNT}:
            return Reduced(frozenset([mean_of(by)]))
        return self._whole(op)

    # Variables and functions --------------------------------------------------------------------

    def _on_variable(self, op, handle, inputs):
        current = self.state.get(handle.key, OLD_VALUE)
        others = [i for i in inputs if i is not handle]
        if op.type in _READS:
            rows = next((i for i in others if isinstance(i, Rows)), None)
            if rows is None or not is_fixed(current):
                return current
            return self._spread(op, op.outputs[0], [], rows)
        if op.type in ("AssignAddVariableOp", "AssignSubVariableOp"):
            added = others[0]
            if isinstance(current, Reduced) and isinstance(added, Reduced):
                self.state[handle.key] = self._sum([op.inputs[0], op.inputs[1]], [current, added])
            else:
                self.state[handle.key] = added if isinstance(added, Whole) else current
        elif op.type == "AssignVariableOp":
            self.state[handle.key] = others[0]
        elif op.type in ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd"):
            added = FIXED_VALUE if all(map(is_fixed, others)) else ROW_SUM
            plain = all(isinstance(i, Rows) and not i.mixed or is_fixed(i) for i in others)
            if plain and isinstance(current, Reduced):
                self.state[handle.key] = Reduced(current.parts | added.parts)
            else:
                self.state[handle.key] = self._whole(op)
        elif "Scatter" in op.type:
            fixed = all(map(is_fixed, others))
            self.state[handle.key] = FIXED_VALUE if fixed else self._whole(op)
        # Random numbers for each row, a variable's shape.
        if op.outputs and self._has_free(op):
            return Rows(free_axes(op.outputs[0])[0], True, None, False)
        return FIXED_VALUE

    def _body(self, op, attribute):
        """The graph of a function, or None where TensorFlow does not show it."""
        name = op.get_attr(attribute).name
        function = self.graph._get_function(name)
        return getattr(function, "graph", None)

    def _inside(self, graph, inputs, state):
        """The outputs of a function; weights inside it are out of reach."""
        kinds = {tensor.name: kind for tensor, kind in zip(graph.inputs, inputs)}
        walk = Walk(graph, kinds, state)
        return [_outside(walk.kind(output)) for output in graph.outputs]

    def _called(self, op, inputs):
        if all(map(is_fixed, inputs)):
            return FIXED_VALUE
        graph = self._body(op, "f")
        if graph is not None and len(graph.inputs) == len(inputs):
            return self._inside(graph, inputs, self.state)
        return self._default(op, inputs)

    def _chosen(self, op, inputs):
        """One of two branches, the same one on each replica if that does not depend on rows."""
        graphs = [self._body(op, name) for name in ("then_branch", "else_branch")]
        if None in graphs:
            return self._default(op, inputs)
        states = [dict(self.state), dict(self.state)]
        branches = [self._inside(g, inputs[1:], s) for g, s in zip(graphs, states)]
        agreed = is_fixed(inputs[0])
        for key in set(states[0]) | set(states[1]):
            pair = [state.get(key, OLD_VALUE) for state in states]
            if pair != [self.state.get(key)] * 2:  # set in one of them at least
                self.state[key] = self._either(op, pair, agreed)
        results = []
        for output, pair in zip(op.outputs, zip(*branches)):
            results.append(self._either(op, list(pair), agreed or bool(free_axes(output))))
        return results

    def _either(self, op, pair, agreed):
        if agreed and pair[0] == pair[1]:
            return pair[0]
        if agreed and all(isinstance(each, Rows) for each in pair):
            axis = pair[0].axis if pair[0].axis == pair[1].axis else None
            even, mixed = pair[0].even and pair[1].even, pair[0].mixed or pair[1].mixed
            return Rows(axis, even, None, mixed) if not pair[0].per else self._whole(op)
        if agreed and all(isinstance(each, Reduced) for each in pair):
            # A variable that one branch leaves alone gets nothing added there.
            means = [each.parts - {OLD, FIXED} for each in pair]
            if means[0] == means[1] or not all(means) and OLD in pair[0].parts & pair[1].parts:
                return Reduced(pair[0].parts | pair[1].parts)
        whole = next((each for each in pair if isinstance(each, Whole)), None)
        return whole or self._whole(op)

    def _default(self, op, inputs):
        inputs = [i for i in inputs if not isinstance(i, Handle)]
        if any(isinstance(i, Rows) for i in inputs):
            return self._of_rows(op, inputs)
        return FIXED_VALUE if all(map(is_fixed, inputs)) else self._whole(op)


def _outside(kind):
    weighted = isinstance(kind, Reduced) and any(part.weight for part in kind.parts)
    if weighted or isinstance(kind, Rows) and kind.per is not None:
        return Whole("within a tf.function, by a mean with a weight of its own", False)
    return kind
