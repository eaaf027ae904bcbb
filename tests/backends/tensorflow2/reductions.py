"""Models trained on three devices and on one, and what warnings say of those that run unsplit."""

import contextlib
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import DEVICES, initialise, keras_under_test

from ..messages import told
from .test_contract import KERAS3, ROWS, TARGETS

keras_ = keras_under_test()
Layer = keras_.layers.Layer


@pytest.fixture(scope="module", name="keras")
def three_devices():
    compat.configure_gpu(simulate=DEVICES)
    return keras_


def rows_of(x):
    return tf.cast(tf.shape(x)[0], "float32")


class Adding(Layer):
    """Adds a loss of its inputs; ``loss`` makes it."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss_of = loss

    def call(self, x):
        self.add_loss(self.loss_of(x))
        return x


def adding(*losses):
    layers = keras_.layers
    inputs = layers.Input((8,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    for place, loss in enumerate(losses):
        hidden = Adding(loss, name="adding{}".format(place))(hidden)
    return keras_.models.Model(inputs, layers.Dense(4)(hidden), name="net")


def trained(
    build,
    x=ROWS,
    y=TARGETS,
    batch_size=16,
    eagerly=False,
    parallel=(False, True),
    optimizer=None,
    loss="mse",
):
    """Losses and weights of the plain model and of the parallel one; what optimizers keep, too."""
    results = []
    for is_parallel in parallel:
        model = initialise(build())
        if is_parallel:
            compat.parallelize(model)
        sgd = keras_.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer or sgd, loss, run_eagerly=eagerly)
        if KERAS3 and batch_size:  # its fit() traces a step twice
            losses = [model.train_on_batch(x[:batch_size], y[:batch_size]) for _ in range(2)]
        else:
            options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
            losses = model.fit(x, y, **options).history["loss"]
        results.append([np.array(losses)] + model.get_weights())
        if KERAS3:
            results[-1] += [variable.numpy() for variable in model.optimizer.variables]
    return results


def same(results, rtol=1e-5, atol=1e-6):
    assert len(results[0]) == len(results[1])
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=rtol, atol=atol)


@contextlib.contextmanager
def is_divided():
    """Within, no model says that it runs unsplit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        yield


@contextlib.contextmanager
def runs_unsplit(why="mixed"):
    """Within, one model says that it runs unsplit."""
    with told() as texts:
        yield texts
    assert len(texts) == 1 and re.fullmatch(WHY[why] + ON_ONE, texts[0]), texts


ON_ONE = r" The model runs unsplit on /cpu:0\."
PLACE = r"The operation \S+ \(\w+\)( in layer '\w+')? \(test_\w+\.py, line \d+\)"

WHY = {
    "mixed": PLACE + r" of '\w+' needs the whole batch, but each device sees only its shard\.",
    "fails": r"Model '\w+' fails on a shard of the batch, which is all that each device sees\.",
    "different": r"Model '\w+' needs the whole batch, but each device sees only its shard\.",
    "gradient": PLACE
    + r" of '\w+' has a custom gradient that needs, or may need, the whole batch, but each device "
    r"sees only its shard\.",
    "table": r"Model '\w+' looks up indices that depend on the batch and indices that do not in "
    r"the same table, and the gradients of the two cannot be separated\.",
    "unknown": r"Model '\w+' may need the whole batch, but each device sees only its shard: "
    r"compat has no rule for it, and cannot try it\.",
}
