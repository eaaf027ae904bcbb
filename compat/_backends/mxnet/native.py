"""Gluon blocks on several contexts."""

import contextlib
import functools
from typing import Any, Dict, List, Optional, Set, Tuple

import mxnet as mx

from ... import _rows, errors
from ..._configuration import settings
from ..._rows import Fallback, Placement, Reason, splitting
from ..._rows.replica_threads import current_turn
from ..._rows.splitting import unsplit
from ..._runtime import synchronized, work
from . import batch_norm, merging, reductions, state, weight_copies
from .arguments import Arguments
from .arrays import context_of, leaves
from .locks import making
from .optimizer_states import move_trainer
from .replicas import Replicas, ReplicatedCall
from .side_effects import SideEffects
from .state import blocks, kept_blocks, parameters_of, states_of
from .synchronization import clear_errors, wait_for_updates
from .trial import BlockTrial
from .verification import BlockCall
from .watched_calls import WatchedBlock


def parallelize(block, contexts):
    """Run ``block`` on ``contexts``; a single one restores the plain behaviour."""
    replicas = vars(block).get("_compat_replicas")
    if not hasattr(mx.gluon.Block, "register_forward_hook"):
        if len(contexts) > 1 or contexts_of(block) not in ([], contexts):
            raise errors.unsupported(
                "mxnet",
                f"run a Gluon block on {settings.listed(list(map(str, contexts)))}: before MXNet "
                "1.3 a parameter does not know its trainer",
                "Install MXNet 1.3 or newer, or leave the block where it is.",
            )
    elif len(contexts) > 1:
        (replicas or BlockReplicas(block)).move(contexts)
    else:
        if replicas is not None:
            replicas.remove()
        move(block, contexts[0])


def move(block, context):
    """Move parameters, and the trainers that have them, to this context.

    Those on several contexts are left there: their script splits its batches by itself.
    """
    for parameter in parameters_of(block):
        if len(_contexts_of(parameter)) == 1 and _contexts_of(parameter) != [context]:
            parameter.reset_ctx(context)
    move_trainers(block, context)


def move_trainers(block, context):
    """Move the trainers that have a block's parameters to this context."""
    for trainer in {parameter._trainer for parameter in parameters_of(block)} - {None}:
        if trainer._contexts != [context]:
            move_trainer(trainer)


def _contexts_of(parameter):
    is_made = parameter._data is not None or parameter._deferred_init
    return parameter.list_ctx() if is_made else []


def contexts_of(block):
    """Return the contexts of a block's parameters, as far as these are made."""
    # By numbers: there are many objects of one context, which are slow to compare.
    contexts: "Dict[Tuple[int, int], Any]" = {}
    for parameter in parameters_of(block):
        for context in _contexts_of(parameter):
            contexts.setdefault((context.device_typeid, context.device_id), context)
    return [contexts[key] for key in sorted(contexts)]


def _asks(block):
    """Return whether a block asks for the statistics of the whole batch, for all within it."""
    return synchronized.asks(block) or synchronized.is_asked(block)


class ReplicatedForward(ReplicatedCall):
    """A block's ``forward``, which Gluon calls."""

    method = "forward"

    def invoke(self, block, *args):
        """Run the replicas."""
        try:
            return self.replicas.forward(args)
        except BaseException:
            if not unsplit.here():
                WatchedBlock.abandon()
            raise


