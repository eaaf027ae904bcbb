"""MXNet's graphs, taken apart and put together again, for the MXNet backend."""

import contextlib
import json
import warnings

import mxnet as mx
import numpy as np

from ... import _rows, errors
from ..._rows import REPLICATED, Count, Mixed, Partial, Sharded, Unknown, Value
from . import row_operations
from .operation_rules import SymbolNode
from .running_statistics import MEANS

OTHERS = "default"  # the group of what was built outside of device()
# Two numbers of rows, far from any width and from one another, so that shapes tell what grows
# with the batch.
ROWS = (1009, 2003)


class Graph:
    """A graph in the form that MXNet writes to JSON, where pieces can be cut out of it.

    An *entry* is one output of one node: (number of the node, number of the output).

    Arguments:
        outputs: symbols whose rows are followed; none for those of ``symbol``, which has all that
            is wanted of the graph.
    """

    def __init__(self, outputs, symbol):
        self.json = json.loads(mx.sym.Group(outputs + [symbol]).tojson())
        self.nodes = [dict(node, attrs=node.get("attrs", {})) for node in self.json["nodes"]]
        self.inputs = [[tuple(i[:2]) for i in node["inputs"]] for node in self.nodes]
        heads = [tuple(head[:2]) for head in self.json["heads"]]
        self.heads = heads[len(outputs) :]
        self.outputs = heads[: len(outputs)] or self.heads
        self.auxiliary = set(symbol.list_auxiliary_states())
        self.placements = {}  # type: dict  # by entry, as far as rows were followed
        self._back = set()  # type: set  # nodes whose gradient mixes rows

    def sparse_gradients(self):
        """The weights of look-ups that give a gradient with their own rows only."""
        return {
            self.nodes[self.inputs[number][1][0]]["name"]
            for number, node in enumerate(self.nodes)
            if node["attrs"].get("sparse_grad") == "True"
        }

    def symbol(self, heads, nodes=None):
        graph = {"nodes": nodes or self.nodes, "arg_nodes": [], "heads": [h + (0,) for h in heads]}
        return mx.sym.load_json(json.dumps(dict(graph, attrs=self.json.get("attrs", {}))))

    # How entries depend on the rows of a batch ---------------------------------------------------

    def follow(self, given, shapes, tried=()):
        """Find the placement of each entry that the outputs follow from.

        What no rule tells is taken for rows where its shape has them, and listed in ``untold``:
        ``follow_and_try`` tries it.

        Arguments:
            given: placements of variables, by name; those of weights are left out.
            shapes: by two numbers of rows, the shapes of variables: what grows has rows.
            tried: the nodes of which a trial said that they mix rows.
        """
        numbers = sorted(self.ancestors(self.outputs))
        inputs = [self.inputs[number] for number in numbers]
        self._find_sizes(set(self.outputs).union(*inputs), shapes)
        self.placements, self.untold = {}, []
        # By node that mixes rows: why.
        self._causes = {node: "gradient" if node in self._back else "tried" for node in tried}
        self._origins = {}  # type: dict  # by node: itself, or the reduction that it goes on from
        for number in numbers:
            values = [Value(self.placements[e], self._sizes[e]) for e in self.inputs[number]]
            reduced = [
                self._origins[source]
                for (source, _), value in zip(self.inputs[number], values)
                if isinstance(value.placement, (Count, Partial))
            ]
            self._origins[number] = (reduced + [number])[0]
            found = Mixed() if number in tried else self._by_rule(number, values, given)
            mixed = any(isinstance(value.placement, Mixed) for value in values)
            for entry in self._used[number]:
                placement = found[entry[1]] if isinstance(found, list) else found
                placement = self._agreeing(placement, entry)
                grows = self.grows.get(entry) or ()
                if isinstance(placement, Unknown) and len(grows) == 1:
                    placement = Sharded(grows[0], inner=1 if entry in self._one_each else None)
                    self.untold.append(entry)
                elif isinstance(placement, Unknown):
                    placement, self._causes[number] = Mixed(), "unknown"
                elif isinstance(placement, Mixed) and not mixed:
                    self._causes.setdefault(number, "mixed")
                self.placements[entry] = placement

    def _by_rule(self, number, values, given):
        """The placement of a node's outputs, or a list of those of each."""
        node, first = self.nodes[number], (number, 0)
        if node["op"] == "null":
            return given.get(node["name"], Mixed() if self.grows.get(first) else REPLICATED)
        sources = {self.nodes[source]["name"] for source, _ in self.inputs[number]}
        if node["op"] not in MEANS and not sources.isdisjoint(self.auxiliary):
            return Mixed()  # a state, of which nobody knows how those of devices go together
        operation = SymbolNode(node["attrs"], values, self._sizes.get(first), self.grows.get(first))
        return row_operations.placements(node["op"], operation)

    def _find_sizes(self, entries, shapes):
        """What is known of the entries' shapes: sizes that do not grow, and dimensions that do."""
        entries = sorted(entries)
        symbol, found = self.symbol(entries), []
        for known in shapes.values():
            _, sizes, _ = inferred(symbol.infer_shape_partial, symbol, known)
            found.append(sizes or [()] * len(entries))
        self._sizes, self.grows, self._used = {}, {}, {}  # type: dict, dict, dict
        self._one_each = set()  # entries with as many elements as rows along what grows
        for entry, one, other in zip(entries, *found):
            self._used.setdefault(entry[0], []).append(entry)
            if not (_is_ranked(one) and _is_ranked(other) and len(one) == len(other)):
                self._sizes[entry] = None
                continue
            pairs = list(zip(one, other))
            self._sizes[entry] = tuple(a if a == b and a > 0 else None for a, b in pairs)
            if all(min(pair) > 0 for pair in pairs):
                self.grows[entry] = [axis for axis, (a, b) in enumerate(pairs) if a != b]
                if all(pairs[axis] == tuple(shapes) for axis in self.grows[entry]):
                    self._one_each.add(entry)

    def _agreeing(self, placement, entry):
        """What a rule says, unless the shape says something else: then nothing is known."""
        grows = self.grows.get(entry)
        if grows is None or isinstance(placement, (Mixed, Unknown, Count)):
            return placement
        if grows != ([placement.axis] if isinstance(placement, Sharded) else []):
            return Unknown("its shape grows in other dimensions")
        if isinstance(placement, Sharded) and entry in self._one_each:
            return placement.replace(inner=1)
        return placement

    def follow_and_try(self, given, shapes, compute):
        """Follow the rows, and try what no rule tells, and the outputs, or where they are cut.

        Arguments:
            compute: takes a symbol, and returns the placements of its outputs by ``_rows.trial``.

        Returns:
            The nodes of which the trial says that they mix rows.
        """
        mixing = set()  # type: set
        while True:
            self.follow(given, shapes, mixing)
            asked = self.untold + self.outputs + self.frontier(self.outputs)
            wrong = self._differing(asked, compute) or self._mixing_back()
            if wrong and not wrong.intersection(self.untold):  # a rule is, then: which one?
                inside = self.ancestors(asked)
                wrong |= self._differing((e for e in self.placements if e[0] in inside), compute)
            if not wrong:
                return mixing
            mixing.add(min(wrong)[0])

    def _differing(self, entries, compute):
        entries = sorted(
            entry
            for entry in set(entries)
            if isinstance(self.placements[entry], Sharded) and self.nodes[entry[0]]["op"] != "null"
        )
        tried = zip(entries, compute(self.symbol(entries)) if entries else ())
        return {
            entry
            for entry, found in tried
            if getattr(found, "axis", None) != self.placements[entry].axis
            # What is random tells nothing where a rule is known.
            and (entry in self.untold or not isinstance(found, Unknown))
        }

    def _mixing_back(self):
        """The entries with rows of which a node's own gradient mixes them, or cannot be tried."""
        self._back.update(
            number
            for number in self.own_gradients()
            if (number, 0) in self.placements and self._mixes_back(number)
        )
        return {
            (number, 0)
            for number in self._back
            if not isinstance(self.placements[number, 0], Mixed)
        }

    def _mixes_back(self, number):
        entries, node, result = self.inputs[number], self.nodes[number], (number, 0)
        variables = [
            {"op": "null", "name": "compat_input{}".format(place), "inputs": []}
            for place, _ in enumerate(entries)
        ]
        inputs = [(place, 0, 0) for place, _ in enumerate(entries)]
        symbol = self.symbol([(len(entries), 0)], variables + [dict(node, inputs=inputs)])
        random, count = np.random.RandomState(0), len(_rows.trial.WHOLE)

        def drawn(entry):
            return random.uniform(0.5, 1.5, [size or count for size in self._sizes[entry] or ()])

        def rows_of(array, axis, rows):
            return array if axis is None else np.take(array, rows, axis)

        axes = [getattr(self.placements[entry], "axis", None) for entry in entries + [result]]
        given = [drawn(entry) for entry in entries]
        # What comes back to an output without rows is a sum over them.
        upstream = drawn(result) if axes[-1] is not None else [drawn(result) for _ in range(count)]

        def compute(rows):
            values = [mx.nd.array(rows_of(*pair, rows=rows)) for pair in zip(given, axes)]
            gradients = [mx.nd.zeros(value.shape) for value in values]
            back = rows_of(upstream, axes[-1] or 0, rows)
            executor = symbol.bind(mx.cpu(), values, gradients)
            executor.forward(is_train=True)
            executor.backward(mx.nd.array(back if axes[-1] is not None else sum(back)))
            return [gradient.asnumpy() for gradient in gradients]

        try:
            found = _rows.trial.tried(compute)
        except Exception:  # whatever an operation of the user's does
            clear_errors()
            return True
        return any(
            getattr(each, "axis", None) != axis or axis is None and each != Partial("sum")
            for each, axis in zip(found, axes)
        )

    def across(self, outputs, with_rows=True):
        """The first operation that mixes rows, if outputs follow from one (with rows), or None.

        Or an output whose rows are not those of the first axis, one for each of the batch.
        """
        for entry in outputs:
            has_rows = self.grows.get(entry) != []
            if isinstance(self.placements[entry], Sharded) and not self.has_rows(entry):
                return _rows.Across(self.nodes[entry[0]]["name"])
            if isinstance(self.placements[entry], Mixed) and (has_rows or not with_rows):
                first = min(self._causes)
                node = self.nodes[self._origins.get(first, first)]
                return _rows.Across(node["name"], why=self._causes[first])
        return None

    def has_rows(self, entry):
        """Whether an entry has a row for each of the batch, each computed by itself."""
        return self.placements.get(entry) == Sharded(0)

    # Cutting --------------------------------------------------------------------------------------

    def cut(self):
        """Cut off what can run on shards of the batch, by the placements that ``follow`` found.

        What an operation across rows gives, and what follows from it, is left to the head, whose
        batch is whole.

        Returns:
            The body, which gives the entries at the cut; the head, or None; the names that the
            head knows those entries by; and for each of the heads its number among the entries at
            the cut and, after them, the head's outputs.
        """
        body = self.ancestors(self.frontier(self.outputs))
        cut = self.frontier(self.heads, body)
        names = ["compat_cut{}".format(number) for number in range(len(cut))]
        at_cut = {entry: number for number, entry in enumerate(cut)}
        rest = [entry for entry in self.heads if entry not in at_cut]
        places = [(cut + rest).index(entry) for entry in self.heads]
        head = None
        if rest:
            # New variables stand first, so every other node's number grows by their count.
            def shifted(entry):
                return (at_cut[entry], 0) if entry in at_cut else (entry[0] + len(cut), entry[1])

            nodes = [{"op": "null", "name": name, "inputs": []} for name in names] + [
                dict(node, inputs=[shifted(entry) + (0,) for entry in entries])
                for node, entries in zip(self.nodes, self.inputs)
            ]
            head = self.symbol([shifted(entry) for entry in rest], nodes)
        return self.symbol(cut), head, names, places

    def frontier(self, entries, inside=None):
        """The nearest entries with a row for each of the batch that ``entries`` follow from.

        Variables are left out, and, where ``inside`` is given, what other nodes compute.
        """
        found, seen, stack = [], set(), list(reversed(entries))
        while stack:
            entry = stack.pop()
            if entry in seen or self.nodes[entry[0]]["op"] == "null":
                continue
            seen.add(entry)
            if self.has_rows(entry) and (inside is None or entry[0] in inside):
                found.append(entry)
            else:
                stack.extend(reversed(self.inputs[entry[0]]))
        return found

    def ancestors(self, entries):
        """The nodes that entries follow from, which stand before those that use them."""
        found = {number for number, _ in entries}
        for number in reversed(range(len(self.nodes))):
            if number in found:
                found.update(source for source, _ in self.inputs[number])
        return found

    def own_gradients(self):
        """The nodes whose gradient is a function of the user's."""
        return [number for number, node in enumerate(self.nodes) if node["op"] == "Custom"]

    def states(self):
        """The operation that writes each of the auxiliary states, by its name."""
        return {
            self.nodes[source]["name"]: node["op"]
            for node, entries in zip(self.nodes, self.inputs)
            for source, _ in entries
            if self.nodes[source]["name"] in self.auxiliary
        }


