"""Tests of ``parallelize=True``: every Keras model that is compiled runs on all devices."""

import contextlib
import copy
import gc
import pickle
import re
import subprocess
import weakref
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest

import compat

from .. import _api
from .._keras import automatic_parallel
from .._runtime import on_import, patching
from .._runtime.process import process
from .contract import BackendContract, any_backend, span
from .models import CASES, DEVICES, UNCHANGED, clear_session, initialise, optimizer


@contextlib.contextmanager
def compiled_on_all_devices(backend):
    """Parallelize the models that are compiled within, as ``configure_gpu(parallelize=True)``."""
    before = patching.patches()
    automatic_parallel.install(backend, _api._parallelize_compiled)
    try:
        yield
    finally:
        for patch in reversed(patching.patches()):
            if patch not in before:
                patch.take_back()
        on_import.forget()
        process.parallelizes_compiled = False


class AutomaticContract(BackendContract):
    """Models of scripts that do not call ``parallelize()``."""

    #: Functions that make copies which train by themselves, where the Keras supports that.
    copies: Tuple[Callable[[Any], Any], ...] = (copy.copy, copy.deepcopy)

    @pytest.fixture
    def automatic(self, configuration):
        """Parallelize compiled models until the test is over."""
        with compiled_on_all_devices(self.instance()):
            yield

    def check_on_all_devices(self, model):
        """Check that a step of a model runs on all devices."""
        devices = self.devices_of(model, *CASES["dense"].data(61))
        assert devices == sorted(self.instance().devices()) and len(devices) == DEVICES

    @span
    @pytest.mark.row("configure_gpu(parallelize=True)")
    def test_compiled_models_run_on_all_devices(self, keras, automatic, configuration):
        """One by itself, and two of which one is a part of the other, as in a GAN."""
        self.check_on_all_devices(self.compiled(keras, "dense"))
        generator, discriminator, both = adversaries(keras)
        assert configuration.parallelized[discriminator.name]
        assert configuration.parallelized[both.name]
        assert generator.name not in configuration.parallelized
        assert "{} on {}".format(both.name, ", ".join(configuration.devices)) in str(configuration)

    @any_backend
    def test_compiled_models_train_to_the_numbers_of_one_device(self, keras, automatic):
        noise, real = (np.random.RandomState(n).normal(size=(13, 4)) for n in range(2))
        ones = np.ones((13, 1))
        weights = []
        for by_hand in (True, False):  # which leaves a model alone
            generator, discriminator, both = adversaries(keras, by_hand)
            for _ in range(2):
                discriminator.train_on_batch(real, ones)
                discriminator.train_on_batch(generator.predict(noise), 0 * ones)
                both.train_on_batch(noise, ones)
            weights.append(generator.get_weights() + discriminator.get_weights())
        self.close(*weights)

    @pytest.mark.row("compat run --parallelize")
    def test_a_script_without_compat_runs_on_all_devices(self, keras, tmp_path, monkeypatch):
        monkeypatch.setenv("COMPAT_VERIFY", "1")
        script = tmp_path / "unchanged.py"
        script.write_text(UNCHANGED)
        on_one: Dict[str, Any] = {}
        exec(UNCHANGED, on_one)
        command = ["-m", "compat", "run", "--backend", self.instance().framework]
        command += ["--parallelize", "--simulate", str(DEVICES), str(script)]
        completed = self.python(*command, stderr=subprocess.PIPE)
        assert completed.returncode == 0, completed.stderr
        (line,) = re.findall("HISTORY (.*)", completed.stdout)
        assert on_one["numbers"] == pytest.approx([float(n) for n in line.split()], abs=1e-4)
        (devices,) = re.findall("compat run: .* runs on (.*)", completed.stderr)
        assert "split over" not in completed.stderr
        assert len(devices.split(", ")) == DEVICES

    @any_backend
    def test_a_model_compiled_again_or_loaded_runs_on_all_devices(self, keras, automatic, tmp_path):
        model = self.compiled(keras, "dense")
        model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
        path = str(tmp_path / ("model" + (".keras" if hasattr(keras, "ops") else ".h5")))
        model.save(path)
        for compiled in (model, keras.models.load_model(path)):
            self.check_on_all_devices(compiled)

    def test_an_unpickled_model_runs_on_all_devices(self, keras, automatic):
        """Of each Keras whose own models can be pickled."""
        try:
            pickle.dumps(CASES["dense"].build(keras))
        except (AttributeError, NotImplementedError, TypeError):
            return  # such as keras-mxnet, and tf.keras of TensorFlow 2.3 or in a graph
        model, (inputs, _) = self.compiled(keras, "dense"), CASES["dense"].data(61)
        expected, unpickled = model.predict(inputs), pickle.loads(pickle.dumps(model))
        self.close([expected], [unpickled.predict(inputs)])
        self.check_on_all_devices(unpickled)

    @any_backend
    def test_copies_train_as_those_of_a_plain_model(self, keras, configuration):
        """So does the model itself. Not every Keras supports every kind of copy."""
        inputs, targets = CASES["dense"].data(13)

        def trained(model):
            model.train_on_batch(inputs, targets)
            return model.get_weights() + [model.predict(inputs, verbose=0)]

        def results_of_copies():
            results, model = [], self.compiled(keras, "dense")
            model.train_on_batch(inputs, targets)
            for made_by in self.copies:
                try:
                    results.append(trained(made_by(model)))
                except Exception as error:
                    results.append(type(error))
            return results + [trained(model)]

        expected = results_of_copies()
        with compiled_on_all_devices(self.instance()):
            for one, several in zip(expected, results_of_copies()):
                assert one is several if isinstance(one, type) else len(one) == len(several)
                if not isinstance(one, type):
                    self.close(one, several)

    def test_models_are_freed_and_sessions_cleared(self, keras, automatic, configuration):
        """Models that a process trains one after the other must not fill its memory."""
        inputs, targets = CASES["dense"].data(13)
        for _ in range(2):
            model = self.compiled(keras, "dense")
            model.fit(inputs, targets, verbose=0)
            assert configuration.parallelized[model.name]
            reference = weakref.ref(model)
            del model
            clear_session(keras)
            gc.collect()
            assert reference() is None


def adversaries(keras, by_hand=False):
    """Return a generator, a discriminator and both together, the last two compiled."""
    layers, models = keras.layers, keras.models
    generator = initialise(models.Sequential([layers.Dense(4, input_shape=(4,))]))
    hidden = layers.Dense(5, activation="tanh", input_shape=(4,))
    judged = layers.Dense(1, activation="sigmoid")
    discriminator = initialise(models.Sequential([hidden, judged]))

    def compiled(model):
        if by_hand:
            compat.parallelize(model, gpus=1)
        model.compile(optimizer(keras, "sgd"), "binary_crossentropy")

    compiled(discriminator)
    discriminator.trainable = False
    noise = layers.Input(shape=(4,))
    both = models.Model(noise, discriminator(generator(noise)))
    compiled(both)
    return generator, discriminator, both