class BlockReplicas(Replicas):
    """The replicas of one block: a ``forward`` that splits, and copies of its parameters.

    Each array argument with as many rows as the first one is split along its first dimension,
    others are passed whole; each replica runs its shard on its context, and the results are merged
    on the first context. Autograd records all of that, including the copying of parameters to
    replicas (``state``): after a backward pass the one gradient of each parameter is that of the
    whole batch, for any code that reads or changes it.

    Differs from one context:

    - BatchNorm normalises each shard by its own statistics, unless it is asked for those of the
      whole batch: then replicas take turns, see ``reductions``. The running ones take one step to
      the mean of the replicas' new values, weighted by shard size, before they are next used,
      read or saved. (MXNet's own practice lets them drift apart.)
    - Dropout draws an independent mask in each replica.

    Before its first call of a kind a block is tried: three rows together, against two of them and
    the third. A HybridBlock is traced, too, for the placements of its results, and for the
    operations that write states. A block that mixes rows, or whose custom states depend on them,
    runs unsplit on the first context, with a warning.

    A script that has the parameters on several contexts splits its batches by itself: each array
    runs on its own context, with a warning.

    ``Block.__call__`` calls a block's ``forward`` on the instance, where it is replaced: it stays
    the same object, and its children stay plain.
    """

    calls = (ReplicatedForward,)

    def __init__(self, block):
        self.block = block
        self._sizes = None  # of the shards of the last batch trained, while statistics may differ
        self._passes = 0  # how many backward passes there had been then
        self.arguments = Arguments()
        self.operations: "Dict[str, str]" = {}  # by state: the traced operation that sets it
        # By kind of arguments: the results' placements, or None if they run unsplit; and the rows
        # of the trial, of which a single one is inconclusive.
        self._kinds: "Dict[Any, Tuple[Optional[List[Placement]], int]]" = {}
        self._done: "Set[Any]" = set()  # the kinds of which there was a call
        self._is_normalizing = False
        self._has_asking = False  # in containers
        self.effects = SideEffects(block)
        self.verification = None  # of the first calls
        state.follow_replicas()
        state.count_backward_passes()
        self.install_on(block)

    def move(self, contexts: "List[Any]") -> None:
        """Run on other contexts from now on."""
        self._unite_statistics()
        self.contexts = contexts
        self.names = [str(context) for context in contexts]
        self.copies = state.Copies(contexts)
        self._has_asking = any(map(_asks, kept_blocks(self.block)))
        move(self.block, contexts[0])

    def prepare(self, present):
        """Follow changes of the block since the last call: initialized parameters, new trainers.

        Arguments:
            present: the contexts on which its parameters are.
        """
        if len(present) == 1 and present[0] in self.contexts:
            if present != self.contexts[:1]:
                self.move(present + [other for other in self.contexts if other != present[0]])
            move_trainers(self.block, present[0])
        else:
            self._unite_statistics()
            move(self.block, self.contexts[0])

    def remove(self) -> None:
        """Restore the block's own ``forward``."""
        self._unite_statistics()
        self.remove_from(self.block)

    # Called by Gluon ----------------------------------------------------------------------------

    def forward(self, args: "Tuple[Any, ...]") -> "Any":
        """Return the block's result for the whole batch."""
        arrays = list(leaves(args))
        if not arrays or not arrays[0].shape or unsplit.here():
            # Symbols, too: the block is being exported.
            if current_turn() is not None and synchronized.is_asked(self.block):
                with batch_norm.synchronizing(True):  # within a block that may not ask for it
                    return self.plain(args)
            return self.plain(args)
        with self._calling:
            return self._called(args, arrays)

    def _called(self, args, arrays):
        contexts = contexts_of(self.block)
        if len(contexts) > 1:
            return self._run_where_arrays_lie(args, settings.listed(list(map(str, contexts))))
        self.prepare(contexts)
        self._check_contexts(arrays)
        self._is_normalizing = mx.autograd.is_training() and self._normalizes()
        verification = self.verification
        if verification is not None and self._kinds[self._kind(args)][0] is not None:
            # On which batch normalization and dropout depend, not on whether autograd records.
            kind = "train" if mx.autograd.is_training() else "predict"
            if verification.is_due(kind):
                self._unite_statistics()
                return verification.verify(kind, BlockCall(self, args))
        return self.run(args)

    def plain(self, args: "Tuple[Any, ...]") -> "Any":
        """Return the result of the block's own ``forward``."""
        (forward,) = self.methods
        return forward.plain(self.block)(*args)

    def _run_where_arrays_lie(self, args, contexts):
        """Run the block of a script that splits its batches by itself."""
        _rows.warn_unsplit(
            self.block,
            self.block.name,
            Fallback(Reason.SEVERAL_CONTEXTS),
            contexts,
            "Each array",
            self,
        )
        array = next(leaves(args))
        work.count([str(context_of(array))], [array.shape[0]], mx.autograd.is_training())
        with unsplit:
            return self.plain(args)

    def _check_contexts(self, arrays):
        others = {str(context_of(array)) for array in arrays}.intersection(self.names[1:])
        if others:
            raise errors.UnsupportedError(
                f"The block {self.block.name!r} was given an array on {min(others)}, but its "
                f"parameters are on {self.names[0]}: parallelize() splits each batch by itself. "
                f"Give the block whole batches on {self.names[0]}, without "
                "gluon.utils.split_and_load(); or initialize it on all contexts of the script, "
                "which then runs as if it were not parallelized."
            )

    def run_unsplit(self, args: "Tuple[Any, ...]") -> "Any":
        """Run the block on the first context alone, where no replica is running."""
        self._unite_statistics()
        self.copies.begin()
        if self._sizes is not None:
            self._sizes = work.unsplit_sizes(self.names, 1)
        return self.written(self.contexts[0], args, lambda array: array)

    def written(self, context, args, rows):
        """Run the block's own ``forward`` on a context, where blocks within do not split again.

        Arguments:
            context: the replica's.
            args: those of the whole batch.
            rows: a function that returns a replica's shard of an array.
        """
        with unsplit, context, contextlib.ExitStack() as stack:
            if self.reduces():
                is_asked = synchronized.is_asked(self.block)
                stack.enter_context(batch_norm.synchronizing(is_asked))
            return self.plain(self.arguments.shard(args, rows, context))

    def run(self, args: "Tuple[Any, ...]") -> "Any":
        """Run the block on all contexts, or unsplit on the first one."""
        kind = self._kind(args)
        placements, _ = self._kinds[kind]
        reduces = self.reduces()
        if reduces and placements is not None and self._compiled_batch_norm():
            self._leave_unsplit(kind, Fallback(Reason.CROSS_BATCH, self._compiled_batch_norm()))
            placements = None
        if placements is None:
            return self._run_counted(args)
        self._unite_statistics()
        rows, count = next(leaves(args)).shape[0], len(self.contexts)
        all_sizes = splitting.sizes(rows, count)
        replicas = [i for i, size in enumerate(all_sizes) if size]
        sizes = [all_sizes[i] for i in replicas]
        copies, effects, changes = self.copies, self.effects, []
        statistics, states = states_of(self.block, self.operations)
        copies.begin(states, replicas, statistics)
        effects.begin()
        if kind not in self._done:
            copies.guard([p for p in parameters_of(self.block) if p not in statistics])
        fallback = Fallback(Reason.NO_RULE)  # unless all replicas succeed

        def replica(i):
            if current_turn() is not None:
                current_turn().suspensions.append(effects.suspended)
            part = slice(*splitting.run_bounds(rows, count, i))
            with copies.replica(i):
                result = self.written(self.contexts[i], args, lambda array: array[part])
            return result, effects.taken()

        try:
            if reduces:
                outcomes = reductions.run([functools.partial(replica, i) for i in replicas])
            else:
                outcomes = [replica(i) for i in replicas]
            results, changes = map(list, zip(*outcomes))
            unmerged = copies.united(replicas)
            if unmerged is None and not merging.are_of(placements, results, sizes):
                unmerged = Fallback(Reason.TRIAL_DIFFERS)
            if unmerged is None:
                result = merging.merged(placements, results, sizes, self.contexts[0])
                unmerged = effects.write(changes, sizes, self.contexts[0])
            fallback = unmerged
        except Exception:
            # The user's, which the unsplit run raises again; or because of a shard's shape.
            clear_errors()
        finally:  # also where it is interrupted
            if fallback is not None:
                effects.restore()
                copies.restore()
        if fallback is None or not effects.lack_rules(changes):
            self._done.add(kind)
        elif kind in self._kinds:
            # The call has changed values of which there was no trial.
            del self._kinds[kind]
            return self.run(args)
        if fallback is not None:
            result = self._run_counted(args)  # raises errors that are the user's
            self._leave_unsplit(kind, fallback)
            return result
        self._note_batch(all_sizes, statistics)
        return result

    def _run_counted(self, args):
        """Run the block unsplit, and count the batch."""
        result = self.run_unsplit(args)
        statistics, _ = states_of(self.block, self.operations)
        self._note_batch(work.unsplit_sizes(self.names, next(leaves(args)).shape[0]), statistics)
        return result

    def _note_batch(self, sizes, statistics):
        if mx.autograd.is_training() and mx.autograd.is_recording():
            self._sizes, self._passes = sizes, state.backward_passes()
            for parameter in statistics:
                state.pending[parameter] = self._unite_statistics
        work.count(self.names, sizes, mx.autograd.is_training())

    # Kinds of calls -----------------------------------------------------------------------------

    def _kind(self, args):
        """Return the kind of a call, after it was decided whether calls of this kind are split."""
        can_be_split, arguments = self.arguments.kind(args)
        kind = mx.autograd.is_recording(), can_be_split, arguments
        rows = next(leaves(args)).shape[0]
        # A trial on a single row is inconclusive, and repeated.
        if kind not in self._kinds or self._kinds[kind][1] < min(rows, 2):
            self._unite_statistics()
            with making:
                decision = Fallback(Reason.CROSS_BATCH)
                if can_be_split:
                    decision = BlockTrial(self).decide(args)
            if isinstance(decision, Fallback):
                self._leave_unsplit(kind, decision)
            else:
                self._kinds[kind] = decision, rows
        return kind

    def _leave_unsplit(self, kind, fallback):
        name, context = self.block.name, self.contexts[0]
        _rows.warn_unsplit(self.block, name, fallback, context, "The block", self)
        self._kinds[kind] = None, 2

    # Batch normalization ------------------------------------------------------------------------

    def _normalizes(self):
        """Return whether blocks within may normalize by the statistics of the whole batch."""
        if not set(batch_norm.SYNCHRONIZED).isdisjoint(self.operations.values()):
            return True
        if not synchronized.is_asked(self.block):
            return self._has_asking or any(map(_asks, blocks(self.block)))
        parts = list(blocks(self.block))
        return bool(synchronized.layers((part.name, part) for part in parts)) or any(
            isinstance(part, mx.gluon.SymbolBlock) or not type(part).__module__.startswith("mxnet.")
            for part in parts
        )

    def reduces(self) -> bool:
        """Return whether replicas normalize by the statistics of the whole batch, as it is now."""
        return self._is_normalizing and mx.autograd.is_training()

    def normalized_apart(self) -> "List[Any]":
        """Return the running statistics of which replicas have those of their own rows."""
        is_asked, synchronizing = synchronized.is_asked(self.block), batch_norm.SYNCHRONIZED
        kinds = synchronizing + (batch_norm.NORMALIZING if is_asked else ())
        asking = [part for part in blocks(self.block) if _asks(part)]
        layers = {layer for part in asking for layer in blocks(part)}
        united = {parameter for layer in layers for parameter in layer.params.values()}
        means, _ = states_of(self.block, self.operations)
        return [p for p in means if p not in united and self.operations.get(p.name) not in kinds]

    def _compiled_batch_norm(self):
        """Return the name of a block that MXNet has as a graph, which cannot wait; or None."""
        for part in blocks(self.block):
            if isinstance(part, mx.gluon.SymbolBlock):
                if batch_norm.is_in_graph(part, synchronized.is_asked(self.block)):
                    return part.name
        return None

    def arrays_of(self, parameter: "Any") -> "List[Any]":
        """Return the arrays of a parameter in all replicas."""
        return list(self.copies.arrays_of(parameter).values())

    # States -------------------------------------------------------------------------------------

    def custom_states(self) -> "List[Any]":
        """Return the parameters that the block sets, other than running statistics."""
        return states_of(self.block, self.operations)[1]

    def _unite_statistics(self):
        """Give all contexts the same running statistics.

        This is called before their next use, since the backward pass writes them after ``forward``.
        """
        if self._sizes is None:
            return
        means, others = states_of(self.block, self.operations)
        with mx.autograd.pause():
            for parameter in means:
                arrays = self.copies.arrays_of(parameter)
                sizes = [self._sizes[index] for index in arrays]
                weight_copies.unite([list(arrays.values())], sizes)
            if others:
                wait_for_updates()
            differing = [p for p in others if self.copies.is_set_since(p, self._sizes)]
        if not mx.autograd.is_recording() and state.backward_passes() > self._passes:
            self._sizes = None
            for parameter in means:
                state.pending.pop(parameter, None)
        state.check_equal(self.block, differing)
