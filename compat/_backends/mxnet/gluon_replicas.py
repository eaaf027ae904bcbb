"""Gluon blocks on several contexts, for the MXNet backend."""

import contextlib

import mxnet as mx

from ... import _rows
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import nested_arrays, own_gradients, symbol_graph
from .gluon_states import OwnStates, blocks, check_equal, own_attributes, states_of
from .gluon_trainers import _move, _parameters
from .nested_arrays import _arrays, _leaves, _mapped, _on, can_be_merged
from .running_statistics import unite


def parallelize(block, contexts):
    """Run ``block`` on ``contexts``; one context gives the plain behaviour back."""
    replicas = vars(block).get("_compat_replicas")
    if len(contexts) > 1:
        (replicas or BlockReplicas(block)).move(contexts)
    else:
        if replicas is not None:
            replicas.remove()
        _move(block, contexts)


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
        self.contexts = None
        self._sizes = None  # of the shards of the last batch trained, while statistics may differ
        self._is_whole = False  # the first context alone has trained it
        self._split = {}  # by the place of an array among the arguments: whether it was split
        self._operations = {}  # that write states, by name: of what was traced
        self._kinds = {}  # by kind of arguments: the results' placements (None: whole), if tried
        self._gradients = set()  # kinds of arguments whose gradients are seen, or were tried
        self._sees_gradients = True  # whether none can be the user's own: of what was traced last
        self._warned = False
        self.verified = None  # a VerifiedBlockForward, which runs the first calls
        for name in self.METHODS:
            object.__setattr__(block, name, getattr(self, name))
        object.__setattr__(block, "_compat_replicas", self)

    def move(self, contexts):
        """Go on with other contexts."""
        self._unite_statistics()
        self.contexts = contexts
        self.names = [str(context) for context in contexts]
        _move(self.block, contexts)

    def _prepare(self):
        self._unite_statistics()
        _move(self.block, self.contexts)  # if it was initialised or given a Trainer since

    def remove(self):
        self._unite_statistics()
        for name in self.METHODS + ("_compat_replicas",):
            object.__delattr__(self.block, name)

    # Called by Gluon ----------------------------------------------------------------------------

    def forward(self, *args):
        arrays = list(_arrays(args))
        if not arrays or not arrays[0].shape or split_rows.runs_undivided():
            # Symbols, too: the block is being exported.
            return type(self.block).forward(self.block, *args)
        if self.verified is None or self._kinds[self._kind(args)][0] is None:
            return self.run(args)
        return self.verified(args)

    def run_undivided(self, args):
        """The block on the first context alone, where no replica is running."""
        first = self.contexts[0]
        self._prepare()
        return self._written(first, _mapped(lambda _, array: _on(first, array), args))

    def _written(self, context, args):
        """The block as it is written, where parts that are parallelized do not split again."""
        with split_rows.undivided(), context:
            return type(self.block).forward(self.block, *args)

    def run(self, args):
        """The block on all contexts, or on the first one where it cannot be divided."""
        kind = self._kind(args)
        placements, _ = self._kinds[kind]
        if placements is None:
            return self._run_whole(args)
        try:
            result, across = self._run_divided(args, placements)
        except Exception:
            # Of the user's own, which comes again; or of a shard, whose shape does not do.
            symbol_graph.clear_errors()
            result, across = None, _rows.Across(None, why="unknown")
        if across is None:
            return result
        whole = self._run_whole(args)  # what is wrong on one device, too, is the user's
        self._leave_whole(kind, across)
        return whole

    def _run_divided(self, args, placements):
        """The result; or None, and why the replicas' results cannot be put together."""
        rows, count = next(_arrays(args)).shape[0], len(self.contexts)
        self._prepare()
        # One without rows of its own is run for its gradients: Trainer.step() insists on some.
        all_sizes, recording = split_rows.sizes(rows, count), mx.autograd.is_recording()
        replicas = [i for i, size in enumerate(all_sizes) if size or recording]
        sizes = [all_sizes[i] for i in replicas]
        states, results = self._own_states(), []
        try:
            for i in replicas:
                context, part = self.contexts[i], slice(*split_rows.run_bounds(rows, count, i))
                shard = self._shard(args, context, lambda array: array[part])  # noqa: B023
                with states.replica(context):
                    results.append(self._written(context, shard))
            across = states.unite()
        except BaseException:
            states.reset()
            raise
        if across is None and not nested_arrays.are_of(placements, results, sizes):
            across = _rows.Across(None, why="tried")
        if across is not None:
            states.reset()
            return None, across
        if mx.autograd.is_training():
            self.note_training(args)
        work.count(self.names, all_sizes, mx.autograd.is_training())
        return nested_arrays.merged(placements, results, sizes, self.contexts[0]), None

    def _run_whole(self, args):
        """All rows on the first context, where one device's gradients are; the others get none."""
        sizes = work.undivided(self.names, next(_arrays(args)).shape[0])
        self._prepare()
        states = self._own_states()
        with states.replica(self.contexts[0]):
            result = self.run_undivided(args)
        states.unite()
        if mx.autograd.is_recording():
            with mx.autograd.pause():
                _leave_without_gradients(_parameters(self.block))
        if mx.autograd.is_training():
            self._sizes, self._is_whole = sizes, True
        work.count(self.names, sizes, mx.autograd.is_training())
        return result

    def note_training(self, args):
        """Have statistics united before their next use, by the rows of this batch."""
        rows = next(_arrays(args)).shape[0]
        self._sizes, self._is_whole = split_rows.sizes(rows, len(self.contexts)), False

    def _shard(self, args, context, rows):
        """A replica's part of the arguments, on its context; ``rows`` takes it out of an array."""

        def part(place, array):
            return _on(context, rows(array) if self._split[place] else array)

        return _mapped(part, args)

    # What can be divided ------------------------------------------------------------------------

    def _kind(self, args):
        """The kind of these arguments, of which it is decided whether they are divided."""
        rows, places = next(_arrays(args)).shape[0], nested_arrays._arrays_in_places(args)
        kept = True
        for place, array in places:
            # Arrays with as many rows as the first; what was whole before stays whole.
            has_rows = bool(array.shape) and array.shape[0] == rows
            kept = kept and (has_rows or not self._split.get(place, False))
            self._split.setdefault(place, has_rows)
        kind = kept, tuple((place, self._split[place], array.ndim) for place, array in places)
        # Of a single row a trial tells nothing: it is tried again.
        if kind not in self._kinds or self._kinds[kind][1] < min(rows, 2):
            placements, across = self._decide(args) if kept else (None, _rows.Across(None))
            if across is not None:
                self._leave_whole(kind, across)
            else:
                self._kinds[kind] = placements, rows
                if self._sees_gradients:
                    self._gradients.add(kind)
        placements = self._kinds[kind][0]
        is_tried = kind in self._gradients or rows == 1 or not mx.autograd.is_recording()
        if placements is not None and not is_tried:
            self._gradients.add(kind)
            if self._mixes_back(args, placements):
                self._leave_whole(kind, _rows.Across(None, why="gradient"))
        return kind

    def _leave_whole(self, kind, across):
        if not self._warned:
            _rows.runs_whole(self.block.name, across, self.contexts[0], "The block")
            self._warned = True
        self._kinds[kind] = None, 2

    def _decide(self, args):
        """The results' placements, as far as they can be put together; or why they cannot."""
        self._prepare()
        graph = self._traced(args)
        heads = [] if graph is None else graph.heads
        claimed = [graph.placements[head] for head in heads]
        if not all(can_be_merged(each) for each in claimed):
            return None, graph.across(heads, with_rows=False) or _rows.Across(None)
        untold = graph.nodes[graph.untold[0][0]]["name"] if graph and graph.untold else None
        try:
            tried = self._tried(args)
        except Exception:
            symbol_graph.clear_errors()
            with self._leaving_no_trace():
                self.run_undivided(args)  # raises what is the user's own
            return None, _rows.Across(untold, why="unknown")
        if len(claimed) != len(tried):
            claimed = [None] * len(tried)
        placements = []
        for claim, found in zip(claimed, tried):
            known = claim is not None and not untold
            is_random = isinstance(found, _rows.Unknown)
            if is_random and not known:
                return None, _rows.Across(untold, why="unknown")
            right = known or isinstance(found, _rows.Sharded)
            if isinstance(claim, _rows.Sharded) and not is_random:
                right = getattr(found, "axis", None) == claim.axis
            placements.append(found if claim is None else claim)
            if isinstance(found, _rows.Mixed) or not right or not can_be_merged(placements[-1]):
                return None, _rows.Across(untold, why="tried")
        self._sees_gradients = graph is not None and not graph.own_gradients()
        return placements, None

    def _mixes_back(self, args, placements):
        """Whether gradients of the user's own, which cannot be seen, mix rows.

        A block that sets states is not tried, which its parts would set one after the other.
        """
        if states_of(self.block, self._operations)[1]:
            return False
        return own_gradients.mix(_parameters(self.block), args, placements, self._parts_of)

    def _parts_of(self, args, parts, placements):
        """The result of some parts of the rows on the first context, in inference, recorded."""
        with self._leaving_no_trace(), mx.autograd.record(train_mode=False):
            shards = [self._rows_of(args, part) for part in parts]
            results = [self._written(self.contexts[0], shard) for shard in shards]
            return nested_arrays.merged(
                placements, results, list(map(len, parts)), self.contexts[0]
            )

    def _rows_of(self, args, numbers):
        """Some rows of the arguments, on the first context."""
        rows = next(_arrays(args)).shape[0]

        def chosen(array):
            return nested_arrays.concatenated([array[n % rows : n % rows + 1] for n in numbers], 0)

        return self._shard(args, self.contexts[0], chosen)

    def _tried(self, args):
        """The placements of the results, by a trial on the first context, in inference."""
        others = []

        def compute(numbers):
            shard = self._rows_of(args, numbers)
            with self._leaving_no_trace(), mx.autograd.pause(train_mode=False):
                result = self._written(self.contexts[0], shard)
                arrays = [array.asnumpy() for array in _arrays(result)]
            others.append(nested_arrays._others(result))
            return arrays

        found = _rows.trial.tried(compute)
        if any(each != others[0] for each in others):
            return [_rows.Mixed()]
        return found

    def _traced(self, args):
        """The graph of a HybridBlock, with its rows followed, or None."""
        if not isinstance(self.block, mx.gluon.HybridBlock):
            return None
        shapes = {rows: {} for rows in symbol_graph.ROWS}  # type: dict
        given = {}  # type: dict

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            for rows, known in shapes.items():
                known[name] = (rows,) + array.shape[1:] if self._split[place] else array.shape
            if self._split[place]:
                given[name] = _rows.Sharded(0)
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            with self._leaving_no_trace(), own_gradients.symbols_refused():
                traced = type(self.block).forward(self.block, *_mapped(variable, args))
            graph = symbol_graph.Graph([], mx.sym.Group(list(_leaves(traced, mx.sym.Symbol))))
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
            stack.callback(self._own_states().reset)
            for part in blocks(self.block):
                own = {name: value for name, value in plain.items() if name in vars(part)}
                stack.enter_context(replaced(part, **own))
            stack.callback(own_attributes(self.block).put_back)
            yield

    # States -------------------------------------------------------------------------------------

    def collect_params(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block).collect_params(self.block, *args, **kwargs)

    def _collect_params_with_prefix(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block)._collect_params_with_prefix(self.block, *args, **kwargs)

    def _own_states(self):
        return OwnStates(states_of(self.block, self._operations)[1])

    def _unite_statistics(self):
        """Give all contexts one set of running statistics.

        At the next use, since the backward pass writes them, which comes after ``forward``.
        """
        if self._sizes is None:
            return
        means, others = states_of(self.block, self._operations)
        with mx.autograd.pause():
            united = means + others if self._is_whole else means
            unite([p.list_data() for p in united if p._data is not None], self._sizes)
            check_equal(self.block, others)
        if not mx.autograd.is_recording():
            self._sizes = None


def _leave_without_gradients(parameters):
    """Gradients of 0 on all contexts but the first, new as if a backward pass had written them."""
    for parameter in parameters:
        if parameter._data is not None and parameter.grad_req != "null":
            for array, gradient in zip(parameter.list_data()[1:], parameter.list_grad()[1:]):
                if parameter.grad_req == "write":
                    gradient[:] = 0
                array._fresh_grad = True
