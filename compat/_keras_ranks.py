"""A Keras model as one of several ranks: what is the same on every engine.

The model gets methods of its own that hide its class's: ``fit`` begins with rank 0's weights on
all ranks, ends every epoch on all at once and averages its metrics; ``evaluate`` averages; what
saves does so on rank 0 alone. How gradients are averaged is each backend's.
"""

import contextlib
import inspect
import os
import shutil
import tempfile
import types
import warnings

from . import _checksum, _keras, _keras_ranks_metrics, errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Names of the methods that write files. Other ranks do nothing there.
SAVING = ("save", "save_weights", "export")


def install(model, engine):
    """Make the methods of this model those of a rank. A second time changes nothing."""
    for kind in (
        RankedFit,
        RankedFitGenerator,
        RankedEvaluate,
        RankedEvaluateGenerator,
        RankedResetMetrics,
    ):
        if hasattr(type(model), kind.method) and kind.of(model) is None:
            kind(engine).install(model)
    for method in SAVING:
        if hasattr(type(model), method) and RankedSave.named(method).of(model) is None:
            RankedSave.named(method)(engine).install(model)


def never_save(model, ranks):
    """Have this model's saving methods do nothing: another process of the job saves.

    Arguments:
        ranks: a place that is not rank 0's.
    """
    for method in SAVING:
        if hasattr(type(model), method) and RankedSave.named(method).of(model) is None:
            RankedSave.named(method)(types.SimpleNamespace(ranks=ranks)).install(model)


class RankedMethod(_keras.InstanceMethod):
    """A method of a model that is one of several ranks."""

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine


# The same weights -----------------------------------------------------------------------------


def same_start(model, engine):
    """Set the weights, and the optimizer's state, to rank 0's.

    Raises:
        RankError: rank 0's model has other weights.
    """
    variables = _variables(model) + engine.state_besides(model)
    read, write = _keras.reader_and_writer(model)
    mine = read(variables)
    # MXNet's optimizers make their state as they train, so that rank 0's may have more of it.
    optimizer = getattr(model, "optimizer", None) if _is_of_mxnet(model) else None
    sent, state = engine.broadcast([mine, optimizer.get_weights() if optimizer else []])
    if [value.shape for value in sent] != [value.shape for value in mine]:
        raise errors.ranks_differ(engine.ranks, model.name)
    if engine.ranks.rank:
        write(list(zip(variables, sent)))
        if optimizer:
            optimizer.set_weights(state)


def _is_of_mxnet(model):
    return hasattr(getattr(model, "optimizer", None), "create_state")


def _variables(model):
    """The variables of a model and its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    state = []
    maker = _keras.that_makes_functions(model)
    if _is_of_mxnet(model):
        pass  # see same_start()
    elif optimizer is not None and hasattr(maker, "_make_train_function"):
        maker._make_train_function()  # before that Keras 2's optimizers have no state
        # The second is what keeps the state of one of TensorFlow's own, in Keras 2.
        own = getattr(optimizer, "optimizer", None)
        state = optimizer.weights if own is None else own.variables()
    elif optimizer is not None and maker is not None:
        # The second is what tf.keras' legacy optimizers have.
        make = getattr(optimizer, "build", None) or optimizer._create_all_weights
        if not getattr(optimizer, "built", False) and model.trainable_variables:
            make(model.trainable_variables)
        state = optimizer.variables
    state = list(state() if callable(state) else state)
    # What a LossScaleOptimizer of tf.keras has besides.
    scale = getattr(optimizer, "_loss_scale", None)
    if scale is not None and hasattr(scale, "current_loss_scale"):
        state += [scale.current_loss_scale, scale.counter]
    return list(model.weights) + state


# Whether they stay the same -------------------------------------------------------------------

# After so many steps since the weights were compared an epoch ends with it.
_OFTEN = 100
# The steps after which they are compared, whatever trains; and then every so many steps.
_COMPARED, _RARELY = (1, 4, 16, 64, 256), 1000


class Comparison:
    """When the ranks' variables are compared, which they must be at the same step on all ranks."""

    def __init__(self, engine):
        self.engine = engine
        self.steps = 0
        self.compared = 0  # after so many steps
        self.names = []  # type: list  # rank 0's: Keras numbers layers by what else a rank has made

    def stepped(self, model):
        """Count a step of training."""
        self.steps += 1
        if self.steps in _COMPARED or self.steps % _RARELY == 0:
            self.compare(model, self.steps)

    def compare(self, model, when):
        """See ``_checksum.verify``."""
        self.compared = self.steps
        read, write = _keras.reader_and_writer(model)
        own = set(map(id, _own(model)))
        variables = _variables(model) + self.engine.state_besides(model)
        variables = [v for v in variables if id(v) not in own]
        if len(self.names) != len(variables):
            names = [getattr(variable, "path", None) or variable.name for variable in variables]
            sent = self.engine.broadcast(names)
            self.names = sent if len(sent) == len(names) else names
        _checksum.verify(
            self.engine,
            self.names,
            read(variables),
            lambda place, value: write([(variables[place], value)]),
            when,
        )


