"""What every backend must pass, whatever it can do besides."""

import os
import subprocess
import sys

import numpy as np
import pytest

import compat

from .. import _registry, _verification
from .._process import process
from .._verification.verification import given_moved
from ..backend import Backend, Devices, Settings, Verification
from .models import (
    BATCHES,
    CASES,
    DEVICES,
    UNEVEN,
    initialise,
    keras_under_test,
    optimizer,
)
from .spans import contract_of, span


def instance_of(backend):
    """The backend that a contract's attribute names, or is.

    Raises:
        LookupError: no backend has that name.
    """
    if isinstance(backend, Backend):
        return backend
    found = _registry.find(backend)
    if found is None:
        raise LookupError("no backend {!r} is installed or registered".format(backend))
    return found


class Contract:
    """What asks for no model of any kind. Subclasses set ``backend``."""

    #: The backend: its name, or the instance.
    backend = ""  # type: object
    #: How far weights may be from one device's after some steps.
    tolerance = 1e-5

    # What a subclass must say, if the backend runs several devices in one process ---------------

    def placement(self, model, inputs, targets):
        """Where one training step ran, from the framework's own record.

        Returns:
            For each device that took part ``(forward, backward)``: numbers of operations of
            the model's layers (matrix products, convolutions) that ran there.
        """
        raise NotImplementedError

    def shard_sizes(self, model, inputs, targets):
        """How many rows each device computed in one training step, from the same record."""
        raise NotImplementedError

    def devices_of(self, model, inputs, targets):
        """The devices where one training step ran, forward and backward, sorted."""
        placement = self.placement(model, inputs, targets)
        assert all(forward and backward for forward, backward in placement.values()), placement
        return sorted(placement)

    # Fixtures ---------------------------------------------------------------------------------

    def instance(self):
        """The backend itself."""
        return instance_of(self.backend)

    def configure(self, simulate):
        """Configure so many simulated devices; compat's own backends are found without a name."""
        name = self.instance().name
        return compat.configure_gpu(
            backend=None if name in _registry.names() else name, simulate=simulate
        )

    @pytest.fixture(scope="class")
    def configuration(self):
        """Three simulated devices; the same call again does nothing, so every class may ask."""
        return self.configure(DEVICES)

    @pytest.fixture
    def counted_anew(self, monkeypatch):
        """``compat.report()`` tells only of what this test computes."""
        monkeypatch.setattr(process, "batches", {})
        monkeypatch.setattr(process, "graph_counters", {})

    @pytest.fixture
    def batches(self, request):
        """All batches; in the span contract the uneven one, since models compile for each size."""
        return UNEVEN if contract_of(request.config) == "span" else BATCHES

    def close(self, first, second, tolerance=None):
        difference = _verification.largest_difference(first, second)
        assert difference <= (tolerance or self.tolerance), difference

    # The backend itself -----------------------------------------------------------------------

    @span
    def test_is_found_by_its_name(self):
        backend = self.instance()
        assert _registry.find(backend.name) == backend
        assert backend.framework and backend.distributions
        assert backend.extra or backend.name not in _registry.names()

    @span
    def test_environ_is_pure(self):
        before, environ = dict(os.environ), {"PATH": "/bin"}
        result = self.instance().environ(Settings(Devices(simulated=2)), environ)
        assert all(isinstance(name, str) for name in result)
        assert environ == {"PATH": "/bin"}
        assert dict(os.environ) == before

    @span
    def test_configuration_reports_three_devices(self, configuration):
        assert configuration.backend == self.instance().name
        assert len(configuration.devices) == DEVICES
        assert len(set(configuration.devices)) == DEVICES
        report = str(configuration)
        assert self.instance().name in report
        assert "{} simulated".format(DEVICES) in report

    @span
    def test_same_configuration_again_is_the_same_object(self, configuration):
        assert self.configure(DEVICES) is configuration
        with pytest.raises(compat.AlreadyConfiguredError):
            self.configure(DEVICES - 1)

    # The command line -------------------------------------------------------------------------

    def command(self, program):
        """Run a program in a process of its own; its exit status and what it printed."""
        framework = self.instance().framework
        completed = subprocess.run(
            [sys.executable, "-c", program],
            env=dict(os.environ, KERAS_BACKEND=framework),
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        return completed.returncode, completed.stdout

    @span
    def test_env_command_finds_the_backend_and_imports_nothing(self):
        status, out = self.command(
            "import os, sys\n"
            "from compat import __main__\n"
            "status = __main__.main(['env'])\n"
            "frameworks = 'keras tensorflow theano mxnet cntk jax torch'.split()\n"
            "assert not set(frameworks + ['numpy', 'horovod', 'mpi4py']) & set(sys.modules)\n"
            "if os.path.exists('/proc/self/maps'):\n"
            "    with open('/proc/self/maps') as file:\n"
            "        assert 'libcuda' not in file.read()\n"  # with which a GPU is initialised
            "sys.exit(status)\n"
        )
        assert status == 0, out
        assert "backend     {} (".format(self.instance().name) in out
        assert out.endswith("problems    none\n")

    # Verification -----------------------------------------------------------------------------

    def verified(self, model, steps=1):
        """Have the model's first steps verified, and return the record of what was."""
        devices = self.instance().devices()
        name = getattr(model, "name", type(model).__name__)
        verification = Verification(name, devices, steps)
        self.instance().verify(model, verification)
        return verification.record

    def disturb(self, monkeypatch):
        """Change a weight, or a gradient, after each step on several devices by a tenth too much.

        Returns:
            A list, which gets the labels of what was changed.
        """
        labels = []
        verify = _verification.Comparison.compare

        def compare(comparison, found):
            for label in sorted(found, reverse=True):  # weights come before gradients
                change = found[label] - comparison.start.get(label, 0.0)
                if label.startswith(("weight", "gradient")) and np.any(change):
                    labels.append(label)
                    found = dict(found, **{label: found[label] + 0.1 * change})
                    break
            verify(comparison, found)

        monkeypatch.setattr(_verification.Comparison, "compare", compare)
        return labels

    def check_that_inputs_move(self, monkeypatch, steps):
        """Whether verified steps are done with inputs that are off by rounding where it says so.

        Arguments:
            steps: a function that does them, of one kind each.
        """
        verify, moves = Verification.verify, {}

        def results(step, seed):
            with _verification.suspended(), given_moved(step, seed):
                found = step.on_one_device()
            found.update(step.read())
            labels = sorted(label for label in found if not step.is_random(label))
            return [np.float64(found[label]) for label in labels]

        def look(verification, kind, step):
            start = step.read()
            both = []
            for seed in (0, 1):
                step.write(start)
                both.append(results(step, seed))
            step.write(start)
            moves[kind] = _verification.largest_difference(*both)
            return verify(verification, kind, step)

        monkeypatch.setattr(Verification, "verify", look)
        steps()
        assert 0 < moves["train"] < 1e-4 and 0 < moves["predict"] < 1e-4, moves


class BackendContract(Contract):
    """Subclass this in the test file of a backend for Keras, and set the attributes below."""

    #: Optimizers under which the plain model itself repeats.
    optimizers = ("sgd", "adam")
    #: Keyword arguments of the LSTM layer, for backends with a trap there.
    lstm_options = {}  # type: dict
    #: The endings of files of whole models, and of weights.
    extension, weights_extension = ".h5", ".weights.h5"
    #: What a program of its own begins with, where it imports the framework.
    prelude = ""

    @pytest.fixture
    def keras(self, configuration):
        return keras_under_test()

    def build(self, keras, name):
        """A model of the zoo with known weights, not compiled."""
        case = CASES[name]
        options = self.lstm_options if name == "lstm" else {}
        return initialise(case.build(keras, **options))

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        model = self.build(keras, name)
        if parallel:
            assert compat.parallelize(model) is model
        model.compile(optimizer(keras, optimizer_name), CASES[name].loss)
        return model

    def ready(self, keras, model, parallel=True, loss="mse", optimizer_name="sgd"):
        """A model with known weights, on all devices or on one, and compiled."""
        initialise(model)
        if parallel:
            assert compat.parallelize(model) is model
        model.compile(optimizer(keras, optimizer_name), loss)
        return model

    def normalized(self, keras):
        """A model with batch normalization."""
        layers = keras.layers
        return keras.models.Sequential(
            [layers.BatchNormalization(momentum=0.5, input_shape=(8,)), layers.Dense(4)]
        )
