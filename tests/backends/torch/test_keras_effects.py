"""Keras 3 on torch: what layers leave outside of their results, and first calls of many threads."""

import warnings

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch import side_effects
from compat._configuration import registry
from compat.testing import keras_under_test, slow

from ..verification_cases import verified
from .test_contract import devices as three_devices
from .test_merging import replicas, same

pytestmark = pytest.mark.usefixtures("devices")
devices = three_devices
ROWS = 7


@pytest.fixture
def keras(devices):
    return keras_under_test()


def data(step=0):
    random = np.random.RandomState(step)
    return random.normal(size=(ROWS, 4)).astype("float32"), random.normal(size=(ROWS, 2))


def build(keras, leave, closure=None):
    """Return a model with a layer whose values go through a function, and a Lambda layer."""

    class Observed(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="observed")
            self.seen, self.log, self.calls = [], {"n": 0}, 0
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.slow = self.add_weight(shape=(), initializer="ones", name="slow", trainable=False)
            self.average = torch.zeros(3)

        def call(self, x):
            y = x * self.scale
            leave(self, y)
            return y

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(3), Observed()]
    if closure is not None:
        layers.append(keras.layers.Lambda(lambda x: (closure.append(x), x)[1]))
    return keras.Sequential(layers + [keras.layers.Dense(2)])


def trained(keras, leave, parallel, closure=None, loss="mse", verify=0):
    """Losses, weights, and what the layer has; ``verify`` steps of each kind are verified."""
    model = build(keras, leave, closure)
    layer = model.get_layer("observed")
    layer.seen.clear()
    layer.calls, layer.log["n"] = 0, 0
    if parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.05), loss if isinstance(loss, str) else loss(layer))
    if verify:
        record = verified(registry.find("torch"), model, verify)
    losses = [model.train_on_batch(*data(step)) for step in range(3)]
    losses.append(model.evaluate(*data(), batch_size=ROWS, verbose=0))
    left = {n: getattr(layer, n) for n in ("seen", "log", "calls", "last", "average", "array")
            if hasattr(layer, n)}  # fmt: skip
    left["seen"], left["log"] = list(layer.seen), dict(layer.log)
    assert not verify or record.steps["train"] == verify and record.steps["evaluate"] == 1
    return losses + model.get_weights(), left, model


def keep(self, y):
    self.last = y


def count(self, y):
    self.seen.append(y.detach())
    self.log["n"] += len(y)
    self.calls += 1


def keep_array(self, y):
    if y.device.type != "meta":
        self.array = y.detach().numpy()


def in_place(self, y):
    if y.device.type != "meta":
        self.average.mul_(0.5).add_(y.detach().mean(0))


def carry(self, y):
    """Carry the state of a batch to the next one."""
    if y.device.type != "meta":
        last = getattr(self, "last", None)
        is_alike = last is not None and last.shape == y.shape
        self.last = (y * 1.5 + last if is_alike else y).detach()
        y.data += 0.1 * self.last


CASES = [
    (keep, 1),
    (count, 2),
    (keep_array, 0),
    (in_place, 1),
    (in_place, 2),
    (carry, 0),
    (carry, 2),
]


