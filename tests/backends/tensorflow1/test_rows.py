"""TensorFlow 1: what depends on several rows of a batch, of which each replica sees a part."""

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _keras
from compat._backends.tensorflow1.graph import ancestors, v1_names
from compat._runtime.process import process
from compat.testing import (
    CASES,
    DEVICES,
    initialise,
    keras_under_test,
    largest_difference,
    slow,
    span,
)

from .. import graph_cases
from .test_contract import whole_outputs

v1 = v1_names(tf)
#: Rows of steps: even, uneven, fewer than devices.
STEPS = (12, 13, 2)


@pytest.fixture(name="keras")
def three_devices():
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    yield keras
    keras.backend.clear_session()


def rows_of(count, columns=4, seed=0):
    return np.random.RandomState(seed + count).normal(size=(count, columns)).astype("float32")


def one_and_three(build, loss="mse"):
    """Two models with the same weights, compiled, the second one on three devices."""
    plain, parallel = initialise(build()), compat.parallelize(initialise(build()))
    for model in (plain, parallel):
        model.compile("sgd", loss)
    return plain, parallel


def train_both(models, steps=STEPS, columns=2):
    """The largest difference between the models' weights and losses after some steps."""
    results = []
    for model in models:
        losses = [model.train_on_batch(rows_of(n), rows_of(n, columns, seed=7)) for n in steps]
        results.append(model.get_weights() + [np.array(losses)])
    return largest_difference(*results)


def warned(function):
    """The texts of compat's warnings while ``function`` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]


def trained(models, **options):
    """The largest difference of ``train_both()``, and the texts of compat's warnings."""
    differences = []
    texts = warned(lambda: differences.append(train_both(models, **options)))
    return differences[0], texts


MIXED = "computes across the rows of a batch, of which each device has a part."


def assert_runs_whole(texts, model, operation, layer, why=MIXED):
    """There is one warning, which names the operation, the layer and the line in this file."""
    (text,) = texts
    assert re.fullmatch(
        r"The operation {} \(\w+\) in {} \(test_rows\.py, line \d+\) of '{}' {} It, "
        r"and all that follows from it, runs on /device:CPU:0 with the whole batch\.".format(
            operation, layer, model.name, re.escape(why)
        ),
        text,
    )


def layer_of(keras, name, call, **state):
    """A layer whose outputs have the shape of its inputs.

    Arguments:
        call: takes the layer and the inputs, and gives the outputs.
        state: name of a variable -> its shape.
    """

    class Own(keras.layers.Layer):
        def build(self, input_shape):
            for each, shape in sorted(state.items()):
                options = {"initializer": "zeros", "trainable": False}
                setattr(self, each, self.add_weight(name=each, shape=shape, **options))
            super().build(input_shape)

        def call(self, inputs):
            return call(self, inputs)

        def compute_output_shape(self, input_shape):
            return input_shape

    return Own(name=name)


def model_with(keras, layer):
    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    return keras.models.Model(inputs, layers.Dense(2)(layer(hidden)))


# State ----------------------------------------------------------------------------------------


def accumulating(K):
    """What layers keep, by any function of the whole batch."""

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


def layer_that_waits(keras, value):
    """A layer that passes its input on when a variable has grown by a value, which it waits for."""

    def call(layer, x):
        with tf.control_dependencies([keras.backend.update_add(layer.state, value(x))]):
            return tf.identity(x)

    return layer_of(keras, "waiting", call, state=())


@pytest.mark.parametrize("what", ["steps", "sum"])
def test_write_that_a_call_waits_for_runs_once(keras, what):
    value = {"steps": lambda x: 1.0, "sum": keras.backend.sum}[what]
    models = one_and_three(lambda: model_with(keras, layer_that_waits(keras, value)))
    assert train_both(models) <= 1e-5


def test_write_of_a_call_that_depends_on_rows_runs_whole(keras):
    def value(x):
        return tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0))

    models = one_and_three(lambda: model_with(keras, layer_that_waits(keras, value)))
    difference, texts = trained(models)
    assert difference <= 1e-5
    assert_runs_whole(texts, models[1], r"waiting\S*", "waiting")


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


