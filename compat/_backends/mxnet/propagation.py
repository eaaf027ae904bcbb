"""MXNet's graphs: taken apart and put together, computed, and the statistics that they keep."""

import contextlib
import json
import warnings

import mxnet as mx
import numpy as np

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Sharded, Unknown, Value, trial
from . import rules

# Two numbers of rows, far from any width and from one another, so that shapes tell what grows
# with the batch.
ROWS = (1009, 2003)

# Operations whose states are moving averages of means over the rows of a batch.
MEANS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm", "IdentityAttachKLSparseReg")

_UNUSED = "compat_unused"  # a variable that has a gradient, and that nothing depends on


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

    def follow(self, given, shapes, tried=None):
        """Find the placement of each entry that the outputs follow from.

        What no rule tells is taken for rows where its shape has them, and listed in ``untold``:
        ``follow_and_try`` tries it.

        Arguments:
            given: placements of variables, by name; those of weights are left out.
            shapes: of variables, by name, with any number of rows.
            tried: by node of which a trial said that it mixes rows: why.
        """
        numbers = sorted(self.ancestors(self.outputs))
        inputs = [self.inputs[number] for number in numbers]
        self._find_sizes(set(self.outputs).union(*inputs), given, shapes)
        self.placements, self.untold = {}, []
        self._causes = dict(tried or {})  # by node that mixes rows: why
        for number in numbers:
            values = [Value(self.placements[e], self._sizes[e]) for e in self.inputs[number]]
            found = Mixed() if number in self._causes else self._by_rule(number, values, given)
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
        sizes, grows = self._sizes.get(first), self.grows.get(first)
        operation = rules.SymbolNode(node["attrs"], values, sizes, grows)
        return rules.placements(node["op"], operation)

    def _find_sizes(self, entries, given, shapes):
        """What is known of the entries' shapes: sizes that do not grow, and dimensions that do."""
        entries = sorted(entries)
        symbol, found = self.symbol(entries), []
        for rows in ROWS:
            known = {name: grown(shape, given.get(name), rows) for name, shape in shapes.items()}
            _, sizes, _ = inferred(symbol.infer_shape_partial, symbol, known)
            sizes = sizes or [None] * len(entries)
            # None: the number of dimensions is not known. ``()`` is a number's shape in MXNet's
            # numpy mode only.
            found.append([size if size or mx.util.is_np_shape() else None for size in sizes])
        self._sizes, self.grows, self._used = dict.fromkeys(entries), {}, {}
        self._one_each = set()  # entries with as many elements as rows along what grows
        for entry, one, other in zip(entries, *found):
            self._used.setdefault(entry[0], []).append(entry)
            if one is not None and other is not None and len(one) == len(other):
                pairs = list(zip(one, other))
                self._sizes[entry] = tuple(a if a == b and a > 0 else None for a, b in pairs)
                if all(min(pair) > 0 for pair in pairs):
                    self.grows[entry] = [axis for axis, (a, b) in enumerate(pairs) if a != b]
                    if all(pairs[axis] == ROWS for axis in self.grows[entry]):
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

    def follow_and_try(self, given, fed, *asking):
        """Follow the rows, and try what no rule tells, and the outputs, or where they are cut.

        Arguments:
            asking: what ``tried`` takes besides.

        Returns:
            Why nothing at all can be divided, or None.
        """
        # A function of the user's own may mix rows on the way back, where a trial does not look.
        mixing = dict.fromkeys(self.own_gradients(), "gradient")
        shapes = {name: array.shape for name, array in fed.items()}
        try:
            while True:
                self.follow(given, shapes, mixing)
                asked = self.untold + self.outputs + self.frontier(self.outputs)
                wrong = self._differing(asked, given, fed, *asking)
                if not wrong:
                    return None
                mixing[min(wrong)[0]] = "tried"
        except Exception:  # whatever operations of the user's do, with other numbers of rows
            clear_errors()
            self.placements = {}
            return _rows.Across(None, why="unknown")

    def _differing(self, entries, *asking):
        computed = {entry for entry in entries if self.nodes[entry[0]]["op"] != "null"}
        entries = sorted(e for e in computed if isinstance(self.placements[e], Sharded))
        found = tried(self.symbol(entries), *asking) if entries else ()
        return {
            entry
            for entry, each in zip(entries, found)
            if getattr(each, "axis", None) != self.placements[entry].axis
            # What is random tells nothing where a rule is known.
            and (entry in self.untold or not isinstance(each, Unknown))
        }

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
                name = self.nodes[self._origin(first)]["name"]
                return _rows.Across(name, why=self._causes[first])
        return None

    def _origin(self, number):
        """A node, or the reduction that it goes on from."""
        for entry in self.inputs[number]:
            if isinstance(self.placements[entry], (Count, Partial)):
                return self._origin(entry[0])
        return number

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
        names = [f"compat_cut{number}" for number in range(len(cut))]
        rest = [entry for entry in self.heads if entry not in cut]
        places = [(cut + rest).index(entry) for entry in self.heads]
        head = None
        if rest:
            variables = {entry: (len(self.nodes) + number, 0) for number, entry in enumerate(cut)}
            nodes = [
                dict(node, inputs=[variables.get(entry, entry) + (0,) for entry in entries])
                for node, entries in zip(self.nodes, self.inputs)
            ]
            nodes += [{"op": "null", "name": name, "inputs": []} for name in names]
            head = self.symbol(rest, nodes)
        return self.symbol(cut), head, names, places

    def frontier(self, entries, inside=None):
        """The nearest entries with a row for each of the batch that ``entries`` follow from.

        Variables are left out, and, where ``inside`` is given, what other nodes compute.
        """

        def is_found(entry):
            computed = self.nodes[entry[0]]["op"] != "null"
            return computed and self.has_rows(entry) and (inside is None or entry[0] in inside)

        return _rows.nearest(entries, is_found, lambda entry: self.inputs[entry[0]])

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


