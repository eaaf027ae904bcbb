"""TensorFlow 1: parts of a model on devices of their own, by ``compat.device()``."""

import contextlib

import numpy as np
import pytest

import compat
from compat._backends._tensorflow.profiler import as_configured
from compat._backends.tensorflow1.profiler import partitions, products
from compat.testing import DEVICES, initialise, keras_under_test, optimizer, slow, span

from .test_contract import record


@pytest.fixture(name="configuration")
def three_configured_devices():
    return compat.configure_gpu(simulate=DEVICES)


@pytest.fixture(name="keras")
def keras_of_devices(configuration):
    keras = keras_under_test()
    yield keras
    keras.backend.clear_session()


def ran_on(configuration, model, inputs, targets):
    """Return the operations that one training step ran, by device."""
    ran = partitions(record(model, inputs, targets))
    return dict(zip(as_configured(ran, configuration.devices), ran.values()))


def placement_of(configuration, model, inputs, targets):
    return products(ran_on(configuration, model, inputs, targets))


def assert_close(arrays, others, tolerance):
    for array, other in zip(arrays, others):
        np.testing.assert_allclose(array, other, rtol=0, atol=tolerance)


def placed(which):
    """Return the scope of ``compat.device()``, or none."""
    return contextlib.ExitStack() if which is None else compat.device(which)


def siamese_data():
    random = np.random.RandomState(2)
    left, right = random.normal(size=(2, 32, 4, 3)).astype("float32")
    return [left, right], random.randint(2, size=(32, 1)).astype("float32")


def siamese_steps():
    """Single steps of these sequences."""
    sequences, targets = siamese_data()
    return [steps[:, 0] for steps in sequences], targets


@slow
@pytest.mark.row("device()")
def test_siamese_model_of_keras_faq(keras, configuration, siamese):
    """One layer encodes two sequences on two devices; merged and classified on a third."""
    inputs, targets = siamese_data()
    plain = siamese(None, None, None)
    model = siamese(0, 1, 2)
    for each in (plain, model):
        each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert_close(plain.get_weights(), model.get_weights(), 1e-6)
    devices = configuration.devices
    ran = ran_on(configuration, model, inputs, targets)
    placement = products(ran)
    assert placement[devices[0]] == placement[devices[1]]
    assert placement[devices[0]][0] >= 2 and placement[devices[0]][1] >= 3
    assert placement[devices[2]] == (1, 2)
    # No loop lies on two devices: it would wait for the other one at each step.
    loops = [
        (node.attr["frame_name"].s, device)
        for device, nodes in ran.items()
        for node in nodes
        if node.op == "Enter"
    ]
    assert len(set(loops)) == len({name for name, _ in loops}) == 4


@pytest.mark.row("device()")
@span
def test_merged_on_the_cpu(configuration, siamese):
    """The host is the first device here: what the CPU does is no branch's part."""
    inputs, targets = siamese_steps()
    model = siamese(1, 2, "cpu", layer="Dense")
    placement = placement_of(configuration, model, inputs, targets)
    devices = configuration.devices
    assert placement[devices[1]] == placement[devices[2]]
    assert placement[devices[0]] == (1, 2)


@slow
@pytest.mark.row("device()")
def test_parallelized_it_runs_unsplit_on_each_device(keras, configuration, siamese):
    inputs, targets = siamese_steps()
    plain, model = [siamese(*devices, layer="Dense") for devices in ([None] * 3, [0, 1, 2])]
    with pytest.warns(compat.CompatWarning) as warned:
        compat.parallelize(model, gpus=2)
    assert str(warned[0].message) == (
        "Parts of {} were placed on /device:CPU:0, /device:CPU:1, /device:CPU:2 by device(), "
        "but parallelize() runs all of it on each of /device:CPU:0, /device:CPU:1. Leave out "
        "one of the two; parallelize(model, gpus=1) puts the parts back.".format(model.name)
    )
    for each in (plain, model):
        each.train_on_batch(inputs, targets)
    assert_close(plain.get_weights(), model.get_weights(), 1e-6)
    placement = placement_of(configuration, model, inputs, targets)
    assert sorted(placement) == configuration.devices[:2]
    assert len(set(placement.values())) == 1
    compat.parallelize(model, gpus=1)
    assert sorted(placement_of(configuration, model, inputs, targets)) == configuration.devices


@pytest.fixture
def siamese(keras):
    def build(first, second, third, layer="SimpleRNN"):
        layers = keras.layers
        shape = (4, 3) if layer == "SimpleRNN" else (3,)
        left, right = layers.Input(shape=shape), layers.Input(shape=shape)
        encode = getattr(layers, layer)(3, activation="tanh")
        with placed(first):
            encoded_left = encode(left)
        with placed(second):
            encoded_right = encode(right)
        with placed(third):
            merged = layers.concatenate([encoded_left, encoded_right])
            outputs = layers.Dense(1, activation="sigmoid")(merged)
        model = initialise(keras.models.Model([left, right], outputs))
        model.compile(optimizer(keras, "sgd"), "binary_crossentropy")
        return model

    return build
