"""MXNet: batch normalization by the whole batch, on three devices as on one."""

import contextlib
import re
import sys
import threading
import warnings
import zlib

import numpy as np
import pytest
from outcomes import ended

import compat
from compat import _verification
from compat._backends.mxnet import module, native, worker_threads
from compat._configuration import registry
from compat._rows import replica_threads
from compat.testing import keras_under_test

from . import gluon_models
from .gluon_models import DEVICES, check_refusal
from .keras_models import replicas_of

mx = gluon_models.mx  # the fixture

COUNTS = 61, 14, 2, 1, 61


def rows(count):
    return np.random.RandomState(count).normal(1, 2, size=(count, 36))


def value(name, shape):
    """Return the value of a weight that begins with it; scales are around 1."""
    random = np.random.RandomState(zlib.crc32(name.encode()) % 999)
    return 0.3 * random.normal(size=shape) + ("gamma" in name)


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        yield


def assert_close(found, expected, tolerance=1e-9):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def threads():
    """Return how many threads there are that run replicas, and how many of these are idle."""
    names = [thread.name for thread in threading.enumerate()]
    count = sum(name.startswith("compat worker") for name in names)
    return count, sum(map(len, worker_threads._idle.values()))


# Gluon -------------------------------------------------------------------------------------------


def convolutional(mx, kind):
    nn, net = mx.gluon.nn, mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.HybridLambda(lambda F, x: F.reshape(x, shape=(-1, 1, 6, 6))))
        net.add(nn.Conv2D(4, 3, in_channels=1), kind(in_channels=4), nn.Activation("relu"))
        net.add(nn.Conv2D(4, 3, in_channels=4), kind(in_channels=4, momentum=0.7, epsilon=1e-4))
        net.add(nn.Flatten(), nn.Dense(3, in_units=16))
    return net


def dense(mx, kind):
    """Return a block whose first layer trains by its bias alone, on data without a gradient."""
    nn, net = mx.gluon.nn, mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(kind(in_channels=36, scale=False), nn.Dense(8, in_units=36), kind(in_channels=8))
        net.add(nn.Activation("tanh"), nn.Dense(8, in_units=8))
        net.add(kind(in_channels=8, scale=False, center=False), nn.Dense(3, in_units=8))
    return net


def initialised(mx, build, kind=None, hybrid=False, dtype="float64"):
    check_refusal(mx)
    net = build(mx, kind or mx.gluon.nn.BatchNorm)
    net.initialize()
    net.cast(dtype)
    for place, (name, parameter) in enumerate(net.collect_params().items()):
        if parameter.grad_req != "null":
            start = value(f"{place}{name[-5:]}", parameter.shape)
            array = mx.nd.array(start, dtype=parameter.dtype)
            parameter.set_data(array)
    if hybrid:
        net.hybridize()
    return net


def parameters(net):
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def trained(mx, net, counts=COUNTS, dtype="float64"):
    """Return losses of steps of SGD with momentum, and parameters, moving averages included."""
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}
    )
    losses = []
    for count in counts:
        x = mx.nd.array(rows(count), dtype=dtype)
        with mx.autograd.record():
            loss = mx.nd.square(net(x) - x[:, :3]).mean()
        loss.backward()
        trainer.step(1)
        losses.append(loss.asscalar())
    mx.nd.waitall()
    return [np.array(losses), *parameters(net)]


def parallelize(net, is_asked=True):
    return compat.parallelize(net, sync_batch_norm=is_asked)


@pytest.mark.row("Gluon Block")
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("build", [convolutional, dense])
def test_blocks_equal_those_of_one_device(mx, build, hybrid):
    expected = trained(mx, initialised(mx, build, hybrid=hybrid))
    net = initialised(mx, build, hybrid=hybrid)
    with no_warning():
        assert_close(trained(mx, parallelize(net)), expected)
    kinds = net._compat_replicas._kinds.values()
    assert all(placements is not None for placements, _ in kinds)
    net(mx.nd.array(rows(14), dtype="float64"))  # compiled, if it is
    apart = trained(mx, parallelize(initialised(mx, build, hybrid=hybrid), False))
    assert abs(apart[0][-1] - expected[0][-1]) > 1e-4


