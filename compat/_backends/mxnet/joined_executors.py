"""One executor of the graphs of all replicas, in which they exchange batch statistics.

Executors of MXNet cannot wait for each other. So a graph is repeated for each replica, on its
context, and batch normalization between them is replaced by moments that are merged once.
"""

import ast
import itertools
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Sequence, Set, Union

import mxnet as mx
import numpy as np

from ... import _keras
from ..._runtime import synchronized as requests
from . import batch_norm
from .graph import Entry, Graph, inferred

Requested = Union[bool, FrozenSet[str]]  # see ``synchronized``

_INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var")


def requested(model: "Any") -> "Requested":
    """Return which batch normalization of a Keras model is to use the whole batch's statistics."""
    if requests.is_asked(model):
        return True
    layers = _keras.all_layers_of_keras2(model)  # of models within, which ask for their own
    asking = [layer for layer in layers if requests.is_asked(layer) or requests.asks(layer)]
    return frozenset(weight.name for layer in asking for weight in layer.weights)


def synchronized(graph: "Graph", wanted: "Requested") -> "Set[int]":
    """Return the numbers of a graph's nodes that use the whole batch's statistics in training.

    Arguments:
        graph: a ``Graph``.
        wanted: whether all batch normalization, or the names of variables of that which is to;
            operations that do so by themselves always do.
    """
    return {
        number
        for number, node in enumerate(graph.nodes)
        if (node["op"] in batch_norm.SYNCHRONIZED or _is_wanted(graph, number, wanted))
        and not attribute(node, "use_global_stats", False)
    }


def _is_wanted(graph, number, wanted):
    if graph.nodes[number]["op"] not in batch_norm.NORMALIZING or not wanted:
        return False
    return wanted is True or not wanted.isdisjoint(graph.names_of_inputs(number))


def refused(graph: "Graph", wanted: "Requested", types: "Dict[str, Any]") -> "List[int]":
    """Return those of them that several executors cannot run together.

    Arguments:
        graph: as for ``synchronized``.
        wanted: likewise.
        types: of variables, by name, as far as they are known.
    """
    numbers = sorted(synchronized(graph, wanted))
    kinds = _types(graph, numbers, types)
    return [
        number
        for number in numbers
        if graph.nodes[number]["op"] == "BatchNorm_v1"
        or attribute(graph.nodes[number], "output_mean_var", False)
        or not _is_copied(kinds[number])
    ]


def _types(graph, numbers, known):
    """Return the type of the data of nodes that normalize, by the nodes' numbers."""
    if not numbers:
        return {}
    data = graph.symbol([graph.inputs[number][0] for number in numbers])
    return dict(zip(numbers, inferred(data.infer_type, data, known)[1] or itertools.repeat(None)))


def _is_copied(dtype):
    """Return whether executors can copy arrays between contexts: before MXNet 1.7, of float32."""
    dtype = "float32" if dtype is None or np.dtype(dtype) == "float16" else dtype
    try:
        copy = mx.sym._internal._CrossDeviceCopy(data=mx.sym.var("data"))
        if hasattr(copy, "_infer_type_impl"):  # the other one prints its arguments
            return copy._infer_type_impl(False, data=np.dtype(dtype))[0] is not None
        return copy.infer_type(data=np.dtype(dtype))[0] is not None
    except mx.base.MXNetError:
        return False


def attribute(node: "Any", name: str, default: "Any") -> "Any":
    """Return the value of an attribute that a node has as a text, or the default."""
    value = node["attrs"].get(name)
    return default if value is None else ast.literal_eval(value.capitalize())


class Replica(NamedTuple):
    """One replica's part of the executor of all.

    Attributes:
        context: the replica's.
        shapes: of its inputs, by name.
        arguments, gradients, states: arrays by name.
        groups: the contexts of parts of the graph, by ``ctx_group``.
    """

    context: Any
    shapes: "Dict[str, Any]"
    arguments: "Dict[str, Any]"
    gradients: "Dict[str, Any]"
    states: "Dict[str, Any]"
    groups: "Dict[str, Any]" = {}


