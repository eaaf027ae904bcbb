"""TensorFlow 2 in v1 mode, in a process of its own; test_v1.py has all of it.

There it is configured after the mode was switched, here before.
"""

import pytest

from compat.testing import slow

SCRIPT = """
import numpy as np
import compat
report = compat.configure_gpu(simulate=3)
print(report.backend, report.devices)
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
own = tf.Session(config=tf.ConfigProto())
print(sum(device.device_type == "CPU" for device in own.list_devices()))
keras = tf.keras
layers = keras.layers
X = np.random.RandomState(1).normal(size=(45, 8)).astype("float32")
Y = np.random.RandomState(2).normal(size=(45, 4)).astype("float32")

def build():
    inputs = layers.Input((8,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    model = keras.models.Model(inputs, layers.Dense(4)(hidden))
    random = np.random.RandomState(0)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model

models = []
for parallel in (False, True):
    model = build()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    if parallel:
        assert compat.parallelize(model) is model
    model.fit(X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    models.append(model)
print(max(abs(a - b).max() for a, b in zip(*(m.get_weights() for m in models))) < 2e-6)
print(abs(models[0].predict(X) - models[1].predict(X)).max() < 2e-6)

model = models[1]
print("_compat_functions" in vars(model))
compat.parallelize(model, gpus=1)
print("_compat_functions" in vars(model))
"""


@pytest.mark.row("TensorFlow 2 in v1 mode")
def test_model_of_a_graph_trains_to_the_numbers_of_one_device(run):
    assert run(SCRIPT).splitlines() == [
        "tensorflow2 ['/cpu:0', '/cpu:1', '/cpu:2']",
        "3",
        "True",
        "True",
        "True",
        "False",
    ]


@slow
def test_graph_mode_with_second_control_flow_is_refused(run):
    """disable_eager_execution() alone leaves TensorFlow 2's loops in the graph."""
    script = """
    import os
    import tensorflow as tf
    import compat
    from compat.testing import keras_under_test

    compat.configure_gpu(simulate=3)
    tf.compat.v1.disable_eager_execution()
    keras = keras_under_test()
    inputs = keras.layers.Input((8,))
    model = keras.models.Model(inputs, keras.layers.Dense(2)(inputs))

    def refused():
        try:
            compat.parallelize(model)
        except compat.UnsupportedError as error:
            print(error)

    refused()
    for name, value in (("RANK", 0), ("SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 2)):
        os.environ["HOROVOD_" + name] = str(value)
    refused()
    """
    assert run(script).splitlines() == [
        "tensorflow2 cannot run a model on several devices after "
        "tf.compat.v1.disable_eager_execution(). Remove that call, or use TensorFlow 1.",
        "tensorflow2 cannot train as one of several ranks after "
        "tf.compat.v1.disable_eager_execution(). Remove that call.",
    ]
