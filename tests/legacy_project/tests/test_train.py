import os

import numpy as np
import pytest
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


@pytest.mark.compat(simulate=2)
def test_two_devices_train_to_what_one_trains_to(compat_twins):
    twins = compat_twins(train.compiled)
    twins.fit(*train.data(), batch_size=61, epochs=2)
    assert len(twins.devices) == 2
    assert sorted(twins.worked) == sorted(train.configuration.devices)
