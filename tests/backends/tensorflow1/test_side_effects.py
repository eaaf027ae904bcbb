"""TensorFlow 1: side effects of calls.

Of Python functions, kept tensors, weights that a call moves, and gradients between outputs.
"""

import random
import re

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1 import profiler
from compat._configuration import registry
from compat.testing import initialise, largest_difference, span

from ..verification_cases import verified
from .row_models import rows_of, three_devices, warned  # noqa: F401  # the fixture

v1 = v1_names(tf)
ROWS = 7


def on_one_and_three(keras, build, run, verify=0):
    """Return ``run``'s results for models on one device and on three, and the latter's warnings.

    Arguments:
        keras: the Keras under test.
        build: a function that returns a model, and a function that returns options of ``compile``.
        run: a function of a model.
        verify: how many steps are verified.
    """
    found = []

    def parallel():
        model, options = build()
        compat.parallelize(initialise(model))
        model.compile(**options())
        verified(registry.find("tensorflow1"), model, verify)
        found.append(run(model))

    plain, options = build()
    initialise(plain).compile(**options())
    found.append(run(plain))
    keras.backend.clear_session()
    texts = warned(parallel)
    return found, texts


def trained(model, steps=2, targets=lambda: rows_of(ROWS, 2)):
    """Return the losses of some steps, and the weights after them."""
    losses = [np.array(model.train_on_batch(rows_of(ROWS), targets())) for _ in range(steps)]
    return losses + model.get_weights()


def with_layer(keras, call):
    """Return a model with a layer that computes by a function of its input."""
    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    x = layers.Lambda(call, output_shape=(3,), name="calling")(layers.Dense(3)(inputs))
    return keras.models.Model(inputs, layers.Dense(2)(x))


def devices_of(model):
    """Return the devices that compute products, forward and backward, in a training step."""
    with profiler.recorded(v1, output_partition_graphs=True) as runs:
        model.train_on_batch(rows_of(ROWS), rows_of(ROWS, 2))
    ran = profiler.products(profiler.partitions(max(runs, key=v1.RunMetadata.ByteSize)))
    return {device for device, (forward, backward) in ran.items() if forward and backward}


ALL = {f"/device:CPU:{index}" for index in range(3)}

# Python functions in the graph ------------------------------------------------------------------


class Noting:
    """Python functions that change more than they return, and what they have changed."""

    def __init__(self):
        self.seen, self.log = [], {"calls": 0}

    def listing(self, x):
        self.seen.append(len(x))
        return x

    def counting(self, x):
        self.log["calls"] += 1
        return x

    def numpys(self, x):
        return x + np.float32(np.random.uniform())

    def pythons(self, x):
        return x + np.float32(random.random())


@pytest.mark.parametrize(
    "name, verify",
    [pytest.param("listing", 0, marks=span), ("counting", 1), ("numpys", 1), ("pythons", 0)],
)
def test_python_function_that_changes_more_than_it_returns_runs_once(keras, name, verify):
    """With the whole batch; neither a trial nor a verified step leaves anything."""

    def run(noting):
        def call(x):
            result = v1.py_func(getattr(noting, name), [x], "float32")
            result.set_shape((None, 3))
            return x + tf.stop_gradient(result)

        return lambda: (with_layer(keras, call), lambda: {"optimizer": "sgd", "loss": "mse"})

    notes = [Noting(), Noting()]
    builds = [run(each) for each in notes]

    def train(model):
        np.random.seed(0)
        random.seed(0)
        found = trained(model)
        return found + [np.random.uniform(), random.random()]

    (plain, parallel), texts = on_one_and_three(
        keras, lambda: builds.pop(0)(), train, verify=verify
    )
    assert largest_difference(plain, parallel) <= 1e-5
    assert vars(notes[0]) == vars(notes[1])
    (text,) = texts
    assert re.fullmatch(
        r"The operation calling(_\d)?/PyFunc \(PyFunc\) in calling \(test_side_effects\.py, line "
        r"\d+\) of '\w+' has side effects \(on a list, a counter, random numbers\), which each "
        r"device would repeat\. It, and everything computed from it, runs unsplit on "
        r"/device:CPU:0\.",
        text,
    )


@span
def test_python_function_without_rows_runs_once(keras):
    """All replicas use what it returns, and are split."""
    calls = []

    def drawn():
        calls.append(None)
        return np.float32(np.random.uniform())

    def build():
        def call(x):
            noise = v1.py_func(drawn, [], "float32")
            noise.set_shape(())
            return x + noise

        return with_layer(keras, call), lambda: {"optimizer": "sgd", "loss": "mse"}

    def train(model):
        del calls[:]
        np.random.seed(0)
        found = trained(model)
        return found + [len(calls), np.random.uniform()], devices_of(model)

    ((plain, _), (parallel, devices)), texts = on_one_and_three(keras, build, train)
    assert largest_difference(plain, parallel) <= 1e-5 and not texts
    assert devices == ALL


