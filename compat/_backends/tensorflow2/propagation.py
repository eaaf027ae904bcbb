"""Placements of each tensor of a traced graph, and of each variable's new value.

What operations do to rows is in one table (``_tensorflow.rules``). Here is what TensorFlow
2's graphs have besides: variables, functions, branches, loops, and sums divided by the rows.
"""

from typing import Dict, Optional, Set

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Partial, Placement, Replicated, Sharded, Unknown
from .._tensorflow import rules
from .._tensorflow.custom_gradients import CustomGradient, has_custom_gradient
from .._tensorflow.graph import constant, sizes_of
from .graph import CALLS, CONDITIONS, LOOPS, READS, bodies_of, carried, is_random

_SUMS = {"Add", "AddV2", "Sub"}
_DIVISIONS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_SAME = {"Cast", "Identity", "PreventGradient", "Reshape", "Snapshot", "StopGradient"}
_OLD = {"Identity", "Snapshot", "StopGradient"}
_ADDING = {"AssignAddVariableOp", "AssignSubVariableOp"}
_SCATTER_ADDING = {"ResourceScatterAdd", "ResourceScatterNdAdd", "ResourceScatterSub"}
_LOOKUPS = {"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"}

#: Among the sources of a tensor: it is made of random numbers.
_RANDOM = None


class Added(Placement):
    """The old value of the variable ``key``, plus or minus sums over the rows."""

    __slots__ = ("key",)

    def __init__(self, key):
        self.key = key


