"""Verification, on a model of a few numbers: what is compared, what is found, what is said."""

import random
import types

import numpy as np
import pytest
from conftest import refusal

import compat
from compat import _keras, _verification
from compat._configuration.settings import Every, parse_verify, simulated_from_outside
from compat._runtime import synchronized
from compat._verification import inputs_perturbed, keras_steps, reasons


def test_layers_are_not_asked_for_variables_where_none_has_moved():
    """Of a user's layer of Keras 2 ``variables`` may be a method of its own."""
    layer = types.SimpleNamespace(trainable=True, variables=lambda: 1 / 0)
    assert keras_steps.trained_layers([layer], True) == [layer]
    assert keras_steps.trained_layers([layer], False) == []


NORMALIZED = reasons.Incomparable(
    "layer 'bn' normalizes each device's rows by their own statistics",
    "pass sync_batch_norm=True (or --sync-batch-norm)",
)


class Regression(_verification.Step):
    """One step of linear regression; ``fault`` changes what several devices make of it."""

    rates = {}  # type: dict

    def __init__(self, fault=None, noise=0.0, dtype="float32", by_design=None, rows=61):
        generator = np.random.RandomState(0)
        self.inputs = generator.normal(size=(rows, 8)).astype(dtype)
        self.targets = generator.normal(size=(rows, 4)).astype(dtype)
        self.dtype = dtype
        self.why = by_design
        self.values = {
            "weight kernel": (generator.normal(size=(8, 4)) * 0.3).astype(dtype),
            "state seen": np.zeros((), "int64"),
            "state random": np.array(1),
        }
        self.fault = fault or (lambda results, values: None)
        self.noise = noise
        self.inferred = []

    def by_design(self, inference, changed):
        return None if inference else self.why

    def random_rates(self):
        return self.rates

    def read(self):
        return dict(self.values)

    def write(self, values):
        self.values.update(values)

    def is_random(self, label):
        return label == "state random"

    def _do(self, parts):
        kernel = self.values["weight kernel"]
        noise = np.random.RandomState(int(self.values["state random"])).normal(size=kernel.shape)
        self.values["state random"] = self.values["state random"] + 1
        gradient, loss = np.zeros_like(kernel), 0.0
        for inputs, targets in zip(
            np.array_split(self.inputs, parts), np.array_split(self.targets, parts)
        ):
            error = inputs.dot(kernel) - targets
            gradient += inputs.T.dot(error).astype(self.dtype)
            loss += float((error**2).sum())
        gradient = gradient / len(self.inputs) + (self.noise * noise).astype(self.dtype)
        self.values["weight kernel"] = (kernel - 0.1 * gradient).astype(self.dtype)
        self.values["state seen"] = self.values["state seen"] + len(self.inputs)
        return {"the loss": np.asarray(loss / len(self.inputs) + self.noise * noise[0, 0])}

    def on_one_device(self):
        return self._do(1)

    def on_all_devices(self):
        results = self._do(3)
        self.fault(results, self.values)
        return "given", results

    def outputs(self, is_unsplit):
        self.inferred.append(is_unsplit)
        return {"output 1": self.inputs.dot(self.values["weight kernel"])}


def verify(step, steps=1):
    verification = _verification.Verification("model", ["a", "b", "c"], steps)
    start = {label: value.copy() for label, value in step.values.items()}
    try:
        return verification, verification.verify("train", step)
    except compat.ResultsDifferError:
        for label, value in start.items():
            np.testing.assert_array_equal(step.values[label], value)
        raise


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_rounding_is_no_difference(dtype):
    step = Regression(dtype=dtype)
    verification, given = verify(step)
    assert given == "given"
    assert verification.record.steps == {"train": 1, "evaluate": 0, "predict": 0}
    assert verification.record.compared == 3
    assert verification.record.incomparable == {}
    assert step.values["state seen"] == 61, "the step counts once"
    assert not step.inferred


def scaled(factor):
    def fault(results, values):
        start = Regression().values["weight kernel"]
        values["weight kernel"] = start + (values["weight kernel"] - start) * factor

    return fault


def counted_by_each(results, values):
    values["state seen"] = values["state seen"] * 3


def not_a_number(results, values):
    values["weight kernel"] = values["weight kernel"] * np.float32("nan")


