"""Ranks on TensorFlow 1: Horovod."""

import os

import pages
import pytest
from conftest import ROOT

from compat.testing import keras_under_test, span
from compat.testing_ranks import RanksContract

from . import ranks

# The plain Adam of these, in one process, does not repeat: see test_tensorflow1.py.
KERAS = keras_under_test().__name__ == "keras"


@pytest.mark.row("ranks: Horovod")
class TestTensorFlow1Horovod(RanksContract):
    backend = "tensorflow1"
    # To the losses of single outputs (Keras 2.3, tf.keras) each batch counts as much, of 61 rows
    # or of 13.
    compared = 4
    if KERAS:
        trials = tuple(trial for trial in RanksContract.trials if "adam" not in trial)


WAYS = """
import tensorflow as tf

from compat._backends import tensorflow1


def ordered(adam):
    "Adam with the order of its step counter that it has in ranks."
    get_updates = adam.get_updates

    def get_updates_in_order(loss, params):
        with tensorflow1.reading_after_counting(adam.iterations):
            return get_updates(loss=loss, params=params)

    if compat.size() == 1:
        adam.get_updates = get_updates_in_order
    return adam


def trained(name, optimizer):
    layers = [dense(4, activation="tanh"), dense(1)]
    model = keras.models.Sequential(layers, name=name)  # not built before its first batch
    assert compat.parallelize(model) is model
    model.compile(optimizer, "mse")
    for start in range(0, len(inputs), rows):
        model.train_on_batch(inputs[start : start + rows], targets[start : start + rows])
    history = model.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
    said[name] = list(map(float, history.history["loss"]))
    weights[name] = model.get_weights()


trained("clips", keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05))
trained("adam", ordered(keras.optimizers.Adam(0.01)))
trained("is_of_tensorflow", tf.compat.v1.train.MomentumOptimizer(0.05, 0.9))
"""


@span
def test_any_optimizer_and_generators_train_to_the_same_numbers(tmp_path):
    said = ranks.check_same(WAYS + ranks.GENERATOR, tmp_path)
    assert said[0] == said[1]
    assert said[0]["evaluated"] == pytest.approx(said[0]["val_loss"][-1], abs=1e-6)


def test_mpirun_with_a_horovod_that_knows_no_mpi_is_an_error():
    program = "compat.parallelize(keras.models.Sequential([keras.layers.Dense(1)]))"
    assert ranks.refused_alone(program) == ranks.disagreement(2)


def test_page_of_one_gpu_to_many(tmp_path):
    assert pages.run(os.path.join(ROOT, "docs", "scaling.md"), tmp_path, os.environ) == 10
