"""CPU seconds until a new model has been fitted for the first time, on two simulated devices.

    python benchmarks/first_fit.py --backend tensorflow1|tensorflow2|keras3|jax|mxnet|theano|torch

Of plain Keras, of a peer, and of compat without and with verification, in turn. Each round makes a
new model, compiles it and trains two small batches, in a process that has done so before: what is
measured is mostly building, tracing and compiling.
"""

import argparse
import functools
import importlib
import json
import os

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # programs that other processes have compiled

import replicas_tensorflow
import works
from interleaved import MARK, measure

import compat
from compat._configuration import registry

DEVICES = 2
WORKS = "small", "lstm"
#: What users of each backend have without compat; torch's DataParallel needs GPUs, Theano has none.
PEERS = {
    "tensorflow1": "multi_gpu_model",
    "tensorflow2": "MirroredStrategy",
    "keras3": "MirroredStrategy",
    "jax": "DataParallel",
    "mxnet": "keras-mxnet's contexts",
    "theano": None,
    "torch": None,
}


def peer(keras, backend, work, fit):
    """Build and fit the peer's model."""
    if backend == "tensorflow1":
        fit(replicas_tensorflow.multi_gpu_model(keras, work, DEVICES))
    elif backend == "mxnet":
        contexts = ["cpu({})".format(number) for number in range(DEVICES)]
        fit(works.build(keras, work), context=contexts)
    elif backend == "jax":
        devices = keras.distribution.list_devices()
        with keras.distribution.DataParallel(devices=devices).scope():
            fit(works.build(keras, work))
    else:
        with mirrored_strategy().scope():
            fit(works.build(keras, work))


@functools.lru_cache(maxsize=None)  # a second one would take the first one's sums for its own
def mirrored_strategy():
    return importlib.import_module("tensorflow").distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def candidates(keras, backend, work):
    """Name -> a function that makes a model and fits it for the first time."""
    rows = DEVICES * 16
    inputs, targets = works.data(work, 2 * rows)

    def fit(model, **options):
        model.compile("adam", "mse", **options)
        model.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)

    def ours(verifies):
        model = compat.parallelize(works.build(keras, work))
        if not verifies:
            name = "tensorflow2" if backend == "keras3" else backend
            registry.find(name).verify(model, None)
        fit(model)

    made = {
        "plain": lambda: fit(works.build(keras, work)),
        "peer": lambda: peer(keras, backend, work, fit),
        "compat": lambda: ours(False),
        "verified": lambda: ours(True),
    }
    if PEERS[backend] is None:
        del made["peer"]

    def anew(function):
        def run():
            getattr(keras.backend, "clear_session", int)()
            function()

        return run

    return {name: anew(function) for name, function in made.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=sorted(PEERS), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--work", choices=WORKS, action="append", help="default: all")
    arguments = parser.parse_args()
    framework = arguments.backend.rstrip("12")
    os.environ["KERAS_BACKEND"] = "tensorflow" if framework == "keras3" else framework
    compat.configure_gpu(simulate=DEVICES, verify=1)
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    found = {}
    for work in arguments.work or WORKS:
        measured = measure(candidates(keras, arguments.backend, work), 1, arguments.rounds)
        found[work] = {name: min(taken["cpu"]) for name, taken in measured.items()}
        print(work, ", ".join("{} {:.2f} s".format(*each) for each in found[work].items()))
    print(MARK + json.dumps(found, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
