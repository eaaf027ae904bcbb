"""Theano: what every backend must do, its flags, files and GPUs, and models on its contexts."""

import json
import os
import sys
import textwrap

import numpy as np
import pytest
from terminals import terminal

import compat
from compat import _keras
from compat._backends.theano import flags as theano_flags
from compat._configuration import packages, registry
from compat._configuration.device_choice import Devices
from compat._configuration.settings import Memory, Settings
from compat.testing import CASES, DEVICES, span

from ..messages import refusal
from ..shared_parts import KerasParts

# Keras takes TensorFlow, and Theano compiles with all its optimizations, where nothing is said.
os.environ.setdefault("KERAS_BACKEND", "theano")
# What the tests of placement read: functions count what they run, and keep the values between.
RECORDING = "profile=True,profiling.destination={},allow_gc=False".format(os.devnull)
# They run Theano's implementations in Python, which takes a third of the time that it takes to
# compile those in C; test_compiled_functions_do_the_same takes them.
IN_PYTHON = "optimizer=fast_compile,optimizer_excluding=conv_gemm:AbstractConvCheck,cxx="
COMPILING = "gcc.cxxflags=-O0 -g0"
os.environ.setdefault("THEANO_FLAGS", ",".join([IN_PYTHON, RECORDING]))

# Whether the order of sys.modules tells who imported a module.
ORDERED = sys.version_info < (3, 8)
# What is compiled once is used by every process here, and by other checkouts under tox.
COMPILED = os.environ.get("COMPAT_TEST_COMPILED", os.path.expanduser("~/.theano"))
MISSING = (
    "theano did not bring up {}: the package pygpu is missing, or older than 0.7.\n"
    "Install libgpuarray and pygpu 0.7, or choose the CPU: gpus=0."
)


#: What programs begin with that run in a process of their own.
BEGIN = """\
import json, os, sys, warnings

def show(**named):
    print("shown:" + json.dumps(named))

def configured(**options):
    "The configuration, and compat's warnings."
    import compat
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        configuration = compat.configure_gpu(**options)
    return configuration, [w for w in caught if w.category is compat.CompatWarning]

def refusal(**options):
    "The error that the call of configure_gpu() ends with."
    import compat
    try:
        compat.configure_gpu(**options)
    except compat.CompatError as error:
        return type(error).__name__ + ": " + str(error)

"""


@pytest.fixture
def theano():
    return registry.load("theano")


@pytest.fixture
def theano_process(run, tmp_path, monkeypatch):
    """Run a program in a process with a home of its own; it calls ``show`` on what to return."""
    # Set by the tests in this process:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "THEANO_GPU_IS_ALREADY_ACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def theano_process(program, flags="cxx=", optimizer="fast_compile", **environ):
        compiled = {"base_compiledir": COMPILED, "optimizer": optimizer}
        environ["THEANO_FLAGS"] = theano_flags.merge_flags(flags, compiled)
        environ.setdefault("HOME", str(tmp_path))
        return json.loads(run(BEGIN + textwrap.dedent(program), **environ).partition("shown:")[2])

    return theano_process


def functions(model):
    """For each device of a parallel model, its compiled functions: forward and backward."""
    made = _keras.inner_model(model).train_function
    names = [device.name for device in vars(model)["_compat_replicas"].devices]
    return dict(zip(names, [program.functions() for program in made.plan.programs]))


def number_of_products(function):
    """How many products of matrices a compiled function computes."""
    names = [type(node.op).__name__ for node in function.maker.fgraph.apply_nodes]
    return sum(name.startswith(("Dot", "Gem", "BatchedDot")) for name in names)


def products(function):
    from compat._backends.theano import executions  # imports theano

    return executions.products(function)


def ran(model):
    """For each device, how many products of layers ran there so far, and of their gradients."""
    if getattr(_keras.inner_model(model).train_function, "plan", None) is None:  # not made yet
        return {}

    def runs(function):
        return sum(function.profile.apply_callcount.get(node, 0) for node in products(function))

    return {name: np.array(list(map(runs, made))) for name, made in functions(model).items()}


def places(function):
    """Where the results of a function's products are: the GPUs that hold them, or "host"."""
    values = [function.fn.storage_map[node.outputs[0]][0] for node in products(function)]
    return {value.context.dev if hasattr(value, "context") else "host" for value in values}


@pytest.fixture(scope="session", autouse=True)
def profiles_not_printed():
    yield
    from theano.compile import profiling

    del profiling._atexit_print_list[:]


