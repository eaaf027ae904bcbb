"""Keras 3 on torch: functions that are other ones in older versions of Keras 3."""

import sys
import types

import numpy as np
import pytest

from compat import _keras
from compat._keras import steps
from compat._ranks import losses
from compat._ranks.losses import Reductions
from compat.testing import keras_under_test

from .test_contract import devices  # noqa: F401  (a fixture)

SHARE, RANKS = 0.75, 2


@pytest.fixture
def keras(devices):  # noqa: F811
    return keras_under_test()


@pytest.fixture
def model(keras):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def reductions(model):
    engine = types.SimpleNamespace(place=types.SimpleNamespace(size=RANKS), unreached={})
    return Reductions(lambda: SHARE, None, model, engine)


def test_a_step_of_a_rank_counts_by_its_share(keras, model, reductions, monkeypatch):
    """Keras before 3.2 gives the loss of a step no weight."""
    monkeypatch.setattr(losses, "weighs_batches", lambda model: False)
    loss = keras.ops.convert_to_tensor(2.0)
    tracker = model._loss_tracker
    with reductions.within(keras):
        tracker.update_state(loss)
        tracker.update_state(loss, sample_weight=5)
    assert float(tracker.count.value) == SHARE * RANKS + 5
    assert float(tracker.total.value) == 2 * (SHARE * RANKS + 5)
    tracker.update_state(loss)
    assert float(tracker.count.value) == SHARE * RANKS + 5 + 1


def test_whether_keras_weighs_batches(keras, model, monkeypatch):
    """Told from its own steps, whatever a script derives from them."""

    class Old(type(model)):
        def train_step(self, data):
            self._loss_tracker.update_state(data)
            return self.compute_metrics(data, data, data, sample_weight=None)

    assert steps.weighs_batches(model) and steps.weighs_batches(Old([keras.layers.Dense(1)]))
    for kind in type(model).__mro__:
        for name, method in list(vars(kind).items()):
            if "_loss_tracker" in getattr(getattr(method, "__code__", None), "co_names", ()):
                monkeypatch.setattr(kind, name, Old.train_step)
    steps._weighs_batches.cache_clear()
    assert not steps.weighs_batches(model)
    steps._weighs_batches.cache_clear()


def test_sums_are_divided_where_keras_reduces_without_weights(keras, reductions, monkeypatch):
    """As ``reduce_values()`` is before Keras 3.7."""
    module = sys.modules[keras.losses.Loss.__module__]
    weighing = module.reduce_values

    def reduce_values(values, reduction="sum_over_batch_size"):
        return weighing(values, None, reduction)

    monkeypatch.setattr(module, "reduce_values", reduce_values)
    values = keras.ops.convert_to_tensor(np.arange(4.0, dtype="float32"))
    with reductions.within(keras):
        assert float(module.reduce_values(values, "sum")) == pytest.approx(6 / SHARE)
        assert float(module.reduce_values(values, "sum_over_batch_size")) == 1.5


def test_trees_are_those_of_dm_tree(keras, monkeypatch):
    """Keras before 3.1 has none."""
    monkeypatch.setitem(sys.modules, "tree", types.ModuleType("tree"))
    monkeypatch.delattr(keras, "tree", raising=False)
    assert _keras.tree_of(keras) is sys.modules["tree"]