def short(results, values):
    results["the loss"] = np.zeros(2)


def averaged_over_replicas(results, values):
    values["state seen"] = values["state seen"] // 3 + 1


def counted_otherwise(results, values):
    values["state seen"] = values["state seen"] - 2


NO_MEAN = (
    "A loss or an operation that is not a mean over the rows of the batch: a sum, a mean over "
    "masked rows only, or one that compares rows with one another."
)


def text_of(label, difference, limit, cause):
    return (
        "The first thing that differs when model 'model' does a training step on 3 devices and on "
        "one is {}: by {}, where rounding explains at most {}. {} The model is as it was before "
        "the step. Change the model, or run it on one device: parallelize(model, gpus=1); verify=0 "
        "goes on without looking.".format(label, difference, limit, cause)
    )


@pytest.mark.parametrize(
    "fault, difference, cause",
    [
        (
            scaled(1 / 3.0),
            ("weight kernel", "0.0517", "2e-05"),
            "It is 1/3 of it: a loss that is a sum over the rows was averaged.",
        ),
        (
            scaled(3.0),
            ("weight kernel", "0.155", "2e-05"),
            "It is 3 times as much: each replica counted all of it.",
        ),
        (scaled(1.01), ("weight kernel", "0.000776", "2e-05"), NO_MEAN),
        (
            counted_by_each,
            ("state seen", "122", "0"),
            "It is 3 times as much: each replica counted all of it.",
        ),
        (
            averaged_over_replicas,
            ("state seen", "40", "0"),
            "It adds up over the batch, and was averaged over the replicas.",
        ),
        (
            counted_otherwise,
            ("state seen", "2", "0"),
            "State that is neither a mean over the rows, nor a sum, nor a count of steps.",
        ),
        (not_a_number, ("weight kernel", "inf", "2e-05"), NO_MEAN),
        (short, ("the loss", "inf", "0"), NO_MEAN),
    ],
)
def test_a_difference_is_an_error_that_names_it(fault, difference, cause):
    text = text_of(*difference, cause=cause)
    assert refusal(compat.ResultsDifferError, verify, Regression(fault)) == text


@pytest.mark.parametrize(
    "step, rates, text, remedy",
    [
        (Regression(noise=0.1), {}, "it is random", ""),
        (
            Regression(noise=0.1),
            {"drop": "rate"},
            "layer 'drop' draws random numbers",
            "set the rate of 'drop' to 0",
        ),
        (
            Regression(noise=0.1),
            dict.fromkeys("abcde", "rate"),
            "layers 'a', 'b', 'c' and 2 more draw random numbers",
            "set the rates of these layers to 0",
        ),
        (Regression(scaled(2.0), by_design=NORMALIZED), {}, NORMALIZED.text, NORMALIZED.remedy),
        (
            Regression(scaled(2.0), by_design=NORMALIZED),
            {"drop": "rate"},
            NORMALIZED.text + "; layer 'drop' draws random numbers",
            NORMALIZED.remedy + " and set the rate of 'drop' to 0",
        ),
    ],
    ids=["random", "dropout", "dropouts", "by design", "both"],
)
def test_what_is_no_fault_is_compared_in_inference(step, rates, text, remedy):
    """Such a step is not one that was verified."""
    step.rates = rates
    verification, _ = verify(step)
    record = verification.record
    assert step.inferred == [True, True, False]
    assert not any(record.steps.values()) and record.compared == 0 and not record.incomparable
    assert record.uncompared == {
        "train": {"steps": 1, "reason": text, "remedy": remedy, "instead": 1}
    }
    assert _verification.same(record.as_dict()) is None
    verification.verify("predict", Regression())
    assert _verification.same(record.as_dict()) is None
    lines = _verification.shown(record.as_dict())
    assert lines[1] == "  verified: 1 prediction step; 3 values"
    assert lines[3:] == [
        "  not compared: 1 training step ({})".format(text),
        "    compared instead: 1 value of the outputs in inference",
    ] + ["    to compare it: " + remedy] * bool(remedy)


