"""Models on several devices of one process.

A model runs there by a ``call`` (Keras) or a ``forward`` (torch) of its own: an attribute of the
instance that hides its class's method. It splits the batch, runs the class's method on each device
with weights copied there, and puts together what the replicas made: results, losses, state. The
copies belong to autograd's graph, so that all gradients reach the one set of weights.
``keras_models`` and ``modules`` have the two kinds of models.
"""

import contextlib
import functools

import torch

from ... import _patching, _replicas, _work, errors
from . import batches, merging
from .reductions import DIVERGED, NotMergeable, Rows, tag, tag_of
from .watch import Watch

# How many arguments may turn out to have as many rows as the batch by chance.
MOST_TRIED = 6

# What torch.compile() makes of a model around a parallelized one stops at this.
outside_of_graphs = getattr(getattr(torch, "compiler", None), "disable", lambda function: function)


class Outcome:
    """What one replica made.

    Attributes:
        rows: how many rows it computed.
        values: by key, each value of the result, each loss, each state, each attribute.
        unflatten, described: how the result is nested.
        given: by key, state as the replica was given it.
        numbers: of the results, those that were taken from a tensor, which stands in for them.
        inexact: the function, if any, that gives each device numbers of its own.
    """

    def __init__(self, rows, result, losses, state, given, watch):
        self.rows = rows
        leaves, self.unflatten, self.described = batches.flatten(result)
        self.numbers = set()
        for index, leaf in enumerate(leaves if watch is not None else ()):
            if isinstance(leaf, float) and id(leaf) in watch.items:
                leaves[index] = watch.items[id(leaf)][1]
                self.numbers.add(("result", index))
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.results = len(leaves)
        self.values.update((("loss", index), loss) for index, loss in enumerate(losses))
        self.losses = len(losses)
        self.values.update(state)
        self.given = given
        self.inexact = watch and watch.inexact


class Known:
    """What one kind of call has shown: a rule for each value, once it was watched."""

    def __init__(self, whole):
        self.whole = whole  # arguments, by number, that are not cut, although they have the size
        self.rules = {}
        self.described = None
        self.watch = True

    def fit(self, outcomes):
        """Whether the rules are those for what was not watched."""
        return all(self.fits(outcome) for outcome in outcomes)

    def fits(self, outcome):
        if outcome.described != self.described:
            return False
        for key, value in outcome.values.items():
            rule = self.rules.get(key)
            if rule is None or not rule.fits(value, outcome.rows):
                return False
            if rule.kind == "unchanged" and key[0] == "state":
                # BatchNorm's averages change without it, and have rules.
                if value is not outcome.given[key] or value._version:
                    return False
        return True


