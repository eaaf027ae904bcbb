"""``compat run -n``: what ranks print, how they end, and what is said of it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT

from compat import _by_path
from compat._launch import rank_process, watching
from compat._launch.watching import Ended


@pytest.fixture
def job(tmp_path):
    """Start a program as three ranks of the launcher that compat has of its own."""

    def job(program, size=3, elsewhere=False, ignored=None):
        script = tmp_path / "script.py"
        begin = "import os, sys, time, signal, compat\nrank = compat.rank()\n"
        script.write_text(begin + textwrap.dedent(program))
        ranks = _by_path.command("_launch.starter") + [str(size)]
        rank = _by_path.command("_launch.rank_process") + [sys.executable, str(script)]
        program = (
            "import os, sys\nfrom compat._launch import watching\n"
            "sys.exit(watching.launch({!r}, dict(os.environ), {}, {}))".format(
                ranks + rank, size, elsewhere
            )
        )
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env=dict(os.environ, PYTHONPATH=ROOT),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # These tests may run in the background, where a shell has SIGINT ignored.
            preexec_fn=lambda: [
                signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGHUP)
            ],
        )

    return job


@pytest.fixture
def finished(job):
    def finished(program, size=3):
        process = job(program, size)
        # Less than compat run gives the launcher to end the others, which it has to do by itself.
        out, err = process.communicate(timeout=watching.GRACE - 1)
        return process.returncode, out.decode("utf-8"), err.decode("utf-8")

    return finished


def test_each_line_has_its_rank_in_front(finished):
    status, out, err = finished(
        """
        for number in range(3):
            print("line %d of %d" % (number, rank))
        sys.stderr.write("to stderr\\n")
        print("no end", end="")
        """
    )
    assert status == 0
    assert sorted(out.splitlines()) == sorted(
        "[{0}] {1}".format(rank, text)
        for rank in range(3)
        for text in ["line {} of {}".format(number, rank) for number in range(3)] + ["no end"]
    )
    assert sorted(err.splitlines()) == ["[{}] to stderr".format(rank) for rank in range(3)]


def test_long_lines_and_other_alphabets_are_whole(finished):
    text = "\u2501\u4e16" * 7000
    status, out, _ = finished("print('\\u2501\\u4e16' * 7000)", size=2)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] " + text, "[1] " + text]


def test_long_lines_of_two_ranks_are_not_mixed(capsys, monkeypatch):
    sent = {}
    for number in range(2):
        rank, messages = rank_process._Rank(number), []
        monkeypatch.setattr(os, "write", lambda _, data, to=messages: to.append(data.decode()))
        rank.send_line(rank_process.OUT, str(number) * 2500)
        rank.send_line(rank_process.TRACEBACK, str(number) * 2500)
        sent[number] = messages
    monkeypatch.undo()
    ranks = watching.WatchedRanks(2)
    for pair in zip(sent[0], sent[1]):
        for message in pair:
            ranks.hear(message.rstrip("\n"))
    assert len(sent[0]) == 6
    assert capsys.readouterr().out == "[0] {}\n[1] {}\n".format("0" * 2500, "1" * 2500)
    assert ranks.tracebacks == {0: ["0" * 2500], 1: ["1" * 2500]}


def test_a_progress_bar_is_shown_while_it_grows(job, tmp_path):
    seen = tmp_path / "seen"
    process = job(
        """
        if rank == 0:
            print("1/2", end="\\r", flush=True)
            while not os.path.exists({!r}):
                time.sleep(0.1)
            print("2/2")
        """.format(str(seen))
    )
    begin = b""
    while b"1/2" not in begin:
        begin += os.read(process.stdout.fileno(), 100)
    seen.write_text("")
    out, _ = process.communicate(timeout=60)
    assert begin + out == b"[0] 1/2\r[0] 2/2\n"


def test_arguments_and_place_reach_the_script(finished):
    status, out, _ = finished("print(compat.size(), compat.local_rank(), sys.stdin.read())", 2)
    assert (status, sorted(out.splitlines())) == (0, ["[0] 2 0 ", "[1] 2 1 "])


def test_a_rank_that_raises_is_named_with_its_traceback_last(finished):
    status, out, err = finished(
        """
        if rank == 1:
            try:
                {}["missing"]
            except KeyError:
                raise ValueError("bad")
        time.sleep(60)
        """
    )
    assert status == 1
    report = err[err.index("compat run: ") :].splitlines()
    assert report[0] == "compat run: rank 1 of 3 failed with exit status 1; the others were ended."
    assert report[1] == "Traceback (most recent call last):"
    assert "KeyError: 'missing'" in report
    assert report[-1] == "ValueError: bad"
    assert "[1] ValueError: bad" in err


def test_exit_statuses_and_signals_are_the_rank_s(finished):
    status, _, err = finished("sys.exit(7 if rank == 2 else time.sleep(60))")
    assert status == 7
    assert err == "compat run: rank 2 of 3 failed with exit status 7; the others were ended.\n\n"
    status, _, err = finished(
        "os.kill(os.getpid(), signal.SIGKILL if rank == 0 else 0); time.sleep(60)"
    )
    assert status == 128 + signal.SIGKILL
    assert err == "compat run: rank 0 of 3 was killed by signal 9; the others were ended.\n\n"


def test_a_rank_that_ends_too_early_is_named(finished):
    status, _, err = finished(
        """
        if rank == 0:
            time.sleep(1)
            raise compat.RankLostError("rank 1 is gone")
        """,
        size=2,
    )
    assert status == 1
    report = err[err.index("compat run: ") :].splitlines()
    assert report[0] == (
        "compat run: rank 1 of 2 ended (exit status 0) while others were still training; the "
        "others were ended."
    )
    assert report[-1] == "compat.errors.RankLostError: rank 1 is gone"


def test_ranks_that_do_not_end_politely_are_killed(finished, tmp_path):
    mark = str(tmp_path / "here")
    status, _, _ = finished(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({!r} + str(rank), "w").close()
        while rank == 1 and not all(os.path.exists({!r} + str(r)) for r in range(3)):
            time.sleep(0.1)
        sys.exit(3 if rank == 1 else time.sleep(60))
        """.format(mark, mark)
    )
    assert status == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_no_rank_survives_the_launcher(job, tmp_path, number):
    process = job("print(os.getpid(), flush=True); time.sleep(60)")
    pids = [int(process.stdout.readline().split()[1]) for _ in range(3)]
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    for _ in range(100):
        left = [pid for pid in pids if os.path.exists("/proc/{}".format(pid))]
        if not left:
            break
        time.sleep(0.1)
    assert not left


