"""Graphs of Keras models cut in two: what runs on shards, and the rest."""

import numpy as np
import pytest

import compat
from compat.testing import initialise, optimizer, span

from .. import graph_cases
from .keras_models import keras as keras  # the fixture
from .keras_models import replicas_of


def test_layers_before_and_after_stay_on_their_devices(keras):
    """Only what follows from the operation across rows is the first device's alone."""
    mean = graph_cases.across_rows(keras.backend)["mean"]
    model = initialise(graph_cases.model_of(keras, mean))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    phase = replicas_of(model).phases["train"]
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
    first, *others = replicas_of(model).arrays
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
