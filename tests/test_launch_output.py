"""``compat run -n``: what of the output of ranks is shown and kept, and jobs that start again."""

import os
import re
import resource
import signal

import test_launch
from conftest import refusal

from compat import errors
from compat._ranks.launch import messages, output, watching
from compat._ranks.launch.messages import Ended

job, finished = test_launch.job, test_launch.finished  # fixtures

# What is shown, and what is kept ---------------------------------------------------------------


def test_quiet_shows_the_last_lines_of_the_rank_that_fails(finished, tmp_path):
    """It fails when the other one has printed all, too."""
    status, out, err = finished(
        """
        for number in range(50):
            print("line %d of %d" % (number, rank))
        print("1/2", end="\\r", flush=True)
        time.sleep(0.5)
        print("2/2", end="", flush=True)
        if rank == 0:
            open({0!r}, "w").close()
            time.sleep(60)
        while not os.path.exists({0!r}):
            time.sleep(0.05)
        raise ValueError("bad")
        """.format(str(tmp_path / "printed")),
        options="quiet=True",
    )
    assert status == 1
    assert out.startswith("[0] line 0 of 0\n") and out.count("\n[0] line ") == 49
    assert out.endswith("[0] 2/2\n") and "[1]" not in out
    report = err[err.index("compat run: ") :].splitlines()
    assert report[:2] == [
        "compat run: rank 1 of 2 failed with exit status 1; the others were ended.",
        "compat run: the last lines that rank 1 printed to standard output:",
    ]
    lines = ["[1] line {} of 1".format(n) for n in range(31, 50)] + ["[1] 2/2"]
    assert report[2 : 2 + output.TAIL] == lines
    assert report[2 + output.TAIL] == "Traceback (most recent call last):"
    assert report[-1] == "ValueError: bad"


def test_quiet_shows_the_last_lines_of_ranks_whose_end_is_not_heard(capsys):
    """Their machine may have gone."""
    ranks = watching.WatchedRanks(3, output.Output(quiet=True))
    for rank in range(3):
        ranks.output.add(rank, messages.OUT, "line", False)
        ranks.output.add(rank, messages.OUT, "half", True)
    ranks.ended = [Ended(1, 0, [])]
    assert ranks.conclude(5) == 5
    assert capsys.readouterr() == (
        "[0] line\n[0] half\n",
        "compat run: the launcher ended with exit status 5; nothing was heard of the end of ranks "
        "0 and 2.\n"
        "compat run: the last lines that rank 2 printed to standard output:\n"
        "[2] line\n"
        "[2] half\n",
    )


HEADER = r"==== \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{{4}}, rank {} of {}, restart {}: {}\n"


def test_logs_have_all_that_each_rank_prints(finished, tmp_path):
    """Behind what another job has left there. The text is longer than one message may be.

    What a rank prints to both streams may be read in any order, unless it waits in between.
    """
    folder = str(tmp_path / "new" / "logs")
    before = output.Logs(folder, 2, ["a b.py", "-x"])
    before.begin(0)
    before.close()
    program = """
        def wait_for(text):
            while True:
                with open(os.path.join({!r}, "rank-%d.log" % rank), "rb") as file:
                    if text in file.read():
                        break
                time.sleep(0.05)

        print("to stdout %d" % rank)
        print("1/2", end="\\r", flush=True)
        wait_for(b"1/2")
        sys.stderr.write("to stderr " + "\\u4e16" * 3000 + "\\n")
        wait_for("\\u4e16\\n".encode())
        print("2/2", end="", flush=True)
        """.format(folder)
    options = "logs=output.Logs({!r}, 2, ['a b.py', '-x'])".format(folder)
    assert finished(program, options=options)[0] == 0
    assert sorted(os.listdir(folder)) == ["rank-0.log", "rank-1.log"]
    for rank in range(2):
        with open(os.path.join(folder, "rank-{}.log".format(rank)), "rb") as file:
            text = file.read().decode("utf-8")
        header = HEADER.format(rank, 2, 0, "'a b.py' -x")
        each = "to stdout {}\n1/2\r\nto stderr \u4e16{{3000}}\n2/2\n".format(rank)
        assert re.match(header + header + each + r"\Z", text)


