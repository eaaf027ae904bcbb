"""Placements checked on three samples: of a graph's entries, and of a Gluon block's results."""

import contextlib
from typing import Dict, Tuple

import mxnet as mx
import numpy as np

from ... import _rows
from ..._rows import Fallback, Placement, Reason, Sharded, Unknown, trial
from ..._runtime.patching import replaced
from ..._verification import random_numbers
from . import merging, partition, side_effects
from .arrays import leaves, mapped, without_arrays
from .custom_gradients import gradients_mix_rows, symbols_refused
from .executors import bound
from .graph import Graph
from .propagation import Propagation
from .state import blocks, parameters_of
from .synchronization import clear_errors


def propagate_and_try(graph, placements, fed, context, types, held):
    """Propagate placements; try entries without a rule, outputs, and entries where a cut would be.

    Arguments:
        graph: a ``Graph``.
        placements: of variables with a batch dimension, by name.
        fed: arrays of some rows, by name.
        context: where the trial runs.
        types: as for ``bound``.
        held: as for ``bound``; other variables are drawn at random.

    Returns:
        The ``Propagation``, without placements if the trial fails; and then a ``Fallback``, or
        None.
    """
    # A user-defined gradient may mix rows, which a trial of the forward pass does not reveal.
    mixing = dict.fromkeys(graph.custom_gradients(), Reason.CUSTOM_GRADIENT)
    shapes = {name: array.shape for name, array in fed.items()}
    try:
        while True:
            propagation = Propagation(graph, placements, shapes, mixing)
            candidates = propagation.without_rule + graph.outputs
            candidates += partition.frontier(propagation, graph.outputs)
            wrong = _differing(propagation, candidates, placements, fed, context, types, held)
            if not wrong:
                return propagation, None
            mixing[min(wrong)[0]] = Reason.TRIAL_DIFFERS
    except Exception:  # whatever user-defined operations raise for other batch sizes
        clear_errors()
        return Propagation(graph), Fallback(Reason.NO_RULE)


def _differing(propagation, entries, *inputs):
    """Return the entries whose placement a trial contradicts."""
    graph = propagation.graph
    computed = {entry for entry in entries if graph.nodes[entry[0]]["op"] != "null"}
    entries = sorted(e for e in computed if isinstance(propagation.placement_of(e), Sharded))
    placements = tried(graph.symbol(entries), *inputs) if entries else ()
    return {
        entry
        for entry, placement in zip(entries, placements)
        if getattr(placement, "axis", None) != propagation.placement_of(entry).axis
        # Random values are inconclusive, and contradict no rule.
        and (entry in propagation.without_rule or not isinstance(placement, Unknown))
    }


def tried(symbol, placements, fed, context, types, held):
    """Return the placements of a symbol's outputs, by a trial in inference.

    The arguments are those of ``propagate_and_try``.
    """
    count, states = len(symbol.list_outputs()), symbol.list_auxiliary_states()

    def compute(rows):
        part = {
            # Rows are repeated where there are fewer than three.
            name: np.take(array, rows, placements[name].axis, mode="wrap")
            if name in placements
            else array
            for name, array in fed.items()
        }
        arrays = {name: a.copy() if name in states else a for name, a in held.items()}
        shapes = {name: array.shape for name, array in part.items()}
        executor, random = bound(symbol, context, shapes, types, arrays), np.random.RandomState(0)
        for low, arrays in ((-0.5, executor.arg_dict), (0.5, executor.aux_dict)):
            for name, array in arrays.items():
                if name in part:
                    array[:] = part[name]
                elif name not in held:
                    array[:] = random.uniform(low, low + 1, array.shape)
        return [array.asnumpy() for array in executor.forward(is_train=False)[:count]]

    return trial.tried(compute)


def _operation_without_rule(propagation):
    """Return the name of the first operation without a rule, or None."""
    if propagation is None or not propagation.without_rule:
        return None
    return propagation.graph.nodes[propagation.without_rule[0][0]]["name"]