@pytest.mark.parametrize(
    "leave, verify",
    [
        pytest.param(leave, verify, marks=[] if (leave, verify) in CASES else slow)
        for leave in (keep, count, keep_array, in_place, carry)
        for verify in (0, 1, 2)
    ],
)
def test_what_a_layer_keeps_is_that_of_the_whole_batch(keras, leave, verify):
    expected, one, _ = trained(keras, leave, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        found, other, model = trained(keras, leave, True, verify=verify)
    for pair in zip(expected, found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    same(one, other, 1e-6)
    assert replicas(lambda: model(data()[0])) == 3


def test_verification_sees_a_difference_in_what_a_layer_keeps(keras, monkeypatch):
    finish = side_effects.CallEffects.finish

    def wrong(effects, merged):
        is_kept = {key: key[0] == "effect" and hasattr(v, "dim") for key, v in merged.items()}
        return finish(effects, {k: v * 1.1 if is_kept[k] else v for k, v in merged.items()})

    monkeypatch.setattr(side_effects.CallEffects, "finish", wrong)

    def leave(self, y):
        if y.device.type != "meta":
            self.last = y.detach() * 2

    model = build(keras, leave)
    compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    verified(registry.find("torch"), model, 1)
    weights = model.get_weights()
    with pytest.raises(compat.ResultsDifferError) as caught:
        model.train_on_batch(*data())
    assert "output kept as attribute 'last' of Observed" in str(caught.value)
    assert not hasattr(model.get_layer("observed"), "last")
    for pair in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(*pair)


def test_a_loss_on_what_a_layer_keeps_trains_to_the_weights_of_one_device(keras):
    def loss(layer):
        def penalised(truth, found):
            penalty = keras.ops.mean(keras.ops.square(layer.last), axis=-1)
            return keras.ops.mean(keras.ops.square(truth - found), axis=-1) + penalty

        return penalised

    expected, _, _ = trained(keras, keep, False, loss=loss)
    found, _, model = trained(keras, keep, True, loss=loss)
    for pair in zip(expected, found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    assert replicas(lambda: model(data()[0])) == 3


def test_a_closure_of_a_lambda_layer(keras):
    kept = [[], []]
    for parallel in (False, True):
        model = build(keras, lambda self, y: None, kept[parallel])
        del kept[parallel][:]
        if parallel:
            compat.parallelize(model)
        for step in range(3):
            model(data(step)[0])
    assert [len(each) for each in kept] == [3, 3]
    same(*kept, 1e-6)


def test_what_a_layer_keeps_where_the_model_runs_unsplit(keras):
    def leave(self, y):
        count(self, y)
        if y.device.type != "meta":
            self.last = y - y.flip(0)

    expected, one, _ = trained(keras, leave, False)
    with pytest.warns(compat.CompatWarning, match="needs the whole batch"):
        found, other, model = trained(keras, leave, True)
    for pair in zip(expected, found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    same(one, other, 1e-6)
    model(data()[0])
    assert replicas(lambda: model(data()[0])) == 0


def move_data(self, y):
    if y.device.type != "meta":
        with torch.no_grad():
            self.slow.value.data = self.slow.value.data * 0.5 + self.scale.value.data * 0.3


def move_in_place(self, y):
    if y.device.type != "meta":
        with torch.no_grad():
            self.slow.value.mul_(0.5).add_(self.scale.value, alpha=0.3)


def move_by_keras(self, y):
    self.slow.assign(self.slow * 0.5 + self.scale * 0.3)


@pytest.mark.parametrize("leave", [move_data, move_in_place, move_by_keras])
def test_weights_are_moved_once(keras, leave):
    def moved(self, y):
        leave(self, y)
        y.mul(self.slow.value)

    expected, _, _ = trained(keras, moved, False)
    found, _, model = trained(keras, moved, True)
    assert abs(float(model.get_layer("observed").slow) - 1) > 0.1
    for pair in zip(expected, found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)


def test_a_trainable_weight_that_is_moved_runs_unsplit(keras):
    def moved(self, y):
        if y.device.type != "meta":
            with torch.no_grad():
                self.scale.value.data = self.scale.value.data * 0.9

    expected, _, _ = trained(keras, moved, False)
    with pytest.warns(compat.CompatWarning) as caught:
        found, _, model = trained(keras, moved, True)
    assert [str(each.message) for each in caught if each.category is compat.CompatWarning] == [
        "Model {!r} assigns to a trainable weight when it is called, and the devices share that "
        "weight. The model runs unsplit on cpu:0.".format(model.name)
    ]
    for pair in zip(expected, found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
