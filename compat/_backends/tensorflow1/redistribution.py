"""Values of the whole batch that are gathered from replicas, and values that are split again.

An operation that mixes rows is computed once, of the rows of all replicas. Where what is computed
from it again has one row for each row of the batch, the replicas go on with their shards of that.
Its sizes are inferred by TensorFlow for several numbers of rows, in a graph apart, and checked in
each run.
"""

import contextlib
from typing import Any, Callable, Dict, Iterable, List

from ..._rows import LARGEST, SAMPLES, Placement, Sharded, resharding
from .._tensorflow.graph import sizes_of, v1_names
from . import graph

_COSTLY = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "SparseTensorDenseMatMul")


def is_costly(op: "Any") -> bool:
    """Return whether an operation is worth running on all devices, for a loss alone, too."""
    return op.type.startswith(_COSTLY)


def can_be_gathered(tensor: "Any", placement_of: "Callable[[Any], Placement]") -> bool:
    """Return whether a tensor with rows is cheap to have of the whole batch.

    Where its rows are not its first dimension, it is computed again, from tensors where they are.
    """
    pending = [tensor]
    for source in pending:  # which grows meanwhile
        placement = placement_of(source)
        if not graph.is_outermost(source.op):
            return False
        if isinstance(placement, Sharded) and (placement.axis, placement.copies) == (0, 1):
            continue
        if is_costly(source.op) or source.op.op_def is None or source.op.op_def.is_stateful:
            return False
        pending += [t for t in source.op.inputs if isinstance(placement_of(t), Sharded)]
    return True


class WholeShapes:
    """Shapes of tensors of the whole batch, for several numbers of rows.

    Arguments:
        operations: those that compute the tensors.
        placement_of: a function that returns the placement of a tensor.
    """

    def __init__(
        self, operations: "Iterable[Any]", placement_of: "Callable[[Any], Placement]"
    ) -> None:
        self._placement_of = placement_of
        self._operations, consumers = graph.ancestors(operations, (), self._is_known)
        self._sources = [source for source in consumers if self._is_known(source)]
        self._results: "Dict[int, Dict[Any, Any]]" = {}
        for rows in SAMPLES:
            # Groups of rows may not divide these, and functions are not imported.
            with contextlib.suppress(Exception):
                self._results[rows] = self._inferred(rows)

    def placement(self, tensor: "Any") -> "Any":
        """Return the placement with which replicas can go on from a tensor, or None."""
        results = [(rows, found.get(tensor.op)) for rows, found in self._results.items()]
        shapes = {
            rows: sizes_of(op.outputs[tensor.value_index]) for rows, op in results if op is not None
        }
        placement = resharding(shapes)
        if placement is None or isinstance(placement, Sharded):
            return placement
        return placement if _product(self.sizes(tensor)) <= LARGEST else None

    def sizes(self, tensor: "Any") -> "List[int]":
        """Return the sizes of a tensor that do not depend on the number of rows."""
        op = self._results[SAMPLES[-1]][tensor.op]
        return sizes_of(op.outputs[tensor.value_index])  # type: ignore[return-value]

    def _is_known(self, source):
        is_tensor = hasattr(source, "op")
        known = is_tensor and isinstance(self._placement_of(source), Sharded)
        return known and graph.is_outermost(source.op) and source.shape.ndims is not None

    def _inferred(self, rows):
        """Return operations of a graph apart, by the operations that they are copies of."""
        tf, copied = v1_names(), set(self._operations)
        definition = tf.GraphDef()
        operations = sorted(copied, key=lambda op: op._id)
        definition.versions.CopyFrom(operations[0].graph.graph_def_versions)
        for op in operations:
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)
            node.device = ""
            for other in op.control_inputs:
                if other not in copied:
                    node.input.remove("^" + other.name)
        with tf.Graph().as_default():
            given = {}
            for tensor in self._sources:
                placement, sizes = self._placement_of(tensor), sizes_of(tensor)
                inner = placement.inner
                sizes[placement.axis] = inner and rows * inner * placement.copies
                given[tensor.name] = tf.placeholder(tensor.dtype, sizes)
            names = [op.name for op in operations]
            results = tf.import_graph_def(definition, given, names, name="whole")
        return dict(zip(operations, results))


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result
