"""MXNet's graphs in the form of their JSON: nodes, their inputs, and parts cut out of them."""

import json
import warnings
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import mxnet as mx

Entry = Tuple[int, int]  # one output of one node: (number of the node, number of the output)


class Graph:
    """A graph in the form that MXNet writes to JSON, of which parts can be cut out.

    Arguments:
        outputs: symbols whose placements are inferred; none for those of ``symbol``.
        symbol: the group of all values that are to be computed.

    Attributes:
        nodes: as in JSON.
        inputs: the entries that each node has as inputs.
        outputs: the entries of ``outputs``.
        heads: those of ``symbol``.
        auxiliary: the names of auxiliary states.
    """

    def __init__(self, outputs: "List[Any]", symbol: "Any") -> None:
        self.json = json.loads(mx.sym.Group(outputs + [symbol]).tojson())
        self.nodes = [dict(node, attrs=node.get("attrs", {})) for node in self.json["nodes"]]
        self.inputs = [[tuple(i[:2]) for i in node["inputs"]] for node in self.nodes]
        heads = [tuple(head[:2]) for head in self.json["heads"]]
        self.heads = heads[len(outputs) :]
        self.outputs = heads[: len(outputs)] or self.heads
        self.auxiliary = set(symbol.list_auxiliary_states())

    def sparse_gradients(self) -> "Set[str]":
        """Return the names of weights of embeddings whose gradient is row-sparse."""
        return {
            self.nodes[entries[1][0]]["name"]
            for node, entries in zip(self.nodes, self.inputs)
            # A variable or a user-defined operation may have an attribute of that name, too.
            if node["op"] == "Embedding" and node["attrs"].get("sparse_grad") == "True"
        }

    def symbol(self, heads: "List[Entry]", nodes: "Optional[List[Any]]" = None) -> "Any":
        """Return a symbol of entries of this graph, or of other nodes."""
        graph = {"nodes": nodes or self.nodes, "arg_nodes": [], "heads": [h + (0,) for h in heads]}
        return mx.sym.load_json(json.dumps(dict(graph, attrs=self.json.get("attrs", {}))))

    def ancestors(self, entries: "Iterable[Entry]") -> "Set[int]":
        """Return the numbers of the nodes that entries depend on, and of their own."""
        ancestors = {number for number, _ in entries}
        for number in reversed(range(len(self.nodes))):  # a node comes after its inputs
            if number in ancestors:
                ancestors.update(source for source, _ in self.inputs[number])
        return ancestors

    def names_of_inputs(self, number: int) -> "Set[str]":
        """Return the names of the nodes that a node has as inputs, those of variables included."""
        return {self.nodes[source]["name"] for source, _ in self.inputs[number]}

    def custom_gradients(self) -> "List[int]":
        """Return the numbers of the nodes whose gradient is user-defined."""
        return [number for number, node in enumerate(self.nodes) if node["op"] == "Custom"]

    def states(self) -> "Dict[str, str]":
        """Return the operation that writes each of the auxiliary states, by the state's name."""
        return {
            self.nodes[source]["name"]: node["op"]
            for node, entries in zip(self.nodes, self.inputs)
            for source, _ in entries
            if self.nodes[source]["name"] in self.auxiliary
        }


def inferred(infer, symbol, known):
    """Return the shapes or types that a method of a symbol infers.

    Arguments:
        infer: the method.
        symbol: the symbol.
        known: shapes or types by name; those of other variables are ignored.

    Raises:
        UserWarning: they cannot be inferred; MXNet only warns of that.
    """
    names = symbol.list_arguments()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Cannot decide")
        return infer(**{name: value for name, value in known.items() if name in names})
