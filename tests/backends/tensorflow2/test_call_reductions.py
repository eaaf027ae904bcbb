"""Values of the whole batch that replicas need on the way are reduced over them."""

import _thread
import threading

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow import reductions
from compat._backends.tensorflow2 import call_reductions, call_trace
from compat._backends.tensorflow2.call_reductions import CallReductions
from compat._backends.tensorflow2.call_trace import _signature
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.reductions import BatchReductions
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat._rows.replica_threads import current_turn
from compat._runtime import patching
from compat.testing import DEVICES, keras_under_test

from ..messages import told
from .test_contract import KERAS3, TRAIN_STEP, train_in_a_new_graph

#: Numbers of rows, and of those of a batch: batches of 61, 14, 14 and 2.
ROWS = ((75, 61), (16, 14))
Layer = keras_under_test().layers.Layer

pytestmark = pytest.mark.skipif(
    not (call_reductions.can_count() and TRAIN_STEP),
    reason="TensorFlow 2.0 does not show what is added to a graph",
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


@pytest.fixture(name="made")
def made_reductions(monkeypatch):
    """Return a list that gets all ``BatchReductions``."""
    made, plain = [], BatchReductions.__init__

    def noted(self, *args):
        made.append(self)
        plain(self, *args)

    monkeypatch.setattr(BatchReductions, "__init__", noted)
    return made


def number_of_rows(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def standardized(x):
    mean = tf.reduce_mean(x, 0)
    return (x - mean) / (tf.sqrt(tf.reduce_mean(tf.math.squared_difference(x, mean), 0)) + 0.1)


def extremes(x):
    """Of what relu() gives many elements are equal, which share the gradient."""
    highest = tf.reduce_max(tf.nn.relu(x), axis=0, keepdims=True)
    return x * (1.0 + highest) + tf.reduce_min(0 * x + x)


def covariance(x):
    return x @ (tf.transpose(x) @ x) / 100 + x


def by_branch(x):
    mean = tf.reduce_mean(x, 0)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x - mean, lambda: 2 * x + mean)


#: Functions of rows, and how many values they reduce.
KINDS = [
    (standardized, 2),
    (lambda x: 10 * tf.transpose(tf.nn.softmax(tf.transpose(x))), 2),
    (lambda x: x + 0.1 * tf.transpose(tf.nn.log_softmax(tf.transpose(x))), 2),
    (extremes, 6),
    (covariance, 1),
    (lambda x: x * (1 + 10 / number_of_rows(x)), 1),
    (by_branch, 2),
]


class Keeping(Layer):
    """Adds a loss of the batch's variance, and uses a moving average of its mean at once."""

    def build(self, shape):
        self.mean = self.add_weight(
            name="mean", shape=(shape[-1],), initializer="zeros", trainable=False
        )
        self.built = True

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        centred = x - tf.convert_to_tensor(self.mean)
        loss = tf.reduce_mean(tf.square(tf.reduce_mean(tf.square(centred), 0)))
        self.add_loss(tf.cast(loss, "float32") if KERAS3 else loss)
        return centred


def model_with(keras, *layers, **options):
    make = keras.layers
    inputs = make.Input((6,), dtype="float64")
    x = make.Dense(6, activation="tanh", dtype="float64", **options)(inputs)
    for layer in layers:
        x = layer(x)
    return keras.models.Model(inputs, make.Dense(2, dtype="float64")(x))


def lambdas(keras, functions):
    return [
        keras.layers.Lambda(function, output_shape=(6,), dtype="float64") for function in functions
    ]


def batch(rows):
    random = np.random.RandomState(rows)
    return random.normal(size=(rows, 6)), random.normal(size=(rows, 2))


def trained(keras, build, parallel, eager=False, rows=ROWS, **options):
    """Return losses of steps of momentum SGD, and the weights after them."""
    model = build()
    random = np.random.RandomState(1)
    model.set_weights([random.uniform(-0.5, 0.5, size=w.shape) for w in model.get_weights()])
    if parallel:
        compat.parallelize(model, **options)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", run_eagerly=eager)
    losses = []
    for number, size in rows:
        history = model.fit(*batch(number), batch_size=size, shuffle=False, verbose=0).history
        losses.append(np.array(history["loss"]))
    return losses + model.get_weights()


def same(results, others, tolerance=1e-9):
    for value, other in zip(results, others):
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance)