@pytest.mark.row("Gluon Block")
def test_layers_that_ask_for_it(mx):
    """Alone: beside them, each device normalizes by its own rows. MXNet's are of float32."""

    def kind(in_channels, **options):
        layer = mx.gluon.contrib.nn.SyncBatchNorm(in_channels, num_devices=3, **options)
        return layer if in_channels == 4 else mx.gluon.nn.BatchNorm(in_channels=3)

    expected = trained(mx, initialised(mx, convolutional, dtype="float32"), dtype="float32")
    net = compat.parallelize(initialised(mx, convolutional, kind, dtype="float32"))
    with no_warning():
        assert_close(trained(mx, net, dtype="float32"), expected, 1e-3)

    def mixed(mx, kind):
        net = convolutional(mx, kind)
        with net.name_scope():
            net.add(kind(in_channels=3))
        return net

    x = mx.nd.array(rows(14))
    nets = [initialised(mx, mixed, kind, dtype="float32") for kind in (kind, None)]
    compat.parallelize(nets[0])
    results = []
    for net in nets:
        with mx.autograd.record():
            results.append(net(x))
        results[-1].backward()
    assert not np.allclose(*[result.asnumpy() for result in results], atol=1e-3)
    mx.nd.waitall()
    averages = [net[2].running_var.data().asnumpy() for net in nets]
    np.testing.assert_allclose(*averages, rtol=1e-4)


def watched(mx, seen):
    """Return a block that keeps its results, and normalizes by an operation of its own."""

    class Watched(mx.gluon.nn.Block):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.layers = dense(mx, mx.gluon.nn.BatchNorm)
            self.kept, self.calls = None, 0

        def forward(self, x):
            self.calls += 1
            x = self.layers(x)
            seen(self, x)
            self.kept = mx.nd.BatchNorm(
                x, *[mx.nd.array([v] * 3, ctx=x.context, dtype="float64") for v in (1, 0, 0, 1)]
            )
            return self.kept * 2

    return Watched()


def unusual(mx, kind, is_asked):
    """Return a block that normalizes where neither Gluon nor a patch of a function sees it."""
    operation = mx.nd.BatchNorm  # as by ``from mxnet.nd import BatchNorm``
    nn, data = mx.gluon.nn, mx.sym.var("data")
    norm = nn.HybridSequential()
    if kind == "layer" and is_asked:
        norm.add(mx.gluon.contrib.nn.SyncBatchNorm(in_channels=36, num_devices=3))
    elif kind == "graph":
        norm = mx.gluon.SymbolBlock(mx.sym.BatchNorm(data, fix_gamma=False), data)
    else:
        norm.add(nn.BatchNorm(in_channels=36))
    norm.initialize(mx.init.One())
    norm.hybridize()

    class Unusual(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            if kind == "within":
                self.norm = parallelize(norm) if is_asked else norm
            self.norms = [norm]

        def forward(self, x):
            if kind != "function":
                return self.norms[0](x)
            return operation(x, *[mx.nd.array([v] * 36, ctx=x.context) for v in (1, 0, 0, 1)])

    net = Unusual()
    return parallelize(net, kind in ("function", "container", "graph")) if is_asked else net


@pytest.mark.row("Gluon Block")
@pytest.mark.parametrize("kind", ["function", "container", "layer", "within", "graph"])
def test_no_batch_norm_is_silently_that_of_each_device(mx, kind):
    check_refusal(mx)
    results = []
    for is_asked in (False, True):
        net, x = unusual(mx, kind, is_asked), mx.nd.array(rows(14))
        x.attach_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", compat.CompatWarning)
            with mx.autograd.record():
                out = net(x)
        out.backward(mx.nd.array(rows(15)[1:]))
        results.append((out.asnumpy(), x.grad.asnumpy()))
    assert_close(*results, 1e-4)
    texts = [str(each.message) for each in said if each.category is compat.CompatWarning]
    assert ["runs unsplit" in text for text in texts] == [True] * (kind == "graph")


@pytest.mark.row("Gluon Block")
def test_what_a_block_keeps_is_that_of_one_call(mx):
    nets = [initialised(mx, lambda mx, kind: watched(mx, lambda *_: None)) for _ in range(2)]
    with no_warning():
        found, expected = [trained(mx, net, (14, 61)) for net in (parallelize(nets[0]), nets[1])]
    assert_close(found, expected)
    assert nets[0].calls == nets[1].calls == 2
    assert_close(nets[0].kept.asnumpy(), nets[1].kept.asnumpy())


@pytest.mark.row("Gluon Block")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_model_as_it_was(mx, error):
    failing = []

    def fail(net, x):
        if failing and (x.context.device_id == 1 or len(x) == 14):  # again, where it runs unsplit
            raise error

    net = initialised(mx, lambda mx, kind: watched(mx, fail))
    parallelize(net)
    trained(mx, net, (14,))
    before = parameters(net)
    failing.append(None)
    with pytest.raises(error):
        trained(mx, net, (14,))
    calls = net.calls
    assert threads() == (3, 3) and calls == 1 + (error is ValueError)  # as on one device
    assert_close(parameters(net), before, 0)
    failing.clear()
    trained(mx, net, (14,))
    assert net.calls == calls + 1


@pytest.mark.row("Gluon Block")
def test_one_reduction_for_each_layer_and_none_in_prediction(mx, monkeypatch):
    merge, counts = replica_threads.TurnTakingThreads._merge, []

    def counted(threads):
        counts.append(any(turn.request for turn in threads.turns))
        merge(threads)

    net = parallelize(initialised(mx, convolutional))
    x = mx.nd.array(rows(14), dtype="float64")
    monkeypatch.setattr(replica_threads.TurnTakingThreads, "_merge", counted)
    with mx.autograd.record():
        net(x)
    assert sum(counts) == 2
    net(x)
    assert len(counts) == 3


@pytest.mark.row("Gluon Block")
def test_replicas_draw_numbers_of_their_own_which_seeds_repeat(mx):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(in_channels=36), mx.gluon.nn.Dropout(0.5))
    check_refusal(mx)
    net.initialize()
    parallelize(net)

    def masks():
        with mx.autograd.record():
            dropped = net(mx.nd.array(rows(12) + 100)).asnumpy() == 0
        return [dropped[place : place + 4].tolist() for place in (0, 4, 8)]

    drawn = []
    for seed in (5, 6, 5):
        mx.random.seed(seed)
        drawn.append(masks() + masks())
    different = [mask for call in drawn[:2] for mask in call]
    assert all(different.count(mask) == 1 for mask in different)
    assert drawn[2] == drawn[0]