# Outputs --------------------------------------------------------------------------------------


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


#: One of those that tests/idioms and the table of operations have, and one besides.
ACROSS_ROWS = {
    "similarity": lambda K, x: K.dot(K.dot(x, K.transpose(x)), x),
    "conditional": lambda K, x: K.in_train_phase(lambda: x - K.mean(x, axis=0), lambda: x),
}


@pytest.mark.parametrize("name", sorted(ACROSS_ROWS))
def test_layers_across_rows_see_the_whole_batch(keras, name):
    """They, and all after them, run undivided, which is said where it costs something."""
    K, layers = keras.backend, keras.layers

    def build():
        layer = layers.Lambda(lambda x: ACROSS_ROWS[name](K, x), name=name)
        return model_with(keras, layer)

    models = one_and_three(build)
    difference, texts = trained(models)
    assert difference <= 1e-6
    assert_runs_whole(texts, models[1], r"{}[_0-9]*/\S+".format(name), name)


def paired(x):
    pairs = tf.range(tf.shape(x)[0]) // 2
    return tf.gather(tf.segment_mean(x, pairs), pairs)


def of_numpy(x):
    result = v1.py_func(lambda x: np.float32(np.eye(len(x))[::-1]), [x], "float32")
    return tf.matmul(tf.stop_gradient(tf.reshape(result, (tf.shape(x)[0],) * 2)), x)