def test_layers_that_draw_random_numbers():
    class Dropout:
        rate = 0.5

    class Off:
        rate = 0.0

    class SpatialDropout(Dropout):
        pass

    class GaussianNoise:
        stddev = 0.1

    class Recurrent:
        rate, dropout, recurrent_dropout = 1.0, 0.0, 0.2

    class Gluon(Dropout):
        rate, _rate = None, 0.3

    kinds = Dropout, Off, SpatialDropout, GaussianNoise, Recurrent, Gluon
    named = [(kind.__name__.lower(), kind()) for kind in kinds] + [("", Dropout())]
    assert reasons.rates(named) == {
        "dropout": "rate",
        "spatialdropout": "rate",
        "gaussiannoise": "stddev",
        "recurrent": "recurrent_dropout",
        "gluon": "rate",
        "Dropout": "rate",
    }


def test_batch_normalization_that_is_asked_to_synchronize_has_no_remedy():
    model = types.SimpleNamespace()
    text = "layer 'bn' normalizes each device's rows by their own statistics"
    remedy = "pass sync_batch_norm=True (or --sync-batch-norm)"
    assert reasons.normalized("layer", "bn", model) == (text, remedy)
    synchronized.ask(model, True)
    assert reasons.normalized("layer", "bn", model) == (text, "")


@pytest.mark.parametrize("noise", [0.3, 1e-3])  # also where the loss hardly shows it
def test_what_a_random_step_repeats_by_chance_is_not_compared(noise):
    """An accuracy over 30 rows, and Adam's first update, which is a sign for each weight."""

    class Signs(Regression):
        def _do(self, parts):
            before = self.values["weight kernel"]
            results = super(Signs, self)._do(parts)
            results["metric acc"] = np.asarray(0.5 if parts == 1 else 0.5 + 1 / 30)
            update = np.full_like(before, 0.003)
            update[0, 0] *= 1 if parts == 1 else -1
            self.values["weight kernel"] = before + update
            return results

    verify(Signs(noise=noise))
    with pytest.raises(compat.ResultsDifferError, match="is metric acc: by 0.0333"):
        verify(Signs())
    # States count and sum what is not random.
    with pytest.raises(compat.ResultsDifferError, match="is state seen: by 2,"):
        verify(Signs(counted_otherwise, noise=noise))


def test_a_difference_in_inference_is_found_although_training_is_random(monkeypatch):
    step = Regression(noise=0.1)
    monkeypatch.setattr(step, "outputs", lambda is_unsplit: {"output 1": np.ones(3) * is_unsplit})
    assert refusal(compat.ResultsDifferError, verify, step) == text_of(
        "output 1",
        "1",
        "0.0001",
        "An operation that reads several rows of the batch at once (a mean or softmax over axis 0, "
        "x @ x.T), or an input whose first dimension is not the batch (time-major).",
    )


@pytest.mark.parametrize(
    "step, outputs, why",
    [
        (Regression(noise=0.1), lambda is_unsplit: None, "it is random"),
        (
            Regression(scaled(2.0)),
            lambda is_unsplit: {"output 1": np.ones(3) * is_unsplit},
            NORMALIZED,
        ),
    ],
    ids=["no outputs", "outputs that differ by design"],
)
def test_nothing_compared_is_a_warning(monkeypatch, step, outputs, why):
    monkeypatch.setattr(step, "outputs", outputs)
    remedy = ""
    if why is NORMALIZED:
        monkeypatch.setattr(step, "by_design", lambda inference, changed: NORMALIZED)
        why, remedy = why.text, " To compare it, pass sync_batch_norm=True (or --sync-batch-norm)."
    with pytest.warns(compat.CompatWarning) as caught:
        verification, _ = verify(step)
    assert [str(warning.message) for warning in caught] == [
        "compat could not verify a training step of model 'model': {}, and its outputs in "
        "inference cannot be compared either. Nothing was compared.{}".format(why, remedy)
    ]
    record = verification.record.as_dict()
    assert record["same"] is None
    assert _verification.shown(record)[1:3] == [
        "  verified: no step",
        "  not compared: 1 training step ({})".format(why),
    ]
    assert _verification.shown(record)[3] == "    compared instead: nothing"


class Fits(Regression):
    """Its targets are its own outputs: the loss and the gradient are rounding alone."""

    def __init__(self, **options):
        super(Fits, self).__init__(**options)
        self.targets = self.outputs(True)["output 1"]

    def _do(self, parts):
        results = super(Fits, self)._do(parts)
        results["metric error"] = np.asarray(0.0 if parts == 1 else 1e-9)
        return results


