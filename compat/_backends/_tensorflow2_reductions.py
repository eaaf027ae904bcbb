"""How each number that a model computes depends on the rows of the batch, read off its graph.

Devices compute their own rows. A number for all rows (a loss added within the call, a scalar
output, a counter) has to be put together from theirs, and how cannot be told from the numbers: on
an even split a counter of rows and a counter of steps look alike. So the plain call is traced once
more, with an unknown number of rows, and its operations are followed from the batch to the
results, in the order in which they were made. A tensor is

- ``Rows``: it has the batch along an axis;
- ``Sizes``: a shape, some of whose numbers are the number of rows;
- ``Reduced``: linear in sums and means over the rows and in what does not depend on them; or
- ``Whole``: computed from the whole batch in some other way, such as the square of a mean.
"""

from collections import namedtuple

# A tensor with the batch along `axis`, None where that is not known. `even`: it has as many
# elements for each row. `per`: the Denominator that it was divided by. `mixed`: a statistic of the
# whole batch went into each row.
Rows = namedtuple("Rows", "axis even per mixed")
Sizes = namedtuple("Sizes", "places")
Reduced = namedtuple("Reduced", "parts")
# `mixes`: rows are compared with each other.
Whole = namedtuple("Whole", "why mixes")
Handle = namedtuple("Handle", "key")

# What a Reduced consists of. A mean has its weight; None is the number of rows.
Part = namedtuple("Part", "name weight")
# A tensor that is computed from a sum alone: both by name.
Denominator = namedtuple("Denominator", "tensor sum")

OLD, FIXED = Part("old", None), Part("fixed", None)  # a variable's old value; what has no rows
COUNT, SUM, MEAN = Part("count", None), Part("sum", None), Part("mean", None)
MIXED_MEAN = Part("mixed mean", None)  # a mean of rows with a statistic of the batch in each

_OLD, _FIXED = Reduced(frozenset([OLD])), Reduced(frozenset([FIXED]))
_COUNT, _SUM = Reduced(frozenset([COUNT])), Reduced(frozenset([SUM]))
_BATCH = Rows(0, True, None, False)

