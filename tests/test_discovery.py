"""Which GPUs a machine has: NVML, nvidia-smi, AMD's commands, and where none of these tells."""

import inspect
import json
import sys
import types

import pytest

from compat._configuration import device_choice, discovery
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import Selection, parse_gpus
from compat._ranks.place import Place

pytestmark = pytest.mark.usefixtures("process")


@pytest.fixture
def command(machine):
    """Leave a command that prints a text; nvidia-smi is not there then."""

    def command(name, text, status=0):
        smi = machine.folder / "nvidia-smi"
        if smi.exists():
            smi.unlink()
        script = machine.folder / name
        script.write_text("#!/bin/sh\nwhile read -r line; do echo \"$line\"; done <<'END'\n")
        with script.open("a") as file:
            file.write(text + "\nEND\nexit {}\n".format(status))
        script.chmod(0o755)

    return command


def chosen(gpus=None, **environ):
    return choose(parse_gpus(gpus), None, environ)


# NVML -----------------------------------------------------------------------------------------


class Recorded:
    """A machine's answers, as nvidia-smi and as NVML gives them; None: not supported."""

    gpus = [
        ("GPU-aa11", "NVIDIA H100 80GB HBM3", 81559, 1234, 56, []),
        ("GPU-bb22", "NVIDIA A100-SXM4-40GB", 40960, 3, None, [object()]),
    ]

    def smi(self, machine):
        for uuid, name, total, used, utilization, processes in self.gpus:
            machine.add(used, total, "[N/A]" if utilization is None else utilization, name)
            machine.lines[-1] = machine.lines[-1].replace(machine.uuids[-1], uuid)
            machine.busy += [uuid] * bool(processes)
        machine.plug()

    def nvml(self):
        """A module with what compat calls, each function with the real one's arguments."""
        real = _real_pynvml()
        fake = types.ModuleType("pynvml")
        fake.NVMLError = real.NVMLError
        fake.nvmlMemory_v2 = real.nvmlMemory_v2
        fake.shut_down = 0

        def nvmlInit():
            pass

        def nvmlShutdown():
            fake.shut_down += 1

        def nvmlDeviceGetCount():
            return len(self.gpus)

        def nvmlDeviceGetHandleByIndex(index):
            return self.gpus[index]

        def nvmlDeviceGetUUID(handle):
            return handle[0]

        def nvmlDeviceGetName(handle):
            return handle[1].encode()  # as older ones do

        def nvmlDeviceGetMemoryInfo(handle, version=None):
            memory = real.c_nvmlMemory_v2_t() if version else real.c_nvmlMemory_t()
            # The first version counts what the driver keeps for itself.
            memory.total, memory.used = handle[2] << 20, (handle[3] + (0 if version else 500)) << 20
            return memory

        def nvmlDeviceGetUtilizationRates(handle):
            if handle[4] is None:
                raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
            rates = real.c_nvmlUtilization_t()
            rates.gpu = handle[4]
            return rates

        def nvmlDeviceGetComputeRunningProcesses(handle):
            return handle[5]

        def nvmlSystemGetDriverVersion():
            return b"535.104.05"

        def nvmlSystemGetCudaDriverVersion():
            return 12020

        for name, function in list(locals().items()):
            if name.startswith("nvml"):
                signature = inspect.signature(getattr(real, name))
                assert inspect.signature(function) == signature, name
                setattr(fake, name, function)
        return fake


def _real_pynvml():
    """nvidia-ml-py, which the environments of the core install: the extra ``nvml``."""
    before = sys.modules.pop("pynvml", None)
    try:
        import pynvml

        return pynvml
    finally:
        sys.modules["pynvml"] = before


def fields(gpus):
    return [tuple(getattr(gpu, name) for name in gpu.__slots__) for gpu in gpus]


def test_nvml_and_nvidia_smi_give_the_same_gpus(machine, monkeypatch):
    recorded = Recorded()
    recorded.smi(machine)
    by_command, busy = device_choice.discover(), discovery.busy()
    assert len(by_command) == 2 and busy == ["GPU-bb22"]
    fake = recorded.nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("PATH", "")  # nvidia-smi is not asked
    assert fields(device_choice.discover()) == fields(by_command)
    assert [uuid for uuid in discovery.busy() if uuid] == busy
    found = discovery.drivers()
    assert (found["nvidia"], found["cuda"]) == ("535.104.05", "12.2")
    assert fake.shut_down == 3
    assert chosen("free").gpus == ()  # one is busy, the other one has a process