class Replicated(_patching.InstanceMethod):
    """A method of a model that runs on several devices.

    Replica i computes the rows ``_replicas.run_bounds`` gives it, on its device, one after the
    other: work on GPUs is queued, so that they compute at the same time, and autograd runs the
    backward pass of each device in a thread of its own.

    Arguments with as many rows as the batch, the first tensor among them, are sliced; all else
    is passed whole. What becomes of the results is decided by how they were made: the first call
    of each kind is watched, see ``merging``.
    """

    def __init__(self, devices):
        super().__init__(devices)
        self.known = {}  # deep copies share it: their architecture is the same
        self.choices = {}  # where the rows are, by the kind of arguments
        self.names = None

    def most_replicas(self, model, rows):
        """How many replicas a batch of so many rows can be split over."""
        return len(self.devices)

    @outside_of_graphs
    def __call__(self, model, *args, **kwargs):
        if _replicas.runs_undivided():
            return self.plain(model)(*args, **kwargs)
        if self.names is None:
            self.names = batches.names_of(self.plain(model))
        arguments = batches.Arguments(self.names, args, kwargs, self.converter(model))
        tensor = next((v for v in arguments.leaves if isinstance(v, torch.Tensor)), None)
        if tensor is not None and self.is_only_traced(model, tensor):
            return self.plain(model)(*args, **kwargs)
        layout = self.layout(model, arguments)
        if layout is None:
            if any(_is_unknown(leaf) for leaf in arguments.leaves):
                warn_not_divided(model, "no tensor, as far as torch.utils._pytree finds them")
            args, kwargs = arguments.with_leaves(arguments.leaves)
            return self.plain(model)(*args, **kwargs)
        kind = (model.training, arguments.key, layout.pattern())
        if kind not in self.known:
            return self.first_call(model, arguments, layout, kind)
        known, watched = self.known[kind], self.known[kind].watch
        layout, state = layout.without(known.whole), self.state(model)
        outcomes = self.run(model, state, arguments, layout, watched)
        if not watched and not known.fit(outcomes):
            watched, state = True, self.state(model)
            outcomes = self.run(model, state, arguments, layout, watched)
        return self.merge(model, state, arguments, layout, known, outcomes, watched)

    def first_call(self, model, arguments, layout, kind):
        """Watch a call of a new kind.

        Where the model fails on parts of the batch, or mixes their rows, an argument may have as
        many rows by chance. One that is passed whole is what one device computes with.
        """
        others = layout.cut()[1:]
        failed = None
        for whole in [()] + [(leaf,) for leaf in others[:MOST_TRIED]]:
            known, tried, state = Known(whole), layout.without(whole), self.state(model)
            try:
                outcomes = self.run(model, state, arguments, tried, True)
                result = self.merge(model, state, arguments, tried, known, outcomes, True)
            except (RuntimeError, IndexError, ValueError, errors.UnsupportedError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                failed = failed or error
            else:
                self.known[kind] = known
                return result
        raise failed

    def layout(self, model, arguments):
        return batches.layout(arguments)

    # Running ----------------------------------------------------------------------------------

    def run(self, model, state, arguments, layout, watched):
        """The outcome of each replica."""
        outcomes = []
        count = min(len(self.devices), self.most_replicas(model, layout.rows))
        for index, name in enumerate(self.devices[:count]):
            # On the CPU "cpu:1" is a name only.
            device = torch.device("cpu" if name.startswith("cpu") else name)
            start, stop = _replicas.run_bounds(layout.rows, count, index)
            cut = functools.partial(_rows, start, stop)
            with torch.profiler.record_function("replica on {}".format(name)):
                try:
                    outcome = self.replica(
                        model, state, arguments, layout, device, stop - start, cut,
                        copy=index > 0, watched=watched,
                    )  # fmt: skip
                except Exception as error:
                    _note(error, name, start, stop, layout, arguments)
                    raise
            outcomes.append(outcome)
        return outcomes

    def replica(
        self, model, state, arguments, layout, device, rows, cut, copy, watched, probing=False
    ):
        """Run one replica, and return its outcome.

        Arguments:
            rows: how many rows it computes.
            cut: gives its rows of an argument, from a ``Cut`` and the argument.
        """
        leaves = []
        for leaf, where in zip(arguments.leaves, layout.cuts):
            leaf = _on(device, where, cut, leaf)
            if watched and where is not None:
                tag_rows(leaf, where)
            leaves.append(leaf)
        args, kwargs = arguments.with_leaves(leaves)
        watch = Watch(rows, probing) if watched else None
        with _replicas.undivided(), _eager() if watched else contextlib.ExitStack():
            result, losses, values, given = state.run(
                self.plain(model), device, copy, args, kwargs, watch
            )
        return Outcome(rows, result, losses, values, given, watch)

    # Putting together -------------------------------------------------------------------------

    def merge(self, model, state, arguments, layout, known, outcomes, watched):
        """Set state and losses, and return the result."""
        everyone, sizes = outcomes, _replicas.sizes(layout.rows, len(outcomes))
        counted = [(o, size) for o, size in zip(outcomes, sizes) if size]
        outcomes, sizes = [outcome for outcome, _ in counted], [size for _, size in counted]
        first = outcomes[0]
        if any(list(outcome.values) != list(first.values) for outcome in outcomes):
            raise merging.refusal(model, ("result", ""), DIVERGED)
        home = self.home(model, arguments)
        if watched:
            self.decide(model, state, arguments, layout, known, outcomes, sizes, home)
        merged = {}
        for key in first.values:
            rule = known.rules[key]
            if rule.kind != "unchanged":
                values = [outcome.values[key] for outcome in outcomes]
                if rule.kind == "rows" and rule.outer == 1:
                    values = self.with_empty(everyone, layout.rows, key, rule.dim)
                with torch.set_grad_enabled(torch.is_grad_enabled() and key[0] != "state"):
                    try:
                        merged[key] = rule.merged(values, sizes, home, state.before.get(key))
                    except NotMergeable as problem:
                        raise merging.refusal(model, key, problem) from problem
        for key in first.numbers:
            merged[key] = merged[key].item()
        state.finish(merged)
        sizes = _replicas.sizes(layout.rows, len(everyone))
        sizes += [0] * (len(self.devices) - len(sizes))
        _work.count(self.devices, sizes, torch.is_grad_enabled())
        return first.unflatten([untagged(merged[("result", i)]) for i in range(first.results)])

    def with_empty(self, outcomes, rows, key, dim):
        """Also no rows of each replica that has none of its own: it gets gradients, 0, too."""
        sizes = _replicas.sizes(rows, len(outcomes))
        values = [outcome.values[key] for outcome in outcomes]
        return [v if size else _none_of(v, dim) for v, size in zip(values, sizes)]

    def decide(self, model, state, arguments, layout, known, outcomes, sizes, home):
        """Find the rules of a call that was watched."""
        first = outcomes[0]
        compute = functools.partial(self.try_rows, model, arguments, layout, home)
        probe = merging.Probe(compute)
        dim = next(cut.dim for cut in layout.cuts if cut is not None)
        previous, known.rules = known.rules, {}
        for key in first.values:
            values = [outcome.values[key] for outcome in outcomes]
            rule = previous.get(key)
            if state.is_average(key):
                rule = merging.Rule("mean")
                rule.like = merging.like(values[0])
            elif rule is None or not merging.still(rule, values):
                try:
                    rule = merging.decide(
                        key, values, sizes, state.before.get(key), dim, home, probe
                    )
                except NotMergeable as problem:
                    raise merging.refusal(model, key, problem) from problem
            # A number that was taken from a tensor does not show from where.
            rule.lasting = rule.lasting and key not in first.numbers
            known.rules[key] = rule
        known.described = first.described
        known.watch = not all(rule.lasting for rule in known.rules.values())

    def try_rows(self, model, arguments, layout, home, rows):
        """What these rows give, without dropout, and without a trace."""
        rows = [row % layout.rows for row in rows]
        gpus = list(range(torch.cuda.device_count())) if home.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(gpus), _evaluating(model):
            return self.replica(
                model, self.state(model), arguments, layout, home, len(rows),
                lambda cut, value: cut.chosen(value, rows), copy=True, watched=True, probing=True,
            )  # fmt: skip


def _none_of(value, dim):
    """No rows of a tensor."""
    mask = getattr(value, "_keras_mask", None)
    value = value.narrow(dim, 0, 0)
    if mask is not None:
        value._keras_mask = mask[:0]
    return value


def _is_unknown(leaf):
    """Whether this may hold tensors that cannot be seen."""
    return not isinstance(leaf, (torch.Tensor, int, float, str, type(None), torch.dtype))


def warn_not_divided(model, given):
    errors.warn(
        "{} was given {}, which cannot be divided: it runs on one device.".format(
            type(model).__name__, given
        )
    )


def tag_rows(leaf, cut):
    if isinstance(leaf, torch.Tensor):
        tag(leaf, Rows(cut.dim))
    else:
        tag(leaf.data, Rows(0, regular=False))


def untagged(value):
    if isinstance(value, torch.Tensor) and tag_of(value) is not None:
        del value._compat_rows
    return value


def _rows(start, stop, cut, value):
    return cut.rows(value, start, stop)


def _on(device, where, cut, value):
    """A replica's rows of an argument, on its device."""
    if where is not None and not isinstance(value, torch.Tensor):
        return cut(where, value).to(device)
    if not isinstance(value, torch.Tensor):
        return value
    mask = getattr(value, "_keras_mask", None)
    if where is not None:
        value = cut(where, value)
    value = value.to(device)
    if mask is not None:
        value = value.view_as(value)  # another object: the mask is not for the argument itself
        value._keras_mask = (mask if where is None else cut(where, mask)).to(device)
    return value


def _note(error, name, start, stop, layout, arguments):
    """Say in an error of a model's that it was computing a part of a batch."""
    cut = [
        repr(name) if name else "a positional argument"
        for name, where in zip(arguments.names, layout.cuts)
        if where is not None
    ]
    note = (
        "compat.parallelize() ran this model on {} with rows {} to {} of a batch of {}: it cut {}. "
        "A model whose rows need one another, or a tensor that has as many rows by chance, cannot "
        "be cut: keep such a tensor as a buffer of the model.".format(
            name, start, stop - 1, layout.rows, ", ".join(dict.fromkeys(cut))
        )
    )
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = ("{}\n{}".format(error.args[0], note),) + error.args[1:]


def _eager():
    """Within, what torch.compile() has made runs the functions that it was made of."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.ExitStack() if stance is None else stance("force_eager")


@contextlib.contextmanager
def _evaluating(model):
    """Within, torch's own modules drop nothing and normalise with their averages."""
    parts = [part for part in model.modules() if type(part).__module__.startswith("torch.nn")]
    parts = [part for part in parts if part.training]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True
