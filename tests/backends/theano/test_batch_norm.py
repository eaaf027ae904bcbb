"""Batch normalization by the statistics of the whole batch."""

import warnings

import numpy as np
import pytest

import compat
from compat import _keras
from compat._configuration import registry
from compat.testing import initialise, largest_difference

from .. import verification_cases
from . import test_contract, test_reductions, test_replicas
from .test_reductions import assert_split, plan_of, reductions, trained

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed
float64 = test_reductions.float64

ROWS = (61, 14, 2, 61, 14)


def dense(keras):
    layers = keras.layers
    return keras.models.Sequential([
        layers.Dense(6, input_shape=(8,)), layers.BatchNormalization(momentum=0.8),
        layers.Activation("tanh"), layers.Dense(5), layers.BatchNormalization(scale=False),
        layers.Dense(4),
    ])  # fmt: skip


def convolutional(keras):
    """Return a model with a shortcut, so that two layers normalize side by side."""
    layers = keras.layers
    first = layers.Input(shape=(5, 5, 2))
    both = [
        layers.BatchNormalization(axis=axis)(layers.Conv2D(3, 3, padding="same")(first))
        for axis in (-1, 1)
    ]
    hidden = layers.Activation("relu")(layers.Add()(both))
    hidden = layers.BatchNormalization(center=False)(layers.Conv2D(2, 3)(hidden))
    return keras.models.Model(first, layers.Dense(4)(layers.Flatten()(hidden)))


def nested(keras):
    layers = keras.layers
    return keras.models.Sequential([dense(keras), layers.Activation("tanh"), dense_of_four(keras)])


def dense_of_four(keras):
    layers = keras.layers
    inner = keras.models.Sequential([layers.Dense(4, input_shape=(4,))])
    inner.add(layers.BatchNormalization())
    return inner


@pytest.fixture
def without_the_operation(monkeypatch, keras):
    """Let Keras normalize by means and variances, as where Theano has no operation for it."""
    from keras.backend import theano_backend as backend

    def normalized(x, mean, var, beta, gamma, axis=-1, epsilon=1e-3):
        return backend._old_batch_normalization(x, mean, var, beta, gamma, epsilon)

    old = getattr(backend, "_old_normalize_batch_in_training", None)
    if old is None:
        pytest.skip("this Keras has no other way")
    for module in (backend, keras.backend):
        monkeypatch.setattr(module, "normalize_batch_in_training", old)
        monkeypatch.setattr(module, "batch_normalization", normalized)


MODELS = {"dense": (dense, 2), "convolutional": (convolutional, 3), "nested": (nested, 3)}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_statistics_are_those_of_the_whole_batch(float64, name):
    """By one reduction for each layer, of mean and variance, and one more for their gradients."""
    build, count = MODELS[name]
    model = assert_split(float64, lambda: build(float64), rows=ROWS, sync_batch_norm=True)
    assert reductions(model) == reductions(model, "backward") == count
    assert set(plan_of(model).body_weights) == set(model.trainable_weights)
    for program in plan_of(model, "predict_function").programs:  # in inference nothing is reduced
        assert [stage.reductions for stage in program.forward] == [[]]
    head = plan_of(model).head.maker.fgraph
    assert "BatchNorm" not in " ".join(str(node.op) for node in head.apply_nodes)


def test_they_are_those_of_each_device_where_nobody_asks(float64):
    _, plain = trained(float64, lambda: dense(float64), False, rows=ROWS)
    model, parallel = trained(float64, lambda: dense(float64), True, rows=ROWS)
    assert largest_difference(plain, parallel) > 1e-3
    assert reductions(model) == 0


def test_layers_without_theanos_operation(float64, without_the_operation):
    """They are graphs of means and variances, which are always those of the whole batch."""
    layers = float64.layers

    def build():
        return float64.models.Sequential(
            [layers.Dense(6, input_shape=(8,)), layers.BatchNormalization(), layers.Dense(4)]
        )

    # The variance has a mean of its own.
    assert reductions(assert_split(float64, build, rows=ROWS)) == 3


def test_sequences_whose_length_differs_from_batch_to_batch(float64):
    layers = float64.layers

    def build():
        first = layers.Input(shape=(None, 8))
        hidden = layers.SimpleRNN(4, return_sequences=True)(layers.BatchNormalization()(first))
        hidden = layers.TimeDistributed(layers.BatchNormalization())(hidden)
        return float64.models.Model(first, layers.GlobalAveragePooling1D()(hidden))

    model = assert_split(float64, build, rows=(14, 2), sync_batch_norm=True)
    assert reductions(model) == 2


def test_a_layer_that_asks_by_itself(float64):
    layers = float64.layers

    class SyncBatchNormalization(layers.BatchNormalization):
        pass

    def build(kind):
        plain = layers.BatchNormalization()
        return float64.models.Sequential(
            [layers.Dense(6, input_shape=(8,)), kind(), layers.Dense(4), plain]
        )

    model, _ = trained(float64, lambda: build(SyncBatchNormalization), True, rows=(14, 2))
    assert reductions(model) == 1
    model, _ = trained(float64, lambda: build(layers.BatchNormalization), True, rows=(14, 2))
    assert reductions(model) == 0


def test_the_users_own_call_of_theanos_operation(float64):
    """Its results, and averages that it updates, are those of one device, unasked."""
    from theano.tensor.nnet import bn

    K, base = float64.backend, float64.layers.Layer

    class Own(base):
        def build(self, shape):
            self.averages = [
                self.add_weight(name=name, shape=(5,), initializer="ones", trainable=False)
                for name in ("mean", "variance")
            ]
            self.gamma = self.add_weight(name="gamma", shape=(5,), initializer="ones")
            super(Own, self).build(shape)

        def call(self, x):
            mean, variance = self.averages
            normalized, batch_mean, _, new_mean, new_variance = bn.batch_normalization_train(
                x, self.gamma, K.zeros_like(self.gamma), running_mean=mean, running_var=variance
            )
            self.add_update([(mean, new_mean), (variance, new_variance)], x)
            return normalized + 0.1 * batch_mean  # which has no gradient

    def build():
        layers = float64.layers
        return float64.models.Sequential(
            [layers.Dense(5, input_shape=(8,)), Own(), layers.Dense(4)]
        )

    model = assert_split(float64, build, rows=ROWS)
    assert reductions(model) == 1


def test_prediction_in_the_learning_phase_of_training(float64):
    """A function that was made for inference is made anew."""
    random, predictions = np.random.RandomState(0), []
    inputs = [random.normal(size=(rows, 8)) for rows in (14, 61)]
    for parallel in (False, True):
        model = initialise(dense(float64))
        if parallel:
            compat.parallelize(model, sync_batch_norm=True)
        model.compile("sgd", "mse")
        model.predict(inputs[0])
        predictions.append([
            _keras.inner_model(model).predict_function([batch, phase])[0]
            for batch, phase in zip(inputs * 2, (1.0, 1.0, 0.0, 1.0))
        ])  # fmt: skip
    assert largest_difference(*predictions) < 1e-10


def test_training_steps_are_verified(keras):
    """They are the same as those of one device but for rounding."""
    model = compat.parallelize(initialise(dense(keras)), sync_batch_norm=True)
    model.compile("sgd", "mse")
    record = verification_cases.verified(registry.load("theano"), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        model.train_on_batch(np.random.RandomState(0).normal(size=(14, 8)), np.ones((14, 4)))
    assert record.steps["train"] == 1 and record.compared > 10
