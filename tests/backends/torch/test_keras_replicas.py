"""Keras 3 on torch: state that is no mean over the rows, on three devices."""

import warnings

import numpy as np
import pytest
import torch

import compat
from compat._configuration import registry
from compat.testing import DEVICES

from .. import verification_cases
from ..verification_cases import verified
from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas

pytestmark = pytest.mark.usefixtures("devices")
ROWS = 13


def data():
    random = np.random.RandomState(ROWS)
    return random.normal(size=(ROWS, 4)).astype("float32"), random.normal(size=(ROWS, 2))


def trained(build, parallel, verify=0):
    """Train on one device or on three: losses, weights and state; the model; what was told."""
    import keras

    keras.utils.set_random_seed(0)
    model = build()
    if parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    if verify:
        record = verified(registry.find("torch"), model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        losses = [model.train_on_batch(*data()) for _ in range(3)]
        losses.append(model.evaluate(*data(), batch_size=ROWS, verbose=0))
    assert not verify or record.steps["train"] == 1
    told = [str(each.message) for each in caught if each.category is compat.CompatWarning]
    return losses + model.get_weights(), model, told


@pytest.mark.parametrize("verify", [0, 1])
def test_a_trainable_weight_that_a_call_sets_is_set_once(verify):
    """SpectralNormalization divides its kernel by the norm, from where it trains on."""
    from keras import Sequential, layers

    def build():
        spectral = layers.SpectralNormalization(layers.Dense(3))
        return Sequential([layers.Input((4,)), spectral, layers.Dense(2)])

    expected, _, _ = trained(build, False)
    found, model, told = trained(build, True, verify=verify)
    assert told == [
        "Model {!r} assigns to a trainable weight when it is called, and the devices share that "
        "weight. The model runs unsplit on cpu:0.".format(model.name)
    ]
    for one, other in zip(expected, found):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_state_that_is_set_to_a_constant():
    """First to the one that it has, later to another one."""
    import keras

    constant = [0.0]

    class Flag(keras.layers.Layer):
        def build(self, shape):
            self.flag = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.flag.assign(keras.ops.full((), constant[0]))
            return x

    model = keras.Sequential([keras.layers.Input((4,)), Flag(), keras.layers.Dense(2)])
    compat.parallelize(model)
    for constant[0] in (0.0, 0.0, 1.0, 1.0):
        model(data()[0])
        assert float(model.layers[0].flag) == constant[0]
    assert replicas(lambda: model(data()[0])) == DEVICES


def test_float8_has_the_largest_values_of_the_whole_batch():
    """Keras sets its history of them to its gradient."""
    from keras import Sequential, layers

    def build():
        model = Sequential([layers.Input((4,)), layers.Dense(2)])
        model.layers[0].quantize("float8")
        return model

    expected, _, _ = trained(build, False)
    found, _, (told,) = trained(build, True)
    assert " runs unsplit on " in told
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one, other)


def test_quantized_tables():
    import keras

    verification_cases.check_quantized_tables(keras)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_verified_step_takes_what_a_loader_gives(kind):
    """PyTorch's loaders make lists; with dropout, verification compares in inference, too."""
    import keras

    tensors = [torch.tensor(part, dtype=torch.float32) for part in data()]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*tensors),
        batch_size=ROWS,
        collate_fn=lambda rows: kind(torch.stack(part) for part in zip(*rows)),
    )

    layers = [keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = compat.parallelize(keras.Sequential(layers))
    record = verified(registry.find("torch"), model)
    model.compile("sgd", "mse")
    model.fit(loader, verbose=0)
    assert record.seen("train") == 1


@pytest.mark.parametrize("kind, steps", [("TimeDistributed", 4), ("LSTM", 2)])
def test_outputs_that_are_sequences(kind, steps):
    """Keras stacks the steps in front; a part may have as many rows as there are steps."""
    import keras

    layers = keras.layers

    def build():
        rows = layers.Input((3,))
        repeated = layers.RepeatVector(steps)(rows)
        if kind == "LSTM":
            return keras.Model(rows, layers.LSTM(2, return_sequences=True)(repeated))
        return keras.Model(rows, layers.TimeDistributed(layers.Dense(2))(repeated))

    plain = build()
    for gpus in (2, 3):
        model = build()
        model.set_weights(plain.get_weights())
        compat.parallelize(model, gpus=gpus)
        for count in (4, 5, 12):
            batch = np.random.RandomState(count).normal(size=(count, 3)).astype("float32")
            expected, found = (each.predict(batch, verbose=0) for each in (plain, model))
            assert found.shape == (count, steps, 2)
            np.testing.assert_allclose(found, expected, atol=1e-6)
