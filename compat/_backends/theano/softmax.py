"""Softmax over the rows of the whole batch."""

from typing import Any, List, Optional

from theano import tensor
from theano.gradient import disconnected_grad

from ..._rows import Placement, Sharded


def placements(op: "Any", values: "Any") -> "Optional[List[Placement]]":
    """Return the placement of the result; None where the rows are not along the last dimension.

    Arguments:
        op: the ``AppliedOp``.
        values: the ``Value`` of its input.
    """
    rows = values[0].placement
    is_last = isinstance(rows, Sharded) and rows.axis == values[0].rank - 1
    return [rows] if is_last and len(values) == 1 else None


def lowered(body: "Any", node: "Any", inputs: "List[Any]") -> "List[Any]":
    """Return the result of a node, by reductions over the devices of a maximum and a sum.

    Arguments:
        body: the ``BodyGraph``.
        node: the node.
        inputs: its input in that graph.
    """
    (x,) = inputs
    # Whatever is subtracted, the results are the same.
    highest = disconnected_grad(x).max(-1, keepdims=True)
    x = x - disconnected_grad(body.all_reduced("max", highest))
    total = body.all_reduced("sum", tensor.exp(x).sum(-1, keepdims=True))
    is_log = type(node.op).__name__ == "LogSoftmax"
    return [x - tensor.log(total) if is_log else tensor.exp(x) / total]