def test_no_float_is_exact():
    """What is zero on one device may be rounding on several."""
    verification, _ = verify(Fits())
    assert verification.record.seen("train") == 1

    class Off(Fits):
        def _do(self, parts):
            results = super(Off, self)._do(parts)
            results["metric error"] = np.asarray(0.0 if parts == 1 else 1e-3)
            return results

    with pytest.raises(compat.ResultsDifferError, match="is metric error: by 0.001, .* most 1e-07"):
        verify(Off())


class Chaotic(Regression):
    """Its outputs in inference are those of the logistic map, where it is chaotic."""

    label = "weight kernel"

    def outputs(self, is_unsplit):
        value = abs(float(self.values[self.label][0, 0])) % 1 + (0.0 if is_unsplit else 1e-7)
        for _ in range(60):
            value = 3.99 * value * (1 - value)
        return {"output 1": np.asarray(value)}


class Frozen(Chaotic):
    """As the former, by a weight that is not trained."""

    label = "state reservoir"

    def __init__(self):
        super(Frozen, self).__init__(noise=0.1)
        self.values[self.label] = np.full((1, 1), 0.7713, "float32")


class Reservoir(Regression):
    """As the former, by constants: no weight comes before."""

    input_attributes = ("inputs",)

    def outputs(self, is_unsplit):
        value = np.abs(self.inputs) % 1 + np.float32(0.0 if is_unsplit else 1e-7)
        for _ in range(60):
            value = np.float32(3.99) * value * (1 - value)
        return {"output 1": value}


@pytest.mark.parametrize("step", [Chaotic(noise=0.1), Frozen(), Reservoir(noise=0.1)])
def test_a_model_that_amplifies_rounding_is_no_difference(step):
    with pytest.warns(compat.CompatWarning, match="in inference cannot be compared either"):
        verify(step)


class Kinked(Regression):
    """Only of products above a threshold are there gradients; sums of one device are off a bit."""

    def _do(self, parts):
        eps, kernel = np.finfo("float32").eps, self.values["weight kernel"].astype("float64")
        products = self.inputs.dot(kernel)
        if not hasattr(self, "threshold"):  # one product is above it on several devices alone
            self.threshold = products[0, 0] * (1 - 20 * eps)
        products = products * (1 - (40 * eps if parts == 1 else 0))
        active = np.where(np.sign(self.threshold) * (products - self.threshold) > 0, products, 0)
        loss = np.asarray(float((active**2).mean()) + 1)
        gradient = self.inputs.T.dot(active) / len(self.inputs)
        self.values["weight kernel"] = (kernel - 0.1 * gradient).astype("float32")
        return {"the loss": loss}


def test_sums_of_one_device_that_are_off_at_a_kink_are_no_difference():
    verification, _ = verify(Kinked())
    assert verification.record.failure is None


def test_constants_that_amplify_nothing_hide_no_difference():
    class Mixing(Reservoir):
        def outputs(self, is_unsplit):
            return {"output 1": self.inputs + (0 if is_unsplit else 0.1 * self.inputs.mean())}

    with pytest.raises(compat.ResultsDifferError, match="is output 1: by 0.0"):
        verify(Mixing(noise=0.1))


class Normalising(Regression):
    """Each input less the mean of its column, over how far the column is from that mean."""

    input_attributes = ("rows",)

    def __init__(self, *numbers, mask=None):
        super(Normalising, self).__init__(noise=0.1)
        self.rows = np.tile(np.float32(numbers), 61)
        self.mask = mask

    def outputs(self, is_unsplit):
        masked = self.rows == self.mask
        apart = self.rows - self.rows[~masked].mean() + np.float32(0.0 if is_unsplit else 1e-6)
        return {"output 1": np.append(np.where(masked, 1.0, apart * 300.0), 1.0)}


@pytest.mark.parametrize("step", [Normalising(5.0), Normalising(1.0, 5.0, 1.0, mask=1.0)])
def test_a_constant_column_that_is_normalised_is_no_difference(step):
    """Whole numbers are off as well then, each by itself: one of them may be a mask."""
    verification, _ = verify(step)
    assert verification.record.seen("train") == 1


