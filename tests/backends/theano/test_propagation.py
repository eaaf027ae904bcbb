"""Placements inferred over the graphs of models."""

import numpy as np
import pytest

from compat._rows import Reason
from compat.testing import slow, span

from .. import graph_cases
from . import test_contract, test_replicas
from .test_trial import named

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def graph_of(model):
    from compat._backends.theano import partition

    inputs = model.inputs
    shapes = [[size or 4 for size in v._keras_shape] for v in inputs]
    given = {v: np.zeros(shape) for v, shape in zip(inputs, shapes)}
    return partition.ModelGraph(model.outputs, inputs, given)


def recurrent(layers):
    return [
        [layers.Masking(input_shape=(5, 3)), layers.LSTM(4, return_sequences=True), layers.GRU(2)],
        [layers.Bidirectional(layers.LSTM(4, unroll=True), input_shape=(2, 3)), layers.Dense(2)],
        [layers.ConvLSTM2D(2, 2, input_shape=(3, 5, 5, 2))],
        [
            layers.TimeDistributed(layers.Dense(4), input_shape=(None, 3)),
            layers.LSTM(3, dropout=0.2, recurrent_dropout=0.2, go_backwards=True),
        ],
    ]


def all_others(layers):
    return [
        [layers.Dense(4, input_shape=(5, 3)), layers.Activation("softmax")],
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
            layers.GaussianDropout(0.1),
            layers.AlphaDropout(0.1),
            layers.BatchNormalization(scale=False, center=False),
            layers.PReLU(),
        ],
        [layers.SeparableConv2D(4, 3, input_shape=(5, 5, 3))],
        [
            layers.Conv2DTranspose(2, 3, strides=2, padding="same", input_shape=(5, 5, 3)),
            layers.Cropping2D(),
            layers.LocallyConnected2D(2, 3),
            layers.GlobalMaxPooling2D(),
        ],
        [layers.Conv3D(2, 2, input_shape=(4, 4, 4, 2)), layers.MaxPooling3D(), layers.Flatten()],
    ]


@pytest.mark.parametrize(
    "stacks", [pytest.param(all_others, marks=span), pytest.param(recurrent, marks=slow)]
)
def test_layers_of_keras_compute_row_by_row(keras, stacks):
    """None of them is taken for an operation across rows, which would leave devices idle."""
    layers, models = keras.layers, []
    for stack in stacks(layers):
        try:
            models.append(keras.models.Sequential(stack))
        except NotImplementedError:  # Keras before 2.1.4 has no separable convolution on Theano
            assert isinstance(stack[0], layers.SeparableConv2D)
    queries, values = layers.Input(shape=(4, 3)), layers.Input(shape=(6, 3))
    weights = layers.Activation("softmax")(layers.Dot(axes=2)([queries, values]))
    found = layers.Dot(axes=(2, 1))([weights, values])
    models.append(keras.models.Model([queries, values], layers.Concatenate()([found, queries])))
    for model in models:
        graph, name = graph_of(model), model.layers[-1].name
        assert graph.fallback(Reason.NO_RULE) is None, name
        cuts = [(cut.variable, cut.placement.axis) for cut in graph.cuts(model.outputs)]
        assert cuts == [(output, 0) for output in model.outputs], name


def test_the_shape_of_a_scalar_has_no_dimensions(keras):
    from theano.tensor import tensordot

    model = lambda: named(keras, lambda x: tensordot(x, 2.0, 0))[0]  # noqa: E731
    assert not graph_cases.one_devices_numbers(keras, model)