SAVES = """
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        time.sleep({} if rank else 0)
        print("saved", flush=True)
        sys.exit(130)
"""


def _ready(process, size):
    assert [process.stdout.readline()[3:] for _ in range(size)] == [b" ready\n"] * size


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ctrl_c_reaches_each_rank_once_and_all_may_save(job, elsewhere):
    """Rank 0 ends at once, which must not end rank 1 before it has saved."""
    process = job(SAVES.format(0.7), 2, elsewhere)
    _ready(process, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    said = ["[{}] {}".format(rank, text) for rank in range(2) for text in ("interrupted", "saved")]
    assert sorted(out.decode().splitlines()) == said
    assert (
        err.decode()
        == (
            "compat run: interrupted. The ranks are, too, and have up to {:.0f} seconds to end; "
            "Ctrl-C again ends them at once.".format(60)
        )
        + "\n"
    )


def test_a_second_ctrl_c_ends_ranks_that_do_not(job):
    process = job(SAVES.format(60), 2)
    _ready(process, 2)
    process.send_signal(signal.SIGINT)
    assert {process.stdout.readline() for _ in range(3)} >= {b"[1] interrupted\n", b"[0] saved\n"}
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=watching.GRACE - 1)
    assert (process.returncode, out) == (130, b"")
    assert err.decode().splitlines()[
        1
    ] == "compat run: told to end by {}; the ranks are ended.".format("SIGINT")


def test_a_rank_may_end_as_it_likes_when_the_job_is_told_to(job):
    """What it prints then is heard, and the signal comes once."""
    process = job(
        """
        signal.signal(signal.SIGTERM, lambda *told: print("told", flush=True))
        print("ready", flush=True)
        time.sleep(0.7)
        """,
        2,
    )
    _ready(process, 2)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    out = b"".join(sorted(out.splitlines(True)))
    assert (process.returncode, out) == (143, b"[0] told\n[1] told\n")