@pytest.mark.row("Gluon Block")
def test_low_precision_is_computed_in_float32(mx):
    x = mx.nd.array(rows(14) + 100, dtype="float16")
    results = []
    for is_parallel in (False, True):
        net = mx.gluon.nn.BatchNorm(in_channels=36)
        net.initialize()
        net.cast("float16")
        parallelize(net) if is_parallel else check_refusal(mx)
        with mx.autograd.record():
            results.append(net(x))
    assert results[1].dtype == np.float16
    np.testing.assert_allclose(*[r.asnumpy() for r in results], atol=0.01)


@pytest.mark.row("Gluon Block")
def test_what_runs_as_a_graph_runs_unsplit(mx):
    check_refusal(mx)
    data = mx.sym.var("data")
    symbol = mx.sym.BatchNorm(data, name="norm", fix_gamma=False)
    x = mx.nd.array(rows(14))
    results = []
    for is_parallel in (False, True):
        net = mx.gluon.SymbolBlock(symbol, data)
        net.initialize(mx.init.One())
        with contextlib.ExitStack() as stack:
            if is_parallel:
                parallelize(net)
                match = "needs the whole batch"
                stack.enter_context(pytest.warns(compat.CompatWarning, match=match))
            with mx.autograd.record():
                results.append(net(x).asnumpy())
    assert_close(*results, 1e-5)


@pytest.mark.row("Gluon Block")
def test_verification_compares_training_of_blocks(mx):
    net = parallelize(initialised(mx, convolutional))
    record = _verified(net, net.name)
    with no_warning():
        trained(mx, net, (14, 61))
    assert record.steps["train"] == 1 and not record.uncompared
    assert isinstance(net._compat_replicas, native.BlockReplicas)


def _verified(model, name):
    verification = _verification.Verification(name, DEVICES, 1)
    registry.load("mxnet").verify(model, verification)
    return verification.record


# Graphs ------------------------------------------------------------------------------------------


def symbol(mx, operation, **options):
    data = mx.sym.reshape(mx.sym.Variable("data"), shape=(-1, 1, 6, 6))
    data = mx.sym.Convolution(data, kernel=(3, 3), num_filter=4, name="first")
    data = operation(data, name="norm", fix_gamma=False, **options)
    data = mx.sym.FullyConnected(data, num_hidden=8, name="second")
    data = mx.sym.Activation(operation(data, name="last", **options), act_type="tanh")
    data = mx.sym.FullyConnected(data, num_hidden=3, name="third")
    return mx.sym.LinearRegressionOutput(data, mx.sym.Variable("label"), name="out")