def _own(model):
    """Variables that are each rank's: metrics, whole numbers, and the states of stateful RNNs."""
    for variable in _keras_ranks_metrics.variables(model):
        yield variable
    for weight in model.weights:
        if "int" in str(weight.dtype):
            yield weight
    for layer in model.layers:
        if getattr(layer, "stateful", False) and not hasattr(layer, "update_state"):
            for state in getattr(layer, "states", None) or ():
                yield state


# Fit and evaluate -----------------------------------------------------------------------------


def count(model: "Any", rows: int, training: bool) -> None:
    """Note a batch of so many rows. Called wherever a backend sees one."""
    fit = RankedFit.of(model)
    if fit is not None:
        fit.seen[training].add(rows)


def stepped(model):
    """Note that all ranks have done a step. Called by engines that do not compare weights."""
    RankedFit.of(model).comparison.stepped(model)


def in_step(model):
    """Note that the ranks evaluate in step from now on: with equally many batches."""
    fit = RankedFit.of(model)
    if fit is not None:
        fit.in_step = True


def is_in_step(model):
    fit = RankedFit.of(model)
    return fit is not None and fit.in_step


def mean(engine, values, rows):
    """Each rank's means, by name, to the means over all ranks' rows; rank 0's names count.

    A rank that lacks one of them (validation data on rank 0 alone) counts for nothing there.
    """
    names = engine.broadcast([n for n, value in values.items() if not getattr(value, "shape", ())])
    parts = []
    for name in names:
        weight = float(rows(name)) if name in values else 0.0
        parts += [weight, weight * float(values.get(name, 0.0))]
    sums = engine.sum(parts) if parts else []
    return {
        name: float(total / weight) if weight else values.get(name)
        for name, weight, total in zip(names, sums[::2], sums[1::2])
    }


