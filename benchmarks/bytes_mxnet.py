"""Bytes over the busiest device's link on MXNet.

    python benchmarks/bytes_mxnet.py

Counted from what MXNet ran: each copy between arrays by its two contexts, the copies that return in
a backward pass, and what a ``Module`` gives to its ``KVStore`` and takes from it. For Gluon and
keras-mxnet the number of copies that each context sent is compared with the profiler's, which knows
only as many contexts as there are cores, and two; it also counts the operations.
"""

import collections
import contextlib
import os

os.environ.setdefault("KERAS_BACKEND", "mxnet")

import numpy as np
import traffic
import works

import compat
from compat._backends.mxnet import invocations, profiler
from compat._backends.mxnet.arrays import context_of

WIDTH, INPUTS = works.size(512), 16  # of layers; activations are small beside the weights
STORE = "store"  # stands for the KVStore among the devices


class Traffic:
    """The copies of a step.

    Attributes:
        links: bytes between contexts.
        copies: how many copies each context began, to itself too.
        operations: how many operations MXNet ran, where the profiler counted them.
    """

    def __init__(self):
        self.links, self.copies = traffic.Links(), collections.Counter()
        self.operations = None

    def note(self, source, target, array):
        """Count a copy of an array from one context to another."""
        self.copies[source] += 1
        self.links.add(source, target, array.size * np.dtype(array.dtype).itemsize)

    def measured(self):
        """Return the result of ``Work.measured()``."""
        for counts in (self.links.sent, self.links.received):
            counts.pop(STORE, None)
        operations = {} if self.operations is None else {"operations": self.operations}
        return dict(self.links.busiest(), **operations)


@contextlib.contextmanager
def observed(found):
    """Count copies within a block."""
    import mxnet as mx

    register, store = mx.nd.register, mx.kvstore.KVStore
    invoke, handle = register._imperative_invoke, invocations.handle_of("_copyto")
    push, pull, backward = store.push, store.pull, mx.executor.Executor.backward

    def invoked(operation, inputs, *args, **kwargs):
        result = invoke(operation, inputs, *args, **kwargs)
        if operation == handle:
            array = result[0] if isinstance(result, list) else result
            source, target = str(context_of(inputs[0])), str(context_of(array))
            found.note(source, target, array)
            if is_recorded(array):  # the gradient of a copy is a copy
                found.note(target, source, array)
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
            found.note(str(context_of(array)), STORE, array)
        return push(self, key, value, *args, **kwargs)

    def pulled(self, key, out=None, *args, **kwargs):
        for array in listed(out):
            found.note(STORE, str(context_of(array)), array)
        return pull(self, key, out, *args, **kwargs)

    def both(self, key, value, out=None, priority=0):
        pushed(self, key, value, priority)
        pulled(self, key, value if out is None else out, priority)

    def gone_back(self, out_grads=None, *args, **kwargs):
        for array in [] if out_grads is None else listed(out_grads):
            found.note(str(context_of(array)), str(context_of(array)), array)
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

    found = Traffic()
    mx.nd.waitall()
    with observed(found):
        if not is_checked:
            step()
            return found
        with profiler.recorded() as events:
            step()
    ran, found.operations = collections.Counter(), 0
    for operation in profiler._executed(events, "cpu"):
        found.operations += operation.name != "DeleteVariable"
        ran[operation.device] += operation.name.startswith("Copy")
    assert +ran == found.copies, (ran, found.copies)
    return found


class Work(traffic.Work):
    """A model on several contexts.

    Arguments:
        is_checked: whether the profiler can count the copies of its steps.
    """

    def __init__(self, weights, steps, is_checked=False):
        super().__init__(weights, steps)
        self.is_checked = is_checked

    def measured(self, name):
        return counted(self.steps[name], self.is_checked).measured()


def is_profiled(devices):
    """Return whether the profiler knows so many contexts."""
    return devices <= os.cpu_count() + 2


def gluon(devices):
    """Return the work of a block."""
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
    steps = {"train": train, "predict": predict, "evaluate": predict}
    return Work(weights, steps, is_profiled(devices))


def keras(devices):
    """Return the work of a Keras model.

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
        "predict": lambda: model.predict_on_batch(inputs),
        "evaluate": lambda: model.test_on_batch(inputs, targets),
    }
    return Work(4 * model.count_params(), steps, is_profiled(devices))


def module(devices, store="local"):
    """Return the work of a Module."""
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
    return Work(weights, {"train": train, "predict": predict, "evaluate": predict})


def device_module(devices):
    """Return the work of a Module whose KVStore is "device"."""
    return module(devices, "device")


BUILDS = {
    "MXNet, Gluon": gluon,
    "MXNet, keras-mxnet": keras,
    "MXNet, Module": module,
    'MXNet, Module, kvstore="device"': device_module,
}

if __name__ == "__main__":
    traffic.main(__doc__, BUILDS, lambda devices: compat.configure_gpu(simulate=devices))
