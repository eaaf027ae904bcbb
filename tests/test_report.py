"""``compat.report()`` and ``compat run --report``: was every device used?

The backend of the scripts is tests/plugin, whose devices are threads.
"""

import json
import os
import signal
import subprocess
import sys

import outcomes
import pytest
import test_files
from conftest import ROOT
from test_main import here

import compat
from compat._commands import machines
from compat._runtime import reporting, work

pytestmark = pytest.mark.usefixtures("process")

PATH = os.pathsep.join([ROOT, os.path.join(ROOT, "tests", "plugin")])
ENVIRON = dict(os.environ)  # without what fixtures set
THREE = ["cpu:0", "cpu:1", "cpu:2"]
MODELS = {"net": "cpu:0, cpu:1, cpu:2"}


def reported(names=THREE, rank=None, models=MODELS, peaks=()):
    return reporting.of_this_process(names, rank, models, dict(peaks))


def test_what_was_counted_is_a_table_and_a_sentence():
    for _ in range(3):
        work.count(THREE, [406, 407, 407], True)
    work.count(THREE, [4, 4, 5], False)
    report = reported()
    assert str(report) == (
        "device   rows  in training  steps\n"
        "cpu:0   1,222        1,218      4\n"
        "cpu:1   1,225        1,221      4\n"
        "cpu:2   1,226        1,221      4\n"
        "All 3 devices worked: 1,222 to 1,226 rows each."
    )
    assert report.all_worked
    assert repr(report) == "<Report All 3 devices worked: 1,222 to 1,226 rows each.>"
    found = json.loads(report.to_json())
    assert found == report.as_dict()
    assert found["devices"][2] == {
        "device": "cpu:2",
        "rank": None,
        "rows": 1226,
        "training_rows": 1221,
        "steps": 4,
        "busy": None,
        "memory_peak": None,
        "idle": None,
        "timeline_seconds": None,
        "busy_parts": None,
    }


def test_a_table_has_memory_where_it_is_told_and_80_columns():
    devices = ["/device:GPU:{}".format(index) for index in range(3)]
    work.count(devices, [10**9] * 3, True)
    report = reported(devices, None, {}, {devices[0]: 3 * 2**30})
    assert str(report) == (
        "device                  rows    in training  steps  memory peak\n"
        "/device:GPU:0  1,000,000,000  1,000,000,000      1    3,072 MiB\n"
        "/device:GPU:1  1,000,000,000  1,000,000,000      1            -\n"
        "/device:GPU:2  1,000,000,000  1,000,000,000      1            -\n"
        "All 3 devices worked: 1,000,000,000 rows each."
    )
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize(
    "batches, verdict",
    [
        (
            [(THREE, [0, 1, 1])],
            "Only 2 of 3 devices worked. cpu:0 got no rows: no batch had more than 2 rows, too "
            "few for 3 devices.",
        ),
        (
            [(THREE, [0, 0, 1])] * 2,
            "Only 1 of 3 devices worked. cpu:0 and cpu:1 got no rows: no batch had more than 1 "
            "row, too few for 3 devices.",
        ),
        (
            [(THREE[:2], [8, 8])],
            "Only 2 of 3 devices worked. cpu:2 got no rows: no batch was split over it.",
        ),
        (
            [(THREE, [16, 0, 0])],
            "Only 1 of 3 devices worked. cpu:1 and cpu:2 got no rows: the batches could not be "
            "split and ran on one device.",
        ),
        (
            [(THREE, [2, 2, 0]), (THREE, [3, 3, 0])],
            "Only 2 of 3 devices worked. cpu:2 got no rows: batches of up to 6 rows left none for "
            "it.",
        ),
        (
            [(THREE, [1, 1, 1]), (THREE, None)],
            "All 3 devices worked: 1 rows each. The rows of 1 batch are not known: the model reads "
            "tensors of its own, which nothing feeds.",
        ),
        (
            [(THREE, None)] * 2,
            "The rows of 2 batches are not known: the model reads tensors of its own, which "
            "nothing feeds.",
        ),
    ],
)
def test_the_verdict_tells_what_ran(batches, verdict):
    for devices, sizes in batches:
        work.count(devices, sizes, True)
    assert reported().verdict == verdict.replace("1 rows", "1 row")


def test_very_many_idle_devices_are_named_in_short():
    names = ["cpu:{}".format(number) for number in range(999)]
    work.count(names, [1] * 2 + [0] * 997, True)
    assert reported(names).verdict == (
        "Only 2 of 999 devices worked. cpu:2, cpu:3, cpu:4, ..., cpu:998 (997 devices) got no "
        "rows: no batch had more than 2 rows, too few for 999 devices."
    )


def test_what_was_not_trained_is_told():
    work.count(THREE, [2, 2, 2], False)
    assert reported().verdict == (
        "All 3 devices worked: 2 rows each. None of it was training: no model was trained."
    )


