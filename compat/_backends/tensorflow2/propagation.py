"""Propagation of placements through a traced graph, to its results and the variables it sets.

The rules of most operations are in one table (``_tensorflow.rules``). Here are those of operations
that only TensorFlow 2's graphs have: variables, functions, branches and loops; and those of sums
divided by the number of rows.
"""

from typing import Any, Callable, Dict, Optional, Set

import tensorflow as tf

from ... import _rows
from ..._rows import (
    REPLICATED,
    Count,
    Fallback,
    Mixed,
    Partial,
    Placement,
    Reason,
    Replicated,
    Sharded,
    Unknown,
)
from .._tensorflow import rules
from .._tensorflow.custom_gradients import CustomGradient, has_custom_gradient
from .._tensorflow.graph import constant, sizes_of
from .._tensorflow.reductions import first_mixed
from .graph import CALLS, CONDITIONS, LOOPS, READS, bodies_of, carried, is_random
from .trial import OpTrial

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
    """The placement of the old value of the variable ``key``, plus or minus sums over the rows."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key


#: Placements of values of which all devices have a part.
_TOTALS = (Partial, Added)


class Propagation:
    """Placements inferred over one graph, operation by operation.

    The last three arguments are those of a function's graph: they come from where it is called.

    Arguments:
        graph: the graph.
        placements: those of its inputs, by the tensors' names; all others are added.
        handles: keys of variables, by the names of the tensors that are their handles.
        describe: returns the ``Fallback`` of an operation, by its placement.
        trial: an ``OpTrial``.
        reductions: the ``CallReductions`` that are possible, to which those are added that serve;
            or None.
        state: as the attribute, so far; changed.
        sources: the keys of the variables that each of its inputs is computed from, by name.
        lookups: as the attribute, so far; changed.

    Attributes:
        state: the placement of each variable's new value, by key.
        lookups: for each variable in which, or in what is computed from variables alone, something
            is looked up, by key: whether the indices are the same for any batch, of each lookup.
    """

    def __init__(
        self,
        graph: "Any",
        placements: "Dict[str, Placement]",
        handles: "Dict[str, int]",
        describe: "Callable[[tf.Operation, Placement], Any]",
        trial: "OpTrial",
        reductions: "Any" = None,
        state: "Optional[Dict[int, Placement]]" = None,
        sources: "Optional[Dict[str, Set[Optional[int]]]]" = None,
        lookups: "Optional[Dict[int, Set[bool]]]" = None,
    ) -> None:
        self.placements, self.handles = placements, handles
        self.describe, self.trial, self.reductions = describe, trial, reductions
        self._assigned: "Dict[int, tf.Tensor]" = {}  # to variables, by their keys
        self.state: "Dict[int, Placement]" = {} if state is None else state
        self.lookups: "Dict[int, Set[bool]]" = {} if lookups is None else lookups
        # Name of a tensor -> the keys of the variables it is computed from.
        self._sources: "Dict[str, Set[Optional[int]]]" = sources or {}
        # Name of a tensor -> the key of the variable whose old value it is.
        self._old: "Dict[str, int]" = {}
        for op in graph.get_operations():
            self._follow(op)

    def placement_of(self, tensor: "tf.Tensor") -> "Placement":
        """Return the placement of a tensor of the graph."""
        return self.placements.get(tensor.name, REPLICATED)

    def _follow(self, op):
        if op.type == "Placeholder":
            return
        placements = [self.placement_of(tensor) for tensor in op.inputs]
        self._note_lookup(op, placements)
        if self._is_joint(op, placements):
            results = placements
            self.trial.take_rows(op, *results)
        else:
            results = self._results(op, placements)
            if not isinstance(results, list):
                results = [results] * len(op.outputs)
            if op.type not in CALLS | CONDITIONS:
                results = self.trial.follow(op, placements, results)
        has_own = op.type not in CALLS and has_custom_gradient(op)
        if has_own and self._mixes_back(op, placements, results):
            results = [Mixed(Fallback(Reason.CUSTOM_GRADIENT))] * len(results)
        for output, result in zip(op.outputs, results):
            self._place(output, self._explained(op, result))

    def _place(self, tensor, placement):
        is_reduced = self.reductions is not None and self.reductions.are_taken(tensor, placement)
        self.placements[tensor.name] = REPLICATED if is_reduced else placement
        if is_reduced:
            self.trial.take_whole(tensor)

    def _mixes_back(self, op, placements, results):
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
        reductions, self.reductions = self.reductions, None  # in the forward pass alone
        for operation in gradient.operations:
            self._follow(operation)
        self.reductions = reductions
        return gradient.mixes(placements, self.placement_of)

    def _explained(self, op, placement):
        """Return a placement with the operation that mixes rows, if it does."""
        if type(placement) not in (Mixed, Unknown):
            return placement
        is_located = placement.fallback is not None and placement.fallback.operation is not None
        return placement if is_located else type(placement)(self.describe(op, placement))

    def _note_lookup(self, op, placements):
        by_input = [self._sources.get(tensor.name, set()) for tensor in op.inputs]
        if by_input and op.inputs[0].name in self.handles:
            by_input[0] = {self.handles[op.inputs[0].name]}
        if op.type in _LOOKUPS:
            is_same = _RANDOM not in by_input[1] and isinstance(placements[1], Replicated)
            for key in by_input[0] - {_RANDOM}:
                self.lookups.setdefault(key, set()).add(is_same)
        sources = set().union(*by_input)
        if not all(isinstance(placement, Replicated) for placement in placements):
            sources &= {_RANDOM}
        if is_random(op) or op.op_def.is_stateful and op.type not in READS:
            sources.add(_RANDOM)
        self._sources.update((output.name, sources) for output in op.outputs if sources)

    # One operation --------------------------------------------------------------------------------

    def _results(self, op, placements):
        """Return the placements of the results: a list, or one for all of them."""
        results = self._found(op, placements)
        if self.reductions is not None and op.type in CALLS | CONDITIONS | LOOPS:
            if any(isinstance(placement, (Mixed, Unknown)) for placement in _listed(results)):
                pairs = zip(op.inputs, placements)
                self._reduce([t for t, placement in pairs if isinstance(placement, _TOTALS)])
        return results

    def _found(self, op, placements):
        graphs = bodies_of(op)  # of the functions that it calls
        if None in graphs or op.type in CALLS and len(graphs[0].inputs) != len(placements):
            return _rows.without_rows(placements) or Unknown()
        if op.type in CALLS:
            # As under tf.function(jit_compile=True); false where there is no such attribute.
            is_compiled = op.node_def.attr["_XlaMustCompile"].b
            if is_compiled and any(tensor.name in self.handles for tensor in op.inputs):
                return Mixed(Fallback(Reason.XLA_COMPILED))
            return self._inside(op, graphs[0], op.inputs, placements, self.state, tried=True)
        if op.type in CONDITIONS:
            return self._chosen(op, placements, graphs)
        if op.type in LOOPS:
            return self._looped(op, placements, *graphs)
        handle = next((self.handles[t.name] for t in op.inputs if t.name in self.handles), None)
        if handle is not None:
            return self._on_variable(op, handle, placements)
        if op.type.startswith("TensorList"):
            return self._on_list(op, placements)
        # Operations that pass the value of a variable on, its new one or its old one.
        if op.type in _SAME and isinstance(placements[0], Added):
            return placements[0]
        if op.type in _OLD and op.inputs[0].name in self._old:
            self._old[op.outputs[0].name] = self._old[op.inputs[0].name]
        result = self._sum(op, placements) if op.type in _SUMS else _of_rows(op, placements)
        return self._by_table(op, placements) if result is None else result

    def _by_table(self, op, placements):
        values = self._values(op, placements)
        results = rules.placements(op, values)
        if self.reductions is None or not any(isinstance(p, (Mixed, Unknown)) for p in results):
            return results
        # Numbers of rows add up, too. They are left as they are where sums alone are to be reduced.
        for kinds in (_TOTALS, _TOTALS + (Count,)):
            candidates = [
                _rows.Value(Partial("sum"), value.shape)
                if isinstance(placement, kinds) and not isinstance(placement, Partial)
                else value
                for value, placement in zip(values, placements)
            ]
            _, places = _rows.redistributed(
                lambda values: first_mixed(rules.placements(op, values)), candidates
            )
            if places and self._reduce([op.inputs[place] for place in places]):
                # As far as they are not reduced until this is inferred once more.
                return rules.placements(op, self._values(op, map(self.placement_of, op.inputs)))
        return results

    def _values(self, op, placements):
        plain = [Mixed() if isinstance(p, Added) else p for p in placements]
        return list(map(self._value, op.inputs, plain))

    # Reductions -----------------------------------------------------------------------------------

    def _is_joint(self, op, placements):
        """Return whether replicas compute an operation jointly, and note it."""
        if self.reductions is None or len(placements) != 1:
            return False
        is_one = self.reductions.can_compute(op, self._value(op.inputs[0], placements[0]))
        if is_one and op.name not in self.reductions.joint:
            self.reductions.joint.append(op.name)
        return is_one

    def _reduce(self, tensors):
        """Have replicas reduce what tensors are computed from, if they can; return whether.

        These are the first sums, means and extremes over the rows from which others are computed;
        and numbers of rows, as soon as they are fractions, which are the size of no tensor.
        """
        found, pending = {}, list(tensors)
        for tensor in pending:  # which grows meanwhile
            placement = self.placement_of(tensor)
            is_number = placement == Count() and tensor.shape.rank == 0
            before = [] if is_number and tensor.dtype.is_floating else self._before(tensor)
            names = {other.name for other in pending}
            pending += [other for other in before if other.name not in names]
            if before:
                continue
            is_fraction = not isinstance(placement, Count) or is_number and tensor.dtype.is_floating
            if not is_fraction or not self.reductions.can_reduce(tensor, placement):
                return False
            found[tensor.name] = tensor
        for tensor in found.values():
            self.reductions.reduced[tensor.name] = Partial("sum")
            self._place(tensor, self.placement_of(tensor))
        for tensor in reversed(pending):
            if tensor.name not in found and tensor.op.type != "ReadVariableOp":
                self._follow(tensor.op)
        return bool(found)

    def _before(self, tensor):
        """Return the totals from which a tensor is computed that is one."""
        kinds = Count if isinstance(self.placement_of(tensor), Count) else _TOTALS
        if isinstance(self.placement_of(tensor), Added):
            kinds = _TOTALS + (Count,)
        tensors = list(tensor.op.inputs)
        if tensor.op.type == "ReadVariableOp":
            tensors = [self._assigned.get(self.handles.get(tensors[0].name), tensors[0])]
        return [t for t in tensors if isinstance(self.placement_of(t), kinds)]

    def _value(self, tensor, placement):
        sizes = sizes_of(tensor)
        return _rows.Value(placement, self.trial.sizes(tensor) if sizes is None else sizes)

    def _sum(self, op, placements):
        """Return the placement of an old value of a variable plus sums, or of a sum and zeros."""
        for place in (0,) if op.type == "Sub" else (0, 1):
            first, second = placements[place], placements[1 - place]
            key = getattr(first, "key", self._old.get(op.inputs[place].name))
            if key is not None and _adds_up(op.inputs[1 - place], second):
                return Added(key)
            if isinstance(first, Replicated) and isinstance(second, Partial):
                value = constant(op.inputs[place])
                if value is not None and not value.any() and op.type != "Sub":
                    return second
        return None

    # Variables ------------------------------------------------------------------------------------

    def _on_variable(self, op, key, placements):
        current = self.state.get(key)
        if op.type == "ReadVariableOp":
            if current is None:
                self._old[op.outputs[0].name] = key
            return current or REPLICATED
        if op.type in READS:
            return self._by_table(op, placements) if current in (None, REPLICATED) else Mixed()
        if op.type.startswith("Rng"):  # a generator goes on
            return REPLICATED
        if op.type.startswith("Stateful"):  # random numbers, made by one
            return _rows.made(placements[-1], op.outputs[0].shape.rank)
        self._assigned[key] = op.inputs[-1]
        value = Partial("sum") if _adds_up(op.inputs[-1], placements[-1]) else placements[-1]
        placements = placements[:-1] + [value]
        if op.type == "AssignVariableOp":
            result = value
            if isinstance(result, Count) or isinstance(result, Added) and result.key != key:
                result = Mixed()
        elif op.type in _ADDING:
            result = self._added(key, value)
        elif op.type in _SCATTER_ADDING:
            _, *values = map(self._value, op.inputs, placements)
            result = self._added(key, _rows.scattered(values))
        else:
            same = all(p in (None, REPLICATED) for p in placements + [current])
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

    def _inside(self, op, graph, tensors, placements, state, tried=False):
        """Infer placements within a function, and return those of its results."""
        inside = Propagation(
            graph,
            dict(zip([tensor.name for tensor in graph.inputs], placements)),
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
            Mixed() if isinstance(placement, Added) else placement
            for placement in map(inside.placement_of, graph.outputs)
        ]

    def _chosen(self, op, placements, graphs):
        """Return the placements of a branch's results, which devices take by a condition."""
        states, tensors = [dict(self.state), dict(self.state)], op.inputs[1:]
        taken = self.trial.branch(op)
        branches = [
            self._inside(op, graph, tensors, placements[1:], state, tried=place == taken)
            for place, (graph, state) in enumerate(zip(graphs, states))
        ]
        for key in set(states[0]) | set(states[1]):
            pair = [state.get(key) for state in states]
            if pair != [self.state.get(key)] * 2:  # set in one of them at least
                self.state[key] = self._explained(op, self._either(placements[0], pair))
        return [_rows.chosen(placements[0], list(pair)) for pair in zip(*branches)]

    def _either(self, condition, pair):
        """Return a variable's placement from those of two branches; None: it is not changed."""
        placements = {placement for placement in pair if placement is not None}
        fits = len(placements) == 1 and not (None in pair and Partial("sum") in placements)
        return placements.pop() if fits and isinstance(condition, Replicated) else Mixed()

    def _looped(self, op, placements, condition, body):
        """Return the placements of a loop's variables: a fixed point of its body.

        Each turn begins with the state before the loop. A placement changes three times at most:
        an empty list gets one of rows, of a known and then an unknown size, and then ``Unknown``.
        """
        before, variables = dict(self.state), list(placements)
        for _ in range(3 * len(placements) + 1):
            state = dict(before)
            after = self._inside(op, body, op.inputs, variables, state)
            joined = [self._next(*each) for each in zip(op.inputs, variables, after)]
            if joined == variables:
                break
            variables = joined
        (goes_on,) = self._inside(op, condition, op.inputs, variables, dict(before))
        if not isinstance(goes_on, Replicated):
            variables = [Unknown() if t.name not in self.handles else REPLICATED for t in op.inputs]
        for key, placement in state.items():
            if placement != before.get(key):
                fine = goes_on == REPLICATED and isinstance(placement, (Replicated, Added))
                self.state[key] = placement if fine else self._explained(op, Mixed())
        return variables

    def _next(self, tensor, before, after):
        if before == after or isinstance(before, Unknown) or tensor.name in self.handles:
            return before
        fallback = after.fallback if isinstance(after, Mixed) else None
        if fallback is not None and fallback.reason is Reason.CUSTOM_GRADIENT:
            return after  # a trial of the loop computes no gradients
        if tensor.dtype.name == "variant" and isinstance(before, Replicated):
            return after  # a list that is still empty
        if isinstance(before, Sharded) and isinstance(after, Sharded):
            if before.replace(inner=None) == after.replace(inner=None):
                return before.replace(inner=None)
        return Unknown()

    # Lists, in which loops collect results: each has the placement of each of its elements --------

    def _on_list(self, op, placements):
        kind = op.type[len("TensorList") :]
        if kind in ("Reserve", "Length", "ElementShape"):
            return REPLICATED
        elements = placements[0]
        index = placements[1] if kind in ("GetItem", "SetItem", "Gather") else REPLICATED
        if kind in ("SetItem", "PushBack"):
            fits = elements in (REPLICATED, placements[-1]) and index == REPLICATED
            return placements[-1] if fits else _rows.without_rows(placements) or Unknown()
        if isinstance(elements, Partial) and kind in ("FromTensor", "GetItem", "PopBack", "Resize"):
            return elements if index == REPLICATED else Unknown()
        if isinstance(elements, Sharded) and kind in _DIMENSIONS and index == REPLICATED:
            axis = elements.axis + _DIMENSIONS[kind]
            return elements.replace(axis=axis) if axis >= 0 else Unknown()
        return _rows.without_rows(placements[:1]) or Unknown()


def _listed(placements):
    return placements if isinstance(placements, list) else [placements]


def _of_rows(op, placements):
    """Return the placement of a mean or of sizes, where it is more than the table's, or None."""
    if op.type in _DIVISIONS and placements == [Partial("sum"), Count()]:
        return Partial("mean")  # a sum over the rows divided by their number
    if op.type in ("Shape", "Size") and isinstance(placements[0], Sharded):
        special = {("Size", True): Count(), ("Shape", False): Unknown()}
        return special.get((op.type, placements[0].even))
    return None


def _adds_up(tensor, placement):
    """Return whether the devices' values add up to that of all rows; of a shape not all do."""
    sizes = sizes_of(tensor)
    if isinstance(placement, Count) and sizes:
        return len(sizes) == 1 and placement.places == set(range(sizes[0] or 0))
    return placement == Partial("sum") or placement == Count() and sizes == []


#: How many dimensions a value gets in front by an operation on lists.
_DIMENSIONS = {"FromTensor": -1, "GetItem": 0, "PopBack": 0, "Resize": 0, "Stack": 1, "Gather": 1}
