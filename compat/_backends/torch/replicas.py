"""Models on several devices of one process.

A model runs there by a ``call`` (Keras) or a ``forward`` (torch) of its own: an attribute of the
instance that hides its class's method. It splits the batch, runs the class's method on each device
with weights copied there, and puts together what the replicas made: results, losses, state. The
copies belong to autograd's graph, so that all gradients reach the one set of weights.
``models`` has the two kinds of models.
"""

import contextlib
import itertools
import threading

import torch

from ... import _keras, _rows, errors
from ..._rows import split_rows
from ..._runtime import patching, work
from . import batches, calls, executions, kept_rows, linked_values, merging, timeline, tracing
from .batches import evaluating, is_users
from .calls import NotMergeable, tag
from .outcomes import Outcome, PartsTrial, part_on, untagged
from .watch import Watch

# How many arguments may turn out to have as many rows as the batch by chance.
MOST_TRIED = 6


class ReplicatedMethod(patching.InstanceMethod):
    """A method of a model that runs on several devices.

    Replica i computes the rows ``split_rows.run_bounds`` gives it, on its device, one after the
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
        self.known = {}
        self.choices = None  # where the rows may be: arguments of ``batches.layout``
        self.kept_rows = kept_rows.KeptRows()
        self.tried = {}  # functions without a rule, by the kind of call
        self.lock = threading.RLock()  # one call at a time: the model's weights are the replica's

    @torch.compiler.disable  # what it makes of a model around a parallelized one stops here
    def invoke(self, model, *args, **kwargs):
        if split_rows.runs_undivided():
            return self.plain(model)(*args, **kwargs)
        arguments = batches.DividedArguments(args, kwargs, self.converter(model))
        tensor = next((v for v in arguments.leaves if isinstance(v, torch.Tensor)), None)
        if self.is_only_traced(model, tensor):
            return self.plain(model)(*args, **kwargs)
        executions.begin_call()
        with self.lock:
            return self.divided(model, arguments, args, kwargs)

    def divided(self, model, arguments, args, kwargs):
        """A call that is divided where that is possible."""
        if tracing.is_transformed():
            error = NotMergeable(_rows.Across(None, why="transformed"))
            return self.whole(model, arguments, None, error)
        packed = [v for v in arguments.leaves if isinstance(v, batches.PackedSequence)]
        if packed:
            error = NotMergeable(_rows.Across("PackedSequence", why="unknown"))
            return self.whole(model, arguments, batches.size(packed[0], 0), error)
        layouts = self.layouts(model, arguments)
        if not layouts:
            if not all(isinstance(leaf, batches.PLAIN) for leaf in arguments.leaves):
                errors.warn(
                    f"{type(model).__name__} was given no tensor, as far as torch.utils._pytree "
                    "finds them, which cannot be divided: it runs on one device."
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
        kind = next((kind for kind in kinds if self.known.get(kind) is not None), None)
        known, rows = self.known.get(kind), layouts[0].rows
        # Of one row nothing can be learned.
        untried = {k: v for k, v in kinds.items() if k not in self.known and v.rows > 1}
        if known is None and not untried:
            return self.whole(model, arguments, rows)
        if known is not None:
            known.follow_numbers(numbers)
        drawn = contextlib.ExitStack()
        if known is None or known.watch:
            drawn = self.state(model).outside.random_numbers()
        try:
            if known is None:
                return self.first_call(model, arguments, untried, numbers)
            return self.computed(model, arguments, kinds[kind], known)
        except kept_rows.CutOtherwise:
            drawn.close()
            return self.divided(model, arguments, args, kwargs)
        except NotMergeable as error:
            drawn.close()
            result = self.whole(model, arguments, rows, error if rows > 1 else None)
            self.known.update(dict.fromkeys(untried if known is None else [kind]))
            return result

    def whole(self, model, arguments, rows, error=None):
        """Run with the whole batch where one device would, which may raise as that would.

        Arguments:
            rows: how many it has, or None.
            error: why, if that was not said before.
        """
        home = self.home(model, arguments)
        leaves = [part_on(home, None, None, leaf) for leaf in arguments.leaves]
        with split_rows.undivided(), arguments.given(leaves) as (args, kwargs):
            result = self.plain(model)(*args, **kwargs)
            found, unflatten, _ = batches.flatten(arguments.changed())
        # It may change the caller's containers.
        unflatten([untagged(arguments.own(leaf)) for leaf in found])
        sizes = None if rows is None else work.undivided(self.devices, rows)
        work.count(self.devices, sizes, torch.is_grad_enabled())
        if error is not None:
            name = type(model).__name__ if _keras.keras_of(model) is None else model.name
            _rows.runs_whole(name, error.across, self.devices[0], "The model", self)
        return result

    def computed(self, model, arguments, layout, known):
        """What the replicas compute, put together; where it is not what is known it is watched."""
        given, state = layout, self.state(model)
        known.watch = known.watch or any(each.other is not None for each in given.kept)
        layout = given._replace(cuts=known.cuts, kept=known.kept)
        outcomes = self.run(model, state, arguments, layout, known)
        if known.watch:
            self.check_kept(model, given)
        if known.watch or known.fit(outcomes, layout.rows):
            return self.merge(model, state, arguments, layout, known, outcomes)
        known.watch = True
        return self.computed(model, arguments, given, known)

    def kept(self, model, rows):
        """What the model keeps of rows, which a call of so many finds: see ``kept_rows``."""
        if not self.kept_rows.axes:
            return ()
        effects = self.reach(model).effects
        effects.note()
        count = self.replica_count(model, rows)
        return self.kept_rows.found(effects, rows, split_rows.sizes(rows, count))

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
                known = merging.Known(tuple(cuts), kept, numbers)
                tried = layout._replace(cuts=known.cuts, kept=kept)
                known.trial = self.trial(model, arguments, tried)
                try:
                    known.trial.outcomes()  # first: three rows tell more of what has no rule
                    self.check_kept(model, layout)
                    result = self.computed(model, arguments, layout, known)
                    self.known[kind] = known
                    return result
                except NotMergeable as error:
                    if len(layouts) == 1 or known.trial.finds_sequences():
                        failed.append(error)
        raise (failed + [NotMergeable(_rows.Across(None, why="rows"))])[0]

    def layouts(self, model, arguments):
        """How the arguments may be cut, the likeliest first."""
        self.choices = self.choices or batches.choices(model)
        found = [batches.layout(arguments, *choice) for choice in self.choices]
        return [layout for layout in found if layout is not None]

    # Running ----------------------------------------------------------------------------------

    def run(self, model, state, arguments, layout, known):
        """The outcome of each replica: of the first one alone where that shows that weights move.

        The first one has the weights themselves, not copies, as far as none are moved.
        """
        outcomes, count = [], self.replica_count(model, layout.rows)
        copies = known.watch or any(key[0] == "weight" for key in known.rules)
        for index, name in enumerate(self.devices[:count]):
            # On the CPU "cpu:1" is a name only.
            device = torch.device("cpu" if name.startswith("cpu") else name)
            rows, copy = range(*split_rows.run_bounds(layout.rows, count, index)), index > 0
            mark = torch.profiler.record_function(timeline.REPLICA + name)
            with executions.recorded(self.devices[:count]), mark:
                outcome = self.replica(
                    model, state, arguments, layout, device, rows, copies or copy, known.watch
                )
            outcomes.append(outcome)
            if not copies and any(key[0] == "weight" for key in outcome.values):
                break  # which is new
        return outcomes

    def replica_count(self, model, rows):
        """How many replicas compute so many rows."""
        kind, count = torch.nn.modules.batchnorm._BatchNorm, len(self.devices)
        if any(isinstance(part, kind) and part.training for part in model.modules()):
            count = min(count, max(1, rows // 2))  # it refuses a single row in training
        return count

    def replica(self, model, state, arguments, layout, device, rows, copy, watched, probing=False):
        """Run one replica, and return its outcome.

        Arguments:
            rows: the numbers of the rows that it computes.
        """
        leaves = []
        for leaf, where in zip(arguments.leaves, layout.cuts):
            leaf = arguments.copied(leaf, part_on(device, where, rows, leaf))
            if watched and where is not None:
                tag(leaf, _rows.Sharded(where))
            leaves.append(leaf)
        watch = Watch(model, len(rows), layout.rows, self.tried, probing) if watched else None
        own = kept_rows.OwnRows(self.kept_rows, layout, device, rows, watched)
        state.outside.own_rows = own
        with arguments.given(leaves) as (args, kwargs):
            # What torch.compile() has made runs the functions that it was made of.
            eager = torch.compiler.set_stance("force_eager") if watched else contextlib.ExitStack()
            with split_rows.undivided(), eager:
                try:
                    plain = self.plain(model)
                    result, values, buffers = state.run(plain, device, copy, args, kwargs, watch)
                except (NotMergeable, torch.cuda.OutOfMemoryError, errors.UnsupportedError):
                    raise
                except Exception as error:
                    across = getattr(error, "across", None) or _rows.Across(None, why="fails")
                    raise NotMergeable(across) from error
                finally:
                    if watched:
                        watch.paused = True  # an interruption may have kept it from saying so
            outcome = Outcome(len(rows), (result, arguments.changed()), values, buffers, watch)
            # What is the replica's own becomes what it is of the whole batch.
            for key, value in outcome.values.items():
                if isinstance(value, torch.Tensor):
                    outcome.values[key] = arguments.own(value)
                elif isinstance(value, torch.device) and value == device:
                    outcome.values[key] = self.home(model, arguments)
        return outcome

    # Putting together -------------------------------------------------------------------------

    def merge(self, model, state, arguments, layout, known, outcomes):
        """Set state and losses, and return the result."""
        all_sizes = split_rows.sizes(layout.rows, len(outcomes))
        counted = [outcome for outcome, size in zip(outcomes, all_sizes) if size]
        first, sizes = counted[0], list(filter(None, all_sizes))
        if any(list(outcome.values) != list(first.values) for outcome in counted):
            raise NotMergeable()
        home = self.home(model, arguments)
        if known.watch:
            self.decide(model, state, arguments, layout, known, counted, sizes, home)
        merged, known_parts = {}, {}
        for key in first.values:
            rule = known.rules[key]
            if rule.kind == "unchanged":
                continue
            values = [outcome.values[key] for outcome in counted]
            if rule.kind == "rows" and rule.copies == 1:
                # Of a replica without rows of its own none: it gets gradients, 0, too.
                pairs = [(outcome.values[key], n) for outcome, n in zip(outcomes, all_sizes)]
                values = [v if n else part_on(home, rule.dim, range(0), v) for v, n in pairs]
            same = tuple(id(outcome.values[key]) for outcome in outcomes)
            is_state = key[0] in ("state", "weight")
            if same in known_parts and not is_state:  # as a result that is kept besides
                merged[key] = known_parts[same]
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_state):
                merged[key] = rule.merged(values, sizes, home, state.before.get(key))
            if isinstance(merged[key], torch.Tensor) and not is_state:
                known_parts[same] = merged[key]
                is_kept = any(value.retains_grad for value in values)
                if merged[key].requires_grad and (is_kept or key in known.linked):
                    linked_values.Parts.attach(merged[key], values, rule)
        merged.update((key, merged[key].item()) for key in first.numbers)
        merged.update((key, merged[key].numpy()) for key in first.arrays)
        cuts = {id(leaf): cut for leaf, cut in zip(arguments.leaves, layout.cuts)}
        for key, value in merged.items():
            rule, is_given = known.rules[key], isinstance(value, batches.Unchanged)
            axis = rule.dim if rule.kind == "rows" and rule.copies == 1 else None
            axis = cuts.get(id(value.value)) if is_given else axis
            if key[0] == "effect" and axis is not None:
                state.outside.axes[key] = axis
        merged = {key: untagged(value) for key, value in merged.items()}
        state.finish(merged)
        work.count(self.devices[: len(all_sizes)], all_sizes, torch.is_grad_enabled())
        return first.unflatten([v for k, v in merged.items() if k[0] == "result"])[0]

    def decide(self, model, state, arguments, layout, known, outcomes, sizes, home):
        """Find the rules of a call that was watched."""
        first, trial = outcomes[0], known.trial or self.trial(model, arguments, layout)
        previous, known.rules = known.rules, {}
        for key in first.values:
            values = [outcome.values[key] for outcome in outcomes]
            rule = previous.get(key)
            form = merging.form(values[0])
            if rule is None or rule.form != form:
                rule = merging.decide(key, values, sizes, state.before.get(key), home, trial)
                rule.form = form
            # A number that was taken from a tensor does not show from where.
            rule.lasting = rule.lasting and key not in first.numbers
            known.rules[key] = rule
        known.described = first.described
        if known.trial is not None or known.rules != previous:
            merging.prove(trial, known.rules, state.before, home)
            known.linked = linked_values.find(first.values)
        if known.trial is not None and torch.is_grad_enabled():
            given = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
            across = calls.own_gradient(first, given)
            sources = [v for v in given + list(model.parameters()) if v.requires_grad]
            if across is not None and sources:
                outside, found = self.state(model).outside, {}
                with outside.replica(False, found):
                    merging.prove_gradients(trial, known.rules, state.before, home, sources, across)
                if found:  # what a hook leaves outside, of which each device sees a part
                    raise NotMergeable(across)
        known.trial = None
        chosen = self.follow_choices(model, state, arguments, layout, known, outcomes, home)
        known.watch = chosen or not all(rule.lasting for rule in known.rules.values())

    def follow_choices(self, model, state, arguments, layout, known, outcomes, home):
        """Whether Python chose its way by the rows' values, so that later calls are watched.

        Where one device might have taken another way, all of the batch is computed on one: the
        numbers tell whether that matters.
        """
        watches = [outcome.watch for outcome in outcomes]
        known.comparisons.update(*[watch.comparisons for watch in watches])
        by_count = [watch.by_count for watch in watches if watch.by_count is not None]
        doubtful, lines, chosen = [] if layout.rows in known.totals else by_count, [], False
        for escapes in itertools.zip_longest(*[watch.escapes for watch in watches]):
            first = next(escape for escape in escapes if escape is not None)
            if str(first.across) not in known.harmless:
                chosen = True
                if None in escapes or not merging.is_one_devices(escapes, home):
                    doubtful.append(first.across)
                    if not isinstance(first.tag, _rows.Mixed):  # that may be chance
                        lines.append(str(first.across))
        if doubtful:
            count = len(outcomes)
            parts = [range(*split_rows.bounds(layout.rows, count, i)) for i in range(count)]
            try:
                trial = self.trial(model, arguments, layout, parts)
                merging.prove(trial, known.rules, state.before, home)
            except NotMergeable:
                raise NotMergeable(doubtful[0]) from None
            known.harmless.update(lines)
        known.totals.add(layout.rows)
        return chosen

    def trial(self, model, arguments, layout, parts=_rows.trial.PARTS):
        """A trial of rows of this batch; what is sorted stays sorted."""
        home, last = self.home(model, arguments), layout.rows - 1

        def compute(rows, gradients=False):
            """What these rows give, without dropout, and without a trace."""
            state, torchs = self.state(model), itertools.filterfalse(is_users, model.modules())
            numbers = state.outside.random_numbers()
            with numbers, torch.set_grad_enabled(gradients), evaluating(torchs):
                found = self.replica(
                    model, state, arguments, layout, home, rows, True, True, probing=True
                )
            return compute(rows, gradients) if state.outside.found_more else found

        return PartsTrial(compute, [[min(row, last) for row in part] for part in parts])
