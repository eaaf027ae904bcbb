"""CNTK under Keras: one device, chosen before Keras fixes it; models train as ever."""

import os
import sys

import numpy as np
import pytest

import compat
from compat._backends import cntk as backend
from compat._configuration import packages, registry
from compat.testing import CASES, BackendContract, largest_difference, optimizer


class TestCNTK(BackendContract):
    backend = "cntk"

    # One device: the same object, plain numbers -----------------------------------------------

    @pytest.mark.parametrize("name", ["lstm", "multi"])
    def test_trains_and_is_saved_as_without_compat(self, keras, name, tmp_path):
        """parallelize(gpus=1) changes nothing: same numbers, same files, also for odd batches."""
        plain, model = self.compiled(keras, name), self.build(keras, name)
        assert compat.parallelize(model, gpus=1) is model
        model.compile(optimizer(keras, "sgd"), CASES[name].loss)
        start = plain.get_weights()
        for batch, samples in ((16, 45), (2, 6)):
            inputs, targets = CASES[name].data(samples)
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        assert largest_difference(start, plain.get_weights()) > 1e-3
        self.close(plain.get_weights(), model.get_weights(), 1e-6)
        path = str(tmp_path / "model.h5")
        model.save(path)
        loaded = compat.parallelize(keras.models.load_model(path), gpus=1)
        inputs, _ = CASES[name].data(13)
        predicted = [np.hstack(each.predict(inputs)) for each in (model, loaded)]
        self.close(predicted[:1], predicted[1:], 1e-6)

    def test_several_devices_are_a_clear_error(self, keras):
        model = self.build(keras, "dense")
        for gpus in (None, 2, [1]):
            with pytest.raises(NotImplementedError) as caught:
                compat.parallelize(model, gpus)
            assert type(caught.value) is compat.UnsupportedError
        assert str(caught.value) == (
            "cntk cannot run a model on cpu:1 in one process: all of it runs on cpu:0. Start one "
            "process per device, with compat run -n, or train on that one, with parallelize(model, "
            "gpus=1)."
        )

    def test_parts_of_a_model_cannot_be_placed(self, keras):
        with pytest.raises(compat.UnsupportedError, match="^cntk cannot place parts of a model"):
            compat.device(1)

    if packages.release(packages.version("keras")) >= (2, 2):

        @pytest.mark.row("subclassed models")
        def test_subclassed_model(self, keras):
            """Keras builds it when it is fitted, as without compat."""

            class Mine(keras.Model):
                def __init__(self):
                    super(Mine, self).__init__()
                    self.classes = keras.layers.Dense(4, activation="softmax")

                def call(self, inputs):
                    return self.classes(inputs)

            model = Mine()
            assert compat.parallelize(model, gpus=1) is model
            model.compile("sgd", "categorical_crossentropy")
            history = model.fit(*CASES["dense"].data(16), epochs=3, verbose=0)
            assert history.history["loss"][-1] < history.history["loss"][0]

    else:

        def test_no_subclassed_model(self, keras):
            """Before Keras 2.2 a model has inputs, or is none."""
            with pytest.raises(TypeError):
                type("Mine", (keras.models.Model,), {})()


# Configuring, a process each ------------------------------------------------------------------