@pytest.mark.parametrize(
    "names, rank, models, verdict",
    [
        (
            [], None, {},
            "No batch was counted: no model was given to compat.parallelize(), so none was split "
            "over devices.",
        ),
        (
            ["cpu:0"], None, {"net": "cpu:0"},
            "No batch was counted: model 'net' runs on one device, cpu:0, so none was split over "
            "devices.",
        ),
        (
            THREE, None, MODELS,
            "No batch was split: model 'net' was given cpu:0, cpu:1, cpu:2, and was never trained "
            "or called, or ran in one piece.",
        ),
        (
            ["cuda:1"], 1, {"net": "rank 1 of 2"},
            "No batch was counted: model 'net' runs as rank 1 of 2, and was not trained.",
        ),
    ],
)  # fmt: skip
def test_where_nothing_was_counted(names, rank, models, verdict):
    report = reported(names, rank, models)
    assert report.verdict == verdict
    assert not report.all_worked


def test_what_compat_computes_for_itself_does_not_count():
    with work.uncounted:
        work.count(THREE, [2, 2, 2], True)
        assert work.uncounted
    assert not work.batches()


def test_ranks_are_one_report():
    ranks = []
    for rank, rows in enumerate([31, 30]):
        ranks.append(reporting.Report([reporting.DeviceUse("cuda:0", rank, rows, rows, 4)], {}))
    reports = [rank.as_dict() for rank in reversed(ranks)]
    assert str(reporting.joined(reports)) == (
        "rank  device  rows  in training  steps\n"
        "   0  cuda:0    31           31      4\n"
        "   1  cuda:0    30           30      4\n"
        "All 2 ranks worked: 30 to 31 rows each."
    )
    absent = reporting.joined(reports, [2, 3])
    assert not absent.all_worked
    assert absent.verdict == (
        "2 of 4 ranks worked: 30 to 31 rows each. No report came from ranks 2 and 3: ended by a "
        "signal, or by its machine."
    )


def test_where_no_rank_has_reported_nothing_is_said_of_models():
    assert reporting.joined([], [0, 1]).verdict == (
        "No report came from ranks 0 and 1: ended by a signal, or by its machine."
    )


def test_under_configure_gpu_alone(toy):
    configuration = compat.configure_gpu(simulate=2)
    report = compat.report()
    assert [each.device for each in report.devices] == configuration.devices
    assert report.verdict.startswith("No batch was counted: no model was given")


# compat run --report --------------------------------------------------------------------------

SCRIPT = """\
import sys
import numpy as np
import compat
compat.configure_gpu()
from compat_numpy.networks import Network
network = compat.parallelize(Network(8, 16, 4))
random = np.random.RandomState(0)
inputs, targets = compat.shard((random.normal(size=(61, 8)), random.normal(size=(61, 4))))
for _ in range(4):
    network.train_on_batch(inputs, targets)
print("trained", flush=True)
if "fail" in sys.argv:
    raise ValueError("failed")
if "wait" in sys.argv:
    sys.stdin.read()
"""
TABLE = """\
compat run: what each device did
device  rows  in training  steps
cpu:0     80           80      4
cpu:1     80           80      4
cpu:2     84           84      4
All 3 devices worked: 80 to 84 rows each.
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def start(*arguments, before=(), **options):
    command = [sys.executable, "-m", "compat", "run", "--backend=numpy"]
    return subprocess.Popen(
        list(before) + command + list(arguments),
        env=dict(ENVIRON, PYTHONPATH=PATH, COMPAT_VERIFY="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        # Where the tests run in the background, a shell has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def ended(command, **environ):
    """Exit status, output and errors of a program."""
    return outcomes.ended(command, dict(ENVIRON, PYTHONPATH=PATH, **environ))


def finished(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate()
    return process.returncode, out, err


def report_in(found):
    """Return the report of a file."""
    return reporting.joined([found], found["absent"])


def test_it_is_printed_at_the_end(script, tmp_path):
    """A step that is verified counts once."""
    path = tmp_path / "report.json"
    page = tmp_path / "report.html"
    before = "--simulate=3", "--report", "--report-json", str(path), "--report-html", str(page)
    status, out, err = finished(*(before + (script,)))
    assert (status, out) == (0, "trained\n")
    assert err.endswith("\n" + TABLE)
    found = json.loads(path.read_text())
    assert [each["rows"] for each in found["devices"]] == [80, 80, 84]
    assert found["verdict"] == TABLE.splitlines()[-1]
    assert page.read_text(encoding="utf-8") == report_in(found).to_html()
    assert os.listdir(str(tmp_path)).count("report.json") == 1
    assert not [name for name in os.listdir(str(tmp_path)) if name.endswith(".tmp")]


def test_also_when_the_script_fails_or_is_interrupted(script):
    status, _, err = finished("--simulate=3", "--report", script, "fail")
    assert status == 1
    assert err.endswith("ValueError: failed\n" + TABLE)
    process = start("--simulate=3", "--report", script, "wait")
    assert process.stdout.readline() == "trained\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert err.endswith("KeyboardInterrupt\n" + TABLE)


def test_of_a_script_that_knows_nothing_of_compat(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import sys; print(sys.argv[1:])")
    status, out, err = finished("--report", str(script), "--report", "x")
    assert (status, out) == (0, "['--report', 'x']\n")
    assert err.endswith(
        "compat run: what each device did\n"
        "No batch was counted: no model was given to compat.parallelize(), so none was\n"
        "split over devices.\n"
    )


def test_ranks_on_two_machines_are_one_report(script, tmp_path):
    path = tmp_path / "report.json"
    before = machines.command(2)
    status, out, err = finished(
        "--hosts=node1:1,node2:1", "--report-json", str(path), "--report-html=/dev/stdout", script,
        before=before,
    )  # fmt: skip
    assert status == 0, err
    report = report_in(json.loads(path.read_text()))
    trained, page = out.split("<!DOCTYPE", 1)
    assert sorted(trained.splitlines()) == ["[0] trained", "[1] trained"]
    assert "<!DOCTYPE" + page == report.to_html()
    assert err.endswith(
        "compat run: what each device did\n"
        "rank  device  rows  in training  steps\n"
        "   0  cpu:0    120          120      4\n"
        "   1  cpu:0    120          120      4\n"
        "All 2 ranks worked: 120 rows each.\n"
    )
    assert json.loads(path.read_text())["all_worked"]


KILLED_AFTER_RANK_0 = """
import os, signal, time

