"""Gluon blocks on several contexts, for the MXNet backend."""

from ... import _replicas, _work, errors
from . import symbol_graph
from .gluon_states import OwnStates, check_equal, states_of
from .running_statistics import unite


def parallelize(block, contexts):
    """Run ``block`` on ``contexts``; one context gives the plain behaviour back."""
    replicas = vars(block).get("_compat_replicas")
    if len(contexts) > 1:
        _refuse_time_first(block)
        if replicas is None:
            replicas = Replicas(block)
        replicas.move(contexts)
        return
    if replicas is not None:
        replicas.remove()
    _move(block, contexts)


class Replicas:
    """The replicas of one block: its parameters on each context, and a ``forward`` that splits.

    Each array given is split by its first dimension, where it has as many rows as the first one
    given, and handed over whole where not; each replica's part runs on its context, and what
    comes out is concatenated on the first. All of that is recorded by autograd, so the gradients
    of a loss of the whole batch reach each context, and ``Trainer`` sums them.

    Differs from one context:

    - BatchNorm normalises each shard by its own statistics. The running ones take one step to
      the mean of the replicas' new values, weighted by shard size, before they are next used,
      saved or collected. (MXNet's own practice lets them drift apart.)
    - Dropout draws an independent mask in each replica.

    What else a block keeps from batch to batch is one context's, or an error. A HybridBlock is
    traced once, and refused if one of its operations computes across rows; of other blocks that
    cannot be known.

    ``Block.__call__`` and what saves call a block's methods on the instance, where three are
    replaced: it stays the same object, and its children stay plain.
    """

    METHODS = ("forward", "collect_params", "_collect_params_with_prefix")

    def __init__(self, block):
        self.block = block
        self.contexts = None
        self._rows = None  # of the last batch trained, while statistics may differ
        self._split = {}  # by the place of an array among the arguments: whether it was split
        self._operations = {}  # that write states, by name: of what was traced
        self._traced = set()  # type: set  # kinds of arguments that the block was traced for
        self._returns_rows = False  # known from a batch that has two rows for a replica
        self.verified = None  # a VerifiedForward, which runs the first calls
        for name in self.METHODS:
            object.__setattr__(block, name, getattr(self, name))
        object.__setattr__(block, "_compat_replicas", self)

    def move(self, contexts):
        """Go on with other contexts."""
        self._unite_statistics()
        self.contexts = contexts
        _move(self.block, contexts)

    def remove(self):
        self._unite_statistics()
        for name in self.METHODS + ("_compat_replicas",):
            object.__delattr__(self.block, name)

    # Called by Gluon ----------------------------------------------------------------------------

    def forward(self, *args):
        arrays = list(_arrays(args))
        if not arrays or not arrays[0].shape or _replicas.runs_undivided():
            # Symbols, too: the block is being exported.
            return type(self.block).forward(self.block, *args)
        return self.run(args) if self.verified is None else self.verified(args)

    def run_undivided(self, args):
        """The block on the first context alone, where no replica is running."""
        first = self.contexts[0]
        self._unite_statistics()
        _move(self.block, self.contexts)
        with _replicas.undivided(), first:
            whole = _mapped(lambda _, array: _on(first, array), args)
            return type(self.block).forward(self.block, *whole)

    def run(self, args):
        """The block on all contexts."""
        import mxnet as mx

        rows, count = next(_arrays(args)).shape[0], len(self.contexts)
        self._decide_what_is_split(args, rows)
        self._unite_statistics()
        _move(self.block, self.contexts)  # if it was initialised or given a Trainer since
        if mx.autograd.is_training():
            self.note_training(args)
        # One without rows of its own is run for its gradients: Trainer.step() insists on some.
        replicas = [
            i
            for i, size in enumerate(_replicas.sizes(rows, count))
            if size or mx.autograd.is_recording()
        ]
        sizes = [_replicas.sizes(rows, count)[i] for i in replicas]
        results = []
        with _replicas.undivided():  # parts that are parallelized must not split again
            self._trace(args)
            states = OwnStates(self.block, states_of(self.block, self._operations)[1])
            for i in replicas:
                with states.replica(self.contexts[i]), self.contexts[i]:
                    results.append(self._run(args, _replicas.run_bounds(rows, count, i), i))
            self._check_results(args, results, sizes)
            states.finish()
        names = [str(context) for context in self.contexts]
        _work.count(names, _replicas.sizes(rows, count), mx.autograd.is_training())
        return _gather(results, sizes, self.contexts[0])

    def note_training(self, args):
        """Have statistics united before their next use, by the rows of this batch."""
        self._rows = next(_arrays(args)).shape[0]

    def _run(self, args, bounds, replica):
        with symbol_graph.shape_errors(self.block.name, bounds[1] - bounds[0]):
            shard = self._shard(args, bounds, self.contexts[replica])
            return type(self.block).forward(self.block, *shard)

    # Arguments ------------------------------------------------------------------------------------

    def _decide_what_is_split(self, args, rows):
        """Arrays with as many rows as the first; what was whole before stays whole."""
        for place, array in _arrays_in_places(args):
            has_rows = bool(array.shape) and array.shape[0] == rows
            if self._split.setdefault(place, has_rows) and not has_rows:
                raise errors.rows_cannot_be_cut(
                    self.block.name,
                    "the array of shape {} among its arguments had a row for each of a batch "
                    "before, and has not in one of {} rows".format(array.shape, rows),
                )

    def _shard(self, args, bounds, context):
        """A replica's part of the arguments, on its context."""

        def part(place, array):
            return _on(context, array[bounds[0] : bounds[1]] if self._split[place] else array)

        return _mapped(part, args)

    # What the block does --------------------------------------------------------------------------

    def _trace(self, args):
        """Refuse operations across rows, and see which write states, of a HybridBlock."""
        import mxnet as mx

        kind = tuple((place, self._split[place]) for place, _ in _arrays_in_places(args))
        if kind in self._traced or not isinstance(self.block, mx.gluon.HybridBlock):
            return
        states = OwnStates(self.block, states_of(self.block, self._operations)[1])
        shapes = {rows: {} for rows in symbol_graph.ROWS}  # type: dict
        split = []  # type: list

        def variable(place, array):
            name = "compat_input" + "_".join(map(str, place))
            for rows, known in shapes.items():
                known[name] = (rows,) + array.shape[1:] if self._split[place] else array.shape
            if self._split[place]:
                split.append(name)
            symbol = mx.sym.var(name)
            return symbol.as_np_ndarray() if type(array) is not mx.nd.NDArray else symbol

        try:
            traced = type(self.block).forward(self.block, *_mapped(variable, args))
            graph = symbol_graph.Graph([], mx.sym.Group(list(_leaves(traced, mx.sym.Symbol))))
            graph.follow(graph.heads, split, shapes)
        except Exception:  # whatever a block of the user's cannot do with symbols
            self._traced.add(kind)
            return
        finally:
            states.reset()
        if graph.across_rows is not None:
            problem = "its operation {} computes across rows".format(graph.across_rows)
            raise errors.rows_cannot_be_cut(self.block.name, problem)
        names = [parameter.name for parameter in _parameters(self.block)]
        self._operations.update(graph.states(names))
        self._traced.add(kind)

    def _check_results(self, args, results, sizes):
        """Tell a row from one number for a batch, where each replica had one row only."""
        import mxnet as mx

        if self._returns_rows or max(sizes) > 1:
            self._returns_rows = True
            return
        if sum(sizes) > 1 and any(array.shape == (1,) for array in _arrays(results[0])):
            with mx.autograd.pause():
                tried = self._run(args, (0, 2), 0)
            _gather([tried], [2], self.contexts[0])

    def collect_params(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block).collect_params(self.block, *args, **kwargs)

    def _collect_params_with_prefix(self, *args, **kwargs):
        self._unite_statistics()
        return type(self.block)._collect_params_with_prefix(self.block, *args, **kwargs)

    # Running statistics -------------------------------------------------------------------------

    def _unite_statistics(self):
        """Give all contexts one set of running statistics.

        At the next use, since the backward pass writes them, which comes after ``forward``.
        """
        import mxnet as mx

        if self._rows is None:
            return
        means, others = states_of(self.block, self._operations)
        statistics = [p.list_data() for p in means if p._data is not None]
        with mx.autograd.pause():
            unite(statistics, _replicas.sizes(self._rows, len(self.contexts)))
            check_equal(self.block, others)
        if not mx.autograd.is_recording():
            self._rows = None


