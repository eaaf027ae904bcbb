"""Gradients of this rank's own rows, marked in a graph of Theano.

A script may compute gradients of other variables than the model's loss, which are not exchanged.
They are marked, so that a step that uses them is found.
"""

from typing import Any, List, Set

from theano import tensor
from theano.compile import SharedVariable
from theano.gof import graph


def marked(variable: "Any", gradient: "Any", line: str) -> "Any":
    """Return the gradient of a variable, marked as that of this rank's rows alone.

    Arguments:
        variable: the shared variable.
        gradient: its gradient, which stays as it is.
        line: the script's line that computes it.
    """
    gradient = tensor.tensor_copy(gradient)
    gradient.tag.compat_of_this_rank = variable, line
    return gradient


def depends_on_rows(cost: "Any", exchanged: "Set[Any]") -> bool:
    """Return whether a cost is computed from a batch, by what is not exchanged.

    Arguments:
        cost: the cost, a variable.
        exchanged: the variables whose values are those of all ranks.
    """
    return any(map(_has_rows, graph.ancestors([cost], exchanged)))


def _has_rows(variable):
    """Return whether a variable brings a batch, or a part of it, into the graph."""
    return (
        variable.owner is None
        and not isinstance(variable, (SharedVariable, graph.Constant))
        and bool(getattr(variable, "ndim", 0))
    )


def lines_of_marked(model: "Any", outputs: "Any", exchanged: "Set[Any]") -> "List[str]":
    """Return the script's lines that computed the marked gradients in outputs.

    Those with respect to the model's weights; the model's loss may contain any.

    Arguments:
        model: the model.
        outputs: what a function returns, or updates.
        exchanged: the variables whose values are those of all ranks.
    """
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    outputs = [output for output in outputs if isinstance(output, graph.Variable)]
    blockers = exchanged | {getattr(model, "total_loss", None)}
    marks = [
        getattr(variable.tag, "compat_of_this_rank", (None, ""))
        for variable in graph.ancestors(outputs, blockers)
    ]
    weights = set(model.weights)
    return list(dict.fromkeys(line for variable, line in marks if variable in weights))
