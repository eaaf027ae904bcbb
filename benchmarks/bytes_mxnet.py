"""Bytes that cross contexts of MXNet in a training step and in predictions.

    python benchmarks/bytes_mxnet.py

Counted from what MXNet ran: each copy between arrays by its two contexts, the copies that return in
a backward pass, and what a ``Module`` gives to its ``KVStore`` and takes from it. For Gluon and
keras-mxnet the number of copies that each context sent is compared with the profiler's, which knows
only as many contexts as there are cores, and two.
"""

import argparse
import collections
import contextlib
import json
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "mxnet")

import numpy as np
from interleaved import MARK

import compat
from compat._backends.mxnet import executions, profiler
from compat._backends.mxnet.arrays import context_of

DEVICES = (2, 4, 8, 16)
WIDTH, INPUTS = 512, 16  # of layers; activations are small beside the weights


class Traffic:
    """The copies of a step.

    Attributes:
        sent, received: bytes between contexts, by the name of the context.
        copies: how many copies each context began, to itself too.
        operations: how many operations MXNet ran, where the profiler counted them.
    """

    def __init__(self):
        self.sent, self.received = collections.Counter(), collections.Counter()
        self.copies = collections.Counter()
        self.operations = 0

    def note(self, source, target, array):
        """Count a copy of an array from one context to another."""
        self.copies[source] += 1
        if source != target:
            size = array.size * np.dtype(array.dtype).itemsize
            self.sent[source] += size
            self.received[target] += size

    def busiest(self, weights):
        """Return the bytes that the busiest device sends and receives, by those of the weights."""
        devices = set(self.sent) | set(self.received)
        return tuple(
            round(max([counts[name] for name in devices - {"store"}] or [0]) / weights, 3)
            for counts in (self.sent, self.received)
        )


