"""TensorFlow 2: models with functions that XLA compiles, ``tf.function(jit_compile=True)``."""

import collections
import concurrent.futures
import contextlib
import inspect
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2.configuration import short_name
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat.testing import DEVICES, keras_under_test, slow

from ..messages import told
from .reductions import same
from .test_contract import KERAS3, ROWS, TARGETS, train_in_a_new_graph

pytestmark = pytest.mark.skipif(
    "jit_compile" not in inspect.signature(tf.function).parameters, reason="before TensorFlow 2.5"
)


@pytest.fixture(scope="module", autouse=True)
def configuration():
    return compat.configure_gpu(simulate=DEVICES)


def compiled(function):
    return tf.function(function, jit_compile=True)


class Product(keras_under_test().layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(8, 8), initializer="ones")

    def call(self, rows):
        return compiled(lambda: tf.tanh(0.1 * rows @ self.kernel))()


class Tanh(keras_under_test().layers.Layer):
    def call(self, rows):
        return compiled(tf.tanh)(0.1 * rows)


class Net(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(tf.ones((8, 4)))

    def __call__(self, rows):
        return compiled(lambda: tf.tanh(0.1 * rows @ self.kernel))()


def grouped(layers):
    return [layers.Reshape((2, 4)), layers.Conv1D(6, 2, groups=2, name="last"), layers.Flatten()]


def channels_first(layers):
    last = layers.Conv3D(3, 1, data_format="channels_first", name="last")
    return [layers.Reshape((2, 1, 1, 4)), last, layers.Flatten()]


def tanh(layers):
    return [Tanh()]


def product(layers):
    return [Product()]


def trained(layers, is_parallel):
    keras = keras_under_test()
    keras.utils.set_random_seed(3)
    first = keras.layers.Dense(8, input_shape=(8,), kernel_initializer="ones")
    model = keras.models.Sequential([first] + layers(keras.layers) + [keras.layers.Dense(4)])
    if is_parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.001), "mse")
    for _ in range(2):
        model.train_on_batch(ROWS[:16], TARGETS[:16])
    return model


def calls(nodes):
    """How many functions were called, by device."""
    return collections.Counter(
        short_name(node.device) for node in nodes if node.op == "PartitionedCall"
    )


# Keras before 3 does not compile the last, which then fails on CPUs.
SPLIT = [grouped, pytest.param(tanh, marks=slow)]
SPLIT += [pytest.param(channels_first, marks=slow)] * KERAS3


@pytest.mark.parametrize("layers", SPLIT)
def test_what_xla_compiles_is_split(layers):
    """Keras has it compile a convolution in groups."""
    plain, model = (trained(layers, is_parallel) for is_parallel in (False, True))
    same([plain.get_weights(), model.get_weights()])
    nodes = nodes_executed(lambda: train_in_a_new_graph(model, ROWS[:16], TARGETS[:16]))
    assert sorted(products(nodes)) == ["/cpu:0", "/cpu:1", "/cpu:2"]
    assert min(calls(nodes)[device] for device in ("/cpu:0", "/cpu:1", "/cpu:2")) >= 2


def test_threads_may_call_it_at_once():
    """As a server does; none of them runs it whole."""
    model = trained(tanh, False)
    expected = model(tf.constant(ROWS)).numpy()
    compat.parallelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(model, [tf.constant(ROWS)] * 16))
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-6)


WHOLE = (
    r"The operation \S+ \(StatefulPartitionedCall\)( in layer '\w+')? \(test_compiled\.py, line "
    r"\d+\) of '\w+' is a function that XLA compiles \(jit_compile=True\) with variables in it, "
    r"which all have to be on the device that runs it\. The model runs unsplit on /cpu:0\."
)


@contextlib.contextmanager
def runs_unsplit():
    with told() as texts:
        yield
    assert len(texts) == 1 and re.fullmatch(WHOLE, texts[0]), texts


def test_what_xla_compiles_with_variables_runs_unsplit():
    """A variable of another device is an error of TensorFlow's there."""
    plain = trained(product, False)
    with runs_unsplit():
        model = trained(product, True)
    same([plain.get_weights(), model.get_weights()])


@pytest.mark.row("tf.Module and tf.function")
def test_of_a_model_without_keras_too():
    expected = Net()(tf.constant(ROWS))
    model = compat.parallelize(Net())
    with runs_unsplit():
        found = model(tf.constant(ROWS))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
