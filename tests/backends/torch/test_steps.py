"""Keras 3 on torch: steps of one's own that call parts of a model, as keras.io's examples do."""

import warnings

import numpy as np
import pytest
import torch

import compat
from compat.testing import CASES, DEVICES, initialise

from .test_contract import devices, placement  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.row("subclassed models"), pytest.mark.usefixtures("devices")]
ROWS = CASES["dense"].data(45)[0]
NOISE = CASES["dense"].data(46)[0][:45, :4]


def dense(inputs, *units):
    import keras

    layers = keras.layers
    parts = [layers.Input((inputs,))]
    parts += [layers.Dense(unit, activation="tanh") for unit in units[:-1]]
    return initialise(keras.Sequential(parts + [layers.Dense(units[-1])]), seed=sum(units))


def update(model, loss, optimizer, part):
    """Have an optimizer update the weights of a part of a model."""
    model.zero_grad()
    loss.backward()
    weights = part.trainable_weights
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in weights], weights)


def adversarial():
    import keras

    class Adversarial(keras.Model):
        """keras.io's GAN; its noise comes with the data."""

        def __init__(self):
            super().__init__()
            self.discriminator, self.generator = dense(8, 6, 1), dense(4, 6, 8)
            self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
            self.optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
            self.built = True

        def train_step(self, data):
            real, noise = data
            rows = real.shape[0]
            combined = torch.cat([self.generator(noise), real])
            labels = torch.cat([torch.ones((rows, 1)), torch.zeros((rows, 1))])
            d_loss = self.loss_fn(labels, self.discriminator(combined))
            update(self, d_loss, self.optimizers[0], self.discriminator)
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(torch.zeros((rows, 1)), predictions)
            update(self, g_loss, self.optimizers[1], self.generator)
            return {"d_loss": d_loss, "g_loss": g_loss}

    return Adversarial()


def fitted(model, parallel, batch_size=16):
    if parallel:
        assert compat.parallelize(model) is model
    import keras

    model.compile(keras.optimizers.SGD(0.01))
    return model.fit(ROWS, NOISE, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)


def test_steps_that_call_parts_train_to_the_numbers_of_one_device():
    results = []
    for parallel in (False, True):
        model = adversarial()
        with warnings.catch_warnings():
            warnings.simplefilter("error", compat.CompatWarning)
            history = fitted(model, parallel).history
        results.append(model.get_weights() + [history[name] for name in sorted(history)])
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    counts = placement(lambda: model.fit(ROWS, NOISE, batch_size=45, verbose=0))
    assert len(counts) == DEVICES and len(set(counts.values())) == 1, counts


def test_a_step_that_calls_no_model_is_told_of():
    import keras

    class Layers(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8)
            self.hidden.build((None, 8))
            self.built = True

        def train_step(self, data):
            loss = ((self.hidden(data[0]) - data[0]) ** 2).mean()
            update(self, loss, self.optimizer, self)
            return {"loss": loss}

    with pytest.warns(compat.CompatWarning, match="ran on one device: its train_step"):
        fitted(Layers(), True)


def test_parts_are_plain_again_with_the_model():
    model = adversarial()
    fitted(model, True)
    compat.parallelize(model, gpus=1)
    assert placement(lambda: model.fit(ROWS, NOISE, batch_size=45, verbose=0)) == {}
    assert "call" not in vars(model.generator) and "make_train_function" not in vars(model)
