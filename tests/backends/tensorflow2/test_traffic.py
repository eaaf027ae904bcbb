"""TensorFlow 2: what devices send to each other, and copies of weights that are kept."""

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
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import kept_weights, replicas
from compat._backends.tensorflow2.weight_copies import send
from compat.testing import (
    DEVICES,
    contract_of,
    in_span,
    initialise,
    keras_under_test,
    largest_difference,
    slow,
    span,
)

from ..conftest import ROOT
from ..messages import told
from .test_contract import ROWS, TARGETS

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
counted = importlib.import_module("bytes_tensorflow2")
MARK, STEPS = counted.traffic.MARK, counted.traffic.STEPS
del sys.path[0]


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


@pytest.fixture
def counting(keras):
    """Skip where the profiler does not record the shapes of tensors."""
    if not counted.records_shapes():
        pytest.skip("the profiler of this version of TensorFlow records no shapes")


def build(keras):
    layers = keras.layers
    parts = [layers.Dense(6, activation="tanh"), layers.Dense(4)]
    return initialise(keras.models.Sequential([layers.Input((8,))] + parts))


@pytest.mark.parametrize("devices", in_span(["4", "2 8"], ["4"]))
def test_no_device_sends_more_than_the_weights_and_their_gradients(counting, devices):
    """More devices than other tests have need a process of their own."""
    command = [sys.executable, "benchmarks/bytes_tensorflow2.py", "--devices", *devices.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    for devices, steps in json.loads(line[len(MARK) :])["TensorFlow 2"].items():
        later = 0.05 if kept_weights.are_kept() else 1.1
        for kind, most in zip(STEPS, (2.1, 1.1, later, 1.1, later)):
            least = 0.9 if most > 1 else 0
            for link in ("sent", "received"):
                times = steps[kind][link] / steps["weights"]
                assert least < times <= most, (devices, kind, link)


def recurrent(keras):
    """Return a model whose loop reads weights in each of its steps."""
    layers = keras.layers
    inputs = layers.Input((5, 4))
    hidden = layers.RNN(layers.SimpleRNNCell(64))(inputs)
    return keras.models.Model(inputs, layers.Dense(2)(hidden)), np.ones((6, 5, 4), "float32")


def tied(keras):
    """Return a model that looks rows of a table up, and multiplies by all of it."""

    class Tied(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(name="table", shape=(300, 16), initializer="uniform")

        def call(self, rows):
            found = tf.gather(self.table, tf.cast(rows, tf.int32))
            return tf.matmul(tf.reduce_sum(found, 1), self.table, transpose_b=True)

    inputs = keras.layers.Input((3,))
    outputs = keras.layers.Dense(2)(Tied()(inputs))
    rows = np.arange(18).reshape(6, 3).astype("float32")
    return keras.models.Model(inputs, outputs), rows


@pytest.mark.parametrize("build", in_span([recurrent, tied], [tied]))
def test_gradients_take_the_way_of_the_weights(keras, counting, build):
    models = [initialise(build(keras)[0]) for _ in range(2)]
    compat.parallelize(models[1])
    inputs, targets = build(keras)[1], np.ones((6, 2), "float32")
    step = counted.Step(lambda: models[1].train_on_batch(inputs, targets))
    for model in models:
        model.compile("sgd", "mse")
    models[0].train_on_batch(inputs, targets)
    found = step.measured()
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-5
    weights = 4 * models[1].count_params()
    assert 0.9 * weights < max(found["sent"], found["received"]) <= 2.3 * weights


# Ways to change a weight: functions of the parallelized model, and of another one that shares its
# layers.


def set_weights(model, other):
    model.set_weights([weight + 1 for weight in model.get_weights()])


def load_weights(model, other):
    path = os.path.join(os.environ["HOME"], "kept.weights.h5")
    values = model.get_weights()
    model.set_weights([weight + 1 for weight in values])
    model.save_weights(path)
    model.set_weights(values)
    model.predict_on_batch(ROWS)
    model.load_weights(path)


def assign(model, other):
    kernel_of(model).assign(kernel_of(model) + 1.0)


def assign_a_row(model, other):
    kernel_of(model)[1].assign(tf.ones(6))


def scatter(model, other):
    indices, ones = tf.constant([1]), tf.ones((1, 6))
    kernel_of(model).scatter_update(tf.IndexedSlices(ones, indices))


def negative_zero(model, other):
    kernel = kernel_of(model)
    kernel.assign(tf.zeros_like(kernel))
    model.predict_on_batch(ROWS)
    kernel.assign(-tf.zeros_like(kernel))


def not_a_number(model, other):
    kernel = kernel_of(model)
    kernel.assign(kernel * np.nan)
    model.predict_on_batch(ROWS)
    kernel.assign(tf.ones_like(kernel))


def in_a_function(model, other):
    tf.function(lambda: kernel_of(model).assign_sub(tf.ones_like(kernel_of(model))))()


def training(model, other):
    model.train_on_batch(ROWS, TARGETS)


def training_without_keras(model, other):
    optimize(model, ROWS)


def training_of_another_model(model, other):
    other.train_on_batch(ROWS, TARGETS)


def training_of_some(model, other):
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    model.train_on_batch(ROWS, TARGETS)
    model.predict_on_batch(ROWS)
    model.layers[0].trainable = True
    model.compile("sgd", "mse")
    model.train_on_batch(ROWS, TARGETS)


def another_thread(model, other):
    thread = threading.Thread(target=assign, args=(model, other))
    thread.start()
    thread.join()


def back_to_earlier_values(model, other):
    """Undo a change: the weights are those of two calls before."""
    values = model.get_weights()
    assign(model, other)
    model.predict_on_batch(ROWS)
    model.set_weights(values)


WAYS = [
    set_weights, load_weights, assign, assign_a_row, scatter, negative_zero, not_a_number,
    in_a_function, training, training_without_keras, training_of_another_model, training_of_some,
    another_thread, back_to_earlier_values,
]  # fmt: skip
#: Those of the span contract, by whether the model runs eagerly.
IN_SPAN = {False: [assign, training], True: [in_a_function, another_thread]}


def kernel_of(model):
    kernel = model.layers[0].kernel
    return getattr(kernel, "_value", kernel)  # Keras 3 has a variable of its own around it


def optimize(model, rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.constant(rows)) ** 2)
    variables = [getattr(v, "_value", v) for v in model.trainable_variables]
    for variable, gradient in zip(variables, tape.gradient(loss, variables)):
        variable.assign_sub(0.1 * gradient)


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_changed_weights_are_sent(keras, pytestconfig, eagerly):
    model = build(keras)
    other = keras.models.Sequential([keras.layers.Input((8,))] + model.layers)
    compat.parallelize(model)
    model.compile("sgd", "mse", run_eagerly=eagerly)
    other.compile("sgd", "mse")
    calls = [model.predict_on_batch, lambda rows: np.asarray(model(tf.constant(rows)))]
    calls.append(tf.function(lambda rows: model(rows)))
    first = model.get_weights()
    is_span = contract_of(pytestconfig) == "span"
    for way in IN_SPAN[eagerly] if is_span else WAYS:
        model.set_weights(first)
        before = [np.asarray(call(ROWS)) for call in calls]
        way(model, other)
        expected = np.asarray(other(tf.constant(ROWS)))
        for call in calls:
            np.testing.assert_allclose(call(ROWS), expected, atol=1e-5, err_msg=way.__name__)
        if way is not back_to_earlier_values:
            for each in before:
                assert np.abs(np.asarray(each) - expected).max() > 1e-4, way.__name__


def test_a_callback_changes_weights_in_the_middle(keras):
    """And evaluation has a function of its own, with the same copies."""
    expected, found = [], []
    for results, parallel in ((expected, False), (found, True)):
        model = build(keras)
        if parallel:
            compat.parallelize(model)
        model.compile("sgd", "mse")

        def change(batch, logs=None, model=model):
            kernel_of(model).assign_add(tf.ones((8, 6)) / 8)

        callback = keras.callbacks.LambdaCallback()
        callback.on_predict_batch_begin = callback.on_test_batch_begin = change
        results.append(model.predict(ROWS, batch_size=8, verbose=0, callbacks=[callback]))
        results.append(model.evaluate(ROWS, TARGETS, batch_size=8, verbose=0, callbacks=[callback]))
    assert largest_difference(found, expected) < 1e-5


@span
def test_weights_change_between_two_calls_of_one_function(keras):
    model = build(keras)
    plain = keras.models.Sequential([keras.layers.Input((8,))] + model.layers)
    compat.parallelize(model)
    # In TensorFlow 2.3 the caller of a function that only reads variables may assign to them first,
    # without compat as well. 2.4 has repaired it (auto_control_deps.py).
    is_ordered = not tf.__version__.startswith("2.3.")
    inner = tf.function(lambda rows: model(rows)) if is_ordered else model

    def step(call, nested):
        results, total = [], tf.zeros((len(ROWS), 4))
        for _ in range(2):
            results.append(call(tf.constant(ROWS)))
            kernel_of(model).assign_add(tf.ones((8, 6)))
            results.append(nested(tf.constant(ROWS)))
            kernel_of(model).assign_sub(tf.ones((8, 6)))
        for _ in tf.range(2):
            kernel_of(model).assign_add(tf.ones((8, 6)))
            total += call(tf.constant(ROWS))
        kernel_of(model).assign_sub(2 * tf.ones((8, 6)))
        return results + [total]

    expected = tf.function(lambda: step(plain, plain))()
    several = tf.function(lambda: step(model, inner))
    for _ in range(3):
        assert largest_difference(several(), expected) < 1e-5


@span
def test_a_weight_is_replaced(keras):
    model = build(keras)
    compat.parallelize(model)
    first, last = model.layers
    last.bias, last.use_bias = None, False
    for units in (4, 5):
        kernel = tf.Variable(np.random.RandomState(units).normal(size=(6, units)), dtype="float32")
        vars(last)["_kernel" if "_kernel" in vars(last) else "kernel"] = kernel
        for _ in range(2):
            expected = np.asarray(first(tf.constant(ROWS))) @ kernel.numpy()
            np.testing.assert_allclose(model(tf.constant(ROWS)), expected, atol=1e-5)
            kernel.assign_add(tf.ones((6, units)))


@span
def test_gradients_of_a_function_that_was_traced_without_a_tape(keras):
    """There it has copies that are kept, and no gradient passes through those by itself."""
    model = build(keras)
    plain = keras.models.Sequential([keras.layers.Input((8,))] + model.layers)
    compat.parallelize(model)
    found, variables = [], [getattr(v, "_value", v) for v in model.trainable_variables]
    unused = tf.Variable(1.0)
    for each in (plain, model):
        function = tf.function(lambda rows, each=each: each(rows))
        function(tf.constant(ROWS))
        with told(), tf.GradientTape() as tape:  # that no batch of training was split
            loss = tf.reduce_sum(function(tf.constant(ROWS)) ** 2)
            with tape.stop_recording():
                *gradients, of_unused = tape.gradient(loss, variables + [unused])
        assert of_unused is None
        found.append(gradients)
    assert largest_difference(*found) < 1e-4


@pytest.mark.parametrize("wrap", [lambda call: call, tf.function])
def test_gradients_of_a_model_that_is_called_on_its_results(keras, wrap):
    """The weights are copied for each call, and are in both calls' gradients."""
    net = keras.models.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8)])
    plain = keras.models.Sequential([keras.layers.Input((8,))] + net.layers)
    compat.parallelize(net)
    variables = [getattr(v, "_value", v) for v in net.trainable_variables]

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(model(tf.constant(ROWS))) ** 2)
        return tape.gradient(loss, variables)

    with told():  # that the plain model trains the weights of the other one
        expected, found = [wrap(lambda model=model: gradients(model))() for model in (plain, net)]
    for value, other in zip(found, expected):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-4)


