"""Placements that are inferred over a graph, of a Keras model or of a Gluon block."""

import numpy as np
import pytest

import compat
from compat._backends.mxnet import rules
from compat.testing import initialise, optimizer, span

from .. import graph_cases
from ..messages import told
from .gluon_models import MIXED, WHOLE, array, centred, one_contexts_numbers
from .gluon_models import mx as mx  # the fixture
from .keras_models import keras as keras  # the fixture
from .keras_models import lambda_model, unknown


def stateful(keras, fixed):
    """Return an LSTM that knows its batch size, beside an operation that may hold it, too."""
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


def test_a_loop_over_rows(keras):
    import mxnet as mx

    def function(x):
        sums, _ = mx.sym.contrib.foreach(
            lambda row, total: (row + total, row + total), x, mx.sym.zeros((5,))
        )
        return 0.1 * sums

    graph_cases.one_devices_numbers(keras, lambda: lambda_model(keras, function))


def test_operations_with_states_of_an_unknown_kind_run_unsplit(keras, monkeypatch):
    monkeypatch.setattr(rules, "MEANS", ())

    def build():
        layers = keras.layers
        normalization = layers.BatchNormalization(input_shape=(8,))
        return keras.models.Sequential([normalization, layers.Dense(4)])

    (text,) = graph_cases.one_devices_numbers(keras, build, rows=(13, 11))
    assert "needs the whole batch" in text


def test_shapes_for_one_number_of_rows_run_unsplit(keras):
    import mxnet as mx

    def build():  # for batches of 13 rows only
        return lambda_model(keras, lambda x: x + mx.sym.ones((13, 5)), name="fixed")

    texts = graph_cases.one_devices_numbers(keras, build, rows=(13, 13))
    assert texts == [unknown("fixed")]


def test_rows_along_another_axis_of_the_output_run_unsplit(keras):
    """As where ``x[0]`` keeps its axis, which it does on keras-mxnet alone."""
    import mxnet as mx

    texts = graph_cases.one_devices_numbers(
        keras, lambda: lambda_model(keras, lambda x: mx.sym.expand_dims(x, axis=0), "turned")
    )
    (text,) = texts
    assert text.partition("' ")[2] == (
        "needs the whole batch, but each device sees only its shard. It, and everything computed "
        "from it, runs unsplit on cpu(0)."
    )


@pytest.mark.row("Gluon Block")
@pytest.mark.parametrize("hybridize", [False, True])
@span
def test_operations_across_rows_run_unsplit(mx, hybridize):
    texts, net = one_contexts_numbers(mx, centred, hybridize=hybridize)
    operation = "{}_mean0".format(net[1].name)
    assert texts == [MIXED.format(operation, net.name) + WHOLE]
    devices = compat.report().devices
    before = [each.rows for each in devices]
    net(array(mx, 13))
    assert [a.rows - b for a, b in zip(compat.report().devices, before)] == [13, 0, 0]