# Parameters and trainers ----------------------------------------------------------------------


def _parameters(block):
    return list(type(block).collect_params(block).values())


def _move(block, contexts):
    """Bring parameters, and the trainers that have them, to these contexts where they are not."""
    parameters = _parameters(block)
    for parameter in parameters:
        if parameter._data is not None or parameter._deferred_init:
            if parameter.list_ctx() != contexts:
                parameter.reset_ctx(contexts)
    seen = []
    for parameter in parameters:
        trainer = parameter._trainer
        if trainer is not None and not any(trainer is other for other in seen):
            seen.append(trainer)
            _move_trainer(trainer)


def _move_trainer(trainer):
    """Let a trainer follow its parameters, with the optimizer's state and step counts."""
    try:
        contexts = trainer._check_contexts()
    except (AssertionError, RuntimeError):
        return  # it has another block's parameters, too, which are elsewhere as yet, or not there
    settings, wanted = trainer._kvstore_params, {}
    if len(contexts) > 1 and settings["kvstore"] is None:  # it would sum no gradients over them
        wanted["kvstore"] = "device"
    if len(contexts) > 1 and settings["update_on_kvstore"] is None:
        # As on one context: allreduce_grads() and update() can be called one by one.
        if not trainer._contains_sparse_weight:
            wanted["update_on_kvstore"] = False
    if not wanted and trainer._contexts == contexts:
        return
    settings.update(wanted)
    states = _updaters(trainer)[0].states
    trainer._reset_kvstore()
    trainer._contexts = contexts
    optimizer = trainer._optimizer
    trainer._updaters = [_updater(optimizer) for _ in contexts]
    # Steps are counted per device id: Adam would begin anew on another one.
    counts = getattr(optimizer, "_all_index_update_counts", {})
    counts.update((i, dict(optimizer._index_update_count)) for i in _ids(contexts, counts))
    if states:
        trainer._init_kvstore()
        for updater, context in zip(_updaters(trainer), contexts):
            updater.states = {
                # Now: one that is copied when it is used has another context's update in it.
                index: updater.sync_state_context(state, context)
                for index, state in states.items()
            }
            updater.states_synced = dict.fromkeys(states, False)


