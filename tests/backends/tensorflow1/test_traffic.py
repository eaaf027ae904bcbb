"""TensorFlow 1: bytes that devices send to each other, counted from what sessions executed."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import compat
from compat._backends._tensorflow.graph import v1_names
from compat.testing import contract_of, in_span, initialise, largest_difference, span

from ..conftest import ROOT
from .row_models import three_devices  # noqa: F401  # the fixture

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
counted = importlib.import_module("bytes_tensorflow1")
MARK, STEPS = counted.traffic.MARK, counted.traffic.STEPS
del sys.path[0]
v1 = v1_names(tf)


@pytest.mark.parametrize("devices", in_span(["4", "2 8"], ["4"]))
def test_no_device_sends_more_than_the_weights_and_their_gradients(devices):
    """More devices than other tests have need a process of their own."""
    command = [sys.executable, "benchmarks/bytes_tensorflow1.py", "--devices", *devices.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    for devices, steps in json.loads(line[len(MARK) :])["TensorFlow 1"].items():
        later = 0.05 if hasattr(gen_resource_variable_ops, "mutex_lock") else 1.1
        for kind, most in zip(STEPS, (2.1, 1.1, later, 1.1, later)):
            for link in ("sent", "received"):
                assert steps[kind][link] <= most * steps["weights"], (devices, kind)


def recurrent(keras):
    layers = keras.layers
    inputs = layers.Input(shape=(3, 4))
    hidden = layers.Dense(128)(layers.SimpleRNN(128)(inputs))
    return keras.models.Model(inputs, layers.Dense(2)(hidden)), np.ones((6, 3, 4), "float32")


def table(keras):
    """Return a model whose gradients are slices of a table that replicas read as a whole."""

    class Table(keras.layers.Layer):
        def build(self, input_shape):
            options = {"name": "table", "shape": (2000, 8), "trainable": True}
            self.table = self.add_weight(initializer="uniform", **options)
            super().build(input_shape)

        def call(self, rows):
            return tf.gather(tf.identity(self.table), tf.cast(rows, tf.int32))

        def compute_output_shape(self, input_shape):
            return (input_shape[0], input_shape[1], 8)

    layers = keras.layers
    inputs = layers.Input(shape=(3,))
    hidden = layers.Flatten()(Table()(inputs))
    model = keras.models.Model(inputs, layers.Dense(2)(hidden))
    return model, np.arange(18).reshape(6, 3).astype("float32")


@pytest.mark.parametrize(
    "build, most", in_span([(recurrent, 2.15), (table, 1.05)], [(table, 1.05)])
)
def test_gradients_take_the_way_of_the_weights(keras, build, most):
    """Those of weights that a loop takes in, and slices of a table, which stay slices."""
    models = [initialise(build(keras)[0]) for _ in range(2)]
    compat.parallelize(models[1])
    inputs = build(keras)[1]
    for model in models:
        model.compile("sgd", "mse")
        model.train_on_batch(inputs, inputs[:, :2].reshape(6, -1)[:, :2])
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-5
    step = counted.measured(lambda: models[1].train_on_batch(inputs, np.ones((6, 2))))
    weights = 4 * models[1].count_params()
    assert max(step["sent"], step["received"]) <= most * weights


INPUTS = np.random.RandomState(0).normal(size=(7, 128)).astype("float32")
KEEPS = pytest.mark.skipif(
    not hasattr(gen_resource_variable_ops, "mutex_lock"), reason="TensorFlow has no mutex"
)


def two_layers(keras, between=None):
    """Return a model on three devices that has predicted, so that they keep its weights."""
    layers = keras.layers
    inputs = layers.Input(shape=(128,))
    hidden = layers.Dense(128)(inputs)
    outputs = layers.Dense(128)(hidden if between is None else between(hidden))
    model = compat.parallelize(initialise(keras.models.Model(inputs, outputs)))
    model.compile("sgd", "mse")
    assert_current(model)
    assert_current(model)
    return model


def assert_current(model):
    first, bias, second, other = model.get_weights()
    expected = (INPUTS.dot(first) + bias).dot(second) + other
    np.testing.assert_allclose(model.predict_on_batch(INPUTS), expected, rtol=1e-3, atol=1e-4)
    (loss,) = np.ravel(model.test_on_batch(INPUTS, INPUTS))
    np.testing.assert_allclose(loss, np.mean((expected - INPUTS) ** 2), rtol=1e-3)


def set_weights(keras, model):
    model.set_weights([weight + 1 for weight in model.get_weights()])


def load_weights(keras, model):
    path = os.path.join(tempfile.mkdtemp(), "weights.h5")
    model.save_weights(path)
    set_weights(keras, model)
    assert_current(model)
    model.load_weights(path)


def set_value(keras, model):
    keras.backend.set_value(model.layers[-1].kernel, 2 * np.eye(128))


def assign(keras, model):
    kernel = model.layers[-1].kernel
    keras.backend.get_session().run(v1.assign_add(kernel, 0.5 + tf.zeros([128, 128])))


def assign_rows(keras, model):
    kernel = model.layers[-1].kernel
    rows = gen_resource_variable_ops.resource_scatter_add(kernel.handle, [3], tf.ones([1, 128]))
    keras.backend.get_session().run(rows)


def initialize(keras, model):
    session = keras.backend.get_session()
    session.run([weight.initializer for weight in model.weights])


def restore(keras, model):
    session, path = keras.backend.get_session(), os.path.join(tempfile.mkdtemp(), "saved")
    saver = v1.train.Saver(model.weights)
    saver.save(session, path)
    set_weights(keras, model)
    assert_current(model)
    saver.restore(session, path)


def train(keras, model):
    model.train_on_batch(INPUTS, INPUTS + 1)


def train_one_layer(keras, model):
    model.layers[1].trainable = False
    model.compile("sgd", "mse")
    model.train_on_batch(INPUTS, INPUTS + 1)
    assert_current(model)
    model.layers[1].trainable = True
    model.compile("sgd", "mse")
    model.train_on_batch(INPUTS, INPUTS)


def train_another_model(keras, model):
    other = keras.models.Model(model.inputs[0], model.layers[1].output)
    other.compile("sgd", "mse")
    other.train_on_batch(INPUTS, INPUTS)


def train_without_keras(keras, model):
    loss = v1.reduce_mean(model.outputs[0] ** 2)
    step = v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[*model.weights])
    keras.backend.get_session().run(step, {model.inputs[0]: INPUTS})


def set_in_callback(keras, model):
    """Each epoch's evaluation uses the weights of the callback."""
    weights = [[0.01 * epoch * w for w in model.get_weights()] for epoch in (1, 2)]
    keras.backend.set_value(model.optimizer.lr, 0.0)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: model.set_weights(weights[epoch])
    )
    more = {"validation_data": (INPUTS, INPUTS), "callbacks": [callback], "verbose": 0}
    history = model.fit(INPUTS, INPUTS, batch_size=7, epochs=2, **more).history
    np.testing.assert_allclose(history["val_loss"], history["loss"], rtol=1e-4)
    assert history["loss"][0] != history["loss"][1]


