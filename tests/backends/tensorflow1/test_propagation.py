"""TensorFlow 1: what depends on several rows of a batch, of which each replica sees a part."""

import re

import numpy as np
import pytest

import compat
from compat._rows import DOWNSTREAM, IN_BETWEEN
from compat._runtime.process import process
from compat.testing import largest_difference

from .row_models import (  # noqa: F401  # the fixture
    MIXED,
    assert_runs_unsplit,
    model_with,
    one_and_three,
    rows_of,
    three_devices,
    trained,
    warned,
)


def covariance(K, x):
    """Return products of columns, of all rows, with more elements than are reduced."""
    wide = K.concatenate([x] * 350)
    return 1e-5 * K.dot(K.transpose(wide), wide)


#: Costly operations on all rows, after which the batch is not split, or is.
ACROSS_ROWS = {
    "as_long": (lambda K, x: K.dot(x[1:], K.constant(np.eye(3))) + K.sum(x[:1]), DOWNSTREAM),
    "large": (lambda K, x: K.dot(K.concatenate([x] * 350), covariance(K, x)), IN_BETWEEN),
}


@pytest.mark.parametrize("name", sorted(ACROSS_ROWS))
def test_layers_across_rows_see_the_whole_batch(keras, name):
    """They run unsplit, which is said where it costs something."""
    K, layers = keras.backend, keras.layers
    function, scope = ACROSS_ROWS[name]

    def build():
        return model_with(keras, layers.Lambda(lambda x: function(K, x), name=name))

    def total(expected, found):  # of other sizes
        return K.sum(K.square(found)) - 0 * K.sum(expected)

    models = one_and_three(build, total)
    difference, texts = trained(models)
    assert difference <= 1e-5
    assert_runs_unsplit(texts, models[1], r"{}[_0-9]*/\S+".format(name), name, scope=scope)


