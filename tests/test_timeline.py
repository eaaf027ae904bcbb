"""``compat.timeline()`` and ``compat run --timeline``: when each device executed what.

The backend of the scripts is tests/plugin, whose devices are threads.
"""

import json
import os
import sys

import pytest
from conftest import refusal
from test_report import ended

import compat
from compat._runtime.operation_times import PARTS, Operation, activities, trace

pytestmark = pytest.mark.usefixtures("process")

# Two that overlap, one within another, one after a pause; another device begins and ends later.
RAN = [
    Operation("cpu:0", "b", 105.0, 10.0),
    Operation("cpu:0", "a", 100.0, 10.0),
    Operation("cpu:0", "c", 106.0, 2.0),
    Operation("cpu:0", "d", 130.0, 5.0),
    Operation("cpu:1", "e", 110.0, 30.0),
]


def test_busy_is_the_share_of_the_time_of_all_devices():
    found = activities(RAN, ["cpu:0", "cpu:1", "cpu:2"])
    busy = {device: pytest.approx(each.busy) for device, each in found.items()}
    assert busy == {"cpu:0": 20.0 / 40.0, "cpu:1": 30.0 / 40.0, "cpu:2": 0.0}
    assert {each.timeline_seconds for each in found.values()} == {40e-6}
    each = PARTS // 40  # microsecond
    assert found["cpu:0"].busy_parts == (
        [1.0] * 15 * each + [0.0] * 15 * each + [1.0] * 5 * each + [0.0] * 5 * each
    )
    assert activities([], ["cpu:0"]) == {}
    assert activities([Operation("cpu:0", "a", 3.0, 0.0)], ["cpu:0"])["cpu:0"].busy == 1.0


def test_a_trace_has_a_process_for_each_device_and_a_thread_for_what_overlaps():
    found = trace(RAN, [("cpu:1", "rank 1: cpu:1"), ("cpu:0", "zero"), ("cpu:2", "idle")])
    events = found["traceEvents"]
    assert [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"] == [
        (0, "rank 1: cpu:1"),
        (1, "zero"),
        (2, "idle"),
    ]
    assert [
        tuple(e[key] for key in ("pid", "tid", "name", "ts", "dur"))
        for e in events
        if e["ph"] == "X"
    ] == [
        (1, 0, "a", 0.0, 10.0),
        (1, 1, "b", 5.0, 10.0),
        (1, 2, "c", 6.0, 2.0),
        (0, 0, "e", 10.0, 30.0),
        (1, 0, "d", 30.0, 5.0),
    ]


BEGIN = """\
import numpy as np
import compat
compat.configure_gpu(backend="numpy", simulate=3)
from compat_numpy.networks import Network
network = Network(8, 16, 4)
inputs, targets = np.ones((61, 8)), np.ones((61, 4))
"""


@pytest.fixture
def train(monkeypatch):
    """Train a network on three devices of this process, with the first rows of a batch."""
    monkeypatch.setenv("COMPAT_VERIFY", "0")
    names = {}
    exec(BEGIN, names)
    network = compat.parallelize(names["network"])
    return lambda rows=61: network.train_on_batch(names["inputs"][:rows], names["targets"][:rows])


def run(*command):
    return ended([sys.executable, *command], COMPAT_VERIFY="0")


def ran(path):
    """Return the names of the operations of each device in a file."""
    with open(str(path), encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        names[place]: [e["name"] for e in events if e["ph"] == "X" and e["pid"] == place]
        for place in names
    }


def test_what_runs_within_is_written_also_where_the_block_fails(train, tmp_path):
    path = tmp_path / "timelines" / "timeline.json"
    path.parent.mkdir()
    train()
    with pytest.raises(ZeroDivisionError), compat.timeline(str(path)):
        train()
        train(2)
        raise ZeroDivisionError
    train()
    assert all(0 < each.busy <= 1 for each in compat.report().devices)
    assert str(compat.report()).startswith("device  rows  in training  steps  busy\n")
    once, twice = ["gradients"], ["gradients", "gradients"]
    assert ran(path) == {"cpu:0": twice, "cpu:1": twice, "cpu:2": once}
    assert os.listdir(str(path.parent)) == ["timeline.json"]


def test_nothing_executed_is_told(train, tmp_path):
    path = tmp_path / "timeline.json"
    with pytest.warns(compat.CompatWarning) as caught, compat.timeline(str(path)):
        pass
    assert [str(warning.message) for warning in caught] == [
        "timeline({!r}): no configured device executed anything while it was recorded, so the "
        "timeline is empty. Train or call the model within the block.".format(str(path))
    ]
    assert compat.report().devices[0].busy is None
    assert ran(path) == {"cpu:0": [], "cpu:1": [], "cpu:2": []}


