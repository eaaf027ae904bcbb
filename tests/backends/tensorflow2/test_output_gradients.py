"""TensorFlow 2: gradients of one output of a model by another one."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import DEVICES, initialise, keras_under_test, span

layers = keras_under_test().layers
ROWS = np.random.RandomState(1).normal(size=(7, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def classifier(keras):
    """As for Grad-CAM: features, what is made of them, and of that classes."""
    inputs = layers.Input((4,))
    features = layers.Dense(3, activation="tanh")(inputs)
    hidden = layers.Dense(3, activation="tanh", activity_regularizer="l2")(features)
    classes = layers.Dense(2, activation="softmax")(hidden)
    return initialise(keras.models.Model(inputs, [classes, features, hidden]))


class Generator(tf.Module):
    """As of StyleGAN: an image, and the styles that it is made of."""

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(3)
        self.mapping = tf.Variable(random.normal(size=(4, 3)).astype("float32"))
        self.synthesis = tf.Variable(random.normal(size=(3, 2)).astype("float32"))

    def __call__(self, z):
        styles = tf.tanh(z @ self.mapping)
        return tf.tanh(styles @ self.synthesis), styles


def by_output(model, rows, variables):
    """Return the gradient by each other output, and the weights' gradients of a penalty on it."""
    with tf.GradientTape() as around:
        with tf.GradientTape() as tape:
            first, *others = model(rows)
            score = tf.reduce_sum(first[:, 0] ** 2) + tf.reduce_sum(others[0][:, 1])
        found = tape.gradient(score, {"others": others, "rows": rows})
        penalty = tf.add_n([tf.reduce_sum(gradient**2) for gradient in found["others"]])
    return found["others"] + around.gradient(penalty, variables)


def compared(model, variables, compute):
    expected = compute(model, tf.constant(ROWS), variables)
    compat.parallelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        found = compute(model, tf.constant(ROWS), variables)
    assert len(expected) == len(found)
    for one, other in zip(expected, found):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@span
@pytest.mark.parametrize("eagerly", [True, False])
def test_gradients_by_an_output_are_those_of_one_device(keras, eagerly):
    compute = by_output if eagerly else tf.function(by_output)
    model = classifier(keras)
    # A Keras 3 variable has one of TensorFlow's. No penalty depends on the last bias.
    weights = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
    compared(model, weights[:-1], compute)
    generator = Generator()
    compared(generator, list(generator.trainable_variables), compute)


def test_an_output_that_nothing_depends_on(keras):
    """None, or zeros where the script asks for them; targets' own use of it counts."""
    model = compat.parallelize(classifier(keras))
    with tf.GradientTape(persistent=True) as tape:
        classes, features, hidden = model(tf.constant(ROWS))
        score = tf.reduce_sum(features)
    assert tape.gradient(score, classes) is None
    zeros = tape.gradient(score, classes, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(zeros, np.zeros((7, 2)))
    np.testing.assert_array_equal(tape.gradient(score, features), np.ones((7, 3)))