def test_logs_that_cannot_be_written_any_more_stop_no_job(job, tmp_path):
    """A limit for this process's files stands for a full disk."""
    logs = str(tmp_path / "logs")
    process = job(
        "for number in range(200): print('x' * 100)",
        options="logs=output.Logs({!r}, 2, ['script.py'])".format(logs),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert sorted(out.decode().splitlines()) == sorted(
        "[{}] {}".format(rank, "x" * 100) for rank in range(2) for _ in range(200)
    )
    said = (
        "compat run: {0}/rank-{1}.log: File too large. The job goes on, but no more of its output "
        "is written to the files in {0}.\n"
    )
    assert err.decode() in [said.format(logs, rank) for rank in range(2)]
    assert max(os.path.getsize(os.path.join(logs, name)) for name in os.listdir(logs)) == 5000


def _refusal(folder):
    return refusal(errors.InvalidArgumentError, output.Logs, str(folder), 2, ["script.py"])


def test_logs_that_cannot_be_written_at_all(tmp_path):
    text = (
        "--log-dir {}: {} cannot be written: {}. Name a folder in which you may make files."
    ).format
    file = tmp_path / "file"
    file.write_text("mine")
    assert _refusal(file) == text(file, file, "File exists")
    assert _refusal(file / "logs") == text(file / "logs", file / "logs", "Not a directory")
    assert file.read_text() == "mine"
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(str(logs / "rank-1.log"))  # opening it would wait for a reader
    problem = "No such device or address"
    assert _refusal(logs) == text(logs, logs / "rank-1.log", problem)
    os.unlink(str(logs / "rank-1.log"))
    (logs / "rank-1.log").symlink_to(file)  # in a folder of all users, anybody may have put it
    problem = "Too many levels of symbolic links"
    assert _refusal(logs) == text(logs, logs / "rank-1.log", problem)
    assert file.read_text() == "mine"


# Starting again -------------------------------------------------------------------------------

# Each start leaves a file, and each rank the number of its process.
STARTS = """
    restart = os.environ["COMPAT_RESTART"]
    folder = os.path.dirname(os.path.abspath(__file__))
    open(os.path.join(folder, "%s-%d-%d" % (restart, rank, os.getpid())), "w").close()
"""


def _starts(folder):
    names = [name.split("-") for name in os.listdir(str(folder)) if name.count("-") == 2]
    return sorted((int(restart), int(rank)) for restart, rank, _ in names)


def test_a_job_is_started_again_and_meets_nobody_of_the_start_before(finished, tmp_path):
    program = STARTS + """
    print(os.environ["COMPAT_RENDEZVOUS"])
    before = [int(name.split("-")[2]) for name in os.listdir(folder)
              if name.startswith(str(int(restart) - 1) + "-")]
    assert not any(os.path.exists("/proc/%d" % pid) for pid in before), before
    import signal
    signal.signal(signal.SIGTERM, lambda *told: (time.sleep(0.5), os._exit(0)))
    if restart != "2":
        while not os.path.exists(os.path.join(folder, "ready" + restart)):
            if rank == 1 and len([n for n in os.listdir(folder) if n[:2] == restart + "-"]) == 2:
                os.kill(os.getpid(), 9) if restart == "0" else sys.exit(7)
            time.sleep(0.05)
"""  # fmt: skip
    status, out, err = finished(program, options="max_restarts=3")
    assert status == 0
    assert _starts(tmp_path) == [(restart, rank) for restart in range(3) for rank in range(2)]
    assert err == (
        "compat run: rank 1 of 2 was killed by signal 9; the others were ended.\n"
        "compat run: restart 1 of 3, because rank 1 of 2 was killed by signal 9.\n"
        "compat run: rank 1 of 2 failed with exit status 7; the others were ended.\n"
        "compat run: restart 2 of 3, because rank 1 of 2 failed with exit status 7.\n"
    )
    places = {line.split()[1] for line in out.splitlines()}
    assert len(places) == 3


def test_the_exit_status_is_that_of_the_last_start(finished, tmp_path):
    program = STARTS + "    sys.exit(3 + int(restart) if rank == 0 else 0)"
    folder = tmp_path / "logs"
    options = "max_restarts=1, logs=output.Logs({!r}, 2, ['x.py'])".format(str(folder))
    status, out, err = finished(program, options=options)
    assert status == 4
    assert err == (
        "compat run: rank 0 of 2 failed with exit status 3; the others were ended.\n"
        "compat run: restart 1 of 1, because rank 0 of 2 failed with exit status 3.\n"
        "compat run: rank 0 of 2 failed with exit status 4; the others were ended. No restart is "
        "left (--max-restarts 1).\n"
    )
    headers = "".join(HEADER.format(0, 2, restart, "x.py") for restart in range(2))
    assert re.match(headers + r"\Z", (folder / "rank-0.log").read_text())


def test_a_job_that_is_told_to_end_is_not_started_again(job, tmp_path):
    """Though its ranks then fail."""
    process = job(
        STARTS + "    print('ready', flush=True); time.sleep(60)", options="max_restarts=3"
    )
    test_launch._ready(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert _starts(tmp_path) == [(0, 0), (0, 1)]


def test_a_launcher_that_ends_later_is_started_again(finished, tmp_path):
    """As where the connection to a machine is lost."""
    program = STARTS + """
    if restart == "0":
        while len(os.listdir(folder)) < 3:
            time.sleep(0.05)
        if rank == 0:
            def parent(pid):
                with open("/proc/%d/stat" % pid) as file:
                    return int(file.read().rpartition(")")[2].split()[1])
            os.kill(parent(parent(os.getppid())), 9)
        time.sleep(60)
"""  # fmt: skip
    status, _, err = finished(program, options="max_restarts=1")
    assert status == 0
    assert "compat run: the launcher ended with exit status -9; " in err
    restart = "compat run: restart 1 of 1, because the launcher ended with exit status -9."
    assert err.splitlines()[-1] == restart
    assert _starts(tmp_path) == [(0, 0), (0, 1), (1, 0), (1, 1)]
