"""On real GPUs, with the framework that is installed: ``pytest -m gpu tests/gpu``.

Nothing is skipped: without a GPU, or without a framework, these tests fail. Each configures a
process of its own. One NVIDIA GPU is enough; on several, replicas are compared, too.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from compat._configuration import device_choice

pytestmark = pytest.mark.gpu

TRAIN = """\
import json, subprocess, sys
import compat
from compat._configuration import detection; from compat import _keras
from compat._commands import device_comparison

arguments = json.loads(sys.argv[1])
configuration = compat.configure_gpu(strict=True, **arguments)
keras = _keras.import_keras(detection.choose(configuration.backend)[0])
model = compat.parallelize(device_comparison._dense(keras))
model.compile(optimizer="sgd", loss="mse")
import numpy as np
loss = model.train_on_batch(np.zeros((64, 8), "float32"), np.zeros((64, 4), "float32"))
used = subprocess.check_output([
    "nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"
]).decode()
print(json.dumps([configuration.devices, configuration.warnings, float(np.ravel(loss)[0]), used]))
"""


@pytest.fixture(scope="module")
def gpus():
    found = device_choice.discover()
    assert found, "nvidia-smi lists no GPU here"
    return found


def run(*command):
    completed = subprocess.run(
        [sys.executable] + list(command),
        env=dict(os.environ, PYTHONPATH=ROOT),
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def train(**arguments):
    devices, warnings, loss, used = json.loads(
        run("-c", TRAIN, json.dumps(arguments)).splitlines()[-1]
    )
    assert warnings == []
    assert loss > 0
    return devices, [line.split(", ") for line in used.splitlines()]


def on_gpus(devices):
    return [device for device in devices if "cpu" not in device.lower()]


def test_discovery_lists_what_nvidia_smi_lists(gpus):
    listing = subprocess.check_output(["nvidia-smi", "-L"]).decode().splitlines()
    whole = [line for line in listing if line.startswith("GPU ")]
    assert len(whole) == len(gpus)
    for gpu, line in zip(gpus, whole):
        assert line.startswith("GPU {}: {} (UUID: {})".format(gpu.index, gpu.name, gpu.uuid))
        assert gpu.memory_total > 2**30


def test_all_gpus_are_used(gpus):
    devices, _ = train()
    assert len(on_gpus(devices)) == len(devices) == len(gpus)


@pytest.mark.parametrize("form", ["count", "id", "uuid", "free"])
def test_one_gpu_is_chosen_and_used_without_taking_all_its_memory(gpus, form):
    gpu = gpus[0] if form == "count" else gpus[-1]
    value = {"count": 1, "id": [gpu.index], "uuid": gpu.uuid, "free": "free:1"}[form]
    devices, used = train(gpus=value, memory="grow")
    assert len(on_gpus(devices)) == len(devices) == 1
    # In a container nvidia-smi may list no process.
    mebi = [int(memory) for _, uuid, memory in used if memory.isdigit() and uuid == gpu.uuid]
    assert all(memory < gpu.memory_total / 2**20 / 2 for memory in mebi)


def test_no_gpu_is_used_when_none_is_asked_for(gpus):
    devices, _ = train(gpus=0)
    assert len(devices) == 1
    assert on_gpus(devices) == []


def test_several_gpus_train_to_the_numbers_of_one(gpus):
    """On a machine with one GPU, ``compat test`` simulates."""
    out = run("-m", "compat", "test")
    assert "\nThe same: no weight ever differs by more than 1e-05.\n" in out
    assert ("simulated on the CPU" in out) == (len(gpus) < 2)
