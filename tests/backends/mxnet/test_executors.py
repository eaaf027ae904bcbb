"""Executors of Keras models: they have the weights of now, and are bound once for each shape."""

import numpy as np

import compat
from compat.testing import initialise, optimizer, span

from .keras_models import convolutional, replicas_of
from .keras_models import keras as keras  # the fixture


@span
def test_predicts_with_the_weights_of_now(keras):
    """Fused operations of oneDNN kept those of their first batch, on the first device."""
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
    bodies = replicas_of(model).phases["predict"].bodies
    model.train_on_batch(inputs, targets)
    model.predict(inputs)
    assert replicas_of(model).phases["predict"].bodies is bodies
