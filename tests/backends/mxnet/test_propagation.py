"""What models on MXNet may compute of the rows of a batch, and of what came before."""

import functools
import warnings

import numpy as np
import pytest

import compat
from compat import _rows
from compat._backends.mxnet import propagation, rules
from compat._configuration import registry
from compat.testing import initialise, optimizer, span

from .. import graph_cases
from ..messages import told
from . import test_device_scope
from .test_module import custom
from .test_native import check_same

keras = test_device_scope.keras  # the fixture


def lambda_model(keras, function, name=None):
    """A model with an operation of MXNet's own between two layers."""
    from keras.backend import mxnet_backend

    @mxnet_backend.keras_mxnet_symbol
    def wrapped(x):
        return mxnet_backend.KerasSymbol(function(x.symbol))

    layers = keras.layers
    first = layers.Input(shape=(8,))
    x = layers.Lambda(wrapped, output_shape=(5,))(layers.Dense(5)(first))
    return keras.models.Model(first, layers.Dense(4)(x), name=name)


# The size of batches in a graph -----------------------------------------------------------------


def stateful(keras, fixed):
    """An LSTM that knows its batch size, beside an operation that may hold it, too."""
    layers = keras.layers
    rows = layers.Input(batch_shape=(7, 4, 3))
    branch = layers.Dense(5)(layers.Flatten()(rows))
    if fixed:
        branch = layers.Dense(5)(layers.Reshape((12,))(rows))
    state = layers.LSTM(5, unroll=True, stateful=True)(rows)
    return initialise(keras.models.Model(rows, layers.Dense(2)(layers.add([branch, state]))))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_model_of_a_fixed_batch_size(keras, fixed):
    """Divided, unless its graph has that size: then it runs on one device, with a warning."""
    random = np.random.RandomState(0)
    inputs, targets = random.normal(size=(14, 4, 3)), random.normal(size=(14, 2))
    plain, parallel = stateful(keras, fixed), compat.parallelize(stateful(keras, fixed))
    with told() as texts:
        for model in (plain, parallel):
            model.compile(optimizer(keras, "sgd"), "mse")
            model.fit(inputs, targets, batch_size=7, epochs=2, shuffle=False, verbose=0)
    assert texts == fixed * [unknown(parallel.name)]
    for one, several in zip(plain.get_weights(), parallel.get_weights()):
        np.testing.assert_allclose(one, several, atol=1e-5)


# Weights that change between predictions --------------------------------------------------------


def convolutional(keras):
    layers = keras.layers
    first = layers.Conv2D(3, 2, padding="same", activation="relu", input_shape=(5, 5, 2))
    return keras.models.Sequential([first, layers.Flatten(), layers.Dense(1)])


@span
def test_predicts_with_the_weights_of_now(keras):
    """oneDNN's fused operations kept those of their first batch, on the first device."""
    random = np.random.RandomState(0)
    inputs = random.normal(size=(13, 5, 5, 2)).astype("float32")
    targets = random.normal(size=(13, 1)).astype("float32")
    model = initialise(convolutional(keras))
    # Plain models are bound for training, and never had the fault.
    plain = initialise(convolutional(keras))
    compat.parallelize(model)
    for each in (plain, model):
        each.compile(optimizer(keras, "sgd"), "mse")
    before = model.predict(inputs)
    histories = [
        each.fit(
            inputs, targets, batch_size=13, epochs=4, shuffle=False, verbose=0,
            validation_data=(inputs, targets),
        ).history["val_loss"]
        for each in (plain, model)
    ]  # fmt: skip
    np.testing.assert_allclose(*histories, rtol=1e-4)
    np.testing.assert_allclose(plain.predict(inputs), model.predict(inputs), atol=1e-5)
    assert np.abs(before - model.predict(inputs)).max() > 1e-2


def test_executors_are_bound_once_for_each_shape(keras):
    model = compat.parallelize(initialise(convolutional(keras)))
    model.compile("sgd", "mse")
    inputs, targets = np.ones((13, 5, 5, 2)), np.ones((13, 1))
    model.predict(inputs)
    bodies = model._compat_replicas.phases["predict"].bodies
    model.train_on_batch(inputs, targets)
    model.predict(inputs)
    assert model._compat_replicas.phases["predict"].bodies is bodies


# Across rows ------------------------------------------------------------------------------------


def test_a_loop_over_rows(keras):
    import mxnet as mx

    def function(x):
        sums, _ = mx.sym.contrib.foreach(
            lambda row, total: (row + total, row + total), x, mx.sym.zeros((5,))
        )
        return 0.1 * sums

    graph_cases.one_devices_numbers(keras, lambda: lambda_model(keras, function))


def test_layers_before_and_after_stay_on_their_devices(keras):
    """Only what follows from the operation across rows is the first device's alone."""
    mean = graph_cases.across_rows(keras.backend)["mean"]
    model = initialise(graph_cases.model_of(keras, mean))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    phase = model._compat_replicas.phases["train"]
    first, last = [model.layers[i].kernel.name for i in (0, 2)]
    assert all(first in body.grad_dict and last not in body.arg_dict for body in phase.bodies)
    assert last in phase.head.grad_dict and first not in phase.head.arg_dict


