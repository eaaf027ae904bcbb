"""TensorFlow 2: what calls leave behind besides their results, and calls of several threads."""

import itertools
import random
import threading

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._configuration.settings import parse_verify
from compat.testing import DEVICES, in_span, keras_under_test, slow, span

from ..messages import told

Keras = keras_under_test()
layers = Keras.layers
TRAIN_STEP = hasattr(Keras.Model, "train_step")
KERAS3 = hasattr(Keras, "StatelessScope")
ROWS = np.random.RandomState(3).normal(size=(11, 4)).astype("float32")
TARGETS = np.random.RandomState(2).normal(size=(11, 2)).astype("float32")
CALLS = []


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return Keras


class Noting(layers.Layer):
    """Keeps its scores, and counts its calls, in all places that there are."""

    def __init__(self):
        super().__init__()
        self.dense, self.calls, self.seen, self.log = layers.Dense(3), 0, [], {"calls": 0}

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        scores = tf.tanh(self.dense(x))
        self.last, self.pair = scores, (tf.reduce_sum(scores), "sum")
        self.calls += 1
        self.seen.append(tf.reduce_mean(scores))
        self.log["calls"] = self.log["calls"] + 1
        CALLS.append(random.random() + np.random.rand())
        return scores


class Model(Keras.Model):
    """Its loss has a part that depends on what its layer keeps."""

    def __init__(self):
        super().__init__()
        self.noting, self.outputs_ = Noting(), layers.Dense(2)
        self.built = True
        self.noting.build((None, 4))
        self.outputs_.build((None, 3))

    def call(self, x):
        return self.outputs_(self.noting(x))

    def loss_of(self, rows, targets):
        loss = tf.reduce_mean((self(rows) - targets) ** 2)
        return loss + tf.reduce_mean(self.noting.last**2) + 0.1 * self.noting.pair[0]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, weights_of(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def weights_of(model):
    """Return the model's trainable variables as TensorFlow's, which those of Keras 3 contain."""
    return [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]


def initialised(model):
    numbers = np.random.RandomState(0)
    for weight in model.weights:
        weight.assign(numbers.normal(size=weight.shape).astype("float32"))
    return model


def left_by(model):
    """Return the values that its calls have left; of a graph's tensors their shapes."""
    noting = model.noting
    shapes = [noting.last.shape[1:].as_list(), noting.pair[0].shape.as_list(), noting.pair[1]]
    return noting.calls, len(noting.seen), noting.log["calls"], len(CALLS), shapes, sum(CALLS)


def both(compute, build=Model):
    """Return ``compute``'s results for a plain model and one on three devices; and the warnings."""
    found = []
    for parallel in (False, True):
        del CALLS[:]
        random.seed(1)
        np.random.seed(2)
        model = initialised(build())
        if parallel:
            compat.parallelize(model)
        with told() as texts:
            values = compute(model)
        found.append((values, random.random(), np.random.rand()))
    return found, texts


def close(expected, found):
    for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@span
@pytest.mark.parametrize("eagerly", [True, False])
def test_a_loss_on_an_attribute_has_the_gradients_of_the_batch(keras, eagerly):
    """And lists, counters and random numbers are those of one call."""

    def step(model, rows, targets):
        with tf.GradientTape() as tape:
            loss = model.loss_of(rows, targets)
        gradients = tape.gradient(loss, weights_of(model))
        return gradients, model.noting.last, model.noting.seen[-1]

    def compute(model):
        function = step if eagerly else tf.function(step)
        results = [function(model, tf.constant(ROWS[:n]), TARGETS[:n]) for n in (11, 11, 7)]
        return results, left_by(model)

    ((expected, left), *numbers), ((found, other), *others) = both(compute)[0]
    close(expected, found)
    assert left == other and numbers == others


if TRAIN_STEP:  # TensorFlow 2.0 has no steps of one's own

    @pytest.mark.parametrize("verify", [0, 1])
    @pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=slow)])
    def test_training_leaves_what_it_leaves_on_one_device(keras, monkeypatch, eagerly, verify):
        settings = compat._runtime.process.process.configuration.settings
        monkeypatch.setattr(settings, "verify", parse_verify(verify, {}, DEVICES))

        def compute(model):
            options = {"jit_compile": False} if KERAS3 else {}
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly, **options)
            model.fit(ROWS, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
            left = left_by(model)
            predicted = model.predict(ROWS, verbose=0)
            return model.get_weights() + [predicted], left, left_by(model)

        (plain, *numbers), (parallel, *others) = both(compute)[0]
        close(plain[0], parallel[0])
        assert plain[1:] == parallel[1:] and numbers == others

    def test_a_model_is_saved_with_what_it_has_noted(keras, tmp_path):
        """TensorFlow's checkpoints notice lists that were changed behind their back."""
        model = compat.parallelize(initialised(Model()))
        model(tf.constant(ROWS))
        path = str(tmp_path / "model.weights.h5")
        model.save_weights(path)
        if not KERAS3:
            tf.train.Checkpoint(model=model.noting.dense).save(str(tmp_path / "checkpoint"))
        other = Model()
        other.load_weights(path)
        close(model.get_weights(), other.get_weights())


class Momentum(Keras.Model):
    """A momentum encoder: the weights of one branch follow those of the other."""

    def __init__(self, trainable):
        super().__init__()
        self.online, self.target = layers.Dense(3), layers.Dense(3, trainable=trainable)
        self.online.build((None, 4))
        self.target.build((None, 4))
        self.built = True

    def call(self, x):
        for slow_, fast in zip(self.target.weights, self.online.weights):
            slow_.assign(slow_ * 0.5 + fast * 0.5)
        return self.online(x) * self.target(x)


class FollowsBatch(Keras.Model):
    """A weight that moves by the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 4))
        self.built = True

    def call(self, x):
        center = self.dense.weights[1]
        found = self.dense(x)
        center.assign(center * 0.9 + 0.1 * tf.reduce_mean(found, axis=0))
        return found


MOVES = {
    "a frozen branch": lambda: Momentum(False),
    "a trainable branch": lambda: Momentum(True),
    "by the batch": FollowsBatch,
}


@pytest.mark.parametrize(
    "moves, eagerly",
    in_span(
        itertools.product(MOVES, [True, False]),
        [("a frozen branch", True), ("a trainable branch", False), ("by the batch", False)],
    ),
)
def test_weights_that_a_call_moves_are_moved_once(keras, moves, eagerly):
    def step(model, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows) ** 2)
        return loss, [g for g in tape.gradient(loss, weights_of(model)) if g is not None]

    def compute(model):
        function = step if eagerly else tf.function(step)
        results = [function(model, tf.constant(ROWS[:n])) for n in (11, 7)]
        return results, model.get_weights()

    ((expected, *_), (found, *_)), _ = both(compute, MOVES[moves])
    close(expected, found)


def test_what_cannot_be_merged_runs_on_one_device(keras):
    """A counter that counts the rows of each part in Python."""

    class Names(Keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.dense.build((None, 4))
            self.built, self.names = True, set()

        def call(self, x):
            self.chosen = random.choice(["a", "b"]) + str(id(x))
            return self.dense(x)

    model = compat.parallelize(Names())
    with told() as texts:
        model(tf.constant(ROWS))
    assert texts == [
        "Model {!r} has side effects (on a list, a counter, random numbers), which each device "
        "would repeat. The model runs unsplit on /cpu:0.".format(model.name)
    ]


@span
@pytest.mark.parametrize("eagerly", [True, False])
def test_first_calls_of_eight_threads_at_once(keras, eagerly):
    def compute(model):
        calls = [model if eagerly else tf.function(lambda rows: model(rows)) for _ in range(8)]
        results, ready = [None] * 8, threading.Barrier(8)

        def run(place):
            ready.wait()
            results[place] = calls[place](tf.constant(ROWS + place)).numpy()

        threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results, (model.noting.calls, len(model.noting.seen), len(CALLS))

    (((expected, left), *_), ((found, other), *_)), texts = both(compute)
    assert not texts
    close(expected, found)
    assert other == (8, 8, 8) and left[1:] == other[1:]


class Sizes(layers.Layer):
    """Counts rows and calls, and keeps the scores of every third call."""

    def __init__(self, keeps=False):
        super().__init__()
        self.rows, self.calls, self.keeps, self.kept = 0, 0, keeps, []

    def call(self, x):
        self.calls += 1
        if not self.keeps:
            self.rows += int(x.shape[0] or 0)
        elif self.calls % 3 == 0:
            self.kept.append(tf.reduce_sum(x, axis=1))
        return 2.0 * x


def noted_sizes(parallel, keeps):
    inputs = Keras.Input((4,))
    layer = Sizes(keeps)
    model = Keras.Model(inputs, layers.Dense(2)(layer(inputs)))
    if parallel:
        compat.parallelize(model)
    layer.rows, layer.calls, layer.kept = 0, 0, []
    for rows in (6, 6, 7, 3, 2, 1):
        model(ROWS[:rows])
    return layer.rows, layer.calls, [np.array(each) for each in layer.kept]


@pytest.mark.parametrize("keeps", [False, True])
def test_numbers_of_rows_and_what_a_later_call_keeps_are_the_batch_s(keras, keeps):
    """Also where all devices have as many rows, so that they agree on a wrong number."""
    plain = noted_sizes(False, keeps)
    with told() as said:
        rows, calls, kept = noted_sizes(True, keeps)
    assert (rows, calls) == plain[:2]
    assert [each.shape for each in kept] == [each.shape for each in plain[2]]
    assert all(np.array_equal(*pair) for pair in zip(kept, plain[2]))
    assert bool(said) is not keeps


def test_the_closure_of_a_function_in_a_layer_of_keras_own(keras):
    def kept(parallel):
        count, seen = 0, []

        def scale(x):
            nonlocal count
            count += 1
            seen.append(tf.reduce_sum(x, axis=1))
            return 2.0 * x

        inputs = Keras.Input((4,))
        model = Keras.Model(inputs, layers.Lambda(scale, output_shape=(4,))(inputs))
        if parallel:
            compat.parallelize(model)
        count, seen[:] = 0, []
        for rows in (7, 6):
            model(ROWS[:rows])
        return count, [np.array(each) for each in seen]

    (plain, expected), (several, found) = kept(False), kept(True)
    assert plain == several and len(expected) == len(found) == 2
    assert all(np.array_equal(*pair) for pair in zip(expected, found))


class Choosing(Keras.Model):
    """Centers its results if an attribute says so, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.dense, self.is_centered, self.calls = layers.Dense(3), False, 0
        self.counter = tf.Variable(0)

    def call(self, x):
        self.calls += 1
        self.counter.assign_add(1)
        scores = self.dense(x)
        return scores - tf.reduce_mean(scores, axis=0) if self.is_centered else scores


@span
def test_eager_calls_follow_what_a_script_sets_between_them(keras, monkeypatch):
    """The trace of an earlier call was used whatever had been set: silently other results."""
    from compat._backends.tensorflow2.replicas import ReplicatedCall

    traced, trace = [], ReplicatedCall._trace
    monkeypatch.setattr(ReplicatedCall, "_trace", lambda *args: traced.append(None) or trace(*args))
    model = Choosing()
    model(ROWS)
    before = model.calls
    compat.parallelize(model)
    with told() as texts:
        plain = [np.array(model(ROWS)) for _ in range(3)]
        assert len(traced) == 1  # what calls themselves change does not count
        assert (model.calls, int(model.counter)) == (before + 3, 4)
        assert not texts
        model.is_centered = True
        centered = np.array(model(ROWS))
    assert len(texts) == 1 and "needs the whole batch" in texts[0]
    np.testing.assert_allclose(centered, plain[0] - plain[0].mean(0), atol=1e-5)
    model.is_centered = False
    np.testing.assert_allclose(plain[0], np.array(model(ROWS)), atol=1e-6)
    assert len(traced) == 2  # the first one holds again
    model.counter = tf.Variable(0)
    model(ROWS)
    assert int(model.counter) == 1