class JoinedExecutor:
    """An executor of a graph for all replicas, which share the arrays of their own executors.

    Arguments:
        symbol: the graph of one replica.
        wanted: as for ``synchronized``.
        replicas: those that have rows.
        requests: what becomes of gradients, by name; all others are written.
    """

    def __init__(
        self,
        symbol: "Any",
        wanted: "Requested",
        replicas: "Sequence[Replica]",
        requests: "Dict[str, str]",
    ) -> None:
        graph = _JoinedGraph(Graph([], symbol), wanted, replicas)

        def named(kind):
            return {
                _named(number, name): value
                for number, replica in enumerate(replicas)
                for name, value in getattr(replica, kind).items()
            }

        gradients, groups = named("gradients"), named("groups")
        groups.update((_named(n, ""), replica.context) for n, replica in enumerate(replicas))
        written = {
            _named(number, name): requests.get(name, "write")
            for number, replica in enumerate(replicas)
            for name in replica.gradients
        }
        self.executor = graph.symbol.bind(
            replicas[0].context,
            named("arguments"),
            args_grad=gradients,
            grad_req={name: written.get(name, "null") for name in named("arguments")},
            aux_states=named("states"),
            group2ctx=groups,
        )
        self.count = len(symbol.list_outputs())
        self.replicas = [
            ReplicaExecutor(self, number, number + 1 == len(replicas), replica)
            for number, replica in enumerate(replicas)
        ]


class ReplicaExecutor:
    """One replica's part of a ``JoinedExecutor``, as an executor of its own has it.

    All of them compute when the last one is to.
    """

    def __init__(self, joined, number, is_last, replica):
        self._joined, self._is_last = joined, is_last
        self._outputs = slice(number * joined.count, (number + 1) * joined.count)
        self._upstream: "List[Any]" = []
        self.arg_dict, self.grad_dict = replica.arguments, replica.gradients
        self.aux_dict = replica.states

    @property
    def outputs(self) -> "List[Any]":
        """The replica's outputs."""
        return self._joined.executor.outputs[self._outputs]

    def forward(self, is_train: bool = False, **arrays: "Any") -> "List[Any]":
        """Take inputs, and compute if this is the last replica."""
        for name, array in arrays.items():
            self.arg_dict[name][:] = array
        if self._is_last:
            self._joined.executor.forward(is_train=is_train)
        return self.outputs

    def backward(self, out_grads: "Any" = ()) -> None:
        """Take gradients of the outputs, and compute if this is the last replica."""
        self._upstream = list(out_grads or ())
        if self._is_last:
            replicas = self._joined.replicas
            self._joined.executor.backward([g for replica in replicas for g in replica._upstream])


def _named(number, name):
    """Return the name of a replica's variable, node or group."""
    return f"compat{number}_{name}"


class _JoinedGraph:
    """A graph, repeated for each replica."""

    def __init__(self, graph, wanted, replicas):
        self.graph, self.replicas = graph, replicas
        self.nodes: "List[Any]" = []
        self.places: "List[Dict[Entry, Entry]]" = [{} for _ in replicas]
        chosen = synchronized(graph, wanted)
        self._data = self._described(sorted(chosen))
        for number, node in enumerate(graph.nodes):
            if number in chosen:
                self._synchronize(number, node)
            else:
                self._repeat(number, node)
        heads = [places[head] for places in self.places for head in graph.heads]
        self.symbol = graph.symbol(heads, self.nodes)

    def _described(self, numbers):
        """Return, by node: the type of its data, and the shapes that replicas have of them."""
        arguments = self.replicas[0].arguments.items()
        types = _types(self.graph, numbers, {name: array.dtype for name, array in arguments})
        data = self.graph.symbol([self.graph.inputs[number][0] for number in numbers])
        shapes = [inferred(data.infer_shape, data, replica.shapes)[1] for replica in self.replicas]
        return {number: (types[number], shape) for number, shape in zip(numbers, zip(*shapes))}

    def _repeat(self, number, node):
        for replica, places in enumerate(self.places):
            attributes = dict(node["attrs"])
            group = attributes.get("__ctx_group__")
            group = "" if group not in self.replicas[replica].groups else group
            attributes["__ctx_group__"] = _named(replica, group)
            inputs = [places[entry] + (0,) for entry in self.graph.inputs[number]]
            name = _named(replica, node["name"])
            copied = dict(node, name=name, attrs=attributes, inputs=inputs)
            for output in self._outputs(number):
                places[number, output] = len(self.nodes), output
            self.nodes.append(copied)

    def _outputs(self, number):
        """Return the outputs of a node that are used."""
        entries = [entry for entries in self.graph.inputs for entry in entries] + self.graph.heads
        return sorted({output for source, output in entries if source == number})

    def _synchronize(self, number, node):
        """Replace a node by one that normalizes by the statistics of all replicas."""
        symbol = _normalized(node, *self._data[number], self.replicas)

        def source(name, replica):
            return self.places[replica][inputs_of(self.graph, number)[name]]

        heads = append(self.nodes, symbol, source, node["name"])
        for places, head in zip(self.places, heads):
            places[number, 0] = head