class Wide(tf.Module):
    """Of layers that are half used, or have slices or several types."""

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(2)
        values = random.normal(size=(3, 8, 8)).astype("float32")
        self.first, self.unused, self.table = map(tf.Variable, values)
        self.half = tf.Variable(values[0].astype("float16"), trainable=False)
        self.flags = tf.Variable(values[1] > 0, trainable=False)
        self.odd = tf.Variable(values[2, :3, 0].astype("float64"), trainable=False)
        self.number = tf.Variable(np.arange(8, dtype="int32"), trainable=False)

    def __call__(self, rows):
        rows = rows @ self.first + tf.stop_gradient(rows @ self.unused)
        rows = tf.where(self.flags[:1], rows, rows * 2.0)
        rows += tf.cast(self.number, tf.float32) * tf.cast(tf.reduce_sum(self.odd), tf.float32)
        rows = tf.cast(tf.cast(rows, tf.float16) @ self.half, tf.float32)
        return rows * tf.reduce_sum(tf.gather(self.table, [1, 2, 1]), 0)


@pytest.mark.parametrize("wrap", [lambda call: call, tf.function])
def test_variables_of_all_kinds(keras, wrap):
    models = [Wide(), compat.parallelize(Wide())]
    rows, results = tf.constant(ROWS), []
    for model in models:

        def gradients(model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(rows))
            return tape.gradient(loss, [model.first, model.unused, model.table])

        of_first, of_unused, of_table = wrap(gradients)()
        assert of_unused is None and isinstance(of_table, tf.IndexedSlices)
        results.append([of_first, tf.convert_to_tensor(of_table)])
        predict = wrap(lambda model=model: model(rows))
        results[-1] += [predict(), predict()]
        model.flags.assign(~model.flags)
        model.odd.assign_add(tf.ones(3, tf.float64))
        results[-1] += [predict()]
        model.number.assign_add(tf.ones(8, tf.int32))
        results[-1] += [predict()]
        model.half.assign(-model.half)
        results[-1] += [predict()]
    for found, expected in zip(*results):
        np.testing.assert_allclose(found, expected, rtol=2e-2, atol=1e-2)


