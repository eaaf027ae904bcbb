"""Stages of a body: parts of its graph, forward and backward, between reductions over the devices.

A value is computed in the last stage that is early enough for all that need it: what the gradients
alone need is not computed in the forward pass.
"""

from typing import Any, Dict, List, NamedTuple, Tuple

from theano.gof import graph

from .graph import depending_on, nearest
from .reductions import AllReduce


class Stage(NamedTuple):
    """A part of a graph, which a device computes without those of the others.

    Attributes:
        inputs: variables of earlier stages, or results of reductions, that it takes.
        outputs: the variables that it computes for reductions, for later stages or as results.
        updates: pairs of a shared variable and its new value.
        reductions: the nodes that are computed after it, over the devices.
    """

    inputs: "List[Any]"
    outputs: "List[Any]"
    updates: "List[Any]"
    reductions: "List[Any]"


def staged(
    values: "List[Any]",
    gradients: "List[Any]",
    updates: "List[Tuple[Any, Any]]",
    leaves: "List[Any]",
    upstream: "List[Any]",
) -> "Tuple[List[Stage], List[Stage]]":
    """Return the stages of the forward pass and those of the backward pass.

    Arguments:
        values: results of the forward pass.
        gradients: those of the backward pass.
        updates: pairs of a shared variable and its new value, of the forward pass.
        leaves: the variables from which values depend on the batch, and states of generators.
        upstream: the variables that are given between the two; none without a backward pass.
    """
    new = [value for _, value in updates]
    nodes = graph.io_toposort([], values + new + gradients)
    forward = 1 + max(_depths(nodes, {})[v] for v in values + new)
    depths = _depths(nodes, dict.fromkeys(upstream, forward))
    count = 1 + max([forward] + [depths.get(v, 0) for v in gradients]) if upstream else forward
    last = {v: forward - 1 for v in values + new}
    last.update((v, count - 1) for v in gradients)
    numbers: "Dict[Any, int]" = {}  # of stages, by node
    reductions: "List[List[Any]]" = [[] for _ in range(count)]
    for node in reversed(nodes):
        if isinstance(node.op, AllReduce):
            number = depths[node.outputs[0]] - 1
            reductions[number].append(node)
        else:
            number = numbers[node] = min(last[v] for v in node.outputs if v in last)
        for variable in node.inputs:
            last[variable] = min(number, last.get(variable, number))
    following = depending_on(leaves + upstream, values + gradients)
    following.difference_update(leaves)

    def number_of(variable):
        """Return the stage that computes a variable; None for results of reductions."""
        is_reduced = variable.owner is not None and isinstance(variable.owner.op, AllReduce)
        return None if is_reduced else numbers.get(variable.owner, last[variable])

    wanted = values + gradients + [v for nodes in reductions for node in nodes for v in node.inputs]
    stages: "List[Stage]" = []
    for number in reversed(range(count)):

        def is_input(variable, number=number):
            if isinstance(variable.owner.op, AllReduce):
                return True
            # A view of another variable would be copied.
            is_view = bool(getattr(variable.owner.op, "view_map", None))
            is_before = number_of(variable) < number
            has_type = variable in following and hasattr(variable, "broadcastable")
            return is_before and has_type and not is_view

        outputs = [v for v in dict.fromkeys(wanted) if number_of(v) == number]
        new_here = [pair for pair in updates if number_of(pair[1]) == number]
        inputs = nearest(outputs + [value for _, value in new_here], is_input)
        wanted += inputs
        by_number = sorted(reductions[number], key=lambda node: (node.op.number, node.op.how))
        stages.insert(0, Stage(inputs, outputs, new_here, by_number))
    return stages[:forward], stages[forward:]


def _depths(nodes, depths):
    """Return by variable the number of reductions before it.

    Arguments:
        nodes: in the order in which they are computed.
        depths: those of variables that are given.
    """
    for node in nodes:
        before = max([depths.get(variable, 0) for variable in node.inputs] or [0])
        depth = before + isinstance(node.op, AllReduce)
        depths.update(dict.fromkeys(node.outputs, depth))
    return depths