def test_the_device_is_fixed_before_keras_fixes_it(run):
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import compat
        configuration = compat.configure_gpu(gpus=0)
        assert configuration.backend == "cntk", configuration
        import cntk, keras, numpy as np
        print(configuration.devices, configuration.applied)
        assert cntk.device.use_default_device() == cntk.device.cpu()
        model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        assert compat.configure_gpu(gpus=0) is configuration
        """
    )
    assert "['cpu()'] ['cntk.device.try_set_default_device(cpu())']" in out


def test_a_build_for_the_cpu_says_so_and_goes_on(run, machine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # set by the tests in this process
    machine.plug(1)
    out = run(
        """
        import warnings, compat
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            configuration = compat.configure_gpu(
                gpus=[0], floatx="float64", memory=0.5
            )
        for warning in caught:
            if warning.category is compat.CompatWarning:
                print("warning:", warning.message)
        print(configuration.devices)
        """
    )
    assert out.splitlines()[-5:] == [
        "warning: This CNTK shows no GPU: it is a build for the CPU, or CUDA's driver is not "
        "there. The package cntk-gpu is the build for GPUs.",
        "warning: memory=0.5 of each GPU was asked for, but CNTK has no setting for a GPU's "
        "memory.",
        "warning: floatx=float64 was asked for, but on CNTK Keras trains in float32 only: it "
        "makes the places for gradients in that type.",
        "warning: GPU 0 was asked for, but cntk sees cpu(). Going on with cpu().",
        "['cpu()']",
    ]


def test_a_machine_of_excluded_devices_is_an_error(run):
    out = run(
        """
        import cntk, compat
        cntk.device.set_excluded_devices([cntk.device.cpu()])
        try:
            compat.configure_gpu(gpus=0)
        except compat.DeviceFailedError as error:
            print("error:", error)
        """
    )
    assert out.endswith(
        "error: cntk did not bring up cpu(): Device selection: No eligible device found.\n"
        "See that cntk.device.set_excluded_devices() does not name it, and that no other process "
        "holds it.\n"
    )


def test_late_but_as_it_is_already(run):
    run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import keras
        import compat
        assert compat.configure_gpu(simulate=2, backend="cntk").devices == ["cpu:0", "cpu:1"]
        """
    )


# Installation ---------------------------------------------------------------------------------


def test_missing_openmpi_is_diagnosed_without_importing_cntk(run, monkeypatch):
    """In a process whose loader does not find OpenMPI: ``compat env``, and the error."""
    out = run(
        """
        import sys
        from compat import __main__
        assert __main__.main(["env"]) == 1
        assert "cntk" not in sys.modules
        import compat
        try:
            compat.configure_gpu()
        except ImportError as error:
            assert type(error) is compat.BrokenInstallError
            print("error:", error)
        """,
        LD_LIBRARY_PATH="",
    )
    text = (
        "cntk is installed, but importing it fails without OpenMPI's libmpi.so.12 and "
        "libmpi_cxx.so.1. On Debian and Ubuntu: apt-get install libopenmpi3 && ln -s "
    )
    assert "problems " + text in " ".join(out.replace(" \\\n", " ").split())
    assert "error: " + text in out


def test_openmpi_that_is_there_is_no_problem():
    assert registry.load("cntk").problems(os.environ) == []
    assert "cntk" in sys.modules or backend._without_openmpi(os.environ) is None


class GPU:
    """Of CNTK's: ``gpu(1)`` is a ValueError in a build for the CPU."""

    def __init__(self, device_id):
        self.index = device_id

    def type(self):
        return 1

    def id(self):
        return self.index


@pytest.mark.parametrize("imported", ["keras", "cntk"])
def test_another_device_than_the_fixed_one_comes_too_late(imitate, imported):
    cntk = backend.backend.import_framework()

    def refuse(new_default_device, acquire_device_lock=False):
        return False

    imitate(cntk.device, "try_set_default_device", refuse)
    with pytest.raises(compat.TooLateError) as caught:
        backend._set_default(cntk, GPU(1), [imported])
    assert str(caught.value) == (
        "configure_gpu() came too late for cntk: its default device was fixed when {} was "
        "imported, and cannot become gpu(1).\n"
        "Call it before the first `import keras`.".format(imported)
    )


def test_gpus_that_only_cntk_lists(imitate):
    from compat._configuration.device_choice import choose
    from compat._configuration.gpu_selection import parse_gpus
    from compat._configuration.settings import Settings

    cntk = backend.backend.import_framework()
    cpu = cntk.device.cpu()
    assert all(hasattr(cpu, name) for name in ("type", "id"))
    imitate(cntk.device, "all_devices", lambda: [GPU(0), GPU(1), cpu])
    imitate(cntk.device, "gpu", GPU)

    def wanted(gpus):
        devices = choose(parse_gpus(gpus), None, {}, discover=list)
        return backend._name(backend._wanted(cntk, Settings(devices), []))

    assert [wanted(gpus) for gpus in (None, [1], [7], 0)] == ["gpu(0)", "gpu(1)", "cpu()", "cpu()"]
