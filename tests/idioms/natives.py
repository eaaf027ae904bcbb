"""Idioms without Keras: tf.Module with a tape, nn.Module with autograd, Gluon blocks.

Each is written once, over the few operations of ``Native``: a function makes of the hidden values
of a batch what the model returns, and its loss is a mean over that, or it is the loss itself.
"""

import numpy as np
from catalog import native
from kit import ROWS, STEPS, Observed

import compat
from compat.testing import DEVICES


class Native:
    """A framework's tensors. ``run(make, parallel)`` trains what ``make(self)`` describes.

    What it does not define is the framework's, by the name that ``renamed`` gives it.
    """

    floatx = "float64"
    renamed = {}  # type: dict

    def __getattr__(self, name):
        return getattr(self.F, self.renamed.get(name, name))

    def less(self, x, y):
        return x - y

    def run(self, describe, parallel):
        """Train a module with a hidden layer, which is followed by the idiom's function."""
        description = describe(self)
        forward, loss_of, options = description[0], description[1], dict(*description[2:])
        observed = Observed()
        net = self.module(forward, **options.get("state", {}))
        if parallel:
            compat.parallelize(net, gpus=DEVICES)
        observed.note("weights", *self.weights(net))
        for step in range(STEPS):
            x = np.random.RandomState(step).normal(size=(ROWS, 6)).astype(self.floatx)
            observed.note("result", self.step(net, x, loss_of, options))
            observed.note("weights", *self.weights(net))
            observed.note("state", *self.state(net))
        return observed


