"""Replicas of a model on several devices of one process, and the call that runs them.

A model runs there by a ``call`` (Keras) or a ``forward`` (torch) of its own: an attribute of the
instance that hides its class's method. It splits the batch, runs the class's method on each device
with weights copied there, and merges what the replicas made: results, losses, state. The copies
belong to autograd's graph, so that all gradients reach the one set of weights. ``keras_replicas``
and ``native`` have the two kinds of models.
"""

import contextlib
import itertools
import threading

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _keras, _rows, errors
from ..._rows import splitting
from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import executions, kept_rows, linked_values, profiler, tracing
from .arguments import (
    CallArguments,
    Unchanged,
    dimension_choices,
    make_layout,
    shard_on,
    size_along,
)
from .containers import PLAIN, flatten
from .custom_gradients import check_gradients, custom_gradient
from .graph import tag
from .merge_rules import CallPlan, decide
from .merging import NotMergeable, UnchangedState, form, is_one_devices
from .outcomes import Outcome, untagged
from .propagation import Propagation
from .side_effects import is_user_defined
from .trial import PartsTrial, evaluating, prove

# How many arguments may turn out to have as many rows as the batch by chance.
MOST_TRIED = 6


class Replicas:
    """The replicas of a model in one call, and their state; each kind of models has a subclass.

    Attributes:
        outside: a ``CallEffects``.
        before: the values of state before the call, by key.
    """

    def run(self, plain, device, copy, args, kwargs, propagation):
        """Run one replica.

        Arguments:
            plain: the method of the model's class.
            copy: whether weights are copied even where they are on the device.
            propagation: follows the call, or None.

        Returns:
            The result; losses and state that the replica has set, by key; state as it was given.
        """
        raise NotImplementedError

    def finish(self, merged):
        """Set what was merged, by key, once."""
        raise NotImplementedError


