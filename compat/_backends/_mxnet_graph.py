"""MXNet's graphs, taken apart and put together again, for the MXNet backend."""

import json

from .. import errors

OTHERS = "default"  # the group of what was built outside of device()


class Graph:
    """A graph in the form that MXNet writes to JSON, where pieces can be cut out of it.

    An *entry* is one output of one node: (number of the node, number of the output).
    """

    def __init__(self, outputs, symbol):
        import mxnet as mx

        self.json = json.loads(mx.sym.Group(outputs + [symbol]).tojson())
        self.nodes = self.json["nodes"]
        self.inputs = [[tuple(i[:2]) for i in node["inputs"]] for node in self.nodes]
        self.heads = [tuple(head[:2]) for head in self.json["heads"]]

    def sparse_gradients(self):
        """The weights of look-ups that give a gradient with their own rows only."""
        return {
            self.nodes[self.inputs[number][1][0]]["name"]
            for number, node in enumerate(self.nodes)
            if node.get("attrs", {}).get("sparse_grad") == "True"
        }

    def symbol(self, heads, nodes=None):
        import mxnet as mx

        graph = {"nodes": nodes or self.nodes, "arg_nodes": [], "heads": [h + (0,) for h in heads]}
        return mx.sym.load_json(json.dumps(dict(graph, attrs=self.json.get("attrs", {}))))

    def cut(self, outputs, wanted, sharded, shapes):
        """Cut off what can run on shards of the batch.

        Arguments:
            outputs: entries of the model's outputs.
            wanted: entries whose values are wanted.
            sharded: names of the variables whose rows are split.
            shapes: their shapes and those of other variables with a row for each of the batch.

        Returns:
            The body, which gives the entries at the cut; the head, or None; the names that the
            head knows those entries by; and for each wanted entry ("cut", its number at the cut)
            or ("head", its number among the head's outputs).
        """
        self.shapes = shapes
        self.rows = shapes[sharded[0]][0]
        self.depend = set()  # nodes that depend on sharded variables
        for number, node in enumerate(self.nodes):
            if node["op"] == "null":
                depends = node["name"] in sharded
            else:
                depends = any(source in self.depend for source, _ in self.inputs[number])
            if depends:
                self.depend.add(number)
        body = self.ancestors(self.frontier(outputs, self.depend))
        cut = self.frontier(wanted, body & self.depend)
        names = ["compat_cut{}".format(number) for number in range(len(cut))]
        at_cut = {entry: number for number, entry in enumerate(cut)}
        rest = [entry for entry in wanted if entry not in at_cut]
        places = [
            ("cut", at_cut[entry]) if entry in at_cut else ("head", rest.index(entry))
            for entry in wanted
        ]
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

    def frontier(self, entries, inside):
        """The entries with a row for each of the batch, computed by the nodes ``inside``, from
        which ``entries`` follow; the nearest ones. What depends on no row is left out."""
        found, seen, stack = [], set(), list(reversed(entries))
        while stack:
            entry = stack.pop()
            if entry in seen or self.nodes[entry[0]]["op"] == "null":
                continue
            seen.add(entry)
            if entry[0] in inside and self.has_rows(entry):
                found.append(entry)
            else:
                stack.extend(reversed(self.inputs[entry[0]]))
        return found

    def ancestors(self, entries):
        found, stack = set(), [number for number, _ in entries]
        while stack:
            number = stack.pop()
            if number not in found:
                found.add(number)
                stack.extend(source for source, _ in self.inputs[number])
        return found

    def has_rows(self, entry):
        symbol = self.symbol([entry])
        names = symbol.list_arguments()
        known = {name: shape for name, shape in self.shapes.items() if name in names}
        _, (shape,), _ = symbol.infer_shape_partial(**known)
        return bool(shape) and shape[0] == self.rows


def copied_between_groups(symbol):
    """The same graph, with a group for each node, and a copy for each group that uses a value.

    So the gradients of one value are summed on each device first. MXNet's own way, adding each
    to the sum in its place, silently leaves some out where they lie on several devices; and the
    sum for a weight is refused unless it is computed where the weight lies.
    """
    graph = Graph([], symbol)
    states = set(symbol.list_auxiliary_states())
    groups = [node.get("attrs", {}).get("__ctx_group__", OTHERS) for node in graph.nodes]
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
        state = node["op"] == "null" and node["name"] in states
        if state and len(users[len(numbers), 0]) > 1:
            raise errors.state_on_two_devices(node["name"])
        number = add(node, group, [copied(entry, group) for entry in entries])
        if node["op"] == "null" and len(users.get((len(numbers), 0), ())) > 1:
            number = add({"op": "_copy", "name": node["name"] + "_shared"}, group, [(number, 0)])
        numbers.append(number)
    return graph.symbol([(numbers[source], output) for source, output in graph.heads], nodes)
