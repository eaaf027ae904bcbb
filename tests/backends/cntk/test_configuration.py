"""CNTK's default device, chosen before Keras fixes it."""

import pytest

import compat
from compat._backends.cntk import backend, configuration


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
        """,
        KERAS_BACKEND="cntk",
    )


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
    cntk = backend.import_framework()

    def refuse(new_default_device, acquire_device_lock=False):
        return False

    imitate(cntk.device, "try_set_default_device", refuse)
    with pytest.raises(compat.TooLateError) as caught:
        configuration.set_default(cntk, GPU(1), [imported])
    assert str(caught.value) == (
        "configure_gpu() came too late for cntk: its default device was fixed when {} was "
        "imported, and cannot become gpu(1).\n"
        "Call it before the first `import keras`.".format(imported)
    )


def test_gpus_that_only_cntk_lists(imitate):
    from compat._configuration.device_choice import choose
    from compat._configuration.gpu_selection import parse_gpus
    from compat._configuration.settings import Settings

    cntk = backend.import_framework()
    cpu = cntk.device.cpu()
    assert all(hasattr(cpu, name) for name in ("type", "id"))
    imitate(cntk.device, "all_devices", lambda: [GPU(0), GPU(1), cpu])
    imitate(cntk.device, "gpu", GPU)

    def wanted(gpus):
        devices = choose(parse_gpus(gpus), None, {}, discover=list)
        return configuration.name_of(configuration.wanted_device(cntk, Settings(devices), []))

    assert [wanted(gpus) for gpus in (None, [1], [7], 0)] == ["gpu(0)", "gpu(1)", "cpu()", "cpu()"]