def append(
    nodes: "List[Any]", symbol: "Any", source: "Callable[[str, int], Entry]", name: str
) -> "List[Entry]":
    """Append the nodes of a symbol to a graph's, and return the entries of its outputs.

    Arguments:
        nodes: the graph's.
        symbol: its variables are those of ``variables()``.
        source: returns the entry that is one of these, by the input's name and the replica.
        name: a part of the nodes' names.
    """
    part = Graph([], symbol)
    entries: "Dict[Entry, Entry]" = {}
    for place, node in enumerate(part.nodes):
        if node["op"] == "null":
            variable, _, replica = node["name"].rpartition("_")
            entries[place, 0] = source(variable, int(replica))
            continue
        inputs = [entries[entry] + (0,) for entry in part.inputs[place]]
        for output in range(3):  # as many as an operation has here
            entries[place, output] = len(nodes), output
        nodes.append(dict(node, name=f"compat_{name}_{place}", inputs=inputs))
    return [entries[head] for head in part.heads]


def variables(replica: int) -> "List[Any]":
    """Return the variables that stand for the inputs of batch normalization."""
    return [mx.sym.var(f"{name}_{replica}") for name in _INPUTS]


def inputs_of(graph: "Graph", number: int) -> "Dict[str, Entry]":
    """Return the entries that a node that normalizes has as inputs, by name."""
    return dict(zip(_INPUTS, graph.inputs[number]))


def attributes_of(node: "Any") -> "Dict[str, Any]":
    """Return those of batch normalization: see ``batch_norm.normalized``."""
    return {name: attribute(node, name, value) for name, value in batch_norm.DEFAULTS.items()}


def _normalized(node, dtype, shapes, replicas):
    """Return the symbol of a node for all replicas, of variables that are named for its inputs.

    Arguments:
        node: the node.
        dtype: of its data.
        shapes: of each replica's.
        replicas: the replicas.
    """
    F, axis = mx.sym, attribute(node, "axis", 1)
    attributes = attributes_of(node)
    counts = [int(np.prod(shape, dtype="int64")) // shape[axis] for shape in shapes]
    is_off = attribute(node, "cudnn_off", False)
    inputs, moments, results = [], [], []
    is_low = np.dtype(dtype) == "float16"
    for replica in range(len(shapes)):
        with mx.AttrScope(ctx_group=_named(replica, "")):
            data, *others = variables(replica)
            data = F.Cast(data, dtype="float32") if is_low else data
            inputs.append([data] + others)
            moments.append(batch_norm.moments(F, data, axis))
    pairs = [(F.reshape(mean, shape=(-1,)), variance) for mean, variance in moments]
    with mx.AttrScope(ctx_group=_named(0, "")):
        statistics = batch_norm.merged_moments(pairs, counts)
    for replica, (like, _) in enumerate(moments):
        with mx.AttrScope(ctx_group=_named(replica, "")):
            # Copied from the neighbour's.
            statistics = [F.identity(value) for value in statistics]
            correction = batch_norm.correction(replicas[replica].context, is_off, sum(counts))
            result = batch_norm.normalized(
                F, inputs[replica], statistics, like, axis, attributes, correction
            )
            if node["op"] == "_contrib_BatchNormWithReLU":
                result = F.relu(result)
            results.append(F.Cast(result, dtype="float16") if is_low else result)
    return F.Group(results)