@span
def test_several_threads_predict_while_weights_change(keras):
    model = compat.parallelize(build(keras))
    rows = tf.constant(ROWS)
    predict = tf.function(lambda: model(rows))
    predict()
    errors, done = [], threading.Event()

    def run():
        try:
            while not done.is_set():
                predict()
        except Exception as error:  # of whatever kind
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(20):
        kernel_of(model).assign(tf.ones((8, 6)) * step / 20)
        found = predict()
        expected = model.layers[1](model.layers[0](rows))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    done.set()
    for thread in threads:
        thread.join()
    assert not errors


def resources(model):
    """Return the handles of all copies of a model's weights."""
    kept = replicas.of(model).kept
    return [handle for group in kept._groups.values() for handle in group.resources]


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_weights_that_have_not_changed_are_not_sent(keras, eagerly):
    """Zeros in the copies stay, and are what the other devices compute with."""
    model = compat.parallelize(build(keras))
    model.compile("sgd", "mse", run_eagerly=eagerly)
    expected = np.asarray(model.predict_on_batch(ROWS))
    for group in replicas.of(model).kept._groups.values():
        for device in group.hops:
            for copied, shape in zip(group.copies(device), group.shapes):
                zeros = tf.zeros(shape, group.dtype)
                tf.raw_ops.AssignVariableOp(resource=copied, value=zeros)
    first = len(ROWS) // DEVICES
    for call in (model.predict_on_batch, lambda rows: model(tf.constant(rows))):
        found = np.asarray(call(ROWS))
        np.testing.assert_allclose(found[:first], expected[:first], atol=1e-6)
        assert np.abs(found[first:] - expected[first:]).max() > 1e-3


