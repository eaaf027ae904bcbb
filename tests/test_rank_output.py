"""What is shown of ranks and kept in files, and ranks that are started again."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from compat import __main__, errors
from compat._launch.rank_output import RankOutput, open_log_files
from compat._launch.rank_process import ERR, OUT

pytestmark = pytest.mark.usefixtures("process")

# With the backend of tests/plugin, which tox installs.
PROGRAM = """\
import os, sys, time, signal, compat
rank, restart = compat.rank(), os.environ.get("COMPAT_RESTART")
{}
"""


@pytest.fixture
def start(tmp_path):
    def start(program, *options):
        script = tmp_path / "script.py"
        script.write_text(PROGRAM.format(program))
        command = [sys.executable, "-m", "compat", "run", "--backend", "numpy", "-n", "3"]
        return subprocess.Popen(
            command + list(options) + [str(script)],
            env=dict(os.environ, PYTHONPATH=ROOT),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start


@pytest.fixture
def finished(start):
    def finished(program, *options):
        process = start(program, *options)
        out, err = process.communicate(timeout=60)
        said = [line for line in err.splitlines() if " ranks: " not in line]
        return process.returncode, out, [line for line in said if "numpy (" not in line]

    return finished


def test_quiet_shows_what_rank_0_prints_and_all_errors(finished):
    program = "print('out', rank); print('err', rank, file=sys.stderr)"
    status, out, err = finished(program, "--quiet")
    assert (status, out, sorted(err)) == (0, "[0] out 0\n", ["[0] err 0", "[1] err 1", "[2] err 2"])


def test_quiet_shows_the_last_lines_of_the_rank_that_failed(finished):
    program = "for i in range(100 * rank): print(i)\nif rank == 2: sys.exit(3)\ntime.sleep(60)"
    status, out, err = finished(program, "--quiet")
    assert (status, out) == (3, "")
    assert err == [
        "compat run: rank 2 of 3 failed with exit status 3; the others were ended.",
        "compat run: the last lines that rank 2 printed:",
    ] + ["[2] {}".format(i) for i in range(180, 200)]


def test_a_progress_bar_that_is_not_shown_is_kept_in_its_last_state(capsys):
    output = RankOutput(quiet=True)
    for step in range(1000):
        output.add(1, OUT, "step {}\r".format(step), unfinished=True)
    output.add(1, OUT, "step 1000", unfinished=True)
    assert list(output.not_shown[1]) == ["step 1000"]
    output.show_last_lines(1)
    said = "compat run: the last lines that rank 1 printed:\n[1] step 1000\n"
    assert capsys.readouterr() == ("", said)


def test_log_files_have_all_that_each_rank_prints(finished, tmp_path):
    folder = tmp_path / "new" / "logs"
    program = "print('out', rank, flush=True); print('err', rank, file=sys.stderr)"
    for _ in range(2):  # nothing of the first time is lost
        status, out, _ = finished(program, "--quiet", "--log-dir", str(folder))
        assert (status, out) == (0, "[0] out 0\n")
    assert sorted(os.listdir(str(folder))) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    for rank in range(3):
        lines = (folder / "rank-{}.log".format(rank)).read_text().splitlines()
        assert len(lines) == 6
        for first in (0, 3):
            assert re.match(r"==== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d 3 ranks ====$", lines[first])
            assert set(lines[first + 1 : first + 3]) == {
                "out {}".format(rank), "err {}".format(rank)
            }  # fmt: skip


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_started(tmp_path):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    with pytest.raises(errors.InvalidArgumentError) as caught:
        open_log_files(folder, 2)
    assert str(caught.value) == (
        "--log-dir={0}: {0} cannot be written: File exists. Name a folder that can be; nothing "
        "was started.".format(folder)
    )
    (tmp_path / "rank-1.log").mkdir()
    with pytest.raises(errors.InvalidArgumentError, match="rank-1.log cannot be written: Is a di"):
        open_log_files(str(tmp_path), 2)


def test_a_full_disk_does_not_end_the_ranks(capsys):
    output = RankOutput(log_files=[open("/dev/full", "w", buffering=1)])
    output.add(0, OUT, "one", unfinished=False)
    output.add(0, ERR, "two", unfinished=False)
    assert capsys.readouterr() == (
        "[0] one\n",
        "compat run: /dev/full cannot be written any more: No space left on device. The ranks go "
        "on without it.\n[0] two\n",
    )


def test_ranks_are_started_again_until_they_succeed(finished, tmp_path):
    program = """\
print(restart, flush=True)
time.sleep(0.5)  # until that has been read
open(rank * "1" + restart, "w").close()
while restart < "2":
    time.sleep(0.1)
    if rank == 1 and all(os.path.exists(each * "1" + restart) for each in range(3)):
        os.kill(os.getpid(), 9)
"""
    program = "os.chdir({!r})\n".format(str(tmp_path)) + program
    options = "--max-restarts", "3", "--log-dir", str(tmp_path)
    status, out, err = finished(program, *options)
    assert status == 0
    assert sorted(out.splitlines()) == sorted(
        "[{}] {}".format(rank, restart) for rank in range(3) for restart in range(3)
    )
    failed = "compat run: rank 1 of 3 was killed by signal 9; the others were ended."
    again = "compat run: all ranks are started again (restart {} of 3)."
    assert err == [failed, again.format(1), failed, again.format(2)]
    headers = [line for line in (tmp_path / "rank-1.log").read_text().splitlines() if "=" in line]
    assert [line.partition(" 3 ranks")[2] for line in headers] == [
        " ====", ", restart 1 of 3 ====", ", restart 2 of 3 ===="
    ]  # fmt: skip


def test_no_more_restarts_than_asked_for(finished):
    status, _, err = finished("sys.exit(5)", "--max-restarts", "1")
    assert status == 5
    assert sum("started again" in line for line in err) == 1
    status, _, err = finished("sys.exit(restart is not None)")
    assert (status, err) == (0, [])


def test_ctrl_c_ends_the_job_for_good(start):
    process = start("print('ready', flush=True); time.sleep(60)", "--max-restarts", "3")
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "started again" not in err


@pytest.mark.parametrize("option", ["--quiet", "--log-dir=logs", "--max-restarts=2"])
@pytest.mark.parametrize("ranks", [[], ["-n", "1"]])
def test_options_for_ranks_are_refused_where_there_are_none(ranks, option, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    assert __main__.main(["run"] + ranks + [option, str(script)]) == 2
    assert capsys.readouterr().err == (
        "compat run: {} is for several ranks, and the script runs alone. Add -n 2 or --hosts, or "
        "leave it out.\n".format(option.partition("=")[0])
    )


def test_a_number_of_restarts_that_is_none(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["run", "-n", "2", "--max-restarts", "many", "train.py"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "compat run: error: argument --max-restarts: 'many' is not a number of restarts; write "
        "--max-restarts 3"
    )