_SAME = {
    "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PlaceholderWithDefault",
    "PreventGradient", "Reshape", "Snapshot", "Squeeze", "StopGradient",
}  # fmt: skip
_LINEAR = {"BroadcastTo", "Neg", "Pack", "Tile", "ConcatV2", "Transpose", "Unpack", "StridedSlice"}
_SUMS = {"Add", "AddN", "AddV2", "BiasAdd", "Sub"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_REDUCTIONS = {"All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"}
_PRODUCTS = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"}
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_CONDITIONS = {"If", "StatelessIf"}
_ELEMENTWISE = _SUMS | _QUOTIENTS | {
    "Atan2", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual",
    "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "NotEqual", "Pow",
    "Select", "SelectV2", "SquaredDifference", "Xlogy",
}  # fmt: skip


def is_fixed(kind):
    """Whether this is the same on each replica."""
    return isinstance(kind, Reduced) and kind.parts <= {OLD, FIXED}


class Walk:
    """Follows the operations of one graph.

    Arguments:
        kinds: the kinds of the graph's inputs, by the tensors' names.
        state: what became of each variable, by the key of its handle; is written.
        alone: ranges of operations in which mixing rows is meant (batch normalization).
    """

    def __init__(self, graph, kinds, state, alone=()):
        from tensorflow.python.framework import tensor_util

        self.graph = graph
        self.kinds = kinds
        self.state = state
        self.random = set()  # keys of generators' handles
        self.alone = alone
        self.value = tensor_util.constant_value
        self.sums = {}  # name of a tensor -> that of the sum from which alone it is computed
        self.inverses = {}  # name of a tensor -> the Denominator whose inverse it is
        for place, operation in enumerate(graph.get_operations()):
            self.mixing_is_meant = any(first <= place < last for first, last in alone)
            self._follow(operation)

    def kind(self, tensor):
        return self.kinds.get(tensor.name, _FIXED)

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
            if result in (_COUNT, _SUM) and op.type in _REDUCTIONS | {"Size", "StridedSlice"}:
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
            return _FIXED
        if any(isinstance(i, Rows) for i in inputs):
            inputs = [self._beside_rows(t, i) for t, i in zip(op.inputs, inputs)]
        whole = next((i for i in inputs if isinstance(i, Whole)), None)
        if kind in ("Mul", "MulNoNan") and len(inputs) == 2:
            return self._product(op, inputs)
        if kind in _QUOTIENTS and not isinstance(inputs[0], Whole):
            return self._quotient(op, inputs)
        if whole is not None and not (kind.endswith("While") and self._has_free(op)):
            return whole
        if kind == "Shape":
            return self._shape(inputs[0])
        if kind == "Size":
            (rows,) = inputs
            if isinstance(rows, Rows):
                return _COUNT if rows.even else _SUM
        if any(isinstance(i, Sizes) for i in inputs):
            return self._of_sizes(op, inputs)
        if kind == "Pack" and op.outputs[0].dtype.is_integer:
            if any(isinstance(i, Reduced) and COUNT in i.parts for i in inputs):
                return Sizes(frozenset(n for n, i in enumerate(inputs) if not is_fixed(i)))
        if kind in _REDUCTIONS:
            return self._reduced(op, inputs)
        if kind == "L2Loss" and isinstance(inputs[0], Rows):
            return _SUM if inputs[0].per is None and not inputs[0].mixed else self._whole(op)
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
            return _FIXED
        if isinstance(kind, Whole) and tensor.shape.rank is not None and not _free(tensor):
            return Reduced(frozenset([MIXED_MEAN]))
        return kind

    def _whole(self, op, mixes=False):
        return Whole("by the operation {!r} ({})".format(op.name, op.type), mixes)

    # Numbers without rows -----------------------------------------------------------------------

    def _linear(self, op, inputs):
        """An operation on what is reduced, on sizes of its own or not."""
        if op.type == "Cast":
            integer = not op.outputs[0].dtype.is_floating
            if integer and op.inputs[0].dtype.is_floating:
                return self._whole(op)
            return inputs[0]
        if op.type in _SAME:
            return inputs[0]
        if op.type in _SUMS:
            return self._sum(op.inputs, inputs)
        if op.type in _LINEAR:
            return scaled(Reduced(frozenset().union(*(i.parts for i in inputs))))
        return self._whole(op)

    def _sum(self, tensors, inputs):
        parts = frozenset()  # type: frozenset
        for tensor, each in zip(tensors, inputs):
            if each != _FIXED or not self._is_zero(tensor):
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
            if inputs[place] == _COUNT and isinstance(other, Reduced):
                if other.parts == {MEAN}:
                    return _SUM
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
        if kind == _COUNT:
            return Denominator(None, None)
        known = self.sums.get(tensor.name)
        if known is None:
            return None
        return Denominator(tensor.name, known)

    def _divided(self, op, numerator, by):
        if isinstance(numerator, Rows) and numerator.per is None:
            rows = self._spread(op, op.outputs[0], [(op.inputs[0], numerator)], numerator)
            return rows._replace(per=by) if isinstance(rows, Rows) else rows
        if numerator == _COUNT and by.tensor is None:
            return _FIXED
        if isinstance(numerator, Reduced) and numerator.parts <= {SUM, COUNT}:
            return Reduced(frozenset([_mean(by)]))
        return self._whole(op)

    # Rows ---------------------------------------------------------------------------------------

    def _reduced(self, op, inputs):
        """A reduction over the batch, over other axes, or of what has no rows."""
        rows = inputs[0]
        if not isinstance(rows, Rows):
            if op.type in ("Sum", "Mean") and is_fixed(inputs[1]):
                return scaled(rows)
            return self._whole(op)
        axis = self._axis(op.inputs[0], rows)
        kept = op.get_attr("keep_dims")
        # A scalar without axes kept is reduced over all of them. A saved function of a layer may
        # know no more than that: its input's rank is unknown, and so are the axes.
        if kept or op.outputs[0].shape.rank != 0:
            rank = op.inputs[0].shape.rank
            axes = self.value(op.inputs[1])
            if axes is None or rank is None:
                return self._whole(op)
            axes = {int(each) % rank for each in axes.flatten()} if rank else set()
            if axis is None and len(axes) < rank:
                return self._whole(op)
            if axis is not None and axis not in axes:
                before = 0 if kept else sum(1 for other in axes if other < axis)
                return rows._replace(axis=axis - before)
        if op.type == "Sum":
            if rows.mixed:
                return Reduced(frozenset([MIXED_MEAN]))
            return _SUM if rows.per is None else Reduced(frozenset([_mean(rows.per)]))
        if op.type == "Mean" and rows.per is None:
            if rows.mixed:
                return Reduced(frozenset([MIXED_MEAN]))
            if rows.even:
                return Reduced(frozenset([MEAN]))
            if axis is not None:
                return Reduced(frozenset([_mean(self._counted(op.inputs[0], axis))]))
        return self._whole(op)

    def _counted(self, tensor, axis):
        """The length of a tensor along an axis, as a Denominator made for it."""
        import tensorflow as tf

        with self.graph.as_default():
            length = tf.shape(tensor)[axis]
        self.kinds[length.name] = _SUM
        return Denominator(length.name, length.name)

    def _axis(self, tensor, rows):
        """Where the batch is: also where only one axis has an unknown length."""
        free = _free(tensor)
        return free[0] if len(free) == 1 else rows.axis

    def _has_free(self, op):
        return any(_free(output) for output in op.outputs)

    def _of_rows(self, op, inputs):
        """The operation's outputs have rows as well, unless it goes along the batch."""
        kind = op.type
        pairs = [(t, i) for t, i in zip(op.inputs, inputs) if isinstance(i, Rows)]
        tensor, rows = pairs[0]
        axis = self._axis(tensor, rows)
        mixed = any(i.mixed for _, i in pairs)
        even = all(i.even for _, i in pairs) and kind not in ("Where", "Unique", "UniqueV2")
        for each in inputs:  # a statistic of the batch in each row
            if isinstance(each, Reduced) and not is_fixed(each) and each.parts != {COUNT}:
                mixed = mixed or not self.mixing_is_meant
        if kind in _PRODUCTS:
            product = self._matrix_product(op, inputs)
            if product is not None:
                return product
        if kind in ("Softmax", "LogSoftmax") and axis is not None:
            if axis == tensor.shape.rank - 1:
                return self._whole(op, mixes=True)
        if kind == "StridedSlice" and not self._takes_all_rows(op, axis):
            return self._whole(op)
        if kind == "GatherV2" and isinstance(inputs[0], Rows) and not isinstance(inputs[1], Rows):
            if axis is None or self.value(op.inputs[2]) in (None, axis):
                return self._whole(op)
        if kind.startswith("UnsortedSegment"):
            if kind != "UnsortedSegmentSum" and not self._has_free(op):
                return self._whole(op)
            if not self._has_free(op):
                return _SUM
            even = False
        if kind == "Transpose":
            order = self.value(op.inputs[1])
            axis = None if order is None or axis is None else list(order).index(axis)
            return rows._replace(axis=axis)
        per = {i.per for _, i in pairs}
        linear = kind in _SAME | _LINEAR | {"Cast"} | _QUOTIENTS | {"Mul", "MulNoNan"}
        per = per.pop() if len(per) == 1 and (len(pairs) == 1 and linear) else (
            None if per == {None} else "other"
        )  # fmt: skip
        if per == "other":
            return self._whole(op)
        return [
            self._spread(op, output, pairs, Rows(axis, even, per, mixed)) for output in op.outputs
        ]

    def _spread(self, op, output, pairs, rows):
        if output.dtype.name in ("variant", "resource"):
            return rows._replace(axis=None)
        free = _free(output)
        if output.shape.rank is not None and not free:
            return self._whole(op)
        axes = set()
        for tensor, each in pairs:
            axis = self._axis(tensor, each)
            known = axis is not None and None not in (tensor.shape.rank, output.shape.rank)
            if known and op.type in _ELEMENTWISE:
                axis += output.shape.rank - tensor.shape.rank
            axes.add(axis)
        if op.type in _ELEMENTWISE and len(axes - {None}) > 1:
            return self._whole(op, mixes=True)
        if len(free) == 1:
            return rows._replace(axis=free[0])
        (axis,) = axes if len(axes) == 1 else (None,)
        return rows._replace(axis=axis if axis in free else None)

    def _matrix_product(self, op, inputs):
        """A sum over the batch, or rows against rows; None for a product of each row."""
        if not all(isinstance(i, Rows) for i in inputs):
            return None
        names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        (first, second), ranks = inputs, [tensor.shape.rank for tensor in op.inputs]
        if None in ranks or first.axis is None or second.axis is None:
            return None
        places = [self._axis(t, i) - r for t, i, r in zip(op.inputs, inputs, ranks)]
        summed = [-1, -2]
        for side, name in enumerate(names):
            if op.get_attr(name):
                summed[side] = -3 - summed[side]
        if places == summed:
            fine = first.per is None and second.per is None and not (first.mixed or second.mixed)
            return _SUM if fine else self._whole(op)
        if places[0] == places[1] < -2:
            return None
        return self._whole(op, mixes=True)

    def _takes_all_rows(self, op, axis):
        if axis is None:
            return False
        if op.get_attr("new_axis_mask"):
            return self._has_free(op)
        ellipsis = op.get_attr("ellipsis_mask")
        if ellipsis and ellipsis <= 1 << axis:
            if axis == 0:
                return True
            return self._has_free(op)
        strides = self.value(op.inputs[3])
        bit = 1 << axis
        if strides is not None and axis >= len(strides):
            return True
        begins_at_once = op.get_attr("begin_mask") & bit or _at(self.value(op.inputs[1]), axis) == 0
        shrinks = op.get_attr("shrink_axis_mask") & bit
        every = strides is not None and abs(strides[axis]) == 1
        return bool(begins_at_once and op.get_attr("end_mask") & bit and not shrinks and every)

    # Shapes -------------------------------------------------------------------------------------

    def _shape(self, rows):
        if isinstance(rows, Sizes) or isinstance(rows, Reduced):
            return _FIXED  # the shape of a shape, of a number
        if rows.axis is None or not rows.even:
            return Sizes(frozenset([0])) if rows.axis == 0 else Whole("by a shape", False)
        return Sizes(frozenset([rows.axis]))

    def _of_sizes(self, op, inputs):
        import numpy as np

        kind = op.type
        sizes = next(i for i in inputs if isinstance(i, Sizes))
        if kind in ("Cast", "Identity") and len(inputs) == 1:
            return sizes
        if kind in ("StridedSlice", "GatherV2", "Slice") and inputs[0] is sizes:
            length = op.inputs[0].shape[0]
            arguments = [self.value(tensor) for tensor in op.inputs[1:]]
            if length is None or any(argument is None for argument in arguments):
                return self._whole(op)
            places = np.arange(length)
            if kind == "Slice":
                begin, size = int(arguments[0][0]), int(arguments[1][0])
                places = places[begin : begin + size if size >= 0 else None]
            elif kind == "GatherV2":
                places = places[arguments[0]]
            elif op.get_attr("shrink_axis_mask"):
                places = places[int(arguments[0][0])]
            else:
                begin = None if op.get_attr("begin_mask") else int(arguments[0][0])
                end = None if op.get_attr("end_mask") else int(arguments[1][0])
                places = places[begin : end : int(arguments[2][0])]
            if not np.ndim(places):
                return _COUNT if int(places) in sizes.places else _FIXED
            return Sizes(frozenset(n for n, p in enumerate(places) if int(p) in sizes.places))
        if kind == "Prod" and inputs[0] is sizes:
            return _COUNT if sizes.places else _FIXED
        if kind == "ConcatV2":
            found, before = set(), 0
            for tensor, each in zip(op.inputs[:-1], inputs):
                if isinstance(each, Sizes):
                    found |= {before + place for place in each.places}
                if tensor.shape.rank != 1 or tensor.shape[0] is None:
                    return self._whole(op)
                before += tensor.shape[0]
            return Sizes(frozenset(found))
        rows = [i for i in inputs if isinstance(i, Rows)]
        if kind == "Reshape" and isinstance(inputs[0], Reduced):
            return inputs[0]
        if rows:
            return self._of_rows(op, inputs)
        if not sizes.places:
            return _FIXED
        if self._has_free(op):
            # Zeros, random numbers and the like for each row.
            (axis,) = sizes.places if len(sizes.places) == 1 else (None,)
            free = _free(op.outputs[0])
            return Rows(free[0] if len(free) == 1 else axis, True, None, False)
        return self._whole(op)

    # Variables and functions --------------------------------------------------------------------

    def _on_variable(self, op, handle, inputs):
        current = self.state.get(handle.key, _OLD)
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
            added = _FIXED if all(map(is_fixed, others)) else _SUM
            plain = all(isinstance(i, Rows) and not i.mixed or is_fixed(i) for i in others)
            if plain and isinstance(current, Reduced):
                self.state[handle.key] = Reduced(current.parts | added.parts)
            else:
                self.state[handle.key] = self._whole(op)
        elif "Scatter" in op.type:
            fixed = all(map(is_fixed, others))
            self.state[handle.key] = _FIXED if fixed else self._whole(op)
        elif op.type.startswith(("Rng", "Stateful")):
            self.random.add(handle.key)
        # Random numbers for each row, a variable's shape.
        if op.outputs and self._has_free(op):
            return Rows(_free(op.outputs[0])[0], True, None, False)
        return _FIXED

    def _body(self, op, attribute):
        """The graph of a function, or None where TensorFlow does not show it."""
        name = op.get_attr(attribute).name
        function = self.graph._get_function(name)
        return getattr(function, "graph", None)

    def _inside(self, graph, inputs, state):
        """The outputs of a function; weights inside it are out of reach."""
        kinds = {tensor.name: kind for tensor, kind in zip(graph.inputs, inputs)}
        walk = Walk(graph, kinds, state)
        self.random |= walk.random
        return [_outside(walk.kind(output)) for output in graph.outputs]

    def _called(self, op, inputs):
        if all(map(is_fixed, inputs)):
            return _FIXED
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
            pair = [state.get(key, _OLD) for state in states]
            if pair != [self.state.get(key)] * 2:  # set in one of them at least
                self.state[key] = self._either(op, pair, agreed)
        results = []
        for output, pair in zip(op.outputs, zip(*branches)):
            results.append(self._either(op, list(pair), agreed or bool(_free(output))))
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
        return _FIXED if all(map(is_fixed, inputs)) else self._whole(op)


def scaled(kind):
    """Times something, after which nothing is a variable's old value any more."""
    if isinstance(kind, Reduced) and OLD in kind.parts:
        return Reduced(kind.parts - {OLD} | {FIXED})
    return kind


def _mean(by):
    return MEAN if by.tensor is None else Part("mean", by)


def _outside(kind):
    weighted = isinstance(kind, Reduced) and any(part.weight for part in kind.parts)
    if weighted or isinstance(kind, Rows) and kind.per is not None:
        return Whole("within a tf.function, by a mean with a weight of its own", False)
    return kind


def _free(tensor):
    """The axes whose lengths are unknown."""
    if tensor.shape.rank is None:
        return []
    return [axis for axis, length in enumerate(tensor.shape.as_list()) if length is None]


def _at(values, place):
    return None if values is None or place >= len(values) else values[place]


# What to do with the replicas' values ---------------------------------------------------------

ONCE, ADD, AVERAGE = "once", "add", "average"


def rule(kind, state=False):
    """How the replicas' values become the one for all rows.

    Arguments:
        state: whether the value is a variable's.

    Returns:
        One of ``ONCE``, ``ADD`` and ``AVERAGE``, the weight of the average (None: the rows), and
        None; or None, None and the reason why there is no such way, as a phrase.
    """
    if isinstance(kind, Whole):
        return None, None, kind.why
    if isinstance(kind, Rows):
        return None, None, "as rows that are not the first dimension"
    if isinstance(kind, Sizes):
        return None, None, "from the shape of the batch"
    parts = kind.parts - {OLD, FIXED}
    if not parts:
        return ONCE, None, None
    if parts <= {SUM, COUNT}:
        if FIXED in kind.parts or OLD in kind.parts and not state:
            return None, None, "by adding to a sum over the rows what counts once"
        return ADD, None, None
    if parts == {MIXED_MEAN} and state:
        return AVERAGE, None, None
    if MIXED_MEAN in parts:
        return None, None, "from rows that have a statistic of the whole batch in them"
    weights = {part.weight for part in parts}
    if all(part.name == "mean" for part in parts) and len(weights) == 1:
        if OLD in kind.parts and FIXED not in kind.parts and not state:
            return None, None, "by adding a mean to a variable"
        return AVERAGE, weights.pop(), None
    return None, None, "by adding sums and means over the rows, or means with different weights"


# The trace ------------------------------------------------------------------------------------


class Trace:
    """The plain call, traced with an unknown number of rows, and the kinds of its results.

    Arguments:
        function: takes the tensors, returns lists of tensors by name; None stands for none.
        tensors: what the call gets.
        rows: for each of them, whether it has the batch along its first axis. (``None``: yes,
            but not as many elements for each row; ``Sizes``: it is a shape.)
        alone: as for ``Walk``; filled while the function runs.
    """

    def __init__(self, tf, function, tensors, rows, alone=()):
        from tensorflow.python.autograph.core import ag_ctx

        self.tf = tf
        specs = []
        for tensor, has_rows in zip(tensors, rows):
            shape = tensor.shape
            if has_rows in (True, None):
                shape = tf.TensorShape([None] + shape.as_list()[1:])
            specs.append(tf.TensorSpec(shape, tensor.dtype))
        made = []

        def traced(*placeholders):
            made.append((placeholders, function(*placeholders)))
            return list(placeholders) or tf.constant(0)

        # Code that ran eagerly so far has its branches converted, as within a tf.function.
        # No tape takes note of what is computed nowhere.
        with _stop_recording(), ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):
            self.function = _wrapped(traced, specs)
        self.placeholders, results = made[-1]
        graph = self.function.graph
        kinds = {}
        for internal, external in _captures(graph):
            kind = Handle(_key(external)) if internal.dtype.name == "resource" else _FIXED
            kinds[internal.name] = kind
        for tensor, has_rows in zip(self.placeholders, rows):
            if has_rows in (True, None):
                kinds[tensor.name] = _BATCH._replace(even=bool(has_rows))
            elif has_rows:
                kinds[tensor.name] = has_rows
        self.state = {}  # key of a variable -> kind of its new value
        walk = Walk(graph, kinds, self.state, alone)
        self.random = walk.random
        self.kinds = {
            name: [walk.kind(value) if hasattr(value, "name") else _FIXED for value in found]
            for name, found in results.items()
        }

    def of_variable(self, variable):
        """The kind of a variable's value after the call; None if the call does not set it."""
        return self.state.get(_key(variable.handle))

    def is_random(self, variable):
        return _key(variable.handle) in self.random

    def weights(self, weight, shard):
        """A mean's denominator on the rows of a shard, and the sum it is computed from."""
        graph = self.function.graph
        fetches = [graph.get_tensor_by_name(name) for name in weight]
        return self.function.prune(list(self.placeholders), fetches)(*shard)

    def total(self, weight, sums):
        """The denominator on all rows, from the replicas' sums."""
        graph, total = self.function.graph, self.tf.add_n(sums)
        if weight.tensor == weight.sum:
            return total
        fetched = graph.get_tensor_by_name(weight.tensor)
        return self.function.prune([graph.get_tensor_by_name(weight.sum)], fetched)(total)


def _stop_recording():
    """What a tape's method of this name returns, for all tapes."""
    try:
        from tensorflow.python.eager import record
    except ImportError:  # up to TensorFlow 2.12
        from tensorflow.python.eager import tape as record
    return record.stop_recording()


def _wrapped(function, specs):
    """``tf.compat.v1.wrap_function``: in a graph of its name Keras takes no losses."""
    from tensorflow.python.eager import wrap_function
    from tensorflow.python.framework import func_graph

    holder = wrap_function.VariableHolder(function)
    graph = func_graph.func_graph_from_py_func(
        "compat_trace", holder, args=None, kwargs=None, signature=specs,
        add_control_dependencies=False,
    )  # fmt: skip
    return wrap_function.WrappedFunction(graph, variable_holder=holder, signature=specs)


def _captures(graph):
    """Pairs of a tensor within the graph and the one outside that it stands for."""
    return [(internal, external) for external, internal in graph.captures]


def _key(handle):
    """Handles of variables are compared by identity: TensorFlow has no other."""
    return id(handle)
