"""The methods of a Keras model that is one of several ranks, as far as all backends share them.

They hide those of the model's class: ``fit`` begins with rank 0's weights on all ranks, ends every
epoch on all at once and combines its metrics; so does ``evaluate``; the methods that save do so on
rank 0 alone. How gradients are averaged is each backend's.
"""

import collections
import inspect
import itertools
from typing import Any, Dict

from .. import errors
from .._runtime import work
from . import (
    batch_agreement,
    callbacks,
    checksum,
    data_samples,
    datasets,
    fit_data,
    metrics,
    ranked_methods,
    same_rows,
    saving,
)
from .metrics import Moment
from .ranked_methods import RankedMethod, named
from .weight_comparison import WeightComparison
from .weights import Start
from .weights import same_start as same_start


def install(model, engine, kinds=()):
    """Make the methods of this model those of a rank. A second time changes nothing.

    Arguments:
        model: one of Keras.
        engine: that of the ranks.
        kinds: further subclasses of ``RankedMethod``, those of the backend.
    """
    ranked_methods.install(model, engine, tuple(kinds) + _KINDS + saving.KINDS)


_LAST = "after the last epoch"

# Fit and evaluate -----------------------------------------------------------------------------


def count(model: Any, rows: int, training: bool) -> None:
    """Note a batch of so many rows. Called wherever a backend sees one."""
    work.count([""], [rows], training)
    fit = RankedFit.of(model)
    if fit is not None:
        fit.seen[training].update(rows=rows, batches=1)


def arguments_by_name(function, args, kwargs):
    """Return the arguments of a call as ``args`` and ``kwargs``, by name where all have names.

    By name Keras 2 takes all of them, by position no more than its old versions did.
    """
    parameters = inspect.signature(function).parameters.values()
    named = itertools.takewhile(lambda one: one.kind is one.POSITIONAL_OR_KEYWORD, parameters)
    names = [parameter.name for parameter in named]
    return (args, kwargs) if len(args) > len(names) else ((), dict(zip(names, args), **kwargs))


