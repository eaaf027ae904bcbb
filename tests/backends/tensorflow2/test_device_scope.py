"""TensorFlow 2: parts of a model on devices of their own, by ``compat.device()``."""

import collections
import functools
import threading

import numpy as np
import pytest

import compat
from compat._backends.tensorflow2 import device_scope
from compat._backends.tensorflow2.configuration import short_name
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat._runtime import patching
from compat.testing import (
    DEVICES,
    initialise,
    keras_under_test,
    largest_difference,
    slow,
    span,
)

from ..messages import told
from .test_contract import (
    KERAS3,
    ROWS,
    TARGETS,
    TRAIN_STEP,
    train_in_a_new_graph,
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


# Functions that are run as one operation, and loops.
LOOPS = ("PartitionedCall", "StatefulPartitionedCall", "LoopCond")
WORDS = 3


def shared_lstm(keras, placed, unroll=True):
    """Return the Keras FAQ's example: two sequences encoded by one LSTM."""
    layers = keras.layers
    a, b = (layers.Input((WORDS, 8), name=name) for name in "ab")
    lstm, last = layers.LSTM(4, unroll=unroll, name="shared"), layers.Dense(1, name="last")
    if not placed:
        merged = layers.concatenate([lstm(a), lstm(b)], name="merged")
    else:
        with compat.device(1):
            encoded_a = lstm(a)
        with compat.device(2):
            encoded_b = lstm(b)
        with compat.device("cpu"):
            merged = layers.concatenate([encoded_a, encoded_b], name="merged")
    model = initialise(keras.models.Model([a, b], last(merged), name="tweets"))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


SEQUENCES = [np.random.RandomState(s).normal(size=(20, WORDS, 8)).astype("float32") for s in (4, 5)]
ENDS = np.random.RandomState(6).normal(size=(20, 1)).astype("float32")


@pytest.fixture(scope="module")
def placed(keras):
    """Return the placed model, trained, and the plain one, trained likewise."""
    models = [shared_lstm(keras, placed) for placed in (True, False)]
    for model in models:
        for _ in range(2):
            model.train_on_batch(SEQUENCES, ENDS)
    return models


@slow
@pytest.mark.row("device()")
def test_shared_lstm_on_two_devices_trains_to_the_same_numbers(placed):
    for found, expected in zip(*(model.get_weights() for model in placed)):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    predictions = [model.predict(SEQUENCES, verbose=0) for model in placed]
    np.testing.assert_allclose(*predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.row("device()")
@span
def test_shared_lstm_runs_forward_and_backward_where_it_was_placed(placed):
    model = placed[0]
    nodes = nodes_executed(lambda: train_in_a_new_graph(model, SEQUENCES, ENDS))
    found = products(nodes)
    assert found["/cpu:1"] == found["/cpu:2"], found
    assert found["/cpu:1"][0] >= WORDS and found["/cpu:1"][1] >= WORDS, found
    merges = {short_name(n.device) for n in nodes if n.op == "ConcatV2" and "merged" in n.name}
    assert merges == {"/cpu:0"}


@slow
@pytest.mark.row("device()")
def test_recurrent_loop_runs_where_it_was_placed(keras):
    if not TRAIN_STEP:
        with pytest.raises(compat.UnsupportedError, match="run the loop of layer 'shared'"):
            shared_lstm(keras, placed=True, unroll=False)
        return
    models = [shared_lstm(keras, placed, unroll=False) for placed in (True, False)]
    for model in models:
        nodes = nodes_executed(functools.partial(model.train_on_batch, SEQUENCES, ENDS))
        loops = collections.Counter(short_name(n.device) for n in nodes if n.op in LOOPS)
        devices = {"/cpu:1", "/cpu:2"} if model is models[0] else {"/cpu:0"}
        assert set(loops) == devices and len(set(loops.values())) == 1, loops
        assert all(count >= 2 for count in loops.values()), loops  # forward and backward
    assert largest_difference(*(model.get_weights() for model in models)) < 1e-6


@pytest.mark.row("device()")
def test_layers_run_on_the_device_of_the_innermost_context(keras):
    layers = keras.layers
    inputs = layers.Input((8,))
    with compat.device(1):
        hidden = layers.Dense(6)(inputs)
        with compat.device(2):
            hidden = layers.Dense(5)(hidden)
        outputs = layers.Dense(4)(hidden)
    model = keras.models.Model(inputs, layers.Dense(4)(outputs))
    model.compile("sgd", "mse")
    found = products(nodes_executed(lambda: train_in_a_new_graph(model, ROWS, TARGETS)))
    assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"}
    assert (found["/cpu:1"][0], found["/cpu:2"][0]) == (2, 1)


@pytest.mark.row("device()")
def test_threads_place_their_own_layers(keras):
    """The second thread enters device() before the first one leaves it, and leaves it later."""
    patches, found = patching.patches(), {}
    entered, left = ([threading.Event(), threading.Event()] for _ in range(2))

    def build(place):
        inputs = keras.layers.Input((8,))
        if place == 1:
            assert entered[0].wait(60)
        with compat.device(place):
            entered[place].set()
            assert entered[1].wait(60) and (place == 0 or left[0].wait(60))
            outputs = keras.layers.Dense(4)(inputs)
        left[place].set()
        found[place] = device_scope.placed_parts(keras.models.Model(inputs, outputs))

    threads = [threading.Thread(target=build, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ["/cpu:0"], 1: ["/cpu:1"]}
    assert patching.patches() == patches


def test_placed_model_is_saved_as_a_plain_one(keras, placed, tmp_path):
    model, plain = placed
    assert model.get_config() == plain.get_config()
    path = str(tmp_path / ("model.keras" if KERAS3 else "model.h5"))
    model.save(path)
    loaded = keras.models.load_model(path)
    found = loaded.predict(SEQUENCES, verbose=0)
    np.testing.assert_allclose(model.predict(SEQUENCES, verbose=0), found, atol=1e-6)
    assert not any("call" in vars(layer) for layer in loaded.layers if layer.name == "shared")


@slow
@pytest.mark.row("device()")
def test_replicas_run_parts_placed_before_and_say_so(keras):
    model, plain = shared_lstm(keras, True), shared_lstm(keras, False)
    with told() as texts:
        compat.parallelize(model)
    assert texts == [
        "Parts of tweets were placed on /cpu:0, /cpu:1, /cpu:2 by device(), but parallelize() runs "
        "all of it on each of /cpu:0, /cpu:1, /cpu:2. Leave out one of the two; "
        "parallelize(model, gpus=1) puts the parts back."
    ]
    found = products(nodes_executed(lambda: train_in_a_new_graph(model, SEQUENCES, ENDS)))
    plain.train_on_batch(SEQUENCES, ENDS)
    assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"} and len(set(found.values())) == 1, found
    for expected, weights in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(expected, weights, rtol=1e-5, atol=1e-6)
