"""Which GPUs a machine has: nvidia-smi, AMD's commands, and where none of these tells."""

import json

import pytest

from compat._configuration import device_choice
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
    assert str(devices) == "CPU, unless the framework lists GPUs"


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