def test_last_layer_across_rows_is_not_warned_of(keras):
    """All that is costly is divided."""
    K, layers = keras.backend, keras.layers

    def build():
        inputs = layers.Input(shape=(4,))
        hidden = layers.Dense(2, activation="tanh")(inputs)
        similar = layers.Lambda(lambda x: K.dot(x, K.transpose(x)))(hidden)
        return keras.models.Model(inputs, [similar, hidden])

    def loss(expected, found):
        return K.mean(K.square(found), axis=-1) - 0 * expected[:, 0]

    plain, parallel = one_and_three(build, loss)
    assert not warned(parallel._make_train_function)
    batch, targets = rows_of(13), [rows_of(13, 13), rows_of(13, 2)]
    losses = [model.train_on_batch(batch, targets) for model in (plain, parallel)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert largest_difference(plain.get_weights(), parallel.get_weights()) <= 1e-6
    found = [model.predict_on_batch(batch) for model in (plain, parallel)]
    assert largest_difference(*found) <= 1e-6


def test_no_false_alarms(keras):
    """Of the contract's models and of idioms no part runs unsplit, either: their tests see it.

    Each row of the outputs here is computed from that row, but for BatchNorm's.
    """
    K, layers = keras.backend, keras.layers
    inputs = layers.Input(shape=(6, 4))
    x = layers.Conv1D(5, 3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("softmax")(x)
    x = layers.TimeDistributed(layers.Dense(5))(x)
    x = layers.Dropout(0.1)(x)
    scores = layers.Permute((2, 1))(layers.Dense(6, activation="softmax")(x))
    x = layers.Lambda(lambda ab: K.batch_dot(ab[0], ab[1]))([scores, x])
    x = layers.Lambda(lambda x: x / K.sqrt(K.sum(K.square(x), axis=-1, keepdims=True)))(x)
    x = layers.SimpleRNN(3, return_sequences=True, go_backwards=True)(x)
    x = layers.concatenate([layers.GlobalMaxPooling1D()(x), layers.GlobalAveragePooling1D()(x)])
    x = layers.Dense(8)(x)
    x = layers.Reshape((2, 2, 2))(x)
    x = layers.BatchNormalization()(layers.Conv2D(2, 1)(x))
    x = layers.Flatten()(layers.UpSampling2D()(x))
    inner_inputs = layers.Input(shape=(32,))
    inner = keras.models.Model(inner_inputs, layers.BatchNormalization()(inner_inputs))
    model = compat.parallelize(keras.models.Model(inputs, layers.Dense(2)(inner(x))))
    model.compile("sgd", "mse")
    assert not warned(model._make_train_function)


def fixed_shapes(keras, x):
    K, layers = keras.backend, keras.layers
    x = layers.Lambda(lambda x: K.concatenate([x, K.zeros_like(x) + 0.5]))(x)
    x = layers.Lambda(lambda x: K.reshape(x, (K.shape(x)[0], 16)))(x)
    x = layers.Dense(7)(x)  # 7 rows, 7 columns
    x = layers.Lambda(lambda x: x * K.constant(np.arange(49).reshape(7, 7) / 50.0))(x)
    return layers.Dropout(0.5)(x)


def test_fixed_number_of_rows(keras):
    """tf.shape() and tf.zeros_like() are constants then."""

    def build():
        inputs = keras.layers.Input(batch_shape=(7, 2, 4))
        return keras.models.Model(inputs, keras.layers.Dense(2)(fixed_shapes(keras, inputs)))

    batch, targets = np.random.RandomState(3).normal(size=(7, 2, 4)), rows_of(7, 2)
    found = []
    for model in one_and_three(build):
        outputs = model.predict_on_batch(batch)
        found.append([outputs, np.array(model.test_on_batch(batch, targets))])
        assert np.isfinite(model.train_on_batch(batch, targets))
    assert largest_difference(*found) <= 1e-5


def test_sparse_adjacency(keras):
    """A graph's edges between all rows, and K.function on a sparse input."""
    from scipy import sparse

    K, layers = keras.backend, keras.layers
    if keras.__name__ != "keras" or keras.__version__.startswith("2.3"):
        return  # there a sparse input fails on one device: see test_sparse_input
    random = np.random.RandomState(0)
    edges, nodes = sparse.csr_matrix(random.rand(13, 13)), rows_of(13)

    def build():
        inputs = [layers.Input(batch_shape=(None, None), sparse=True), layers.Input(shape=(4,))]
        hidden = layers.Dense(3, activation="tanh")(inputs[1])
        product = layers.Lambda(lambda ab: K.dot(ab[0], ab[1]), output_shape=(3,))
        return keras.models.Model(inputs, layers.Dense(2)(product([inputs[0], hidden])))

    found = []
    for model in one_and_three(build):
        losses = [model.train_on_batch([edges, nodes], rows_of(13, 2)) for _ in range(2)]
        outputs = K.function(model.inputs, model.outputs)([edges, nodes])
        found.append([np.array(losses)] + outputs + model.get_weights())
    assert largest_difference(*found) <= 1e-5


def test_what_runs_unsplit_is_an_error_under_strict(keras, monkeypatch):
    monkeypatch.setattr(process.configuration.settings, "strict", True)
    large, _ = ACROSS_ROWS["large"]
    layer = keras.layers.Lambda(lambda x: large(keras.backend, x), name="similarity")
    _, parallel = one_and_three(lambda: model_with(keras, layer))
    with pytest.raises(compat.UnsupportedError) as raised:
        parallel.train_on_batch(rows_of(13), rows_of(13, 2))
    assert re.fullmatch(
        r"The operation similarity\S* \(MatMul\) in similarity \(test_propagation\.py, line \d+\) "
        "of '{}' {} It would have to run unsplit on /device:CPU:0, which strict=True makes an "
        r"error\. Compute it in the loss passed to compile\(\), which sees the whole batch; run "
        r"the model on one device, with parallelize\(model, gpus=1\); or drop strict=True\.".format(
            parallel.name, re.escape(MIXED)
        ),
        str(raised.value),
    )
