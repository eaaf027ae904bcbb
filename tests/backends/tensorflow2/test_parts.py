"""TensorFlow 2: models without Keras, parts on devices of their own, MirroredStrategy."""

import collections
import copy
import functools
import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import backend, replicas
from compat._backends.tensorflow2.executions import executed, products, short
from compat._ranks.place import Place
from compat._rows import split_rows
from compat.testing import (
    DEVICES,
    in_span,
    initialise,
    keras_under_test,
    largest_difference,
    slow,
    span,
)

from ..messages import told
from .test_contract import (
    KERAS3,
    ROWS,
    TARGETS,
    TRAIN_STEP,
    train_in_a_new_graph,
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    yield keras
    # After fit() under a strategy, TensorFlow 2.0 goes on in the training phase.
    keras.backend.clear_session()


# Functions that are run as one operation, and loops.
LOOPS = ("PartitionedCall", "StatefulPartitionedCall", "LoopCond")


# Models without Keras -------------------------------------------------------------------------


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


@pytest.mark.row("tf.Module and tf.function")
@pytest.mark.parametrize("build", in_span([Plain, function], [function]))
def test_native_model_runs_on_every_device(keras, build):
    model = compat.parallelize(build())
    rows, targets = tf.constant(ROWS), tf.constant(TARGETS)
    step = tf.function(step_of(model))
    found = products(executed(lambda: step(rows, targets)))
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
    sizes = split_rows.sizes(len(ROWS), 3)
    assert done == [(3 * a + b, 3 * a) for a, b in zip(sizes, split_rows.sizes(2, 3))]


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
        found = products(executed(tf.function(lambda: model(ROWS))))
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


# Parts on devices of their own ----------------------------------------------------------------


WORDS = 3


def shared_lstm(keras, placed, unroll=True):
    """The Keras FAQ's example: two sequences encoded by one LSTM."""
    layers = keras.layers
    a, b = (layers.Input((WORDS, 8), name=name) for name in "ab")
    lstm, last = layers.LSTM(4, unroll=unroll, name="shared"), layers.Dense(1, name="last")
    if not placed:
        merged = layers.concatenate([lstm(a), lstm(b)], name="merged")
    else:
        with compat.device(1):
            encoded_a = lstm(a)
        with compat.device(2):
            encoded_b = lstm(b)
        with compat.device("cpu"):
            merged = layers.concatenate([encoded_a, encoded_b], name="merged")
    model = initialise(keras.models.Model([a, b], last(merged), name="tweets"))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


SEQUENCES = [np.random.RandomState(s).normal(size=(20, WORDS, 8)).astype("float32") for s in (4, 5)]
ENDS = np.random.RandomState(6).normal(size=(20, 1)).astype("float32")


@pytest.fixture(scope="module")
def placed(keras):
    """The placed model, trained, and the plain one, trained the same."""
    models = [shared_lstm(keras, placed) for placed in (True, False)]
    for model in models:
        for _ in range(2):
            model.train_on_batch(SEQUENCES, ENDS)
    return models


@slow
@pytest.mark.row("device()")
def test_shared_lstm_on_two_devices_trains_to_the_same_numbers(placed):
    for found, expected in zip(*(model.get_weights() for model in placed)):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    predictions = [model.predict(SEQUENCES, verbose=0) for model in placed]
    np.testing.assert_allclose(*predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.row("device()")
@span
def test_shared_lstm_runs_forward_and_backward_where_it_was_placed(placed):
    model = placed[0]
    nodes = executed(lambda: train_in_a_new_graph(model, SEQUENCES, ENDS))
    found = products(nodes)
    assert found["/cpu:1"] == found["/cpu:2"], found
    assert found["/cpu:1"][0] >= WORDS and found["/cpu:1"][1] >= WORDS, found
    merges = {short(n.device) for n in nodes if n.op == "ConcatV2" and "merged" in n.name}
    assert merges == {"/cpu:0"}


@slow
@pytest.mark.row("device()")
def test_recurrent_loop_runs_where_it_was_placed(keras):
    if not TRAIN_STEP:
        with pytest.raises(compat.UnsupportedError, match="run the loop of layer 'shared'"):
            shared_lstm(keras, placed=True, unroll=False)
        return
    models = [shared_lstm(keras, placed, unroll=False) for placed in (True, False)]
    for model in models:
        nodes = executed(functools.partial(model.train_on_batch, SEQUENCES, ENDS))
        loops = collections.Counter(short(n.device) for n in nodes if n.op in LOOPS)
        devices = {"/cpu:1", "/cpu:2"} if model is models[0] else {"/cpu:0"}
        assert set(loops) == devices and len(set(loops.values())) == 1, loops
        assert all(count >= 2 for count in loops.values()), loops  # forward and backward
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-6


@pytest.mark.row("device()")
def test_layers_run_on_the_device_of_the_innermost_context(keras):
    layers = keras.layers
    inputs = layers.Input((8,))
    with compat.device(1):
        hidden = layers.Dense(6)(inputs)
        with compat.device(2):
            hidden = layers.Dense(5)(hidden)
        outputs = layers.Dense(4)(hidden)
    model = keras.models.Model(inputs, layers.Dense(4)(outputs))
    model.compile("sgd", "mse")
    found = products(executed(lambda: train_in_a_new_graph(model, ROWS, TARGETS)))
    assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"}
    assert (found["/cpu:1"][0], found["/cpu:2"][0]) == (2, 1)


@pytest.mark.row("device()")
def test_placed_model_is_saved_as_a_plain_one(keras, placed, tmp_path):
    model, plain = placed
    assert model.get_config() == plain.get_config()
    path = str(tmp_path / ("model.keras" if KERAS3 else "model.h5"))
    model.save(path)
    loaded = keras.models.load_model(path)
    found = loaded.predict(SEQUENCES, verbose=0)
    np.testing.assert_allclose(model.predict(SEQUENCES, verbose=0), found, atol=1e-6)
    assert not any("call" in vars(layer) for layer in loaded.layers if layer.name == "shared")


@slow
@pytest.mark.row("device()")
def test_replicas_run_parts_placed_before_and_say_so(keras):
    model, plain = shared_lstm(keras, True), shared_lstm(keras, False)
    with told() as texts:
        compat.parallelize(model)
    assert texts == [
        "Parts of tweets were placed on /cpu:0, /cpu:1, /cpu:2 by device(), but parallelize() runs "
        "all of it on each of /cpu:0, /cpu:1, /cpu:2. Leave out one of the two; "
        "parallelize(model, gpus=1) puts the parts back."
    ]
    found = products(executed(lambda: train_in_a_new_graph(model, SEQUENCES, ENDS)))
    plain.train_on_batch(SEQUENCES, ENDS)
    assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"} and len(set(found.values())) == 1, found
    for expected, weights in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(expected, weights, rtol=1e-5, atol=1e-6)


# MirroredStrategy -----------------------------------------------------------------------------


def small(keras):
    layers = keras.layers
    model = keras.models.Sequential(
        [layers.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def mirrored_pair(keras):
    def build():
        return small(keras)

    plain, mirrored = build(), compat.parallelize(build, strategy="mirrored")
    mirrored.set_weights(plain.get_weights())
    return plain, mirrored


@pytest.mark.row('strategy="mirrored"')
@span
def test_mirrored_even_batches_train_to_the_numbers_of_one_device(keras):
    models = mirrored_pair(keras)
    for model in models:
        model.fit(ROWS, TARGETS, batch_size=15, shuffle=False, verbose=0)
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-6
    # TensorFlow 2.0's has another name.
    strategy = getattr(models[1], "distribute_strategy", None) or models[1]._distribution_strategy
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    values = models[1].weights[0]
    values = strategy.experimental_local_results(
        getattr(values, "value", values) if KERAS3 else values
    )
    assert {short(value.device) for value in values} == {"/cpu:0", "/cpu:1", "/cpu:2"}


@pytest.mark.row('strategy="mirrored"')
def test_mirrored_function_that_builds_no_model(keras):
    with pytest.raises(compat.NotAModelError):
        compat.parallelize(lambda: None, strategy="mirrored")


@span
def test_models_without_keras_are_verified_or_it_is_said(keras, monkeypatch):
    """Which TensorFlow 2.0 cannot do."""
    monkeypatch.setattr(compat._runtime.process.process.configuration.settings, "verify", 1)
    with told() as texts:
        compat.parallelize(Plain())
    assert any("cannot compare" in text for text in texts) == (not TRAIN_STEP)


def test_variables_that_a_replica_makes_stay_listed():
    """TensorFlow 1's Saver, for example, saves what the graph lists."""
    with tf.Graph().as_default():
        before = tf.compat.v1.get_variable("before", ())
        with replicas._listing_no_variables():
            assert not tf.compat.v1.global_variables()
            within = tf.compat.v1.get_variable("within", ())
        assert [v.name for v in tf.compat.v1.global_variables()] == [before.name, within.name]


def test_sparse_strings_are_not_tried_and_sparse_results_are_given(keras):
    """Of strings none can be made up; a table that is the same for all rows comes back once."""
    table = tf.sparse.from_dense(tf.eye(2))

    def call(words, rows):
        lengths = tf.strings.length(tf.sparse.to_dense(words, default_value=""))
        return rows + tf.reduce_sum(tf.cast(lengths, tf.float32), 1, keepdims=True), table

    model, rows = compat.parallelize(tf.function(call)), tf.constant(ROWS[:6])
    words = tf.sparse.from_dense([["a", ""], ["", "bc"]] * 3)
    with told() as texts:
        found, shared = tf.function(lambda *given: model(*given))(words, rows)
        _, of_rows = compat.parallelize(tf.function(lambda rows: (rows, table)))(rows)
    assert [text.split(" of a batch")[0] for text in texts] == [
        "Model 'call' may compute across the rows"
    ]
    np.testing.assert_allclose(found, call(words, rows)[0])
    assert shared.values.shape == of_rows.values.shape == (2,)


@span
@pytest.mark.skipif(hasattr(tf.distribute, "MultiWorkerMirroredStrategy"), reason="has workers")
def test_a_version_without_workers_trains_no_ranks_of_tf_config(keras):
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    with pytest.raises(compat.UnsupportedError) as raised:
        backend.distribute(model, Place(1, 2, 1, 2, "TF_CONFIG"))
    assert str(raised.value) == (
        "tensorflow2 cannot train as rank 1 of 2 (TF_CONFIG) with TensorFlow {}. Use TensorFlow "
        "2.4 or later, or install Horovod and start the script with horovodrun."
    ).format(tf.__version__)