class Seen:
    """How many rows and batches of an epoch, or of an evaluation, this rank has seen."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.rows = self.batches = 0

    def add(self, rows):
        self.rows += rows
        self.batches += 1


class RankedFit(RankedMethod):
    """``fit`` from rank 0's weights, with metrics over all ranks' rows."""

    method = "fit"

    def __init__(self, engine):
        super().__init__(engine)
        self.seen = {True: Seen(), False: Seen()}  # in this epoch, by whether it was in training
        self.running = False
        self.in_epoch = False
        self.evaluating = self.in_step = False
        self.comparison = Comparison(engine)
        # Of Keras 2: whether a model's losses are divided by what other ranks know.
        self.divides = None  # type: Any
        self.trained = None  # the metrics' state when the epoch's training was over
        self.results = _keras_ranks_metrics.Results()
        self.warned = set()  # type: set  # of metrics

    def __call__(self, model, *args, **kwargs):
        return self.run(model, self.plain(model), args, kwargs)

    def run(self, model, fit, args, kwargs):
        if self.running:  # fit() itself calls fit_generator(), in Keras 2.3
            return fit(*args, **kwargs)
        # In front, so that the user's callbacks see what all ranks see; and in the place where
        # they were given: Keras 2 takes no more by position than its old versions did.
        names = list(inspect.signature(fit).parameters)
        place = names.index("callbacks") if "callbacks" in names else len(args)
        given = args[place] if place < len(args) else kwargs.get("callbacks")
        given = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
        callbacks = [self.epochs(model)] + given
        if place < len(args):
            args = args[:place] + (callbacks,) + args[place + 1 :]
        else:
            kwargs["callbacks"] = callbacks
        if model.built:
            same_start(model, self.engine)
        given = inspect.signature(fit).bind(*args, **kwargs).arguments
        if given.get("validation_split"):
            warnings.warn(
                "validation_split={} takes the last rows of each rank's part of the data, and not "
                "those that one process would take. Split the data first, then shard() both parts, "
                "and give validation_data.".format(given["validation_split"]),
                errors.CompatWarning,
                stacklevel=4,
            )
        if self.divides is not None:
            self.agree(model, given)
        self.running = True
        try:
            return fit(*args, **kwargs)
        finally:
            self.running = self.in_epoch = False

    def agree(self, model, given):
        """Agree with all ranks whether they validate in step, as Keras 2's arguments have it."""
        data = given.get("validation_data")
        validates = data is not None or bool(given.get("validation_split"))
        weighted = isinstance(data, (list, tuple)) and len(data) > 2 and data[2] is not None
        if data is None and validates:
            weighted = given.get("sample_weight") is not None
        divides = self.divides(model, weighted)
        validate, divide = self.engine.sum([float(validates), float(divides)])
        self.in_step = divide > 0 and validate == self.engine.ranks.size
        if divide and validate and not self.in_step:
            warnings.warn(
                "Validation losses of {!r} are those of the ranks that validate, each of its own "
                "rows: masks or sample weights divide them by what the others do not tell. Give "
                "every rank its part of the validation data: compat.shard().".format(model.name),
                errors.CompatWarning,
                stacklevel=2,
            )

    def epochs(self, model):
        """The callback that ends every epoch on all ranks at once."""
        ranked = self

        class Epochs(_keras.keras_of(model).callbacks.Callback):  # type: ignore  # any Keras
            def on_epoch_begin(self, epoch, logs=None):
                for seen in ranked.seen.values():
                    seen.clear()
                ranked.trained, ranked.in_epoch = None, True

            def on_epoch_end(self, epoch, logs=None):
                ranked.in_epoch = False
                ranked.engine.close()
                comparison = ranked.comparison
                if comparison.steps - comparison.compared >= _OFTEN:
                    comparison.compare(model, "after epoch {}".format(epoch + 1))
                ranked.complete(model, logs)

            def on_train_end(self, logs=None):
                comparison = ranked.comparison
                if comparison.steps > comparison.compared:
                    comparison.compare(model, "after the last epoch")

        return Epochs()

    def complete(self, model, logs):
        """Make an epoch's logs those of all ranks, with rank 0's names."""
        now = _keras_ranks_metrics.state(model)
        validated = self.seen[False].batches > 0
        trained = self.trained if validated and self.trained is not None else now
        train, validation = self.over_ranks(model, [trained, now if validated else None])
        values = dict(train, **{"val_" + name: value for name, value in validation.items()})
        others = {name: value for name, value in logs.items() if name not in values}
        logs.update(mean(self.engine, others, lambda name: self.seen[name[:4] != "val_"].rows))
        names = self.engine.broadcast([name for name in values if name in logs])
        logs.update((name, values[name]) for name in names)

    def over_ranks(self, model, states):
        """The metrics' results over all ranks, of those metrics that add up."""
        not_added = {}
        for seen in self.seen.values():
            not_added.update(_keras_ranks_metrics.not_added(model, seen.rows, seen.batches))
        not_added = dict(self.engine.broadcast(sorted(not_added.items())))
        for name in sorted(set(not_added) - self.warned):
            self.warned.add(name)
            self.warn_of(name, not_added[name])
        found = _keras_ranks_metrics.over_ranks(self.engine, model, states, self.results)
        return [
            {
                name: value
                for name, value in result.items()
                if not any(name == n or name.endswith("_" + n) for n in not_added)
            }
            for result in found
        ]

    def warn_of(self, name, why):
        warnings.warn(
            "Metric {!r} is the mean of the ranks' values, weighted by their rows, and not what "
            "one process computes: {}. For that have update_state() add to its variables with "
            "assign_add(), or a function return one value for each row.".format(name, why),
            errors.CompatWarning,
            stacklevel=2,
        )


class RankedResetMetrics(RankedMethod):
    """``reset_metrics``, with which Keras begins to validate: what was trained is kept."""

    method = "reset_metrics"

    def __call__(self, model, *args, **kwargs):
        fit = RankedFit.of(model)
        if fit.in_epoch and fit.trained is None:
            fit.trained = _keras_ranks_metrics.state(model)
        return self.plain(model)(*args, **kwargs)