def test_a_hangup_that_is_ignored_stays_so(job):
    """As under nohup."""
    process = job("print('ready', flush=True); time.sleep(0.5)", 2, ignored=signal.SIGHUP)
    _ready(process, 2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_launcher_that_fails_is_heard(tmp_path, capfd):
    command = [sys.executable, "-c", "print('no such host'); import sys; sys.exit(5)"]
    assert watching.launch(command, dict(os.environ), 2) == 5
    assert capfd.readouterr().err == (
        "no such host\n"
        "compat run: the launcher ended with exit status 5; nothing was heard of the end of "
        "ranks 0 and 1.\n"
    )


def test_a_rank_ends_when_nobody_listens_any_more(tmp_path):
    """As when the connection to its machine is lost, whatever else there goes on."""
    mark = tmp_path / "pid"
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen(
        _by_path.command("_launch.rank_process") + [sys.executable, "-c", program, str(mark)],
        env=dict(os.environ, PYTHONPATH=ROOT, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                 LOCAL_WORLD_SIZE="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.05)
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    for _ in range(100):
        if not os.path.exists("/proc/" + mark.read_text()):
            break
        time.sleep(0.1)
    else:
        pytest.fail("it still runs")


def _ended(text):
    rank, status, *flags = text.split()
    return Ended(int(rank), int(status), [], "lost" in flags, "terminated" in flags)


@pytest.mark.parametrize(
    "ended, cause",
    [
        (["0 0", "1 0"], None),
        (["1 3", "0 143 terminated"], 1),
        (["0 1 lost", "1 3", "2 1 lost"], 1),
        (["1 0", "0 1 lost", "2 1 lost"], 1),
        (["2 0", "0 143 terminated"], None),
        (["0 1 lost", "2 1 lost", "1 143 terminated"], 1),
        (["0 1 lost", "2 1 lost"], 0),
        (["1 0", "0 134"], 1),
        (["0 134", "1 143 terminated"], 0),
    ],
)
def test_the_rank_at_fault_is_the_root_cause(ended, cause):
    end = watching.root_cause([_ended(text) for text in ended])
    assert (end and end.rank) == cause


def test_a_traceback_is_found_behind_a_prefix():
    traceback = rank_process.Traceback()
    for line in [
        "[rank1]: Traceback (most recent call last):",
        "[rank1]: ValueError: old",
        "noise",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "x.py"',
        "[rank1]: ValueError: new",
        "[rank1]:[W1121] noise",
    ]:
        traceback.add(line)
    assert traceback.lines == [
        "Traceback (most recent call last):",
        '  File "x.py"',
        "ValueError: new",
        "[rank1]:[W1121] noise",
    ]


def test_a_log_behind_a_traceback_is_none_of_its_lines():
    lines = [
        "Traceback (most recent call last):",
        "ValueError: first",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "KeyError: second",
        "of two lines",
    ]
    logged = [
        "2026-11-22 21:39:19.746755: W tensorflow/core/x.cc:10] UNAVAILABLE: failed to connect",
        "Additional GRPC error information from remote target:",
        ':{"created":"@1795383559.746755925","grpc_status":14}',
    ]
    traceback = rank_process.Traceback()
    for line in lines[:3] + logged + lines[3:] + ["E1122 21:39:19.746755 1 x.cc:10] no"]:
        traceback.add(line)
    assert traceback.lines == lines


def test_messages_survive_launchers_that_put_something_in_front():
    line = "[1,0]<stdout>:{}12{}out{}text\x1f".format(
        rank_process.BEGIN, rank_process.BETWEEN, rank_process.BETWEEN
    )
    assert rank_process.decode(line) == (12, "out", "text\x1f")
    for line in ("", "text", rank_process.BEGIN + "1", rank_process.BEGIN + "x\x1fout\x1ftext"):
        assert rank_process.decode(line) is None


def test_command_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")

    def said(*arguments):
        completed = subprocess.run(
            [sys.executable, "-m", "compat", "run"] + list(arguments) + [str(script)],
            env=dict(os.environ, PYTHONPATH=ROOT, PATH=str(tmp_path)),
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        assert completed.returncode == 2
        return completed.stderr

    assert said("-n", "0") == (
        "compat run: -n 0 is not understood. Use the number of processes to start, 1 or more.\n"
    )
    assert "--timeout=x is not understood" in said("-n", "2", "--timeout", "x")
    assert "-n 3: --hosts a:2 has room for 2" in said("-n", "3", "--hosts", "a:2")
    assert "--hosts a:x is not understood" in said("--hosts", "a:x")
    assert said("--hosts", "a") == (
        "compat run: --hosts a:1 makes one rank, which has nobody to train with. Give the machines "
        "room for 2 or more, such as --hosts first:4,second:4, or run the script on that machine, "
        "without --hosts.\n"
    )
    idle = "--gpus", "free:2", "--hosts", "a,b", "--backend", "theano", "--python", sys.executable
    assert said(*idle) == (
        "compat run: --gpus free:2 with --hosts: idle GPUs cannot be found on other machines from "
        "here. Use ids that are meant on each of them, such as --gpus 0,1, or leave --gpus out.\n"
    )
    message = said("-n", "2", "--backend", "cntk", "--python", sys.executable)
    assert message.endswith(
        "Ranks of Theano and CNTK are started by mpirun, which is not on PATH. Install the MPI "
        "that mpi4py was compiled with: on Debian and Ubuntu, apt-get install openmpi-bin.\n"
    )


ORPHAN = """\
import os, time
from compat._launch import rank_process
before_exec = rank_process.dies_with_this_process()
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    before_exec()  # too late for the signal that it asks for
    print("still running")
"""


def test_a_process_whose_starter_ends_before_it_begins_does_not_run():
    """Else a rank that is ended at once leaves its script behind."""
    environ = dict(os.environ, PYTHONPATH=ROOT)
    assert subprocess.check_output([sys.executable, "-c", ORPHAN], env=environ, timeout=60) == b""
