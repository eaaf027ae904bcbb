"""A step of one batch on 1, 2, 3 and 4 simulated devices, side by side in one run.

    python benchmarks/scaling.py [--keras tensorflow.keras] [--rounds 10] [--steps 4]

Simulated devices share the processor's cores, so the most to expect is the number of cores, and
nothing here proves placement: the tests do. Each device gets one thread for its operations.
"""

import argparse
import importlib
import json
import os

import works
from interleaved import MARK, measure

import compat

DEVICES = 1, 2, 3, 4
BATCH = works.size(1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keras", default="tensorflow.keras")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()

    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    compat.configure_gpu(simulate=max(DEVICES))
    keras = importlib.import_module(arguments.keras)
    inputs, targets = works.data("dense", BATCH * arguments.steps)

    def trainer(devices):
        model = compat.parallelize(works.build(keras, "dense"), gpus=devices)
        model.compile("sgd", "mse")
        return lambda: model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)

    found = measure({n: trainer(n) for n in DEVICES}, arguments.steps, arguments.rounds)
    best = {devices: min(seconds["wall"]) for devices, seconds in found.items()}
    for devices in DEVICES:
        print(
            "{} devices: {:.0f} ms for {} rows, {:.2f} times as fast as one, on {} cores".format(
                devices, 1e3 * best[devices], BATCH, best[1] / best[devices], os.cpu_count()
            )
        )
    print(MARK + json.dumps(best, sort_keys=True))


if __name__ == "__main__":
    main()