def is_running(pid):  # a process that has ended and is not waited for has no command line
    try:
        with open("/proc/{}/cmdline".format(pid)) as file:
            return file.read() != ""
    except FileNotFoundError:
        return False

parent = __file__ + ".parent"
if compat.rank() == 0:
    with open(parent + ".new", "w") as file:
        file.write(str(os.getppid()))
    os.rename(parent + ".new", parent)
else:
    while not os.path.exists(parent) or is_running(open(parent).read()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_has_none(script):
    """The other one has ended before, since a launcher ends those that have not."""
    with open(script, "a") as file:
        file.write(KILLED_AFTER_RANK_0)
    status, _, err = finished("-n2", "--report", script)
    assert status == 128 + signal.SIGKILL
    assert "No report came from rank 1: ended by a" in err


@pytest.mark.parametrize(
    "option, name",
    [("--report-json", "nowhere/report"), ("--report-json", ""), ("--report-html", "")],
)
def test_a_file_that_cannot_be_written_is_told_before(script, tmp_path, option, name):
    path = os.path.join(str(tmp_path), name)
    problem = "No such file or directory" if name else "Is a directory"
    status, out, err = here("run", "--backend=numpy", option, path, script)
    assert (status, out) == (2, "")
    assert err == (
        "compat run: {} {} cannot be written: {}. Name a file in a folder that is there "
        "and that you may write to; nothing was started.\n".format(option, path, problem)
    )


def test_what_is_no_file_gets_it_and_stays(script, tmp_path):
    """A FIFO, a pipe's descriptor; and a link and the file that it leads to."""
    place, content = test_files.fifo(str(tmp_path / "fifo"))
    link, linked = test_files.link(str(tmp_path / "link"))
    before = test_files.kept(place), test_files.kept(link)
    receive, send = os.pipe()
    page = "--report-html=/dev/fd/{}".format(send)
    status, _, err = finished(
        "--report-json=" + place, "--timeline=" + link, page, "--simulate=3", script,
        pass_fds=[send],
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(content())["all_worked"] and json.loads(linked())["traceEvents"]
    assert (test_files.kept(place), test_files.kept(link)) == before
    os.close(send)
    with open(receive, encoding="utf-8") as file:
        assert file.read().endswith("</html>\n")


def test_each_rank_s_timeline_is_a_file(script, tmp_path):
    fifo, _ = test_files.fifo(str(tmp_path / "fifo"))
    before = sorted(os.listdir(str(tmp_path)))
    assert here("run", "--backend=numpy", "-n2", "--timeline", fifo, script) == (
        2,
        "",
        "compat run: --timeline {}: each rank writes a file of its own, with its number in the "
        "name, and this is not a regular file. Name one.\n".format(fifo),
    )
    assert sorted(os.listdir(str(tmp_path))) == before


def test_standard_output_that_is_closed(script):
    for devices in "--simulate=2", "-n2":
        command = ["sh", "-c", 'exec "$@" >&-', "sh"]
        status, _, err = finished(devices, "--report", script, before=command)
        assert status == 0 and "Traceback" not in err, err
        assert "All 2 {} worked: ".format("ranks" if devices == "-n2" else "devices") in err


def test_ranks_that_did_not_train_together_are_not_said_to_have_worked():
    found = {"net": "In the first training step of model 'net' (fit()) ..."}
    uses = [reporting.DeviceUse("cpu", rank, 8, 8, 2) for rank in range(2)]
    end = "Model 'net' did not train together with the others: see below."
    trained = reporting.Report(uses, {"net": "rank 0 of 2"}, unused=found)
    assert not trained.all_worked
    assert trained.verdict == "All 2 ranks computed rows: 8 rows each. " + end
    nothing = trained._replace(devices=[reporting.DeviceUse("cpu", rank) for rank in range(2)])
    assert nothing.verdict == "No batch was counted. " + end
    assert str(nothing).endswith("\n" + found["net"])
