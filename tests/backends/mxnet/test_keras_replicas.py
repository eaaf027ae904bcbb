"""Replicas of Keras models: inputs and training functions of unusual kinds."""

import types
import warnings

import numpy as np
import pytest

import compat
from compat import _keras
from compat._configuration import registry
from compat.testing import initialise, optimizer, span

from .. import graph_cases
from ..messages import told
from ..wrapped_models import old_sequential
from .gluon_models import check_same
from .keras_models import WHOLE, lambda_model, replicas_of
from .keras_models import keras as keras  # the fixture


def test_inputs_with_other_numbers_of_rows_run_unsplit(keras):
    """A model that reads a memory. keras-mxnet alone refuses it."""
    layers, K = keras.layers, keras.backend
    queries, memory = layers.Input(shape=(8,)), layers.Input(shape=(8,))
    whole = layers.Lambda(lambda pair: pair[0] + K.mean(pair[1], axis=0, keepdims=True))
    model = keras.models.Model([queries, memory], whole([queries, memory]), name="memory")
    compat.parallelize(model).compile("sgd", "mse")
    first, second = [np.random.RandomState(n).normal(size=(n, 8)) for n in (6, 11)]
    with told() as texts:
        for _ in range(2):
            found = model.predict_on_batch([first, second])
            np.testing.assert_allclose(found, first + second.mean(axis=0), atol=1e-6)
    assert texts == [WHOLE.format("memory", "needs", ".")]


