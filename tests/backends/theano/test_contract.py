"""Theano: what every backend must do, its flags, files and GPUs, and models on its contexts."""

import json
import os
import stat
import sys
import textwrap

import numpy as np
import pytest
from terminals import terminal

import compat
from compat import _keras
from compat._backends.theano import flags as theano_flags
from compat._configuration import packages, registry
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat.testing import CASES, DEVICES, slow, span

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
    names = [device.name for device in vars(model)["_compat_functions"].devices]
    return dict(zip(names, zip(made.forward, made.backward)))


def number_of_products(function):
    """How many products of matrices a compiled function computes."""
    names = [type(node.op).__name__ for node in function.maker.fgraph.apply_nodes]
    return sum(name.startswith(("Dot", "Gem", "BatchedDot")) for name in names)


def products(function):
    from compat._backends.theano import verification  # imports theano

    return verification.products(function)


def ran(model):
    """For each device, how many products of layers ran there so far, and of their gradients."""
    if not getattr(_keras.inner_model(model).train_function, "forward", None):  # not made yet
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
    across_rows = "found"  # right, and a warning says what it costs

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
        for flags, problem in (
            ({"optimiser": "None"}, "Theano 1.0.5 has no flag optimiser"),
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


# Before the import ----------------------------------------------------------------------------


@span
def test_flags_before_the_import(theano_process, tmp_path):
    """The user's flags are kept, ours go before them, and Keras and Theano agree on floatX."""
    shown = theano_process(
        """
        import compat
        configuration = compat.configure_gpu(gpus=0, floatx="float64", memory=0.5)
        import theano, keras, numpy
        config = theano.config
        model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
        model.compile("sgd", "mse")
        loss = model.train_on_batch(numpy.ones((4, 3)), numpy.zeros((4, 2)))
        show(
            config=[config.device, config.floatX, config.gcc.cxxflags, config.contexts],
            keras=[keras.backend.floatx(), str(keras.backend.get_value(model.weights[0]).dtype)],
            finite=bool(numpy.isfinite(loss)),
            variables=configuration.environ,
            again=compat.configure_gpu(gpus=0, floatx="float64", memory=0.5) is configuration,
            reason=configuration.reason,
            devices=configuration.devices,
            report=str(configuration).splitlines(),
        )
        """,
        flags=r"device=gpu0,gcc.cxxflags='-DA=\"1,2\"',floatX=float32,contexts=a->cuda0,linker=py,cxx=",
    )
    flags = (
        r"device=cpu,gcc.cxxflags=-DA=\\\"1\,2\\\",floatX=float64,contexts=,"
        "linker=py,cxx=,base_compiledir={},optimizer=fast_compile".format(COMPILED)
    )
    assert shown["config"] == ["cpu", "float64", r"-DA=\"1,2\"", ""]
    assert shown["keras"] == ["float64", "float64"] and shown["finite"] and shown["again"]
    assert shown["variables"] == {"CUDA_VISIBLE_DEVICES": "-1", "THEANO_FLAGS": flags}
    assert shown["reason"] == "KERAS_BACKEND=theano"
    assert shown["devices"] == ["cpu"]
    keras = packages.version("keras")
    assert shown["report"] == [
        "backend    theano (KERAS_BACKEND=theano)",
        "versions   theano 1.0.5, keras " + keras,
        "asked      gpus=0, memory: 0.5 of each GPU, floatx: float64",
        "chosen     CPU, as asked",
        "devices    cpu",
        "variables  CUDA_VISIBLE_DEVICES=-1",
        "           THEANO_FLAGS=" + flags,
        "applied    theano.config.device = cpu",
        "           theano.config.floatX = float64",
        "           memory=0.5 of each GPU: there is no GPU to reserve it on",
        "           keras.backend.set_floatx('float64')",
        "warnings   none",
    ]


def plugged(machine, gpus):
    """PATH with these GPUs in nvidia-smi, and all else that is on it."""
    path = os.environ["PATH"]
    machine.plug(gpus)
    return os.environ["PATH"] + os.pathsep + path


@slow
def test_gpus_that_do_not_come_up_are_a_warning(theano_process, machine):
    """Theano itself logs an error and says that its device is cuda0."""
    shown = theano_process(
        """
        configuration, warned = configured(gpus=[2, 0], memory="2GiB")
        import theano
        config = theano.config
        show(
            config=[config.device, config.contexts, config.gpuarray.preallocate],
            variables=[configuration.environ[name] for name in sorted(configuration.environ)][:2],
            devices=configuration.devices,
            applied=configuration.applied,
            warned=[str(w.message) for w in warned],
            reported=configuration.warnings,
            where=[w.filename for w in warned],
        )
        """,
        flags="",
        PATH=plugged(machine, 3),
    )
    assert shown["config"] == ["cuda0", "dev0->cuda0;dev1->cuda1", 2048]
    assert shown["variables"] == ["PCI_BUS_ID", "2,0"]
    assert shown["devices"] == ["cpu"]
    assert shown["applied"] == [
        "theano.config.device = cuda0",
        "theano.config.contexts = dev0->cuda0;dev1->cuda1",
        "theano.config.gpuarray.preallocate = 2048",
        "cuda0, cuda1 did not come up: the package pygpu is missing, or older than 0.7",
    ]
    assert (
        shown["warned"]
        == shown["reported"]
        == [
            MISSING.format("cuda0, cuda1"),
            "GPU 2,0 was asked for, but theano sees cpu. Going on with cpu.",
        ]
    )
    assert set(shown["where"]) <= {"-c", "<string>"}  # the caller's line


@slow
def test_a_gpu_in_the_flags_is_not_given_up_in_silence(theano_process, machine):
    shown = theano_process(
        """
        configuration, warned = configured()
        import theano
        show(
            device=theano.config.device,
            warned=[str(w.message) for w in warned],
            reported=configuration.warnings,
        )
        """,
        flags="device=cuda1,FloatX=float32,bogus=1,cxx=",
        PATH=plugged(machine, 0),
    )
    assert shown["device"] == "cpu"
    assert (
        shown["warned"]
        == shown["reported"]
        == [
            "Theano's flags say device=cuda1, but compat chose CPU, so device=cpu was set. `compat "
            "env` tells which GPUs are visible.",
            "FloatX=float32: Theano 1.0.5 has no flag FloatX, and ignores it. Did you mean floatX?",
        ]
    )


def test_a_device_that_is_no_cuda_gpu_is_not_given_up_in_silence(theano, machine):
    machine.plug(1)
    hidden = choose(parse_gpus(None), None, {"CUDA_VISIBLE_DEVICES": ""})
    assert theano.overruled(Settings(hidden), {"THEANO_FLAGS": "device=opencl0:0"}) == [
        "Theano's flags say device=opencl0:0, but compat chose CPU, so device=cpu was set. For "
        'a device that is no CUDA GPU pass theano_flags={"device": "opencl0:0"}.'
    ]


@pytest.mark.parametrize("flags", ["device=opencl0:0", "contexts=a->opencl0:0;b->opencl0:1"])
def test_opencls_gpus_in_the_flags_are_kept_unless_declined(flags):
    def environ(gpus, memory=None):
        devices = choose(parse_gpus(gpus), None, {}, discover=list)
        settings = Settings(devices, memory)
        before, backend = {"THEANO_FLAGS": flags}, registry.load("theano")
        assert backend.overruled(settings, before) == []
        return backend.environ(settings, before)

    assert environ(None) == {}
    assert environ(None, Memory(fraction=0.5)) == {
        "THEANO_FLAGS": flags + ",gpuarray.preallocate=0.5"
    }
    assert "device=cpu" in environ(0)["THEANO_FLAGS"]


def test_a_gpu_that_does_not_come_up_is_an_error_if_strict(theano_process, machine):
    shown = theano_process(
        """
        text = refusal(gpus=1, strict=True)
        show(text=text, flags=os.environ["THEANO_FLAGS"])
        """,
        flags="device=cpu",
        PATH=plugged(machine, 1),
    )
    assert shown["text"] == "DeviceFailedError: " + MISSING.format("cuda0")
    assert shown["flags"].startswith("device=cpu,")


def test_the_reason_is_theanos_own():
    """What Theano logs with pygpu installed, here without CUDA (seen with pygpu 0.7.6)."""
    from types import SimpleNamespace

    from compat._backends.theano import reason

    with_pygpu = SimpleNamespace(gpuarray=SimpleNamespace(pygpu=True))
    logged = RuntimeError(b'Could not load "libcuda.so"', 2)
    assert reason(with_pygpu, logged) == (
        'Could not load "libcuda.so", 2',
        "Look at the driver (nvidia-smi) and at CUDA (CUDA_ROOT), or choose the CPU: gpus=0.",
    )
    assert reason(with_pygpu, None) == (
        "theano logged the reason when it was imported",
        "Look at its log, or call configure_gpu() before `import theano`.",
    )


def test_the_importer_may_have_parts_of_theano_alone(theano_process, tmp_path):
    (tmp_path / "imports_parts.py").write_text("from theano import function, shared\n")
    shown = theano_process(
        """
        import sys
        sys.path.insert(0, {!r})
        import imports_parts
        from compat._backends.theano import backend
        show(said=backend.initialised())
        """.format(str(tmp_path))
    )
    assert shown["said"] == "theano was imported (by imports_parts)"


# Devices --------------------------------------------------------------------------------------

TRAIN_BOTH = """
    import compat
    configuration = compat.configure_gpu(simulate={devices})
    import keras, numpy
    from compat.testing import initialise, largest_difference

    def train(*layers):
        data = numpy.random.RandomState(0).normal(size=(13,) + layers[0].batch_input_shape[1:])
        weights = []
        for parallel in (False, True):
            model = keras.models.Sequential([type(l).from_config(l.get_config()) for l in layers])
            start = initialise(model).get_weights()
            if parallel:
                compat.parallelize(model)
            model.compile("sgd", "mse")
            for rows in (13, 13, 11):
                model.train_on_batch(data[:rows], numpy.ones((rows, 2)))
            weights.append(model.get_weights())
        differences.append([largest_difference(start, weights[0]), largest_difference(*weights)])
        return model.train_function

    differences, layers = [], keras.layers
"""


def assert_the_same(differences):
    for trained, difference in differences:
        assert trained > 0.01 and difference < 1e-5


def test_compiled_functions_do_the_same(theano_process):
    """Of few different operations, and no weights by Theano's generator: each takes a second."""
    program = """
    zeros = {"kernel_initializer": "zeros", "use_bias": False}
    made = train(layers.Dense(5, input_shape=(4,), **zeros), layers.Dense(2, **zeros)).backward
    thunks = [list(zip(f.fn.nodes, f.fn.thunks)) for f in made]
    in_python = [n.op for each in thunks for n, thunk in each if not hasattr(thunk, "cthunk")]
    show(
        devices=configuration.devices,
        differences=differences,
        operations=[len(each) for each in thunks],
        in_python=[type(op).__name__ for op in in_python],
    )
    """
    shown = theano_process(
        TRAIN_BOTH.format(devices=3) + program, flags=COMPILING, OMP_NUM_THREADS="1"
    )
    assert shown["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert_the_same(shown["differences"])
    assert min(shown["operations"]) > 5
    assert set(shown["in_python"]) <= {"Dot22"}  # which is in C where there is a BLAS


@slow
def test_optimized_functions_do_the_same(theano_process):
    """With all of Theano's optimizations, as users have it: operations overwrite their inputs."""
    program = """
    train(layers.SimpleRNN(4, input_shape=(5, 3)), layers.Dense(2))
    show(differences=differences)
    """
    shown = theano_process(
        TRAIN_BOTH.format(devices=2) + program,
        optimizer="fast_run",
        OMP_NUM_THREADS="1",
    )
    assert_the_same(shown["differences"])


# After the import -----------------------------------------------------------------------------


@span
def test_after_the_import_what_theano_allows_is_set(theano_process):
    shown = theano_process(
        """
        import keras
        import compat, theano
        def operations():
            x = theano.tensor.vector()
            made = theano.function([x], theano.tensor.exp(x) * 2 + 1)
            return [type(n.op).__name__ + str(n.op) for n in made.maker.fgraph.toposort()]
        config = theano.config
        before = config.floatX, operations()
        late = refusal(
            gpus=0, floatx="float64",
            theano_flags={"base_compiledir": "/tmp/other", "compiledir": "/tmp/third"},
        )
        untouched = [config.floatX, keras.backend.floatx()]
        configuration = compat.configure_gpu(
            gpus=0, floatx="float64",
            theano_flags={"optimizer": "fast_run", "openmp": False, "linker": "py"},
        )
        show(
            late=late, before=before, untouched=untouched, applied=configuration.applied,
            config=[config.floatX, config.optimizer, config.openmp, config.linker],
            keras=keras.backend.floatx(), operations=operations(),
            variables=configuration.environ,
        )
        """,
        flags="linker=py,cxx=",
    )
    assert shown["late"] == (
        "TooLateError: configure_gpu() came too late for theano: base_compiledir and compiledir "
        "were fixed when theano was imported{}.\n"
        "Call it before the first `import theano` or `import keras`."
    ).format(" (by keras.backend.theano_backend)" if ORDERED else "")
    assert shown["untouched"] == ["float32", "float32"] and shown["before"][0] == "float32"
    assert shown["config"] == ["float64", "fast_run", False, "py"]
    assert shown["keras"] == "float64"
    assert not any("Composite" in name for name in shown["before"][1])
    assert any("Composite" in name for name in shown["operations"])
    assert shown["variables"] == {}
    assert shown["applied"] == [
        "theano.config.device = cpu",
        "theano.config.floatX = float64 (set at run time)",
        "theano.config.optimizer = fast_run (set at run time)",
        "theano.config.openmp = False",
        "theano.config.linker = py",
        "keras.backend.set_floatx('float64')",
    ]


# Files ----------------------------------------------------------------------------------------


def test_persist_writes_the_file_that_wins_and_theano_reads_it(theano_process, tmp_path):
    first, last = tmp_path / "first.rc", tmp_path / "last.rc"
    first.write_text("[global]\nfloatX = float32\ncontexts = a->cuda0\n")
    last.write_text("# mine\n[dnn]\nenabled = False  \n")
    last.chmod(0o600)
    shown = theano_process(
        """
        import compat
        options = {"theano_flags": {"gcc.cxxflags": "-DA=50%"}}
        show(applied=compat.configure_gpu(
            gpus=0, floatx="float64", persist=True, **options).applied)
        """,
        flags="contexts=,cxx=",
        THEANORC="{}:{}".format(first, last),
    )
    assert first.read_text() == "[global]\nfloatX = float32\ncontexts = a->cuda0\n"
    assert last.read_text() == (
        "# mine\n[dnn]\nenabled = False  \n\n[global]\ndevice = cpu\ncontexts = \n"
        "floatX = float64\n\n[gcc]\ncxxflags = -DA=50%%\n"
    )
    assert stat.S_IMODE(last.stat().st_mode) == 0o600
    assert shown["applied"][3:] == [
        "{} is read, too".format(first),
        "{} is read, too".format(last),
        "{} written, as it was: {}.before-compat".format(last, last),
        "keras.backend.set_floatx('float64')",
    ]
    shown = theano_process(
        """
        from theano import config
        show(
            config=[config.device, config.contexts, config.floatX, config.gcc.cxxflags],
            dnn=config.dnn.enabled,
        )
        """,
        THEANORC="{}:{}".format(first, last),
    )
    assert shown == {"config": ["cpu", "", "float64", "-DA=50%"], "dnn": "False"}


def test_a_file_that_theano_cannot_read_is_an_error_before_the_import(theano_process, tmp_path):
    path = tmp_path / ".theanorc"
    path.write_text("floatX = float32\n")
    shown = theano_process(
        """
        show(text=refusal(gpus=0, persist=True), imported="theano" in sys.modules)
        """
    )
    told = "ConfigurationFileError: {} cannot be read: File contains no section".format(path)
    assert shown["text"].startswith(told)
    assert not shown["imported"]
    assert path.read_text() == "floatX = float32\n"


# What is asked, in Theano's words -------------------------------------------------------------


@pytest.mark.parametrize(
    "memory, megabytes",
    [
        (Memory(grow=True), "0"),
        (Memory(fraction=0.25), "0.25"),
        (Memory(fraction=1.0), "0.95"),
        (Memory(size=4 * 2**30), "4096"),
        (Memory(size=3 * 10**9), "2861.02294921875"),
        (Memory(size=2**20), "2"),  # 1 would be a fraction: all of it
    ],
)
def test_memory(tmp_path, memory, megabytes):
    settings = Settings(Devices(["5"], [5]), memory)
    flags = theano_flags.asked(settings, {"HOME": str(tmp_path)}, [2])
    assert flags == {"device": "cuda2", "gpuarray.preallocate": megabytes}


@span
def test_the_environment_before_the_import(theano, tmp_path):
    (tmp_path / ".theanorc").write_text("[global]\ninit_gpu_device = cuda1\nfloatX = float32\n")
    home = {"HOME": str(tmp_path), "THEANO_FLAGS": "openmp"}  # which Theano warns that it ignores
    assert theano.environ(Settings(Devices(["3", "1"], [1, 0])), home) == {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "THEANO_FLAGS": "openmp,device=cuda0,contexts=dev0->cuda0;dev1->cuda1,init_gpu_device=",
    }
    one = dict(home, CUDA_VISIBLE_DEVICES="3", THEANO_FLAGS="device=cuda0,init_gpu_device=")
    assert theano.environ(Settings(Devices(["3"], [0])), one) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("optimizer=None", "it is a str"),
        ({"floatX": "float32"}, "floatX is set by floatx="),
        ({"a b": "1"}, "'a b' is no name of a flag"),
        ({"mode": None}, "None is neither a number, True, False, nor one line of text"),
        ({"mode": "a\nb"}, "'a\\nb' is neither a number, True, False, nor one line of text"),
    ],
)
def test_wrong_forms_of_theano_flags(theano, tmp_path, flags, problem):
    settings = Settings(Devices(), options={"theano_flags": flags})
    home = {"HOME": str(tmp_path)}
    assert refusal(compat.InvalidArgumentError, theano.environ, settings, home) == (
        "theano_flags={!r} is not understood: {}. Use a dictionary of Theano's flags, such as "
        '{{"optimizer": "fast_compile", "openmp": True}}.'.format(flags, problem)
    )