def test_a_number_that_decides_what_a_step_does_hides_no_difference():
    class Masked(Normalising):
        def outputs(self, is_unsplit):
            return {"output 1": (self.rows == 5.0) * (1.0 if is_unsplit else 1.01)}

    with pytest.raises(compat.ResultsDifferError, match="is output 1: by 0.01"):
        verify(Masked(5.0))


def test_of_what_a_step_is_given_whole_numbers_do_not_move():
    step = Regression()
    step.input_attributes = ("args",)
    step.args = [(np.float32([0.3, -0.7, 2.0, 0.5, 0.0]), None), {"classes": np.arange(3)}, "text"]
    before = step.args
    with inputs_perturbed(step, 2):
        assert step.args is before or step.args == before
    with inputs_perturbed(step, 1):
        (floats, nothing), classes, text = step.args
    assert (nothing, text, type(step.args[0])) == (None, "text", tuple)
    np.testing.assert_array_equal(classes["classes"], before[1]["classes"])
    np.testing.assert_array_equal(floats[2:], before[0][0][2:])
    moved = abs(floats[:2] / before[0][0][:2] - 1)
    assert floats.dtype == "float32" and (0 < moved).all() and (moved < 1e-6).all()
    with inputs_perturbed(step, 1, 2.0):
        (floats, _), classes, _ = step.args
    np.testing.assert_array_equal(floats != before[0][0], [False, False, True, False, False])
    np.testing.assert_array_equal(classes["classes"], before[1]["classes"])


def test_a_step_that_amplifies_rounding_is_not_called_random():
    class Noisy(Regression):
        def _do(self, parts):
            results = super(Noisy, self)._do(parts)
            moved = abs(float(self.values["weight kernel"].sum()))
            results["the loss"] = np.asarray(moved * 1e7 % 1)
            return results

    verification, _ = verify(Noisy())
    assert verification.record.uncompared["train"]["reason"] == "it amplifies rounding too far"


def test_whole_numbers_are_not_moved():
    """They may be counts, which decide what a step does."""

    class Counting(Regression):
        def __init__(self):
            super(Counting, self).__init__()
            self.values["state steps"] = np.full((), 7.0, "float32")
            self.values["state mean"] = np.full((), 7.5, "float32")
            self.seen = []

        def _do(self, parts):
            self.seen.append((float(self.values["state steps"]), float(self.values["state mean"])))
            return super(Counting, self)._do(parts)

    step = Counting()
    verify(step)
    assert {steps for steps, _ in step.seen} == {7.0}
    assert len({mean for _, mean in step.seen}) == 2


def test_what_a_step_raises_is_what_its_caller_sees(monkeypatch):
    """Although nothing can be put back."""

    def fault(results, values):
        raise KeyError("third")

    step = Regression(fault)
    monkeypatch.setattr(step, "give_up", lambda values: [].pop())
    with pytest.raises(KeyError, match="third"):
        _verification.Verification("model", ["a", "b"], 1).verify("train", step)


def test_random_numbers_of_python_and_numpy_are_drawn_once():
    class Drawing(Regression):
        def _do(self, parts):
            results = super(Drawing, self)._do(parts)
            self.drawn = random.random(), np.random.uniform()
            return results

        def on_all_devices(self):
            given, results = super(Drawing, self).on_all_devices()
            return self.drawn, results

    random.seed(3)
    np.random.seed(3)
    expected = [(random.random(), np.random.uniform()) for _ in range(2)]
    random.seed(3)
    np.random.seed(3)
    assert verify(Drawing())[1] == expected[0]
    assert (random.random(), np.random.uniform()) == expected[1]


def test_one_training_step_in_so_many():
    """For as long as training goes on; and an evaluation and a prediction after each."""
    verification = _verification.Verification("model", ["a", "b"], Every(3))
    verified = []
    for place in range(8):
        if verification.is_due("train"):
            verified.append(place)
            verification.verify("train", Regression())
            assert verification.is_due("evaluate") and verification.is_due("predict")
            verification.verify("predict", Regression())
        assert not verification.is_due("predict")
        assert verification.wants("train") and verification.wants("predict")
    assert verified == [0, 3, 6]
    assert verification.record.steps == {"train": 3, "evaluate": 0, "predict": 3}