def _refusal(path):
    return refusal(compat.InvalidArgumentError, lambda: compat.timeline(path).__enter__())


def test_one_at_a_time_and_only_where_it_can_be_written(train, tmp_path):
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    with compat.timeline(first):
        train()
        assert _refusal(second) == (
            "timeline({!r}): {} is being recorded, and a framework records one timeline at a time. "
            "End that block first.".format(second, first)
        )
    assert not os.path.exists(second)
    with compat.timeline(second):
        train()
    assert ran(first) == ran(second) == dict.fromkeys(["cpu:0", "cpu:1", "cpu:2"], ["gradients"])
    nowhere = str(tmp_path / "nowhere" / "timeline.json")
    assert _refusal(nowhere) == (
        "timeline({!r}) cannot be written: No such file or directory. Name a file in a folder "
        "that is there and that you may write to; nothing was started.".format(nowhere)
    )


# compat run --timeline ------------------------------------------------------------------------

COMMAND = "-m", "compat", "run", "--backend=numpy", "--simulate=3"


@pytest.fixture
def script(tmp_path):
    def write(program):
        path = tmp_path / "train.py"
        path.write_text(BEGIN + program)
        return str(path)

    return write


def test_a_script_is_recorded_from_its_first_parallelized_model(script, tmp_path):
    path = script(
        "network.train_on_batch(inputs, targets)\n"
        "compat.parallelize(network)\n"
        "network.train_on_batch(inputs, targets)\n"
        "network.outputs(inputs)\n"
    )
    timeline = str(tmp_path / "timeline.json")
    page = tmp_path / "report.html"
    options = "--timeline", timeline, "--report-html", str(page)
    status, out, err = run(*(COMMAND + options + (path,)))
    assert (status, out) == (0, "")
    assert page.read_text(encoding="utf-8").count(">busy ") == 3
    assert ran(timeline) == dict.fromkeys(["cpu:0", "cpu:1", "cpu:2"], ["gradients", "outputs"])
    assert (
        "compat run: the timeline is in {}; open it at https://ui.perfetto.dev\n".format(timeline)
    ) in err
    table = err[err.index("compat run: what each device did\n") :].splitlines()
    assert table[1] == "device  rows  in training  steps  busy"
    assert table[-1] == "All 3 devices worked: 40 to 42 rows each."


def test_each_rank_has_a_file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BEGIN.replace(", simulate=3", "") + "compat.parallelize(network)\n")
    timeline = str(tmp_path / "timeline.json")
    status, _, err = run(*(COMMAND[:-1] + ("-n2", "--timeline", timeline, str(path))))
    assert status == 0, err
    for rank in range(2):
        found = ran(tmp_path / "timeline.rank{}.json".format(rank))
        assert list(found) == ["rank {}: cpu:0".format(rank)]


def test_a_script_that_parallelizes_nothing_is_told(script, tmp_path):
    timeline = str(tmp_path / "timeline.json")
    status, _, err = run(*(COMMAND + ("--timeline", timeline, script(""))))
    assert status == 0
    assert (
        "compat run: --timeline {}: no model was parallelized, so nothing was recorded.\n".format(
            timeline
        )
    ) in err
    assert not os.path.exists(timeline)


def test_a_file_that_could_not_be_written_is_not_told(script, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = script(
        "import shutil\n"
        "compat.parallelize(network)\n"
        "network.train_on_batch(inputs, targets)\n"
        "shutil.rmtree({!r})\n".format(str(folder))
    )
    status, _, err = run(*(COMMAND + ("--timeline", str(folder / "timeline.json"), path)))
    assert status == 1
    assert "FileNotFoundError" in err, err
    assert "the timeline is in" not in err


def test_a_backend_that_records_none_is_told_before(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    program = (
        "import sys\n"
        "from compat import __main__\n"
        "from compat.backend import Backend\n"
        "from compat_numpy import Numpy\n"
        "del Numpy.profiled\n"
        "command = ['run', '--backend', 'numpy', '--timeline', {!r}, {!r}]\n"
        "sys.exit(__main__.main(command))".format(str(tmp_path / "timeline.json"), str(script))
    )
    status, out, err = run("-c", program)
    assert (status, out) == (2, "")
    assert err.endswith(
        "numpy cannot record when each device executes what. compat.report() shows what each "
        "device has computed.\n"
    )
