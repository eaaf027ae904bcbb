"""Batches of steps that run in other threads, or several at once."""

import threading

import compat
from compat._runtime import work

from . import test_replicas
from .test_replicas import ROWS, TARGETS, check_same, small

keras = test_replicas.keras


def test_batches_of_other_threads_count_while_a_step_runs(keras):
    """Of other models, too."""

    class Waiting(keras.Sequential):
        def train_step(self, state, data):
            thread = threading.Thread(target=other.predict_on_batch, args=(ROWS[:9],))
            thread.start()
            thread.join()
            return super().train_step(state, data)

    model, other = (
        compat.parallelize(kind([keras.layers.Input((8,)), keras.layers.Dense(4)]))
        for kind in (Waiting, keras.Sequential)
    )
    model.compile("sgd", "mse", run_eagerly=True)
    before = sum(work.batches().values())
    model.train_on_batch(ROWS[:6], TARGETS[:6])
    assert sum(work.batches().values()) == before + 2


def test_several_batches_in_one_execution(keras):
    check_same(keras, lambda: small(keras), steps_per_execution=2)