def _reason_against(rule, outcome):
    """Return the reason for which a result cannot be merged, or None.

    Arguments:
        rule: the placement by rules, or None.
        outcome: the placement by a trial. It is enough by itself only for a sharded result: what is
            random, or reduced over the rows, may fit by chance.
    """
    placement, is_random = rule or outcome, isinstance(outcome, Unknown)
    if is_random or not isinstance(placement, Sharded):
        fits = rule is not None and not isinstance(outcome, _rows.Mixed)
    else:
        fits = getattr(outcome, "axis", None) == placement.axis
    if fits and merging.can_be_merged(placement):
        return None
    return Reason.NO_RULE if is_random else Reason.TRIAL_DIFFERS


class BlockTrial:
    """The trial of a kind of calls.

    Arguments:
        replicas: the ``BlockReplicas`` of a block.
    """

    def __init__(self, replicas):
        self.replicas = replicas
        self.is_compiled = getattr(replicas.block, "_active", False)
        self.changed = []  # arrays that calls change in place
        self._state = side_effects.BlockState(replicas.block)

    def decide(self, args):
        """Return the results' placements if they can be merged, or else a ``Fallback``."""
        propagation = self._traced(args)
        heads = propagation.graph.heads if propagation else []
        by_rules = [propagation.placement_of(head) for head in heads]
        if not all(map(merging.can_be_merged, by_rules)):
            return propagation.fallback(heads, with_rows=False) or Fallback(Reason.CROSS_BATCH)
        without_rule = _operation_without_rule(propagation)
        try:
            by_trial, fallback = self._tried(args)
        except Exception:
            clear_errors()
            with self._without_side_effects():
                self.replicas.run_unsplit(args)  # raises errors that are the user's
            return Fallback(Reason.NO_RULE, without_rule)
        if without_rule or len(by_rules) != len(by_trial):
            by_rules = [None] * len(by_trial)  # then only the trial counts
        for rule, outcome in zip(by_rules, by_trial):
            reason = _reason_against(rule, outcome)
            if reason is not None:
                return Fallback(reason, without_rule)
        if fallback is not None:
            return fallback
        placements = [rule or outcome for rule, outcome in zip(by_rules, by_trial)]
        if self._custom_gradients_mix_rows(args, propagation, placements):
            return Fallback(Reason.CUSTOM_GRADIENT)
        return placements

    def _custom_gradients_mix_rows(self, args, propagation, placements):
        """Return whether a custom gradient mixes rows, as far as a trial can find out."""
        has_none = propagation is not None and not propagation.graph.custom_gradients()
        is_single = next(leaves(args)).shape[0] == 1
        # Calls on parts of a batch would set custom states one after the other.
        is_exempt = has_none or is_single or self.replicas.custom_states()
        if is_exempt or not mx.autograd.is_recording():
            return False
        parameters, first = parameters_of(self.replicas.block), self.replicas.contexts[0]
        return gradients_mix_rows(parameters, args, placements, first, self._results)

    def _on_rows(self, args, numbers, is_kept=False):
        """Return the block's result for some rows of the arguments, on the first context.

        Arguments:
            args: the whole batch's.
            numbers: of the rows.
            is_kept: whether side effects are kept.

        Returns:
            The result, and the side effects, by place.
        """
        first, rows = self.replicas.contexts[0], next(leaves(args)).shape[0]

        def chosen(array):
            return merging.concatenated([array[n % rows : n % rows + 1] for n in numbers], 0)

        effects = self.replicas.effects
        with self._without_side_effects(is_kept=is_kept):
            effects.begin()
            result = self.replicas.written(first, args, chosen)
            # A compiled block runs no Python.
            changes = {} if self.is_compiled or is_kept else effects.taken()
        return result, changes

    @contextlib.contextmanager
    def _begun(self, args):
        """Call the block once before: then counters, for example, have been created."""
        before = self._state
        self._on_rows(args, _rows.trial.WHOLE, is_kept=True)
        self._state = side_effects.BlockState(self.replicas.block)
        try:
            yield
        finally:
            self._state = before
            self.changed += before.put_back()

    def _tried(self, args):
        """Return the placements of the results, by a trial on the first context, in inference.

        Returns:
            These; and a ``Fallback`` if side effects cannot be merged, or None.
        """
        placements, changes, fallback = self._tried_in(args)
        if changes:
            with mx.autograd.pause(train_mode=False), self._begun(args):
                _, changes, fallback = self._tried_in(args)
        if fallback is None and mx.autograd.is_training() and not self.is_compiled:
            with mx.autograd.pause(train_mode=True), self._begun(args):
                fallback = self._tried_in(args, True, changes)[2]
        if self.changed:
            fallback = Fallback(Reason.CROSS_BATCH, "that changes an array in place")
        return placements, fallback

    def _tried_in(self, args, train_mode=False, known=()):
        """Return the results' placements; side effects by place; and a ``Fallback`` or None.

        Arguments:
            args: the whole batch's.
            train_mode: whether in training, where results may be random, and are left out.
            known: places of side effects that are left out.
        """
        effects, structures, counts = [], [], []

        def compute(numbers):
            with mx.autograd.pause(train_mode=train_mode):
                result, changes = self._on_rows(args, numbers)
            changes = {place: change for place, change in changes.items() if place not in known}
            result = () if train_mode else result
            effects.append(changes)
            structures.append(without_arrays(result))
            arrays = [array.asnumpy() for array in leaves(result)]
            counts.append(len(arrays))
            return arrays + side_effects.arrays_of(changes)

        placements = _rows.trial.tried(compute)
        results, others = placements[: counts[0]], placements[counts[0] :]
        if any(structure != structures[0] for structure in structures):
            results = [_rows.Mixed()]
        differing = side_effects.differing(effects)
        if differing is not None:
            return results, effects[0], side_effects.fallback(differing)
        return results, effects[0], self.replicas.effects.decide(effects[0], others)

    def _traced(self, args):
        """Return the ``Propagation`` of a HybridBlock's graph, or None."""
        if not isinstance(self.replicas.block, mx.gluon.HybridBlock):
            return None
        shapes: "Dict[str, Tuple[int, ...]]" = {}
        placements: "Dict[str, Placement]" = {}

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            shapes[name] = array.shape
            is_split = self.replicas.arguments.split[place]
            placements[name] = _rows.Sharded(0) if is_split else _rows.REPLICATED
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            with self._without_side_effects(True), symbols_refused():
                traced = self.replicas.plain(mapped(variable, args))
            graph = Graph([], mx.sym.Group(list(leaves(traced, mx.sym.Symbol))))
            propagation = Propagation(graph, placements, shapes)
        except Exception:  # whatever a user-defined block cannot do with symbols
            return None
        self.replicas.operations.update(graph.states())
        return propagation

    def _results(self, args, numbers):
        return self._on_rows(args, numbers)[0]

    @contextlib.contextmanager
    def _without_side_effects(self, with_symbols=False, is_kept=False):
        """Have the block run uncompiled within; restore its state afterwards.

        Arguments:
            with_symbols: whether it runs with symbols, which hooks do not expect.
            is_kept: whether state other than parameters is kept.
        """
        plain = {"_active": False}
        if with_symbols:
            plain.update(_forward_hooks={}, _forward_pre_hooks={})
        copies, block = self.replicas.copies, self.replicas.block
        copies.begin(self.replicas.custom_states())
        copies.guard(parameters_of(block))
        with contextlib.ExitStack() as stack, copies.replica(0), random_numbers():
            stack.callback(copies.restore)
            for part in set(blocks(block)):  # one may be there twice
                stack.enter_context(replaced(part, **plain))
            if not is_kept:
                stack.callback(lambda: self.changed.extend(self._state.put_back()))
            yield
