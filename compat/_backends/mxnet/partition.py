"""A graph cut in two: what runs on shards of the batch, and the rest, whose batch is whole."""

from ... import _rows


def cut(propagation):
    """Cut a graph between what can run on shards of the batch and the rest.

    What an operation across rows gives, and what follows from it, is left to the head, whose
    batch is whole.

    Arguments:
        propagation: the placements of the graph's entries.

    Returns:
        The body, which gives the entries at the cut; the head, or None; the names that the
        head knows those entries by; and for each of the heads its number among the entries at
        the cut and, after them, the head's outputs.
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
    return graph.symbol(cut), head, names, places


def frontier(propagation, entries, inside=None):
    """Return the nearest entries with a row for each of the batch that ``entries`` follow from.

    Variables are left out, and, where ``inside`` is given, what other nodes compute.
    """
    graph = propagation.graph

    def is_found(entry):
        computed = graph.nodes[entry[0]]["op"] != "null"
        return computed and propagation.has_rows(entry) and (inside is None or entry[0] in inside)

    return _rows.nearest(entries, is_found, lambda entry: graph.inputs[entry[0]])
