"""Tests of verification, reports and timelines of Keras models on several devices."""

import functools
import json
import os
import re
import warnings
from typing import Any, Dict

import numpy as np
import pytest

import compat

from .._rows import splitting
from .._verification import largest_difference
from .contract import BackendContract, any_backend, contract_of, slow, span
from .models import CASES, DEVICES, clear_session, fit_in_order, initialise, optimizer

#: Names of optimizers: the one that keeps most state besides a value for each weight, and others
#: that differ from it most.
MANY_SLOTS, OTHERS = "Nadam ", "RMSprop |LossScale"


class VerificationContract(BackendContract):
    """Tests of the differences and side effects of ``verify=``, and of ``compat.report()``."""

    #: The outcome of a cross-batch operation: "right", or "found" and refused.
    across_rows = "found"
    #: Whether random numbers are those of training without verification.
    random_numbers_come_back = True
    #: Options of ``compile()`` for a model whose steps are to start quickly.
    quick: Dict[str, Any] = {}

    #: A text in the names of matrix products in a timeline; None where the framework does not
    #: record when its devices execute which operations.
    product_in_timelines = None

    def sizes_of(self, rows):
        """Return how many rows of a batch each device computes."""
        return splitting.sizes(rows, DEVICES)

    def seed(self, keras, number):
        """Seed the shuffling of rows, and other random numbers."""
        getattr(keras.utils, "set_random_seed", np.random.seed)(number)

    @span
    def test_first_steps_are_verified(self, keras, pytestconfig):
        """They leave the model as other steps do, and record what they compared."""
        name = "dense" if contract_of(pytestconfig) == "span" else "multi"
        inputs, targets = CASES[name].data(48)  # three batches of one size, which compiles once
        models = [self.compiled(keras, name, parallel=True) for _ in range(2)]
        record = self.verified(models[1], 2)
        for model in models:
            fit_in_order(model, inputs, targets, validation_data=(inputs, targets))
            model.predict(inputs, batch_size=16, verbose=0)
        assert record.steps == {"train": 2, "evaluate": 1, "predict": 1}
        assert record.compared > 2 * len(models[0].get_weights())
        assert not record.incomparable
        assert 0 < record.largest[0] < 1e-3  # the same work in another order
        self.close(models[0].get_weights(), models[1].get_weights())

    @pytest.mark.parametrize(
        "which",
        [
            pytest.param(MANY_SLOTS, marks=span),
            OTHERS,
            pytest.param("", marks=slow),
        ],
    )
    def test_leaves_no_trace_whatever_the_optimizer(self, keras, which):
        """Weights to the bit, after a verified step and one that is not."""
        optimizers = [pair for pair in optimizers_of(keras) if re.match(which, pair[0])]
        assert optimizers
        inputs, targets = CASES["dense"].data(16)
        outcomes = {}
        for name, make in optimizers:
            trained = []
            for steps in (0, 1):
                clear_session(keras)
                model = keras.models.Sequential([keras.layers.Dense(4, input_shape=(8,))])
                compat.parallelize(initialise(model))
                model.compile(make(), "mse", **self.quick)
                if steps:
                    record = self.verified(model, steps)
                fit_in_order(model, inputs, targets, 8)
                trained.append(model.get_weights())
            outcomes[name] = record.steps["train"], largest_difference(*trained)
        assert outcomes == dict.fromkeys(outcomes, (1, 0.0))

    def test_random_numbers_are_those_without_verification(self, keras):
        """Of dropout, of numpy, and of the shuffling of rows."""
        inputs, targets = CASES["dense"].data(16)
        trained = []
        for steps in (0, 1):
            np.random.seed(1)
            self.seed(keras, 1)
            layers = [keras.layers.Dense(4, input_shape=(8,)), keras.layers.Dropout(0.3, seed=3)]
            model = self.ready(keras, keras.models.Sequential(layers))
            if steps:
                self.verified(model, steps)
            model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0)
            trained.append(model.get_weights() + [np.random.uniform(size=1)])
        assert (largest_difference(*trained) == 0) == self.random_numbers_come_back

    @any_backend
    @pytest.mark.parametrize("switch", [pytest.param("frozen", marks=slow), "called", "wrapped"])
    def test_statistics_of_replicas_are_no_difference(self, keras, switch):
        """However batch normalization was switched; a warning names what is not compared."""
        layers = keras.layers
        normalize = layers.BatchNormalization(trainable=switch != "frozen")
        rows = layers.Input(shape=(3, 4))
        hidden = layers.Dense(4)(rows)
        if switch == "wrapped":
            normalize = layers.TimeDistributed(normalize)
        hidden = normalize(hidden, **({"training": True} if switch == "called" else {}))
        model = keras.models.Model(rows, layers.Dense(2)(layers.Flatten()(hidden)))
        record = self.verified(self.ready(keras, model))
        random = np.random.RandomState(0)
        inputs, targets = random.normal(size=(14, 3, 4)), random.normal(size=(14, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.CompatWarning)
            if switch == "called":  # so they matter in inference, too
                model.predict(inputs)
                model.evaluate(inputs, targets, verbose=0)
            model.train_on_batch(inputs, targets)
        assert record.seen("train") == 1
        assert record.seen("predict") == record.seen("evaluate") == (switch == "called")

    @any_backend
    @pytest.mark.parametrize("rate", [0.0, pytest.param(0.5, marks=slow)])
    def test_a_loss_that_is_rounding_is_no_difference(self, keras, rate):
        """Of a model that fits the targets already, with dropout and without."""
        layers, (inputs, _) = keras.layers, CASES["dense"].data(14)
        dropout = [layers.Dropout(rate)] if rate else []
        first = layers.Dense(6, activation="tanh", input_shape=(8,))
        model = keras.models.Sequential([first] + dropout + [layers.Dense(4)])
        record = self.verified(self.ready(keras, model, optimizer_name="adam"))
        model.train_on_batch(inputs, model.predict(inputs, verbose=0))
        assert record.seen("train") == 1

    @any_backend
    def test_a_step_that_cannot_be_compared_is_taken_all_the_same(self, keras):
        """Its weights and slots are those of a step without verification."""
        inputs, targets = CASES["dense"].data(45)
        models = [self.normalized(keras), self.normalized(keras)]
        models[1].set_weights(models[0].get_weights())
        for model in models:
            compat.parallelize(model).compile(optimizer(keras, "sgd"), "mse")
        self.verified(models[1])
        for model in models:
            for _ in range(2):
                model.train_on_batch(inputs, targets)
        self.close(models[0].get_weights(), models[1].get_weights())

    def test_operation_across_rows_is_right_or_found(self, keras):
        """Each row less the mean of all rows of the batch, which no replica sees."""
        K = keras.ops if hasattr(keras, "ops") else keras.backend

        def build():
            layers = keras.layers
            rows = layers.Input(shape=(8,))
            hidden = layers.Dense(6, name="hidden")(rows)
            centred = layers.Lambda(lambda x: x - K.mean(x, axis=0, keepdims=True))(hidden)
            return keras.models.Model(rows, layers.Dense(4, name="classes")(centred))

        inputs, targets = CASES["dense"].data(45)
        plain, parallel = initialise(build()), initialise(build())
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                compat.parallelize(parallel)
                for model in (plain, parallel):
                    model.compile(optimizer(keras, "sgd"), "mse")
                self.verified(parallel)
                for model in (plain, parallel):
                    model.train_on_batch(inputs, targets)
        except (compat.ResultsDifferError, compat.UnsupportedError) as error:
            assert self.across_rows == "found", error
        else:
            warned = any(issubclass(one.category, compat.CompatWarning) for one in caught)
            assert warned == (self.across_rows == "found")  # it runs unsplit, with a warning
            self.close(plain.get_weights(), parallel.get_weights())

    # Reports and timelines --------------------------------------------------------------------

    @span
    @pytest.mark.row("compat.report()")
    def test_report_says_what_each_device_did(self, keras, configuration, counted_anew):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 32)
        report = compat.report()
        assert [use.device for use in report.devices] == configuration.devices
        assert report.verdict.startswith("No batch was split: model ")
        assert not report.all_worked
        batches = [16, 16]
        fit_in_order(model, inputs, targets, epochs=2)
        trained = [2 * sum(part) for part in zip(*map(self.sizes_of, batches))]
        report = compat.report()
        assert [use.rows for use in report.devices] == trained
        model.evaluate(inputs, targets, batch_size=16, verbose=0)
        model.predict(inputs, batch_size=16, verbose=0)
        report = compat.report()
        assert [use.rows for use in report.devices] == [2 * rows for rows in trained]
        assert [use.training_rows for use in report.devices] == trained
        assert [use.steps for use in report.devices] == [8] * DEVICES
        verdict = "All 3 devices worked: {} to {} rows each."
        assert report.verdict == verdict.format(2 * min(trained), 2 * max(trained))
        as_json = json.loads(report.to_json())
        assert as_json["all_worked"] and as_json["verdict"] == report.verdict
        assert [device["rows"] for device in as_json["devices"]] == [2 * rows for rows in trained]

    @span
    @pytest.mark.row("compat.timeline()")
    def test_timeline_says_when_each_device_executed_what(self, keras, configuration, tmp_path):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 61)
        model.fit(inputs, targets, batch_size=61, verbose=0)
        path = str(tmp_path / "timeline.json")
        if self.product_in_timelines is None:
            with pytest.raises(compat.UnsupportedError) as caught:
                with compat.timeline(path):
                    pass  # pragma: no cover
            assert str(caught.value) == (
                f"{self.instance().name} cannot record when each device executes what. "
                "compat.report() shows what each device has computed."
            )
            assert not os.listdir(str(tmp_path))
            return
        with compat.timeline(path):
            model.fit(inputs, targets, batch_size=61, epochs=5, verbose=0)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert list(names.values()) == configuration.devices
        ran = [e for e in events if e["ph"] == "X"]
        end = max(e["ts"] + e["dur"] for e in ran)
        assert min(e["ts"] for e in ran) == 0 and all(e["dur"] >= 0 for e in ran)
        uses = compat.report().devices
        for place, device in names.items():
            here = [e for e in ran if e["pid"] == place]
            products = [e for e in here if self.product_in_timelines in e["name"]]
            # Two layers in five steps; some of the backward products may be part of fused kernels.
            assert 10 <= len(products) <= 100, (device, sorted({e["name"] for e in here}))
            (busy,) = [use.busy for use in uses if use.device == device]
            assert 0 < busy <= 1
            assert busy * end <= sum(e["dur"] for e in here) + 1


def optimizers_of(keras):
    """Yield all optimizers that this Keras offers: a name, and a function that makes one."""
    base, seen = keras.optimizers.Optimizer, set()  # "sgd" is another name of SGD
    for module in (keras.optimizers, getattr(keras.optimizers, "legacy", None)):
        for name in dir(module) if module else ():  # vars() of TensorFlow 1.14's wrapper has none
            kind = getattr(module, name)
            abstract = name in ("Optimizer", "TFOptimizer")
            if not isinstance(kind, type) or abstract or kind in seen:
                continue
            seen.add(kind)
            if issubclass(kind, base) or hasattr(kind, "get_updates"):
                label = "{} of {}".format(name, getattr(module, "__name__", module))
                yield label, functools.partial(_made, kind, keras)


def _made(kind, keras):
    try:
        return kind()
    except TypeError:  # one that wraps another
        inner = keras.optimizers.SGD()
        if kind.__name__ == "MultiOptimizer":
            inner = keras.optimizers.OptimizerMap(inner)
        return kind(inner)