def test_predictions_are_verified_again_after_a_training_step():
    """What predicts may have kept the weights of before."""
    verification = _verification.Verification("model", ["a", "b"], 1)
    for kind in ("predict", "train", "predict"):
        assert verification.wants(kind)
        verification.verify(kind, Regression())
    assert not verification.wants("predict")


def test_record_for_a_person():
    record = _verification.Record("net", ["cpu:0", "cpu:1"])
    record.steps["train"], record.steps["predict"] = 2, 1
    record.compared, record.largest = 12, (1.2e-6, "weight kernel")
    record.operations = {"cpu:0": (2, 3), "cpu:1": (0, 0)}
    record.incomparable = {"metric {}".format(i): "one device does not repeat it" for i in range(5)}
    assert _verification.shown(record.as_dict()) == [
        "model 'net' on cpu:0, cpu:1",
        "  verified: 2 training steps, 1 prediction step; 12 values",
        "  largest difference: 1.2e-06 of its size (weight kernel)",
        "  products ran, forward + backward: cpu:0 2 + 3, cpu:1 0 + 0",
        "  only 1 of its devices worked",
        "  not compared: metric 0, metric 1, metric 2 and 2 more (one device does not repeat it)",
    ]
    assert _verification.same(record.as_dict()) is False
    record.operations["cpu:1"] = (2, 3)
    assert _verification.same(record.as_dict()) is True
    record.operations = dict.fromkeys(record.devices, (0, 0))
    assert "  no products were seen on any device" in _verification.shown(record.as_dict())
    assert record.as_dict()["same"] is True
    record.note_uncompared("train", NORMALIZED, 0)  # others were
    assert record.as_dict()["same"] is True
    record.failure = "it differs"
    assert record.as_dict()["same"] is False
    assert _verification.shown(record.as_dict())[-1] == "  it differs"


def test_how_many_steps_are_verified():
    assert parse_verify(None, {}, 3) == 1
    assert parse_verify(None, {}, None) == 0
    assert parse_verify(None, {"COMPAT_VERIFY": "4"}, None) == 4
    assert parse_verify(None, {"COMPAT_VERIFY": "0"}, 3) == 0
    assert parse_verify(2, {"COMPAT_VERIFY": "4"}, 3) == 2
    assert parse_verify("every 100", {}, None) == Every(100)
    assert parse_verify(None, {"COMPAT_VERIFY": " Every  7 "}, 3) == Every(7)
    assert (str(Every(7)), repr(Every(7))) == ("every 7", "'every 7'")
    for wrong in (-1, "3", 1.5, True, "every", "every 0", "every -1", "every x", "3 every 100"):
        refusal(compat.InvalidArgumentError, parse_verify, wrong, {}, None)
    call = parse_verify, None, {"COMPAT_VERIFY": "yes"}, None
    assert refusal(compat.InvalidArgumentError, *call) == (
        "verify='yes' (or the variable COMPAT_VERIFY) is not a number of steps to verify. Give 0 "
        'for none, or 1 or more, for example verify=1, or verify="every 100" for one training '
        "step in 100."
    )


def test_simulated_devices_from_outside():
    assert simulated_from_outside({}) is None
    assert simulated_from_outside({"COMPAT_SIMULATE": " 3 "}) == 3
    for wrong in ("0", "-1", "three"):
        call = simulated_from_outside, {"COMPAT_SIMULATE": wrong}
        assert refusal(compat.InvalidArgumentError, *call) == (
            "COMPAT_SIMULATE={!r} is not a number of devices, 1 or more. Set it to one, for "
            "example COMPAT_SIMULATE=3, or remove it.".format(wrong)
        )


def test_wrapped_optimizers_are_found_once_at_any_depth():
    class Wrapper:
        def __init__(self, optimizer=None):
            self.optimizer = optimizer

        def get_updates(self):
            raise NotImplementedError

    inner = Wrapper()
    middle = Wrapper(inner)
    inner.wrapped_by = outer = Wrapper(middle)
    assert _keras.wrapped_optimizers(outer) == [outer, middle, inner]
    assert _keras.wrapped_optimizers(None) == []
