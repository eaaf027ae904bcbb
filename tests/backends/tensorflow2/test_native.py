"""TensorFlow 2: models without Keras."""

import copy
import gc
import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat._rows import splitting
from compat.testing import (
    DEVICES,
    in_span,
    keras_under_test,
    slow,
    span,
)

from ..messages import told
from .test_contract import (
    ROWS,
    TARGETS,
    TRAIN_STEP,
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


class Net(tf.Module):
    def __init__(self):
        super().__init__()
        random = np.random.RandomState(3)
        self.first = tf.Variable(random.normal(size=(8, 6)).astype("float32"))
        self.last = tf.Variable(random.normal(size=(6, 4)).astype("float32"))
        self.calls = tf.Variable(0, trainable=False)
        self.mean = tf.Variable(tf.zeros(6), trainable=False)

    def compute(self, rows):
        hidden = tf.tanh(rows @ self.first)
        self.calls.assign_add(1)
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(hidden, axis=0))
        if tf.reduce_sum(self.last) > 1e9:  # for autograph
            hidden = hidden * 2.0
        return hidden @ self.last


class Plain(Net):
    def __call__(self, rows):
        return self.compute(rows)


class Decorated(Net):
    @tf.function
    def __call__(self, rows):
        return self.compute(rows)


class Holder:
    """No tf.Module: an object that can be called and holds variables."""

    def __init__(self):
        net = Plain()
        self.first, self.last, self.calls, self.mean = net.first, net.last, net.calls, net.mean

    def __call__(self, rows):
        return Net.compute(self, rows)


def function():
    net = Plain()
    made = tf.function(net.compute)
    made.net = net
    return made


def parts_of(model):
    net = getattr(model, "net", model)
    return [net.first, net.last], [net.first, net.last, net.calls, net.mean]


def step_of(model, rate=0.1):
    weights, _ = parts_of(model)

    def step(rows, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows) - targets) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(rate * gradient)
        return loss

    return step


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize(
    "build, eagerly",
    in_span(
        [(Plain, False), (Decorated, True), (Holder, True), (function, False)],
        [(function, False)],
    ),
)
def test_native_model_trains_to_the_numbers_of_one_device(keras, build, eagerly):
    results = []
    for parallel in (False, True):
        model = build()
        if parallel:
            assert compat.parallelize(model) is model
        step = step_of(model) if eagerly else tf.function(step_of(model))
        losses = [float(step(tf.constant(ROWS[:n]), tf.constant(TARGETS[:n]))) for n in (44, 2)]
        results.append(losses + [variable.numpy() for variable in parts_of(model)[1]])
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    assert results[1][4] == 2