# Tensors that a layer keeps ----------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["rows", "number", "random"])
def test_tensors_that_a_call_keeps_are_those_of_the_batch(keras, kept):
    """In an attribute or a list, for a loss, a metric and ``K.function``."""
    K = keras.backend
    values = {
        "rows": lambda x: K.tanh(2 * x),
        "number": lambda x: K.mean(K.square(x)),
        "random": lambda x: K.in_train_phase(K.dropout(x, 0.5), x),
    }
    lasts = []

    def build():
        def call(x):
            lasts.append(values[kept](x))
            return x + (lasts[-1] if kept != "number" else 0.0)

        def loss(expected, found):
            return K.mean(K.square(expected - found), axis=-1) + K.mean(lasts[-1])

        def last(expected, found):
            return K.max(lasts[-1])

        model = with_layer(keras, call)
        return model, lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": loss,
                               "metrics": [last]}  # fmt: skip

    def train(model):
        found = [] if kept == "random" else trained(model)
        after = K.function([model.inputs[0]], [lasts[-1]])([rows_of(ROWS)])
        return found + after, devices_of(model)

    ((plain, _), (parallel, devices)), texts = on_one_and_three(keras, build, train)
    assert largest_difference(plain, parallel) <= 1e-5 and not texts
    assert devices == ALL


# Weights that a call moves ------------------------------------------------------------------------


def momentum_encoder(keras, way):
    """Return a layer whose second kernel follows its first one, moved in each call."""
    K = keras.backend

    class Following(keras.layers.Layer):
        def build(self, input_shape):
            options = {"shape": (3, 3), "initializer": "zeros"}
            self.first = self.add_weight(name="first", trainable=True, **options)
            self.second = self.add_weight(name="second", trainable=False, **options)
            super().build(input_shape)

        def call(self, x):
            moved = 0.5 * self.second + 0.5 * self.first
            if way == "add_update":
                self.add_update([K.update(self.second, moved)], x)
                return K.dot(x, self.first) + K.dot(x, self.second)
            update = v1.assign(self.second, moved)
            if way == "assigned":
                return K.dot(x, self.first) + K.dot(x, tf.identity(update))
            with tf.control_dependencies([update]):
                return K.dot(x, self.first) + K.dot(x, tf.identity(self.second))

        def compute_output_shape(self, input_shape):
            return input_shape

    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    x = Following(name="following")(layers.Dense(3)(inputs))
    return keras.models.Model(inputs, layers.Dense(2)(x))


@pytest.mark.parametrize("way", ["add_update", pytest.param("waited for", marks=span), "assigned"])
def test_weights_that_a_call_moves_are_moved_once(keras, way):
    def build():
        return momentum_encoder(keras, way), lambda: {"optimizer": "sgd", "loss": "mse"}

    def train(model):
        return trained(model, steps=3), devices_of(model)

    ((plain, _), (parallel, devices)), texts = on_one_and_three(keras, build, train)
    assert largest_difference(plain, parallel) <= 1e-5 and not texts
    assert devices == ALL


# Gradients between outputs ------------------------------------------------------------------------


def generator(keras, within=False):
    """Return a model of images and their sources; or of the gradient by these, in a layer."""
    K, layers = keras.backend, keras.layers
    inputs = layers.Input(shape=(4,))
    style = layers.Dense(3, activation="tanh", name="style")(inputs)
    image = layers.Dense(2, name="image")(layers.Lambda(K.square)(style))
    if within:
        slope = layers.Lambda(lambda pair: K.gradients(K.sum(pair[0]), pair[1])[0],
                              output_shape=(3,))  # fmt: skip
        return keras.models.Model(inputs, [image, slope([image, style])])
    return keras.models.Model(inputs, [image, style])


@pytest.mark.parametrize(
    "where", [pytest.param("in the loss", marks=span), "before it", "in a layer"]
)
def test_gradient_of_one_output_by_another(keras, where):
    K = keras.backend

    def build():
        model = generator(keras, where == "in a layer")
        image, style = model.outputs
        slope = K.gradients(K.sum(image), style)[0] if where == "before it" else None

        def loss(expected, found):
            if where == "in a layer":
                return K.mean(K.square(found), axis=-1)
            by_style = K.gradients(K.sum(found), style)[0] if slope is None else slope
            return K.mean(K.square(found - expected), axis=-1) + K.mean(K.square(by_style), -1)

        return model, lambda: {"optimizer": "sgd", "loss": [loss, "mse"]}

    def train(model):
        targets = [rows_of(ROWS, 2), rows_of(ROWS, 3)]
        found = trained(model, targets=lambda: targets)
        with profiler.recorded(v1, output_partition_graphs=True) as runs:
            model.train_on_batch(rows_of(ROWS), targets)
        ran = profiler.partitions(max(runs, key=v1.RunMetadata.ByteSize))
        return found, set(profiler.products(ran))

    ((plain, _), (parallel, devices)), texts = on_one_and_three(keras, build, train)
    assert largest_difference(plain, parallel) <= 1e-5 and not texts
    assert devices == ALL


def test_second_gradient_of_a_loop_is_the_error_of_one_device(keras):
    """TensorFlow 1 has none: copies of a gradient's loop must not look like any loop."""
    K, layers = keras.backend, keras.layers
    for devices in (1, 3):
        K.clear_session()  # the error leaves the graph within the loop
        inputs = layers.Input(shape=(3, 4))
        hidden = layers.Dense(4)(inputs)
        outputs = layers.Dense(2)(layers.SimpleRNN(3)(hidden))
        model = keras.models.Model(inputs, outputs)
        compat.parallelize(model, gpus=devices)
        slope = K.gradients(K.sum(outputs), hidden)[0]

        def loss(expected, found, slope=slope):
            return K.mean(K.square(found - expected), -1) + K.sum(K.square(slope), [1, 2])

        model.compile("sgd", loss)
        with pytest.raises(TypeError, match="Second-order gradient for while loops not supported"):
            model.train_on_batch(np.zeros((ROWS, 3, 4)), rows_of(ROWS, 2))