@pytest.mark.parametrize("function", [of_numpy, paired])
def test_what_no_rule_knows_is_tried(keras, function):
    name = function.__name__

    def across(x):
        result = function(x)
        result.set_shape((None, 3))
        return result

    models = one_and_three(lambda: model_with(keras, keras.layers.Lambda(across, name=name)))
    difference, texts = trained(models)
    assert difference <= 1e-5
    (text,) = texts
    assert " in {} (test_rows.py, line ".format(name) in text
    assert "runs on /device:CPU:0 with the whole batch" in text


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
    """Of the contract's models and of idioms no part runs undivided, either: their tests see it.

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


# A fixed number of rows -----------------------------------------------------------------------


def fixed_shapes(keras, x):
    K, layers = keras.backend, keras.layers
    x = layers.Lambda(lambda x: K.concatenate([x, K.zeros_like(x) + 0.5]))(x)
    x = layers.Lambda(lambda x: K.reshape(x, (K.shape(x)[0], 16)))(x)
    x = layers.Dense(7)(x)  # 7 rows, 7 columns
    x = layers.Lambda(lambda x: x * K.constant(np.arange(49).reshape(7, 7) / 50.0))(x)
    return layers.Dropout(0.5)(x)


@pytest.mark.parametrize("mixes", [True, False])
def test_gradients_that_replace_tensorflows(keras, mixes):
    """By ``gradient_override_map``, as before there was ``tf.custom_gradient``."""
    name = "CompatTestsReplaced{}".format(mixes)
    v1.RegisterGradient(name)(lambda op, g: g / (tf.norm(g) + 1e-3) if mixes else -0.5 * g)

    def identity(x):
        with v1.get_default_graph().gradient_override_map({"Identity": name}):
            return tf.identity(x)

    def build():
        layer = keras.layers.Lambda(identity, output_shape=(3,), name="replaced")
        return model_with(keras, layer)

    models = one_and_three(build)
    difference, texts = trained(models)
    assert difference <= 1e-5
    why = (
        "has a gradient of its own that computes, or may compute, across the rows of a batch, of "
        "which each device has a part."
    )
    if mixes:
        assert_runs_whole(texts, models[1], r"replaced\S*", "replaced", why)
    else:
        assert texts == []


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


@pytest.mark.parametrize("mixes", [False, True])
def test_fixed_number_of_rows_is_tried(keras, mixes):
    """With all of its rows: a loop over time, and one over rows, which no rule tells."""

    def totals(x):
        if mixes:
            return tf.scan(lambda total, row: total + row, x)
        return tf.transpose(tf.scan(lambda total, step: total + step, tf.transpose(x)))

    def build():
        layers = keras.layers
        inputs = layers.Input(batch_shape=(7, 4))
        hidden = layers.Lambda(totals, output_shape=(4,))(inputs)
        return keras.models.Model(inputs, layers.Dense(2)(hidden))

    difference, texts = trained(one_and_three(build), steps=(7, 7))
    assert difference <= 1e-5
    assert len(texts) == mixes and all("runs on " in text for text in texts)


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


# Losses ---------------------------------------------------------------------------------------


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
        part = vars(parallel)["_compat_functions"]._replicas.part.operations
        needed = ancestors([parallel.total_loss], ())[0]
        assert not [op for op in needed if op.type == "MatMul" and op not in part]


@pytest.mark.parametrize(
    "kind",
    ["function", pytest.param("object", marks=slow), pytest.param("partial", marks=slow)],
)
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "tensorflow1", kind)


def test_what_runs_whole_is_an_error_under_strict(keras, monkeypatch):
    monkeypatch.setattr(process.configuration.settings, "strict", True)
    similarity = ACROSS_ROWS["similarity"]
    layer = keras.layers.Lambda(lambda x: similarity(keras.backend, x), name="similarity")
    _, parallel = one_and_three(lambda: model_with(keras, layer))
    with pytest.raises(compat.UnsupportedError) as raised:
        parallel.train_on_batch(rows_of(13), rows_of(13, 2))
    assert re.fullmatch(
        r"The operation similarity\S* \(MatMul\) in similarity \(test_rows\.py, "
        r"line \d+\) of '{}' {} It would have to run on /device:CPU:0 with the whole batch, which "
        r"strict=True makes an error\. Compute it in the loss passed to compile\(\), which sees "
        r"the whole batch; run the model on one device, with parallelize\(model, gpus=1\); or drop "
        r"strict=True\.".format(parallel.name, re.escape(MIXED)),
        str(raised.value),
    )


# Variables ------------------------------------------------------------------------------------


@span
def test_losses_that_begin_as_a_variable(keras):
    """As in Keras' examples deep_dream and neural_style_transfer."""
    K = keras.backend
    model = initialise(CASES["dense"].build(keras))
    loss, coefficient = K.variable(0.0), K.variable(3.0)
    before = loss
    loss += K.sum(K.square(model.output))
    loss -= 1.0
    loss *= coefficient
    loss /= 2.0
    assert loss is not before and isinstance(loss, tf.Tensor)
    gradients = K.gradients(loss, model.input)
    function = K.function([model.input], [loss] + gradients)
    batch, _ = CASES["dense"].data(13)
    outputs = model.predict(batch)
    value, gradient = function([batch])
    np.testing.assert_allclose(value, 1.5 * (np.square(outputs).sum() - 1), rtol=1e-5)
    assert np.shape(gradient) == batch.shape and np.abs(gradient).max() > 1e-4
    assert K.get_value(before) == 0.0


# Errors ---------------------------------------------------------------------------------------


def model_of_two(keras, function, second=None):
    layers = keras.layers
    first = layers.Input(shape=(4,))
    second = layers.Input(shape=(4,)) if second is None else layers.Input(tensor=second)
    hidden = [layers.Dense(4)(tensor) for tensor in (first, second)]
    model = keras.models.Model([first, second], layers.Lambda(function)(hidden))
    return compat.parallelize(initialise(model))