# Problems -------------------------------------------------------------------------------------


@pytest.fixture
def problems(theano, tmp_path):
    def problems(**environ):
        environ = dict({"HOME": str(tmp_path), "KERAS_HOME": str(tmp_path)}, **environ)
        return theano.problems(dict({"PATH": os.environ["PATH"]}, **environ))

    return problems


@span
def test_nothing_is_wrong(problems):
    assert problems() == []
    assert problems(THEANO_FLAGS="device=cpu,openmp=true,floatX=32,dnn.enabled=auto") == []


@span
def test_flags_that_theano_ignores(problems, theano):
    unknown = "Theano {} has no flag".format(theano.import_framework().__version__)
    flags = "FloatX=float32,optimiser=fast_run,gpuarray.prealocate=1,bogus=1"
    assert problems(THEANO_FLAGS=flags) == [
        "FloatX=float32: {} FloatX, and ignores it. Did you mean floatX?".format(unknown),
        "optimiser=fast_run: {} optimiser, and ignores it. Did you mean optimizer?".format(unknown),
        "gpuarray.prealocate=1: {} gpuarray.prealocate, and ignores it. Did you mean "
        "gpuarray.preallocate?".format(unknown),
        "bogus=1: {} bogus, and ignores it.".format(unknown),
    ]