class RankedFitGenerator(RankedMethod):
    """The method of Keras 2 that is ``fit`` for batches that come from a generator."""

    method = "fit_generator"

    def __call__(self, model, *args, **kwargs):
        return RankedFit.of(model).run(model, self.plain(model), args, kwargs)


class RankedEvaluate(RankedMethod):
    """``evaluate`` with metrics over all ranks' rows. Within an epoch the epoch's end does that."""

    method = "evaluate"

    def __call__(self, model, *args, **kwargs):
        evaluate = self.plain(model)
        fit = RankedFit.of(model)
        if fit.in_epoch or fit.evaluating:  # evaluate() calls evaluate_generator() in Keras 2.3
            return evaluate(*args, **kwargs)
        for seen in fit.seen.values():
            seen.clear()
        as_list = hasattr(model, "_flatten_metrics_in_order") and not kwargs.get("return_dict")
        if as_list:  # in Keras 3, whose names for these are not the model's metrics_names
            kwargs["return_dict"] = True
        if fit.divides is not None:
            given = inspect.signature(evaluate).bind(*args, **kwargs).arguments
            weighted = given.get("sample_weight") is not None
            fit.in_step = self.engine.sum([float(fit.divides(model, weighted))])[0] > 0
        fit.evaluating = True
        try:
            result = evaluate(*args, **kwargs)
        finally:
            fit.evaluating = False
        if fit.in_step:
            self.engine.close()
        (found,) = fit.over_ranks(model, [_keras_ranks_metrics.state(model)])
        if isinstance(result, dict):
            values = self.completed(fit, result, found)
            return model._flatten_metrics_in_order(values) if as_list else values
        results = result if isinstance(result, (list, tuple)) else [result]
        names = list(model.metrics_names)
        if len(names) != len(results) or len(set(names)) < len(names):
            names = list(range(len(results)))  # what is no name takes no metric's value
        values = self.completed(fit, dict(zip(names, results)), found)
        values = [values[name] for name in names]
        return values if isinstance(result, (list, tuple)) else values[0]

    def completed(self, fit, result, found):
        """The results over all ranks, in the same order."""
        others = {name: value for name, value in result.items() if name not in found}
        means = mean(self.engine, others, lambda name: fit.seen[False].rows)
        return {name: found[name] if name in found else means[name] for name in result}


class RankedEvaluateGenerator(RankedEvaluate):
    """The method of Keras 2 that is ``evaluate`` for batches that come from a generator."""

    method = "evaluate_generator"


# Saving ---------------------------------------------------------------------------------------


class RankedSave(RankedMethod):
    """A method that saves, on rank 0 alone; what it writes is whole or not there."""

    @classmethod
    def named(cls, method):
        return _SAVING[method]

    def __call__(self, model, *args, **kwargs):
        if self.engine.ranks.rank:
            return None
        save = self.plain(model)
        bound = inspect.signature(save).bind(*args, **kwargs)
        place = next(iter(bound.arguments))  # the first parameter, whatever its name
        path = bound.arguments[place]
        replaces = bound.arguments.get("overwrite", True)  # else Keras asks what to do
        if not isinstance(path, (str, os.PathLike)) or not replaces and os.path.exists(path):
            return save(*bound.args, **bound.kwargs)
        with whole(os.fspath(path)) as aside:
            bound.arguments[place] = aside
            return save(*bound.args, **bound.kwargs)


_SAVING = {name: type("RankedSave", (RankedSave,), {"method": name}) for name in SAVING}


@contextlib.contextmanager
def whole(path):
    """Yield a path to write to, in a new folder beside; what is there afterwards moves to ``path``.

    A rank may be ended at any time: the file that stands there is the old one or the new one.
    """
    folder, name = os.path.split(os.path.abspath(path))
    aside = tempfile.mkdtemp(prefix=".{}.".format(name), dir=folder)
    try:
        yield os.path.join(aside, name)
        for written in sorted(os.listdir(aside)):
            target = os.path.join(folder, written)
            if os.path.isdir(target) and not os.path.islink(target):
                os.rename(target, os.path.join(aside, written + ".old"))
            os.replace(os.path.join(aside, written), target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
