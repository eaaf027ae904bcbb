"""What models on Theano may compute of the rows of a batch."""

import numpy as np
import pytest

import compat
from compat import errors
from compat.testing import in_span, initialise, keras_under_test, span

from . import graph_cases, test_theano

profiles_not_printed = test_theano.profiles_not_printed


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=3)
    return keras_under_test()


def two_inputs(keras, function, columns=8):
    layers = keras.layers
    first, second = layers.Input(shape=(8,)), layers.Input(shape=(columns,))
    both = layers.Lambda(function, output_shape=(8,))([first, second])
    return keras.models.Model([first, second], both, name="two")


# Across rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    in_span(
        ["mean", "sum of all", "softmax", "softmax of the transposed", "reversed"],
        ["mean", "softmax"],
    ),
)
def test_what_computes_across_rows_gets_all_of_them(keras, name):
    function = graph_cases.across_rows(keras.backend)[name]
    texts = graph_cases.one_devices_numbers(
        keras, lambda: graph_cases.model_of(keras, function), rows=(13, 2)
    )
    assert len(texts) == 1
    begin, _, end = texts[0].partition(" computes")
    assert begin.startswith("The operation ")
    assert end == (
        " across the rows of a batch, of which each device has a part. It, and all that follows "
        "from it, runs on cpu:0 with the whole batch."
    )


@pytest.mark.parametrize("kind", ["pairs", "covariance", "sums so far", "sorted", "loop"])
def test_theanos_own_operations_across_rows(keras, kind):
    from theano import tensor

    K = keras.backend
    function = {
        "pairs": lambda x: K.dot(K.softmax(K.dot(x, K.transpose(x))), x),
        "covariance": lambda x: 0.1 * K.dot(x, K.dot(K.transpose(x), x)),
        "sums so far": lambda x: 0.1 * K.cumsum(x, axis=0),
        "sorted": lambda x: tensor.sort(x, axis=0),
        "loop": lambda x: x + 0.1 * K.foldl(lambda total, row: total + row, x, 0.0 * x[0]),
    }[kind]
    texts = graph_cases.one_devices_numbers(
        keras, lambda: graph_cases.model_of(keras, function), rows=(13, 2)
    )
    assert len(texts) == 1


@pytest.mark.parametrize("kind", ["table", "edges"])
def test_inputs_that_are_no_rows_of_samples(keras, kind):
    """As many as the batch has: a table to look up in, the edges between a graph's nodes."""
    K, random = keras.backend, np.random.RandomState(0)
    if kind == "table":
        model = two_inputs(keras, lambda p: K.gather(p[0], K.cast(K.flatten(p[1]), "int32")), 1)
        inputs = [random.normal(size=(13, 8)), random.permutation(13).reshape(13, 1)]
    else:
        model = two_inputs(keras, lambda p: K.dot(p[1], p[0]), 13)
        inputs = [random.normal(size=(13, 8)), random.normal(size=(13, 13))]
    expected = model.predict_on_batch(inputs)
    compat.parallelize(model)
    with pytest.warns(compat.CompatWarning, match="across the rows"):
        np.testing.assert_allclose(model.predict_on_batch(inputs), expected, rtol=1e-5, atol=1e-5)


def test_layers_before_stay_on_their_devices(keras):
    mean = graph_cases.across_rows(keras.backend)["mean"]
    model = initialise(graph_cases.model_of(keras, mean))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    first, last = [model.layers[i].kernel for i in (0, 2)]
    made = model.train_function
    assert len(made.forward) == 3
    assert first in made.body_weights and last not in made.used
    assert last in made.head_weights and first not in made.head_weights