def test_where_nvml_fails_nvidia_smi_is_asked(machine, monkeypatch):
    machine.plug(1)
    real = _real_pynvml()
    fake = Recorded().nvml()

    def fails():
        raise real.NVMLError(real.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(fake, "nvmlInit", fails)
    for module in (fake, types.ModuleType("pynvml")):  # another package of that name
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert [gpu.uuid for gpu in device_choice.discover()] == machine.uuids


# AMD ------------------------------------------------------------------------------------------

# "amd-smi list --json" and "rocm-smi --showid --json", as ROCm's documentation shows them.
AMD_SMI = json.dumps(
    [
        {"gpu": index, "bdf": "0000:{}1:00.0".format(index), "uuid": "{}fff74a1-0000".format(index)}
        for index in range(3)
    ],
    indent=4,
)
ROCM_SMI = '{"card0": {"GPU ID": "0x740f"}, "card1": {"GPU ID": "0x740f"}, "system": {}}'


@pytest.mark.parametrize(
    "name, text, number",
    [
        ("amd-smi", AMD_SMI, 3),
        ("amd-smi", "WARNING: a GPU is in a low-power state\n" + AMD_SMI, 3),
        ("amd-smi", json.dumps({"gpu_data": json.loads(AMD_SMI)}), 3),
        ("rocm-smi", ROCM_SMI, 2),
        ("rocm-smi", "\n" + ROCM_SMI + "\n", 2),
    ],
)
def test_amd_gpus_are_asked_of_their_commands(command, name, text, number):
    command(name, text)
    devices = chosen()
    assert [gpu.variable for gpu in device_choice.discover()] == ["HIP_VISIBLE_DEVICES"] * number
    ids = ",".join(map(str, range(number)))
    assert devices.environ({}) == {"HIP_VISIBLE_DEVICES": ids}
    assert devices.undecided is None and not devices.problems


def test_where_amd_smi_fails_rocm_smi_is_asked(command):
    command("amd-smi", "no such option", status=2)
    command("rocm-smi", ROCM_SMI)
    assert len(chosen()) == 2


def test_nvidia_gpus_go_first(command, machine):
    command("amd-smi", AMD_SMI)
    machine.plug(1)
    assert chosen().environ({})["CUDA_VISIBLE_DEVICES"] == "0"


HIP_IGNORES = (
    '{}="{}": AMD\'s HIP ignores "{}" and what follows it, which is no id of a GPU that is visible '
    "here. Corrected: export {}={}"
)


@pytest.mark.parametrize(
    "gpus, environ, entries, problems",
    [
        (2, {}, ("0", "1"), []),
        ([2, 0], {}, ("2", "0"), []),
        ([1, 0], {"HIP_VISIBLE_DEVICES": "2,1"}, ("1", "2"), []),
        (None, {"CUDA_VISIBLE_DEVICES": "1"}, ("1",), []),
        (None, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, ("2",), []),
        (None, {"HIP_VISIBLE_DEVICES": ""}, ("0", "1", "2"), []),
        (None, {"HIP_VISIBLE_DEVICES": "-1"}, (), []),
        (None, {"ROCR_VISIBLE_DEVICES": "2,1"}, ("0", "1"), []),
        (None, {"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, ("1",), []),
        (
            None,
            {"HIP_VISIBLE_DEVICES": "0,7,1"},
            ("0",),
            [HIP_IGNORES.format("HIP_VISIBLE_DEVICES", "0,7,1", "7", "HIP_VISIBLE_DEVICES", "0")],
        ),
    ],
)
def test_ids_of_amd_gpus_count_as_hip_counts_them(command, gpus, environ, entries, problems):
    command("amd-smi", AMD_SMI)
    devices = chosen(gpus, **environ)
    assert (devices.gpus, devices.problems) == (entries, problems)
    after = dict(environ, **devices.environ(environ))
    if entries:
        assert after["HIP_VISIBLE_DEVICES"] == ",".join(entries)
        assert after.get("CUDA_VISIBLE_DEVICES") == environ.get("CUDA_VISIBLE_DEVICES")
        assert "CUDA_DEVICE_ORDER" not in after


def test_fewer_amd_gpus_than_asked_for(command):
    command("amd-smi", AMD_SMI)
    assert chosen(4).shortage == ("gpus=4", "3 GPUs are visible")
    assert chosen(2, HIP_VISIBLE_DEVICES="1").shortage == (
        "gpus=2",
        "1 GPU is visible (HIP_VISIBLE_DEVICES=1)",
    )
    free = chosen("free")
    assert free.gpus == ("0",) and "nothing tells whether GPU 0 is idle" in free.shortage[1]


@pytest.mark.parametrize(
    "environ, hidden",
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}),  # HIP reads it where its own is not set
        (
            {"HIP_VISIBLE_DEVICES": "0"},
            {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"},
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "0"},
            {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"},
        ),
        ({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}, {}),
    ],
)
def test_declined_amd_gpus_are_hidden(command, environ, hidden):
    command("amd-smi", AMD_SMI)
    assert chosen(0, **environ).environ(environ) == hidden
    assert choose(Selection("all"), 2, environ).environ(environ) == hidden


# GPUs that only the framework lists --------------------------------------------------------------


@pytest.mark.parametrize("gpus", [None, 2, [1], "free:1"])
@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_without_a_gpu_of_nvidia_nothing_is_hidden(gpus, environ):
    devices = chosen(gpus, **environ)
    assert devices.undecided == parse_gpus(gpus)
    assert (devices.environ(environ), devices.problems) == ({}, [])
    assert str(devices) == "the GPUs that the framework lists"


@pytest.mark.parametrize(
    "gpus, listed, positions, shortage",
    [
        (None, 0, (), None),
        (None, 2, (0, 1), None),
        (1, 2, (0,), None),
        ([1], 2, (1,), None),
        ("free:1", 2, (0,), "nothing tells whether GPU 0 is idle"),
        (3, 2, (0, 1), "2 GPUs are visible"),
        ([4], 2, (), "there is no GPU 4: 2 GPUs are visible"),
        (1, 0, (), "no GPU is visible"),
    ],
)
def test_what_the_framework_lists_is_chosen_among(gpus, listed, positions, shortage):
    devices = chosen(gpus)
    devices.settle(listed)
    assert devices.positions == positions
    assert (devices.shortage or ("", ""))[1].startswith(shortage or "")
    assert bool(devices.shortage) == bool(shortage)
    devices.settle(7)  # only the first answer counts
    assert devices.positions == positions
    assert list(devices.ordinals({"CUDA_VISIBLE_DEVICES": "1"})) == list(positions)


def test_a_rank_takes_one_of_those_that_the_framework_lists():
    def rank(gpus, index, size, listed):
        devices = device_choice.choose_for_rank(
            parse_gpus(gpus), {}, Place(index, size, index, size, "")
        )
        devices.settle(listed)
        return devices.positions, devices.shortage and devices.shortage[1]

    assert rank(None, 1, 2, 4) == ((1,), None)
    assert rank([3, 2], 1, 2, 4) == ((2,), None)
    assert rank(None, 2, 3, 2) == ((0,), "2 GPUs are there for 3 ranks")
    assert rank(None, 1, 2, 0) == ((), None)


@pytest.mark.parametrize(
    "gpus, environ, variables",
    [
        (None, {}, {}),
        (2, {}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (
            [2, 0],
            {"HIP_VISIBLE_DEVICES": "0,1,2"},
            {"CUDA_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "2,0"},
        ),
    ],
)
def test_where_nobody_asks_the_framework_variables_say_it(gpus, environ, variables):
    assert chosen(gpus).trusting(environ) == variables


# Why there are none ---------------------------------------------------------------------------


def reason(gpus=None, **environ):
    devices = chosen(gpus, **environ)
    devices.settle(0)
    return devices.outcome()


def test_the_reason_for_the_cpu_is_said(machine):
    assert reason(0) == "CPU, as asked"
    assert reason() == (
        "CPU: no GPU was found (amd-smi and rocm-smi are not installed; nvidia-smi lists none); "
        "the framework lists none"
    )
    (machine.folder / "nvidia-smi").unlink()
    nothing = "nvidia-smi, amd-smi and rocm-smi are not installed; no NVIDIA driver is loaded"
    assert reason() == "CPU: no GPU was found ({}); the framework lists none".format(nothing)
    assert reason(CUDA_VISIBLE_DEVICES="0") == (
        "CPU: no GPU was found ({}; CUDA_VISIBLE_DEVICES=0); the framework lists none".format(
            nothing
        )
    )
    machine.plug(2)
    assert reason(CUDA_VISIBLE_DEVICES="-1") == (
        "CPU: CUDA_VISIBLE_DEVICES=-1 hides the GPUs of this machine"
    )
    assert reason("GPU-zz") == "CPU: there is no GPU-zz: 2 GPUs are visible"
    assert Devices(["0"]).outcome() == "GPU 0"


def test_a_driver_that_does_not_work_is_a_shortage_also_where_no_number_was_asked_for(command):
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    command("nvidia-smi", said, status=9)
    problem = "no GPU is visible: nvidia-smi fails (exit status 9: {})".format(said.rstrip("."))
    assert chosen().shortage == ("gpus=None", problem)
    command("nvidia-smi", "No devices were found", status=6)
    assert chosen().shortage is None
