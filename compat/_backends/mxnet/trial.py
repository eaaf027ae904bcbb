"""Placements checked on three samples: of a graph's entries, and of a Gluon block's results."""

import contextlib

import mxnet as mx
import numpy as np

from ... import _rows
from ..._rows import Fallback, Reason, Sharded, Unknown, trial
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


def propagate_and_try(graph, given, fed, context, types, held):
    """Propagate placements, and try what has no rule, and the outputs, or where they are cut.

    Arguments:
        graph: a ``Graph``.
        given: placements of what has a batch dimension, by name.
        fed: arrays of some rows, by name.
        context: the one on which it is tried.
        types: as for ``bound``.
        held: as for ``bound``; what it lacks is drawn at random.

    Returns:
        The ``Propagation``, which has no placements where none can be tried; and why nothing at all
        can be divided, or None.
    """
    # A user-defined gradient may mix rows, and a trial of the forward pass does not see it.
    mixing = dict.fromkeys(graph.custom_gradients(), Reason.CUSTOM_GRADIENT)
    shapes = {name: array.shape for name, array in fed.items()}
    try:
        while True:
            propagation = Propagation(graph, given, shapes, mixing)
            asked = propagation.without_rule + graph.outputs
            asked += partition.frontier(propagation, graph.outputs)
            wrong = _differing(propagation, asked, given, fed, context, types, held)
            if not wrong:
                return propagation, None
            mixing[min(wrong)[0]] = Reason.TRIAL_DIFFERS
    except Exception:  # whatever operations of the user's do, with other numbers of rows
        clear_errors()
        return Propagation(graph), Fallback(Reason.NO_RULE)


def _differing(propagation, entries, *inputs):
    """Return the entries whose placement is not that which a trial finds."""
    graph = propagation.graph
    computed = {entry for entry in entries if graph.nodes[entry[0]]["op"] != "null"}
    entries = sorted(e for e in computed if isinstance(propagation.placement_of(e), Sharded))
    found = tried(graph.symbol(entries), *inputs) if entries else ()
    return {
        entry
        for entry, each in zip(entries, found)
        if getattr(each, "axis", None) != propagation.placement_of(entry).axis
        # What is random tells nothing where a rule is known.
        and (entry in propagation.without_rule or not isinstance(each, Unknown))
    }


def tried(symbol, given, fed, context, types, held):
    """Return the placements of a symbol's outputs, by a trial in inference.

    The arguments are those of ``propagate_and_try``.
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
        """Return the results' placements, if they can be merged; or why they cannot."""
        propagation = self._traced(args)
        graph = propagation and propagation.graph
        heads = [] if graph is None else graph.heads
        claimed = [propagation.placement_of(head) for head in heads]
        if not all(merging.can_be_merged(each) for each in claimed):
            return propagation.fallback(heads, with_rows=False) or Fallback(Reason.CROSS_BATCH)
        without_rule = None  # the first operation that has none
        if propagation and propagation.without_rule:
            without_rule = graph.nodes[propagation.without_rule[0][0]]["name"]
        try:
            tried, fallback = self._tried(args)
        except Exception:
            clear_errors()
            with self._without_side_effects():
                self.replicas.run_unsplit(args)  # raises what is the user's own
            return Fallback(Reason.NO_RULE, without_rule)
        if without_rule or len(claimed) != len(tried):
            claimed = [None] * len(tried)
        placements = [claim or found for claim, found in zip(claimed, tried)]
        for claim, found, placement in zip(claimed, tried, placements):
            is_random = isinstance(found, _rows.Unknown)
            if is_random or not isinstance(placement, _rows.Sharded):
                fits = claim is not None and not isinstance(found, _rows.Mixed)
            else:
                fits = getattr(found, "axis", None) == placement.axis
            if not fits or not merging.can_be_merged(placement):
                return Fallback(Reason.NO_RULE if is_random else Reason.TRIAL_DIFFERS, without_rule)
        if fallback is not None:
            return fallback
        sees_gradients = graph is not None and not graph.custom_gradients()
        is_single = next(leaves(args)).shape[0] == 1
        # Parts of a block that sets states would set them one after the other.
        is_left = sees_gradients or is_single or self.replicas.custom_states()
        if mx.autograd.is_recording() and not is_left:
            parameters, first = parameters_of(self.replicas.block), self.replicas.contexts[0]
            if gradients_mix_rows(parameters, args, placements, first, self._results):
                return Fallback(Reason.CUSTOM_GRADIENT)
        return placements

    def _on_rows(self, args, numbers, is_kept=False):
        """Return what the block gives for some rows of the arguments, on the first context.

        Arguments:
            args: the whole batch's.
            numbers: of the rows.
            is_kept: whether what it changes besides is kept.

        Returns:
            The result, and what it changes besides, by place.
        """
        first, rows = self.replicas.contexts[0], next(leaves(args)).shape[0]

        def chosen(array):
            return merging.concatenated([array[n % rows : n % rows + 1] for n in numbers], 0)

        effects = self.replicas.effects
        with self._without_side_effects(is_kept=is_kept):
            effects.begin()
            result = self.replicas.written(first, args, chosen)
            # What is compiled runs no Python.
            changes = {} if self.is_compiled or is_kept else effects.taken()
        return result, changes

    @contextlib.contextmanager
    def _begun(self, args):
        """Call the block once before: what adds to a number has then begun."""
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
            These; and what changes besides, and cannot be merged.
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
        """Return the results' placements; what changes besides; and which of that does not merge.

        Arguments:
            args: the whole batch's.
            train_mode: whether in training, where results may be random, and are left out.
            known: places of changes that are left out.
        """
        found, structures, counts = [], [], []

        def compute(numbers):
            with mx.autograd.pause(train_mode=train_mode):
                result, changes = self._on_rows(args, numbers)
            changes = {place: each for place, each in changes.items() if place not in known}
            result = () if train_mode else result
            found.append(changes)
            structures.append(without_arrays(result))
            arrays = [array.asnumpy() for array in leaves(result)]
            counts.append(len(arrays))
            return arrays + side_effects.arrays_of(changes)

        placements = _rows.trial.tried(compute)
        results, others = placements[: counts[0]], placements[counts[0] :]
        if any(each != structures[0] for each in structures):
            results = [_rows.Mixed()]
        differing = side_effects.differing(found)
        if differing is not None:
            return results, found[0], side_effects.fallback(differing)
        return results, found[0], self.replicas.effects.decide(found[0], others)

    def _traced(self, args):
        """Return the placements of a HybridBlock's graph, or None."""
        if not isinstance(self.replicas.block, mx.gluon.HybridBlock):
            return None
        shapes, given = {}, {}  # type: dict, dict

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            shapes[name] = array.shape
            is_split = self.replicas.arguments.split[place]
            given[name] = _rows.Sharded(0) if is_split else _rows.REPLICATED
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            with self._without_side_effects(True), symbols_refused():
                traced = self.replicas.plain(mapped(variable, args))
            graph = Graph([], mx.sym.Group(list(leaves(traced, mx.sym.Symbol))))
            propagation = Propagation(graph, given, shapes)
        except Exception:  # whatever a block of the user's cannot do with symbols
            return None
        self.replicas.operations.update(graph.states())
        return propagation

    def _results(self, args, numbers):
        return self._on_rows(args, numbers)[0]

    @contextlib.contextmanager
    def _without_side_effects(self, with_symbols=False, is_kept=False):
        """Have the block run as it is written; restore its state afterwards.

        Arguments:
            is_kept: whether it keeps what is no parameter.
            with_symbols: whether it runs with symbols, which hooks do not expect.
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