@pytest.mark.parametrize("kind", ["target", "state", "channels_first"])
def test_what_has_rows_that_keras_does_not_feed(keras, kind):
    """MXNet's text of a number of rows that compat made up was shown."""
    K, layers = keras.backend, keras.layers

    def run(parallel):
        random, x, options = np.random.RandomState(0), layers.Input(shape=(4, 3)), {}
        if kind == "state":
            states = [K.zeros((13, 5)), K.zeros((13, 5))]
            y = layers.LSTM(5, unroll=True)(x, initial_state=states)
            y = layers.Dense(2)(y)
        else:
            y = layers.Dense(2)(layers.Flatten()(x))
        model = initialise(keras.models.Model(x, y))
        if kind == "target":
            options = {"target_tensors": [K.placeholder((None, 2))]}
        if parallel:
            compat.parallelize(model)
        loss = "mse"
        if kind == "channels_first":
            loss = lambda t, p: K.mean(K.square(K.permute_dimensions(t - p, (1, 0))), axis=0)  # noqa: E731
        inputs, targets = random.normal(size=(13, 4, 3)), random.normal(size=(13, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.compile(optimizer(keras, "sgd"), loss, **options)
            model.train_on_batch(inputs, targets)
        return model.get_weights()

    check_same(run)


def test_a_row_computed_for_an_empty_shard_gives_no_gradient(keras):
    """That of a loss layer comes from nowhere else, so no zeros from above take it away."""
    import mxnet as mx

    def run(parallel):
        model = initialise(lambda_model(keras, lambda x: mx.sym.make_loss(mx.sym.tanh(x))))
        if parallel:
            compat.parallelize(model)
        model.compile(optimizer(keras, "sgd"), "mse")
        random = np.random.RandomState(0)
        for rows in (2, 1, 4):
            model.train_on_batch(random.normal(size=(rows, 8)), random.normal(size=(rows, 4)))
        return model.get_weights()

    check_same(run, 1e-6)


@pytest.mark.parametrize("kind", ["function", "object"])
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "mxnet", kind)


def test_prediction_in_the_learning_phase_of_training(keras):
    graph_cases.check_prediction_in_the_learning_phase_of_training(keras, registry.find("mxnet"))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_scales_that_batch_normalization_sets_to_one(keras, rows):
    """With fewer rows than contexts the first one has none, and does not see them."""

    def run(parallel):
        layers = keras.layers
        model = keras.models.Sequential(
            [layers.BatchNormalization(input_shape=(4,)), layers.Dense(2)]
        )
        model.set_weights([np.full(w.shape, 0.5) for w in model.get_weights()])
        model.compile(optimizer(keras, "sgd"), "mse")
        if parallel:
            compat.parallelize(model)
        model.train_on_batch(np.ones((rows, 4)), np.zeros((rows, 2)))
        return model.get_weights()[0]

    assert run(False).tolist() == run(True).tolist() == [1] * 4


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("has_body", [False, True])
def test_scales_that_batch_normalization_of_the_head_sets_to_one(keras, rows, has_body):
    """The head sees them on the first context, even where that has no rows."""
    from keras import backend as K

    def run(parallel):
        layers = keras.layers
        first = [layers.Dense(4)] if has_body else []
        centred = layers.Lambda(lambda x: x - K.mean(x, axis=0, keepdims=True))
        model = keras.models.Sequential(
            [layers.InputLayer((4,))] + first + [centred, layers.BatchNormalization(scale=False)]
        )
        model.set_weights([np.full(w.shape, 0.5) for w in model.get_weights()])
        model.compile(optimizer(keras, "sgd"), "mse")
        if parallel:
            compat.parallelize(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.train_on_batch(np.ones((rows, 4)), np.zeros((rows, 4)))
        return model.get_weights()[2 * has_body]

    assert run(False).tolist() == run(True).tolist() == [1] * 4


def test_a_method_of_the_instance_is_there_again_on_one_device(keras):
    model = initialise(keras.models.Sequential([keras.layers.Dense(3, input_shape=(4,))]))
    synced, sync_weights = [], model._sync_weights
    model._sync_weights = lambda: synced.append(True) or sync_weights()
    compat.parallelize(model)
    model.predict(np.ones((6, 4)))
    compat.parallelize(model, gpus=1)
    del synced[:]
    model.get_weights()
    assert synced


def test_a_function_in_place_of_a_replaced_method_stays_on_one_device(keras):
    model = initialise(keras.models.Sequential([keras.layers.Dense(3, input_shape=(4,))]))
    compat.parallelize(model)
    made, make = [], model._make_predict_function
    model._make_predict_function = lambda: made.append(True) or make()
    inputs = np.ones((6, 4))
    before = model.predict(inputs)
    compat.parallelize(model, gpus=1)
    del made[:]
    np.testing.assert_allclose(model.predict(inputs), before, rtol=1e-5)
    assert made
    compat.parallelize(model)
    np.testing.assert_allclose(model.predict(inputs), before, rtol=1e-5)


@span
def test_a_model_within_a_model(keras):
    """Parallelized before or after it is compiled, which makes another model inside."""
    random, found = np.random.RandomState(0), []
    inputs, targets = random.normal(size=(11, 4)), random.normal(size=(11, 2))
    for when in ("never", "before", "after"):
        model = initialise(old_sequential(keras))
        if when == "before":
            compat.parallelize(model)
        for _ in range(2):
            model.compile(optimizer(keras, "sgd"), "mse")
        if when == "after":
            compat.parallelize(model)
        losses = [model.train_on_batch(inputs, targets) for _ in range(3)]
        found.append([np.array(losses), model.predict_on_batch(inputs)] + model.get_weights())
        if when != "never":
            assert len(replicas_of(model).phases["train"].bodies) == 3
            compat.parallelize(model, gpus=1)
            assert "_compat_replicas" not in vars(model) and "build" not in vars(model)
            model.compile("sgd", "mse")
            assert not hasattr(_keras.inner_model(model), "_compat_replicas")
    for several in found[1:]:
        for one, other in zip(found[0], several):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_contexts_are_chosen_by_a_method_of_models_before_keras_mxnet_2_2_4_2(keras, monkeypatch):
    from compat._backends.mxnet.keras_mxnet_fixes import default_contexts

    plain, model = default_contexts(), keras.models.Model
    chosen = staticmethod(lambda context: [context, "chosen"])
    monkeypatch.delattr(keras.backend.mxnet_backend, "_get_mxnet_context", raising=False)
    monkeypatch.setattr(model, "get_mxnet_context", chosen, raising=False)
    assert default_contexts() == [None, "chosen"] != plain


def test_weights_are_updated_one_by_one_before_mxnet_1_5(keras):
    from compat._backends.mxnet import optimizer_states

    calls = []
    updater = lambda *arguments: calls.append(arguments)  # noqa: E731
    optimizer_states.update(updater, {3: "gradient", 5: "other"}, ["weight", "second"])
    assert calls == [(3, "gradient", "weight"), (5, "other", "second")]
    counts = {3: 7}
    old = types.SimpleNamespace(_index_update_count=counts)
    assert optimizer_states.step_counts(old) == [counts]
