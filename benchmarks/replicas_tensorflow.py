"""A step on two simulated devices of TensorFlow with compat, and by Keras' own means.

    python benchmarks/replicas_tensorflow.py --work dense|conv|lstm|deep

The bound is the CPU time of the same batch on one device, spread evenly over a core per device.
The peer is ``multi_gpu_model`` on TensorFlow 1, and MirroredStrategy on TensorFlow 2, also under
Keras 3. COMPAT_TEST_KERAS names the Keras: keras, tensorflow.keras, tf_keras.
"""

import importlib
import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import works
from interleaved import measure, parser, publish

import compat

DEVICES = 2


def multi_gpu_model(keras, work, gpus=DEVICES):
    """Return the model of tf.keras' function of this name, with CPUs in place of GPUs."""
    module = importlib.import_module(keras.utils.multi_gpu_model.__module__)
    kinds = ["CPU:0"] + ["GPU:{}".format(place) for place in range(gpus)]
    module._get_available_devices = lambda: ["/device:" + kind for kind in kinds]
    device = module.ops.device

    def on_cpu(name):
        return device(name.replace("gpu", "cpu") if isinstance(name, str) else name)

    module.ops.device = on_cpu
    try:
        return keras.utils.multi_gpu_model(works.build(keras, work), gpus)
    finally:
        module.ops.device = device


def main():
    arguments = parser(__doc__).parse_args()

    compat.configure_gpu(simulate=DEVICES)
    tf = importlib.import_module("tensorflow")
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "tensorflow.keras"))
    model = compat.parallelize(works.build(keras, arguments.work))
    if tf.__version__.startswith("1."):
        name = "multi_gpu_model"
        peer = multi_gpu_model(keras, arguments.work)
        peer.compile("sgd", "mse")
    else:
        name = "MirroredStrategy"
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            peer = works.build(keras, arguments.work)
            peer.compile("sgd", "mse")
    model.compile("sgd", "mse")
    plain = works.build(keras, arguments.work)
    plain.compile("sgd", "mse")
    rows = DEVICES * works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)

    def trainer(each):
        return lambda: each.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)

    candidates = {"compat": trainer(model), name: trainer(peer), "one device": trainer(plain)}
    found = measure(candidates, arguments.steps, arguments.rounds)
    bound = min(found.pop("one device")["cpu"]) / DEVICES
    publish(found, bound, work=arguments.work)


if __name__ == "__main__":
    main()