def test_inputs_of_different_rows(keras):
    """Refused where each replica would take a part of both, right where it does not."""
    K = keras.backend
    model = model_of_two(keras, lambda ab: ab[0] + 0 * ab[1])
    with pytest.raises(compat.UnsupportedError) as raised:
        model.predict_on_batch([rows_of(6), rows_of(3)])
    names = [tensor.name for tensor in model.inputs]
    assert str(raised.value) == (
        "parallelize() divides each input of model {!r} by its rows, but they do not have as many: "
        "{}. Give each input a row for each row of the batch, or use one device: "
        "parallelize(model, gpus=1).".format(
            model.name,
            ", ".join(sorted(map("{} has {}".format, names, (6, 3)))),
        )
    )

    def build():
        nodes, edges = keras.layers.Input(shape=(4,)), keras.layers.Input(batch_shape=(None, None))
        hidden = keras.layers.Dense(3, activation="tanh")(nodes)
        hidden = keras.layers.Lambda(lambda ab: K.dot(ab[0], ab[1]))([edges, hidden])
        return keras.models.Model([nodes, edges], keras.layers.Dense(2)(hidden))

    found = []
    for model in one_and_three(build):
        batch = [rows_of(13), rows_of(13, 13)]
        losses = [model.train_on_batch(batch, rows_of(13, 2)) for _ in range(2)]
        rectangular = [rows_of(13), rows_of(5, 13)]
        found.append([np.array(losses), model.predict_on_batch(rectangular)] + model.get_weights())
    assert found[1][1].shape == (5, 2)
    assert largest_difference(*found) <= 1e-5


def test_inputs_that_are_tensors_of_different_rows(keras):
    three = tf.identity(keras.backend.variable(rows_of(3)))
    model = model_of_two(keras, lambda ab: ab[0] + 0 * ab[1], three)
    np.testing.assert_equal(model.predict_on_batch(rows_of(3)).shape, (3, 4))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.predict_on_batch(rows_of(6))
    text = (
        "parallelize() divides each input of model {!r} by its rows, but they do not have as many. "
        "Give each input a row for each row of the batch, or use one device: parallelize(model, "
        "gpus=1). Rows:] [6] [3]".format(model.name)
    )
    assert text in str(raised.value).replace("\\'", "'")


@span
def test_inputs_that_are_variables_stay_on_one_device(keras):
    try:
        inputs = keras.layers.Input(tensor=keras.backend.variable(rows_of(3)))
    except (AttributeError, TypeError, ValueError):
        return  # by Keras itself
    model = keras.models.Model(inputs, keras.layers.Dense(2)(inputs))
    if isinstance(model.inputs[0], tf.Tensor):
        return  # Keras has taken its value
    assert warned(lambda: compat.parallelize(model)) == [
        "parallelize() leaves model {!r} on /device:CPU:0: an input of it is a variable, so its "
        "batches cannot be split. The numbers are those of one device, and so is the speed.".format(
            model.name
        )
    ]
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(None, rows_of(3, 2)))


def test_what_a_loss_takes_of_a_loop_is_of_the_whole_batch(keras):
    def call(layer, x):
        def step(count, total, rows):
            return count + 1, total + tf.reduce_sum(rows), 0.5 * rows

        _, total, rows = tf.while_loop(lambda count, *_: count < 3, step, [0, 0.0, x])
        layer.add_loss(0.01 * tf.square(total))
        return rows

    models = one_and_three(lambda: model_with(keras, layer_of(keras, "looping", call)))
    assert train_both(models) <= 1e-5


@span
def test_errors_of_tensorflow_tell_of_the_divided_batch(keras):
    """What takes a whole batch of 13 rows alone fails on a part of it."""

    def checked(x):
        whole = v1.Assert(tf.equal(tf.shape(x)[0] % 13, 0), ["not 13 rows"])
        with tf.control_dependencies([whole]):
            return tf.identity(x)

    layers = keras.layers
    inputs = layers.Input(shape=(4,))
    model = keras.models.Model(inputs, layers.Lambda(checked, output_shape=(4,))(inputs))
    model = compat.parallelize(model)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.predict_on_batch(rows_of(13))
    assert "replica_" in str(raised.value)
    assert (
        str(raised.value)
        .rstrip()
        .endswith(
            "\n\nparallelize() runs the operations named replica_... of a part of the batch. An "
            "operation that needs all rows, or a size that is the whole batch's, fails there: use "
            "sizes of its inputs, such as K.shape(x)[0], or one device: parallelize(model, gpus=1)."
        )
    )
    assert isinstance(raised.value.__cause__, tf.errors.InvalidArgumentError)
    with pytest.raises(Exception) as raised:
        model.predict_on_batch(rows_of(13, 5))
    assert "parallelize" not in str(raised.value)