def change_session(keras, model):
    """Another session of the graph has weights of its own, and so have its devices."""
    with v1.Session() as other:
        other.run(v1.global_variables_initializer())
        assert_current(model)
        model.set_weights([weight + 2 for weight in model.get_weights()])
        assert_current(model)
    assert_current(model)


def finalize(keras, model):
    model.outputs[0].graph.finalize()
    set_weights(keras, model)


CHANGES = [
    set_weights, load_weights, set_value, assign, assign_rows, initialize, restore, train,
    train_one_layer, train_another_model, train_without_keras, set_in_callback, change_session,
    finalize,
]  # fmt: skip
IN_SPAN = [set_weights, assign_rows, train, change_session]


@span
def test_changed_weights_are_sent(keras, pytestconfig):
    model = two_layers(keras)
    for change in IN_SPAN if contract_of(pytestconfig) == "span" else CHANGES:
        if change is finalize:
            set_weights(keras, model)  # makes the operations for that
        before = model.get_weights()
        change(keras, model)
        assert_current(model)
        if change not in (load_weights, restore, change_session):
            assert largest_difference(before, model.get_weights()) > 1e-4, change.__name__


@KEEPS
@pytest.mark.parametrize("units", in_span([128, 129], [128]))
def test_weights_are_compared_bit_by_bit(keras, units):
    """Zeros of another sign are sent, and NaNs are not sent again."""
    inputs = keras.layers.Input(shape=(units,))
    layer = keras.layers.Dense(units)
    model = compat.parallelize(keras.models.Model(inputs, layer(inputs)))

    def sent(value):
        keras.backend.set_value(layer.kernel, np.full([units, units], value, "float32"))
        rows = np.ones((3, units), "float32")
        steps = [counted.measured(lambda: model.predict_on_batch(rows)) for _ in range(2)]
        return [step["sent"] // (4 * units * units) for step in steps]

    sent(2.0)  # makes the function, and tries it
    assert [sent(value) for value in (0.0, -0.0, np.nan, 1.0)] == [[1, 0]] * 4


@span
@KEEPS
def test_threads_find_current_weights(keras):
    """Whatever several threads send while another one changes the weights."""
    model = two_layers(keras)
    graph, session = model.outputs[0].graph, keras.backend.get_session()
    kernel = model.layers[-1].kernel
    value = v1.placeholder("float32", [128, 128])
    change = kernel.assign(value)
    values = [np.full([128, 128], number, "float32") for number in (0.1, 0.2)]

    def predict():
        with graph.as_default(), session.as_default():
            for _ in range(5):
                model.predict_on_batch(INPUTS)

    for _ in range(5):
        threads = [threading.Thread(target=predict) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for each in values:
                session.run(change, {value: each})
        for thread in threads:
            thread.join()
        assert_current(model)
        session.run(change, {value: values[0]})
        assert_current(model)


@span
@KEEPS
def test_step_that_fails_leaves_no_stale_copies(keras):
    layer = keras.layers.Lambda(lambda x: v1.check_numerics(x, "numbers"), output_shape=(128,))
    model = two_layers(keras, layer)
    before = model.get_weights()
    for restored in (False, True):
        set_weights(keras, model)
        with pytest.raises(tf.errors.InvalidArgumentError):
            model.predict_on_batch(np.full([7, 128], np.nan, "float32"))
        if restored:
            model.set_weights(before)
        assert_current(model)
    weights = 4 * model.count_params()
    later = counted.measured(lambda: model.predict_on_batch(INPUTS))
    assert later["sent"] < 0.1 * weights


@span
@KEEPS
def test_kept_copies_are_seen_by_nobody_and_freed(keras):
    def kept():
        return [op for op in graph.get_operations() if "kept_weights_" in str(op.node_def)]

    model = two_layers(keras)
    graph, session = model.outputs[0].graph, keras.backend.get_session()
    handles = [op.outputs[0] for op in kept() if op.type == "VarHandleOp"]
    assert len(handles) == 2 * 3
    names = {op.name for op in kept()}
    for key in graph.get_all_collection_keys():
        assert not names.intersection(getattr(v, "name", "") for v in graph.get_collection(key))
    exist = [gen_resource_variable_ops.var_is_initialized_op(handle) for handle in handles]
    assert all(session.run(exist))
    model.compile("sgd", "mse")  # makes all functions anew, with the same variables
    assert_current(model)
    assert len([op for op in kept() if op.type == "VarHandleOp"]) == 2 * 3
    compat.parallelize(model, gpus=1)
    assert not any(session.run(exist))
    compat.parallelize(model)
    assert_current(model)
