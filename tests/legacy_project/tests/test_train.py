import os

import numpy as np
import train


def test_trains_on_the_devices_that_are_simulated():
    assert len(train.configuration.devices) == int(os.environ["COMPAT_SIMULATE"])


def test_training_lowers_the_loss():
    _, history = train.train(epochs=3)
    losses = history.history["loss"]
    assert losses[-1] < losses[0]


def test_predictions_are_probabilities():
    model, _ = train.train(epochs=1)
    x, y = train.data(samples=7)
    predicted = model.predict(x)
    assert predicted.shape == y.shape
    assert np.allclose(predicted.sum(axis=1), 1, atol=1e-5)