class Propagation:
    """Placements inferred over one graph, operation by operation.

    Arguments:
        placements: those of the graph's inputs, by the tensors' names; is written.
        handles: keys of variables, by the names of the tensors that are their handles.
        describe: makes an ``Across`` of an operation and its reason.
        trial: an ``OpTrial``.
        state, sources, lookups: of the graph of a function, what is known where it is called: the
            attributes ``state`` and ``lookups``, which are written, and for each of its inputs, by
            name, the variables that it is computed from.

    Attributes:
        state: how each variable's new value depends on the rows, by key.
        lookups: for each variable, by key, in which something is looked up, or in what is computed
            from variables alone, whether the numbers of the rows are the same for any batch: each
            answer that was found.
    """

    def __init__(
        self, graph, placements, handles, describe, trial, state=None, sources=None, lookups=None
    ):
        self.placements, self.handles = placements, handles
        self.describe, self.trial = describe, trial
        self.state: "Dict[int, Placement]" = {} if state is None else state
        self.lookups: "Dict[int, Set[bool]]" = {} if lookups is None else lookups
        # Name of a tensor -> the keys of the variables it is computed from.
        self._sources: "Dict[str, Set[Optional[int]]]" = sources or {}
        # Name of a tensor -> the key of the variable whose old value it is.
        self._old: "Dict[str, int]" = {}
        for op in graph.get_operations():
            self._follow(op)

    def placement_of(self, tensor):
        """Return how a tensor depends on the rows of the batch."""
        return self.placements.get(tensor.name, REPLICATED)

    def _follow(self, op):
        if op.type == "Placeholder":
            return
        given = [self.placement_of(tensor) for tensor in op.inputs]
        self._note_lookup(op, given)
        results = self._results(op, given)
        if not isinstance(results, list):
            results = [results] * len(op.outputs)
        if op.type not in CALLS | CONDITIONS:
            results = self.trial.follow(op, given, results)
        has_own = op.type not in CALLS and has_custom_gradient(op)
        if has_own and self._mixes_back(op, given, results):
            results = [Mixed("gradient")] * len(results)
        for output, result in zip(op.outputs, results):
            self.placements[output.name] = self._explained(op, result)

    def _mixes_back(self, op, given, results):
        """Return whether an operation's user-defined gradient mixes rows."""
        try:
            gradient = CustomGradient(op, results)
        except Exception as error:  # whatever a function of the user's does
            if _rows.trial.is_fault(error):
                raise
            return True
        for (tensor, placement), output, result in zip(gradient.upstream, op.outputs, results):
            self.placements[tensor.name] = placement
            self.trial.draw(tensor, output, result)
        for each in gradient.operations:
            self._follow(each)
        return gradient.mixes(given, self.placement_of)

    def _explained(self, op, placement):
        """Return a placement with the operation that is the reason why rows are mixed."""
        if type(placement) in (Mixed, Unknown) and not hasattr(placement.why, "operation"):
            return type(placement)(self.describe(op, placement))
        return placement

    def _note_lookup(self, op, given):
        known = [self._sources.get(tensor.name, set()) for tensor in op.inputs]
        if known and op.inputs[0].name in self.handles:
            known[0] = {self.handles[op.inputs[0].name]}
        if op.type in _LOOKUPS:
            is_same = _RANDOM not in known[1] and isinstance(given[1], Replicated)
            for key in known[0] - {_RANDOM}:
                self.lookups.setdefault(key, set()).add(is_same)
        sources = set().union(*known)
        if not all(isinstance(each, Replicated) for each in given):
            sources &= {_RANDOM}
        if is_random(op) or op.op_def.is_stateful and op.type not in READS:
            sources.add(_RANDOM)
        self._sources.update((output.name, sources) for output in op.outputs if sources)

    # One operation --------------------------------------------------------------------------------

    def _results(self, op, given):
        """Return how the results depend on the rows: a list, or one placement for all of them."""
        graphs = bodies_of(op)  # of the functions that it calls
        if None in graphs or op.type in CALLS and len(graphs[0].inputs) != len(given):
            return _rows.without_rows(given) or Unknown()
        if op.type in CALLS:
            # As under tf.function(jit_compile=True); false where there is no such attribute.
            is_compiled = op.node_def.attr["_XlaMustCompile"].b
            if is_compiled and any(tensor.name in self.handles for tensor in op.inputs):
                return Mixed("compiled")
            return self._inside(op, graphs[0], op.inputs, given, self.state, tried=True)
        if op.type in CONDITIONS:
            return self._chosen(op, given, graphs)
        if op.type in LOOPS:
            return self._looped(op, given, *graphs)
        handle = next((self.handles[t.name] for t in op.inputs if t.name in self.handles), None)
        if handle is not None:
            return self._on_variable(op, handle, given)
        if op.type.startswith("TensorList"):
            return self._on_list(op, given)
        # What passes the value of a variable on, its new one or its old one.
        if op.type in _SAME and isinstance(given[0], Added):
            return given[0]
        if op.type in _OLD and op.inputs[0].name in self._old:
            self._old[op.outputs[0].name] = self._old[op.inputs[0].name]
        found = self._sum(op, given) if op.type in _SUMS else _of_rows(op, given)
        return self._by_table(op, given) if found is None else found

    def _by_table(self, op, given):
        given = [Mixed() if isinstance(each, Added) else each for each in given]
        values = list(map(self._value, op.inputs, given))
        return rules.placements(op, values)

    def _value(self, tensor, placement):
        sizes = sizes_of(tensor)
        return _rows.Value(placement, self.trial.sizes(tensor) if sizes is None else sizes)

    def _sum(self, op, given):
        """What is added to the old value of a variable, or a sum over the rows to zeros."""
        for place in (0,) if op.type == "Sub" else (0, 1):
            key = getattr(given[place], "key", self._old.get(op.inputs[place].name))
            if key is not None and _adds_up(op.inputs[1 - place], given[1 - place]):
                return Added(key)
            if isinstance(given[place], Replicated) and isinstance(given[1 - place], Partial):
                value = constant(op.inputs[place])
                if value is not None and not value.any() and op.type != "Sub":
                    return given[1 - place]
        return None

    # Variables ------------------------------------------------------------------------------------

    def _on_variable(self, op, key, given):
        current = self.state.get(key)
        if op.type == "ReadVariableOp":
            if current is None:
                self._old[op.outputs[0].name] = key
            return current or REPLICATED
        if op.type in READS:
            return self._by_table(op, given) if current in (None, REPLICATED) else Mixed()
        if op.type.startswith("Rng"):  # a generator goes on
            return REPLICATED
        if op.type.startswith("Stateful"):  # random numbers, made by one
            return _rows.made(given[-1], op.outputs[0].shape.rank)
        given = given[:-1] + [Partial("sum") if _adds_up(op.inputs[-1], given[-1]) else given[-1]]
        if op.type == "AssignVariableOp":
            result = given[-1]
            if isinstance(result, Count) or isinstance(result, Added) and result.key != key:
                result = Mixed()
        elif op.type in _ADDING:
            result = self._added(key, given[-1])
        elif op.type in _SCATTER_ADDING:
            _, *values = map(self._value, op.inputs, given)
            result = self._added(key, _rows.scattered(values))
        else:
            same = all(each in (None, REPLICATED) for each in given + [current])
            result = REPLICATED if same else Mixed()
        self.state[key] = self._explained(op, result)
        return REPLICATED

    def _added(self, key, added):
        current, mean = self.state.get(key), Partial("mean")
        if isinstance(added, (Mixed, Unknown)):
            return added
        if added == Partial("sum"):
            return Added(key) if current in (None, Added(key)) else Mixed()
        if {current, added} <= {None, REPLICATED, mean}:
            return mean if mean in (current, added) else REPLICATED
        return Mixed()

    # Functions, branches, loops -------------------------------------------------------------------

    def _inside(self, op, graph, tensors, given, state, tried=False):
        """Infer placements within a function, and return those of its results."""
        inside = Propagation(
            graph,
            dict(zip([tensor.name for tensor in graph.inputs], given)),
            carried(self.handles, tensors, graph.inputs),
            self.describe,
            self.trial.inside(graph, tensors if tried else []),
            state=state,
            sources=carried(self._sources, tensors, graph.inputs),
            lookups=self.lookups,
        )
        if tried:
            self.trial.values.update(carried(inside.trial.values, graph.outputs, op.outputs))
        return [
            Mixed() if isinstance(each, Added) else each
            for each in map(inside.placement_of, graph.outputs)
        ]

    def _chosen(self, op, given, graphs):
        """One of two branches, the same one on each device if that does not depend on rows."""
        states, tensors = [dict(self.state), dict(self.state)], op.inputs[1:]
        taken = self.trial.branch(op)
        branches = [
            self._inside(op, graph, tensors, given[1:], state, tried=place == taken)
            for place, (graph, state) in enumerate(zip(graphs, states))
        ]
        for key in set(states[0]) | set(states[1]):
            pair = [state.get(key) for state in states]
            if pair != [self.state.get(key)] * 2:  # set in one of them at least
                self.state[key] = self._explained(op, self._either(given[0], pair))
        return [_rows.chosen(given[0], list(pair)) for pair in zip(*branches)]

    def _either(self, condition, pair):
        """Return the placement of a variable that one branch may leave alone, adding nothing."""
        known = {each for each in pair if each is not None}
        fits = len(known) == 1 and not (None in pair and Partial("sum") in known)
        return known.pop() if fits and isinstance(condition, Replicated) else Mixed()

    def _looped(self, op, given, condition, body):
        """Return the placements of a loop's variables: the same after each turn as before it."""
        before, known = dict(self.state), list(given)
        for _ in range(len(given) + 1):
            state = dict(before)
            after = self._inside(op, body, op.inputs, known, state)
            joined = [self._next(*each) for each in zip(op.inputs, known, after)]
            if joined == known:
                break
            known = joined
        (goes_on,) = self._inside(op, condition, op.inputs, known, dict(before))
        if not isinstance(goes_on, Replicated):
            known = [Unknown() if t.name not in self.handles else REPLICATED for t in op.inputs]
        for key, placement in state.items():
            if placement != before.get(key):
                fine = goes_on == REPLICATED and isinstance(placement, (Replicated, Added))
                self.state[key] = placement if fine else self._explained(op, Mixed())
        return known

    def _next(self, tensor, before, after):
        if before == after or isinstance(before, Unknown) or tensor.name in self.handles:
            return before
        if isinstance(after, Mixed) and getattr(after.why, "why", None) == "gradient":
            return after  # which a trial of the loop does not see
        if tensor.dtype.name == "variant" and isinstance(before, Replicated):
            return after  # a list that is still empty
        if isinstance(before, Sharded) and isinstance(after, Sharded):
            if before.replace(inner=None) == after.replace(inner=None):
                return before.replace(inner=None)
        return Unknown()

    # Lists, which loops are made of: what is known of one is so of each of its elements -----------

    def _on_list(self, op, given):
        kind = op.type[len("TensorList") :]
        if kind in ("Reserve", "Length", "ElementShape"):
            return REPLICATED
        found = given[0]
        index = given[1] if kind in ("GetItem", "SetItem", "Gather") else REPLICATED
        if kind in ("SetItem", "PushBack"):
            fits = found in (REPLICATED, given[-1]) and index == REPLICATED
            return given[-1] if fits else _rows.without_rows(given) or Unknown()
        if isinstance(found, Partial) and kind in ("FromTensor", "GetItem", "PopBack", "Resize"):
            return found if index == REPLICATED else Unknown()
        if isinstance(found, Sharded) and kind in _DIMENSIONS and index == REPLICATED:
            axis = found.axis + _DIMENSIONS[kind]
            return found.replace(axis=axis) if axis >= 0 else Unknown()
        return _rows.without_rows(given[:1]) or Unknown()


def _of_rows(op, given):
    """What is more than the table knows of sizes and means, in some cases; None in all others."""
    if op.type in _DIVISIONS and given == [Partial("sum"), Count()]:
        return Partial("mean")  # a sum over the rows divided by their number
    if op.type in ("Shape", "Size") and isinstance(given[0], Sharded):
        known = {("Size", True): Count(), ("Shape", False): Unknown()}
        return known.get((op.type, given[0].even))
    return None


def _adds_up(tensor, placement):
    """Whether the devices' values add up to that for all rows; of several sizes some may not."""
    sizes = sizes_of(tensor)
    if isinstance(placement, Count) and sizes:
        return len(sizes) == 1 and placement.places == set(range(sizes[0] or 0))
    return placement == Partial("sum") or placement == Count() and sizes == []


#: How many dimensions a value gets in front by an operation on lists.
_DIMENSIONS = {"FromTensor": -1, "GetItem": 0, "PopBack": 0, "Resize": 0, "Stack": 1, "Gather": 1}
