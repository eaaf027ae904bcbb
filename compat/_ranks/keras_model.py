"""A Keras model as one of several ranks: what is the same on every engine.

The model gets methods of its own that hide its class's: ``fit`` begins with rank 0's weights on
all ranks, ends every epoch on all at once and averages its metrics; ``evaluate`` averages; what
saves does so on rank 0 alone. How gradients are averaged is each backend's.
"""

import collections
import inspect
import itertools

from .. import _keras, errors
from .._runtime import work
from . import agreement, datasets, metrics, ranked_method, saving, splitting
from .ranked_method import RankedMethod
from .weights import WeightComparison, same_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def install(model, engine, kinds=()):
    """Make the methods of this model those of a rank. A second time changes nothing.

    Arguments:
        kinds: the backend's own.
    """
    ranked_method.install(model, engine, tuple(kinds) + _KINDS + saving.KINDS)


# Fit and evaluate -----------------------------------------------------------------------------


def count(model: "Any", rows: int, training: bool) -> None:
    """Note a batch of so many rows. Called wherever a backend sees one."""
    work.count([""], [rows], training)
    fit = RankedFit.of(model)
    if fit is not None:
        fit.seen[training].update(rows=rows, batches=1)


def split_fits(model):
    """Give each rank its part of what ``fit()`` of this model is given from now on."""
    RankedFit.of(model).splits = True


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
    return _mean(engine, names, values, rows)


def _mean(engine, names, values, rows):
    """The same, where all ranks have as many names, in the same order."""
    parts = []
    for name in names:
        weight = float(rows(name)) if name in values else 0.0
        parts += [weight, weight * float(values.get(name, 0.0))]
    sums = engine.sum(parts) if parts else []
    return {
        name: float(total / weight) if weight else values.get(name)
        for name, weight, total in zip(names, sums[::2], sums[1::2])
    }


def _by_name(function, args, kwargs):
    """The arguments of a call by name; by position as they are, where some have no name.

    By name Keras 2 takes all of them, by position no more than its old versions did.
    """
    parameters = inspect.signature(function).parameters.values()
    named = itertools.takewhile(lambda each: each.kind is each.POSITIONAL_OR_KEYWORD, parameters)
    names = [each.name for each in named]
    return (args, kwargs) if len(args) > len(names) else ((), dict(zip(names, args), **kwargs))


