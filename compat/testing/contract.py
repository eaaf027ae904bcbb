"""Tests that every backend must pass."""

import os
import subprocess
import sys
from typing import Any, Dict

import pytest

import compat

from .. import _verification
from .._configuration import registry
from .._runtime.process import process
from ..backend import Devices, Settings, Verification
from .models import BATCHES, CASES, DEVICES, UNEVEN, initialise, keras_under_test, optimizer

#: Marks the tests of the span contract.
span = pytest.mark.span
#: Marks tests that take long, and whose subject other tests cover in fewer cases.
slow = pytest.mark.slow
#: Marks tests whose subject is the same on all backends, so that one with each Keras may run them.
any_backend = pytest.mark.any_backend


def contract_of(config):
    """Return the contract that this run of pytest tests: "span", or "whole"."""
    return "span" if config.getoption("-m") == "span" else "whole"


def in_span(values, chosen):
    """Return values for ``parametrize``, the chosen ones of which are in the span contract, too."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[span] if value in chosen else [],
        )
        for value in values
    ]


class OfBackend:
    """Base class of tests of one backend. Subclasses set ``backend``."""

    #: The backend: its name, or the instance.
    backend: object = ""
    #: How far weights may be from one device's, or one process's, after some steps.
    tolerance = 1e-5

    def instance(self):
        """Return the backend itself.

        Raises:
            LookupError: no backend has that name.
        """
        if not isinstance(self.backend, str):
            return self.backend
        backend = registry.find(self.backend)
        if backend is None:
            raise LookupError(f"no backend {self.backend!r} is installed or registered")
        return backend

    def python(self, *arguments, **options):
        """Run Python in a subprocess that uses this backend, and keep its output.

        Arguments:
            *arguments: those of its command line.
            **options: those of ``subprocess.run()``.
        """
        options.update(stdout=subprocess.PIPE, universal_newlines=True)
        environ = dict(os.environ, KERAS_BACKEND=self.instance().framework)
        command = [sys.executable] + list(arguments)
        return subprocess.run(command, env=environ, **options)


class Contract(OfBackend):
    """Tests and helpers that need no model."""

    # For subclasses to override, if the backend runs several devices in one process --------------

    def placement(self, model, inputs, targets):
        """Return where one training step ran, from the framework's own record.

        Returns:
            For each device that took part ``(forward, backward)``: numbers of operations of
            the model's layers (matrix products, convolutions) that ran there.
        """
        raise NotImplementedError

    def shard_sizes(self, model, inputs, targets):
        """Return how many rows each device computed in one training step, from the same record."""
        raise NotImplementedError

    def devices_of(self, model, inputs, targets):
        """Return the devices where one training step ran, forward and backward, sorted."""
        placement = self.placement(model, inputs, targets)
        assert all(forward and backward for forward, backward in placement.values()), placement
        return sorted(placement)

    # Fixtures ---------------------------------------------------------------------------------

    def configure(self, simulate):
        """Configure simulated devices; compat's own backends are detected without a name."""
        name = self.instance().name
        backend = None if name in registry.names() else name
        return compat.configure_gpu(backend=backend, simulate=simulate)

    @pytest.fixture(scope="class")
    def configuration(self):
        """Configure three simulated devices. The same call in another class does nothing."""
        return self.configure(DEVICES)

    @pytest.fixture
    def counted_anew(self, monkeypatch):
        """Have ``compat.report()`` count the batches of this test only."""
        monkeypatch.setattr(process, "batches", {})
        monkeypatch.setattr(process, "graph_counters", {})
        monkeypatch.setattr(process, "unused", {})
        monkeypatch.setattr(process, "idle_devices", set())

    @pytest.fixture
    def batches(self, request):
        """Return the batches: in the span contract only the uneven one, to compile once."""
        return UNEVEN if contract_of(request.config) == "span" else BATCHES

    def close(self, first, second, tolerance=None):
        """Check that two lists of arrays differ by no more than a tolerance."""
        difference = _verification.largest_difference(first, second)
        assert difference <= (tolerance or self.tolerance), difference

    # The backend itself -----------------------------------------------------------------------

    @span
    def test_is_found_by_its_name(self):
        backend = self.instance()
        assert registry.find(backend.name) == backend
        assert backend.framework and backend.distributions
        assert backend.extra or backend.name not in registry.names()

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
        assert len(set(configuration.devices)) == len(configuration.devices) == DEVICES
        report = str(configuration)
        assert self.instance().name in report
        assert f"{DEVICES} simulated" in report

    @span
    def test_same_configuration_again_is_the_same_object(self, configuration):
        assert self.configure(DEVICES) is configuration
        with pytest.raises(compat.AlreadyConfiguredError):
            self.configure(DEVICES - 1)

    # The command line -------------------------------------------------------------------------

    @span
    def test_env_command_finds_the_backend_and_imports_nothing(self):
        program = (
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
        completed = self.python("-c", program)
        out = completed.stdout
        assert completed.returncode == 0, out
        assert f"backend     {self.instance().name} (" in out
        assert out.endswith("problems    none\n")

    # Verification -----------------------------------------------------------------------------

    def verified(self, model, steps=1):
        """Have the model's first steps verified, and return the record of the verification."""
        devices = self.instance().devices()
        name = getattr(model, "name", type(model).__name__)
        verification = Verification(name, devices, steps)
        self.instance().verify(model, verification)
        return verification.record


class BackendContract(Contract):
    """Subclass this in the test file of a backend for Keras, and set the attributes below."""

    #: Keyword arguments that recurrent layers need on this backend.
    lstm_options: Dict[str, Any] = {}
    #: The endings of files of whole models, and of weights.
    extension, weights_extension = ".h5", ".weights.h5"
    #: The beginning of programs that import the framework.
    prelude = ""

    @pytest.fixture
    def keras(self, configuration):
        """Return the Keras under test, after ``configure_gpu()``."""
        return keras_under_test()

    def build(self, keras, name):
        """Return the model of a case with known weights, not compiled."""
        case = CASES[name]
        options = self.lstm_options if name in ("lstm", "simplernn") else {}
        return initialise(case.build(keras, **options))

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        """Return the model of a case, compiled."""
        model = self.build(keras, name)
        return self.ready(keras, model, parallel, CASES[name].loss, optimizer_name)

    def both(self, keras, name, optimizer_name="sgd"):
        """Return a model on one device, and its equal on all."""
        loss, models = CASES[name].loss, [self.build(keras, name) for _ in range(2)]
        return self.both_ready(keras, models, loss, optimizer_name)

    def both_ready(self, keras, models, loss="mse", optimizer_name="sgd"):
        """Compile two equal models, the second one on all devices, and return them."""
        for parallel, model in enumerate(models):
            self.ready(keras, model, parallel, loss, optimizer_name)
        if hasattr(keras, "ops") and keras.backend.backend() == "tensorflow":
            # XLA would compile its step for each size of a batch; on several devices it does not.
            models[0].compile(optimizer(keras, optimizer_name), loss, jit_compile=False)
        return models

    def parallel_and_data(self, keras, name, rows):
        """Return a model on all devices, and inputs and targets of a number of rows."""
        return (self.compiled(keras, name, parallel=True),) + CASES[name].data(rows)

    def ready(self, keras, model, parallel=True, loss="mse", optimizer_name="sgd"):
        """Return a model with known weights, on all devices or on one, and compiled."""
        initialise(model)
        if parallel:
            assert compat.parallelize(model) is model
        model.compile(optimizer(keras, optimizer_name), loss)
        return model

    def normalized(self, keras):
        """Return a model with batch normalization."""
        normalized = keras.layers.BatchNormalization(momentum=0.5, input_shape=(8,))
        return keras.models.Sequential([normalized, keras.layers.Dense(4)])