def grown(shape, placement, rows):
    """The shape that a value with a placement has where the batch has so many rows."""
    if not isinstance(placement, Sharded):
        return tuple(shape)
    length = rows * placement.inner * placement.copies
    return tuple(shape[: placement.axis]) + (length,) + tuple(shape[placement.axis + 1 :])


# Executors --------------------------------------------------------------------------------------


def context_named(name):
    """The context that MXNet prints as ``name``, such as ``cpu(1)``."""
    kind, _, index = name.rstrip(")").partition("(")
    return mx.Context(kind, int(index))


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


def bound(symbol, context, shapes, types, held, differentiated=(), sparse=()):
    """An executor of a symbol, with new arrays for what is not held.

    Arguments:
        shapes: of what will be fed, by name.
        types: of what is not held, by name.
        held: arrays of weights and states by name; new states are kept there, too.
        differentiated: the names of what gets a gradient, and is in the symbol.
        sparse: of those whose gradient has some rows only.
    """
    if not differentiated:
        # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
        # which go on with the weights of their first batch (SgMKLDNNConvOperator).
        unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
        symbol, differentiated = mx.sym.Group([symbol, unused]), [_UNUSED]
    names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    types = dict({name: held[name].dtype for name in names if name in held}, **types)
    shapes, _, state_shapes = inferred(symbol.infer_shape, symbol, shapes)
    types, _, _ = inferred(symbol.infer_type, symbol, types)
    args = {
        name: held[name] if name in held else mx.nd.zeros(shape, context, dtype)
        for name, shape, dtype in zip(names, shapes, types)
    }
    auxiliary = {
        name: held.setdefault(name, mx.nd.zeros(shape, context))
        for name, shape in zip(states, state_shapes)
    }
    kinds = dict.fromkeys(sparse, "row_sparse")
    gradients = {
        name: mx.nd.zeros(args[name].shape, context, args[name].dtype, kinds.get(name))
        for name in differentiated
        if name in args
    }
    return symbol.bind(context, args, args_grad=gradients, aux_states=auxiliary)


def tried(symbol, given, fed, context, types, held):
    """The placements of a symbol's outputs, by a trial in inference.

    Arguments:
        given: the placements of what is fed and has rows, by name.
        fed: arrays of some rows, by name.
        types: as for ``bound``.
        held: as for ``bound``; what it lacks is drawn at random.
    """
    count, states = len(symbol.list_outputs()), symbol.list_auxiliary_states()

    def compute(rows):
        part = {
            # From the first row on again where there are fewer.
            name: np.take(array, rows, given[name].axis, mode="wrap") if name in given else array
            for name, array in fed.items()
        }
        known = {name: a.copy() if name in states else a for name, a in held.items()}
        shapes = {name: array.shape for name, array in part.items()}
        executor, random = bound(symbol, context, shapes, types, known), np.random.RandomState(0)
        for low, arrays in ((-0.5, executor.arg_dict), (0.5, executor.aux_dict)):
            for name, array in arrays.items():
                if name in part:
                    array[:] = part[name]
                elif name not in held:
                    array[:] = random.uniform(low, low + 1, array.shape)
        return [array.asnumpy() for array in executor.forward(is_train=False)[:count]]

    return trial.tried(compute)


# Running statistics, as of BatchNorm ------------------------------------------------------------


def wait_for_updates():
    """Wait for all that is being computed.

    The backward pass of BatchNorm writes the running statistics unbeknown to MXNet's engine, so
    that a read may come before it: in 5 of 60 steps of a small model it did.
    """
    mx.nd.waitall()


def unite(statistics, sizes):
    """Give the replicas one value each: the mean, weighted by shard size.

    What is the same in all replicas stays exactly so.

    Arguments:
        statistics: for each statistic, a list of the replicas' arrays, which are set.
        sizes: the numbers of rows that the replicas computed.
    """
    if statistics:
        wait_for_updates()
    for arrays in statistics:
        first = arrays[0]
        first += sum(
            (array.as_in_context(first.context) - first) * (float(size) / sum(sizes))
            for array, size in zip(arrays, sizes)
        )
        for array in arrays[1:]:
            first.copyto(array)
