"""JAX: batch normalization on ranks. See ``batch_norm_steps.py`` for steps of two ranks."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
from compat._backends.jax import batch_norm, ranked_programs
from compat._ranks.place import Place
from compat._runtime import synchronized
from compat._runtime.process import process
from compat.testing import DEVICES, keras_under_test

from .test_reductions import total


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def moments(keras, shards, layer, masks=None):
    """Return what each rank gets for its rows, computed in turn."""
    size = len(shards)
    places = [Place(rank, size, rank, size, "test") for rank in range(size)]
    masks = masks or [None] * len(shards)
    parts = []

    def note(kind, primals, values, is_weighted):
        parts.append(values)
        return values

    def rank(number, mark):
        return batch_norm._moments(
            keras, layer, places[number], mark, jnp.asarray(shards[number]), masks[number]
        )

    for number in range(len(shards)):
        rank(number, note)
    sums = [sum(values) for values in zip(*parts)]
    return [rank(number, lambda *_: sums) for number in range(len(shards))]


def test_moments_of_shards_are_as_stable_as_those_of_the_batch(keras):
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    x = np.random.RandomState(0).normal(1000, 0.1, size=(61, 3)).astype("float32")
    exact = x.astype("float64")
    for mean, variance in moments(keras, [x[:31], x[31:33], x[33:]], layer):
        np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance, exact.var(0), rtol=1e-3)


def test_a_rank_whose_rows_are_all_masked_counts_for_nothing(keras):
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2, 3))
    x = np.random.RandomState(0).normal(size=(5, 2, 3)).astype("float32")
    mask = np.arange(10).reshape(5, 2) < 6
    x[3:] = np.nan  # masked
    for mean, variance in moments(keras, [x[:3], x[3:]], layer, [jnp.asarray(mask[:3]), mask[3:]]):
        np.testing.assert_allclose(mean, x[:3].mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(variance, x[:3].var((0, 1)), rtol=1e-5)


@pytest.fixture
def model(keras):
    class Own(keras.layers.BatchNormalization):
        def call(self, x, training=None):
            return super().call(x, training=training)

    layers = [keras.layers.BatchNormalization(name="plain"), Own(name="own")]
    return keras.Sequential([keras.Input((3,)), *layers], name="model")


def text_of(warned):
    (said,) = warned
    return re.sub(r"line \d+", "line 1", str(said.message))


def test_layers_with_a_method_of_their_own_are_named(model):
    synchronized.ask(model, True)
    known = []
    with pytest.warns(compat.CompatWarning) as warned:
        for _ in range(2):  # the second time is silent
            layers = batch_norm.synchronizable(model, known)
            assert [layer.name for layer in layers] == ["plain"]
    assert text_of(warned) == (
        "Model 'model' is to normalize by the statistics of the whole batch "
        "(sync_batch_norm=True), which jax cannot do on several ranks: each rank uses those of its "
        "own samples in layer 'own'."
    )


def test_no_layer_is_synchronized_unless_that_is_asked_for(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batch_norm.requested(model) == []


def test_layers_in_loops_are_named_by_their_line(model, monkeypatch):
    def step(state, x, *_):
        return jax.lax.scan(lambda carry, _: (carry + total(x), None), 0.0, None, 2)[0]

    program = ranked_programs.Program(step, [], [], jnp.ones((3, 2)), 1.0, [])
    with pytest.warns(compat.CompatWarning) as warned:
        batch_norm.check(model, program)
    text = (
        "Batch normalization of model 'model' is called in jax.lax.scan() or the like in "
        "test_batch_norm.py, line 1: each rank uses the statistics of its own samples there, and "
        "not those of the whole batch."
    )
    assert text_of(warned) == text
    settings = type("Settings", (), {"strict": True})
    configuration = type("Configuration", (), {"settings": settings})
    monkeypatch.setattr(process, "configuration", configuration)
    with pytest.raises(compat.UnsupportedError) as refused:
        batch_norm.check(model, program)
    refusal = re.sub(r"line \d+", "line 1", str(refused.value))
    assert refusal.startswith(
        text + " strict=True makes that an error: run the model on one device"
    )