def are_set(handles):
    return [bool(tf.raw_ops.VarIsInitializedOp(resource=handle)) for handle in handles]


@pytest.mark.parametrize("how", ["deleted", "parallelized on one device"])
def test_what_is_kept_is_freed(keras, how):
    model = compat.parallelize(build(keras))
    model.compile("sgd", "mse")
    model.predict_on_batch(ROWS)
    model(tf.constant(ROWS))
    handles, kernel = resources(model), weakref.ref(kernel_of(model))
    assert handles and all(are_set(handles))
    if how == "deleted":
        del model
        keras.backend.clear_session()
        gc.collect()
        assert kernel() is None
    else:
        compat.parallelize(model, gpus=1)
    assert not any(are_set(handles))


@span
def test_a_function_outlives_what_was_freed(keras):
    model = compat.parallelize(build(keras))
    predict = tf.function(lambda rows: model(rows))
    expected = predict(tf.constant(ROWS))
    compat.parallelize(model, gpus=1)
    for _ in range(2):
        np.testing.assert_allclose(predict(tf.constant(ROWS)), expected, atol=1e-6)
        np.testing.assert_allclose(model(tf.constant(ROWS)), expected, atol=1e-6)


def is_copyable(model):
    """Return whether this version copies models: TensorFlow 2.0 to 2.3 do not."""
    model.compile("sgd", "mse")
    model.predict_on_batch(ROWS)
    try:
        return bool(copy.deepcopy(model)) and hasattr(model, "train_step")
    except TypeError:
        return False


