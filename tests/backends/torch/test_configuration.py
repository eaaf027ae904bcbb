"""torch: which GPUs it begins with, of others than NVIDIA, too, and what a script is told of it."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch

import compat
from compat._backends.torch import Torch
from compat._configuration.device_choice import choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat.testing import slow

# GPUs of others than NVIDIA, which are not here -------------------------------------------------


@pytest.fixture
def machine_of(monkeypatch, imitate):
    """Have torch list a ROCm machine's GPUs, or Apple's; returns what configures a new backend."""

    def machine_of(cuda=0, metal=False):
        imitate(torch.cuda, "device_count", lambda: cuda)
        imitate(torch.backends.mps, "is_available", lambda: metal)
        imitate(torch.cuda, "set_device", lambda device: None)
        # Set afterwards, too: both are the process's.
        monkeypatch.setenv("KERAS_TORCH_DEVICE", "cpu")
        monkeypatch.delenv("KERAS_TORCH_DEVICE")
        return configured

    def configured(gpus=None, **settings):
        backend = Torch()
        devices = choose(parse_gpus(gpus), None, os.environ, discover=list)
        settings = Settings(devices, **settings)
        assert backend.environ(settings, {"KERAS_TORCH_DEVICE": "cuda"}) == {}
        applied, _ = backend.configure(settings)
        return backend.devices(), applied, devices.shortage and devices.shortage[1]

    return machine_of


def test_gpus_of_a_rocm_machine(machine_of):
    configured = machine_of(cuda=3)
    assert configured() == (["cuda:0", "cuda:1", "cuda:2"], [], None)
    assert configured(2) == (["cuda:0", "cuda:1"], [], None)
    assert configured([2, 0]) == (
        ["cuda:2", "cuda:0"],
        ["torch.cuda.set_device('cuda:2')", "KERAS_TORCH_DEVICE=cuda:2"],
        None,
    )
    assert os.environ["KERAS_TORCH_DEVICE"] == "cuda:2"


def test_none_of_the_gpus_asked_for_is_there(machine_of):
    assert machine_of(cuda=1)([4]) == (
        ["cpu"],
        ["KERAS_TORCH_DEVICE=cpu"],
        "there is no GPU 4: 1 GPU is visible",
    )


def test_memory_is_limited_by_a_fraction_of_each_gpu(machine_of, imitate):
    limits, total = [], types.SimpleNamespace(total_memory=2**33)
    imitate(torch.cuda, "get_device_properties", lambda device=None: total)
    imitate(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device=None: limits.append((fraction, device)),
    )
    assert machine_of(cuda=2)(memory=Memory(size=2**31))[1] == [
        "torch.cuda.set_per_process_memory_fraction(0.25, 0)",
        "torch.cuda.set_per_process_memory_fraction(0.25, 1)",
    ]
    assert limits == [(0.25, 0), (0.25, 1)]


def test_the_gpu_of_a_metal_machine(machine_of, imitate):
    configured = machine_of(metal=True)
    assert configured() == configured(1) == (["mps"], [], None)
    assert configured(2)[::2] == (["mps"], "1 GPU is visible")
    imitate(torch.mps, "set_per_process_memory_fraction", lambda fraction: None)
    imitate(torch.mps, "recommended_max_memory", lambda: 2**33)
    for memory in (Memory(fraction=0.25), Memory(size=2**31)):
        assert configured(memory=memory)[1] == ["torch.mps.set_per_process_memory_fraction(0.25)"]


def test_a_metal_gpu_is_declined_before_keras_is_imported(machine_of):
    import keras  # noqa: F401

    machine_of(metal=True)
    declined = Settings(choose(parse_gpus(0), None, {}))
    assert Torch().environ(declined, {})["KERAS_TORCH_DEVICE"] == "cpu"
    with pytest.raises(compat.TooLateError) as error:
        Torch().configure(declined)
    assert str(error.value) == (
        "configure_gpu() came too late for torch: keras was imported, which asks torch for GPUs; "
        "it shows 1 GPUs, and CPU was asked for.\n"
        "Call it before the first `import keras`, and before anything runs on a GPU."
    )


# A process each ---------------------------------------------------------------------------------


@slow
def test_a_cpu_build_goes_on_with_the_cpu_and_says_so(run):
    out = run(
        """
        import warnings, compat
        settings = dict(gpus=2, backend="torch", floatx="bfloat16", memory="grow")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            configuration = compat.configure_gpu(**settings)
        import torch, keras, os  # after which it is late, but nothing would change
        assert compat.configure_gpu(**settings) is configuration
        assert os.environ["KERAS_TORCH_DEVICE"] == "cpu"
        assert torch.get_default_dtype() is torch.bfloat16
        assert keras.backend.floatx() == "bfloat16" and keras.backend.backend() == "torch"
        print(configuration.devices, configuration.applied)
        print([str(w.message) for w in caught])
        """
    )
    configured, told = out.splitlines()
    assert configured.startswith("['cpu'] ['torch.set_default_dtype(torch.bfloat16)'")
    assert "gpus=2 was asked for, but" in told and "Going on with" in told


SCRIPT_THAT_CONFIGURES = """\
import sys, warnings
import beside, compat

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    configuration = compat.configure_gpu(gpus=2)
print("TOLD", [str(w.message) for w in caught if w.category is compat.CompatWarning])
print(configuration)
print(__name__, sys.argv[1:])
"""


@pytest.mark.parametrize("as_module", [False, pytest.param(True, marks=slow)])
def test_a_script_that_configures_is_told_what_took_precedence(tmp_path, as_module):
    """And it runs as Python runs one: its name, its arguments, its folder."""
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_THAT_CONFIGURES)
    command = [sys.executable, "-m", "compat", "run", "--parallelize", "--simulate", "3"]
    output = subprocess.check_output(
        command + (["-m", "script"] if as_module else [str(script)]) + ["--gpus", "7"],
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
        universal_newlines=True,
    )
    told = (
        "configure_gpu() of the script changes nothing: compat run --parallelize has configured "
        "this process (gpus=None, COMPAT_SIMULATE=3, parallelize). Start the script without it for "
        "the script's own settings (gpus=2, COMPAT_SIMULATE=3)."
    )
    assert "TOLD {!r}\n".format([told]) in output
    assert re.search("^models +no model has been compiled yet$", output, re.MULTILINE)
    assert output.endswith("__main__ ['--gpus', '7']\n")