class ReplicatedCall(patching.InstanceMethod):
    """A method of a model that runs on several devices.

    Replica i computes the rows ``splitting.run_bounds`` gives it, on its device, one after the
    other: work on GPUs is queued, so that they compute at the same time, and autograd runs the
    backward pass of each device in a thread of its own.

    Arguments with as many rows as the batch, the first tensor among them, are sliced; all else
    is passed whole. What becomes of the results is decided by how they were made: the first call
    of each kind is watched, see ``merging``.

    Arguments:
        belongs_to_step: whether a Keras model became replicated with the one whose steps call it.
    """

    def __init__(self, devices, belongs_to_step=False):
        super().__init__(devices)
        self.belongs_to_step = belongs_to_step
        # By kind of call; None: it runs whole. Deep copies, of the same architecture, share it.
        self.plans = {}
        self.choices = None  # where the rows may be: arguments of ``make_layout``
        self.kept_rows = kept_rows.KeptRows()
        self.tried = {}  # functions without a rule, by the kind of call
        self.lock = threading.RLock()  # one call at a time: the model's weights are the replica's

    @torch.compiler.disable  # what it makes of a model around a parallelized one stops here
    def invoke(self, model, *args, **kwargs):
        if unsplit.here():
            return self.plain(model)(*args, **kwargs)
        arguments = CallArguments(args, kwargs, self.converter(model))
        tensor = next((v for v in arguments.leaves if isinstance(v, torch.Tensor)), None)
        if self.is_only_traced(model, tensor):
            return self.plain(model)(*args, **kwargs)
        executions.begin_call()
        with self.lock:
            return self.divided(model, arguments, args, kwargs)

    def divided(self, model, arguments, args, kwargs):
        """Run a call, split where that is possible."""
        if tracing.is_transformed():
            error = NotMergeable(_rows.Across(None, why="transformed"))
            return self.whole(model, arguments, None, error)
        packed = [v for v in arguments.leaves if isinstance(v, PackedSequence)]
        if packed:
            error = NotMergeable(_rows.Across("PackedSequence", why="unknown"))
            return self.whole(model, arguments, size_along(packed[0], 0), error)
        layouts = self.layouts(model, arguments)
        if not layouts:
            if not all(isinstance(leaf, PLAIN) for leaf in arguments.leaves):
                errors.warn(
                    f"{type(model).__name__} was given no tensor that torch.utils._pytree finds, "
                    "so that there is nothing to split: it runs unsplit, on one device."
                )
            work.count(self.devices, None, torch.is_grad_enabled())
            return self.plain(model)(*args, **kwargs)
        # A call without gradients shows nothing of them.
        reach = self.reach(model)
        switches, numbers = reach.switches()
        mode = model.training, torch.is_grad_enabled(), arguments.key, switches
        kept = self.kept(model, layouts[0].rows)
        layouts = [each._replace(kept=kept) for each in layouts]
        kinds = {mode + (each.cuts, kept): each for each in layouts}
        kind = next((kind for kind in kinds if self.plans.get(kind) is not None), None)
        plan, rows = self.plans.get(kind), layouts[0].rows
        # Of one row nothing can be learned.
        untried = {k: v for k, v in kinds.items() if k not in self.plans and v.rows > 1}
        if plan is None and not untried:
            return self.whole(model, arguments, rows)
        if plan is not None:
            plan.follow_numbers(numbers)
        drawn = contextlib.ExitStack()
        if plan is None or plan.watch:
            drawn = self.replicas(model).outside.random_numbers()
        try:
            if plan is None:
                return self.first_call(model, arguments, untried, numbers)
            return self.computed(model, arguments, kinds[kind], plan)
        except kept_rows.CutOtherwise:
            drawn.close()
            return self.divided(model, arguments, args, kwargs)
        except NotMergeable as error:
            drawn.close()
            result = self.whole(model, arguments, rows, error if rows > 1 else None)
            self.plans.update(dict.fromkeys(untried if plan is None else [kind]))
            return result

    def whole(self, model, arguments, rows, error=None):
        """Run with the whole batch where one device would, which may raise as that would.

        Arguments:
            rows: how many it has, or None.
            error: why, if that was not said before.
        """
        home = self.home(model, arguments)
        leaves = [shard_on(home, None, None, leaf) for leaf in arguments.leaves]
        with unsplit, arguments.given(leaves) as (args, kwargs):
            result = self.plain(model)(*args, **kwargs)
            found, unflatten, _ = flatten(arguments.changed())
        # It may change the caller's containers.
        unflatten([untagged(arguments.own(leaf)) for leaf in found])
        sizes = None if rows is None else work.undivided(self.devices, rows)
        work.count(self.devices, sizes, torch.is_grad_enabled())
        if error is not None:
            name = type(model).__name__ if _keras.keras_of(model) is None else model.name
            _rows.runs_whole(name, error.across, self.devices[0], "The model", self)
        return result

    def computed(self, model, arguments, layout, plan):
        """Return the replicas' merged results; where they do not fit the plan they are watched."""
        given, replicas = layout, self.replicas(model)
        plan.watch = plan.watch or any(each.other is not None for each in given.kept)
        layout = given._replace(cuts=plan.cuts, kept=plan.kept)
        outcomes = self.run(model, replicas, arguments, layout, plan)
        if plan.watch:
            self.check_kept(model, given)
        if plan.watch or plan.fit(outcomes, layout.rows):
            return self.merge(model, replicas, arguments, layout, plan, outcomes)
        plan.watch = True
        return self.computed(model, arguments, given, plan)

    def kept(self, model, rows):
        """Return rows that the model keeps, as a call of so many finds them: see ``kept_rows``."""
        if not self.kept_rows.axes:
            return ()
        effects = self.reach(model).effects
        effects.note()
        count = self.replica_count(model, rows)
        return self.kept_rows.found(effects, rows, splitting.sizes(rows, count))

    def check_kept(self, model, layout):
        """Raise ``CutOtherwise`` where a call has shown more of that."""
        if self.kept(model, layout.rows) != layout.kept:
            raise kept_rows.CutOtherwise

    def first_call(self, model, arguments, layouts, numbers):
        """Watch a call of a new kind, and hold what it shows against a trial.

        Where the model fails on parts of the batch, or mixes their rows, the rows may be elsewhere,
        or an argument may have as many by chance. One that is passed whole is what one device
        computes with.
        """
        failed = []
        for kind, layout in layouts.items():
            others = [number for number, cut in enumerate(layout.cuts) if cut is not None][1:]
            others += [each for each in layout.kept if each.other is None]
            for whole in [None] + others[:MOST_TRIED]:
                cuts = [None if place == whole else cut for place, cut in enumerate(layout.cuts)]
                kept = tuple(each for each in layout.kept if each != whole)
                plan = CallPlan(tuple(cuts), kept, numbers)
                tried = layout._replace(cuts=plan.cuts, kept=kept)
                plan.trial = self.trial(model, arguments, tried)
                try:
                    plan.trial.outcomes()  # first: three rows tell more of what has no rule
                    self.check_kept(model, layout)
                    result = self.computed(model, arguments, layout, plan)
                    self.plans[kind] = plan
                    return result
                except NotMergeable as error:
                    if len(layouts) == 1 or plan.trial.finds_sequences():
                        failed.append(error)
        raise (failed + [NotMergeable(_rows.Across(None, why="rows"))])[0]

    def layouts(self, model, arguments):
        """List how the arguments may be cut, the likeliest first."""
        self.choices = self.choices or dimension_choices(model)
        found = [make_layout(arguments, *choice) for choice in self.choices]
        return [layout for layout in found if layout is not None]

    # Running ----------------------------------------------------------------------------------

    def run(self, model, replicas, arguments, layout, plan):
        """Return each replica's outcome: the first one alone where that shows that weights move.

        The first one has the weights themselves, not copies, as far as none are moved.
        """
        outcomes, count = [], self.replica_count(model, layout.rows)
        copies = plan.watch or any(key[0] == "weight" for key in plan.rules)
        for index, name in enumerate(self.devices[:count]):
            # On the CPU "cpu:1" is a name only.
            device = torch.device("cpu" if name.startswith("cpu") else name)
            rows, copy = range(*splitting.run_bounds(layout.rows, count, index)), index > 0
            mark = torch.profiler.record_function(profiler.REPLICA + name)
            with executions.recorded(self.devices[:count]), mark:
                outcome = self.replica(
                    model, replicas, arguments, layout, device, rows, copies or copy, plan.watch
                )
            outcomes.append(outcome)
            if not copies and any(key[0] == "weight" for key in outcome.values):
                break  # which is new
        return outcomes

    def replica_count(self, model, rows):
        """Return how many replicas compute so many rows."""
        kind, count = torch.nn.modules.batchnorm._BatchNorm, len(self.devices)
        if any(isinstance(part, kind) and part.training for part in model.modules()):
            count = min(count, max(1, rows // 2))  # it refuses a single row in training
        return count

    def replica(
        self, model, replicas, arguments, layout, device, rows, copy, watched, probing=False
    ):
        """Run one replica, and return its outcome.

        Arguments:
            rows: the numbers of the rows that it computes.
        """
        leaves = []
        for leaf, where in zip(arguments.leaves, layout.cuts):
            leaf = arguments.copied(leaf, shard_on(device, where, rows, leaf))
            if watched and where is not None:
                tag(leaf, _rows.Sharded(where))
            leaves.append(leaf)
        propagation = (
            Propagation(model, len(rows), layout.rows, self.tried, probing) if watched else None
        )
        own = kept_rows.OwnRows(self.kept_rows, layout, device, rows, watched)
        replicas.outside.own_rows = own
        with arguments.given(leaves) as (args, kwargs):
            # What torch.compile() has made runs the functions that it was made of.
            eager = torch.compiler.set_stance("force_eager") if watched else contextlib.ExitStack()
            with unsplit, eager:
                try:
                    plain = self.plain(model)
                    result, values, buffers = replicas.run(
                        plain, device, copy, args, kwargs, propagation
                    )
                except (NotMergeable, torch.cuda.OutOfMemoryError, errors.UnsupportedError):
                    raise
                except Exception as error:
                    across = getattr(error, "across", None) or _rows.Across(None, why="fails")
                    raise NotMergeable(across) from error
                finally:
                    if watched:
                        propagation.paused = True  # an interruption may have kept it from saying so
            outcome = Outcome(
                len(rows), (result, arguments.changed()), values, buffers, propagation
            )
            # What is the replica's own becomes what it is of the whole batch.
            for key, value in outcome.values.items():
                if isinstance(value, torch.Tensor):
                    outcome.values[key] = arguments.own(value)
                elif isinstance(value, torch.device) and value == device:
                    outcome.values[key] = self.home(model, arguments)
        return outcome

    # Putting together -------------------------------------------------------------------------

    def merge(self, model, replicas, arguments, layout, plan, outcomes):
        """Set state and losses, and return the result."""
        all_sizes = splitting.sizes(layout.rows, len(outcomes))
        counted = [outcome for outcome, size in zip(outcomes, all_sizes) if size]
        first, sizes = counted[0], list(filter(None, all_sizes))
        if any(list(outcome.values) != list(first.values) for outcome in counted):
            raise NotMergeable()
        home = self.home(model, arguments)
        if plan.watch:
            self.decide(model, replicas, arguments, layout, plan, counted, sizes, home)
        merged, known_parts = {}, {}
        for key in first.values:
            rule = plan.rules[key]
            if isinstance(rule, UnchangedState):
                continue
            values = [outcome.values[key] for outcome in counted]
            if rule.axis is not None:
                # Of a replica without rows of its own none: it gets gradients, 0, too.
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
        merged.update((key, merged[key].item()) for key in first.numbers)
        merged.update((key, merged[key].numpy()) for key in first.arrays)
        cuts = {id(leaf): cut for leaf, cut in zip(arguments.leaves, layout.cuts)}
        for key, value in merged.items():
            rule, is_given = plan.rules[key], isinstance(value, Unchanged)
            axis = cuts.get(id(value.value)) if is_given else rule.axis
            if key[0] == "effect" and axis is not None:
                replicas.outside.axes[key] = axis
        merged = {key: untagged(value) for key, value in merged.items()}
        replicas.finish(merged)
        work.count(self.devices[: len(all_sizes)], all_sizes, torch.is_grad_enabled())
        return first.unflatten([v for k, v in merged.items() if k[0] == "result"])[0]

    def decide(self, model, replicas, arguments, layout, plan, outcomes, sizes, home):
        """Find the rules of a call that was watched."""
        first, trial = outcomes[0], plan.trial or self.trial(model, arguments, layout)
        previous, plan.rules = plan.rules, {}
        for key in first.values:
            values = [outcome.values[key] for outcome in outcomes]
            rule = previous.get(key)
            found = form(values[0])
            if rule is None or rule.form != found:
                rule = decide(key, values, sizes, replicas.before.get(key), home, trial)
                rule.form = found
            # A number that was taken from a tensor does not show from where.
            rule.is_lasting = rule.is_lasting and key not in first.numbers
            plan.rules[key] = rule
        plan.described = first.described
        if plan.trial is not None or plan.rules != previous:
            prove(trial, plan.rules, replicas.before, home)
            plan.linked = linked_values.find(first.values)
        if plan.trial is not None and torch.is_grad_enabled():
            given = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
            across = custom_gradient(first, given)
            sources = [v for v in given + list(model.parameters()) if v.requires_grad]
            if across is not None and sources:
                outside, found = self.replicas(model).outside, {}
                with outside.replica(False, found):
                    check_gradients(trial, plan.rules, replicas.before, home, sources, across)
                if found:  # what a hook leaves outside, of which each device sees a part
                    raise NotMergeable(across)
        plan.trial = None
        chosen = self.follow_choices(model, replicas, arguments, layout, plan, outcomes, home)
        plan.watch = chosen or not all(rule.is_lasting for rule in plan.rules.values())

    def follow_choices(self, model, replicas, arguments, layout, plan, outcomes, home):
        """Return whether Python chose its way by the rows' values: later calls are watched then.

        Where one device might have taken another way, all of the batch is computed on one: the
        numbers tell whether that matters.
        """
        propagations = [outcome.propagation for outcome in outcomes]
        plan.comparisons.update(*[watch.comparisons for watch in propagations])
        by_count = [watch.by_count for watch in propagations if watch.by_count is not None]
        doubtful, lines, chosen = [] if layout.rows in plan.totals else by_count, [], False
        for escapes in itertools.zip_longest(*[watch.escapes for watch in propagations]):
            first = next(escape for escape in escapes if escape is not None)
            if str(first.across) not in plan.harmless:
                chosen = True
                if None in escapes or not is_one_devices(escapes, home):
                    doubtful.append(first.across)
                    if not isinstance(first.tag, _rows.Mixed):  # that may be chance
                        lines.append(str(first.across))
        if doubtful:
            count = len(outcomes)
            parts = [range(*splitting.bounds(layout.rows, count, i)) for i in range(count)]
            try:
                trial = self.trial(model, arguments, layout, parts)
                prove(trial, plan.rules, replicas.before, home)
            except NotMergeable:
                raise NotMergeable(doubtful[0]) from None
            plan.harmless.update(lines)
        plan.totals.add(layout.rows)
        return chosen

    def trial(self, model, arguments, layout, parts=_rows.trial.PARTS):
        """Return a trial of rows of this batch; what is sorted stays sorted."""
        home, last = self.home(model, arguments), layout.rows - 1

        def compute(rows, gradients=False):
            """Compute with these rows, without dropout, and without a trace."""
            replicas, torchs = (
                self.replicas(model),
                itertools.filterfalse(is_user_defined, model.modules()),
            )
            numbers = replicas.outside.random_numbers()
            with numbers, torch.set_grad_enabled(gradients), evaluating(torchs):
                found = self.replica(
                    model, replicas, arguments, layout, home, rows, True, True, probing=True
                )
            return compute(rows, gradients) if replicas.outside.found_more else found

        return PartsTrial(compute, [[min(row, last) for row in part] for part in parts])