def test_copies_belong_to_no_model(keras, tmp_path):
    """Neither to its weights, nor to its checkpoints, nor to what is saved; nor to its copy."""
    plain, model = build(keras), compat.parallelize(build(keras))
    model.compile("sgd", "mse")
    model.predict_on_batch(ROWS)
    names = [sorted(v.name.split("/")[-1] for v in each.weights) for each in (plain, model)]
    assert names[0] == names[1]
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    assert not [name for name, _ in tf.train.list_variables(path) if "compat" in name]
    folder = str(tmp_path / "saved")
    tf.saved_model.save(model, folder)
    contents = [open(os.path.join(folder, "saved_model.pb"), "rb").read()]
    assert not [content for content in contents if b"compat_weights" in content]
    if is_copyable(plain):
        twin = copy.deepcopy(model)
        expected = model.predict_on_batch(ROWS)
        kernel_of(twin).assign(kernel_of(twin) + 1.0)
        assert largest_difference([twin.predict_on_batch(ROWS)], [expected]) > 1e-3
        assert largest_difference([model.predict_on_batch(ROWS)], [expected]) < 1e-6


@slow
def test_a_saved_function_and_its_model_have_their_own_values(keras, tmp_path):
    """In one graph, too: both refer to the same copies by name."""
    holder = tf.Module()
    holder.model = compat.parallelize(Wide())
    holder.serve = tf.function(lambda rows: holder.model(rows))
    rows = tf.constant(ROWS)
    expected = holder.serve(rows)
    tf.saved_model.save(holder, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    holder.model.half.assign(-holder.model.half)
    both = tf.function(lambda: (holder.model(rows), loaded.serve(rows), holder.model(rows)))
    for _ in range(3):
        for found, sign in zip(both(), (-1, 1, -1)):
            np.testing.assert_allclose(found, sign * expected, rtol=1e-2, atol=1e-2)


def test_small_weights_of_one_type_are_compared_together(keras):
    sizes = [(9,), (200, 200), (5, 2), (150, 150)]
    variables = [tf.Variable(tf.zeros(size)) for size in sizes]
    variables.append(tf.Variable(tf.zeros((3,), tf.float64)))
    groups = kept_weights._groups(variables)
    shapes = [[tuple(variable.shape) for variable in group] for group in groups]
    assert shapes == [[(9,), (5, 2)], [(200, 200)], [(150, 150)], [(3,)]]


@pytest.mark.parametrize("dtype", in_span(sorted(kept_weights._COMPARABLE), ["bool", "float32"]))
def test_weights_of_each_type_are_compared_by_their_bits(keras, dtype):
    variables = [tf.Variable(tf.cast(tf.ones((rows, 3)), dtype)) for rows in (1, 2, 20000)]
    devices = ["/cpu:{}".format(number) for number in range(DEVICES)]
    kept = kept_weights.KeptWeights(devices)
    for changed in [None] + variables + [None]:
        if changed is not None:
            changed.assign(tf.cast(tf.zeros(changed.shape), dtype))
        for copies in kept.send(variables):
            for variable in variables:
                copied = copies.tensors[id(variable.handle)]
                assert copied.dtype == dtype
                np.testing.assert_array_equal(copied.numpy(), variable.numpy())


def test_nothing_is_kept_for_one_device(keras):
    model = compat.parallelize(build(keras), gpus=[1])
    model.predict_on_batch(ROWS)
    assert not resources(model)


def test_each_copy_is_made_from_the_one_before(keras):
    devices = ["/cpu:{}".format(number) for number in range(DEVICES)]
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("weight", (2, 2), use_resource=True)
        copies = [next(iter(each.tensors.values())) for each in send([variable], devices)]
        for copied, source in zip(copies[2:], copies[1:]):
            assert copied.op.inputs[0] is source


if not kept_weights.are_kept():  # these look at copies that are kept
    del test_weights_that_have_not_changed_are_not_sent
    del test_what_is_kept_is_freed
    del test_small_weights_of_one_type_are_compared_together
    del test_weights_of_each_type_are_compared_by_their_bits
