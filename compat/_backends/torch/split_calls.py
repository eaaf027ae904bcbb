"""One call of a model, split: replicas run on their shards, and their values are merged.

Replica i computes the rows ``splitting.run_bounds`` gives it, on its device, one after the other:
work on GPUs is queued, so that they compute at the same time, and autograd runs the backward pass
of each device in a thread of its own. Where replicas reduce values while they run, they take turns:
see ``_rows.replica_threads``.
"""

import contextlib
import copy
import functools
import itertools
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from ... import _rows, errors
from ..._rows import Fallback, Reason, splitting
from ..._rows.replica_threads import DifferentReductions, TurnTakingThreads, current_turn
from ..._rows.splitting import unsplit
from ..._runtime import synchronized, work
from . import executions, kept_rows, linked_values, profiler, weight_copies
from .arguments import Layout, Unchanged, counting_changes, shard_on
from .custom_gradients import check_gradients, custom_gradient
from .graph import tag
from .host_values import choices_of
from .merge_rules import CallPlan, decide
from .merging import NotMergeable, UnchangedState, form
from .outcomes import Outcome, untagged
from .propagation import Propagation
from .reductions import CallReductions, ReducingMode, ReplicaReductions
from .side_effects import is_user_defined
from .thread_state import CallersState
from .trial import PartsTrial, evaluating, prove


@contextlib.contextmanager
def _failing_on_shard():
    """Return a context in which an error shows that the call cannot be split."""
    try:
        yield
    except (NotMergeable, torch.cuda.OutOfMemoryError, errors.UnsupportedError):
        raise
    except Exception as error:
        fallback = getattr(error, "fallback", None) or Fallback(Reason.FAILS_ON_SHARD)
        raise NotMergeable(fallback) from error


