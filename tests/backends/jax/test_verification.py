"""Steps on several devices that are done again on one."""

import jax
import numpy as np

import compat
from compat._backends.jax import backend, verification
from compat.testing import DEVICES

from ..verification_cases import verified
from . import test_replicas
from .test_replicas import ROWS, TARGETS, small

keras = test_replicas.keras


def test_normalising_a_constant_column_is_no_false_alarm(keras):
    """The program for several devices rounds where that for one does not, by no deviation."""
    rows = np.tile(np.float32([[1, 5], [2, 5], [0, 0], [0, 0]]), (10, 1, 1))
    inputs = keras.layers.Input((None, 2))
    outputs = keras.layers.BatchNormalization()(keras.layers.Masking()(inputs))
    model = compat.parallelize(keras.Model(inputs, outputs))
    model.compile("rmsprop", "mse")
    record = verified(backend, model, 1)
    model.fit(rows, rows, batch_size=10, verbose=0)
    assert record.steps["train"] == 1
    assert list(record.incomparable) == ["weight {}".format(model.layers[2].gamma.path)]


def test_devices_share_no_memory_of_a_verified_step(keras, monkeypatch):
    model = keras.Sequential([keras.layers.Dense(64) for _ in range(6)])
    model.compile("sgd", "mse")
    record = verified(backend, compat.parallelize(model), 1)
    places, state_of = [], verification._Step._state

    def noted(step, shardings):
        state = state_of(step, shardings)
        for leaf in jax.tree_util.tree_leaves(state):
            places.append([each.data.unsafe_buffer_pointer() for each in leaf.addressable_shards])
        return state

    monkeypatch.setattr(verification._Step, "_state", noted)
    model.fit(np.ones((12, 64), "float32"), np.ones((12, 64), "float32"), batch_size=12, verbose=0)
    assert record.steps["train"] == 1 and max(map(len, places)) == DEVICES
    assert all(len(set(each)) == len(each) for each in places)


def test_a_verified_step_is_compiled_for_all_devices_and_for_one(keras, caplog):
    """What was compiled for all devices does the steps that follow, too."""
    model = compat.parallelize(small(keras))
    model.compile("sgd", "mse")
    record = verified(backend, model, 1)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        model.fit(ROWS[:32], TARGETS[:32], batch_size=16, epochs=2, verbose=0)
    assert record.steps["train"] == 1
    compiled = [each for each in caplog.messages if each.startswith("Compiling jit(train_step)")]
    # JAX may have forgotten one of them in a long process, and compile it again.
    assert ["NamedSharding" in each for each in compiled][:2] == [True, False]
    assert len(set(compiled)) == 2