def clear_errors():
    """Have MXNet's engine raise what is left of an error here, and not when others are waited for.

    What it computes in the background fails there, and some later read raises it once more.
    """
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


def inferred(infer, symbol, known):
    """What a method of a symbol infers from what is known of its arguments, by name.

    Raises:
        UserWarning: it does not follow; MXNet only warns of that.
    """
    names = symbol.list_arguments()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Cannot decide")
        return infer(**{name: value for name, value in known.items() if name in names})


def _is_ranked(shape):
    """Whether the number of dimensions is known; ``()`` is a number in MXNet's numpy mode only."""
    return shape is not None and (shape != () or mx.util.is_np_shape())


def copied_between_groups(symbol):
    """The same graph, with a group for each node, and a copy for each group that uses a value.

    So the gradients of one value are summed on each device first. MXNet's own way, adding each
    to the sum in its place, silently leaves some out where they lie on several devices; and the
    sum for a weight is refused unless it is computed where the weight lies.
    """
    graph = Graph([], symbol)
    groups = [node["attrs"].get("__ctx_group__", OTHERS) for node in graph.nodes]
    users = {}
    for group, entries in zip(groups, graph.inputs):
        for entry in entries:
            users.setdefault(entry, {groups[entry[0]]}).add(group)
    nodes, numbers, copies = [], [], {}

    def add(node, group, inputs):
        attributes = dict(node.get("attrs", {}), __ctx_group__=group)
        nodes.append(dict(node, attrs=attributes, inputs=[entry + (0,) for entry in inputs]))
        return len(nodes) - 1

    def copied(entry, group):
        source, output = entry
        if len(users[entry]) == 1:
            return numbers[source], output
        if (entry, group) not in copies:
            name = "{}_{}_on_{}".format(graph.nodes[source]["name"], output, group)
            copy = {"op": "_copy", "name": name}
            copies[entry, group] = add(copy, group, [(numbers[source], output)])
        return copies[entry, group], 0

    for node, group, entries in zip(graph.nodes, groups, graph.inputs):
        is_shared = node["op"] == "null" and len(users.get((len(numbers), 0), ())) > 1
        if is_shared and node["name"] in graph.auxiliary:
            raise errors.UnsupportedError(
                "{} is used on several devices, and MXNet would keep only what one of them "
                "computes of it. Call the layer inside one compat.device() only.".format(
                    node["name"]
                )
            )
        number = add(node, group, [copied(entry, group) for entry in entries])
        if is_shared:
            number = add({"op": "_copy", "name": node["name"] + "_shared"}, group, [(number, 0)])
        numbers.append(number)
    return graph.symbol([(numbers[source], output) for source, output in graph.heads], nodes)
