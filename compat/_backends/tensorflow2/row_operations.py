"""How the batch goes through operations: rules for tensors with rows, and for shapes."""

from .row_kinds import (
    COUNT,
    FIXED_VALUE,
    MEAN,
    MIXED_MEAN,
    ROW_COUNT,
    ROW_SUM,
    Denominator,
    Reduced,
    Rows,
    Sizes,
    Whole,
    free_axes,
    is_fixed,
    mean_of,
    scaled,
)

SAME = {
    "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PlaceholderWithDefault",
    "PreventGradient", "Reshape", "Snapshot", "Squeeze", "StopGradient",
}  # fmt: skip
LINEAR = {"BroadcastTo", "Neg", "Pack", "Tile", "ConcatV2", "Transpose", "Unpack", "StridedSlice"}
SUMS = {"Add", "AddN", "AddV2", "BiasAdd", "Sub"}
QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_PRODUCTS = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"}
_ELEMENTWISE = SUMS | QUOTIENTS | {
    "Atan2", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual",
    "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "NotEqual", "Pow",
    "Select", "SelectV2", "SquaredDifference", "Xlogy",
}  # fmt: skip


class RowOperations:
    """The kinds of the results of operations on tensors with rows, and on shapes.

    Arguments:
        graph: the operations' graph.
        kinds: the kinds of the graph's tensors, by their names, as far as known; is written.
    """

    def __init__(self, graph, kinds):
        from tensorflow.python.framework import tensor_util

        self.graph = graph
        self.kinds = kinds
        self.value = tensor_util.constant_value
        self.mixing_is_meant = False  # in the operation being looked at

    def _whole(self, op, mixes=False):
        return Whole("by the operation {!r} ({})".format(op.name, op.type), mixes)

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
            return ROW_SUM if rows.per is None else Reduced(frozenset([mean_of(rows.per)]))
        if op.type == "Mean" and rows.per is None:
            if rows.mixed:
                return Reduced(frozenset([MIXED_MEAN]))
            if rows.even:
                return Reduced(frozenset([MEAN]))
            if axis is not None:
                return Reduced(frozenset([mean_of(self._counted(op.inputs[0], axis))]))
        return self._whole(op)

    def _counted(self, tensor, axis):
        """The length of a tensor along an axis, as a Denominator made for it."""
        import tensorflow as tf

        with self.graph.as_default():
            length = tf.shape(tensor)[axis]
        self.kinds[length.name] = ROW_SUM
        return Denominator(length.name, length.name)

    def _axis(self, tensor, rows):
        """Where the batch is: also where only one axis has an unknown length."""
        free = free_axes(tensor)
        return free[0] if len(free) == 1 else rows.axis

    def _has_free(self, op):
        return any(free_axes(output) for output in op.outputs)

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
                return ROW_SUM
            even = False
        if kind == "Transpose":
            order = self.value(op.inputs[1])
            axis = None if order is None or axis is None else list(order).index(axis)
            return rows._replace(axis=axis)
        per = {i.per for _, i in pairs}
        linear = kind in SAME | LINEAR | {"Cast"} | QUOTIENTS | {"Mul", "MulNoNan"}
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
        free = free_axes(output)
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
            return ROW_SUM if fine else self._whole(op)
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
            return FIXED_VALUE  # the shape of a shape, of a number
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
                return ROW_COUNT if int(places) in sizes.places else FIXED_VALUE
            return Sizes(frozenset(n for n, p in enumerate(places) if int(p) in sizes.places))
        if kind == "Prod" and inputs[0] is sizes:
            return ROW_COUNT if sizes.places else FIXED_VALUE
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
            return FIXED_VALUE
        if self._has_free(op):
            # Zeros, random numbers and the like for each row.
            (axis,) = sizes.places if len(sizes.places) == 1 else (None,)
            free = free_axes(op.outputs[0])
            return Rows(free[0] if len(free) == 1 else axis, True, None, False)
        return self._whole(op)


def _at(values, place):
    return None if values is None or place >= len(values) else values[place]
