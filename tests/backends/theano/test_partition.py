"""Graphs of models that are cut where the whole batch is needed."""

import numpy as np
import pytest

import compat
from compat.testing import initialise

from .. import graph_cases
from . import test_contract, test_replicas
from .test_reductions import padded
from .test_replicated_function import assert_runs_unsplit
from .test_trial import whole

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def test_layers_before_stay_on_their_devices(keras):
    T = __import__("theano").tensor
    model = initialise(graph_cases.model_of(keras, lambda x: padded(T, T.dot(x[1:], T.eye(5)))))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    first, last = [model.layers[i].kernel for i in (0, 2)]
    plan = model.train_function.plan
    assert len(plan.programs) == 3
    assert first in plan.body_weights and last not in plan.used
    # Forward, and the gradients of its weights and of what the devices have computed.
    assert test_contract.number_of_products(plan.head) == 5


def test_outputs_that_are_sums(keras):
    K = keras.backend
    layers = keras.layers
    total = layers.Lambda(lambda x: K.sum(x, axis=0, keepdims=True), output_shape=(8,))
    model = keras.models.Sequential([layers.Activation("tanh", input_shape=(8,)), total])
    inputs = np.random.RandomState(0).normal(size=(13, 8))
    compat.parallelize(model)
    np.testing.assert_allclose(
        model.predict_on_batch(inputs), np.tanh(inputs).sum(axis=0, keepdims=True), rtol=1e-5
    )


def test_what_asks_for_the_number_of_rows_runs_unsplit(keras):
    from theano.tensor import gt
    from theano.tensor.opt import Assert

    checked = keras.layers.Lambda(lambda x: Assert("few")(x, gt(x.shape[0], 5)), (8,), name="check")
    first = keras.layers.Input(shape=(8,))
    model = keras.models.Model(first, checked(first), name="checked")
    line = "test_partition.py, line {}".format(checked.function.__code__.co_firstlineno)
    text = whole("Assert{msg='few'}", "checked", "layer 'check'", line)
    assert_runs_unsplit(model, np.ones((13, 8)), text)