def _ids(contexts, counts):
    return {context.device_id for context in contexts} | set(counts)


def _updater(optimizer):
    import mxnet as mx

    return mx.optimizer.get_updater(optimizer)


def _updaters(trainer):
    on_kvstore = trainer._kvstore and trainer._update_on_kvstore
    return [trainer._kvstore._updater] if on_kvstore else trainer._updaters


def _refuse_time_first(block):
    """Refuse layers whose first dimension is time, which would be split for the batch."""
    if getattr(block, "_layout", None) == "TNC":
        raise errors.UnsupportedError(
            "The RNN layer {} takes time as its first dimension, which parallelize() would "
            'split for the batch. Build it with layout="NTC".'.format(block.name)
        )
    for child in block._children.values():
        _refuse_time_first(child)


# Arguments and results, nested as they may be ---------------------------------------------------


def _leaves(value, kind):
    """All of a kind within lists, tuples and dictionaries."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            for leaf in _leaves(each, kind):
                yield leaf


def _arrays(values):
    import mxnet as mx

    return _leaves(values, mx.nd.NDArray)


def _mapped(function, value, place=()):
    """The same with ``function(place, array)`` for each array; a place is a tuple of keys."""
    import mxnet as mx

    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, each, place + (key,)) for key, each in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, dict):
        return {key: _mapped(function, each, place + (key,)) for key, each in value.items()}
    return function(place, value) if isinstance(value, mx.nd.NDArray) else value


def _arrays_in_places(value):
    found = []
    _mapped(lambda place, array: found.append((place, array)), value)
    return found


def _on(context, array):
    return getattr(array, "as_in_ctx", array.as_in_context)(context)  # mx.np has the short one


def _gather(results, sizes, context):
    """The replicas' results as one; of a replica whose shard is empty nothing is kept."""
    import mxnet as mx

    first = results[0]
    if isinstance(first, (list, tuple)):
        return type(first)([_gather(parts, sizes, context) for parts in zip(*results)])
    if isinstance(first, dict):
        return {key: _gather([r[key] for r in results], sizes, context) for key in first}
    if not isinstance(first, mx.nd.NDArray):
        if any(result != first for result in results):
            raise _no_rows_in_result(results, sizes)
        return first
    if any(r.shape[:1] != (max(size, 1),) for r, size in zip(results, sizes)):
        raise _no_rows_in_result([r.shape for r in results], sizes)
    module = mx.np if hasattr(mx, "np") and isinstance(first, mx.np.ndarray) else mx.nd
    arrays = [_on(context, result) for result in results]
    if len(arrays) > 1:
        arrays = [
            mx.np.concatenate(arrays) if module is not mx.nd else mx.nd.concat(*arrays, dim=0)
        ]
    kept = [number for number, size in enumerate(sizes) if size]
    if len(kept) < len(sizes):  # then each has computed one row
        rows = module.array(kept, dtype="int32", ctx=context)
        return module.take(arrays[0], rows, axis=0)
    return arrays[0]


def _no_rows_in_result(shapes, sizes):
    return errors.UnsupportedError(
        "A block on several devices must return arrays with a row for each of the batch; its "
        "replicas were given {} rows and returned {}. Compute totals and means outside of the "
        "block that is parallelized.".format(
            ", ".join(str(size or 1) for size in sizes), ", ".join(map(str, shapes))
        )
    )
