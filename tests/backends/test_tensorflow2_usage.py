"""TensorFlow 2: whether all devices were used, as TensorFlow itself reports it."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import backend, executions
from compat.testing import DEVICES, initialise, keras_under_test, span

from .messages import told

layers = keras_under_test().layers
ROWS = np.random.RandomState(0).normal(size=(11, 8)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def dense(keras, **options):
    parts = [layers.Input((8,)), layers.Dense(5, activation="tanh"), layers.Dense(4)]
    model = initialise(keras.models.Sequential(parts))
    model.compile("sgd", "mse", **options)
    return model


def steps(model):
    model.fit(ROWS, TARGETS, batch_size=4, epochs=2, verbose=0)
    model.evaluate(ROWS, TARGETS, verbose=0)
    model.predict(ROWS, verbose=0)


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_the_first_step_is_recorded_and_no_other(keras, eagerly, monkeypatch):
    """Also what runs eagerly; afterwards nothing is recorded."""
    recorders, noted = [], []
    note = executions.Recorder._note

    class Recorder(executions.Recorder):
        def __init__(self, devices):
            super().__init__(devices)
            recorders.append(self)

        def _note(self, *given):
            noted.append(self)
            note(self, *given)

    monkeypatch.setattr(executions, "Recorder", Recorder)
    model = compat.parallelize(dense(keras, run_eagerly=eagerly))
    with told() as texts:
        steps(model)
    assert not texts and len(recorders) == 3
    for each in recorders:
        assert list(each.counts) == ["/cpu:0", "/cpu:1", "/cpu:2"]
        assert not each.counts.is_known or all(each.counts.values())
    assert recorders[0].counts.is_known
    noted.clear()
    steps(model)
    assert not noted or not recorders[1].counts.is_known


def test_a_device_that_executes_nothing_is_named(keras):
    """TensorFlow runs what is placed on a GPU that is not there on the CPU."""
    model = dense(keras)
    devices = ["/cpu:0", "/cpu:1", "/gpu:0"]
    compat.parallelize(model)
    backend.parallelize(model, devices)
    from compat import _api

    _api._watch(backend, model, model.name, devices)
    with told() as texts:
        model.fit(ROWS, TARGETS, batch_size=4, epochs=2, verbose=0)
    assert texts == [
        "In the first training step of model {!r} (fit()) the framework executed no operation on "
        "/gpu:0, to which rows were given. The session, context or mesh in use has fewer devices "
        "than configure_gpu() has set up, or places operations elsewhere. Let compat configure it: "
        "leave out device_count, visible_device_list and the like.".format(model.name)
    ]
    compat.parallelize(model, gpus=1)


def test_a_trace_of_the_script_keeps_its_graph(keras, tmp_path):
    """``tf.summary.trace_on()`` has the runtime record as well, and what was taken is lost."""
    model = compat.parallelize(dense(keras))
    writer = tf.summary.create_file_writer(str(tmp_path))
    with warnings.catch_warnings(), writer.as_default():
        warnings.simplefilter("error", compat.CompatWarning)
        tf.summary.trace_on(graph=True)
        model.predict(ROWS, verbose=0)
        tf.summary.trace_export("predict", step=0)
    (events,) = tmp_path.iterdir()
    assert b"MatMul" in events.read_bytes()
