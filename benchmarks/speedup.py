"""One device against several simulated ones, side by side in one run.

    python benchmarks/speedup.py [--devices 3] [--rounds 10] [--keras tensorflow.keras]

Simulated devices share the processor's cores, so the most to expect is the number of cores, and
nothing here proves placement: the tests do. Each device gets one thread for its operations.
"""

import argparse
import importlib
import os
import statistics
import time

import numpy as np

import compat

UNITS = 2000, 2000, 1000, 500, 1
BATCH, STEPS = 1024, 4


def build(keras):
    layers = [keras.layers.Dense(n, activation="relu") for n in UNITS[1:-1]]
    layers.insert(0, keras.layers.Dense(UNITS[0], activation="relu", input_shape=(UNITS[0],)))
    return keras.models.Sequential(layers + [keras.layers.Dense(UNITS[-1])])


def seconds_per_step(model, inputs, targets):
    began = time.perf_counter()
    model.fit(inputs, targets, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return (time.perf_counter() - began) / STEPS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--keras", default="tensorflow.keras")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(compat.configure_gpu(simulate=arguments.devices))
    keras = importlib.import_module(arguments.keras)
    random = np.random.RandomState(0)
    inputs = random.normal(size=(BATCH * STEPS, UNITS[0])).astype("float32")
    targets = random.normal(size=(BATCH * STEPS, UNITS[-1])).astype("float32")
    models = {}
    for devices in (1, arguments.devices):
        models[devices] = compat.parallelize(build(keras), gpus=devices)
        models[devices].compile("sgd", "mse")
        seconds_per_step(models[devices], inputs, targets)  # builds the graph

    times = {devices: [] for devices in models}
    for _ in range(arguments.rounds):
        for devices, model in models.items():
            times[devices].append(seconds_per_step(model, inputs, targets))
    for devices, taken in times.items():
        print(
            "{} device(s): median {:.3f} s a step of {} rows, best {:.3f} s".format(
                devices, statistics.median(taken), BATCH, min(taken)
            )
        )
    best = {devices: min(taken) for devices, taken in times.items()}
    print(
        "{} simulated devices are {:.2f} times as fast as one, on {} cores".format(
            arguments.devices, best[1] / best[arguments.devices], os.cpu_count()
        )
    )


if __name__ == "__main__":
    main()
