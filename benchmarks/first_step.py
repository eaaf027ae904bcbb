"""How much of the first step on three simulated devices the trial of the model takes.

    python benchmarks/first_step.py --backend tensorflow1|tensorflow2|torch|mxnet|theano

The trial (see docs/how-it-works.md) takes no time afterwards: there is none.
"""

import argparse
import importlib
import json
import os
import time

import works
from interleaved import MARK

DEVICES = 3
WORKS = "dense", "conv", "lstm"

#: What each backend's trial runs in: module of ``compat``, class or None, names of functions.
TRIALS = {
    "mxnet": [("_rows.trial", None, "tried")],
    "tensorflow1": [("_backends.tensorflow1.trial", "ReplicasTrial", "__init__ differing")],
    "tensorflow2": [("_backends.tensorflow2.trial", "OpTrial", "follow")],
    "theano": [("_rows.trial", None, "tried")],
    "torch": [
        ("_backends.torch.replicas", "PartsTrial", "outcomes"),
        ("_backends.torch.propagation", None, "try_function"),
    ],
}


class Clock:
    """The seconds that functions take, those that they call included."""

    def __init__(self):
        self.seconds, self._depth, self._before = 0.0, 0, []

    def watch(self, owner, name):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        self._before.append((owner, name, function))
        setattr(owner, name, timed)

    def stop(self):
        for before in self._before:
            setattr(*before)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=sorted(TRIALS), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--work", choices=WORKS, action="append", help="default: all")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend.rstrip("12")
    import compat

    compat.configure_gpu(simulate=DEVICES, verify=0)
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    found = {}
    for work in arguments.work or WORKS:
        taken = [
            first_step(compat, keras, arguments.backend, work) for _ in range(arguments.rounds)
        ]
        found[work] = min(taken)
        print("{}: {:.2f} s, of which the trial {:.2f} s".format(work, *found[work]))
    print(MARK + json.dumps(found, sort_keys=True))


def first_step(compat, keras, backend, work):
    """Return the seconds of a model's first step, and those of the trial within."""
    getattr(keras.backend, "clear_session", int)()
    inputs, targets = works.data(work, DEVICES * works.WORKS[work][1])
    model = compat.parallelize(works.build(keras, work))
    model.compile("sgd", "mse")
    clock = Clock()
    for module, owner, names in TRIALS[backend]:
        module = importlib.import_module("compat." + module)
        owner = module if owner is None else getattr(module, owner)
        for name in names.split():
            clock.watch(owner, name)
    began = time.perf_counter()
    model.train_on_batch(inputs, targets)
    taken = time.perf_counter() - began
    clock.stop()
    return taken, clock.seconds


if __name__ == "__main__":
    main()
