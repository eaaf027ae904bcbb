"""TensorFlow 1: stateful recurrent layers within others; each device has the states of its rows."""

import numpy as np
import pytest

import compat
from compat._backends.tensorflow1 import profiler
from compat.testing import initialise, largest_difference, slow, span

from .row_models import three_devices, warned  # noqa: F401  # the fixture
from .test_fetches import v1

ROWS = 7


def simple(keras, x):
    """Of few operations: the gradients of an LSTM's take TensorFlow 1 many seconds."""
    return keras.layers.Bidirectional(keras.layers.SimpleRNN(3, stateful=True))(x)


def bidirectional(keras, x):
    layers = keras.layers
    return layers.Bidirectional(layers.LSTM(3, stateful=True, implementation=2))(x)


def nested(recurrent):
    def nested(keras, x):
        inputs = keras.layers.Input(batch_shape=(ROWS, 3, 4))
        return keras.models.Model(inputs, recurrent(keras, inputs))(x)

    return nested


@pytest.mark.parametrize(
    "recurrent",
    [
        pytest.param(simple, marks=span),
        nested(simple),
        pytest.param(nested(bidirectional), marks=slow),
    ],
    ids=["simple", "nested", "nested and bidirectional"],
)
def test_stateful_rnns_within_other_layers_are_split(keras, recurrent):
    random = np.random.RandomState(0)
    batches = [(random.normal(size=(ROWS, 3, 4)), random.normal(size=(ROWS, 2))) for _ in range(3)]

    def trained(parallel):
        inputs = keras.layers.Input(batch_shape=(ROWS, 3, 4))
        outputs = keras.layers.Dense(2)(recurrent(keras, inputs))
        model = initialise(keras.models.Model(inputs, outputs))
        if parallel:
            compat.parallelize(model)
        model.compile("sgd", "mse")
        found = [np.array(model.train_on_batch(*batch)) for batch in batches]
        found += [model.predict(batch[0], batch_size=ROWS) for batch in batches]
        model.reset_states()
        with profiler.recorded(v1, output_partition_graphs=True) as runs:
            found.append(model.predict(batches[0][0], batch_size=ROWS))
        ran = profiler.partitions(max(runs, key=v1.RunMetadata.ByteSize))
        return found + model.get_weights(), set(profiler.products(ran))

    (plain, _), results = trained(False), []
    assert not warned(lambda: results.append(trained(True)))
    ((parallel, devices),) = results
    assert largest_difference(plain, parallel) < 1e-5
    assert devices == {f"/device:CPU:{i}" for i in range(3)}
