"""MXNet's graphs, taken apart and put together again, for the MXNet backend."""

import contextlib
import json
import re
import warnings

from ... import errors

OTHERS = "default"  # the group of what was built outside of device()
# Two numbers of rows, far from any width, so that shapes tell what grows with the batch.
ROWS = (1009, 1013)


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

        What an operation across rows gives, and what follows from it, is left to the head, whose
        batch is whole.

        Arguments:
            outputs: entries of the model's outputs.
            wanted: entries whose values are wanted.
            sharded: names of the variables whose rows are split.
            shapes: by number of rows, their shapes and those of other variables with a row for
                each of the batch; for two numbers, or for the only one that the model can have.

        Returns:
            The body, which gives the entries at the cut; the head, or None; the names that the
            head knows those entries by; and for each wanted entry ("cut", its number at the cut)
            or ("head", its number among the head's outputs).
        """
        depend, whole = self.follow(outputs, sharded, shapes, wanted)
        body = self.ancestors(self.frontier(outputs, depend - whole))
        cut = self.frontier(wanted, body & depend)
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
            if entry[0] in inside and self.rows.come_first(entry):
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

    def follow(self, outputs, sharded, shapes, wanted=()):
        """Follow the rows of a batch; the arguments are those of ``cut``.

        Returns:
            The nodes that depend on the sharded variables; and those of them that need rows of
            other shards, or follow from what does. That is found by shapes: a sum over the batch
            has no rows, a product of all pairs has them twice.
        """
        depend, whole = set(), set()
        self.rows = _Rows(self, outputs + list(wanted), shapes)
        self.across_rows = None  # the name of an operation that outputs with rows follow from
        reached = self.ancestors(outputs)
        for number, node in enumerate(self.nodes):
            sources = [source for source, _ in self.inputs[number]]
            if node["op"] == "null":
                if node["name"] in sharded:
                    depend.add(number)
            elif depend.intersection(sources):
                depend.add(number)
                if whole.intersection(sources):
                    whole.add(number)
                elif number in reached and self.rows.are_mixed_by(number):
                    whole.add(number)
                    self.across_rows = self.across_rows or node["name"]
        if not any(entry[0] in whole and self.rows.in_any_axis(entry) for entry in outputs):
            self.across_rows = None
        return depend, whole

    def states(self, names):
        """The operation that writes each of the auxiliary states ``names``."""
        return {
            self.nodes[source]["name"]: node["op"]
            for node, entries in zip(self.nodes, self.inputs)
            for source, _ in entries
            if self.nodes[source]["name"] in names
        }


class _Rows:
    """Where the entries of a graph have rows of the batch, and which operations mix them."""

    # Operations along an axis of which shapes do not tell: the operand that they go along, None for
    # any, and their ``axis`` where it is not said, None for all elements as one list.
    ALONG = {
        "softmax": (0, -1),
        "log_softmax": (0, -1),
        "softmin": (0, -1),
        "sort": (0, -1),
        "argsort": (0, -1),
        "reverse": (0, 0),
        "RNN": (0, 0),
        "SequenceMask": (0, 0),
        "SequenceReverse": (0, 0),
        "cumsum": (0, None),
        "_shuffle": (0, 0),
        "_contrib_arange_like": (0, None),
        "take": (0, 0),
        "gather_nd": (0, 0),
        "Embedding": (1, 0),
        "Concat": (None, 1),
    }
    # Operations that use the shape only of an operand, and which.
    BY_SHAPE = {"slice_like": 1, "_contrib_arange_like": 0, "_contrib_MultiBoxPrior": 0}

    def __init__(self, graph, heads, shapes):
        self.graph = graph
        entries = set(heads).union(*graph.inputs)
        self.outputs = {}
        for number, output in entries:
            self.outputs.setdefault(number, []).append((number, output))
        entries = sorted(entries)
        symbol = graph.symbol(entries)
        names = symbol.list_arguments()
        self.counts = list(shapes)
        self.shapes = []
        for known in shapes.values():
            given = {name: shape for name, shape in known.items() if name in names}
            _, inferred, _ = symbol.infer_shape_partial(**given)
            self.shapes.append(dict(zip(entries, inferred or [()] * len(entries))))

    def axes(self, entry):
        """The axes of an entry that grow with the batch, or None where that is not known."""
        found = [shapes[entry] for shapes in self.shapes]
        if not all(map(_is_known, found)):
            return None
        if len(found) == 1:  # only those that have just its length
            return [axis for axis, size in enumerate(found[0]) if size == self.counts[0]]
        if len(found[0]) != len(found[1]):
            return None
        return [axis for axis, (one, two) in enumerate(zip(*found)) if one != two]

    def come_first(self, entry):
        """Whether an entry has a row for each of the batch."""
        return all(shapes[entry][:1] == (count,) for shapes, count in zip(self.shapes, self.counts))

    def in_any_axis(self, entry):
        axes = self.axes(entry)
        return axes is None or bool(axes)

    def are_mixed_by(self, number):
        """Whether what a node gives for one row depends on other rows; if that can be told."""
        node = self.graph.nodes[number]
        given = [self.axes(entry) for entry in self.graph.inputs[number]]
        if not any(given) or len(self.shapes) == 1:
            return False
        by_shape = self.BY_SHAPE.get(node["op"])
        by_value = any(axes for place, axes in enumerate(given) if place != by_shape)
        for entry in self.outputs.get(number, ()) if by_value else ():
            axes = self.axes(entry)
            if axes is not None and (len(axes) != 1 or not self.are_all_rows(entry, axes[0])):
                return True
        attributes = node.get("attrs", {})
        if node["op"] == "_foreach":  # from row to row, if it hands something on
            data, states = (
                re.findall(r"\d+", attributes[name]) for name in ("in_data_locs", "in_state_locs")
            )
            return bool(states) and any(0 in (axes or ()) for axes in given[: len(data)])
        operation = re.sub("^_npi?x?_", "", node["op"])  # MXNet's numpy has names of its own
        if operation not in self.ALONG:
            return False
        operand, axis = self.ALONG[operation]
        axis = attributes.get("axis", attributes.get("dim", axis))
        if axis in (None, "None"):
            return True
        first = self.graph.inputs[number][operand or 0]
        along = {int(a) % len(self.shapes[0][first]) for a in re.findall(r"-?\d+", str(axis))}
        return any(
            along.intersection(axes or ())
            for place, axes in enumerate(given)
            if operand in (None, place)
        )

    def are_all_rows(self, entry, axis):
        return all(
            shapes[entry][axis] % count == 0 for shapes, count in zip(self.shapes, self.counts)
        )


@contextlib.contextmanager
def shape_errors(name, rows):
    """Within, MXNet's errors about shapes say that batches of ``name`` are cut to ``rows``."""
    import mxnet as mx

    try:
        yield
    except (mx.base.MXNetError, ValueError, AssertionError) as error:
        reason = str(error).partition("Stack trace:")[0].strip() or repr(error)
        if str(error) and not re.search("[Ss]hape|Incompatible attr|split", reason):
            raise  # of the user's, or of a device's
        reason = reason.splitlines()[-1]
        problem = "with {} rows, MXNet says: {}".format(rows, reason)
        raise errors.rows_cannot_be_cut(name, problem) from error


def inferred(symbol, shapes, types):
    """Shapes and types of a symbol's arguments, from those of some of them.

    Raises:
        MXNetError: they do not follow; ``infer_shape`` only warns then, and returns None.
    """
    import mxnet as mx

    names = symbol.list_arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _, _ = symbol.infer_shape(**shapes)
        typed, _, _ = symbol.infer_type(**types)
    if found is None:
        partial = symbol.infer_shape_partial(**shapes)[0] or [None] * len(names)
        unknown = ["{} {}".format(*pair) for pair in zip(names, partial) if not _is_known(pair[1])]
        unknown = ", ".join(unknown) or "its outputs"
        raise mx.base.MXNetError("the shapes of {} cannot be decided".format(unknown))
    if typed is None:
        raise mx.base.MXNetError("the shapes are known, but not all types")
    return found, typed


def _is_known(shape):
    """Whether a shape is known in full; ``()`` is a number in MXNet's numpy mode only."""
    import mxnet as mx

    numpy_mode = getattr(mx.util, "is_np_shape", lambda: False)
    return shape is not None and all(size > 0 for size in shape) and (shape != () or numpy_mode())


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
            raise errors.UnsupportedError(
                "{} is used on several devices, and MXNet would keep only what one of them "
                "computes of it. Call the layer inside one compat.device() only.".format(
                    node["name"]
                )
            )
        number = add(node, group, [copied(entry, group) for entry in entries])
        if node["op"] == "null" and len(users.get((len(numbers), 0), ())) > 1:
            number = add({"op": "_copy", "name": node["name"] + "_shared"}, group, [(number, 0)])
        numbers.append(number)
    return graph.symbol([(numbers[source], output) for source, output in graph.heads], nodes)
