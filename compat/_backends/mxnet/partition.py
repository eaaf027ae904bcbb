"""A graph cut in two: a body that runs on shards of the batch, and a head that runs unsplit."""

from typing import Any, List, NamedTuple

from ... import _rows
from .propagation import Propagation


class Partition(NamedTuple):
    """A graph cut in two.

    Attributes:
        body: a symbol whose outputs are the entries at the cut.
        head: a symbol of the other outputs, or None where the body computes all.
        cuts: the names of the head's variables that stand for the entries at the cut.
        places: for each of the graph's heads, its number among the entries at the cut and, after
            them, the head's outputs.
    """

    body: Any
    head: Any
    cuts: "List[str]"
    places: "List[int]"


def cut(propagation: "Propagation") -> Partition:
    """Cut a graph into a body, which can run on shards of the batch, and a head.

    Cross-batch operations, and all that depend on them, belong to the head, which gets the whole
    batch.

    Arguments:
        propagation: the placements of the graph's entries.
    """
    graph = propagation.graph
    body = graph.ancestors(frontier(propagation, graph.outputs))
    cut = frontier(propagation, graph.heads, body)
    names = [f"compat_cut{number}" for number in range(len(cut))]
    rest = [entry for entry in graph.heads if entry not in cut]
    places = [(cut + rest).index(entry) for entry in graph.heads]
    head = None
    if rest:
        variables = {entry: (len(graph.nodes) + number, 0) for number, entry in enumerate(cut)}
        nodes = [
            dict(node, inputs=[variables.get(entry, entry) + (0,) for entry in entries])
            for node, entries in zip(graph.nodes, graph.inputs)
        ]
        nodes += [{"op": "null", "name": name, "inputs": []} for name in names]
        head = graph.symbol(rest, nodes)
    return Partition(graph.symbol(cut), head, names, places)


def frontier(propagation, entries, inside=None):
    """Return the nearest entries with a row for each of the batch that ``entries`` depend on.

    Variables are left out, and entries of nodes that are not ``inside``, unless that is None.
    """
    graph = propagation.graph

    def is_found(entry):
        computed = graph.nodes[entry[0]]["op"] != "null"
        return computed and propagation.has_rows(entry) and (inside is None or entry[0] in inside)

    return _rows.nearest(entries, is_found, lambda entry: graph.inputs[entry[0]])