class RankedFit(RankedMethod):
    """``fit`` from rank 0's weights, with metrics over all ranks' rows."""

    method = "fit"

    def __init__(self, engine):
        super().__init__(engine)
        # How many rows and batches of this epoch, or evaluation, by whether it was in training.
        self.seen = {True: collections.Counter(), False: collections.Counter()}  # type: dict
        self.splits = False  # whether fit() itself gives each rank its part of the data
        self.running = False
        self.in_epoch = False
        self.agreement = None  # type: Any  # on the batches that shard() took
        self.evaluating = self.in_step = False
        self.comparison = WeightComparison(engine)
        # Of Keras 2: whether a model's losses are divided by what other ranks know.
        self.divides = None  # type: Any
        self.trained = None  # the metrics' state when the epoch's training was over
        self.evaluated = None  # the same of a batch, where Keras has reset it since
        self.results = metrics.MetricResults()
        self.warned = set()  # type: set  # of metrics
        self.not_added = None, {}  # type: Any  # of which metrics, and those that do not add up

    def __call__(self, model, *args, **kwargs):
        return self.run(model, self.plain(model), args, kwargs)

    def run(self, model, fit, args, kwargs):
        if self.running:  # fit() itself calls fit_generator(), in Keras 2.3
            return fit(*args, **kwargs)
        args, given = _by_name(fit, args, kwargs)
        if self.splits:
            splitting.split(self.engine, model.name, given)
        callbacks = given.get("callbacks") or []
        if not isinstance(callbacks, (list, tuple)):
            callbacks = [callbacks]
        keras, place = _keras.keras_of(model), self.engine.place
        callbacks = saving.written_by_rank_0(keras, place, list(callbacks))
        # In front, so that the user's callbacks see what all ranks see.
        given["callbacks"] = [self.epochs(model)] + callbacks + [self.stops(model)]
        if model.built:
            same_start(model, self.engine)
        sources = given.get("generator", given.get("x")), given.get("validation_data")
        self.agreement = agreement.Agreement(self.engine, map(datasets.compared, sources))
        self.agreement.begin()
        if given.get("validation_split"):
            errors.warn(
                "validation_split={} takes the last rows of each rank's part of the data, and not "
                "those that one process would take. Split the data first, then shard() both parts, "
                "and give validation_data.".format(given["validation_split"])
            )
        if self.divides is not None:
            self.agree(model, given)
        self.running = True
        try:
            return fit(*args, **given)
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
        self.in_step = divide > 0 and validate == self.engine.place.size
        if divide and validate and not self.in_step:
            errors.warn(
                "Validation losses of {!r} are those of the ranks that validate, each of its own "
                "rows: masks or sample weights divide them by what the others do not tell. Give "
                "every rank its part of the validation data: compat.shard().".format(model.name)
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
                steps = ranked.engine.steps
                ranked.engine.close()
                ranked.agreement.epoch_ended()
                ranked.comparison.epoch_ended(model, epoch + 1, steps)
                ranked.complete(model, logs)

            def on_train_end(self, logs=None):
                ranked.comparison.training_ended(model)

        return Epochs()

    def stops(self, model):
        """The callback, after all others, by which one rank's wish to stop is everybody's.

        A rank that left its epoch at once would leave the others waiting for its next step.
        """
        ranked = self

        class Stops(_keras.keras_of(model).callbacks.Callback):  # type: ignore  # any Keras
            # It takes no logs, which Keras therefore need not wait for.
            _supports_tf_logs = async_safe = True
            wished = False

            def set_model(self, model):
                # Not as ``self.model``, with which Keras on JAX brings all state to the model.
                self.trained = model

            def on_batch_end(self, batch, logs=None):
                self.wished = self.wished or self.trained.stop_training
                self.trained.stop_training = False

            def on_epoch_end(self, epoch, logs=None):
                wished = self.wished or self.trained.stop_training
                self.trained.stop_training = bool(ranked.engine.sum([float(wished)])[0])

        return Stops()

    def complete(self, model, logs):
        """Make an epoch's logs those of all ranks, with rank 0's names."""
        now = metrics.state(model)
        validated = self.seen[False]["batches"] > 0
        trained = self.trained if validated and self.trained is not None else now
        train, validation = self.over_ranks(model, [trained, now if validated else None])
        values = dict(train, **{"val_" + name: value for name, value in validation.items()})
        others = {name: value for name, value in logs.items() if name not in values}
        logs.update(mean(self.engine, others, lambda name: self.seen[name[:4] != "val_"]["rows"]))
        names = self.engine.broadcast([name for name in values if name in logs])
        logs.update((name, values[name]) for name in names)

    def over_ranks(self, model, states, known=None):
        """The metrics' results over all ranks, of those metrics that add up.

        Arguments:
            known: those that do not add up, by name, if that is known already.
        """
        not_added = {} if known is None else known
        if known is None:
            for seen in self.seen.values():
                not_added.update(metrics.not_added(model, seen["rows"], seen["batches"]))
            not_added = dict(self.engine.broadcast(sorted(not_added.items())))
        self.not_added = metrics.of(model), not_added
        for name in sorted(set(not_added) - self.warned):
            self.warned.add(name)
            errors.warn(
                "Metric {!r} is the mean of the ranks' values, weighted by their rows, and not "
                "what one process computes: {}. For that have update_state() add to its variables "
                "with assign_add(), or a function return one value for each row.".format(
                    name, not_added[name]
                )
            )
        found = metrics.over_ranks(self.engine, model, states, self.results)

        def adds_up(name):
            return not any(name == n or name.endswith("_" + n) for n in not_added)

        return [{name: v for name, v in result.items() if adds_up(name)} for result in found]


class RankedResetMetrics(RankedMethod):
    """``reset_metrics``, with which Keras begins to validate: what was trained is kept.

    So is what was seen of a batch, with which the ``train_on_batch`` of Keras 2.3 ends.
    """

    method = "reset_metrics"

    def __call__(self, model, *args, **kwargs):
        fit = RankedFit.of(model)
        if fit.in_epoch and fit.trained is None:
            fit.trained = metrics.state(model)
        elif fit.evaluating and any(seen["batches"] for seen in fit.seen.values()):
            fit.evaluated = metrics.state(model)
        return self.plain(model)(*args, **kwargs)


class RankedFitGenerator(RankedMethod):
    """The method of Keras 2 that is ``fit`` for batches that come from a generator."""

    method = "fit_generator"

    def __call__(self, model, *args, **kwargs):
        return RankedFit.of(model).run(model, self.plain(model), args, kwargs)


class RankedEvaluate(RankedMethod):
    """``evaluate`` with metrics over all ranks' rows. Within an epoch the epoch's end does that."""

    method = "evaluate"
    training = False

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
        if fit.divides is not None and not self.training:
            _, given = _by_name(evaluate, args, kwargs)
            weighted = given.get("sample_weight") is not None
            fit.in_step = self.engine.sum([float(fit.divides(model, weighted))])[0] > 0
        fit.evaluating, fit.evaluated = True, None
        try:
            result = evaluate(*args, **kwargs)
        finally:
            fit.evaluating = False
        if fit.in_step and not self.training:
            self.engine.close()
        state = metrics.state(model) if fit.evaluated is None else fit.evaluated
        (found,) = fit.over_ranks(model, [state], self.not_added(model))
        if isinstance(result, dict):
            values = self.completed(fit, result, found)
            return model._flatten_metrics_in_order(values) if as_list else values
        results = result if isinstance(result, (list, tuple)) else [result]
        names = list(model.metrics_names)
        if len(names) != len(results) or len(set(names)) < len(names):
            names = list(range(len(results)))  # what is no name takes no metric's value
        values = list(self.completed(fit, dict(zip(names, results)), found).values())
        return values if isinstance(result, (list, tuple)) else values[0]

    def not_added(self, model):
        """The metrics that do not add up, if that is known already."""

    def completed(self, fit, result, found):
        """The results over all ranks, in the same order."""
        others = {name: value for name, value in result.items() if name not in found}
        others = _mean(self.engine, list(others), others, lambda _: fit.seen[self.training]["rows"])
        return {name: found[name] if name in found else others[name] for name in result}


class RankedTestOnBatch(RankedEvaluate):
    """``test_on_batch`` with the loss and metrics of all ranks' rows."""

    method = "test_on_batch"

    def not_added(self, model):
        known, not_added = RankedFit.of(model).not_added
        return not_added if known == metrics.of(model) else None


class RankedTrainOnBatch(RankedTestOnBatch):
    method = "train_on_batch"
    training = True


class RankedEvaluateGenerator(RankedEvaluate):
    """The method of Keras 2 that is ``evaluate`` for batches that come from a generator."""

    method = "evaluate_generator"


_KINDS = (RankedFit, RankedFitGenerator, RankedEvaluate, RankedEvaluateGenerator,
          RankedTestOnBatch, RankedTrainOnBatch, RankedResetMetrics)  # fmt: skip
