"""The ``gpus=`` grammar, what CUDA_VISIBLE_DEVICES means, and which GPUs are chosen."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, refusal

import compat
from compat._configuration import device_choice
from compat._configuration.device_choice import Devices, choose
from compat._configuration.discovery import visible_entries
from compat._configuration.gpu_selection import Selection, parse_gpus
from compat._runtime.process import process

pytestmark = pytest.mark.usefixtures("process")


class Integer:
    """An integer of another library, such as numpy's."""

    def __index__(self):
        return 2


class Array:
    """As numpy's: has ``__index__``, and refuses unless it holds one integer."""

    def __index__(self):
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


# The grammar: what test_grammars.py does not write ----------------------------------------------


@pytest.mark.parametrize(
    "gpus, meant",
    [
        ("auto", Selection("all")),
        (range(0), Selection("none")),
        ("none", Selection("none")),
        (Integer(), Selection("count", 2)),
        (range(1, 3), Selection("ids", ids=(1, 2))),
        ([Integer()], Selection("ids", ids=(2,))),
        ("00,02", Selection("ids", ids=(0, 2))),
        (["GPU-8932f937", 0], Selection("ids", ids=("GPU-8932f937", 0))),
        ("MIG-GPU-8932f937/1/0", Selection("ids", ids=("MIG-GPU-8932f937/1/0",))),
        ("free: 2", Selection("free", 2)),
    ],
)
def test_gpus(gpus, meant):
    assert parse_gpus(gpus) == meant


FORMS = """\
    None            every visible GPU
    2               two GPUs
    -1              every visible GPU
    [0, 2], "0,2"   these ids, counted inside CUDA_VISIBLE_DEVICES where it is set
    [2], "2"        the one GPU with this id
    ["GPU-8932f937"], "MIG-c7384736"
                    GPUs, or MIG instances, by name
    "free"          the idle GPUs
    "free:2"        two idle GPUs
    0, [], "cpu"    no GPU"""


@pytest.mark.parametrize(
    "gpus, problem",
    [
        (True, "True and False name no GPU"),
        (2.0, "it is a float"),
        ({0: 1}, "it is a dict"),
        (-2, "a count below -1 means nothing"),
        (" ", 'an empty text names no GPU; "cpu" means none'),
        ("0,", "'' is neither an id nor a name"),
        ("0 2", "'0 2' is neither an id nor a name"),
        ("0,-1", "'-1' is neither an id nor a name"),
        ("\u00b2", "'\u00b2' is neither an id nor a name"),
        ("cuda:0", "'cuda:0' is neither an id nor a name"),
        ("0,free", "'free' is neither an id nor a name"),
        ("free:", '"free:" takes a number of GPUs, 1 or more'),
        ("free:0", '"free:" takes a number of GPUs, 1 or more'),
        ("free:-1", '"free:" takes a number of GPUs, 1 or more'),
        ("free:all", '"free:" takes a number of GPUs, 1 or more'),
        ([-1], "-1 is neither an id nor a name"),
        ([True], "True is neither an id nor a name"),
        (["0,1"], "'0,1' is neither an id nor a name"),
        ([0, "0"], "0 is named twice"),
        ("GPU-a,GPU-a", "'GPU-a' is named twice"),
        (["MIG-a", 0], "CUDA cannot mix MIG instances with whole GPUs"),
    ],
)
def test_wrong_gpus(gpus, problem):
    assert refusal(compat.InvalidArgumentError, compat.configure_gpu, gpus) == (
        "gpus={!r} is not understood: {}. Use one of:\n{}".format(gpus, problem, FORMS)
    )


def test_an_array_is_no_count():
    with pytest.raises(compat.InvalidArgumentError, match="it is a Array"):
        parse_gpus(Array())


# CUDA_VISIBLE_DEVICES -------------------------------------------------------------------------