def test_a_model_whose_variable_was_replaced_is_called_again(keras):
    """Up to TensorFlow 2.3 the old one cannot be read any more."""

    class Counting(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = tf.Variable(tf.ones([8, 4])), tf.Variable(0)

        def __call__(self, rows):
            self.calls.assign_add(1)
            return rows @ self.weight

    model = compat.parallelize(Counting())
    expected = model(tf.constant(ROWS))
    model.calls = tf.Variable(0)
    gc.collect()
    np.testing.assert_allclose(expected, model(tf.constant(ROWS)), rtol=1e-5, atol=1e-6)


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize("build", in_span([Plain, function], [function]))
def test_native_model_runs_on_every_device(keras, build):
    model = compat.parallelize(build())
    rows, targets = tf.constant(ROWS), tf.constant(TARGETS)
    step = tf.function(step_of(model))
    found = products(nodes_executed(lambda: step(rows, targets)))
    assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"}
    assert len(set(found.values())) == 1 and all(found["/cpu:1"]), found


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize("build, eagerly", [(Plain, True), (Plain, False), (function, True)])
def test_report_says_what_each_device_did(keras, build, eagerly):
    """Eagerly, and in a graph, which counts by itself whenever it runs."""
    model = compat.parallelize(build())
    step = step_of(model) if eagerly else tf.function(step_of(model))
    rows, targets = tf.constant(ROWS), tf.constant(TARGETS)
    step(rows, targets)  # traced, and perhaps verified
    before = [(each.rows, each.training_rows) for each in compat.report().devices]
    for _ in range(3):
        step(rows, targets)
    model(rows[:2])
    found = [(each.rows, each.training_rows) for each in compat.report().devices]
    done = [(a - c, b - d) for (a, b), (c, d) in zip(found, before)]
    sizes = splitting.sizes(len(ROWS), 3)
    assert done[:3] == [(3 * a + b, 3 * a) for a, b in zip(sizes, splitting.sizes(2, 3))]
    assert not any(map(any, done[3:]))  # devices of tests before this one


@pytest.mark.skipif(
    "jit_compile" not in inspect.signature(tf.function).parameters, reason="before TensorFlow 2.5"
)
def test_in_a_function_for_xla_nothing_is_counted(keras):
    """XLA could not compile what counts; all of it runs on one device."""
    model = compat.parallelize(Plain())
    before = compat.report().as_dict()["devices"]
    compiled = tf.function(lambda rows: model(rows), jit_compile=True)
    with told():
        assert compiled(tf.constant(ROWS)).shape == (len(ROWS), 4)
    assert compat.report().as_dict()["devices"] == before


@slow
def test_what_counts_is_saved_and_runs_elsewhere(keras, tmp_path):
    """It captures nothing, and makes in each process what it needs."""
    held = tf.Module()
    held.model = compat.parallelize(
        keras.models.Sequential([keras.layers.Dense(4, input_shape=(8,))])
    )
    spec = tf.TensorSpec([None, 8])
    held.serve = tf.function(lambda rows: held.model(rows), input_signature=[spec])
    expected = held.serve(ROWS[:5]).numpy()
    tf.saved_model.save(held, str(tmp_path / "saved"))
    program = (
        "import sys, numpy as np, tensorflow as tf\n"
        "rows = np.load(sys.argv[1] + '/rows.npy')\n"
        "saved = tf.saved_model.load(sys.argv[1] + '/saved')\n"
        "found = saved.serve(tf.constant(rows))\n"
        "np.save(sys.argv[1] + '/found.npy', found.numpy())\n"
    )
    np.save(str(tmp_path / "rows.npy"), ROWS[:5])
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    np.testing.assert_allclose(np.load(str(tmp_path / "found.npy")), expected, atol=1e-6)


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize("build", [Plain, Decorated])
def test_numpy_arrays_are_not_split_which_is_said(keras, build):
    model = compat.parallelize(build())
    model(tf.constant(ROWS))  # its first call, traced and perhaps verified
    with told() as said:
        found = products(nodes_executed(tf.function(lambda: model(ROWS))))
        model(ROWS)
    assert said == [
        "A call of the parallelized {} was given numpy arrays, which are not split, so it ran on "
        "one device: give it tensors, tf.constant(array).".format(build.__name__)
    ]
    assert list(found) == ["/cpu:0"]


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize("build", [Plain, Decorated])
def test_native_model_keeps_its_face(keras, build, tmp_path):
    model = build()
    plain = type(model)
    rows = tf.constant(ROWS)
    expected = model(rows).numpy()
    compat.parallelize(model)
    assert isinstance(model, plain) and type(model).__name__ == plain.__name__
    np.testing.assert_allclose(expected, model(rows).numpy(), atol=1e-5)
    other = build()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    model.first.assign_add(tf.ones((8, 6)))
    tf.train.Checkpoint(model=other).restore(path).assert_consumed()
    np.testing.assert_allclose(expected, other(rows).numpy(), atol=1e-5)
    model.first.assign(other.first)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(loaded.first.numpy(), model.first.numpy())
    if build is Decorated:
        np.testing.assert_allclose(expected, loaded(rows).numpy(), atol=1e-5)
    assert type(copy.deepcopy(model)) is plain
    compat.parallelize(model, gpus=1)
    assert type(model) is plain


@pytest.mark.row("tf.Module and tf.function")
def test_layers_and_variables_are_no_models(keras):
    for other in (keras.layers.Dense(3), tf.Variable(1.0), tf.constant(1.0)):
        with pytest.raises(compat.CompatError):
            compat.parallelize(other)


@span
def test_models_without_keras_are_verified_or_it_is_said(keras, monkeypatch):
    """Which TensorFlow 2.0 cannot do."""
    monkeypatch.setattr(compat._runtime.process.process.configuration.settings, "verify", 1)
    with told() as texts:
        compat.parallelize(Plain())
    assert any("cannot compare" in text for text in texts) == (not TRAIN_STEP)