def test_a_first_layer_across_rows_leaves_all_to_the_first_device(keras):
    mean = graph_cases.across_rows(keras.backend)["mean"]

    def build():
        rows = keras.layers.Input(shape=(8,))
        return keras.models.Model(rows, keras.layers.Dense(4)(keras.layers.Lambda(mean)(rows)))

    graph_cases.one_devices_numbers(keras, build, rows=(13, 11), tolerance=1e-5)


def test_averages_behind_an_operation_across_rows(keras):
    """They are those of the whole batch, and the same for all replicas."""

    def build():
        mean = graph_cases.across_rows(keras.backend)["mean"]
        model = graph_cases.model_of(keras, mean)
        model.add(keras.layers.BatchNormalization(momentum=0.5))
        return model

    graph_cases.one_devices_numbers(keras, build, rows=(13, 11), tolerance=1e-4)
    model = compat.parallelize(initialise(build()))
    model.compile(optimizer(keras, "sgd"), "mse")
    inputs, targets = np.random.RandomState(0).normal(size=(13, 8)), np.ones((13, 4))
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(inputs, targets)
    first, *others = model._compat_replicas.arrays
    assert len(model._auxs) == 2
    for name in model._auxs:
        assert np.abs(first[name].asnumpy()).max() > 0
        for other in others:
            assert (first[name].asnumpy() == other[name].asnumpy()).all()


@span
@pytest.mark.parametrize("kind", ["steps", "sum"])
def test_states_are_those_of_one_device(keras, kind):
    texts = graph_cases.one_devices_numbers(keras, lambda: graph_cases.totals(keras, kind))
    assert bool(texts) == (kind != "steps")


# What is not known, what has other rows -----------------------------------------------------------

WHOLE = (
    "Model {!r} {}compute{} across the rows of a batch, of which each device has a part{} The "
    "model runs on cpu(0) with the whole batch."
)


def unknown(name):
    return WHOLE.format(name, "may ", "", ": compat has no rule for it, and cannot try it.")


@pytest.mark.parametrize("kind", ["rows", "mixed", "own"])
def test_operations_without_a_rule_are_tried(keras, kind, monkeypatch):
    """And divided, or left to the first device, as one with a gradient of the user's is."""
    import mxnet as mx

    known = {name: rule for name, rule in rules.RULES.items() if name != "softmax"}
    monkeypatch.setattr(rules, "RULES", known)
    function = functools.partial(mx.sym.softmax, axis=0 if kind == "mixed" else 1)
    if kind == "own":
        function = custom(mx, "compat_own", lambda gradient: 2 * gradient)
    build = functools.partial(lambda_model, keras, lambda x: function(x, name="it"), "own")
    reasons = {
        "own": "has a gradient of its own that computes, or may compute, across the rows of a "
        "batch, of which each device has a part.",
        "mixed": "gives other numbers for three rows of a batch together than for two of them and "
        "the third, and each device has a part of the batch.",
    }
    assert graph_cases.one_devices_numbers(keras, build) == [
        "The operation it of 'own' {} It, and all that follows from it, runs on cpu(0) with the "
        "whole batch.".format(reasons[kind])
        for _ in range(kind != "rows")
    ]


def test_operations_with_states_of_an_unknown_kind_run_whole(keras, monkeypatch):
    monkeypatch.setattr(propagation, "MEANS", ())

    def build():
        layers = keras.layers
        normalization = layers.BatchNormalization(input_shape=(8,))
        return keras.models.Sequential([normalization, layers.Dense(4)])

    (text,) = graph_cases.one_devices_numbers(keras, build, rows=(13, 11))
    assert "computes across the rows of a batch" in text


def test_a_rule_that_is_wrong_is_found_by_the_trial(keras, monkeypatch):
    """As for a table that errs: what three rows of the first batch give has the last word."""
    wrong = dict(rules.RULES, softmax=lambda op: _rows.pointwise(op.values))
    monkeypatch.setattr(rules, "RULES", wrong)
    function = graph_cases.across_rows(keras.backend)["softmax"]
    texts = graph_cases.one_devices_numbers(keras, lambda: graph_cases.model_of(keras, function))
    assert len(texts) == 1 and "gives other numbers for three rows of a batch together" in texts[0]


def test_inputs_with_other_numbers_of_rows_run_whole(keras):
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
    assert texts == [WHOLE.format("memory", "", "s", ".")]


def test_shapes_for_one_number_of_rows_run_whole(keras):
    import mxnet as mx

    def build():  # for batches of 13 rows only
        return lambda_model(keras, lambda x: x + mx.sym.ones((13, 5)), name="fixed")

    texts = graph_cases.one_devices_numbers(keras, build, rows=(13, 13))
    assert texts == [unknown("fixed")]


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


def test_rows_along_another_axis_of_the_output_run_whole(keras):
    """As where ``x[0]`` keeps its axis, which it does on keras-mxnet alone."""
    import mxnet as mx

    texts = graph_cases.one_devices_numbers(
        keras, lambda: lambda_model(keras, lambda x: mx.sym.expand_dims(x, axis=0), "turned")
    )
    (text,) = texts
    assert text.partition("' ")[2] == (
        "computes across the rows of a batch, of which each device has a part. It, and all that "
        "follows from it, runs on cpu(0) with the whole batch."
    )


@pytest.mark.parametrize("kind", ["function", "object"])
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "mxnet", kind)


def test_prediction_in_the_learning_phase_of_training(keras):
    graph_cases.check_prediction_in_the_learning_phase_of_training(keras, registry.find("mxnet"))