def few_streams(monkeypatch):
    """Theano draws from 15,360 streams, each of which takes a call of Python without a compiler."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    monkeypatch.setattr(MRG_RandomStreams, "n_streams", lambda self, size: 60)


@pytest.mark.row("Theano on several devices in one process")
class TestTheano(KerasParts):
    backend = "theano"
    across_rows = "right"  # the mean is reduced over the devices

    @pytest.fixture(autouse=True)
    def streams(self, configuration, monkeypatch):
        few_streams(monkeypatch)

    def placement(self, model, inputs, targets):
        if not ran(model):
            model.train_on_batch(inputs, targets)  # of the first step, some rows are tried besides
        before = ran(model)
        model.train_on_batch(inputs, targets)
        for device, made in functions(model).items():
            for function in made:
                assert places(function) == {self.place(device)}
        return {device: tuple(counts - before[device]) for device, counts in ran(model).items()}

    def place(self, device):
        return "host"

    def command(self, program):
        """Without the profiles, which Theano would print into the output."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THEANO_FLAGS", "optimizer=fast_compile,cxx=")
            return super().command(program)

    def shard_sizes(self, model, inputs, targets):
        """Rows of the first layer's product, which Theano still holds."""
        model.train_on_batch(inputs, targets)
        sizes = []
        for forward, _ in functions(model).values():
            held = forward.fn.storage_map
            first = next(n for n in forward.maker.fgraph.toposort() if n in products(forward))
            sizes.append(held[first.outputs[0]][0].shape[0])
        return sizes

    @span
    def test_each_device_has_functions_and_weights_of_its_own(self, keras):
        model = self.compiled(keras, "multi", parallel=True)
        model.train_on_batch(*CASES["multi"].data(13))
        weights = [
            {i.variable for i in made.maker.inputs if hasattr(i.variable, "get_value")}
            for pair in functions(model).values()
            for made in pair
        ]
        assert [len(each) for each in weights[::2]] == [8] * DEVICES
        for first in range(0, 2 * DEVICES, 2):
            assert weights[first] > weights[first + 1] > set()  # forward and backward
            for other in range(0, first, 2):
                assert not weights[first] & weights[other]
        assert weights[0] == set(model.weights)

    def test_functions_that_take_long_to_compile_are_shown_on_a_terminal(self, keras, monkeypatch):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 13)
        with terminal(monkeypatch) as printed:
            model.train_on_batch(inputs, targets)
            model.train_on_batch(inputs, targets)
        assert printed == ["compiling model {!r} for Theano".format(model.name), ""]

    def test_devices_compute_no_more_products_than_one_does(self, keras):
        """Going back takes the activations from going forward."""

        def build():
            layers = [keras.layers.Dense(5, activation="relu", input_shape=(4,))]
            layers += [keras.layers.Dense(units, activation="tanh") for units in (6, 3)]
            return keras.models.Sequential(layers)

        random = np.random.RandomState(1)
        inputs, targets = random.normal(size=(13, 4)), random.normal(size=(13, 3))
        plain, parallel = self.train_both(keras, build, "mse", inputs, targets, batch=13)
        one = number_of_products(plain.train_function.function)
        assert one == 3 + 5
        for forward, backward in functions(parallel).values():
            assert [number_of_products(made) for made in (forward, backward)] == [3, 5]

    def test_unrolled_loop(self, keras, configuration):
        """Its products are those of the function itself."""

        def build():
            loop = keras.layers.SimpleRNN(3, unroll=True, input_shape=(2, 4))
            return keras.models.Sequential([loop, keras.layers.Dense(2)])

        random = np.random.RandomState(1)
        inputs = random.normal(size=(13, 2, 4)).astype("float32")
        targets = random.normal(size=(13, 2)).astype("float32")
        _, model = self.train_both(keras, build, "mse", inputs, targets, batch=7)
        assert self.devices_of(model, inputs, targets) == sorted(configuration.devices)

    def test_dropout_masks_are_independent_and_those_of_the_way_back(self, keras):
        """Each row has a digit of its own in the gradient, so that tells all masks."""
        model = keras.models.Sequential(
            [
                keras.layers.Dropout(0.5, input_shape=(60,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            ]
        )
        compat.parallelize(model)
        model.compile(keras.optimizers.SGD(1.0), lambda _, y: y)
        inputs = np.ones((3, 60)) * [[1.0], [10.0], [100.0]]
        seen = []
        for _ in range(2):
            before = model.get_weights()[0]
            loss = model.train_on_batch(inputs, np.zeros((3, 1)))
            gradient = before - model.get_weights()[0]
            np.testing.assert_allclose(loss, (before * gradient).sum(), rtol=1e-4)
            kept = np.round(gradient[:, 0] * 3 / 2).astype(int)
            seen += [kept % 10, kept // 10 % 10, kept // 100]
        assert {0, 1} == set(np.ravel(seen))
        for first in range(len(seen)):  # three devices, two steps
            for second in range(first):
                assert 0.2 < np.mean(seen[first] == seen[second]) < 0.8

    def test_weight_that_no_loss_depends_on_is_the_error_of_one_device(self, keras):
        from theano.gradient import DisconnectedInputError

        class Idle(keras.layers.Dense):
            def call(self, inputs):
                return inputs

        dense = keras.layers.Dense(4, input_shape=(4,))
        stopping = [dense, keras.layers.Lambda(keras.backend.stop_gradient)]
        for first in [Idle(4, input_shape=(4,))], stopping:
            model = keras.models.Sequential(first + [keras.layers.Dense(4)])
            compat.parallelize(model).compile("sgd", "mse")
            with pytest.raises(DisconnectedInputError):
                model.train_on_batch(np.ones((5, 4)), np.ones((5, 4)))

    def test_input_of_ones_own_is_an_error(self, keras):
        tensor = keras.layers.Input(tensor=keras.backend.variable(np.ones((6, 4))))
        model = keras.models.Model(tensor, keras.layers.Dense(2)(tensor), name="mine")
        assert refusal(compat.UnsupportedError, compat.parallelize, model) == (
            "theano cannot run model 'mine' on several devices: an input of it is a tensor of the "
            "user's, Input(tensor=...), whose rows cannot be split. Give the model an "
            "Input(shape=...) and feed it."
        )

    def test_parts_of_a_model_cannot_be_placed(self, configuration):
        assert refusal(compat.UnsupportedError, compat.device, 0) == (
            "theano cannot place parts of a model on a device of their own. Leave "
            "compat.device() out; parallelize() may run the whole model on several."
        )

    @pytest.mark.row("subclassed models")
    @span
    def test_subclassed_model(self, keras, configuration):
        if packages.release(packages.version("keras")) < (2, 2):  # a model has inputs, or is none
            with pytest.raises(TypeError):
                type("Mine", (keras.models.Model,), {})()
            return

        class Branches(keras.models.Model):
            def __init__(self):
                super(Branches, self).__init__()
                self.hidden = keras.layers.Dense(16, activation="relu", kernel_initializer="ones")
                self.classes = keras.layers.Dense(4, activation="softmax")

            def call(self, inputs):
                return self.classes(self.hidden(inputs))

        inputs, targets = CASES["dense"].data(61)
        models, start = [], None
        for parallel in (False, True):
            model = Branches()
            if parallel:
                assert compat.parallelize(model) is model
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "categorical_crossentropy")
            model.train_on_batch(inputs[:3], targets[:3])  # it has weights from now on
            start = start or model.get_weights()
            model.set_weights(start)
            model.optimizer.set_weights([np.zeros_like(w) for w in model.optimizer.get_weights()])
            model.fit(inputs, targets, 16, 2, shuffle=False, verbose=0)
            models.append(model)
        self.close(models[0].get_weights(), models[1].get_weights())
        self.close(*[[model.predict(inputs)] for model in models])
        assert sorted(self.placement(models[1], inputs, targets)) == configuration.devices

    # What cannot change once Theano is imported, as it is here.

    def configure_again(self, theano, devices=None, **settings):
        return theano.configure(Settings(devices or Devices(simulated=DEVICES), **settings))

    @span
    def test_unknown_and_refused_flags(self, keras, theano):
        version = packages.version("theano")
        for flags, problem in (
            ({"optimiser": "None"}, "Theano {} has no flag optimiser".format(version)),
            (
                {"on_opt_error": "x"},
                'Invalid value ("x") for configuration variable "on_opt_error". Valid options are '
                "('warn', 'raise', 'pdb', 'ignore')",
            ),
        ):
            with pytest.raises(compat.InvalidArgumentError) as caught:
                self.configure_again(theano, options={"theano_flags": flags})
            assert str(caught.value) == (
                "theano_flags={!r} is not understood: {}. Use a dictionary of Theano's "
                'flags, such as {{"optimizer": "fast_compile", "openmp": True}}.'.format(
                    flags, problem
                )
            )

    @span
    def test_gpus_come_too_late(self, keras, theano):
        with pytest.raises(compat.TooLateError) as caught:
            self.configure_again(theano, Devices(["3", "1"], [1, 0]), memory=Memory(fraction=0.5))
        assert str(caught.value).startswith(
            "configure_gpu() came too late for theano: device and contexts and "
            "gpuarray.preallocate were fixed when theano was imported"
        )
        self.configure_again(theano)  # what is said already comes never too late
