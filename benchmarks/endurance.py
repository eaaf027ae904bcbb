"""What grows in a process that trains again and again: with compat on two devices, and without.

    ROW/bin/python benchmarks/endurance.py [--fits 1000] [--undone 100]

Two processes do the same, one after the other: ``compat`` on two simulated devices, ``plain``
without compat. Growth is counted from a tenth of the way on, when everything has been built.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading

import numpy as np
from interleaved import MARK

for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["COMPAT_VERIFY"] = "0"


def import_keras():
    """Keras as the row has it (COMPAT_TEST_KERAS)."""
    import importlib

    return importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))


def counts(keras):
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {
        "resident KiB": resident // 1024,
        "objects": len(gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
    }
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.__version__.startswith("1."):
        graph = tf.get_default_graph()
        found["graph nodes"] = len(graph.get_operations())
    return found


def growth(keras, work, times):
    """Of so many times of ``work``, the first tenth left out."""
    first = times // 10 or 1
    for _ in range(first):
        work()
    before = counts(keras)
    for _ in range(times - first):
        work()
    return {name: value - before[name] for name, value in counts(keras).items()}


def one_process(kind, fits, undone):
    compat = None
    if kind == "compat":
        import compat

        compat.configure_gpu(simulate=2)
    keras = import_keras()
    model = keras.models.Sequential(
        [keras.layers.Dense(8, input_shape=(4,)), keras.layers.Dense(1)]
    )
    random = np.random.RandomState(0)
    x, y = random.normal(size=(8, 4)), random.normal(size=(8, 1))

    def prepared(gpus):
        if compat:
            compat.parallelize(model, gpus=gpus)
        model.compile("sgd", "mse")

    def fit():
        model.fit(x, y, batch_size=8, verbose=0)

    def there_and_back():
        for gpus in (2, 1):
            prepared(gpus)
            fit()

    prepared(2)
    return {
        "fits": growth(keras, fit, fits),
        "undone": growth(keras, there_and_back, undone),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--undone", type=int, default=100)
    parser.add_argument("--process", choices=["compat", "plain"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process:
        print(MARK + json.dumps(one_process(asked.process, asked.fits, asked.undone)))
        return
    found = {}
    for kind in ("plain", "compat"):
        command = [sys.executable, __file__, "--process", kind]
        command += ["--fits", str(asked.fits), "--undone", str(asked.undone)]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
        (line,) = [line for line in out.splitlines() if line.startswith(MARK)]
        found[kind] = json.loads(line[len(MARK) :])
    for what in ("fits", "undone"):
        print(
            "{} {}: ".format(getattr(asked, what), what)
            + ", ".join(
                "{} compat {:+d}, plain {:+d}".format(name, value, found["plain"][what][name])
                for name, value in sorted(found["compat"][what].items())
            )
        )
    print(MARK + json.dumps({"growth": found, "fits": asked.fits, "undone": asked.undone}))


if __name__ == "__main__":
    main()
