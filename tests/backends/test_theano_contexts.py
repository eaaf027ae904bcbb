"""Theano on several real contexts, which ``COMPAT_TEST_CONTEXTS`` names.

PoCL has them without a GPU (py37-theano-pocl in tox.ini). With three GPUs it is
``COMPAT_TEST_MODE=contexts COMPAT_TEST_CONTEXTS=cuda0,cuda1,cuda2 pytest tests/backends``.
"""

import os

import numpy as np
import pytest

import compat
from compat.testing import BATCHES, DEVICES, SHARDS, initialise

from . import test_theano

CONTEXTS = os.environ["COMPAT_TEST_CONTEXTS"].split(",")
OTHERS = ["dev{}->{}".format(number, gpu) for number, gpu in enumerate(CONTEXTS) if number]
FLAGS = {"device": CONTEXTS[0], "contexts": ";".join(OTHERS)}
# GPUs have no implementations in Python. With all optimizations there is less to compile.
os.environ["THEANO_FLAGS"] = os.environ["THEANO_FLAGS"].replace(
    test_theano.IN_PYTHON, test_theano.COMPILING
)
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # without it Theano does not profile
# Fixtures:
profiles_not_printed = test_theano.profiles_not_printed
theano_process = test_theano.theano_process


class OnContexts(test_theano.TestTheano):
    """The contract, on contexts. One model serves many tests: compiling takes the time."""

    models = {}  # type: dict

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        key = name, optimizer_name, parallel
        if key not in self.models:
            self.models[key] = super().compiled(keras, name, optimizer_name, parallel)
        model = initialise(self.models[key])
        for state in getattr(model.optimizer, "weights", []):  # as new
            keras.backend.set_value(state, np.zeros_like(keras.backend.get_value(state)))
        return model

    def place(self, device):
        return device


@pytest.mark.row("Theano on several devices in one process")
class TestContexts:
    """What the contract says of numbers, places and shards.

    All else in it is the same code for all devices, and takes minutes to compile for these.
    """

    contract = OnContexts()
    cases = ["dense"]

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
        assert compat.configure_gpu(theano_flags=FLAGS) is configuration

    @pytest.mark.parametrize("name", cases)
    def test_trains_to_the_numbers_of_one_device(self, keras, name):
        self.contract.test_trains_to_the_numbers_of_one_device(keras, BATCHES, name, "sgd")

    @pytest.mark.parametrize("name", cases)
    def test_evaluates_and_predicts_what_one_device_does(self, keras, name):
        self.contract.test_evaluates_and_predicts_what_one_device_does(keras, BATCHES, name)

    @pytest.mark.parametrize("name", cases)
    def test_forward_and_backward_run_on_every_device(self, keras, configuration, name):
        self.contract.test_forward_and_backward_run_on_every_device(keras, configuration, name)

    @pytest.mark.parametrize("samples", sorted(SHARDS))
    def test_batch_is_split_evenly(self, keras, samples):
        self.contract.test_batch_is_split_evenly(keras, samples)

    def test_object_and_its_face_stay(self, keras):
        self.contract.test_object_and_its_face_stay(keras)

    @pytest.mark.parametrize("layer", ["SimpleRNN", "LSTM"])
    def test_unrolled_loop(self, keras, configuration, layer):
        self.contract.test_unrolled_loop(keras, configuration, layer)

    def test_default_context_is_the_first_again(self, keras):
        """Each device's functions are made, and run, while its context is the default one."""
        from theano.gpuarray.type import get_context

        self.contract.compiled(keras, "dense", parallel=True)
        assert get_context(None).dev == CONTEXTS[0]
        weights = keras.backend.variable(np.ones((2, 3)))
        assert weights.container.value.context.dev == CONTEXTS[0]


# What Theano cannot on OpenCL -----------------------------------------------------------------

LOOP = """if True:
    import compat
    compat.configure_gpu(theano_flags={flags!r})
    import numpy, keras
    def problem():
        try:
            model.predict(numpy.ones((5, 3, 4)))
        except Exception as error:
            return [type(error).__name__, str(error).splitlines()[0], "scan_fn" in str(error)]
    model = keras.models.Sequential([keras.layers.SimpleRNN(2, input_shape=(3, 4))])
    plain = problem()
    compat.parallelize(model, gpus=[0, 1])
    show(plain=plain, parallel=problem())
"""


def test_loop_is_run_on_no_other_device(theano_process):
    """Theano's Scan fails on OpenCL, and in compat's hands, too."""
    flags = dict(FLAGS, optimizer="fast_run")  # which moves whole loops to GPUs
    shown = theano_process(LOOP.format(flags=flags), flags=test_theano.COMPILING)
    assert shown["plain"] == shown["parallel"]
    if CONTEXTS[0].startswith("opencl"):
        assert shown["plain"][0] == "GpuArrayException" and shown["plain"][2]
    else:
        assert shown["plain"] is None


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
    shown = theano_process(program.format("theano_flags={{'device': {!r}}}".format(CONTEXTS[0])))
    assert shown == {"devices": CONTEXTS[:1], "warned": []}
    assert theano_process(program.format("")) == shown
    assert theano_process(program.format("gpus=0")) == {"devices": ["cpu"], "warned": []}
