"""Building one model after another in a process: how much longer does the last one take?

    python benchmarks/many_models.py [--steps 8] [--rounds 2]

TensorFlow 1 keeps all models of a process in one graph, and takes longer for each next one. Each
candidate has processes of its own: plain Keras, compat on 3 simulated devices, multi_gpu_model.
"""

import argparse
import importlib
import json
import subprocess
import sys

import building
import replicas_tensorflow
import works
from interleaved import MARK

import compat

DEVICES = max(building.DEVICES)
CANDIDATES = "Keras", "compat", "multi_gpu_model"


def build(candidate, models):
    """Seconds that each model takes, its first step included."""
    compat.configure_gpu(simulate=DEVICES)
    keras = importlib.import_module("tensorflow.keras")

    def make():
        if candidate == "multi_gpu_model":
            return replicas_tensorflow.multi_gpu_model(keras, "lstm", DEVICES)
        model = works.build(keras, "lstm")
        return compat.parallelize(model) if candidate == "compat" else model

    building.seconds(keras, lambda: works.build(keras, "lstm"))  # TensorFlow's own start
    keras.backend.clear_session()
    return [building.first_step(make) for _ in range(models)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="how many models")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.candidate:
        print(MARK + json.dumps(build(arguments.candidate, arguments.steps)))
        return
    best = {}
    for _ in range(arguments.rounds):
        for name in CANDIDATES:
            command = [sys.executable] + sys.argv + ["--candidate", name]
            printed = subprocess.check_output(command, universal_newlines=True)
            (line,) = [line for line in printed.splitlines() if line.startswith(MARK)]
            taken = json.loads(line[len(MARK) :])
            best[name] = [min(pair) for pair in zip(taken, best.get(name, taken))]
    for name, taken in best.items():
        print("{:16} {}".format(name, " ".join("{:.2f}".format(each) for each in taken)))
    print(MARK + json.dumps(best, sort_keys=True))


if __name__ == "__main__":
    main()
