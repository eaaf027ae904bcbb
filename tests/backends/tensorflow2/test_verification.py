"""Verification on TensorFlow 2: what is found later, and what is left as it was."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._configuration import registry
from compat.testing import DEVICES, initialise, keras_under_test, largest_difference, slow, span

from .. import verification_cases
from ..verification_cases import verified
from .test_contract import KERAS3

keras_ = keras_under_test()
backend = registry.find("tensorflow2")
ROWS = np.random.RandomState(0).normal(size=(20, 4)).astype("float32")


@pytest.fixture(scope="module", autouse=True)
def devices():
    compat.configure_gpu(simulate=DEVICES)


def trained(model, steps, **options):
    """Return the model's weights after training, some steps of which were verified."""
    compat.parallelize(initialise(model))
    model.compile(options.pop("optimizer", "sgd"), **options)
    if steps:
        record = verified(backend, model, steps)
    model.fit(ROWS, ROWS[:, :2], batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert not steps or record.steps["train"] == steps
    return model.get_weights()


def dense():
    return keras_.models.Sequential([keras_.layers.Dense(2, input_shape=(4,))])


@slow
def test_variables_of_a_loss_are_put_back():
    """They belong neither to the model nor to its optimizer."""
    found = []
    for steps in (0, 2):
        scale = tf.Variable(1.0, trainable=False)

        class Rising(object):
            def __init__(self, scale):
                self.scale = scale

            def __call__(self, targets, outputs):
                self.scale.assign(self.scale * 1.5)
                return self.scale * tf.square(targets - outputs)

        rising = Rising(scale)

        def loss(targets, outputs, rising=rising):
            return rising(targets, outputs)

        found.append(trained(dense(), steps, loss=loss) + [scale.numpy()])
    assert largest_difference(*found) == 0


@slow
def test_a_batch_is_repeated_by_one_dataset_and_traced_no_more(monkeypatch):
    """Each further dataset would trace a function that has the batches at hand.

    The product in tf.keras' Nadam depends on how often that was traced, in a graph.
    """
    found, made, plain = [], [], tf.data.Dataset.map

    def counting(dataset, *args, **kwargs):
        made[-1] += 1
        return plain(dataset, *args, **kwargs)

    monkeypatch.setattr(tf.data.Dataset, "map", counting)
    for steps in (0, 2):
        made.append(0)
        found.append(trained(dense(), steps, optimizer="nadam", loss="mse"))
    assert largest_difference(*found) == 0
    assert made[1] == made[0] + 2  # one for each step that is verified


class Counting(keras_.Model if KERAS3 else keras_.models.Model):
    """Counts its steps in Python, and takes a smaller one each time."""

    def __init__(self):
        super().__init__()
        self.dense, self.count = keras_.layers.Dense(2), 0

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.count += 1
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True))) / self.count
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


@slow
@pytest.mark.skipif(
    KERAS3 or not hasattr(keras_.Model, "train_step"),
    reason="Keras 3 takes none of them, TensorFlow 2.0 trains them by loops that are not verified",
)
def test_an_optimizer_of_tensorflow_1():
    found = []
    for steps in (0, 2):
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        found.append(trained(dense(), steps, optimizer=optimizer, loss="mse"))
    assert largest_difference(*found) == 0


@slow
def test_numbers_that_a_step_counts_in_python():
    found = []
    for steps in (0, 2):
        model = Counting()
        model(ROWS[:2])
        model.compile()
        found.append(trained(model, steps, run_eagerly=True) + [np.asarray(model.count)])
    assert found[0][-1] == 3
    assert largest_difference(*found) == 0


def test_rows_that_mix_in_a_later_batch_are_right_or_found():
    verification_cases.check_rows_that_mix_in_a_later_batch(keras_, backend)


def test_an_optional_input_that_is_not_given():
    verification_cases.check_an_optional_input_that_is_not_given(keras_, backend)


@slow
def test_the_users_error_is_the_one_that_is_raised():
    verification_cases.check_the_users_error_is_the_one_that_is_raised(keras_, backend)


@slow
def test_a_model_of_words():
    """Its lookup is split, and verified: no type of number is made of texts."""
    layers, words = keras_.layers, tf.constant([["a"], ["b"], ["c"], ["z"], ["b"], ["c"], ["b"]])
    found = []
    for is_parallel in (False, True):
        inputs = layers.Input((1,), dtype="string")
        numbers = layers.StringLookup(vocabulary=["a", "b", "c"])(inputs)
        hidden = layers.Flatten()(layers.Embedding(4, 3)(numbers))
        model = initialise(keras_.models.Model(inputs, layers.Dense(2)(hidden)))
        if is_parallel:
            compat.parallelize(model)
        model.compile("sgd", "mse")
        record = verified(backend, model) if is_parallel else None
        before = [device.training_rows for device in compat.report().devices]
        with warnings.catch_warnings():
            warnings.simplefilter("error", compat.CompatWarning)
            model.fit(words, np.ones((7, 2)), batch_size=7, verbose=0)
        found.append(model.get_weights())
    assert record.steps["train"] == 1
    after = [device.training_rows for device in compat.report().devices]
    assert [now - then for now, then in zip(after, before)] == [2, 2, 3]
    assert largest_difference(*found) < 1e-6


@slow
def test_quantized_tables():
    verification_cases.check_quantized_tables(keras_)


# What this Keras does not have is not tested, nor are words again on Keras 3.
if not hasattr(keras_.layers.Embedding, "quantize"):
    del test_quantized_tables
if KERAS3 or not hasattr(keras_.layers, "StringLookup"):
    del test_a_model_of_words
if not hasattr(keras_.models.Model, "train_step"):  # nor is training verified
    del test_numbers_that_a_step_counts_in_python
if not KERAS3:
    del (
        test_rows_that_mix_in_a_later_batch_are_right_or_found,
        test_an_optional_input_that_is_not_given,
    )


@span
def test_variables_of_layers_are_found_once(monkeypatch):
    """Keras before 3.7 exports a subclass of the class of layers' variables."""

    class Variable(keras_.Variable):
        pass

    monkeypatch.setattr(keras_, "Variable", Variable)
    model = compat.parallelize(initialise(dense()))
    model.compile("sgd", "mse")
    record = verified(backend, model, 1)
    model.predict(ROWS, batch_size=20, verbose=0)
    assert record.steps["predict"] == 1 and not record.incomparable


if not KERAS3:  # which has keras.Variable
    del test_variables_of_layers_are_found_once
