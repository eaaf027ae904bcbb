"""What of a Gluon block can be divided: found by its graph, and by a trial on three rows."""

import contextlib

import mxnet as mx

from ... import _rows
from ..._runtime.patching import replaced
from ..._verification import random_numbers
from . import merging, propagation, side_effects
from .merging import leaves, mapped, parameters_of
from .propagation import clear_errors


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
        """The results' placements, as far as they can be put together; or why they cannot."""
        graph = self._traced(args)
        heads = [] if graph is None else graph.heads
        claimed = [graph.placements[head] for head in heads]
        if not all(merging.can_be_merged(each) for each in claimed):
            return graph.across(heads, with_rows=False) or _rows.Across(None)
        untold = graph.nodes[graph.untold[0][0]]["name"] if graph and graph.untold else None
        try:
            tried, across = self._tried(args)
        except Exception:
            clear_errors()
            with self._leaving_no_trace():
                self.replicas.run_undivided(args)  # raises what is the user's own
            return _rows.Across(untold, why="unknown")
        if untold or len(claimed) != len(tried):
            claimed = [None] * len(tried)
        placements = [claim or found for claim, found in zip(claimed, tried)]
        for claim, found, placement in zip(claimed, tried, placements):
            is_random = isinstance(found, _rows.Unknown)
            if is_random or not isinstance(placement, _rows.Sharded):
                fits = claim is not None and not isinstance(found, _rows.Mixed)
            else:
                fits = getattr(found, "axis", None) == placement.axis
            if not fits or not merging.can_be_merged(placement):
                return _rows.Across(untold, why="unknown" if is_random else "tried")
        if across is not None:
            return across
        sees_gradients = graph is not None and not graph.own_gradients()
        is_single = next(leaves(args)).shape[0] == 1
        # Parts of a block that sets states would set them one after the other.
        is_left = sees_gradients or is_single or self.replicas.own_states()
        if mx.autograd.is_recording() and not is_left:
            parameters, first = parameters_of(self.replicas.block), self.replicas.contexts[0]
            if merging.mixes_back(parameters, args, placements, first, self._results):
                return _rows.Across(None, why="gradient")
        return placements

    def _on_rows(self, args, numbers, is_kept=False):
        """What the block gives for some rows of the arguments, on the first context.

        Arguments:
            is_kept: whether what it changes besides is kept.

        Returns:
            The result, and what it changes besides, by place.
        """
        first, rows = self.replicas.contexts[0], next(leaves(args)).shape[0]

        def chosen(array):
            return merging.concatenated([array[n % rows : n % rows + 1] for n in numbers], 0)

        effects = self.replicas.effects
        with self._leaving_no_trace(is_kept=is_kept):
            effects.begin()
            result = self.replicas.written(first, args, chosen)
            # What is compiled runs no Python.
            changes = {} if self.is_compiled or is_kept else effects.taken()
        return result, changes

    @contextlib.contextmanager
    def _begun(self, args):
        """Within, there was a call before: what adds to a number has then begun."""
        before = self._state
        self._on_rows(args, _rows.trial.WHOLE, is_kept=True)
        self._state = side_effects.BlockState(self.replicas.block)
        try:
            yield
        finally:
            self._state = before
            self.changed += before.put_back()

    def _tried(self, args):
        """The placements of the results, by a trial on the first context, in inference.

        Returns:
            These; and what changes besides, and cannot be put together.
        """
        placements, changes, across = self._tried_in(args)
        if changes:
            with mx.autograd.pause(train_mode=False), self._begun(args):
                _, changes, across = self._tried_in(args)
        if across is None and mx.autograd.is_training() and not self.is_compiled:
            with mx.autograd.pause(train_mode=True), self._begun(args):
                across = self._tried_in(args, True, changes)[2]
        if self.changed:
            across = _rows.Across("that changes an array in place")
        return placements, across

    def _tried_in(self, args, train_mode=False, known=()):
        """The placements of the results; what changes besides; and which of that does not merge.

        Arguments:
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
            structures.append(merging.without_arrays(result))
            arrays = [array.asnumpy() for array in leaves(result)]
            counts.append(len(arrays))
            return arrays + side_effects.arrays_of(changes)

        placements = _rows.trial.tried(compute)
        results, others = placements[: counts[0]], placements[counts[0] :]
        if any(each != structures[0] for each in structures):
            results = [_rows.Mixed()]
        differing = side_effects.differing(found)
        if differing is not None:
            return results, found[0], side_effects.across(differing)
        return results, found[0], self.replicas.effects.decide(found[0], others)

    def _traced(self, args):
        """The graph of a HybridBlock, with its rows followed, or None."""
        if not isinstance(self.replicas.block, mx.gluon.HybridBlock):
            return None
        shapes, given = {}, {}  # type: dict, dict

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            shapes[name] = array.shape
            given[name] = _rows.Sharded(0) if self.replicas.split[place] else _rows.REPLICATED
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            with self._leaving_no_trace(True), merging.symbols_refused():
                traced = self.replicas.plain(mapped(variable, args))
            graph = propagation.Graph([], mx.sym.Group(list(leaves(traced, mx.sym.Symbol))))
            graph.follow(given, shapes)
        except Exception:  # whatever a block of the user's cannot do with symbols
            return None
        self.replicas.operations.update(graph.states())
        return graph

    def _results(self, args, numbers):
        return self._on_rows(args, numbers)[0]

    @contextlib.contextmanager
    def _leaving_no_trace(self, with_symbols=False, is_kept=False):
        """Within, the block runs as it is written, and keeps nothing of it.

        Arguments:
            is_kept: whether it keeps what is no parameter.
            with_symbols: whether it runs with symbols, which hooks do not expect.
        """
        plain = {"_active": False}
        if with_symbols:
            plain.update(_forward_hooks={}, _forward_pre_hooks={})
        copies, block = self.replicas.copies, self.replicas.block
        copies.begin(self.replicas.own_states())
        copies.guard(parameters_of(block))
        with contextlib.ExitStack() as stack, copies.replica(0), random_numbers():
            stack.callback(copies.restore)
            for part in set(merging.blocks(block)):  # one may be there twice
                stack.enter_context(replaced(part, **plain))
            if not is_kept:
                stack.callback(lambda: self.changed.extend(self._state.put_back()))
            yield