class RankedFit(RankedMethod):
    """``fit``, from rank 0's weights, with metrics over all ranks' rows."""

    method = "fit"

    def __init__(self, engine):
        super().__init__(engine)
        # How many rows and batches of this epoch, or evaluation, by whether it was in training.
        self.seen: Dict[bool, Any] = {True: collections.Counter(), False: collections.Counter()}
        self.splits: Any = None  # returns whether fit() itself splits the data over the ranks
        self.running = self.in_epoch = self.evaluating = self.in_step = False
        self.wished: Any = None
        self.trained: Any = None
        self.evaluated: Any = None
        self.trainee: Any = None
        self.comparison = WeightComparison(engine)
        self.first_batch = same_rows.FirstBatch(engine)
        # On Keras 2, whether a model's losses are divided by numbers that other ranks know.
        self.divides: Any = None
        self.results = metrics.Results(engine)
        self.logs = callbacks.SharedLogs(engine)
        self.callbacks: Any = None  # of the last call

    def invoke(self, model, *args, **kwargs):
        """Train the model."""
        return self.run(model, self.plain(model), args, kwargs)

    def run(self, model, fit, args, kwargs):
        """Train the model by its own ``fit``, or by ``fit_generator``."""
        if self.running:  # fit() itself calls fit_generator(), in Keras 2.3
            return fit(*args, **kwargs)
        self.engine.agree("fit()")
        args, arguments = arguments_by_name(fit, args, kwargs)
        if self.splits is not None and self.splits():
            fit_data.split(self.engine, model.name, arguments)
        self.callbacks = callbacks.FitCallbacks(self, model, arguments.get("callbacks"))
        arguments["callbacks"] = self.callbacks.callbacks
        self.begin(model, arguments)
        if arguments.get("validation_split"):
            errors.warn(
                "validation_split={} takes the last rows of each rank's part of the data, and not "
                "those that one process would take. Split the data first, then shard() both parts, "
                "and give validation_data.".format(arguments["validation_split"])
            )
        self.running = True
        try:
            result = fit(*args, **arguments)
            # Callbacks may have set weights after the last epoch, too.
            if model.built and (not self.callbacks.alone or self.comparison.is_due(True)):
                self.comparison.compare(model, _LAST, self.callbacks.causes)
            return result
        finally:
            self.running = self.in_epoch = False
            self.callbacks = None

    def begin(self, model, arguments):
        """Begin with rank 0's weights, and agree with all ranks on the arguments of ``fit``."""
        source = arguments.get("generator", arguments.get("x"))
        weights = Start(model, self.engine) if model.built else None
        sources = map(datasets.compared, [source, arguments.get("validation_data")])
        self.agreement = batch_agreement.Agreement(self.engine, sources)
        options = [*self.validates(model, arguments), fit_data.batches(arguments, source)]
        start, positions, options, of_callbacks, samples, rows = self.engine.gather_each(
            [
                weights.numbers if weights else [],
                self.agreement.positions(),
                options,
                self.callbacks.numbers(),
                data_samples.numbers(self.engine.place),
                same_rows.numbers(fit_data.arrays_in(arguments)),
            ]
        )
        data_samples.compare(self.engine, samples)
        same_rows.note(self.engine, model.name, rows)
        if weights:
            weights.agree(start)
        self.checksums = self.agreement.advance(positions)  # of the first batches
        self.callbacks.agree(of_callbacks)
        validate, divide, batches = zip(*options)
        self.validate_alike = checksum.same(validate)  # all ranks validate, or none does
        # Of an epoch, on all ranks; 0: they do not know that they are as many.
        self.batches = batches[0] if checksum.same(batches) else 0
        # Whether ranks still have to compare the first batches, or to agree on how many there are.
        self.is_undecided = not self.batches or any(part.name for part in self.agreement.parts)
        if self.divides is not None:
            self.in_step = any(divide) and all(validate)
        if any(divide) and any(validate) and not self.in_step:
            errors.warn(
                "Validation losses of {!r} are those of the ranks that validate, each of its own "
                "rows: masks or sample weights divide them by what the others do not tell. Give "
                "every rank its part of the validation data: compat.shard().".format(model.name)
            )

    def validates(self, model, arguments):
        """Return whether this rank validates, and, on Keras 2, divides losses by others' sums."""
        data = arguments.get("validation_data")
        validates = data is not None or bool(arguments.get("validation_split"))
        weighted = isinstance(data, (list, tuple)) and len(data) > 2 and data[2] is not None
        if data is None and validates:
            weighted = arguments.get("sample_weight") is not None
        return validates, self.divides is not None and self.divides(model, weighted)

    def begun(self, params):
        """Compare the first batches, and agree on the number of batches, as far as that is due."""
        if self.is_undecided:
            steps, checksums = params.get("steps") or 0, self.checksums
            steps, checksums = self.engine.gather_each([[steps % checksum.LARGEST], checksums])
            self.agreement.compare(checksums)
            self.batches = self.batches or (steps[0][0] if checksum.same(steps) else 0)

    def stepped(self, model):
        """Compare what ranks have after a step, for engines that leave it to the main thread."""
        self.comparison.stepped(model)
        self.first_batch.compare(model.name)

    def epoch_begun(self):
        """Count rows, batches and steps from 0."""
        for seen in self.seen.values():
            seen.clear()
        self.engine.steps = 0
        # ``trained``: the metrics' state when the epoch's training was over; ``wished``: whether
        # training is to stop when the epoch ends.
        self.trained, self.in_epoch, self.wished = None, True, False

    def epoch_ended(self, model, epoch, params, logs):
        """End an epoch on all ranks at once, and combine its logs in one exchange with all else."""
        engine, alone = self.engine, self.callbacks.alone
        self.in_epoch = False
        steps, seen = engine.steps, self.seen[True]["batches"]
        if 0 < self.batches <= min(steps, seen) and self.validate_alike and not self.in_step:
            engine.steps = 0  # none has more, or it would still wait for another step
        else:
            engine.close()
        self.comparison.epoch_ended(steps)
        last = epoch == params.get("epochs")
        due = self.comparison.is_due(last) and (alone or not last)  # else when fit() ends
        wished = alone and (self.wished or self.trainee.stop_training)
        more = [self.agreement.parts[0].position(), bool(wished)]
        more += self.comparison.numbers(model) if due else []
        now, validated = metrics.state(model), self.seen[False]["batches"] > 0
        if validated and now and self.trained is None:  # ``now`` is of the validation data
            engine.unreached["model.reset_metrics"] = None
        trained = self.trained if validated and self.trained is not None else now
        ended = now if validated else None
        moments = [Moment("", trained, self.seen[True]), Moment("val_", ended, self.seen[False])]
        gathered, results = self.results.over_ranks(model, moments, logs, more)
        logs.update(results)
        positions, wishes, *rows = zip(*gathered)
        self.agreement.epoch_ended(positions)
        if due:
            when = _LAST if last else "after epoch {}".format(epoch)
            self.comparison.resolve(model, when, list(zip(*rows)), self.callbacks.causes)
        if alone:
            self.trainee.stop_training = any(wishes)