def test_all_kinds_have_the_results_of_one_device(keras, made):
    """Three of uneven shards, one of them without rows."""

    def build():
        layers = lambdas(keras, [function for function, _ in KINDS])
        return model_with(keras, *layers, Keeping(dtype="float64"))

    expected = trained(keras, build, False)
    with told() as texts:
        found = trained(keras, build, True)
    assert texts == []
    same(expected, found, 1e-6 if KERAS3 else 1e-9)  # its losses have 32 bits
    assert {each.count for each in made} == {sum(count for _, count in KINDS) + 2}


def test_each_device_computes_forward_and_backward(keras):
    model = compat.parallelize(model_with(keras, *lambdas(keras, [standardized])))
    model.compile("sgd", "mse")
    found = products(nodes_executed(lambda: train_in_a_new_graph(model, *batch(13))))
    assert len(found) == 3 and len(set(found.values())) == 1 and all(map(all, found.values()))


def test_models_that_need_none_have_none(keras, made, monkeypatch):
    monkeypatch.setattr(CallReductions, "__init__", None)
    model = compat.parallelize(model_with(keras))
    model.compile("sgd", "mse")
    model.train_on_batch(*batch(13))
    assert made == []


def test_an_eager_call_is_a_function_as_long_as_it_is_the_same(keras, monkeypatch):
    """The graph tells that a number of the script's has changed."""
    factor, functions, plain = [1.0], [], call_trace.Trace.matches
    monkeypatch.setattr(
        call_trace.Trace,
        "matches",
        lambda trace, *args: functions.append(trace.functions) or plain(trace, *args),
    )

    def centred(x):
        return x - factor[0] * tf.reduce_mean(x, 0)

    results = []
    for parallel in (False, True):
        model = model_with(keras, *lambdas(keras, [centred]), kernel_initializer="ones")
        model.layers[-1].set_weights([np.ones((6, 2)), np.zeros(2)])
        if parallel:
            compat.parallelize(model)
        results.append([])
        for factor[0] in (1.0, 1.0, 0.5):
            x = tf.constant(batch(13)[0])
            with told() as texts, tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            assert texts == []
            results[-1].append(loss)
            results[-1] += [tape.gradient(loss, v) for v in model.trainable_variables]
    same(*results)
    # The second call has the function of the first one, and the third call another one.
    assert list(map(len, functions)) == [1, 1] and functions[0] is functions[1]


def test_graphs_with_branches_are_compared():
    def signature(function):
        spec = tf.TensorSpec((None, 6), "float64")
        return _signature(tf.function(function).get_concrete_function(spec).graph)

    assert signature(by_branch) == signature(by_branch)
    assert signature(by_branch) != signature(lambda x: by_branch(x) + 1)
    assert signature(lambda x: tf.cond(tf.shape(x)[0] > 2, lambda: x, lambda: x * 2)) != signature(
        lambda x: tf.cond(tf.shape(x)[0] > 2, lambda: x, lambda: x * 3)
    )


def test_gradients_of_gradients_are_those_of_one_device(keras):
    results = []
    for parallel in (False, True):
        model = model_with(keras, *lambdas(keras, [standardized]), kernel_initializer="ones")
        model.layers[-1].set_weights([np.ones((6, 2)), np.zeros(2)])
        if parallel:
            compat.parallelize(model)
        x = tf.constant(batch(14)[0])
        with told() as texts, tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(model(x) ** 3)
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        results.append(outer.gradient(penalty, model.trainable_variables[:2]))
    assert len(texts) == 1 and "needs the whole batch" in texts[0] and "unsplit" in texts[0]
    same(*results)


