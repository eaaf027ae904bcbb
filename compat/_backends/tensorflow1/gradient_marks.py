"""Marks in a graph of a rank: what is exchanged, and gradients of this rank's own rows.

A script may compute gradients of other tensors than the model's loss, which are not exchanged. They
are marked, so that a step that uses them is found.
"""

from typing import Any, List

from . import graph

# Attributes of operations: the engine through which ranks exchange their values; the variable, and
# the script's line, of a gradient of this rank's rows alone.
_EXCHANGED_BY = "_compat_exchanged_by"
_OF_THIS_RANK = "_compat_of_this_rank"


def identity(variable: "Any") -> "Any":
    """Return what a variable and its handle have in common: the handle, if there is one."""
    return getattr(variable, "handle", variable)


def mark_exchanged(tensor: "Any", engine: "Any") -> None:
    """Mark a tensor whose value is that of all ranks, exchanged through an engine."""
    setattr(tensor.op, _EXCHANGED_BY, engine)  # in v1 mode operations have no ``__dict__``


def exchanging_engine(fetches: "Any") -> "Any":
    """Return the engine through which ranks exchange what is in these, or None."""
    needed = graph.ancestors(_operations(fetches), ())[0]
    marks = (getattr(op, _EXCHANGED_BY, None) for op in needed)
    return next((mark for mark in marks if mark is not None), None)


def marked(variable: "Any", gradient: "Any", line: str) -> "Any":
    """Return the gradient of a variable, marked as that of this rank's rows alone.

    Arguments:
        variable: the variable, or its handle.
        gradient: a tensor, which stays as it is, or ``IndexedSlices``.
        line: the script's line that computes it.
    """
    tf = graph.v1_names()
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = tf.identity(gradient.values), gradient.indices
        gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
    else:
        gradient = tf.identity(gradient)
    setattr(gradient.op, _OF_THIS_RANK, (identity(variable), line))
    return gradient


def depend_on_rows(tensors: "List[Any]") -> bool:
    """Return whether any of these is computed from a batch, by what is not exchanged."""
    return any(map(_takes_rows, graph.ancestors(tensors, _Exchanged())[0]))


def _takes_rows(op):
    """Return whether an operation brings a batch, or a part of it, into the graph."""
    of_weights = op.type in ("Const", "VarHandleOp", "VariableV2")
    return not op.inputs and not of_weights and any(t.shape.ndims != 0 for t in op.outputs)


def lines_of_marked(model: "Any", fetches: "Any") -> "List[str]":
    """Return the script's lines that computed the marked gradients in fetches.

    Those with respect to the model's weights; the model's loss may contain any.
    """
    weights = set(map(identity, model.weights))
    needed = graph.ancestors(_operations(fetches), _ExchangedOrLoss(model))[0]
    marks = [getattr(op, _OF_THIS_RANK) for op in needed if hasattr(op, _OF_THIS_RANK)]
    return list(dict.fromkeys(line for variable, line in marks if variable in weights))


class _Exchanged:
    """The operations whose results are those of all ranks."""

    def __contains__(self, op):
        return hasattr(op, _EXCHANGED_BY)


class _ExchangedOrLoss(_Exchanged):
    """These operations, and the loss of a model."""

    def __init__(self, model):
        self.loss = getattr(getattr(model, "total_loss", None), "op", None)

    def __contains__(self, op):
        return op is self.loss or super().__contains__(op)


def _operations(fetches):
    """Return the operations of tensors, operations and updates of Keras', nested as they may be."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [op for fetch in fetches for op in _operations(fetch)]
    op = getattr(fetches, "op", fetches)
    return [op] if hasattr(op, "inputs") else []
