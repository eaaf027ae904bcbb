"""Batch normalization by the statistics of the whole batch: the results of one device."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.reductions import BatchReductions
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat._configuration import registry
from compat.testing import DEVICES, keras_under_test

from ..messages import told
from ..verification_cases import verified
from .test_contract import KERAS3, TRAIN_STEP, train_in_a_new_graph

ROWS = (61, 14, 2, 61, 14)
VERSION = [int(number) for number in tf.__version__.split(".")[:2]]


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def norm(keras, **options):
    return keras.layers.BatchNormalization(momentum=0.8, **options)


def dense(keras, dtype="float64"):
    layers = keras.layers
    inputs = layers.Input((6,), dtype=dtype)
    x = norm(keras, dtype=dtype)(layers.Dense(8, activation="tanh", dtype=dtype)(inputs))
    y = norm(keras, scale=False, dtype=dtype)(layers.Dense(8, dtype=dtype)(x))
    y = layers.Add(dtype=dtype)([norm(keras, dtype=dtype)(x), y])
    return keras.models.Model(inputs, layers.Dense(2, dtype=dtype)(y))


def convolutional(keras):
    """Return a model with the fused kernels of tf.keras, which have only float32."""
    layers = keras.layers
    inputs = layers.Input((6, 6, 2))
    x = norm(keras)(layers.Conv2D(4, 3)(inputs))
    x = norm(keras)(layers.Conv2D(4, 3, activation="relu")(x))
    return keras.models.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def masked(keras):
    layers = keras.layers
    inputs = layers.Input((5, 3), dtype="float64")
    x = norm(keras, dtype="float64")(layers.Masking(dtype="float64")(inputs))
    x = layers.Flatten(dtype="float64")(layers.Dense(4, dtype="float64")(x))
    return keras.models.Model(inputs, layers.Dense(2, dtype="float64")(x))


def synchronized(keras):
    """Return a model whose layer asks for it by itself, or skip the test."""
    layers = keras.layers
    try:
        layer = layers.BatchNormalization(synchronized=True, momentum=0.8)
    except TypeError:
        kind = getattr(getattr(layers, "experimental", None), "SyncBatchNormalization", None)
        if kind is None:
            pytest.skip("no layer asks for it")
        layer = kind(momentum=0.8)
    inputs = layers.Input((6, 6, 2))
    x = layer(layers.Conv2D(4, 3)(inputs))
    return keras.models.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


class Counter(keras_under_test().layers.Layer):
    """Counts rows and calls between two layers of batch normalization, and keeps its input."""

    def build(self, shape):
        zeros = dict(shape=(), initializer="zeros", trainable=False, dtype="float64")
        self.rows = self.add_weight(name="rows", **zeros)
        self.mean = self.add_weight(name="mean", **zeros)
        self.built = True

    def call(self, x):
        self.rows.assign_add(tf.cast(tf.shape(x)[0], "float64"))
        self.mean.assign(tf.reduce_mean(x))
        self.last = x
        self.add_loss(tf.cast(tf.reduce_mean(tf.square(x)), "float32" if KERAS3 else "float64"))
        return x * tf.cast(1, x.dtype)


class Subclassed(keras_under_test().Model):
    """Does not pass its argument ``training`` on."""

    def __init__(self, keras):
        super().__init__()
        self.counters = [Counter(dtype="float64") for _ in range(2)]
        self.norms = [norm(keras, dtype="float64") for _ in range(2)]
        self.head = keras.layers.Dense(2, dtype="float64")

    def call(self, x, training=None):
        for counter, normalize in zip(self.counters, self.norms):
            x = normalize(counter(x))
        return self.head(x)


def subclassed(keras):
    model = Subclassed(keras)
    model(np.ones((3, 6)))
    return model


SHAPES = {dense: (6,), subclassed: (6,), masked: (5, 3)}
TOLERANCES = {convolutional: 2e-4, synchronized: 2e-4, subclassed: 1e-6}  # of float32


def batches(shape, rows):
    random = np.random.RandomState(3)
    for number in rows:
        x = random.normal(3, 2, size=(number,) + shape)
        if len(shape) == 2:  # time
            for row, length in enumerate(random.randint(1, 6, size=number)):
                x[row, length:] = 0
        yield x, random.normal(size=(number, 2))


def trained(keras, build, sync=None, eager=False, rows=ROWS):
    """Return losses of steps of momentum SGD and the weights after them; None: on one device."""
    keras.utils.set_random_seed(1) if KERAS3 else tf.random.set_seed(1)
    model = build(keras)
    random = np.random.RandomState(1)
    model.set_weights([random.uniform(-0.3, 0.3, size=w.shape) for w in model.get_weights()])
    if sync is not None:
        compat.parallelize(model, sync_batch_norm=sync)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", run_eagerly=eager)
    shape, losses = SHAPES.get(build, (6, 6, 2)), []
    if eager:
        losses += [float(model.train_on_batch(*batch)) for batch in batches(shape, rows)]
    elif TRAIN_STEP:
        # Of any number of rows, so that one function is traced. A loss is the mean of those so far.
        data = tf.data.Dataset.from_generator(
            lambda: batches(shape, rows), ("float64", "float64"), ((None,) + shape, (None, 2))
        )
        keep = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
        )
        model.fit(data, verbose=0, callbacks=[keep])
    else:  # there TensorFlow 2.0 computes eagerly
        for x, y in batches(shape, rows):
            losses += model.fit(x, y, batch_size=len(x), verbose=0).history["loss"]
    return [np.array(losses)] + model.get_weights()


def difference(results, others):
    """Return the largest one, relative to the largest value of each array."""
    pairs = zip(results, others)
    return max(np.abs(a - b).max() / (np.abs(a).max() + 1e-3) for a, b in pairs)


@pytest.mark.parametrize(
    "build, eager",
    [
        (dense, False), (dense, True), (convolutional, False), (convolutional, True),
        (masked, False), (synchronized, False), (subclassed, False), (subclassed, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_training_equals_one_device(keras, build, eager):
    with told() as texts:
        found = trained(keras, build, sync=build is not synchronized, eager=eager)
    if build is not subclassed or TRAIN_STEP:  # it runs unsplit in TensorFlow 2.0
        assert texts == []
    expected = trained(keras, build, eager=eager)
    assert difference(expected, found) < TOLERANCES.get(build, 1e-9)


def test_training_differs_without_the_option(keras):
    rows = ROWS[:3]
    found = trained(keras, dense, sync=False, rows=rows)
    assert difference(trained(keras, dense, rows=rows), found) > 1e-3


def test_each_device_computes_forward_and_backward_and_reduces_once(keras, monkeypatch):
    made, count = [], BatchReductions.__init__

    def noted(self, *args):
        made.append(self)
        count(self, *args)

    monkeypatch.setattr(BatchReductions, "__init__", noted)
    model = compat.parallelize(convolutional(keras), sync_batch_norm=True)
    model.compile(keras.optimizers.SGD(0.02), "mse")
    (batch,) = batches((6, 6, 2), [61])
    found = products(nodes_executed(lambda: train_in_a_new_graph(model, *batch)))
    assert len(found) == 3 and all(map(all, found.values())), found
    assert made[-1].count == 2  # one for each layer
    made.clear()
    model.predict(batch[0])
    model(tf.constant(batch[0], tf.float32), training=False)
    assert made == []  # no threads where no layer normalizes the batch


@pytest.mark.skipif(KERAS3, reason="Keras 3 has no virtual batches")
@pytest.mark.parametrize("options", [{"renorm": True}, {"virtual_batch_size": 2}], ids=str)
def test_what_has_statistics_of_another_kind_equals_one_device(keras, options):
    """Renormalized statistics are reduced as any values are; virtual batches are not split."""

    def build(keras):
        inputs = keras.layers.Input((6,))
        layer = keras.layers.BatchNormalization(fused=False, **options)
        return keras.models.Model(inputs, keras.layers.Dense(2)(layer(inputs)))

    SHAPES[build] = (6,)
    with told() as texts:
        found = trained(keras, build, True, rows=[14, 2])
    if "renorm" in options and TRAIN_STEP:
        assert texts == []
    else:
        assert len(texts) == 1 and "runs unsplit" in texts[0]
    assert difference(trained(keras, build, rows=[14, 2]), found) < 1e-4


class Decorated(keras_under_test().Model):
    """Normalizes in a function that TensorFlow traces once for all devices."""

    def __init__(self, keras):
        super().__init__()
        self.norm, self.head = norm(keras, dtype="float64"), keras.layers.Dense(2, dtype="float64")

    @tf.function
    def call(self, x, training=None):
        return self.head(self.norm(x, training=training))


def decorated(keras):
    model = Decorated(keras)
    model(np.ones((3, 6)))
    return model


SHAPES[decorated] = (6,)


@pytest.mark.skipif(VERSION < [2, 4], reason="autograph converts no method that is a tf.function")
def test_a_layer_in_a_function_of_the_model_runs_unsplit(keras):
    with told() as texts:
        found = trained(keras, decorated, True, rows=[14, 2])
    assert len(texts) == 1 and "runs unsplit" in texts[0]
    assert difference(trained(keras, decorated, rows=[14, 2]), found) < 1e-9


@pytest.mark.skipif(not TRAIN_STEP, reason="TensorFlow 2.0 makes no functions of steps")
def test_training_steps_are_verified(keras):
    backend = registry.find("tensorflow2")
    model = compat.parallelize(dense(keras), sync_batch_norm=True)
    model.compile(keras.optimizers.SGD(0.02), "mse")
    record = verified(backend, model)
    (batch,) = batches((6,), [14])
    with told() as texts:
        model.train_on_batch(*batch)
    assert record.steps["train"] == 1
    assert texts == []


def test_a_module_with_such_a_layer_has_the_results_of_one_device(keras):
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(keras)
            self.weight = tf.Variable(2.0)

        def __call__(self, x):
            return self.norm(x, training=True) * self.weight

    x = tf.constant(np.random.RandomState(0).normal(3, 2, size=(14, 6)), tf.float32)
    expected = Net()(x)
    net = Net()
    net(x)
    net.norm.moving_mean.assign(np.zeros(6))
    net.norm.moving_variance.assign(np.ones(6))
    compat.parallelize(net, sync_batch_norm=True)
    np.testing.assert_allclose(net(x), expected, rtol=1e-5, atol=1e-5)
    record = verified(registry.find("tensorflow2"), net)
    with told() as texts, tf.GradientTape():
        net(x)
    assert record.steps["train"] == 1 and not record.uncompared
    assert texts == []  # such as that no batch was split: those of the verification do not count
