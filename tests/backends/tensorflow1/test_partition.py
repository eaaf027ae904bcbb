"""TensorFlow 1: what runs once, of the whole batch, and what each replica runs."""

import numpy as np

import compat
from compat import _keras
from compat._backends.tensorflow1.graph import ancestors
from compat.testing import initialise, keras_under_test, largest_difference, span

from .row_models import (  # noqa: F401  # the fixture
    STEPS,
    layer_of,
    model_with,
    one_and_three,
    rows_of,
    three_devices,
    train_both,
    warned,
)
from .test_contract import whole_outputs


def accumulating(K):
    """Return kinds of state of layers, by any function of the whole batch."""

    def rows(x):
        return K.cast(K.shape(x)[0], "float32")

    return {
        "steps": ((), lambda state, x: K.update_add(state, 1.0)),
        "rows": ((), lambda state, x: K.update_add(state, rows(x))),
        "sum": ((), lambda state, x: K.update_add(state, K.sum(x))),
        "sums": ((3,), lambda state, x: K.update_add(state, K.sum(x, axis=0))),
        "squares": ((3, 3), lambda state, x: K.update_add(state, K.dot(K.transpose(x), x))),
        "mean": ((3,), lambda state, x: K.update(state, 0.9 * state + 0.1 * K.mean(x, axis=0))),
        "spread": ((3,), lambda state, x: K.update(state, K.sqrt(K.var(x, axis=0)))),
        "largest": ((), lambda state, x: K.update(state, K.maximum(state, K.max(x)))),
        "mean_by_hand": ((3,), lambda state, x: K.update(state, K.sum(x, axis=0) / rows(x))),
        "first": ((3,), lambda state, x: K.update(state, x[0])),
    }


def test_state_of_layers_is_computed_of_the_whole_batch(keras):
    """Sums add up, counters count once, means are means, and so is anything else."""
    states = sorted(accumulating(keras.backend).items())

    def call(layer, inputs):
        for name, (_, update) in states:
            layer.add_update([update(getattr(layer, name), inputs)], inputs)
        return inputs

    def build():
        shapes = {name: shape for name, (shape, _) in states}
        return model_with(keras, layer_of(keras, "with_state", call, **shapes))

    models = plain, _ = one_and_three(build)
    start = plain.get_weights()
    assert train_both(models) <= 1e-5
    changes = [abs(a - b).max() for a, b in zip(start, plain.get_weights())]
    # Each of them was updated; tf.keras of TensorFlow 1.12 alone leaves "spread" as it is.
    assert sorted(changes)[1] > 1e-3


def test_state_that_the_outputs_need_the_statistics_of(keras):
    """A mean that each replica takes of its rows; the state's is of all rows."""
    K = keras.backend

    def call(layer, x):
        mean, rows, largest = K.mean(x), K.cast(K.shape(x)[0], "float32"), K.max(x)
        updates = [
            K.update(layer.mean, mean),
            K.update_add(layer.rows, rows),
            K.update(layer.largest, K.exp(largest)),
        ]
        layer.add_update(updates, x)
        return x - mean + 0 * rows / largest

    def build():
        inputs = keras.layers.Input(shape=(4,))
        layer = layer_of(keras, "centered", call, mean=(), rows=(), largest=())
        return keras.models.Model(inputs, layer(inputs))

    assert train_both(one_and_three(build), steps=[13], columns=4) <= 1e-6


def test_number_of_rows_that_the_outputs_need_too(keras):
    """A replica needs that of its rows, the state that of all."""
    K = keras.backend

    def call(layer, x):
        rows = K.shape(x)[0]
        layer.add_update([K.update_add(layer.rows, K.cast(rows, "float32"))], x)
        return K.reshape(x, (rows, 3))

    models = one_and_three(lambda: model_with(keras, layer_of(keras, "counting", call, rows=())))
    start = models[1].get_weights()
    assert train_both(models) <= 1e-5
    changes = [after - before for after, before in zip(models[1].get_weights(), start)]
    assert any(np.allclose(change, sum(STEPS)) for change in changes)


@span
def test_metrics_of_layers(keras):
    """tf.keras: means over vectors of rows that do not divide."""
    if keras.__name__ == "keras" or not hasattr(keras.layers.Layer, "add_metric"):
        return  # it has none, or none that are means of batches
    K = keras.backend

    def call(layer, x):
        layer.add_metric(K.sum(K.square(x), axis=1), name="squares", aggregation="mean")
        return x

    def build():
        inputs = keras.layers.Input(shape=(4,))
        hidden = keras.layers.Dense(3, activation="tanh")(inputs)
        measured = layer_of(keras, "measuring", call)(hidden)
        model = keras.models.Model(inputs, keras.layers.Dense(2)(measured))
        model.add_metric(K.max(hidden), name="largest", aggregation="mean")
        return model

    models = one_and_three(build)
    results = [
        model.evaluate(rows_of(45), rows_of(45, 2), batch_size=13, verbose=0) for model in models
    ]
    assert len(results[0]) == 3
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
    histories = [
        model.fit(rows_of(45), rows_of(45, 2), batch_size=13, verbose=0, shuffle=False).history
        for model in models
    ]
    for name in histories[0]:
        np.testing.assert_allclose(histories[0][name], histories[1][name], rtol=1e-5)


@span
def test_outputs_without_rows_are_computed_of_the_whole_batch(keras):
    K, layers = keras.backend, keras.layers

    def build():
        inputs = layers.Input(shape=(4,))
        hidden = layers.Dense(3, activation="tanh")(inputs)
        functions = [K.sum, K.mean, K.std, K.max, lambda x: K.dot(K.transpose(x), x)]
        outputs = [layers.Lambda(f, output_shape=())(hidden) for f in functions]
        return keras.models.Model(inputs, outputs + [hidden])

    plain, parallel = initialise(build()), compat.parallelize(initialise(build()))
    found = [
        whole_outputs(keras, model, rows_of(rows)) for model in (plain, parallel) for rows in STEPS
    ]
    for expected, result in zip(found[: len(STEPS)], found[len(STEPS) :]):
        assert largest_difference(expected, result) <= 1e-5


def variational_autoencoder(keras):
    """As in Keras' examples, without noise: the loss needs tensors that no output does."""
    K, layers = keras.backend, keras.layers
    inputs = layers.Input(shape=(4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    mean, variance = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
    code = layers.Lambda(lambda mv: mv[0] + 0.1 * K.exp(0.5 * mv[1]))([mean, variance])
    encoder = keras.models.Model(inputs, [mean, variance, code])
    outputs = layers.Dense(4, activation="sigmoid")(encoder(inputs)[2])
    model = keras.models.Model(inputs, outputs)
    divergence = -0.5 * K.sum(1 + variance - K.square(mean) - K.exp(variance), axis=-1)
    loss = 4 * K.mean(K.square(inputs - outputs), axis=-1) + divergence
    model.add_loss(K.mean(loss))
    return model


if not _keras.wraps_a_model(keras_under_test().models.Sequential()):  # from 2.2: a loss alone

    def test_parts_that_only_a_loss_needs_are_divided(keras):
        models = plain, parallel = one_and_three(lambda: variational_autoencoder(keras), None)
        assert not warned(parallel._make_train_function)
        losses = [[model.train_on_batch(rows_of(n), None) for n in STEPS] for model in models]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
        assert largest_difference(plain.get_weights(), parallel.get_weights()) <= 1e-5
        part = vars(parallel)["_compat_functions"]._part.operations
        needed = ancestors([parallel.total_loss], ())[0]
        assert not [op for op in needed if op.type == "MatMul" and op not in part]
