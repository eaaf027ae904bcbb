"""Batch normalization by the statistics of the whole batch: steps with and without, and its cost.

    python benchmarks/batch_norm.py --backend tensorflow1|tensorflow2|jax|theano|torch

Residual blocks on two simulated devices, with ``sync_batch_norm`` off and on, on one device, and
by the peer's means, in turn. The peer is ``BatchNormalization(synchronized=True)`` under
MirroredStrategy on TensorFlow 2. ``SyncBatchNorm`` of torch refuses CPUs, and the other backends
have nothing of the kind. JAX synchronizes always. Counted are the reductions of a step, and the
bytes that the second device sends and receives for them.
"""

import argparse
import functools
import importlib
import json
import os
import re

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("COMPAT_VERIFY", "0")

import numpy as np
import works
from interleaved import MARK, measure

import compat
from compat._runtime import patching

DEVICES = 2
ROWS = DEVICES * works.size(32)
SHAPE = (works.size(16), works.size(16), works.size(16))
LAYERS = 4  # of batch normalization


def build(keras, normalizes=True, **options):
    """Return residual blocks, whose layers of batch normalization have these options."""
    layers = keras.layers

    def normalized(value):
        return layers.BatchNormalization(**options)(value) if normalizes else value

    inputs = value = layers.Input(SHAPE)
    for _ in range(LAYERS // 2):
        before = value
        for number in range(2):
            value = layers.Conv2D(SHAPE[-1], (3, 3), padding="same", use_bias=False)(value)
            value = normalized(value)
            if number:
                value = layers.add([value, before])
            value = layers.Activation("relu")(value)
    value = layers.GlobalAveragePooling2D()(value)
    model = keras.models.Model(inputs, layers.Dense(1)(value))
    model.compile("sgd", "mse")
    return model


class Reductions:
    """Reductions of a step, and what the second device sends and receives for them.

    Attributes:
        forward, backward: how many reductions there are.
        sent, received: bytes.
    """

    def __init__(self):
        self.forward = self.backward = self.sent = self.received = 0

    def add(self, sent, received, is_backward=False):
        """Count a reduction of values that have a shape and a type."""
        self.backward += is_backward
        self.forward += not is_backward
        self.sent += sum(map(size_of, sent))
        self.received += sum(map(size_of, received))

    def per_layer(self):
        """Return these numbers for one layer."""
        return {name: count / LAYERS for name, count in vars(self).items()}


def size_of(value):
    """Return the bytes of a tensor or an array of any framework."""
    shape = [int(getattr(size, "value", size)) for size in value.shape]
    digits = re.search(r"\d+", str(value.dtype).rpartition(".")[2] or str(value.dtype)).group()
    return int(np.prod(shape, dtype=int)) * int(digits) // 8


# Each returns the ``Reductions`` of a step. ``make`` makes a model, and ``step`` trains it.


def tensorflow2(make, step):
    """Count while the step is traced; its gradient is another part of the same trace."""
    from compat._backends.tensorflow2 import reductions

    of_calls, merged = {}, reductions.BatchReductions._merged

    def counting(self, function, values):
        results, reduction = merged(self, function, values)
        found, backward = of_calls.setdefault(self, Reductions()), reduction.backward
        found.add(values[1], results)

        def counting_backward(upstream):
            gradients = backward(upstream)
            present = [[g for g in each[1] if g is not None] for each in (upstream, gradients)]
            found.add(*present, is_backward=True)
            return gradients

        reduction.backward = counting_backward
        return results, reduction

    with patching.replaced(reductions.BatchReductions, _merged=counting):
        step(make())
    return max(of_calls.values(), key=lambda found: found.backward)


def tensorflow1(make, step):
    """Count merged tensors of the graph; the gradient of each goes the same way back."""
    from compat._backends.tensorflow1 import reductions

    of_graphs, merge = {}, reductions.BatchReductions.merge

    def counting(self, placement, parts):
        merged = merge(self, placement, parts)
        found = of_graphs.setdefault(self, Reductions())
        found.add(parts[1:2], [merged])
        if merged.dtype.is_floating:
            found.add([merged], parts[1:2], is_backward=True)
        return merged

    with patching.replaced(reductions.BatchReductions, merge=counting):
        step(make())
    return max(of_graphs.values(), key=lambda found: found.forward)


def theano(make, step):
    """Count what a step reduces between the stages of its functions."""
    from compat._backends.theano import plan

    model, found, reduced = make(), Reductions(), plan.reduced
    step(model)

    def counting(how, parts, sizes):
        results = reduced(how, parts, sizes)
        found.add(parts[1], results[1], is_backward=how == "gradient")
        return results

    with patching.replaced(plan, reduced=counting):
        step(model)
    return found


def torch(make, step):
    """Count where replicas meet, and the gradients that autograd takes back from there."""
    from compat._backends.torch import reductions

    model, found, meet = make(), Reductions(), reductions.ReplicaReductions.meet
    step(model)

    def counting(self, values, merge, kind=None):
        results = meet(self, values, merge, kind)
        if self.turn is not None and self.turn.index == 1:
            found.add(values, results)
            differentiated = [value for value in results if value.requires_grad]
            for number, value in enumerate(differentiated):

                def sent(gradient, is_first=not number):
                    found.backward += is_first
                    found.sent += size_of(gradient)
                    found.received += size_of(gradient)

                value.register_hook(sent)
        return results

    with patching.replaced(reductions.ReplicaReductions, meet=counting):
        step(model)
    return found


def jax(make, step):
    """Count the sums over devices that XLA's program has more than without batch normalization."""
    from compat._backends.jax import programs

    def all_reduces(model):
        with programs.compiled() as compiled:
            step(model)
        texts = [module.to_string() for module, _ in compiled]
        return max((re.findall(r".* all-reduce(?:-start)?\(.*", t) for t in texts), key=len)

    found = Reductions()
    # Without weights of its own, whose gradients are summed in any case.
    models = make(scale=False, center=False), make(normalizes=False)
    for sign, model in zip((1, -1), models):
        for line in all_reduces(model):
            is_backward = "transpose(" in line
            found.forward += sign * (not is_backward)
            found.backward += sign * is_backward
            for shape in re.findall(r"f32\[([\d,]*)\]", line.partition(" all-reduce")[0]):
                found.sent += sign * 4 * int(np.prod([int(n) for n in shape.split(",") if n]))
    found.received = found.sent
    return found


COUNTS = {each.__name__: each for each in (jax, tensorflow1, tensorflow2, theano, torch)}


def peer(keras):
    """Return the peer's model."""
    tf = importlib.import_module("tensorflow")
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return build(keras, synchronized=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=sorted(COUNTS), required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    framework = arguments.backend.rstrip("12")
    os.environ["KERAS_BACKEND"] = framework
    compat.configure_gpu(simulate=DEVICES)
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
    random = np.random.RandomState(0)
    inputs = random.normal(size=(ROWS * arguments.steps, *SHAPE)).astype("float32")
    targets = random.normal(size=(len(inputs), 1)).astype("float32")

    def ours(is_asked, **options):
        return compat.parallelize(build(keras, **options), sync_batch_norm=is_asked)

    def fit(model, steps=arguments.steps):
        data = inputs[: steps * ROWS], targets[: steps * ROWS]
        model.fit(*data, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)

    models = {"one device": build(keras), "off": ours(False), "on": ours(True)}
    if arguments.backend == "tensorflow2":
        models["peer"] = peer(keras)
    candidates = {name: functools.partial(fit, model) for name, model in models.items()}
    found = measure(candidates, arguments.steps, arguments.rounds)
    best = {name: {kind: min(taken[kind]) for kind in taken} for name, taken in found.items()}
    for kind in ("wall", "cpu"):
        ratios = ["{} {:.2f}".format(name, best[name][kind] / best["off"][kind]) for name in best]
        print("{} per step, in times that with the option off: {}".format(kind, ", ".join(ratios)))
    counts = COUNTS[arguments.backend](functools.partial(ours, True), lambda m: fit(m, 1))
    counted = counts.per_layer()
    print("for each layer and step: {}".format(counted))
    published = {"steps": best, "counted": counted, "channels": SHAPE[-1]}
    print(MARK + json.dumps(published, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