@span
def test_the_flags_read_from_the_file_are_theanos(theano):
    parameters = theano.import_framework().configparser._config_var_list
    assert theano_flags.defined() == {parameter.fullname for parameter in parameters}


def test_what_is_wrong(problems, tmp_path):
    assert problems(THEANO_FLAGS="device = cpu,openmp,floatX= float32") == [
        "THEANO_FLAGS: 'device = cpu' has a space beside its '=', Theano does not take it for "
        "device. Write device=cpu.",
        "THEANO_FLAGS: 'openmp' has no value, Theano ignores it.",
        "THEANO_FLAGS: 'floatX= float32' has a space beside its '=', Theano does not take it for "
        "floatX. Write floatX=float32.",
    ]
    assert problems(PATH=str(tmp_path)) == [
        "g++ is not on PATH: Theano runs everything in Python, slowly. On Debian and Ubuntu: "
        "apt-get install g++",
    ]
    assert problems(THEANO_GPU_IS_ALREADY_ACTIVE="Yes", THEANO_FLAGS="a='") == [
        "THEANO_GPU_IS_ALREADY_ACTIVE is set: a process that uses a GPU started this one, and "
        "Theano will use none here. If it may: unset THEANO_GPU_IS_ALREADY_ACTIVE",
        "THEANO_FLAGS=a=' cannot be read: No closing quotation. Theano cannot be imported with "
        "it. Put a backslash before a quote, a comma or a backslash that belongs to a value.",
    ]


def test_what_is_wrong_in_files(problems, tmp_path):
    path = tmp_path / "rc"
    path.write_text("[global]\nfloatX = float64\n")
    keras = tmp_path / "keras.json"
    keras.write_text('{"floatx": "float16"}')
    assert problems(THEANORC="{}:~/missing".format(path)) == [
        "THEANORC names {}, which does not exist. For Theano's own files: unset THEANORC".format(
            tmp_path / "missing"
        ),
        "floatX=float64: Keras sets float16 when it is imported, as {} says or by default. Pass "
        "floatx= to configure_gpu(), which sets both.".format(keras),
    ]
    path.write_text("openmp = True\n")
    found = problems(THEANORC=str(path))
    assert len(found) == 1
    assert found[0].startswith("{} cannot be read: File contains no section".format(path))
