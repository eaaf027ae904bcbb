"""Operations drawn from a framework's own list: those that take a small matrix of floats.

What compat knows of operations is in its tables; here the list is the framework's, so that what
nobody thought of is drawn, too. A draw is text, such as ``tf.raw_ops.Cumsum(x=x, axis=0)``, of
which ``x`` is the matrix.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
from kerases import is_keras_3, runs_eagerly

from compat import _keras
from compat.testing import keras_under_test

ROWS, WIDTH, FIRST = 9, 6, 4

#: What else than the matrix an operation is given.
ARGUMENTS = (
    "x", "x, 0", "x, 1", "x, x", "x, axis=0", "x, dim=0", "x, [0]", "x, [1, 0]", "x, 1, 0",
    "x, x, 1", "x, x, x", "x, 2", "x, 0.5", "x, (1, 1)", "[x, x]", "[x, x], 0", "x, 2, 0",
)  # fmt: skip

#: Those that end the process, wait, print, write, are random, keep what they are given, or give
#: memory that nothing has set.
LEFT_OUT = re.compile(
    "abort|assert|barrier|batch_?function|bernoulli|breakpoint|checkpoint|collective|compil|config|"
    "control|cudnn|cuda|custom|dataset|debug|default|delete|device|dropout|dump|empty|enqueue|"
    "exit|experimental|export|file|fused|gamma_?sample|generator|grad|hash|import|init|iterator|"
    "launch|load|lookup|map_?(incomplete|peek|size|stage|unstage)|memory|multinomial|mutex|nccl|"
    "normal_|optimizer|placeholder|poisson|print|prof|py_?func|quantize|queue|rand|read|recv|"
    "registry|resource|rng|rrelu|sample|save|seed|send|sequencelast|session|set_|shuffle|skip|"
    "sleep|stack_?(push|pop|close)|stage|start|stateful|stop|stochastic|summary|_storage|tensor_?"
    "array|thread|tpu|train|update|variable|wait|worker|write|xla|zero_?initial|\\bnew$|_$",
    re.IGNORECASE,
)


class Operations:
    """The operations of the framework that a Keras runs on; ``draw(random)`` gives one."""

    def __init__(self, keras, apart=True):
        self.keras, self.backend = keras, _keras.backend_name(keras)
        self.evaluate, namespaces = _framework(keras, self.backend)
        self.names = {name: space for name, space in namespaces if "." not in name}
        self.all = sorted({
            "{}.{}".format(path, name)
            for path, space in namespaces
            for name in dir(space)
            if not name.startswith("_") and not LEFT_OUT.search(name)
            and callable(getattr(space, name)) and not inspect.isclass(getattr(space, name))
        })  # fmt: skip
        self.floatx = keras.backend.floatx()
        dies = self.backend == "mxnet" or not runs_eagerly(keras) and self.backend != "theano"
        self.apart = Apart() if apart and dies else None

    def draw(self, random):
        """Text, and what comes of it: "rows", or "whole", a value that has no row for each."""
        while True:
            name = random.choice(self.all)
            found = self.usable(name, random.sample(ARGUMENTS, len(ARGUMENTS)))
            if found:
                text, kind, mixes = found
                # Of what computes each row by itself there is enough elsewhere.
                if random.random() < (0.1 if not mixes else 1.0 if kind == "rows" else 0.3):
                    return text, kind

    def usable(self, name, choices):
        """Return the first arguments that an operation takes, with their kind.

        Also whether the operation is cross-batch.
        """
        if self.apart:
            return self.apart.usable(name, choices)
        for arguments in choices:
            if ".raw_ops." in name:
                arguments = self._by_name(name, arguments)
            text = "{}({})".format(name, arguments)
            kind, mixes = self._kind(text)
            if kind:
                return text, kind, mixes
        return None

    def apply(self, text, kind, x):
        """``x`` and, no larger than that, what an operation makes of it."""
        if self.backend == "mxnet":
            from keras.backend import mxnet_backend

            apply = lambda x: mxnet_backend.KerasSymbol(self._symbol(text, kind, x.symbol))  # noqa: E731
            return mxnet_backend.keras_mxnet_symbol(apply)(x)
        ops = self.keras.ops if is_keras_3(self.keras) else self.keras.backend
        found = ops.tanh(ops.cast(eval(text, dict(self.names, x=x)), self.floatx))
        if kind != "rows":
            return x + ops.mean(found)
        rank = found.ndim if self.backend == "theano" else len(found.shape)
        for axis in range(rank - 1, 0, -1):
            found = ops.mean(found, axis=axis)
        return x + ops.expand_dims(found, 1)

    def _symbol(self, text, kind, x):
        sym = self.names["mx"].sym
        found = sym.tanh(eval(text.replace("mx.nd.", "mx.sym."), dict(self.names, x=x)))
        if kind == "rows":  # whatever its rank is, which a symbol does not know
            found = sym.mean(sym.reshape(found, shape=(0, -1)), axis=1, keepdims=True)
        else:
            found = sym.reshape(sym.mean(found), shape=(1, 1))
        return sym.broadcast_add(x, found)

    def _by_name(self, name, arguments):
        """Raw operations of TensorFlow take no argument by its place."""
        raw = self.names["tf"].raw_ops
        names = list(inspect.signature(getattr(raw, name.rpartition(".")[2])).parameters)
        values = re.findall(r"\[[^]]*\]|\([^)]*\)|[^, ]+", arguments)
        return ", ".join(v if "=" in v else "{}={}".format(*p) for p in zip(names, values)
                         for v in p[1:])  # fmt: skip

    def _kind(self, text):
        """Return the kind of its result, and whether it is cross-batch; None if not usable."""
        x = np.random.RandomState(0).uniform(-1, 1, size=(ROWS, WIDTH)).astype(self.floatx)
        try:
            whole, again = self.evaluate(text, x), self.evaluate(text, x)
        except Exception:
            return None, False
        whole, again = np.asarray(whole), np.asarray(again)
        usable = whole.dtype.kind in "fiub" and whole.size and np.isfinite(whole).all()
        if not usable or whole.size > 4000 or not np.array_equal(whole, again):
            return None, False
        if not whole.ndim or whole.shape[0] != ROWS:
            return "whole", ROWS not in whole.shape
        try:
            parts = [self.evaluate(text, x[:FIRST]), self.evaluate(text, x[FIRST:])]
            parts = np.concatenate(parts)
        except Exception:
            return "rows", True
        return "rows", parts.shape != whole.shape or not np.allclose(parts, whole, atol=1e-5)


class Apart:
    """Another process, where an operation of an old framework may corrupt memory, or die of it.

    Each is tried in a child of a process that has imported the framework and computed nothing.
    """

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
        )

    def usable(self, name, choices):
        self.process.stdin.write(json.dumps([name, choices]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is no answer
    operations = Operations(keras_under_test(), apart=False)
    for line in sys.stdin:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(30)
            found = operations.usable(*json.loads(line))
            os.write(writes, json.dumps(found).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            answers.write((pipe.read() or "null") + "\n")
        answers.flush()
        os.waitpid(child, 0)


def _framework(keras, backend):
    """How an operation is evaluated, gradient included, and the namespaces that have them."""
    own = [("keras.ops", keras.ops), ("keras", keras)] if is_keras_3(keras) else []
    return {
        "tensorflow": _tensorflow, "torch": _torch, "jax": _jax, "mxnet": _mxnet,
        "theano": _theano,
    }[backend](own)  # fmt: skip


def _tensorflow(own):
    import tensorflow as tf

    paths = ["", ".math", ".nn", ".linalg", ".signal", ".strings", ".raw_ops", ".sparse", ".image"]
    spaces = [("tf" + path, _attribute(tf, path)) for path in paths]
    names = dict([("tf", tf)] + own)

    def loss_of(found):
        return tf.reduce_sum(tf.tanh(tf.cast(found, tf.float32)))

    def eagerly(text, x):
        @tf.function(input_signature=[tf.TensorSpec((None, WIDTH), x.dtype)], autograph=False)
        def compute(held):
            with tf.GradientTape() as tape:
                tape.watch(held)
                found = eval(text, dict(names, x=held))
                loss = loss_of(found)
            gradient = tape.gradient(loss, held)
            return [found, loss if gradient is None else gradient]

        return compute(tf.constant(x))[0].numpy()

    def in_graph(text, x):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            held = tf.compat.v1.placeholder(x.dtype, (None, WIDTH))
            found = eval(text, dict(names, x=held))
            gradients = [g for g in tf.gradients(loss_of(found), [held]) if g is not None]
            return session.run([found] + gradients, {held: x})[0]

    evaluate = eagerly if tf.executing_eagerly() else in_graph
    return evaluate, [space for space in spaces + own if space[1] is not None]


def _attribute(module, path):
    for name in path.split(".")[1:]:
        module = getattr(module, name, None)
    return module


def _torch(own):
    import torch

    paths = ["", ".nn.functional", ".linalg", ".fft", ".special", ".Tensor"]
    names = dict([("torch", torch)] + own)

    def evaluate(text, x):
        held = torch.tensor(x, requires_grad=True)
        found = eval(text, dict(names, x=held * 1.0))
        if found.dtype.is_floating_point and found.requires_grad:
            found.tanh().sum().backward()
        return found.detach().numpy()

    return evaluate, [("torch" + path, _attribute(torch, path)) for path in paths] + own


def _jax(own):
    import jax
    import keras

    def evaluate(text, x):
        def loss_of(held):
            found = eval(text, {"keras": keras, "x": held})
            return found.astype("float32").sum(), found

        (_, found), _ = jax.value_and_grad(loss_of, has_aux=True)(x)
        return np.asarray(found)

    return evaluate, own


def _mxnet(own):
    import mxnet as mx

    def evaluate(text, x):
        held = mx.nd.array(x)
        held.attach_grad()
        with mx.autograd.record():
            found = eval(text, {"mx": mx, "x": held})
            loss = mx.nd.tanh(found).sum()
        loss.backward()
        held.grad.asnumpy()
        return found.asnumpy()

    return evaluate, [("mx", mx), ("mx.nd", mx.nd), ("mx.nd.contrib", mx.nd.contrib)]


def _theano(own):
    import theano
    import theano.tensor as T

    def evaluate(text, x):
        held = T.matrix(dtype=x.dtype)
        found = eval(text, {"T": T, "x": held})
        loss = T.tanh(found.astype("float64")).sum()
        gradient = theano.grad(loss, held, disconnected_inputs="ignore")
        return theano.function([held], [found, gradient], mode="FAST_COMPILE")(x)[0]

    paths = ["", ".nnet", ".extra_ops", ".nlinalg", ".slinalg", ".signal.pool", ".fft"]
    spaces = [("T" + path, _attribute(T, path)) for path in paths]
    return evaluate, [space for space in spaces if space[1] is not None]


if __name__ == "__main__":
    _serve()
