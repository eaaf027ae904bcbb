"""TensorFlow 2's models without Keras: their first calls, compared with one device."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _verification
from compat._configuration import registry
from compat._rows import splitting
from compat._runtime.process import process
from compat.testing import DEVICES, slow

from ..messages import told
from .test_contract import ROWS, TARGETS
from .test_native import (
    Decorated,
    Holder,
    Plain,
    function,
    parts_of,
    step_of,
)

pytestmark = pytest.mark.row("tf.Module and tf.function")


@pytest.fixture(scope="module", autouse=True)
def configuration():
    return compat.configure_gpu(simulate=DEVICES)


def verified(model, steps=1):
    """Have the model's first calls verified, and return the record of what was."""
    devices = ["/cpu:{}".format(index) for index in range(DEVICES)]
    verification = _verification.Verification("net", devices, steps)
    registry.load("tensorflow2").verify(model, verification)
    return verification.record


@pytest.mark.parametrize(
    "build", [Decorated] + [pytest.param(build, marks=slow) for build in (Holder, function)]
)
def test_first_calls_are_verified_and_change_nothing(build):
    """Weights and state after three uneven batches, two verified, are as without."""
    results = []
    for is_verified in (False, True):
        model = compat.parallelize(build())
        if is_verified:
            record = verified(model, 2)
        step = step_of(model)
        losses = [float(step(tf.constant(ROWS[:n]), tf.constant(TARGETS[:n]))) for n in (44, 2, 31)]
        model(tf.constant(ROWS[:14]))
        results.append(losses + [variable.numpy() for variable in parts_of(model)[1]])
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-6, atol=1e-7)
    assert record.steps == {"train": 2, "evaluate": 0, "predict": 1}
    # Each call: the output and four variables; in training two gradients.
    assert record.compared == 2 * (1 + 4 + 2) + 1 + 4
    assert not record.incomparable and record.failure is None
    assert 0 < record.largest[0] < 1e-3


class Centred(Plain):
    """Each row less the mean of all rows of a batch, if Python sees many: no trace follows that."""

    def __call__(self, rows):
        hidden = rows @ self.first
        if (rows.shape[0] or 0) > 5:
            hidden -= tf.reduce_mean(hidden, axis=0)
        return hidden @ self.last


@pytest.mark.parametrize("recording", [True, False])
def test_operation_across_rows_is_found(recording):
    model = compat.parallelize(Centred())
    start = [variable.numpy() for variable in parts_of(model)[1]]
    record = verified(model)
    rows, targets = tf.constant(ROWS[:14]), tf.constant(TARGETS[:14])
    with pytest.raises(compat.ResultsDifferError, match="output 1.*several rows") as caught:
        step_of(model)(rows, targets) if recording else model(rows)
    assert record.failure == str(caught.value)
    for before, variable in zip(start, parts_of(model)[1]):
        np.testing.assert_array_equal(before, variable.numpy())
    registry.load("tensorflow2").verify(model, None)
    step_of(model)(rows, targets)  # it can be trained on
    assert np.abs(start[0] - model.first.numpy()).max() > 1e-4


class Stopping(Plain):
    """The gradient of one device's part is lost."""

    def __call__(self, rows):
        output = rows @ self.first @ self.last
        here = tf.zeros([]).device
        return tf.stop_gradient(output) if here.endswith("CPU:1") else output


def test_wrong_rows_and_wrong_gradients_are_found(monkeypatch):
    rows, targets = tf.constant(ROWS[:12]), tf.constant(TARGETS[:12])
    model = compat.parallelize(Plain())
    verified(model)
    bounds = splitting.run_bounds
    with monkeypatch.context() as patch:
        patch.setattr(
            splitting, "run_bounds", lambda rows, n, i, *more: bounds(rows, n, min(i, 1), *more)
        )
        with pytest.raises(compat.ResultsDifferError, match="output 1"):
            step_of(model)(rows, targets)
    model = compat.parallelize(Stopping())
    verified(model)
    with pytest.raises(compat.ResultsDifferError, match="gradient of"):
        step_of(model)(rows, targets)


class Dropping(Plain):
    def __call__(self, rows, training=True):
        hidden = tf.tanh(rows @ self.first)
        self.calls.assign_add(1)
        return (tf.nn.dropout(hidden, 0.5) if training else hidden) @ self.last


class Noisy(Plain):
    def __init__(self):
        super().__init__()
        self.noise = tf.random.experimental.Generator.from_seed(3)

    def __call__(self, rows):
        return (rows @ self.first + self.noise.normal([6])) @ self.last


@slow
def test_randomness_is_no_alarm():
    """Outputs are compared in inference; where that cannot be had, a warning says so."""
    rows, targets = tf.constant(ROWS[:14]), tf.constant(TARGETS[:14])
    model = compat.parallelize(Dropping())
    record = verified(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        step_of(model)(rows, targets)
    assert record.uncompared["train"]["instead"] == 1
    assert record.uncompared["train"]["reason"] == "it is random"
    assert model.calls.numpy() == 1
    model = compat.parallelize(Noisy())
    states = []
    for is_verified in (False, True):
        model = compat.parallelize(Noisy())
        if is_verified:
            verified(model)
            with pytest.warns(compat.CompatWarning, match="Nothing was compared"):
                step_of(model)(rows, targets)
        else:
            step_of(model)(rows, targets)
        states.append(model.noise.state.numpy())
    np.testing.assert_array_equal(*states)


def test_parallelize_verifies_as_configured(monkeypatch):
    """No more on one device; calls within a tf.function are told of once."""
    monkeypatch.setattr(process.configuration.settings, "verify", 1)
    rows, targets = tf.constant(ROWS[:14]), tf.constant(TARGETS[:14])
    model = compat.parallelize(Centred())
    with pytest.raises(compat.ResultsDifferError):
        model(rows)
    model = compat.parallelize(compat.parallelize(Centred()), gpus=1)
    model(rows)
    model = compat.parallelize(Plain())
    with told() as texts:
        for _ in range(2):
            tf.function(step_of(model))(rows, targets)
    assert texts == [
        "verify=1: model 'plain' is called within a tf.function, where there are no numbers to "
        "compare yet, so those calls are not verified. Call it once outside, within a "
        "tf.GradientTape for its gradients: model(batch)."
    ]


def test_products_are_counted_by_device(monkeypatch):
    """What ``compat test script.py`` tells of a model without Keras."""
    monkeypatch.setattr(process, "records_operations", True)
    model = compat.parallelize(Plain())
    record = verified(model)
    step_of(model)(tf.constant(ROWS[:14]), tf.constant(TARGETS[:14]))
    assert sorted(record.operations) == ["/cpu:0", "/cpu:1", "/cpu:2"]
    assert _verification.same(record.as_dict()) is True
    assert model.calls.numpy() == 1
