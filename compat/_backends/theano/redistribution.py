"""Values of the whole batch that devices gather, and of which they go on with their own rows.

Where an operation mixes rows, each device gathers those of the others, computes its results of the
whole batch, and goes on with its own rows as soon as there is one for each row of the batch. What
is costly is not computed so, but by one device, after the bodies.
"""

from typing import Any, List, Set

from theano.gof import graph

#: By parts of their names: products, convolutions and loops.
_COSTLY = ("Dot", "Conv", "Gem", "Scan")


def is_costly(op: "Any") -> bool:
    """Return whether an operation is worth running on several devices."""
    return any(part in type(op).__name__ for part in _COSTLY)


def is_dense(variable: "Any") -> bool:
    """Return whether a variable is a plain tensor."""
    return hasattr(variable, "broadcastable")


def before_costly(outputs: "List[Any]") -> "Set[Any]":
    """Return the costly nodes before some outputs, and those whose results such nodes need."""
    found: "Set[Any]" = set()
    needed: "Set[Any]" = set()
    for node in reversed(graph.io_toposort([], outputs)):
        if is_costly(node.op) or any(variable in needed for variable in node.outputs):
            found.add(node)
            needed.update(node.inputs)
    return found