def modular(mx, graph, is_asked, dtype, counts=COUNTS):
    """Train a module: losses, weights and moving averages."""

    def described(count):
        shapes = {"data": (count, 36), "label": (count, 3)}
        return [[mx.io.DataDesc(name, shapes[name], dtype)] for name in ("data", "label")]

    trained = mx.mod.Module(graph, label_names=["label"])
    if is_asked is not None:
        compat.parallelize(trained, sync_batch_norm=is_asked or None)
    trained.bind(*described(61))
    shapes, _, _ = graph.infer_shape(data=(61, 36))
    arguments = {
        name: mx.nd.array(value(name, shape) if name != "last_gamma" else np.ones(shape))
        for name, shape in zip(graph.list_arguments(), shapes)
        if name not in ("data", "label")
    }
    trained.init_params(mx.init.One(), arg_params=arguments, allow_missing=True)
    options = {"learning_rate": 0.05, "momentum": 0.9, "rescale_grad": 1 / 61.0}
    trained.init_optimizer(optimizer="sgd", optimizer_params=options)
    losses = []
    for count in counts:
        data, labels = rows(count), rows(count)[:, :3]
        arrays = [[mx.nd.array(array, dtype=dtype)] for array in (data, labels)]
        batch = mx.io.DataBatch(*arrays)
        batch.provide_data, batch.provide_label = described(count)
        trained.forward(batch, is_train=True)
        losses.append(np.square(trained.get_outputs()[0].asnumpy() - labels).mean())
        trained.backward()
        trained.update()
    mx.nd.waitall()
    arrays = [array for held in trained.get_params() for _, array in sorted(held.items())]
    return [np.array(losses)] + [array.asnumpy() for array in arrays], trained


@pytest.mark.row("MXNet Module")
def test_modules_equal_those_of_one_device(mx):
    types = ["float64"] if module.joined_executors._is_copied("float64") else []
    for dtype in ["float32", *types]:
        graph = symbol(mx, mx.sym.BatchNorm)
        expected, _ = modular(mx, graph, None, dtype)
        with no_warning():
            found, trained = modular(mx, graph, True, dtype)
        assert_close(found, expected, 1e-9 if dtype == "float64" else 1e-3)
        assert len(trained._exec_group.contexts) == 3
    apart, _ = modular(mx, graph, False, dtype)
    assert abs(apart[0][-1] - expected[0][-1]) > 1e-3


@pytest.mark.row("MXNet Module")
def test_operations_of_modules_that_ask_for_it(mx):
    """Also where one device has rows: MXNet's own would wait for three."""
    expected, _ = modular(mx, symbol(mx, mx.sym.BatchNorm), None, "float32")
    keys = iter("ab")

    def operation(*args, **options):
        return mx.sym.contrib.SyncBatchNorm(*args, ndev=3, key=next(keys), **options)

    with no_warning():
        found, _ = modular(mx, symbol(mx, operation), False, "float32")
    assert_close(found, expected, 1e-3)


@pytest.mark.row("MXNet Module")
def test_what_only_one_executor_can_run_runs_unsplit(mx):
    def operation(*args, **options):
        return mx.sym.BatchNorm(*args, output_mean_var=True, **options)[0]

    graph = symbol(mx, operation)
    expected, _ = modular(mx, graph, None, "float32", (14,))
    with pytest.warns(compat.CompatWarning, match="norm of .* needs the whole batch"):
        found, _ = modular(mx, graph, True, "float32", (14,))
    assert_close(found, expected, 1e-5)


# Keras -------------------------------------------------------------------------------------------


@pytest.fixture
def keras(mx):
    keras = keras_under_test()
    before = keras.backend.floatx()
    if module.joined_executors._is_copied("float64"):
        keras.backend.set_floatx("float64")
    yield keras
    keras.backend.set_floatx(before)


def keras_model(keras):
    layers = keras.layers
    parts = [
        layers.Reshape((6, 6, 1), input_shape=(36,)), layers.Conv2D(4, 3),
        layers.BatchNormalization(axis=3), layers.Activation("relu"), layers.Conv2D(4, 3),
        layers.BatchNormalization(axis=3, momentum=0.7), layers.Flatten(), layers.Dense(8),
        layers.BatchNormalization(axis=1, scale=False, center=False), layers.Dense(3),
    ]  # fmt: skip
    if keras.backend.floatx() == "float32":  # MXNet before 1.7 infers no shapes after Dense
        del parts[-2]
    return keras.models.Sequential(parts)


