"""Keras 3 on JAX: what a call does besides returning its outputs is what it does on one device."""

import threading

import jax
import numpy as np
import pytest

import compat
from compat._configuration import registry
from compat.testing import DEVICES, initialise, keras_under_test, span

from ..verification_cases import verified

ROWS = np.random.RandomState(0).normal(size=(11, 8)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


@pytest.fixture
def observers(keras):
    """Layers that keep what they compute, count, draw random numbers, and move weights."""

    class Observer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.build((None, 8))

        def build(self, shape):
            if not self.dense.built:
                self.dense.build(shape)
                self.slow = self.add_weight(shape=(8, 4), initializer="ones", trainable=False)
                self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.begin()

        def begin(self):
            self.last, self.seen, self.counts, self.drawn = None, [], {"calls": 0, "rows": 0}, []

        def call(self, rows):
            outputs = self.dense(rows)
            self.last = outputs
            self.seen.append(outputs)
            self.counts["calls"] += 1
            self.counts["rows"] += rows.shape[0]
            self.drawn.append(np.random.rand())
            self.slow.assign(self.slow * 0.5 + self.dense.kernel * 0.5)
            self.steps.assign(self.steps + 1.0)
            return outputs + rows @ self.slow

    def build(parallel):
        layer = Observer()
        model = initialise(keras.Sequential([keras.layers.Input((8,)), layer]))
        if parallel:
            compat.parallelize(model)
        layer.begin()
        np.random.seed(0)
        return model, layer

    return build


def kept(layer):
    """Return the values that an observer has: arrays, or where it was traced, their shapes."""

    def plain(value):
        return value.shape if isinstance(value, jax.core.Tracer) else np.array(value)

    return [plain(layer.last), *map(plain, layer.seen), layer.drawn, np.random.rand()]


@span
@pytest.mark.filterwarnings("ignore:Model .* runs eagerly")
@pytest.mark.parametrize("how", ["fit", "verified", "eagerly", "called"])
def test_attributes_lists_counters_random_numbers_and_moved_weights(keras, observers, how):
    """A program is traced once, for all devices: as often as for one."""
    results = []
    for parallel in (False, True):
        model, layer = observers(parallel)
        if how == "called":
            outputs = [model(ROWS), model(ROWS[:6]), layer.last]
        else:
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=how == "eagerly")
            if parallel and how == "verified":
                record = verified(registry.load("jax"), model, steps=2)
            history = model.fit(ROWS, TARGETS, 4, epochs=2, verbose=0, shuffle=False)
            outputs = [history.history["loss"]]
            assert not (parallel and how == "verified") or record.steps["train"] == 2
        results.append((layer.counts, outputs + model.get_weights() + kept(layer)))
    (counts, expected), (others, found) = results
    assert counts == others and counts["calls"] > 1 and len(expected) == len(found)
    for one, several in zip(expected, found):
        np.testing.assert_allclose(one, several, atol=1e-6)


@span
def test_a_momentum_encoder(keras):
    """Its weights are moved within the step, from the batch's values."""

    class Momentum(keras.Model):
        def __init__(self):
            super().__init__(name="momentum")
            self.online, self.slow = keras.layers.Dense(4), keras.layers.Dense(4, trainable=False)
            for part in (self.online, self.slow):
                part.build((None, 8))
            self.center = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
            self.built = True

        def call(self, rows, training=False):
            outputs, targets = self.online(rows), self.slow(rows)
            if training:
                self.center.assign(self.center * 0.9 + keras.ops.mean(targets, axis=0) * 0.1)
                for slow, fast in zip(self.slow.variables, self.online.variables):
                    slow.assign(slow * 0.5 + fast * 0.5)
            return outputs - (targets - self.center)

    trained = []
    for parallel in (False, True):
        model = initialise(Momentum())
        if parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(ROWS, TARGETS, 4, epochs=2, verbose=0, shuffle=False)
        trained.append(model.get_weights())
    assert np.abs(trained[0][-1]).max() > 0
    for one, several in zip(*trained):
        np.testing.assert_allclose(one, several, atol=1e-6)


def at_once(function):
    """Return the results of a function that eight threads call at the same moment."""
    results, ready = [None] * 8, threading.Barrier(8)

    def run(number):
        ready.wait()
        results[number] = function(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_first_calls_of_eight_threads_at_once(keras):
    """Of one model, and first steps of a model of each thread's own."""
    layers = [keras.layers.Input((8,)), keras.layers.Dense(4)]
    model = initialise(keras.Sequential(layers))
    expected = np.array(model(ROWS[:6]))
    compat.parallelize(model)
    for outputs in at_once(lambda number: np.array(model(ROWS[:6]))):
        np.testing.assert_allclose(expected, outputs, atol=1e-6)

    def train(one):
        one.compile(keras.optimizers.SGD(0.1), "mse")
        one.train_on_batch(ROWS, TARGETS)
        return one.get_weights()

    models = [keras.models.clone_model(model) for _ in range(9)]
    for each in models:
        each.set_weights(model.get_weights())
    expected = train(models.pop())

    def first_step(number):
        return train(compat.parallelize(models[number]))

    for weights in at_once(first_step):
        np.testing.assert_allclose(expected[0], weights[0], atol=1e-6)


DONATED = """
    import sys
    import compat
    compat.configure_gpu(simulate=3, verify=0)
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64)])
    compat.parallelize(model)
    rows = np.ones((12, 64), "float32")
    model.predict(rows, verbose=0)
    value = model.weights[0].value
    kept = np.array(value, copy=True) if sys.argv[1] == "copied" else np.asarray(value)
    model.predict(rows, verbose=0)
    if sys.argv[1] == "copied":
        print(value.is_deleted())
        model.weights[0].assign(kept)
        print(np.array_equal(np.asarray(model.weights[0]), kept))
    else:
        print(value.is_deleted(), flush=True)
        print(value + 1)
"""


def test_a_copy_of_a_donated_array_can_be_used(run):
    """JAX notes then that the array is gone, and what was copied can be given back."""
    assert run(DONATED, "copied").split() == ["True", "True"]


def test_an_array_that_numpy_shares_is_donated_without_a_note(run):
    """JAX's own fault, where the array is on several devices: the process ends."""
    with pytest.raises(AssertionError, match="Buffer has been deleted or donated"):
        run(DONATED, "shared")
