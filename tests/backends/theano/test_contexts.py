"""Theano on several real contexts, which ``COMPAT_TEST_CONTEXTS`` names.

PoCL has them without a GPU (py37-theano-pocl in tox.ini). With three GPUs it is
``COMPAT_TEST_MODE=contexts COMPAT_TEST_CONTEXTS=cuda0,cuda1,cuda2 pytest tests/backends``.
"""

import os
import types

import numpy as np
import pytest

import compat
from compat._configuration import registry
from compat.testing import CASES, DEVICES, SHARDS, initialise, slow

from . import test_contract

CONTEXTS = os.environ["COMPAT_TEST_CONTEXTS"].split(",")
OTHERS = ["dev{}->{}".format(number, gpu) for number, gpu in enumerate(CONTEXTS) if number]
FLAGS = {"device": CONTEXTS[0], "contexts": ";".join(OTHERS)}
# GPUs have no implementations in Python. With all optimizations there is less to compile.
os.environ["THEANO_FLAGS"] = os.environ["THEANO_FLAGS"].replace(
    test_contract.IN_PYTHON,
    "{},base_compiledir={}".format(test_contract.COMPILING, test_contract.COMPILED),
)
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # without it Theano does not profile
os.environ["POCL_EXTRA_BUILD_FLAGS"] = "-cl-opt-disable"  # kernels compile in a quarter of the time
# Fixtures:
profiles_not_printed = test_contract.profiles_not_printed
theano_process = test_contract.theano_process


# Uneven; kernels compile for each size. In the tests of shards these devices train on others.
BATCHES = [(61, 122)]


class InNumpy:
    """The model of ``OnContexts`` on one device, which would have to be compiled, too."""

    def __init__(self, weights):
        self.weights = weights
        self.velocity = np.zeros_like(weights[0])

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = weights

    def step(self, inputs, targets):
        """One of SGD with momentum; the loss before it."""
        wrong = self.predict(inputs) - targets
        gradient = inputs.T @ (2 * wrong / targets.size)
        self.velocity = 0.9 * self.velocity - 0.05 * gradient
        self.weights = [self.weights[0] + self.velocity]
        return np.mean(wrong**2)

    def fit(self, inputs, targets, batch_size, **options):
        batches = [slice(i, i + batch_size) for i in range(0, len(inputs), batch_size)]
        losses = [self.step(inputs[batch], targets[batch]) for batch in batches]
        loss = np.average(losses, weights=[len(inputs[batch]) for batch in batches])
        return types.SimpleNamespace(history={"loss": [loss]})

    def evaluate(self, inputs, targets, **options):
        return np.mean((self.predict(inputs) - targets) ** 2)

    def predict(self, inputs, **options):
        return inputs @ self.weights[0]


class OnContexts(test_contract.TestTheano):
    """The contract, on contexts. One model serves many tests: compiling takes the time."""

    model = None

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        if self.model is None:
            # Of few operations; random weights would be the GPUs' work, too.
            few = {"kernel_initializer": "zeros", "use_bias": False}
            layer = keras.layers.Dense(4, input_shape=(8,), **few)
            model = keras.models.Sequential([layer], name=name)
            self.model = self.ready(keras, model)
        weights = initialise(self.model).get_weights()
        if not parallel:
            return InNumpy(weights)
        for state in self.model.optimizer.weights:  # as new
            keras.backend.set_value(state, np.zeros_like(keras.backend.get_value(state)))
        return self.model

    def place(self, device):
        return device