def fitted(keras, is_asked, counts=COUNTS, verify=False):
    model = keras_model(keras)
    shapes = [array.shape for array in model.get_weights()]
    averages = [array.min() in (0, 1) for array in model.get_weights()]
    model.set_weights([
        array if is_average else value(str(place), shape)
        for place, (array, shape, is_average) in enumerate(
            zip(model.get_weights(), shapes, averages)
        )
    ])  # fmt: skip
    if is_asked is not None:
        compat.parallelize(model, sync_batch_norm=is_asked)
    record = _verified(model, model.name) if verify else None
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    losses = [float(model.train_on_batch(rows(n), rows(n)[:, :3])) for n in counts]
    return [np.array(losses), *model.get_weights()], model, record


def test_keras_models_equal_one_device(keras):
    expected, _, _ = fitted(keras, None)
    with no_warning():
        found, model, record = fitted(keras, True, verify=True)
    assert record.steps["train"] == 1 and not record.uncompared
    assert_close(found, expected, 1e-7 if keras.backend.floatx() == "float64" else 1e-3)
    assert len(replicas_of(model).phases["train"].bodies) == 3
    apart, _, _ = fitted(keras, False)
    assert abs(apart[0][-1] - expected[0][-1]) > 1e-4


SCRIPT = """\
import numpy as np

import compat

compat.configure_gpu()

from keras.layers import BatchNormalization, Dense
from keras.models import Sequential

random = np.random.RandomState(0)
x, y = random.normal(size=(12, 8)), random.normal(size=(12, 1))
layers = Dense(4, use_bias=False, input_shape=(8,)), BatchNormalization(name="norm"), Dense(1)
model = compat.parallelize(Sequential(layers, name="net"))
model.compile("sgd", "mse")
model.fit(x, y, batch_size=4, verbose=0)
model.evaluate(x, y, verbose=0)
"""
RESULT = """\

compat test: train.py on 3 simulated devices of mxnet

model 'net' on cpu(0), cpu(1), cpu(2)
  verified: {}; N values
  largest difference: D of its size
  products ran, forward + backward: cpu(0) 2 + 2, cpu(1) 2 + 2, cpu(2) 2 + 2
"""
NORMALIZED = """\
  not compared: 3 training steps (layer 'norm' normalizes each device's rows by their own \
statistics)
    compared instead: 6 values of the outputs in inference
    to compare them: pass sync_batch_norm=True (or --sync-batch-norm)
NOT COMPARED on several devices: training steps. All else is the same.

NOT RUN as 2 ranks: Ranks of mxnet train together through Horovod, which is not installed. Build \
it where mxnet is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 pip install --no-build-isolation \
--no-cache-dir horovod==0.28.1 (that needs a C++ compiler, setuptools<60 and cmake<4). Or start \
the script without a launcher (compat run without -n). -n 0 leaves ranks out.
"""


def test_a_script_with_batch_normalization_is_the_same_if_it_is_synchronized(tmp_path):
    """If not, training was not compared: neither the text nor the exit status says otherwise."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = RESULT.format("1 test step") + NORMALIZED
    synchronized = RESULT.format("3 training steps, 1 test step") + "The same on several devices.\n"
    expected = {(): (3, alone), ("-n", "0", "--sync-batch-norm"): (0, synchronized)}
    for options, (expected_status, text) in expected.items():
        command = [sys.executable, "-m", "compat", "test", *options, str(script)]
        status, out, err = ended(command)
        verdict = re.sub(r"; \d+ values", "; N values", out.rpartition("-" * 72)[2])
        verdict = re.sub(r": \S+ of its size.*", ": D of its size", verdict)
        assert (status, verdict) == (expected_status, text), err


def test_keras_models_within_another_that_ask_for_it(keras):
    """A request of a model is one for all within it, and for none outside."""
    layers, results = keras.layers, []
    x = rows(14)
    for inner, outer in ((None, None), (True, False), (False, True), (False, False)):
        within = keras.models.Sequential([
            layers.Dense(4, input_shape=(36,), kernel_initializer="ones"),
            layers.BatchNormalization(axis=1),
        ])  # fmt: skip
        model = keras.models.Sequential([within, layers.Dense(3, kernel_initializer="ones")])
        if inner is not None:
            parallelize(within, inner)
            parallelize(model, outer)
        model.compile("sgd", "mse")
        model.train_on_batch(x, x[:, :3])
        results.append(model.get_weights())
    expected, *synchronized, apart = results
    for found in synchronized:
        assert_close(found, expected, 1e-4)
    assert max(np.abs(a - b).max() for a, b in zip(apart, expected)) > 1e-3
