"""What a long-lived process gains by training a thousand times: memory, objects, threads, files.

    PYTHONPATH=. KERAS_BACKEND=torch python benchmarks/endurance.py --fits 1000 --undone 100

Two processes, side by side: one trains a tiny model on two simulated devices of compat's, the other
one with plain Keras. Each fits it so often, then does so with a model that is compiled anew each
time: in the process with compat after parallelize() on two devices, and on one again. What each has
gained is counted from a tenth of the way on, when caches are filled. One core for each process.
"""

import argparse
import gc
import json
import os
import subprocess
import sys

from interleaved import MARK


def count():
    """Return what this process holds, after a collection of unreferenced objects."""
    for _ in range(3):
        gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {
        "KiB": resident // 1024,
        "objects": len(gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        graph = tensorflow.compat.v1.get_default_graph()
        found["nodes"] = len(graph.get_operations())
    return found


def gained(times, act):
    """Return what a number of calls have added, from a tenth of them on."""
    first = max(1, times // 10)
    for _ in range(first):
        act()
    before = count()
    for _ in range(times - first):
        act()
    after = count()
    return {name: after[name] - before[name] for name in before}


def endure(candidate, fits, undone):
    if candidate == "compat":
        import compat

        compat.configure_gpu(simulate=2)
    import importlib

    import numpy as np

    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    x = np.random.RandomState(0).normal(size=(16, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    model = keras.models.Sequential(
        [keras.layers.Dense(4, activation="tanh", input_shape=(4,)), keras.layers.Dense(1)]
    )

    def fit():
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)

    def again():
        for gpus in (2, 1):
            if candidate == "compat":
                compat.parallelize(model, gpus=gpus)
            model.compile("sgd", "mse")
            fit()

    if candidate == "compat":
        compat.parallelize(model)
    model.compile("sgd", "mse")
    found = {"fits": gained(fits, fit), "undone": gained(undone, again)}
    if candidate == "compat":
        print(compat.report(), file=sys.stderr)  # did both devices work?
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--undone", type=int, default=100)
    parser.add_argument("--candidate", choices=["compat", "keras"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.candidate:
        found = endure(arguments.candidate, arguments.fits, arguments.undone)
        print(MARK + json.dumps(found), flush=True)
        return
    one = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
    environ = dict(os.environ, COMPAT_VERIFY="0", **one)
    started = {
        name: subprocess.Popen(
            [sys.executable] + sys.argv + ["--candidate", name],
            env=environ,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        for name in ("compat", "keras")
    }
    found = {}
    for name, process in started.items():
        printed, _ = process.communicate()
        if process.returncode:
            sys.exit("{} failed with exit status {}".format(name, process.returncode))
        (line,) = [line for line in printed.splitlines() if line.startswith(MARK)]
        found[name] = json.loads(line[len(MARK) :])
        for part, gain in sorted(found[name].items()):
            print("{:6} {:6} {}".format(name, part, json.dumps(gain, sort_keys=True)))
    times = {"fits": arguments.fits, "undone": arguments.undone}
    print(MARK + json.dumps({"times": times, "gained": found}, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
