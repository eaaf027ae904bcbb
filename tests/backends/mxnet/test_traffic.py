"""Bytes between contexts, counted from what ran, and weights that are never used stale."""

import copy
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import compat
from compat._backends.mxnet import comparison, weight_copies
from compat.testing import in_span, keras_under_test

from ..conftest import ROOT
from .gluon_models import array, check_refusal, check_same

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
bytes_mxnet = importlib.import_module("bytes_mxnet")
MARK, STEPS = bytes_mxnet.traffic.MARK, bytes_mxnet.traffic.STEPS
del sys.path[0]


@pytest.fixture(scope="module")
def mx():
    compat.configure_gpu(simulate=3)
    import mxnet

    return mxnet


def test_no_context_sends_the_weights_more_than_twice():
    """On up to eight contexts, which need a process of their own."""
    command = [sys.executable, "benchmarks/bytes_mxnet.py", "--devices", "2", "4", "8"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    measured = json.loads(line[len(MARK) :])
    assert set(measured) == set(bytes_mxnet.BUILDS)
    for label, by_devices in measured.items():
        for devices, counts in by_devices.items():
            for kind, most in zip(STEPS, (2.1, 1.1, 0.05, 1.1, 0.05)):
                shares = [counts[kind][link] / counts["weights"] for link in ("sent", "received")]
                least = 0.9 if kind == "train" else 0
                assert least <= max(shares) <= most, (label, devices, kind)


# Gluon --------------------------------------------------------------------------------------------


class Predicting:
    """A layer that predicts on three contexts, and ways to change its weights."""

    def __init__(self, mx):
        check_refusal(mx)
        self.mx, self.inputs = mx, array(mx, 8, 3)
        self.net = mx.gluon.nn.Dense(2, in_units=3)
        self.net.initialize()
        compat.parallelize(self.net)

    def check(self):
        """Check what it predicts by its weights."""
        x, weight, bias = [a.asnumpy() for a in (self.inputs, *self.arrays())]
        found = self.net(self.inputs).asnumpy()
        np.testing.assert_allclose(found, x.dot(weight.T) + bias, rtol=1e-3, atol=1e-5)

    def arrays(self):
        return self.net.weight.data(), self.net.bias.data()

    def set_data(self):
        self.net.weight.set_data(array(self.mx, 2, 3))

    def write_in_place(self):
        self.net.weight.data()[:] = 3

    def add_in_place(self):
        held = self.net.weight.data()
        held += 1

    def write_a_view(self):
        self.net.bias.data()[1:] += 1

    def write_one_number(self):
        self.net.weight.data()[1, 2] = 1e-30

    def write_by_an_operation(self):
        held = self.net.weight.data()
        self.mx.nd.sgd_update(held, self.mx.nd.ones_like(held), lr=0.1, out=held)

    def write_shared_memory(self):
        held = self.net.weight.data()
        held.wait_to_read()
        other = self.mx.nd.from_dlpack(held.to_dlpack_for_write())
        other[:] = 5
        other.wait_to_read()  # MXNet does not know that both are one

    def make_them_nan(self):
        self.net.weight.data()[:] = np.nan

    def load(self):
        arrays = {"weight": array(self.mx, 2, 3), "bias": array(self.mx, 1, 2)[0]}
        self.mx.nd.save("weights", arrays)
        self.net.load_parameters("weights")

    def initialize(self):
        self.net.initialize(self.mx.init.Normal(), force_reinit=True)

    def train(self):
        trainer = self.mx.gluon.Trainer(self.net.collect_params(), "sgd")
        with self.mx.autograd.record():
            loss = self.net(self.inputs).sum()
        loss.backward()
        trainer.step(1)

    def train_by_another_optimizer(self):
        with self.mx.autograd.record():
            loss = self.net(self.inputs).sum()
        loss.backward()
        update = self.mx.optimizer.get_updater(self.mx.optimizer.Adam())
        update(0, self.net.weight.grad(), self.net.weight.data())

    def train_by_another_block(self):
        other = self.mx.gluon.nn.Dense(2, in_units=3, params=self.net.params)
        trainer = self.mx.gluon.Trainer(other.collect_params(), "sgd")
        with self.mx.autograd.record():
            loss = other(self.inputs).sum()
        loss.backward()
        trainer.step(1)

    def freeze(self):
        self.net.weight.grad_req = "null"
        self.check()
        self.write_in_place()
        self.check()
        self.net.weight.grad_req = "write"
        self.add_in_place()

    def freeze_and_train(self):
        self.net.weight.grad_req = "null"
        self.train()
        self.check()
        self.write_in_place()

    def write_in_a_thread(self):
        thread = threading.Thread(target=self.write_in_place)
        thread.start()
        thread.join()

    def write_in_a_hook(self):
        self.net.register_forward_pre_hook(lambda block, args: self.add_in_place())
        found = self.net(self.inputs).asnumpy()
        weight, bias = [a.asnumpy() for a in self.arrays()]
        expected = self.inputs.asnumpy().dot(weight.T) + bias
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
        self.net._forward_pre_hooks.clear()

    def cast(self):
        self.net.cast("float64")
        self.inputs = self.inputs.astype("float64")

    def replace_by_another_shape(self):
        self.net.weight._data = None
        self.net.weight._shape = (2, 5)
        self.net.weight.initialize(force_reinit=True)
        self.inputs = array(self.mx, 8, 5)

    def swap_arrays(self):
        self.net.weight._data = [self.net.weight.data() * 2]

    def move_away_and_back(self):
        for gpus in (1, 2, 3):
            compat.parallelize(self.net, gpus=gpus)
            self.check()
            self.add_in_place()

    def reverse_contexts(self):
        self.net.collect_params().reset_ctx(self.mx.cpu(2))
        self.inputs = self.inputs.as_in_context(self.mx.cpu(2))
        self.check()
        self.add_in_place()

    def fail_in_a_call(self):
        with pytest.raises(Exception):  # noqa: B017
            self.net(array(self.mx, 8, 7)).asnumpy()
        self.write_in_place()

    def predict_few_rows(self):
        whole, self.inputs = self.inputs, self.inputs[:1]
        self.add_in_place()
        self.check()
        self.inputs = whole

    def copy_the_block(self):
        other = copy.deepcopy(self.net)
        self.add_in_place()
        self.check()
        self.net = other
        self.check()
        self.add_in_place()


CHANGES = [name for name in vars(Predicting) if name not in ("check", "arrays")]


@pytest.mark.parametrize("change", in_span([n for n in CHANGES if n[0] != "_"], ["set_data"]))
def test_a_block_predicts_by_its_weights_as_they_are(mx, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Predicting(mx)
    for _ in range(3):
        model.check()
    getattr(model, change)()
    for _ in range(2):
        model.check()


def test_writes_that_change_no_value_send_nothing(mx):
    model = Predicting(mx)
    weight, _ = model.arrays()

    def copies():
        return sum(bytes_mxnet.counted(lambda: model.net(model.inputs), True).copies.values())

    for _ in range(3):  # the first ones are tried and watched
        model.check()
    alone, changed = copies(), []
    for value in (np.nan, np.nan, -0.0, 0.0, 0.0):
        weight[0, 0] = value
        changed.append(copies() > alone)
    assert changed == [True, False, True, True, False]


def test_what_is_kept_is_freed_with_the_block(mx):
    model = Predicting(mx)
    model.check()
    copies = model.net._compat_replicas.copies
    held = [weakref.ref(copies), weakref.ref(copies._sent[model.net.weight])]
    assert len(copies._buffers[model.net.weight]) == 2
    del copies
    compat.parallelize(model.net, gpus=1)
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_what_was_sent_is_not_kept_while_a_block_is_trained(mx):
    model = Predicting(mx)
    model.check()
    copies = model.net._compat_replicas.copies
    assert len(copies._sent) == 2
    model.train()
    assert len(copies._sent) == 0


# Keras --------------------------------------------------------------------------------------------


class Trained:
    """A Keras model, and ways to change its weights."""

    def __init__(self, keras, parallel):
        self.keras, layers = keras, keras.layers
        self.shared = layers.Dense(3, input_shape=(4,))
        self.model = keras.models.Sequential([self.shared, layers.Dense(1)])
        self.other = keras.models.Sequential([self.shared])
        for seed, model in enumerate((self.other, self.model)):
            random = np.random.RandomState(seed)
            model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
            model.compile("sgd", "mse")
            if parallel:
                compat.parallelize(model)
        self.inputs, self.targets = np.random.RandomState(3).normal(size=(8, 4)), np.ones((8, 1))

    def set_weights(self):
        self.model.set_weights([w + 1 for w in self.model.get_weights()])

    def set_weights_of_a_layer(self):
        self.shared.set_weights([w + 1 for w in self.shared.get_weights()])

    def set_value(self):
        self.keras.backend.set_value(self.shared.kernel, np.ones((4, 3)))

    def load_weights(self):
        self.model.save_weights("weights.h5")
        self.set_weights()
        self.model.load_weights("weights.h5")

    def train(self):
        self.model.train_on_batch(self.inputs, self.targets)

    def train_another_model(self):
        self.other.train_on_batch(self.inputs, np.ones((8, 3)))

    def set_weights_in_a_callback(self):
        class Doubling(self.keras.callbacks.Callback):
            def on_batch_end(self, batch, logs=None):
                self.model.set_weights([2 * w for w in self.model.get_weights()])

        self.model.fit(
            self.inputs, self.targets, batch_size=4, shuffle=False, verbose=0,
            callbacks=[Doubling()],
        )  # fmt: skip

    def freeze(self):
        self.shared.trainable = False
        self.model.compile("sgd", "mse")
        self.train()
        self.set_weights_of_a_layer()

    def set_weights_in_a_thread(self):
        thread = threading.Thread(target=self.set_weights)
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    "change", in_span([name for name in vars(Trained) if name[0] != "_"], ["set_weights"])
)
def test_a_keras_model_predicts_as_on_one_device(mx, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for parallel in (False, True):
        trained = Trained(keras_under_test(), parallel)
        before = trained.model.predict(trained.inputs)
        getattr(trained, change)()
        after = [model.predict(trained.inputs) for model in (trained.model, trained.other)]
        scores = trained.model.evaluate(trained.inputs, trained.targets, verbose=0)
        found.append(np.concatenate([before.ravel()] + [a.ravel() for a in after] + [[scores]]))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
@pytest.mark.parametrize("place", ["in memory", "by operations"])
def test_arrays_that_differ(mx, dtype, place, monkeypatch):
    if place == "by operations":  # as on a GPU
        monkeypatch.setattr(comparison, "_is_in_memory", lambda context: False)
    base = mx.nd.arange(12).reshape((3, 4)).astype(dtype)
    changed, other = base.copy(), base.copy()
    changed[2, 3] += 1
    pairs = [(base, other), (base, changed), (base, base.astype("int32"))]
    pairs += [(base, base.reshape((4, 3))), (base, base.as_in_context(mx.cpu(1)))]
    assert comparison.differing(pairs) == {1, 2, 3, 4}
    assert comparison.differing([]) == set()


def test_sums_and_means_along_the_chain(mx):
    arrays = [mx.nd.full((2,), 10.0**i, ctx=mx.cpu(i)) for i in range(4)]
    total = weight_copies.reduced(arrays)
    assert total.context == mx.cpu(0) and total.asnumpy().tolist() == [1111] * 2
    weight_copies.unite([arrays], [0, 1, 0, 3])
    assert [a.asnumpy().tolist() for a in arrays] == [[(10 + 3 * 1000) / 4] * 2] * 4
    same = [mx.nd.full((1,), 0.1, ctx=mx.cpu(i)) for i in range(4)]
    weight_copies.unite([same], [3, 5, 7, 11])
    assert {a.asscalar() for a in same} == {np.float32(0.1)}


@pytest.mark.parametrize("uses", in_span([1, 10], [10]))
@pytest.mark.parametrize("grad_req", in_span(["write", "add"], ["add"]))
def test_gradients_of_a_weight_that_is_used_often(mx, uses, grad_req):
    """MXNet adds up more than eight gradients in another way."""
    check_refusal(mx)

    def run(parallel):
        layer = mx.gluon.nn.Dense(4, activation="tanh", in_units=4)
        net = mx.gluon.nn.HybridSequential()
        for _ in range(uses):
            net.add(layer)
        net.initialize()
        layer.weight.set_data(array(mx, 4, 4) * 0.3)
        layer.weight.grad_req = grad_req
        if parallel:
            compat.parallelize(net)
        for rows in (8, 13):
            with mx.autograd.record():
                loss = (net(array(mx, rows, 4)) ** 2).sum()
            loss.backward()
        return [layer.weight.grad().asnumpy()]

    check_same(run)