@pytest.mark.row("Theano on several devices in one process")
class TestContexts:
    """What the contract says of numbers, places and shards.

    All else in it is the same code for all devices, and takes minutes to compile for these.
    """

    contract = OnContexts()

    @pytest.fixture(scope="class")
    def configuration(self):
        return compat.configure_gpu(theano_flags=FLAGS)

    @pytest.fixture
    def keras(self, configuration):
        import keras

        return keras

    def test_configuration_reports_the_contexts(self, configuration):
        assert configuration.devices == CONTEXTS
        assert len(set(CONTEXTS)) == DEVICES
        assert "devices    " + ", ".join(CONTEXTS) in str(configuration)
        assert not configuration.warnings  # the flags are asked for, if they name no CUDA GPU
        assert compat.configure_gpu(theano_flags=FLAGS) is configuration

    def test_trains_to_the_numbers_of_one_device(self, keras):
        self.contract.test_trains_to_the_numbers_of_one_device(keras, BATCHES, "dense", "sgd")

    @slow
    def test_evaluates_and_predicts_what_one_device_does(self, keras):
        self.contract.test_evaluates_and_predicts_what_one_device_does(keras, BATCHES, "dense")

    def test_forward_and_backward_run_on_every_device(self, keras, configuration):
        self.contract.test_forward_and_backward_run_on_every_device(keras, configuration, "dense")

    @pytest.mark.parametrize("samples", sorted(SHARDS))
    def test_batch_is_split_evenly(self, keras, samples):
        self.contract.test_batch_is_split_evenly(keras, samples)

    def test_unrolled_loop(self, keras, configuration):
        self.contract.test_unrolled_loop(keras, configuration)

    def test_default_context_is_the_first_again(self, keras):
        """Each device's functions are made, and run, while its context is the default one."""
        from theano.gpuarray.type import get_context

        self.contract.compiled(keras, "dense", parallel=True)
        assert get_context(None).dev == CONTEXTS[0]
        weights = keras.backend.variable(np.ones((2, 3)))
        assert weights.container.value.context.dev == CONTEXTS[0]

    def test_operations_are_counted_where_values_lie(self, keras):
        """Also where functions that are called as one device's run on another."""
        from compat._backends.theano import executions

        model = self.contract.compiled(keras, "dense", parallel=True)
        inputs, targets = CASES["dense"].data(61)
        with registry.load("theano").executed(model) as counts:
            model.train_on_batch(inputs, targets)
        assert sorted(counts) == sorted(CONTEXTS) and all(counts.values())
        replicas = vars(model)["_compat_replicas"]
        recorder = executions.CallRecorder(replicas)
        forward = model.train_function.plan.programs[0].forward[0].function
        shard = [inputs[:20].astype("float32")]
        for device in replicas.devices:
            device.functions.add(forward)
        with replicas.devices[0].current():
            recorder.note(forward, forward(*shard))
        assert recorder.counts[CONTEXTS[0]] and not recorder.counts[CONTEXTS[1]]

    @pytest.mark.slow
    def test_loop_is_run_on_no_other_device(self, keras):
        """Theano's Scan, which moves whole to GPUs, fails on OpenCL, and in compat's hands, too."""
        options = dict.fromkeys(["kernel_initializer", "recurrent_initializer"], "zeros")
        options.update(input_shape=(3, 4), activation="linear", use_bias=False)
        loop = keras.layers.SimpleRNN(2, **options)
        model = keras.models.Sequential([loop])

        def problem():
            try:
                model.predict(np.ones((5, 3, 4)))
            except Exception as error:
                return type(error).__name__, str(error).splitlines()[0], "scan_fn" in str(error)

        plain = problem()
        compat.parallelize(model, gpus=[0, 1])
        assert problem() == plain
        if CONTEXTS[0].startswith("opencl"):
            assert plain[0] == "GpuArrayException" and plain[2]
        else:
            assert plain is None


# Choosing -------------------------------------------------------------------------------------


def test_device_in_theanorc(theano_process, tmp_path):
    """What is no CUDA GPU is used where the user's flags name it, unless the CPU is asked for."""
    (tmp_path / ".theanorc").write_text("[global]\ndevice = {}\n".format(CONTEXTS[0]))
    program = """if True:
        import compat, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", compat.CompatWarning)
            devices = compat.configure_gpu({}).devices
        show(devices=devices, warned=[str(w.message) for w in caught
                                      if w.category is compat.CompatWarning])
    """
    named = theano_process(program.format(""), flags="")  # GPUs need a compiler
    assert named == {"devices": CONTEXTS[:1], "warned": []}
    assert theano_process(program.format("gpus=0")) == {"devices": ["cpu"], "warned": []}