@contextlib.contextmanager
def observed(traffic):
    """Count copies within a block."""
    import mxnet as mx

    register, store = mx.nd.register, mx.kvstore.KVStore
    invoke, handle = register._imperative_invoke, executions._handle("_copyto")
    push, pull, backward = store.push, store.pull, mx.executor.Executor.backward

    def invoked(operation, inputs, *args, **kwargs):
        result = invoke(operation, inputs, *args, **kwargs)
        if operation == handle:
            array = result[0] if isinstance(result, list) else result
            source, target = str(context_of(inputs[0])), str(context_of(array))
            traffic.note(source, target, array)
            if is_recorded(array):  # the gradient of a copy is a copy
                traffic.note(target, source, array)
        return result

    def is_recorded(array):
        try:
            mx.autograd.get_symbol(array)
        except mx.base.MXNetError:  # it is not part of a graph
            return False
        return True

    def listed(arrays):
        return arrays if isinstance(arrays, (list, tuple)) else [arrays]

    def pushed(self, key, value, *args, **kwargs):
        for array in listed(value):
            traffic.note(str(context_of(array)), "store", array)
        return push(self, key, value, *args, **kwargs)

    def pulled(self, key, out=None, *args, **kwargs):
        for array in listed(out):
            traffic.note("store", str(context_of(array)), array)
        return pull(self, key, out, *args, **kwargs)

    def both(self, key, value, out=None, priority=0):
        pushed(self, key, value, priority)
        pulled(self, key, value if out is None else out, priority)

    def gone_back(self, out_grads=None, *args, **kwargs):
        for array in [] if out_grads is None else listed(out_grads):
            traffic.note(str(context_of(array)), str(context_of(array)), array)
        return backward(self, out_grads, *args, **kwargs)

    replaced = [
        (mx.executor.Executor, "backward", gone_back),
        (register, "_imperative_invoke", invoked),
        (store, "push", pushed),
        (store, "pull", pulled),
        (store, "pushpull", both),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            if hasattr(owner, name):  # pushpull: from MXNet 1.6 on
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def counted(step, is_checked):
    """Return the ``Traffic`` of a step.

    Arguments:
        step: a function.
        is_checked: whether to compare the number of copies with the profiler's.
    """
    import mxnet as mx

    traffic = Traffic()
    mx.nd.waitall()
    with observed(traffic):
        if not is_checked:
            step()
            return traffic
        with profiler.recorded() as events:
            step()
    ran = collections.Counter()
    for operation in profiler._executed(events, "cpu"):
        traffic.operations += operation.name != "DeleteVariable"
        ran[operation.device] += operation.name.startswith("Copy")
    assert +ran == traffic.copies, (ran, traffic.copies)
    return traffic


def calls(step):
    """Return how many Python functions a step calls."""
    count = collections.Counter()
    sys.setprofile(lambda frame, event, argument: count.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return count["call"]


def gluon(devices):
    """Return the bytes of a block's weights, and its steps by kind."""
    import mxnet as mx

    net = mx.gluon.nn.HybridSequential()
    for width in (INPUTS, WIDTH, WIDTH, WIDTH):
        net.add(mx.gluon.nn.Dense(WIDTH, activation="tanh", in_units=width))
    net.add(mx.gluon.nn.Dense(1, in_units=WIDTH))
    net.initialize()
    compat.parallelize(net, gpus=devices)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    inputs = mx.nd.ones((devices, INPUTS))

    def train():
        with mx.autograd.record():
            loss = net(inputs).square().mean()
        loss.backward()
        trainer.step(1)

    def predict():
        net(inputs).asnumpy()

    weights = sum(4 * int(np.prod(p.shape)) for p in net.collect_params().values())
    return weights, {"train": train, "evaluate": predict, "predict": predict}


def keras(devices):
    """Return the bytes of a Keras model's weights, and its steps by kind.

    Its predictions follow ``set_weights()``: in training all contexts get the new weights.
    """
    import keras

    dense = keras.layers.Dense
    layers = [dense(WIDTH, input_shape=(INPUTS,))] + [dense(WIDTH) for _ in range(3)] + [dense(1)]
    model = compat.parallelize(keras.models.Sequential(layers), gpus=devices)
    model.compile("sgd", "mse")
    inputs, targets = np.ones((devices, INPUTS)), np.ones((devices, 1))

    def train():
        model.train_on_batch(inputs, targets)
        model.set_weights(model.get_weights())

    steps = {
        "train": train,
        "evaluate": lambda: model.test_on_batch(inputs, targets),
        "predict": lambda: model.predict_on_batch(inputs),
    }
    return 4 * model.count_params(), steps


def module(devices, store="local"):
    """Return the bytes of a Module's weights, and its steps by kind."""
    import mxnet as mx

    x = mx.sym.var("data")
    for number in range(4):
        x = mx.sym.FullyConnected(x, num_hidden=WIDTH, name="dense{}".format(number))
    x = mx.sym.LinearRegressionOutput(
        mx.sym.FullyConnected(x, num_hidden=1, name="last"), mx.sym.var("label"), name="out"
    )
    model = compat.parallelize(mx.mod.Module(x, label_names=["label"]), gpus=devices)
    model.bind([("data", (devices, INPUTS))], [("label", (devices, 1))])
    model.init_params()
    model.init_optimizer(kvstore=store)
    batch = mx.io.DataBatch([mx.nd.ones((devices, INPUTS))], [mx.nd.ones((devices, 1))])

    def train():
        model.forward_backward(batch)
        model.update()

    def predict():
        model.forward(batch, is_train=False)
        model.get_outputs()[0].asnumpy()

    weights = sum(4 * array.size for array in model.get_params()[0].values())
    return weights, {"train": train, "evaluate": predict, "predict": predict}


def device_module(devices):
    """Return the same of a Module whose KVStore is "device"."""
    return module(devices, "device")


BUILDS = {"Gluon": gluon, "keras-mxnet": keras, "Module": module, "Module, device": device_module}


def measured(name, devices):
    """Return what the busiest device sends and receives, by the weights; and the calls of a step.

    Arguments:
        name: a key of ``BUILDS``.
        devices: their number.
    """
    weights, steps = BUILDS[name](devices)
    for _ in range(2):  # later steps are alike
        for step in steps.values():
            step()
    found, is_checked = {}, devices <= os.cpu_count() + 2 and not name.startswith("Module")
    for kind in ("train", "evaluate", "predict"):
        if kind != "train":
            steps["train"]()
        for batch in ("first", "later"):
            traffic = counted(steps[kind], is_checked)
            found[kind, batch] = traffic.busiest(weights)
            if kind == "train":
                break
    return found, calls(steps["train"])


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    counts = parser.parse_args().devices
    compat.configure_gpu(simulate=max(counts))
    results = {}
    for name in BUILDS:
        for devices in counts:
            found, called = measured(name, devices)
            results["{} {}".format(name, devices)] = {" ".join(k): v for k, v in found.items()}
            cells = ["{} {} {:.2f} W, {:.2f} W".format(*key, *found[key]) for key in found]
            print(name, devices, *cells, "{} calls".format(called), sep=" | ")
    print(MARK + json.dumps(results, sort_keys=True))


if __name__ == "__main__":
    main()