IGNORED = (
    'CUDA_VISIBLE_DEVICES="{}": CUDA ignores "{}" and what follows it, which is no id, no GPU '
    "name and no MIG name like those before it. {}"
)
ABSENT = (
    'CUDA_VISIBLE_DEVICES="{}": CUDA ignores "{}" and what follows it, since this machine has no '
    "such GPU. {}"
)
SPACE = (
    'CUDA_VISIBLE_DEVICES="{}" contains a space, where CUDA stops reading; compat reads it as '
    '"{}". {}'
)
TWICE = 'CUDA_VISIBLE_DEVICES="{}": CUDA shows no GPU at all, since "{}" is there twice. {}'
ALL = "To use every GPU: unset CUDA_VISIBLE_DEVICES"


def corrected(value):
    return "Corrected: export CUDA_VISIBLE_DEVICES={}".format(value)


@pytest.mark.parametrize(
    "value, entries, problems",
    [
        ("", [], []),
        (" ", [], []),
        ("-1", [], []),
        ("0,2,-1,1", ["0", "2"], []),
        ("0,x,1", ["0"], [IGNORED.format("0,x,1", "x", corrected("0"))]),
        ("0,,1", ["0"], [IGNORED.format("0,,1", "", corrected("0"))]),
        ("NoDevFiles", [], [IGNORED.format("NoDevFiles", "NoDevFiles", ALL)]),
        ("0,GPU-a", ["0"], [IGNORED.format("0,GPU-a", "GPU-a", corrected("0"))]),
        ("GPU-a,0", ["GPU-a"], [IGNORED.format("GPU-a,0", "0", corrected("GPU-a"))]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"], []),
        ("MIG-a,GPU-b", ["MIG-a"], [IGNORED.format("MIG-a,GPU-b", "GPU-b", corrected("MIG-a"))]),
        ("0, 1", ["0", "1"], [SPACE.format("0, 1", "0,1", corrected("0,1"))]),
        ("0,1,0", [], [TWICE.format("0,1,0", "0", corrected("0,1"))]),
    ],
)
def test_visible_entries(value, entries, problems):
    assert visible_entries({"CUDA_VISIBLE_DEVICES": value}) == (entries, problems)


def test_entries_of_gpus_that_are_not_there_end_the_list(machine):
    gpus = [device_choice.GPU(0, "GPU-aa1"), device_choice.GPU(1, "GPU-bb2")]

    def read(value):
        return visible_entries({"CUDA_VISIBLE_DEVICES": value}, gpus)

    assert read("1,7,0") == (["1"], [ABSENT.format("1,7,0", "7", corrected("1"))])
    assert read("GPU-bb,GPU-a") == (["GPU-bb", "GPU-a"], [])
    assert read("GPU-bb,GPU-c") == (
        ["GPU-bb"],
        [ABSENT.format("GPU-bb,GPU-c", "GPU-c", corrected("GPU-bb"))],
    )
    assert read("MIG-GPU-bb2/1/0") == (["MIG-GPU-bb2/1/0"], [])
    assert read("MIG-GPU-c/1/0") == ([], [ABSENT.format("MIG-GPU-c/1/0", "MIG-GPU-c/1/0", ALL)])
    # The UUID of a MIG instance does not say on which GPU it is.
    assert read("MIG-c7384736") == (["MIG-c7384736"], [])


def test_another_order_than_nvidia_smis_is_a_problem_where_there_are_two_gpus():
    problem = (
        "CUDA_DEVICE_ORDER=FASTEST_FIRST: ids may mean other GPUs than in nvidia-smi's listing. "
        "For the same ones: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert visible_entries(environ) == (None, [problem])
    assert visible_entries(environ, [device_choice.GPU(0), device_choice.GPU(1)]) == (
        None,
        [problem],
    )
    assert visible_entries(environ, [device_choice.GPU(0)]) == (None, [])
    assert visible_entries({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (None, [])


# Discovery ------------------------------------------------------------------------------------


def test_discovery_reads_what_nvidia_smi_prints(machine):
    first = machine.add(used=1234, total=81559, utilization=56)
    second = machine.add(name="NVIDIA A100-SXM4-40GB", used="[N/A]", utilization="[N/A]")
    machine.plug()
    one, two = device_choice.discover()
    mebi = 1024 * 1024
    assert (one.index, one.uuid, one.name) == (0, first, "NVIDIA H100 80GB HBM3")
    assert (one.memory_total, one.memory_used) == (81559 * mebi, 1234 * mebi)
    assert one.utilization == 56
    assert (two.index, two.uuid, two.name) == (1, second, "NVIDIA A100-SXM4-40GB")
    assert (two.memory_used, two.utilization) == (None, None)


def test_discovery_without_nvidia_smi_asks_the_driver(tmp_path, monkeypatch):
    """It lists its GPUs, a folder for each; conftest.py says where."""
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing there
    assert device_choice.discover() == []
    (tmp_path / "_WSL").mkdir()
    assert device_choice.discover() is None
    for address in ("0000:04:00.0", "0000:81:00.0"):
        (tmp_path / "_DRIVER" / address).mkdir(parents=True)
    assert [gpu.index for gpu in device_choice.discover()] == [0, 1]
    assert summary(chosen(None)) == (("0", "1"), (0, 1), None)
    assert summary(chosen("GPU-aa", CUDA_VISIBLE_DEVICES="GPU-aa"))[0] == ("GPU-aa",)


# Choosing -------------------------------------------------------------------------------------


def chosen(gpus, simulate=None, **environ):
    return choose(parse_gpus(gpus), simulate, environ)


def summary(devices):
    return devices.gpus, devices.positions, devices.shortage


@pytest.mark.parametrize(
    "gpus, expected, positions",
    [
        (None, ("0", "1", "2"), (0, 1, 2)),
        (2, ("0", "1"), (0, 1)),
        ([2, 0], ("2", "0"), (2, 0)),
        (0, (), ()),
    ],
)
def test_choice_among_all(machine, gpus, expected, positions):
    machine.plug(3)
    assert summary(chosen(gpus)) == (expected, positions, None)


@pytest.mark.parametrize(
    "gpus, expected, positions",
    [
        (None, ("3", "1"), (0, 1)),
        (1, ("3",), (0,)),
        ([1], ("1",), (1,)),
        ("1,0", ("1", "3"), (1, 0)),
        ("cpu", (), ()),
    ],
)
def test_ids_count_inside_cuda_visible_devices(machine, gpus, expected, positions):
    machine.plug(4)
    devices = chosen(gpus, CUDA_VISIBLE_DEVICES="3,1")
    assert summary(devices) == (expected, positions, None)


def test_names_are_found_by_their_beginning(machine):
    machine.plug(3)
    second = machine.uuids[1]
    assert summary(chosen([second])) == (("1",), (1,), None)
    assert summary(chosen([second[:12], 0])) == (("1", "0"), (1, 0), None)
    inside = chosen([second], CUDA_VISIBLE_DEVICES="2,1")
    assert summary(inside) == (("1",), (1,), None)
    inside = chosen([second], CUDA_VISIBLE_DEVICES="{},{}".format(machine.uuids[2], second[:12]))
    assert summary(inside) == ((second[:12],), (1,), None)


def test_names_that_mean_one_gpu_twice_or_several_at_once(machine):
    machine.plug(2)
    second = machine.uuids[1]

    def problem(gpus):
        return refusal(compat.InvalidArgumentError, chosen, gpus).splitlines()[0]

    start = "gpus={!r} is not understood: "
    assert problem([1, second]) == (
        start.format([1, second]) + "{!r} is named twice. Use one of:".format(second)
    )
    assert problem("GPU-") == (start.format(["GPU-"]) + "'GPU-' begins several names. Use one of:")


def test_ids_and_names_mixed_where_nothing_tells_which_gpus_there_are():
    call = choose, parse_gpus([0, "GPU-a"]), None, {}, lambda: None
    assert refusal(compat.InvalidArgumentError, *call).splitlines()[0] == (
        "gpus=[0, 'GPU-a'] is not understood: CUDA cannot mix ids and names, and nothing tells "
        "which GPUs there are. Use one of:"
    )


def test_mig_instances_are_trusted_where_there_is_a_gpu(machine):
    names = ("MIG-c7384736", "MIG-d5f15b44")
    assert summary(chosen(names)) == (
        (),
        (),
        (
            "gpus=['MIG-c7384736', 'MIG-d5f15b44']",
            "there is no MIG-c7384736 or MIG-d5f15b44: no GPU is visible",
        ),
    )
    machine.plug(1)
    assert summary(chosen(names)) == (names, (0, 1), None)
    inside = chosen(["MIG-d5f15b44"], CUDA_VISIBLE_DEVICES=",".join(names))
    assert summary(inside) == (("MIG-d5f15b44",), (1,), None)
    assert summary(chosen([1], CUDA_VISIBLE_DEVICES=",".join(names)))[0] == ("MIG-d5f15b44",)


@pytest.mark.parametrize(
    "gpus, visible, expected, shortage",
    [
        (3, None, ("0", "1"), "gpus=3: 2 GPUs are visible"),
        ([0, 5], None, ("0",), "gpus=[0, 5]: there is no GPU 5: 2 GPUs are visible"),
        ([0, 5, 6], None, ("0",), "gpus=[0, 5, 6]: there is no GPU 5 or GPU 6: 2 GPUs are visible"),
        (["GPU-zz"], None, (), "gpus=['GPU-zz']: there is no GPU-zz: 2 GPUs are visible"),
        (2, "1", ("1",), "gpus=2: 1 GPU is visible (CUDA_VISIBLE_DEVICES=1)"),
        ([1], "1", (), "gpus=[1]: there is no GPU 1: 1 GPU is visible (CUDA_VISIBLE_DEVICES=1)"),
        (1, "-1", (), "gpus=1: no GPU is visible (CUDA_VISIBLE_DEVICES=-1)"),
        (
            "free:3",
            "0",
            ("0",),
            'gpus="free:3": 1 GPU is idle of 1 visible (CUDA_VISIBLE_DEVICES=0)',
        ),
    ],
)
def test_shortages(machine, gpus, visible, expected, shortage):
    machine.plug(2)
    devices = chosen(gpus, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert (devices.gpus, ": ".join(devices.shortage)) == (expected, shortage)


@pytest.mark.parametrize(
    "gpus, expected, shortage",
    [
        (2, ("0", "1"), None),
        ([3, 1], ("3", "1"), None),
        ("MIG-c7384736", ("MIG-c7384736",), None),
        (None, (), None),  # whatever the framework lists
        ("free:2", ("0", "1"), ('gpus="free:2"', "nothing tells which GPUs there are")),
    ],
)
def test_where_nothing_tells_the_request_is_trusted(gpus, expected, shortage):
    devices = choose(parse_gpus(gpus), None, {}, discover=lambda: None)
    assert (devices.gpus, devices.shortage) == (expected, shortage)
    assert devices.positions == tuple(range(len(expected)))


def test_where_nothing_tells_cuda_visible_devices_does():
    environ = {"CUDA_VISIBLE_DEVICES": "4,6"}
    devices = choose(parse_gpus([1]), None, environ, discover=lambda: None)
    assert summary(devices) == (("6",), (1,), None)


@pytest.mark.parametrize(
    "gpus, simulated", [(None, 3), (-1, 3), ("free", 3), (2, 2), ("free:2", 2), ([2, 0], 2), (0, 1)]
)
def test_simulated(gpus, simulated):
    devices = chosen(gpus, 3)
    assert (devices.simulated, devices.gpus, len(devices)) == (simulated, (), simulated)
    assert str(devices) == "{} simulated on the CPU".format(simulated)


@pytest.mark.parametrize(
    "gpus, shown",
    [
        (4, "gpus=4"),
        ("free:4", 'gpus="free:4"'),
        ([0, 3], "gpus=[0, 3]"),
        ("GPU-a", "gpus=['GPU-a']"),
    ],
)
def test_more_than_is_simulated(gpus, shown):
    assert refusal(compat.InvalidArgumentError, chosen, gpus, 3) == (
        "{} asks for a device that simulate=3 does not have. Simulated devices are numbered from "
        "0; ask for at most 3, or leave gpus out.".format(shown)
    )


# The variables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, before, expected",
    [
        (Devices(["0"]), {}, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (
            Devices(["2", "0"]),
            {"CUDA_VISIBLE_DEVICES": "0,1,2", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
            {"CUDA_VISIBLE_DEVICES": "2,0"},
        ),
        (
            Devices(["0"]),
            {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            {},
        ),
        (Devices(), {}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (Devices(), {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (Devices(), {"CUDA_VISIBLE_DEVICES": ""}, {}),
        (Devices(), {"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        (Devices(simulated=2), {}, {"CUDA_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_variables(devices, before, expected):
    assert devices.environ(before) == expected


# Idle GPUs ------------------------------------------------------------------------------------


def test_idle_gpus_are_without_processes_memory_and_work(machine):
    machine.add(busy=True)  # a process that has taken little memory yet
    machine.add(used=8156)  # over a tenth
    machine.add(utilization=10)
    machine.add(used=8155)  # a desktop takes some
    machine.add()
    machine.plug()
    assert summary(chosen("free:1")) == (("4",), (4,), None)  # the one with most memory free
    assert summary(chosen("free")) == (("3", "4"), (3, 4), None)
    assert chosen("free:3").shortage == ('gpus="free:3"', "2 GPUs are idle of 5 visible")
    inside = chosen("free", CUDA_VISIBLE_DEVICES="0,3")
    assert summary(inside) == (("3",), (1,), None)
    none = chosen("free", CUDA_VISIBLE_DEVICES="0,1")
    assert summary(none) == (
        (),
        (),
        ('gpus="free"', "no GPU is idle of 2 visible (CUDA_VISIBLE_DEVICES=0,1)"),
    )


def test_without_nvidia_smi_nothing_tells_which_gpus_are_idle(machine, monkeypatch):
    monkeypatch.setenv("PATH", str(machine.folder.parent))
    gpus = [device_choice.GPU(0), device_choice.GPU(1)]
    devices = choose(parse_gpus("free"), None, {}, discover=lambda: gpus)
    assert summary(devices) == (
        ("0",),
        (0,),
        (
            'gpus="free"',
            "nothing tells whether GPU 0 is idle (unknown: memory, processes, utilization)",
        ),
    )


def test_gpus_of_which_the_driver_tells_too_little_come_last(machine):
    machine.add(utilization="[N/A]")
    machine.add(used="[N/A]")
    machine.add(used="[N/A]", utilization=99)  # busy, as far as is known
    machine.add(utilization="[N/A]", busy=True)
    machine.add(used=4000)
    machine.plug()
    assert summary(chosen("free")) == (("4",), (4,), None)
    assert summary(chosen("free:1")) == (("4",), (4,), None)
    several = chosen("free:4")
    assert several.gpus == ("0", "1", "4")
    assert several.shortage == (
        'gpus="free:4"',
        "1 GPU is idle of 5 visible, and nothing tells whether GPU 0 and GPU 1 are idle (unknown: "
        'memory, utilization; under MIG, name an instance: gpus="MIG-...")',
    )


def test_where_no_gpu_is_known_to_be_idle_one_is_taken_and_it_is_said(machine):
    machine.add(utilization="[N/A]")  # MIG is on
    machine.add(utilization="[N/A]")
    machine.plug()
    assert summary(chosen("free")) == (
        ("0",),
        (0,),
        (
            'gpus="free"',
            "nothing tells whether GPU 0 is idle (unknown: utilization; under MIG, name an "
            'instance: gpus="MIG-...")',
        ),
    )


def test_a_mig_instance_that_was_given_is_taken(machine):
    machine.add(utilization="[N/A]")
    machine.plug()
    devices = chosen("free", CUDA_VISIBLE_DEVICES="MIG-c7384736")
    assert summary(devices) == (
        ("MIG-c7384736",),
        (0,),
        (
            'gpus="free"',
            "nothing tells whether MIG-c7384736 is idle (unknown: memory, processes, utilization) "
            "(CUDA_VISIBLE_DEVICES=MIG-c7384736)",
        ),
    )


PICK = """\
import sys
from compat._configuration import device_choice, gpu_selection
found = device_choice.choose(gpu_selection.parse_gpus("free:1"), None, {})
print(found.gpus, found.problems, flush=True)
sys.stdin.read()
"""


def pick():
    """Start a process that claims an idle GPU, prints it, and keeps it until it ends; return it."""
    return subprocess.Popen(
        [sys.executable, "-c", PICK],
        env=dict(os.environ, PYTHONPATH=ROOT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )


def test_two_processes_do_not_pick_the_same_gpu(machine):
    machine.plug(2)
    jobs = [pick(), pick()]
    answers = sorted(job.stdout.readline().strip() for job in jobs)
    assert answers == ["('0',) []", "('1',) []"]  # whichever came first
    assert chosen("free").gpus == ()  # nothing left for this process
    for job in jobs:
        job.communicate()  # they end, and their claims with them
    assert chosen("free").gpus == ("0", "1")


def test_a_claim_holds_for_the_next_call_of_the_same_process(machine):
    machine.plug(2)
    assert chosen("free:1").gpus == ("0",)
    machine.lines[0] = machine.lines[0].replace(", 3, 0", ", 60000, 99")  # by this process
    machine.busy.append(machine.uuids[0])
    machine.plug()
    assert chosen("free:1").gpus == ("0",)
    assert chosen("free").gpus == ("0", "1")


@pytest.fixture
def lock_paths(machine):
    """Return the lock files of two idle GPUs, which do not exist yet."""
    machine.plug(2)
    paths = ["/tmp/keras-gpu-compat-{}.lock".format(name) for name in machine.uuids]
    yield paths
    for path in paths:
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


OBSTACLES = {
    "FIFO": (os.mkfifo, "It is not a regular file"),
    "folder": (os.mkdir, "Is a directory"),
    "socket": (make_socket, "No such device or address"),
    "link": (
        lambda path: os.symlink("/tmp/keras-gpu-compat-made-elsewhere", path),
        "Too many levels of symbolic links",
    ),
    "device": (lambda path: os.symlink("/dev/zero", path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", sorted(OBSTACLES))
def test_what_is_no_lock_file_neither_hangs_nor_claims(kind, lock_paths):
    """Anybody may have put it into /tmp. GPUs that can be claimed go first."""
    make, said = OBSTACLES[kind]
    make(lock_paths[0])
    for ask, gpus in (("free:1", ("1",)), ("free", ("0", "1"))):
        devices = chosen(ask)
        assert devices.gpus == gpus and devices.shortage is None
    assert list(process.claims) == [lock_paths[1][len("/tmp/keras-gpu-compat-") : -len(".lock")]]
    (problem,) = devices.problems
    assert problem == (
        "GPU 0 is idle but cannot be claimed: {} cannot be locked ({}). Another job that asks for "
        "idle GPUs may take it, too. Choose GPUs by their ids, or have that file removed.".format(
            lock_paths[0], said
        )
    )
    assert not os.path.exists("/tmp/keras-gpu-compat-made-elsewhere")


def test_nothing_in_tmp_keeps_people_from_all_gpus_for_ever(lock_paths):
    for path in lock_paths:
        os.mkfifo(path)
    for _ in range(2):  # each is told that it may share the GPU
        said, _ = pick().communicate(timeout=60)
        assert said.startswith("('0',) [") and lock_paths[0] in said


def test_other_users_can_lock_the_file_whatever_the_umask(lock_paths):
    before = os.umask(0o077)
    try:
        chosen("free")
    finally:
        os.umask(before)
    assert [os.stat(path).st_mode & 0o777 for path in lock_paths] == [0o644, 0o644]