@span
def test_layers_of_keras_compute_row_by_row(keras):
    """None of them is taken for an operation across rows, which would leave devices idle."""
    from compat._backends.theano import across_rows

    layers, K = keras.layers, keras.backend
    stacks = [
        [layers.Dense(4, input_shape=(5, 3)), layers.Activation("softmax")],
        [layers.Masking(input_shape=(5, 3)), layers.LSTM(4, return_sequences=True), layers.GRU(2)],
        [layers.Bidirectional(layers.LSTM(4, unroll=True), input_shape=(5, 3)), layers.Dense(2)],
        [layers.TimeDistributed(layers.Dense(4), input_shape=(5, 3)), layers.Flatten()],
        [
            layers.Embedding(10, 4, input_length=5),
            layers.SpatialDropout1D(0.2),
            layers.Permute((2, 1)),
            layers.Reshape((10, 2)),
            layers.Conv1D(4, 2, padding="causal"),
            layers.MaxPooling1D(),
            layers.GlobalAveragePooling1D(),
            layers.RepeatVector(3),
        ],
        [
            layers.ZeroPadding2D(input_shape=(9, 9, 3)),
            layers.Conv2D(4, 2, padding="same", strides=2),
            layers.BatchNormalization(axis=1),
            layers.AveragePooling2D(),
            layers.UpSampling2D(),
            layers.Flatten(),
            layers.GaussianNoise(0.1),
        ],
        [
            layers.Lambda(lambda x: x - K.mean(x, axis=1, keepdims=True), input_shape=(6, 3)),
            layers.Lambda(lambda x: K.cumsum(x, axis=1)),
            layers.Lambda(lambda x: x[:, ::-1]),
            layers.Lambda(lambda x: x[:, 1]),
            layers.Lambda(lambda x: K.l2_normalize(x, axis=-1)),
        ],
    ]
    models = [keras.models.Sequential(stack) for stack in stacks]
    queries, values = layers.Input(shape=(4, 3)), layers.Input(shape=(6, 3))
    weights = layers.Activation("softmax")(layers.Dot(axes=2)([queries, values]))
    found = layers.Dot(axes=(2, 1))([weights, values])
    models.append(keras.models.Model([queries, values], layers.Concatenate()([found, queries])))
    for model in models:
        assert not across_rows.mixed_rows(model.inputs, model.outputs), model.layers[-1].name


@pytest.mark.parametrize(
    "kind", in_span(["steps", "sum", "rows", "maximum", "mean"], ["steps", "sum"])
)
def test_states_are_those_of_one_device(keras, kind):
    texts = graph_cases.one_devices_numbers(
        keras, lambda: graph_cases.totals(keras, kind), rows=(13, 2)
    )
    assert bool(texts) == (kind != "steps")


@span
def test_losses_and_outputs_that_are_sums(keras):
    K = keras.backend
    assert not graph_cases.one_devices_numbers(
        keras, lambda: graph_cases.with_added_loss(keras), rows=(13, 2)
    )
    texts = graph_cases.one_devices_numbers(
        keras,
        lambda: graph_cases.model_of(keras, lambda x: x * 1.0),
        loss=lambda y, p: 0.1 * K.sum(K.square(y - p)),
        rows=(13, 2),
    )
    assert not texts
    layers = keras.layers
    total = layers.Lambda(lambda x: K.sum(x, axis=0, keepdims=True), output_shape=(8,))
    model = keras.models.Sequential([layers.Activation("tanh", input_shape=(8,)), total])
    inputs = np.random.RandomState(0).normal(size=(13, 8))
    compat.parallelize(model)
    np.testing.assert_allclose(
        model.predict_on_batch(inputs), np.tanh(inputs).sum(axis=0, keepdims=True), rtol=1e-5
    )


# What cannot be ---------------------------------------------------------------------------------


@span
def test_inputs_with_other_numbers_of_rows_are_refused(keras):
    K = keras.backend
    model = two_inputs(keras, lambda p: K.dot(K.softmax(K.dot(p[0], K.transpose(p[1]))), p[1]))
    inputs = [np.ones((6, 8)), np.ones((11, 8))]
    assert model.predict_on_batch(inputs).shape == (6, 8)
    compat.parallelize(model)
    with pytest.raises(compat.UnsupportedError) as error:
        model.predict_on_batch(inputs)
    problem = "its inputs have 6 and 11 rows"
    assert str(error.value) == str(errors.rows_cannot_be_cut("two", problem))


def test_errors_of_a_shard_say_that_the_batch_was_cut(keras):
    from theano.tensor import gt
    from theano.tensor.opt import Assert

    checked = keras.layers.Lambda(lambda x: Assert("too few rows")(x, gt(x.shape[0], 5)), (8,))
    first = keras.layers.Input(shape=(8,))
    model = keras.models.Model(first, checked(first), name="checked")
    inputs = np.ones((13, 8))
    assert model.predict_on_batch(inputs).shape == (13, 8)
    compat.parallelize(model)
    with pytest.raises(compat.UnsupportedError) as error:
        model.predict_on_batch(inputs)
    assert str(error.value) == str(errors.rows_cannot_be_cut("checked", "too few rows"))