class SplitCall:
    """One call of a model on several devices.

    Arguments:
        method: the ``ReplicatedCall`` that was called.
        model: the model.
        arguments: the ``CallArguments``.
    """

    def __init__(self, method, model, arguments):
        self.method, self.model, self.arguments = method, model, arguments
        self.home = method.home(model, arguments)
        self.reductions = {}  # by what is cut
        self.rounds = 0  # how often the call was repeated, since it needs more reductions

    def reductions_of(self, plan: CallPlan) -> CallReductions:
        """Return what this call has shown of the reductions that it needs by a new plan."""
        return self.reductions.setdefault((plan.cuts, plan.kept), CallReductions())

    def tried(self, layout: Layout, plan: CallPlan) -> Any:
        """Return the merged results of the first call by a new plan, which a trial has proved.

        Arguments:
            layout: how the arguments may be cut.
            plan: the ``CallPlan``, which may cut less.

        Raises:
            NotMergeable: it does not merge what one device computes.
            CutOtherwise: the call has left rows in the model, which are to be cut, too.
        """
        plan.reductions = self.reductions_of(plan)
        plan.trial = self.trial(layout._replace(cuts=plan.cuts, kept=plan.kept), plan.reductions)
        plan.trial.outcomes()  # first: three rows show more of functions without a rule
        self.check_kept(layout)
        plan.trial.other_outcomes()  # before replicas may change an argument in place
        return self.computed(layout, plan)

    def computed(self, layout: Layout, plan: CallPlan) -> Any:
        """Return the replicas' merged results; where they do not fit the plan they are watched.

        Arguments:
            layout: how the arguments may be cut.
            plan: the ``CallPlan``, which may cut less.
        """
        plan.watch = plan.watch or any(rows.other is not None for rows in layout.kept)
        cut = layout._replace(cuts=plan.cuts, kept=plan.kept)
        if not plan.watch:
            replicas = self.method.replicas(self.model)
            outcomes = self.run(replicas, cut, plan)
            if plan.fit(outcomes, layout.rows):
                return self.merge(replicas, cut, plan, outcomes)
            plan.watch = True
        replicas = self.method.replicas(self.model)
        outcomes = self.run(replicas, cut, plan)
        self.check_kept(layout)
        return self.merge(replicas, cut, plan, outcomes)

    def kept(self, rows: int) -> "Tuple[Any, ...]":
        """Return rows that the model keeps, in a call of so many: see ``kept_rows``."""
        if not self.method.kept_rows.axes:
            return ()
        effects = self.method.reach(self.model).effects
        effects.note()
        sizes = splitting.sizes(rows, self.replica_count(rows, False))
        return self.method.kept_rows.read(effects, rows, sizes)

    def check_kept(self, layout: Layout) -> None:
        """Check that a call has not shown more rows that the model keeps.

        Raises:
            CutOtherwise: it has.
        """
        if self.kept(layout.rows) != layout.kept:
            raise kept_rows.CutOtherwise

    # Running ----------------------------------------------------------------------------------

    def run(self, replicas, layout, plan):
        """Return each replica's outcome: the first one alone where that shows that weights move.

        The first one has the weights themselves, not copies, as far as none are moved.
        """
        count = self.replica_count(layout.rows, plan.reductions.any_merged)
        names = self.method.devices[:count]
        are_copied = plan.watch or any(key[0] == "weight" for key in plan.rules)
        copied = replicas.values if are_copied else replicas.copied
        with _failing_on_shard():
            sent = self.method.send(self.model, replicas.values, count, copied)
        shards = [
            Shard(
                weight_copies.device_of(name),
                range(*splitting.run_bounds(layout.rows, count, index)),
                size,
                sent[index],
                profiler.REPLICA + name,
            )
            for index, (name, size) in enumerate(zip(names, splitting.sizes(layout.rows, count)))
        ]

        def is_last(outcome):
            return not are_copied and any(key[0] == "weight" for key in outcome.values)

        with executions.recorded(names):
            return self.together(replicas, layout, shards, plan.reductions, plan.watch, is_last)

    def together(self, replicas, layout, shards, reductions, watched, is_last=None, probing=False):
        """Return the outcomes of replicas.

        Arguments:
            replicas: the ``Replicas`` that they are.
            layout: how the arguments are cut.
            shards: a ``Shard`` for each of them.
            reductions: the ``CallReductions`` of such calls.
            watched: whether placements are inferred.
            is_last: a function that returns whether no more are to run, by the outcome of one of
                them; or None.
            probing: see ``Propagation``.

        Raises:
            MoreReductions: values of the whole batch have to be reduced over them first.
        """
        sizes, sequences = [shard.size for shard in shards], []
        numbers = [shard.rows for shard in shards if shard.size]

        def compute(shard):
            turn = current_turn()
            sequences.append(
                ReplicaReductions(reductions, probing, sizes, shard.device, turn, watched, numbers)
            )
            return self.replica(replicas, layout, shard, sequences[-1], watched, probing)

        # What torch.compile() has made runs the functions that it was made of.
        is_eager = watched or reductions
        eager = torch.compiler.set_stance("force_eager") if is_eager else contextlib.ExitStack()
        try:
            with eager, replicas.prepared(watched):
                if reductions.any_merged and len(shards) > 1:
                    functions = [functools.partial(compute, shard) for shard in shards]
                    state = CallersState(self.method.devices)
                    outcomes = TurnTakingThreads(functions, state.entered).run()
                else:
                    outcomes = []
                    for shard in shards:
                        outcomes.append(compute(shard))
                        if is_last is not None and is_last(outcomes[-1]):
                            break  # which is new
            if watched:
                reductions.learn(probing, sequences)
        except (NotMergeable, DifferentReductions) as error:
            if watched:
                reductions.learn_host_values(probing, sequences)
            if isinstance(error, DifferentReductions):
                raise NotMergeable() from None
            raise
        return outcomes

    def replica_count(self, rows: int, is_whole: bool) -> int:
        """Return how many replicas compute so many rows.

        Arguments:
            rows: how many the batch has.
            is_whole: whether replicas reduce values, such as those of batch normalization.
        """
        kind, count = torch.nn.modules.batchnorm._BatchNorm, len(self.method.devices)
        is_reduced = is_whole and synchronized.is_asked(self.model)
        for part in self.model.modules():
            if isinstance(part, kind) and part.training:
                if not (is_reduced or is_whole and synchronized.asks(part)):
                    count = min(count, max(1, rows // 2))  # it refuses a single row in training
        return count

    def replica(self, replicas, layout, shard, reducing, watched, probing=False):
        """Run one replica, and return its outcome.

        Arguments:
            replicas: the ``Replicas`` that it is one of.
            layout: how the arguments are cut.
            shard: the ``Shard`` that it computes.
            reducing: its ``ReplicaReductions``.
            watched: whether placements are inferred.
            probing: see ``Propagation``.
        """
        device, rows, copies = shard.device, shard.rows, shard.copies
        arguments, method, leaves, uncounted = copy.copy(self.arguments), self.method, [], []
        for leaf, where in zip(arguments.leaves, layout.cuts):
            leaf = arguments.copied(leaf, shard_on(device, where, rows, leaf))
            if isinstance(leaf, torch.Tensor) and leaf.is_inference():
                uncounted.append((leaf, counting_changes(leaf)))
                leaf = uncounted[-1][1]
            if watched and where is not None:
                tag(leaf, _rows.Sharded(where))
            leaves.append(leaf)
        propagation = None
        if watched:
            propagation = Propagation(
                self.model, len(rows), layout.rows, method.tried, reducing, probing
            )
            reducing.propagation = propagation
        elif reducing.steps:
            propagation = ReducingMode(reducing)
        replicas.side_effects.replica_rows = kept_rows.ReplicaRows(
            method.kept_rows, layout, device, rows, watched
        )
        mark = contextlib.ExitStack()
        if shard.mark is not None:
            mark = torch.profiler.record_function(shard.mark)
        with mark, arguments.substituted(leaves) as (args, kwargs):
            if reducing.turn is not None:
                reducing.turn.suspensions += [
                    functools.partial(_suspended, mark),
                    arguments.suspended,
                ]
            with unsplit, _failing_on_shard():
                try:
                    plain = method.plain(self.model)
                    result, values, buffers = replicas.run(
                        plain, device, copies, args, kwargs, propagation, reducing
                    )
                finally:
                    if propagation is not None:
                        propagation.paused = True  # an interruption may have kept it from saying so
            for leaf, clone in uncounted:
                if clone._version:
                    with torch.inference_mode():
                        leaf.copy_(clone)
            outcome = Outcome(
                len(rows),
                (result, arguments.changed()),
                values,
                buffers,
                propagation if watched else None,
            )
            # The replica's tensors and device stand for those of the whole batch.
            for key, value in outcome.values.items():
                if isinstance(value, torch.Tensor):
                    outcome.values[key] = arguments.marked(value)
                elif isinstance(value, torch.device) and value == device:
                    outcome.values[key] = self.home
        return outcome

    # Merging ----------------------------------------------------------------------------------

    def merge(self, replicas, layout, plan, outcomes):
        """Set state and losses, and return the result."""
        all_sizes = splitting.sizes(layout.rows, len(outcomes))
        counted = [outcome for outcome, size in zip(outcomes, all_sizes) if size]
        first, sizes = counted[0], list(filter(None, all_sizes))
        if any(list(outcome.values) != list(first.values) for outcome in counted):
            raise NotMergeable()
        if plan.watch:
            try:
                self.decide(replicas, layout, plan, counted, sizes)
            except NotMergeable:
                tried = plan.trial.outcomes() + plan.trial.other_outcomes() if plan.trial else []
                for probing, group in ((False, outcomes), (True, tried)):
                    sequences = [outcome.propagation.reductions for outcome in group]
                    plan.reductions.learn_host_values(probing, sequences)
                raise
        merged = self.merged_values(replicas, plan, outcomes, all_sizes)
        merged.update((key, merged[key].item()) for key in first.numbers)
        merged.update((key, merged[key].numpy()) for key in first.arrays)
        cuts = {id(leaf): cut for leaf, cut in zip(self.arguments.leaves, layout.cuts)}
        for key, value in merged.items():
            rule, is_given = plan.rules[key], isinstance(value, Unchanged)
            axis = cuts.get(id(value.value)) if is_given else rule.axis
            if key[0] == "effect" and axis is not None:
                replicas.side_effects.axes[key] = axis
        merged = {key: untagged(value) for key, value in merged.items()}
        replicas.finish(merged)
        work.count(self.method.devices[: len(all_sizes)], all_sizes, torch.is_grad_enabled())
        return first.unflatten([v for k, v in merged.items() if k[0] == "result"])[0]

    def merged_values(self, replicas, plan, outcomes, all_sizes):
        """Return the merged values by key; of state, those that the call has changed.

        Arguments:
            replicas: those of the call.
            plan: its ``CallPlan``, with a rule for each value.
            outcomes: the ``Outcome`` of each replica, also of those without rows.
            all_sizes: how many rows each of them had.
        """
        home, merged, known_parts = self.home, {}, {}
        counted = [outcome for outcome, size in zip(outcomes, all_sizes) if size]
        first, sizes = counted[0], list(filter(None, all_sizes))
        for key in first.values:
            rule = plan.rules[key]
            if isinstance(rule, UnchangedState):
                continue
            values = [outcome.values[key] for outcome in counted]
            if rule.axis is not None:
                # A replica without rows adds none, and gets gradients of 0.
                pairs = [(outcome.values[key], n) for outcome, n in zip(outcomes, all_sizes)]
                values = [v if n else shard_on(home, rule.axis, range(0), v) for v, n in pairs]
            same = tuple(id(outcome.values[key]) for outcome in outcomes)
            is_state = key[0] in ("state", "weight")
            if same in known_parts and not is_state:  # as a result that is kept besides
                merged[key] = known_parts[same]
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_state):
                merged[key] = rule.merged(values, sizes, home, replicas.before.get(key))
            if isinstance(merged[key], torch.Tensor) and not is_state:
                known_parts[same] = merged[key]
                is_kept = any(value.retains_grad for value in values)
                if merged[key].requires_grad and (is_kept or key in plan.linked):
                    linked_values.Parts.attach(merged[key], values, rule)
        return merged

    def decide(self, replicas, layout, plan, outcomes, sizes):
        """Find the rules of a call that was watched, and whether later ones are watched, too."""
        first, trial = outcomes[0], plan.trial or self.trial(layout, plan.reductions)
        previous, plan.rules = plan.rules, {}
        for key in first.values:
            values = [outcome.values[key] for outcome in outcomes]
            rule = previous.get(key)
            current = form(values[0])
            if rule is None or rule.form != current:
                rule = decide(key, values, sizes, replicas.before.get(key), self.home, trial)
                rule.form = current
            # A number that was taken from a tensor does not show from where.
            rule.is_lasting = rule.is_lasting and key not in first.numbers
            plan.rules[key] = rule
        plan.described = first.described
        if plan.trial is not None or plan.rules != previous:
            prove(trial, plan.rules, replicas.before, self.home)
            plan.linked = linked_values.find(first.values)
        if plan.trial is not None and torch.is_grad_enabled():
            self.check_custom_gradients(replicas, plan, first)
        propagations = [outcome.propagation for outcome in outcomes]
        plan.comparisons.update(*[propagation.comparisons for propagation in propagations])
        choices = choices_of(propagations, plan, layout.rows, self.home)
        if choices.inconclusive:
            self.check_choices(replicas, layout, plan, len(outcomes), choices)
        plan.totals.add(layout.rows)
        plan.watch = choices.by_values or not all(rule.is_lasting for rule in plan.rules.values())

    def check_custom_gradients(self, replicas, plan, outcome):
        """Compare gradients of the plan's trial, if any lead through a user-defined one.

        Raises:
            NotMergeable: they are not those of one device.
        """
        tensors = [leaf for leaf in self.arguments.leaves if isinstance(leaf, torch.Tensor)]
        fallback = custom_gradient(outcome, tensors)
        sources = [v for v in tensors + list(self.model.parameters()) if v.requires_grad]
        if fallback is None or not sources:
            return
        outside, effects = self.method.replicas(self.model).side_effects, {}
        with outside.replica(False, effects):
            check_gradients(plan.trial, plan.rules, replicas.before, self.home, sources, fallback)
        if effects:  # side effects of a hook, which gets the gradients of a shard
            raise NotMergeable(fallback)

    def check_choices(self, replicas, layout, plan, count, choices):
        """Compare the call with all of the batch on one device, which may take another branch.

        Arguments:
            replicas: those of the call.
            layout: how its arguments are cut.
            plan: its ``CallPlan``.
            count: how many replicas have computed rows.
            choices: the ``Choices``, of which some are inconclusive.

        Raises:
            NotMergeable: the branch affects the result.
        """
        parts = [range(*splitting.bounds(layout.rows, count, i)) for i in range(count)]
        try:
            prove(
                self.trial(layout, plan.reductions, parts, others=()),
                plan.rules,
                replicas.before,
                self.home,
            )
        except NotMergeable:
            raise NotMergeable(choices.inconclusive[0]) from None
        plan.harmless.update(choices.lines)

    def trial(
        self,
        layout: Layout,
        reductions: CallReductions,
        parts: Any = _rows.trial.PARTS,
        others: Any = _rows.trial.OTHER_PARTS,
    ) -> PartsTrial:
        """Return a trial of rows of this batch, by one partition of them or by two."""
        last = layout.rows - 1

        def compute(partition, gradients=False):
            """Return the outcomes of these rows, without dropout, and without a trace."""
            if reductions and partition:
                return together(partition, gradients)
            return [outcome for rows in partition for outcome in together([rows], gradients)]

        def together(partition, gradients):
            replicas = self.method.replicas(self.model)
            torchs = itertools.filterfalse(is_user_defined, self.model.modules())
            numbers = replicas.side_effects.random_numbers()
            with numbers, torch.set_grad_enabled(gradients), evaluating(torchs):
                with _failing_on_shard():
                    shards = [self.copied_shard(replicas, rows) for rows in partition]
                outcomes = self.together(replicas, layout, shards, reductions, True, probing=True)
            has_new_tensors = replicas.side_effects.has_new_tensors
            return together(partition, gradients) if has_new_tensors else outcomes

        partitions = [
            [[min(row, last) for row in part] for part in partition]
            for partition in (parts, others)
        ]
        return PartsTrial(compute, *partitions)

    def copied_shard(self, replicas, rows):
        """Return a ``Shard`` of these rows, with copies of all values, on the first device."""
        values = replicas.values.items()
        copies = {key: value.to(self.home, copy=True) for key, value in values}
        return Shard(self.home, rows, len(rows), copies, None)


class Shard(NamedTuple):
    """The part of a call that one replica computes.

    Arguments:
        device: where.
        rows: the numbers of its rows.
        size: how many of these are not computed by another one, too.
        copies: its weights and state, by key.
        mark: how its functions are marked for torch's profiler, or None.
    """

    device: torch.device
    rows: Any
    size: int
    copies: "Dict[Any, torch.Tensor]"
    mark: "Optional[str]"


def _suspended(context):
    context.__exit__(None, None, None)
    return context.__enter__
