"""torch: what devices send to each other, and that no copy of a weight is stale."""

import copy
import gc
import importlib
import os
import pickle
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import compat
from compat._backends.torch import native, weight_copies

from .. import separate_devices
from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas

pytestmark = pytest.mark.usefixtures("devices")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
ROWS, COUNT = 13, 4


@pytest.fixture
def bytes_torch(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
    monkeypatch.setitem(sys.modules, "separate_devices", separate_devices)
    return importlib.import_module("bytes_torch")


def traffic(bytes_torch, step):
    """Return the bytes that the busiest device sends in ``step()``, and those that one receives."""
    with bytes_torch.Traffic() as counted:
        step()
    return list(counted.links.busiest().values())


# Counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("label", ["torch, Module", "torch, Keras 3"])
def test_weights_pass_from_device_to_device_and_are_kept_without_gradients(
    bytes_torch, label, count
):
    counts = bytes_torch.traffic.counted(bytes_torch.BUILDS[label](count))
    for kind, most in zip(bytes_torch.traffic.STEPS, (2.1, 1.1, 0.05, 1.1, 0.05)):
        share = max(counts[kind][link] for link in ("sent", "received")) / counts["weights"]
        assert (1 if most > 1 else 0) <= share <= most, kind


def test_the_first_call_of_a_kind_sends_no_more(bytes_torch):
    model = bytes_torch.Module(bytes_torch.separate_devices(COUNT))
    assert max(traffic(bytes_torch, lambda: model.step("train"))) <= 2.1 * model.weights
    assert max(traffic(bytes_torch, lambda: model.step("predict"))) <= 1.1 * model.weights


class Averages(nn.Module):
    """A large buffer, which becomes a mean over the rows, and one that nothing changes."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 1)
        self.register_buffer("moving", torch.zeros(300, 8))
        self.register_buffer("constant", torch.ones(300, 8))

    def forward(self, x):
        self.moving = 0.9 * self.moving + (x.mean(0) * self.constant)
        return self.dense(x)


class Momentum(nn.Module):
    """A weight that each call moves towards another one."""

    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(100, 20), nn.Linear(100, 20).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.mul_(0.5).add_(self.fast.weight, alpha=0.5)
        return self.fast(x) + self.slow(x)


@pytest.mark.parametrize("kind", [Averages, Momentum])
def test_state_passes_from_device_to_device_as_well(bytes_torch, kind):
    torch.manual_seed(0)
    plain, names = kind(), bytes_torch.separate_devices(COUNT)
    module = copy.deepcopy(plain).to(names[0])
    native.ReplicatedForward.install_on(module, names)
    inputs = torch.randn(ROWS, 8 if kind is Averages else 100)
    size = sum(4 * value.numel() for value in plain.state_dict().values())
    for _ in range(3):
        counted = traffic(bytes_torch, lambda: module(inputs.to(names[0])).sum().backward())
        assert size / 2 <= max(counted) <= 2.1 * size
        plain(inputs).sum().backward()
    found = {name: value.to("cpu") for name, value in module.state_dict().items()}
    torch.testing.assert_close(plain.state_dict(), found)


def test_a_gpu_is_waited_for_once_in_a_batch(bytes_torch):
    model = bytes_torch.Module(bytes_torch.separate_devices(2))
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cpu":
                names.append(function._schema.name)
            elif not isinstance(result, torch.Tensor):
                names.append(function._schema.name)
            return result

    for _ in range(2):
        model.step("predict")
    with Names():
        model.step("predict")
    assert [name for name in names if "record_function" not in name].count("aten::_to_copy") == 1


# Never stale ------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    normal = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(4, 6), normal, nn.Tanh(), nn.Linear(6, 3)).eval()


def data(width=4):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))


def predicted(model, x):
    with torch.no_grad():
        return model(x)


def train_elsewhere(model):
    """Train a layer in another model."""
    other = nn.Sequential(model[0], nn.Linear(6, 1))
    optimizer = torch.optim.SGD(other.parameters(), 0.5)
    other(data()).sum().backward()
    optimizer.step()


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(data()).sum().backward()
    optimizer.step()


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(2)


def load(model):
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def assign_state(model):
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def other_shape(model):
    model[0].weight = nn.Parameter(torch.ones(9, 4))
    model[0].bias = nn.Parameter(torch.ones(9))
    model[1] = nn.BatchNorm1d(9).eval()
    model[3].weight = nn.Parameter(torch.full((3, 9), 0.3))


def other_memory(model):
    weight = model[0].weight
    weight.data = weight.data * 2


def other_strides(model):
    model[0].weight.data = model[0].weight.data.t().contiguous().t() * 2


def shared_with_numpy(model):
    model[0].weight.detach().numpy()[2, 1] += 3


def toggled(model):
    model[0].weight.requires_grad_(False)
    model[0].weight.data.add_(1)


def replaced(model):
    torch.manual_seed(1)
    model[0] = nn.Linear(4, 6)


def swapped(model):
    one, other = model[0].weight, model[0].weight.detach().clone() * 3
    one.data, other.data = other.data, one.data


def set_memory(model):
    with torch.no_grad():
        model[0].weight.set_(torch.ones(6, 4))


def flipped(model):
    """Flip a single bit."""
    model[3].bias.detach().numpy().view("int32")[1] ^= 1 << 22


def buffer(model):
    model[1].running_mean.data.add_(1)


def in_thread(model):
    thread = threading.Thread(target=in_place, args=(model,))
    thread.start()
    thread.join()


def normalized(model):
    """Put two weights in place of one, and change one of them."""
    nn.utils.parametrizations.weight_norm(model[0])
    model[0].parametrizations.weight.original0.data.mul_(2)


def not_a_number(model):
    nn.init.constant_(model[3].weight, float("nan"))


def half_precision(model):
    model.half().float()


CHANGES = [
    train, train_elsewhere, step, in_place, load, assign_state, other_shape, other_memory,
    other_strides, shared_with_numpy, toggled, replaced, swapped, set_memory, flipped, buffer,
    in_thread, normalized, not_a_number, half_precision,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_changed_weight_is_never_stale(change, mode):
    plain, model = network(), compat.parallelize(network())
    inputs = data()

    def results():
        with mode():
            expected, found = plain(inputs), model(inputs)
        torch.testing.assert_close(found, expected, equal_nan=True)
        return found

    before = [results() for _ in range(3)][-1]
    for each in (plain, model):
        torch.manual_seed(2)
        change(each)
    changed = [results() for _ in range(3)]
    assert all(not torch.equal(before, each) for each in changed)
    assert replicas(lambda: predicted(model, inputs)) == 3


def test_the_sign_of_zero_counts():
    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x / self.scale

    model, inputs = compat.parallelize(Inverse()), data().abs()
    assert all((predicted(model, inputs) == float("inf")).all() for _ in range(3))
    model.scale.data.neg_()
    assert (predicted(model, inputs) == -float("inf")).all()


def test_what_a_call_changes_in_its_copies_is_not_there_in_the_next_one():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
            self.halves = False

        def forward(self, x):
            y = x * self.scale
            if self.halves:
                with torch.no_grad():
                    self.scale.mul_(0.5)
            return y

    plain, model = Halving(), compat.parallelize(Halving())
    for halves in (False, False, True, True, False, True):
        plain.halves = model.halves = halves
        torch.testing.assert_close(predicted(model, data()), predicted(plain, data()))
        torch.testing.assert_close(model.scale, plain.scale)


def test_batches_of_fewer_rows_and_of_fewer_devices():
    """Batch normalization in training takes two rows on each device."""
    plain, model = network(), compat.parallelize(network())
    for rows in (13, 2, 13, 1, 3, 13):
        torch.testing.assert_close(predicted(model, data()[:rows]), predicted(plain, data()[:rows]))
        model.train()
        predicted(model, data()[:5])
        model.eval()
        plain.load_state_dict(model.state_dict())


def test_gradients_by_inputs_within_a_call_without_gradients():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.dense(x).tanh() ** 2
                return torch.autograd.grad(energy.sum(), x)[0]

    plain = Forces()
    model = compat.parallelize(copy.deepcopy(plain))
    for scale in (1, 1, 1, 2):
        for each in (plain, model):
            each.dense.weight.data.mul_(scale)
        torch.testing.assert_close(predicted(model, data()), predicted(plain, data()))


def test_weights_that_were_made_in_inference_mode():
    with torch.inference_mode():
        plain, model = network(), compat.parallelize(network())
        for scale in (1, 1, 1, 2):
            for each in (plain, model):
                each[0].weight.mul_(scale)
            torch.testing.assert_close(model(data()), plain(data()))


def test_two_models_that_share_a_layer_and_two_threads():
    layer, plain = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(layer.state_dict())
    models = [compat.parallelize(nn.Sequential(layer)) for _ in range(2)]
    found = {}

    def run(number):
        found[number] = predicted(models[number], data())

    for scale in (1, 1, 2, 0.5):
        for each in (layer, plain):
            each.weight.data.mul_(scale)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for number in range(2):
            torch.testing.assert_close(found[number], predicted(plain, data()))


def test_tensors_that_cannot_be_compared_bit_by_bit():
    comparable = weight_copies.is_comparable
    assert comparable(torch.ones(3)) and comparable(torch.ones(3, dtype=torch.bool))
    assert not comparable(torch.ones(3).to_sparse())
    assert not comparable(torch.ones(3, dtype=torch.complex64).conj())
    assert not comparable(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

    class Complex(nn.Module):
        def __init__(self, dtype, odd):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7, dtype=dtype)[odd:])

        def forward(self, x):
            return x * self.scale[:4].real

    for dtype in (torch.complex128, torch.complex64, torch.bfloat16, torch.float64):
        for odd in (0, 1):
            model = compat.parallelize(Complex(dtype, odd))
            for number in range(1, 4):
                found = predicted(model, data()) / number
                torch.testing.assert_close(found.float(), data(), rtol=0.01, atol=0)
                model.scale.data.fill_(number + 1)


# What is kept is freed --------------------------------------------------------------------------


def kept_by(model):
    """Return weak references to the copies that a model keeps."""
    method = native.ReplicatedForward.of(model)
    chains = [chain for kept in method.kept_copies.values() for chain in kept.chains.values()]
    return [weakref.ref(each) for chain in chains for each in (chain.sent, *chain.copies)]


def freed(references):
    gc.collect()
    return not any(reference() is not None for reference in references)


@pytest.mark.parametrize("way", ["deleted", "uninstalled", "one device", "trained", "replaced"])
def test_what_is_kept_is_freed(way):
    model = compat.parallelize(network())
    for _ in range(3):
        predicted(model, data())
    kept = kept_by(model)
    assert len(kept) == 3 * len(model.state_dict()) and not freed(kept)
    if way == "deleted":
        del model
    elif way == "uninstalled":
        native.ReplicatedForward.install_on(model, None)
    elif way == "one device":
        compat.parallelize(model, gpus=1)
    elif way == "trained":
        model(data())
    else:
        for index in (0, 1, 3):
            model[index] = copy.deepcopy(model[index])
        predicted(model, data())
    assert freed(kept)


def test_copies_of_a_model_have_copies_of_their_own():
    model = compat.parallelize(network())
    model(data())
    size = len(pickle.dumps(model))
    for _ in range(3):
        before = predicted(model, data())
    assert len(pickle.dumps(model)) == size
    clone, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (clone, loaded):
        torch.testing.assert_close(predicted(other, data()), before)
        other[0].weight.data.mul_(2)
        assert not torch.equal(predicted(other, data()), before)
        torch.testing.assert_close(predicted(model, data()), before)
    kept = kept_by(model)
    del model
    gc.collect()
    assert sum(reference() is not None for reference in kept) == len(kept) / 2  # those of the clone


def test_nothing_is_kept_with_gradients():
    model = compat.parallelize(network())
    for _ in range(3):
        model(data())
    assert kept_by(model) == []


# Keras ------------------------------------------------------------------------------------------


def keras_models():
    """Return a model and another one with the same weights, on three devices."""
    import keras

    keras.utils.set_random_seed(0)

    def build():
        layers = keras.layers
        hidden = [layers.Dense(6, activation="tanh"), layers.BatchNormalization()]
        return keras.Sequential([layers.Input((4,)), *hidden, layers.Dropout(0.5), layers.Dense(3)])

    plain, model = build(), build()
    model.set_weights(plain.get_weights())
    for each in (plain, model):
        each.compile(keras.optimizers.SGD(0.1), "mse")
    return plain, compat.parallelize(model)


def array(width=4):
    return data(width).numpy()


def fit_another(model):
    import keras

    layer = model.layers[0]
    other = keras.Sequential([keras.layers.Input((4,)), layer, keras.layers.Dense(1, "relu")])
    other.layers[-1].set_weights([np.ones((6, 1)), np.ones(1)])
    other.compile("sgd", "mse")
    other.fit(array(), array(1), batch_size=ROWS, verbose=0, shuffle=False)


def outside_of_keras(model):
    weights = [variable.value for variable in model.trainable_variables]
    optimizer = torch.optim.SGD(weights, 0.5)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def save_and_load(model, folder):
    path = os.path.join(str(folder), "model.weights.h5")
    before = model.get_weights()
    model.set_weights([weight + 0.25 for weight in before])
    model.save_weights(path)
    model.set_weights(before)
    model.predict_on_batch(array())
    model.load_weights(path)


def toggle(model):
    model.layers[0].trainable = False
    model.layers[0].kernel.value.data.mul_(2)


def set_value(model):
    kernel = model.layers[0].kernel
    kernel.assign(kernel * 2)


KERAS_CHANGES = {
    "set_weights": lambda model: model.set_weights([2 * w for w in model.get_weights()]),
    "assign": set_value,
    "in place": lambda model: model.layers[0].kernel.value.data.mul_(2),
    "moving average": lambda model: model.layers[1].moving_mean.assign_add(np.ones(6)),
    "trainable": toggle,
    "another model": fit_another,
    "outside of Keras": outside_of_keras,
    "train_on_batch": lambda model: (
        model.evaluate(array(), array(3), verbose=0) and model.layers[3].bias.assign_add(np.ones(3))
    ),
}


@pytest.mark.parametrize("change", [*KERAS_CHANGES, "load_weights"])
def test_a_changed_weight_of_keras_is_never_stale(change, tmp_path):
    models = keras_models()

    def results():
        expected, found = [model.predict(array(), batch_size=5, verbose=0) for model in models]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        losses = [model.evaluate(array(), array(3), batch_size=5, verbose=0) for model in models]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        return found

    before = results()
    for model in models:
        KERAS_CHANGES.get(change, lambda model: save_and_load(model, tmp_path))(model)
    assert not np.allclose(before, results())


def test_a_callback_that_changes_weights_between_batches():
    import keras

    class Doubling(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            self.model.set_weights([2 * weight for weight in self.model.get_weights()])

    results = [
        model.predict(array(), batch_size=4, verbose=0, callbacks=[Doubling()])
        for model in keras_models()
    ]
    np.testing.assert_allclose(*results, rtol=1e-4)


def test_validation_between_epochs():
    histories = []
    for model in keras_models():
        model.layers[2].rate = 0.0  # masks of replicas differ
        model.layers[1].trainable = False  # which normalizes each device's own rows
        history = model.fit(
            array(), array(3), validation_data=(array(), array(3)), epochs=4, batch_size=ROWS,
            shuffle=False, verbose=0,
        )  # fmt: skip
        histories.append(history.history)
    np.testing.assert_allclose(histories[0]["val_loss"], histories[1]["val_loss"], rtol=1e-4)
    assert len(set(histories[0]["val_loss"])) == 4