class RankedResetMetrics(RankedMethod):
    """``reset_metrics``, with which Keras begins to validate: keeps the state of training.

    It keeps that of a batch, too, where ``train_on_batch`` of Keras 2.3 resets metrics at its end.
    """

    method = "reset_metrics"
    is_optional = True  # before Keras 2.3

    def invoke(self, model, *args, **kwargs):
        """Reset the model's metrics."""
        fit = RankedFit.of(model)
        if fit.in_epoch and fit.trained is None:
            fit.trained = metrics.state(model)
        elif fit.evaluating and any(seen["batches"] for seen in fit.seen.values()):
            fit.evaluated = metrics.state(model)
        return self.plain(model)(*args, **kwargs)


class RankedFitGenerator(RankedMethod):
    """The method of Keras 2 that is ``fit`` for batches that come from a generator."""

    method = "fit_generator"
    is_optional = True  # in Keras 3

    def invoke(self, model, *args, **kwargs):
        """Train the model as ``fit`` does."""
        return RankedFit.of(model).run(model, self.plain(model), args, kwargs)


class RankedEvaluate(RankedMethod):
    """``evaluate``, with metrics over all ranks' rows; within an epoch, its end combines them.

    The same class is ``evaluate_generator`` of Keras 2, and ``train_on_batch`` and
    ``test_on_batch``, which return the loss and the metrics of all ranks' rows of the batch.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.training = self.method == "train_on_batch"
        # Whether ranks compare their weights on the way; steps do that for themselves.
        self.compares = not self.method.endswith("_on_batch")

    def invoke(self, model, *args, **kwargs):
        """Evaluate the model, or train it on a batch."""
        evaluate = self.plain(model)
        fit = RankedFit.of(model)
        if fit.in_epoch or fit.evaluating:  # evaluate() calls evaluate_generator() in Keras 2.3
            return evaluate(*args, **kwargs)
        if not self.training:
            self.engine.agree(self.method + "()")
        for seen in fit.seen.values():
            seen.clear()
        as_list = hasattr(model, "_flatten_metrics_in_order") and not kwargs.get("return_dict")
        if as_list:  # in Keras 3, whose names for these are not the model's metrics_names
            kwargs["return_dict"] = True
        if fit.divides is not None and not self.training:
            _, arguments = arguments_by_name(evaluate, args, kwargs)
            weighted = arguments.get("sample_weight") is not None
            fit.in_step = self.engine.sum([float(fit.divides(model, weighted))])[0] > 0
        held = fit.comparison.held(model) if self.compares and model.built else []
        # ``evaluated``: the metrics' state of a batch, where Keras has reset it since.
        fit.evaluating, fit.evaluated = True, None
        try:
            result = evaluate(*args, **kwargs)
        finally:
            fit.evaluating = False
        if fit.in_step and not self.training:
            self.engine.close()
        if isinstance(result, dict):
            values = self.completed(fit, model, result, held)
            return model._flatten_metrics_in_order(values) if as_list else values
        results = result if isinstance(result, (list, tuple)) else [result]
        names = list(model.metrics_names)
        if len(names) != len(results) or len(set(names)) < len(names):
            names = list(range(len(results)))  # these are not names of metrics
        values = list(self.completed(fit, model, dict(zip(names, results)), held).values())
        return values if isinstance(result, (list, tuple)) else values[0]

    def completed(self, fit, model, result, held):
        """Return the results over all ranks, in the same order.

        Arguments:
            fit: the ``RankedFit`` of the model.
            model: the one that was evaluated.
            result: this rank's results, by name.
            held: the checksum of the weights with which they were computed; empty: not known.
        """
        state = metrics.state(model) if fit.evaluated is None else fit.evaluated
        moments = [Moment("", state, fit.seen[self.training])]
        more = (held or fit.comparison.held(model)) if self.compares else []
        count, is_due = len(more), self.compares or checksum.is_due(self.calls)
        more = more + (data_samples.numbers(self.engine.place) if is_due else [])
        rows, results = fit.results.over_ranks(model, moments, result, more)
        if is_due:
            data_samples.compare(self.engine, [row[count:] for row in rows])
        fit.comparison.resolve_held(model, f"in {self.method}()", [row[:count] for row in rows])
        return {name: results[name] for name in result}


class RankedEvaluateGenerator(RankedEvaluate):
    """The method of Keras 2 that is ``evaluate`` for batches that come from a generator."""

    method = "evaluate_generator"
    is_optional = True  # in Keras 3


_KINDS = (RankedFit, RankedFitGenerator, RankedResetMetrics, RankedEvaluateGenerator)
_KINDS += named(RankedEvaluate, "evaluate", "test_on_batch", "train_on_batch")
