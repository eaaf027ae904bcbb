"""Building a model and its first step, on 1, 2 and 3 simulated devices of TensorFlow 1.

    python benchmarks/building.py [--rounds 4]

Each is measured in a graph of its own, in turn; the peer is ``multi_gpu_model`` of tf.keras.
"""

import argparse
import importlib
import json
import time

import replicas_tensorflow
import works
from interleaved import MARK

import compat

DEVICES = 1, 2, 3


def first_step(make):
    """Seconds of making a model, compiling it, and one step."""
    inputs, targets = works.data("lstm", 12)
    began = time.perf_counter()
    model = make()
    model.compile("sgd", "mse")
    model.train_on_batch(inputs, targets)
    return time.perf_counter() - began


def seconds(keras, make):
    """Of a ``first_step`` in a graph of its own."""
    keras.backend.clear_session()
    return first_step(make)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    arguments = parser.parse_args()

    compat.configure_gpu(simulate=max(DEVICES))
    keras = importlib.import_module("tensorflow.keras")

    def parallelized(devices):
        return lambda: compat.parallelize(works.build(keras, "lstm"), gpus=devices)

    makers = {str(devices): parallelized(devices) for devices in DEVICES}
    makers["multi_gpu_model"] = lambda: replicas_tensorflow.multi_gpu_model(
        keras, "lstm", max(DEVICES)
    )
    best = {}
    for number in range(arguments.rounds):
        for name, make in makers.items():
            taken = seconds(keras, make)
            # The first is TensorFlow's own start: it counts where there is no other.
            best[name] = taken if number < 2 else min(taken, best[name])
    for name, taken in best.items():
        print("{}: {:.2f} s, {:.2f} times one device's".format(name, taken, taken / best["1"]))
    print(MARK + json.dumps(best, sort_keys=True))


if __name__ == "__main__":
    main()
