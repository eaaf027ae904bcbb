"""torch: batch normalization by the whole batch, on three devices as on one."""

import copy
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import compat
from compat._backends.torch import profiler, split_calls
from compat._configuration import registry
from compat._rows import replica_threads

from ..verification_cases import verified
from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas, rows

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


def convolutional(kind=nn.BatchNorm2d):
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), kind(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), kind(4, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def dense(kind=nn.BatchNorm1d):
    return nn.Sequential(
        nn.Linear(36, 8), kind(8), nn.Tanh(), nn.Linear(8, 8), kind(8, affine=False), nn.Tanh(),
        nn.Linear(8, 8), kind(8, track_running_stats=False), nn.Linear(8, 3),
    )  # fmt: skip


def trained(model, counts, steps=5):
    """Return losses, weights and averages of steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        x = rows(counts[step % len(counts)], 36)
        loss = (model(x) - x[:, :3]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, [value.clone() for value in model.state_dict().values()]


def parallelize(model, is_asked=True):
    return compat.parallelize(model, sync_batch_norm=is_asked)


@pytest.mark.parametrize("make", [convolutional, dense])
@pytest.mark.parametrize("counts", [[61], [14], [2], [61, 61, 2, 14]], ids=str)
def test_five_steps_equal_those_of_one_device(make, counts):
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        found = trained(parallelize(model), counts)
    expected = trained(plain, counts)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert replicas(lambda: model(rows(61, 36))) == 3


def test_layers_compute_on_every_device_forward_and_backward():
    model = parallelize(convolutional().double())
    for _ in range(2):  # the first call is watched
        placed = profiler.products(lambda: model(rows(61, 36)).sum().backward())
        assert len(placed) == 3 and len(set(placed.values())) == 1, placed


def test_without_it_each_device_has_its_own_statistics():
    torch.manual_seed(0)
    model = dense().double()
    plain = copy.deepcopy(model)
    found, _ = trained(parallelize(model, False), [61])
    assert abs(found[-1] - trained(plain, [61])[0][-1]) > 1e-4


def test_a_layer_that_asks_for_it():
    """Alone: beside it, each device normalizes by its own samples."""
    torch.manual_seed(0)
    model = convolutional(nn.SyncBatchNorm).double()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        found = trained(compat.parallelize(model), [61, 14, 2])
    torch.testing.assert_close(found, trained(plain, [61, 14, 2]), rtol=1e-9, atol=1e-9)
    mixed = nn.Sequential(dense(nn.SyncBatchNorm), nn.BatchNorm1d(3)).double()
    plain = copy.deepcopy(mixed)
    compat.parallelize(mixed)
    x = rows(61, 36)
    assert not torch.allclose(mixed(x), plain(x), atol=1e-3)
    torch.testing.assert_close(mixed[0][1].running_var, plain[0][1].running_var)
    assert not torch.allclose(mixed[1].running_mean, plain[1].running_mean * 0)


def test_the_function_of_a_custom_module():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(36, 3)

        def forward(self, x):
            return nn.functional.batch_norm(self.layer(x), None, None, training=True)

    torch.manual_seed(0)
    model = Custom().double()
    plain = copy.deepcopy(model)
    found = trained(parallelize(model), [13, 2])
    torch.testing.assert_close(found, trained(plain, [13, 2]), rtol=1e-9, atol=1e-9)


def test_layers_that_do_not_train_communicate_nothing():
    model = parallelize(dense().double().eval())
    for part in model:
        if isinstance(part, nn.BatchNorm1d) and part.running_mean is None:
            part.running_mean, part.running_var = torch.zeros(8).double(), torch.ones(8).double()
    with mock.patch.object(split_calls, "TurnTakingThreads", side_effect=AssertionError):
        for _ in range(3):
            model(rows(13, 36))


def test_one_reduction_for_each_layer():
    model = parallelize(convolutional().double())
    model(rows(61, 36))
    merge, counts = replica_threads.TurnTakingThreads._merge, []

    def counted(threads):
        counts.append(any(turn.request for turn in threads.turns))
        merge(threads)

    with mock.patch.object(replica_threads.TurnTakingThreads, "_merge", counted):
        model(rows(61, 36))
    assert sum(counts) == 2


def test_low_precision_is_computed_in_float32():
    torch.manual_seed(0)
    model = dense()
    plain = copy.deepcopy(model)
    parallelize(model)
    for _ in range(2):
        x = rows(61, 36).float() + 100
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = model(x), plain(x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    same = zip(model.buffers(), plain.buffers())
    assert all(torch.allclose(one, other, rtol=1e-2, atol=1e-2) for one, other in same)


def test_one_sample_is_an_error_as_on_one_device():
    model = parallelize(dense().double())
    model(rows(61, 36))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(rows(1, 36))


def test_verification_compares_training():
    model = parallelize(convolutional().double())
    record = verified(registry.load("torch"), model)
    trained(model, [61], steps=2)
    # The gradient of a bias before batch normalization is 0 but for rounding.
    assert record.steps["train"] == 1 and set(record.incomparable) <= {
        "gradient of 1.bias", "gradient of 4.bias"
    }  # fmt: skip


def test_a_checkpoint_around_a_layer_is_told():
    """The backward pass computes it again, where nothing is reduced."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = dense()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed().double()
    plain = copy.deepcopy(model)
    with pytest.warns(compat.CompatWarning, match="batch_norm .* needs the whole batch"):
        found = trained(parallelize(model), [13], steps=1)
    torch.testing.assert_close(found[0], trained(plain, [13], steps=1)[0])


# Keras -------------------------------------------------------------------------------------------


def keras_model(kind, asks=False, **options):
    """Return a model whose layers may ask for it, by an attribute: Keras refuses the argument."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    if kind == "convolutional":
        parts = [layers.Reshape((6, 6, 1)), layers.Conv2D(4, 3),
                 layers.BatchNormalization(**options), layers.ReLU(), layers.Dropout(0.0),
                 layers.Flatten()]  # fmt: skip
    elif kind == "masked":
        parts = [layers.Reshape((6, 6)), layers.Masking(), layers.Dense(5),
                 layers.BatchNormalization(**options), layers.LSTM(4)]  # fmt: skip
    else:
        parts = [layers.Dense(8), layers.BatchNormalization(**options), layers.Dense(8, "tanh"),
                 layers.BatchNormalization(scale=False, **options)]  # fmt: skip
    for part in parts:
        if isinstance(part, layers.BatchNormalization):
            part.synchronized = asks
    return keras.models.Sequential([layers.Input((36,)), *parts, layers.Dense(3)])


def fitted(model, counts, steps=5, verify=False):
    import keras

    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    record = verified(registry.load("torch"), model) if verify else None
    losses = []
    for step in range(steps):
        x = np.random.RandomState(step).normal(size=(counts[step % len(counts)], 36))
        x[::3, -12:] = 0  # masked
        losses.append(float(model.train_on_batch(x, x[:, :3])))
    return losses, model.get_weights(), record


@pytest.fixture
def float64(devices):  # noqa: F811
    import keras

    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("kind, options", [
    ("dense", {}), ("convolutional", {}), ("masked", {}), ("dense", {"renorm": True}),
])  # fmt: skip
def test_keras_models_equal_one_device(kind, options, by_layer):
    counts = [61, 14, 2]
    expected = fitted(keras_model(kind, **options), counts)
    model = keras_model(kind, by_layer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        compat.parallelize(model, sync_batch_norm=None if by_layer else True)
        found = fitted(model, counts)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(found[1], expected[1]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert replicas(lambda: model(np.ones((61, 36)), training=True)) == 3


@pytest.mark.usefixtures("float64")
def test_keras_models_differ_without_it():
    expected = fitted(keras_model("dense"), [14])
    found = fitted(compat.parallelize(keras_model("dense")), [14])
    assert abs(found[0][-1] - expected[0][-1]) > 1e-3


@pytest.mark.usefixtures("float64")
def test_verification_compares_training_of_keras():
    model = compat.parallelize(keras_model("dense", asks=True))
    record = fitted(model, [13], verify=True)[2]
    assert record.steps["train"] == 1 and not record.uncompared


@pytest.mark.usefixtures("float64")
def test_keras_layers_that_ask_for_it_also_where_the_model_runs_unsplit():
    import keras

    def build(**options):
        model = keras_model("dense", **options)
        flipped = keras.layers.Lambda(lambda y: y - keras.ops.flip(y, 0))
        return keras.models.Sequential([model, flipped])

    expected = fitted(build(), [13], steps=2)
    model = compat.parallelize(build(asks=True))
    with pytest.warns(compat.CompatWarning, match="unsplit"):
        found = fitted(model, [13], steps=2)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