class TensorFlow(Native):
    renamed = {"stop": "stop_gradient"}

    def __init__(self):
        import tensorflow as tf

        self.F = self.tf = tf
        self.mean, self.sum = self._reduce("mean"), self._reduce("sum")
        self.log, self.softmax = tf.math.log, tf.nn.softmax

    def _reduce(self, name):
        function = getattr(self.tf, "reduce_" + name)
        return lambda x, axis=None: function(x, axis=axis, keepdims=axis is not None)

    def flip(self, x):
        return self.tf.reverse(x, [0])

    def join(self, *tensors, **options):
        return self.tf.concat(tensors, options.get("axis", 0))

    def rows(self, x):
        return self.tf.cast(self.tf.shape(x)[0], x.dtype)

    def positive(self, x):
        return self.tf.cast(x > 0, x.dtype)

    def with_gradient(self, x, function):
        return self.tf.custom_gradient(lambda y: (self.tf.identity(y), function))(x)

    def held(self, net, x):
        return net.held

    def assign(self, net, value):
        net.held.assign(value)

    def module(self, forward, **state):
        tf = self.tf

        class Net(tf.Module):
            def __init__(self):
                super().__init__()
                self.first = tf.Variable(weight(6, 6))
                self.second = tf.Variable(weight(6, 2))
                for name, value in state.items():
                    setattr(self, name, tf.Variable(value, trainable=False))

            def __call__(self, x):
                return forward(self, tf.tanh(x @ self.first))

            def last(self, x):
                return x @ self.second

        return Net()

    def step(self, net, x, loss_of, options):
        tf = self.tf
        x = tf.constant(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            result = net(x)
            loss = loss_of(result)
            if options.get("penalty"):
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    score = tf.reduce_sum(net(x))
                loss += tf.reduce_mean(tf.square(inner.gradient(score, x)))
        for variable in net.trainable_variables:
            gradient = tape.gradient(loss, variable)
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return result.numpy()

    def weights(self, net):
        return [variable.numpy() for variable in net.trainable_variables]

    def state(self, net):
        return [net.held.numpy()] if hasattr(net, "held") else []


class Torch(Native):
    renamed = {"stop": "detach", "transpose": "t"}

    def __init__(self):
        import torch

        self.F = self.torch = torch

    def mean(self, x, axis=None):
        return x.mean() if axis is None else x.mean(axis, keepdim=True)

    def sum(self, x, axis=None):
        return x.sum() if axis is None else x.sum(axis, keepdim=True)

    def softmax(self, x, axis=-1):
        return x.softmax(axis)

    def flip(self, x):
        return x.flip(0)

    def join(self, *tensors, **options):
        return self.torch.cat(tensors, options.get("axis", 0))

    def rows(self, x):
        return x.shape[0]

    def positive(self, x):
        return (x > 0).to(x.dtype)

    def with_gradient(self, x, function):
        class Turned(self.torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return function(gradient)

        return Turned.apply(x)

    def held(self, net, x):
        return net.held.clone()  # which is assigned to in place

    def assign(self, net, value):
        net.held.copy_(value)

    def module(self, forward, **state):
        torch = self.torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Parameter(torch.tensor(weight(6, 6)))
                self.second = torch.nn.Parameter(torch.tensor(weight(6, 2)))
                for name, value in state.items():
                    self.register_buffer(name, torch.tensor(value))

            def forward(self, x):
                return forward(self, torch.tanh(x @ self.first))

            def last(self, x):
                return x @ self.second

        return Net()

    def step(self, net, x, loss_of, options):
        torch = self.torch
        x = torch.tensor(x, requires_grad=bool(options.get("penalty")))
        net.zero_grad()
        result = net(x)
        loss = loss_of(result)
        if options.get("penalty"):
            (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            loss = loss + gradient.square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        return result.detach().numpy()

    def weights(self, net):
        return [parameter.detach().numpy().copy() for parameter in net.parameters()]

    def state(self, net):
        return [buffer.numpy().copy() for buffer in net.buffers()]


class Gluon(Native):
    floatx = "float32"
    renamed = {"stop": "BlockGrad", "matmul": "dot"}

    def __init__(self):
        import mxnet as mx

        self.mx = mx
        self.F = mx.nd  # or mx.sym, where a block is traced

    def mean(self, x, axis=None):
        return x.mean() if axis is None else x.mean(axis=axis, keepdims=True)

    def sum(self, x, axis=None):
        return x.sum() if axis is None else x.sum(axis=axis, keepdims=True)

    def flip(self, x):
        return self.F.flip(x, axis=0)

    def join(self, *tensors, **options):
        return self.F.concat(*tensors, dim=options.get("axis", 0))

    def rows(self, x):
        return x.shape[0]

    def positive(self, x):
        return x > 0

    def less(self, x, y):
        return self.F.broadcast_sub(x, y)

    def with_gradient(self, x, function):
        class Turned(self.mx.autograd.Function):
            def forward(self, x):
                return x * 1

            def backward(self, gradient):
                return function(gradient)

        return Turned()(x)

    def held(self, net, x):
        return net.held.data(x.context)

    def assign(self, net, value):
        with self.mx.autograd.pause():
            net.held.data(value.context)[:] = value

    def module(self, forward, **state):
        mx, operations = self.mx, self

        class Net(mx.gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.first = mx.gluon.nn.Dense(6, use_bias=False, in_units=6)
                    self.second = mx.gluon.nn.Dense(2, use_bias=False, in_units=6)
                    for name, value in state.items():
                        start = mx.init.Constant(mx.nd.array(value))
                        held = self.params.get(name, shape=value.shape, init=start, grad_req="null")
                        setattr(self, name, held)

            def hybrid_forward(self, F, x, **_):
                operations.F = F
                try:
                    return forward(self, F.tanh(self.first(x)))
                finally:
                    operations.F = mx.nd

            def last(self, x):
                return self.second(x)

        net = Net()
        net.initialize()
        net.first.weight.set_data(mx.nd.array(weight(6, 6).T))
        net.second.weight.set_data(mx.nd.array(weight(6, 2).T))
        return net

    def step(self, net, x, loss_of, options):
        mx = self.mx
        if options.get("penalty"):
            raise NotImplementedError("few operators have a second derivative")
        with mx.autograd.record():
            result = net(mx.nd.array(x))
            loss = loss_of(result)
        loss.backward()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        trainer.step(1, ignore_stale_grad=True)
        return result.asnumpy()

    def weights(self, net):
        return [block.weight.list_data()[0].asnumpy() for block in (net.first, net.second)]

    def state(self, net):
        return [net.held.list_data()[0].asnumpy()] if hasattr(net, "held") else []


def weight(*shape):
    return np.random.RandomState(sum(shape)).normal(size=shape) * 0.4


NATIVES = {"tensorflow2": TensorFlow, "torch": Torch, "mxnet": Gluon}


# The idioms --------------------------------------------------------------------------------------


def _rows(o, function, **options):
    """Return a model that returns rows, with a loss outside of it."""
    return (lambda net, h: net.last(function(h)), lambda y: o.mean(o.square(y)), options)


def _loss(function, **options):
    """Return a model that returns its loss."""
    return function, lambda loss: loss, options


#: What is done with the hidden values, of those that take one expression; it keeps the rows.
FUNCTIONS = {
    "loop of one's own": lambda o, h: h * 2.0,
    "less the mean of the batch": lambda o, h: o.less(h, o.mean(h, axis=0)),
    "attention between rows": lambda o, h: o.matmul(o.softmax(o.matmul(h, o.transpose(h))), h),
    "rows reversed": lambda o, h: h + 0.5 * o.flip(h),
    "gradient reversal": lambda o, h: o.with_gradient(h, lambda gradient: gradient * -0.5),
    "divided by the number of rows": lambda o, h: h / o.rows(h),
    "transposed and back": lambda o, h: o.transpose(o.exp(o.transpose(h))),
}


def _of(function):
    return lambda o: _rows(o, lambda h: function(o, h))


for _name, _function in FUNCTIONS.items():
    native("native: " + _name)(_of(_function))


@native("native: gradient less its mean over the batch")
def centred_back(o):
    def centred(gradient):
        return o.less(gradient, o.mean(gradient, axis=0))

    return _rows(o, lambda h: o.with_gradient(h, centred))


@native("native: loss over the batch outside")
def outside(o):
    def negatives(y):
        scores = o.matmul(y, o.transpose(y))
        return o.mean(o.log(o.sum(o.exp(scores), axis=1)) - o.sum(y * y, axis=1))

    return (lambda net, h: net.last(h), negatives, {})


@native("native: returns its loss, a mean")
def mean(o):
    return _loss(lambda net, h: o.mean(o.square(net.last(h))))


@native("native: returns its loss, over those that count")
def counted(o):
    def loss(net, h):
        y = net.last(h)
        return o.sum(o.square(y) * o.positive(y)) / (o.sum(o.positive(y)) + 1.0)

    return _loss(loss)


@native("native: returns in-batch negatives")
def negatives(o):
    def loss(net, h):
        y = net.last(h)
        scores = o.matmul(y, o.transpose(y))
        return o.mean(o.log(o.sum(o.exp(scores), axis=1)))

    return _loss(loss)


@native("native: gradient penalty")
def penalty(o):
    return _rows(o, lambda h: o.square(h), penalty=True)


def _keeping(o, value, use, *shape):
    def forward(net, h):
        found = net.last(use(o.held(net, h), h))
        o.assign(net, value(o.stop(h), o.held(net, h)))
        return found

    return forward, lambda y: o.mean(o.square(y)), {"state": {"held": np.ones(shape) * 0.1}}


@native("native: moving average that is used at once")
def used(o):
    def forward(net, h):
        o.assign(net, o.held(net, h) * 0.9 + o.mean(o.stop(h), axis=0) * 0.1)
        return net.last(o.less(h, o.held(net, h)))

    return forward, lambda y: o.mean(o.square(y)), {"state": {"held": np.ones((1, 6)) * 0.1}}


@native("native: memory queue")
def queue(o):
    def use(held, h):
        return h + o.matmul(o.softmax(o.matmul(h, o.transpose(held))), held)

    return _keeping(o, lambda h, held: o.join(h, held)[:16], use, 16, 6)


@native("native: a branch on the batch")
def branch(o):
    def function(h):
        return h * 2.0 if float(o.stop(o.mean(h))) > 0.0 else h * 3.0

    return _rows(o, function)