def test_a_function_without_a_tape_is_differentiated_later(keras):
    gradients = []
    for parallel in (False, True):
        model = model_with(keras, *lambdas(keras, [standardized]), kernel_initializer="ones")
        model.layers[-1].set_weights([np.ones((6, 2)), np.zeros(2)])
        if parallel:
            compat.parallelize(model)
        function, x = tf.function(model), tf.constant(batch(14)[0])
        function(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 3)
        gradients.append([tape.gradient(loss, x)])
    same(*gradients)


class Sloped(Layer):
    """Takes a gradient of what depends on the whole batch."""

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(tf.reduce_mean(x, 0)))
        return x + tape.gradient(y, x)


def slope(x):
    return x + tf.gradients(tf.reduce_sum(tf.square(tf.reduce_mean(x, 0))), x)[0]


def first_rows(x):
    """As many of them as there are small ones in the batch."""
    count = tf.reduce_sum(tf.cast(tf.abs(x[:, 0]) < 2, tf.int32)) // 2 + 2
    return x + tf.reduce_mean(x[:count], 0)


@pytest.mark.parametrize(
    "function",
    [
        None,  # by a tape
        slope,
        lambda x: tf.recompute_grad(standardized)(x),
        lambda x: x / tf.maximum(0.1 * number_of_rows(x), tf.constant(1.0, x.dtype)),
        first_rows,
    ],
    ids=["tape", "gradients", "recomputed", "fraction", "first rows"],
)
def test_what_cannot_be_reduced_has_the_results_of_one_device(keras, function, request):
    def build():
        layers = lambdas(keras, [function]) if function else [Sloped(dtype="float64")]
        return model_with(keras, *layers)

    with told() as texts:
        found = trained(keras, build, True, rows=ROWS[1:])
    if "fraction" not in request.node.name:  # the number of rows is reduced, and no fraction of it
        assert len(texts) == 1 and "unsplit" in texts[0]
    same(trained(keras, build, False, rows=ROWS[1:]), found, 1e-6 if KERAS3 else 1e-9)


def test_batch_normalization_beside_it(keras, made):
    """Synchronized or not, it computes other operations in a trace than in a replica."""

    def build():
        norm = keras.layers.BatchNormalization(dtype="float64")
        return model_with(keras, *lambdas(keras, [standardized]), norm)

    with told() as texts:
        found = trained(keras, build, True, rows=ROWS[1:], sync_batch_norm=True)
        compat.parallelize(build())(batch(14)[0], training=True)
    assert texts == []
    same(trained(keras, build, False, rows=ROWS[1:]), found)
    assert {each.count for each in made} == {2, 3}


def test_large_values_are_not_reduced(keras, monkeypatch):
    monkeypatch.setattr(reductions, "LARGEST", 5)
    model = compat.parallelize(model_with(keras, *lambdas(keras, [standardized])))
    with told() as texts:
        model(tf.constant(batch(14)[0]))
    assert len(texts) == 1 and "needs the whole batch" in texts[0]


class Failing(Layer):
    """Calls a function as the second replica has reduced a value."""

    function = None

    def call(self, x):
        centred = x - tf.reduce_mean(x, 0)
        turn = current_turn()
        if self.function is not None and turn is not None and turn.index == 1:
            self.function()
        return centred / (1 + tf.reduce_mean(tf.square(centred), 0))


def test_an_interrupted_replica_ends_all_and_changes_nothing(keras):
    model = model_with(keras, Failing(name="failing", dtype="float64"), Keeping(dtype="float64"))
    x, layer = tf.constant(batch(14)[0]), model.get_layer("failing")
    expected, before = model(x), model.get_weights()
    model.layers[-2].mean.assign(np.zeros(6))
    compat.parallelize(model)
    patching.attach(layer, "function", _thread.interrupt_main)
    for call in (model, tf.function(model)):
        with pytest.raises(KeyboardInterrupt):
            call(x)
        assert not [t for t in threading.enumerate() if t.name.startswith("compat replica")]
    patching.detach(layer, "function")
    np.testing.assert_array_equal(tf.convert_to_tensor(model.layers[-2].mean), np.zeros(6))
    same([expected], [model(x)])
    same(before, model.get_weights())
