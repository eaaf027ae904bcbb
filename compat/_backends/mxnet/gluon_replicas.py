"""Gluon blocks on several contexts, for the MXNet backend."""

import contextlib

import mxnet as mx

from ... import _rows
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import gluon_arrays, symbol_graph
from .gluon_arrays import leaves, mapped, on_context, parameters_of, states_of
from .symbol_graph import clear_errors
from .verification import BlockCall


def parallelize(block, contexts):
    """Run ``block`` on ``contexts``; one context gives the plain behaviour back."""
    replicas = vars(block).get("_compat_replicas")
    if len(contexts) > 1:
        (replicas or BlockReplicas(block)).move(contexts)
    else:
        if replicas is not None:
            replicas.remove()
        gluon_arrays.move(block, contexts)


class BlockReplicas:
    """The replicas of one block: its parameters on each context, and a ``forward`` that splits.

    Each array given is split by its first dimension, where it has as many rows as the first one
    given, and handed over whole where not; each replica's part runs on its context, and what
    comes out is put together on the first. All of that is recorded by autograd, so the gradients
    of a loss of the whole batch reach each context, and ``Trainer`` sums them.

    Differs from one context:

    - BatchNorm normalises each shard by its own statistics. The running ones take one step to
      the mean of the replicas' new values, weighted by shard size, before they are next used,
      saved or collected. (MXNet's own practice lets them drift apart.)
    - Dropout draws an independent mask in each replica.

    Before its first call of a kind a block is tried: three rows together, against two of them and
    the third. A HybridBlock is traced, too: where its results have their rows, whether they are
    sums or means over the rows, and which operations write states. A block that mixes rows, or
    whose own states depend on them, runs on the first context with the whole batch, with a
    warning. The parameters stay on all contexts: what the others add to the gradients is 0.

    ``Block.__call__`` and what saves call a block's methods on the instance, where three are
    replaced: it stays the same object, and its children stay plain.
    """

    METHODS = ("forward", "collect_params", "_collect_params_with_prefix")

    def __init__(self, block):
        self.block = block
        self._sizes = None  # of the shards of the last batch trained, while statistics may differ
        self._split = {}  # by the place of an array among the arguments: whether it was split
        self._operations = {}  # that write states, by name: of what was traced
        self._kinds = {}  # by kind of arguments: the results' placements (None: whole), if tried
        self.verification = None  # of the first calls
        methods = {name: getattr(self, name) for name in self.METHODS}
        vars(block).update(methods, _compat_replicas=self)

    def move(self, contexts):
        """Go on with other contexts."""
        self.contexts = contexts
        self.names = [str(context) for context in contexts]
        self._prepare()

    def _prepare(self):
        self._unite_statistics()
        # If it was initialised or given a Trainer since.
        gluon_arrays.move(self.block, self.contexts)

    def remove(self):
        self._unite_statistics()
        for name in self.METHODS + ("_compat_replicas",):
            del vars(self.block)[name]

    # Called by Gluon ----------------------------------------------------------------------------

    def forward(self, *args):
        arrays = list(leaves(args))
        if not arrays or not arrays[0].shape or split_rows.runs_undivided():
            # Symbols, too: the block is being exported.
            return type(self.block).forward(self.block, *args)
        verification = self.verification
        if verification is not None and self._kinds[self._kind(args)][0] is not None:
            # Batch normalization and dropout go by this, not by whether gradients are wanted.
            kind = "train" if mx.autograd.is_training() else "predict"
            if verification.is_due(kind):
                return verification.verify(kind, BlockCall(self, args))
        return self.run(args)

    def run_undivided(self, args):
        """The block on the first context alone, where no replica is running."""
        self._prepare()
        states = self._own_states()
        with states.replica(self.contexts[0]):
            result = self._written(self.contexts[0], args, lambda array: array)
        states.unite()
        return result

    def _written(self, context, args, rows):
        """The block as it is written, on a context, where parts of it do not split again.

        Arguments:
            rows: takes a replica's part out of an array that is split.
        """

        def part(place, array):
            return on_context(context, rows(array) if self._split[place] else array)

        with split_rows.undivided(), context:
            return type(self.block).forward(self.block, *mapped(part, args))

    def run(self, args):
        """The block on all contexts, or on the first one where it cannot be divided."""
        kind = self._kind(args)
        placements, _ = self._kinds[kind]
        if placements is None:
            return self._run_whole(args)
        self._prepare()
        rows, count = next(leaves(args)).shape[0], len(self.contexts)
        # One without rows of its own is run for its gradients: which of them a backward pass makes,
        # and when, a trainer sees for each context.
        all_sizes, recording = split_rows.sizes(rows, count), mx.autograd.is_recording()
        replicas = [i for i, size in enumerate(all_sizes) if size or recording]
        sizes = [all_sizes[i] for i in replicas]
        states, results = self._own_states(), []
        across = _rows.Across(None, why="unknown")  # unless it all works out
        try:
            for i in replicas:
                context, part = self.contexts[i], slice(*split_rows.run_bounds(rows, count, i))
                with states.replica(context):
                    results.append(self._written(context, args, lambda array: array[part]))  # noqa: B023
            found = states.unite()
            if found is None and not gluon_arrays.are_of(placements, results, sizes):
                found = _rows.Across(None, why="tried")
            if found is None:
                result = gluon_arrays.merged(placements, results, sizes, self.contexts[0])
            across = found
        except Exception:
            # Of the user's own, which comes again; or of a shard, whose shape does not do.
            clear_errors()
        finally:  # also where it is interrupted
            if across is not None:
                states.set(states.before)
        if across is not None:
            result = self._run_whole(args)  # what is wrong on one device, too, is the user's
            self._leave_whole(kind, across)
            return result
        self._note_batch(all_sizes)
        return result

    def _run_whole(self, args):
        """All rows on the first context, where one device's gradients are; the others get none."""
        result = self.run_undivided(args)
        if mx.autograd.is_recording():
            with mx.autograd.pause():
                gluon_arrays.leave_without_gradients(self.block)
        self._note_batch(work.undivided(self.names, next(leaves(args)).shape[0]))
        return result

    def _note_batch(self, sizes):
        if mx.autograd.is_training():
            self._sizes = sizes
        work.count(self.names, sizes, mx.autograd.is_training())

    # What can be divided ------------------------------------------------------------------------

    def _kind(self, args):
        """The kind of these arguments, of which it is decided whether they are divided."""
        rows, kept, places = next(leaves(args)).shape[0], True, {}  # type: int, bool, dict
        mapped(places.__setitem__, args)
        for place, array in places.items():
            # Arrays with as many rows as the first; what was whole before stays whole.
            has_rows = array.shape[:1] == (rows,)
            kept = kept and (has_rows or not self._split.get(place, False))
            self._split.setdefault(place, has_rows)
        known = tuple((place, self._split[place], array.ndim) for place, array in places.items())
        kind = mx.autograd.is_recording(), kept, known
        # Of a single row a trial tells nothing: it is tried again.
        if kind not in self._kinds or self._kinds[kind][1] < min(rows, 2):
            found = self._decide(args) if kept else _rows.Across(None)
            if isinstance(found, _rows.Across):
                self._leave_whole(kind, found)
            else:
                self._kinds[kind] = found, rows
        return kind

    def _leave_whole(self, kind, across):
        _rows.runs_whole(self.block.name, across, self.contexts[0], "The block", self)
        self._kinds[kind] = None, 2

    def _decide(self, args):
        """The results' placements, as far as they can be put together; or why they cannot."""
        self._prepare()
        graph = self._traced(args)
        heads = [] if graph is None else graph.heads
        claimed = [graph.placements[head] for head in heads]
        if not all(gluon_arrays.can_be_merged(each) for each in claimed):
            return graph.across(heads, with_rows=False) or _rows.Across(None)
        untold = graph.nodes[graph.untold[0][0]]["name"] if graph and graph.untold else None
        try:
            tried = self._tried(args)
        except Exception:
            clear_errors()
            with self._leaving_no_trace():
                self.run_undivided(args)  # raises what is the user's own
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
            if not fits or not gluon_arrays.can_be_merged(placement):
                return _rows.Across(untold, why="unknown" if is_random else "tried")
        sees_gradients = graph is not None and not graph.own_gradients()
        is_single = next(leaves(args)).shape[0] == 1
        # Parts of a block that sets states would set them one after the other.
        is_left = sees_gradients or is_single or self._own_states().parameters
        if mx.autograd.is_recording() and not is_left:
            parameters, first = parameters_of(self.block), self.contexts[0]
            if gluon_arrays.mixes_back(parameters, args, placements, first, self._on_rows):
                return _rows.Across(None, why="gradient")
        return placements

    def _on_rows(self, args, numbers):
        """What the block gives for some rows of the arguments, on the first context."""
        first, rows = self.contexts[0], next(leaves(args)).shape[0]

        def chosen(array):
            return gluon_arrays.concatenated([array[n % rows : n % rows + 1] for n in numbers], 0)

        with self._leaving_no_trace():
            return self._written(first, args, chosen)

    def _tried(self, args):
        """The placements of the results, by a trial on the first context, in inference."""
        others = []

        def compute(numbers):
            with mx.autograd.pause(train_mode=False):
                result = self._on_rows(args, numbers)
            others.append(gluon_arrays.without_arrays(result))
            return [array.asnumpy() for array in leaves(result)]

        found = _rows.trial.tried(compute)
        return found if all(each == others[0] for each in others) else [_rows.Mixed()]

    def _traced(self, args):
        """The graph of a HybridBlock, with its rows followed, or None."""
        if not isinstance(self.block, mx.gluon.HybridBlock):
            return None
        shapes, given = {}, {}  # type: dict, dict

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            shapes[name] = array.shape
            given[name] = _rows.Sharded(0) if self._split[place] else _rows.REPLICATED
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            with self._leaving_no_trace(), gluon_arrays.symbols_refused():
                traced = type(self.block).forward(self.block, *mapped(variable, args))
            graph = symbol_graph.Graph([], mx.sym.Group(list(leaves(traced, mx.sym.Symbol))))
            graph.follow(given, shapes)
        except Exception:  # whatever a block of the user's cannot do with symbols
            return None
        self._operations.update(graph.states())
        return graph

    @contextlib.contextmanager
    def _leaving_no_trace(self):
        """Within, the block runs as it is written, without hooks, and keeps nothing of it."""
        plain = {"_active": False, "_forward_hooks": {}, "_forward_pre_hooks": {}}
        with contextlib.ExitStack() as stack:
            states = self._own_states()
            stack.callback(states.set, states.before)
            for part in set(gluon_arrays.blocks(self.block)):  # one may be there twice
                stack.enter_context(replaced(part, **plain))
            stack.callback(gluon_arrays.own_attributes(self.block).put_back)
            yield

    # States -------------------------------------------------------------------------------------

    def collect_params(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block).collect_params(self.block, *args, **kwargs)

    def _collect_params_with_prefix(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block)._collect_params_with_prefix(self.block, *args, **kwargs)

    def _own_states(self):
        return gluon_arrays.OwnStates(states_of(self.block, self._operations)[1])

    def _unite_statistics(self):
        """Give all contexts one set of running statistics.

        At the next use, since the backward pass writes them, which comes after ``forward``.
        """
        if self._sizes is None:
            return
        means, others = states_of(self.block, self._operations)
        with mx.autograd.pause():
            # Where the first context alone has trained it, what else it has set, too.
            united = means if any(self._sizes[1:]) else means + others
            symbol_graph.unite([parameter.list_data() for parameter in united], self._sizes)
            gluon_arrays.check_equal(self.block, others)
        if not mx.autograd.is_recording():
            self._sizes = None
