"""``compat run -n``: what ranks print, how they end, and what is said of it."""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback

import pytest
import soak
from conftest import ROOT
from test_main import refused

from compat import errors
from compat._ranks.launch import messages, output, processes, rank_process, tracebacks, watching
from compat._ranks.launch.messages import Ended
from compat._ranks.place import Place
from compat._runtime import by_path


def _bare(command):
    """Without installed packages, which a job needs none of: it starts in half the time."""
    return command[:1] + ["-S"] + command[1:]


def start(
    folder,
    program,
    size=2,
    elsewhere=False,
    ignored=None,
    options="",
    before=lambda: None,
    **environ,
):
    """Start a program as ranks of the launcher that compat has of its own."""
    script = folder / "script.py"
    begin = "import os, sys, time\nrank = int(os.environ['COMPAT_RANK'])\n"
    script.write_text(begin + textwrap.dedent(program))
    ranks = _bare(by_path.command("_ranks.launch.starter")) + [str(size)]
    rank = _bare(by_path.command("_ranks.launch.rank_process"))
    rank += _bare([sys.executable, str(script)])
    program = (
        "import os, sys\nfrom compat._ranks.launch import output, watching\n"
        "sys.exit(watching.launch({!r}, dict(os.environ), {}, {}, {})[0])".format(
            ranks + rank, size, elsewhere, options
        )
    )
    return subprocess.Popen(
        _bare([sys.executable, "-c", program]),
        env=dict(os.environ, PYTHONPATH=ROOT, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # These tests may run in the background, where a shell has SIGINT ignored.
        preexec_fn=lambda: (
            [before()]
            + [
                signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGHUP)
            ]
        ),
    )


@pytest.fixture
def job(tmp_path):
    return functools.partial(start, tmp_path)


@pytest.fixture
def finished(job):
    def finished(program, size=2, options=""):
        process = job(program, size, options=options)
        # Less than compat run gives the launcher to end the others, which it has to do by itself.
        out, err = process.communicate(timeout=watching.GRACE - 1)
        return process.returncode, out.decode("utf-8"), err.decode("utf-8")

    return finished


def test_each_rank_has_its_place_and_each_line_its_rank_in_front(finished):
    """Also long lines, and those of other alphabets. Nothing is on standard input."""
    status, out, err = finished(
        """
        import compat
        print("place", compat.rank(), compat.size(), compat.local_rank(), sys.stdin.read())
        print("\u2501\u4e16" * 7000, end="")
        time.sleep(0.02 * rank)  # the end of the line is written by itself
        print()
        sys.stderr.write("to stderr\\n")
        print("no end", end="")
        """,
        size=3,
    )
    assert status == 0
    assert sorted(out.splitlines()) == sorted(
        "[{}] {}".format(rank, text)
        for rank in range(3)
        for text in ["place {0} 3 {0} ".format(rank), "\u2501\u4e16" * 7000, "no end"]
    )
    assert sorted(err.splitlines()) == ["[{}] to stderr".format(rank) for rank in range(3)]


def test_a_line_whose_end_comes_late_has_no_empty_line_behind_it(capsys):
    shown = output.Output()
    shown.add(0, messages.OUT, "whole", True)
    shown.add(1, messages.OUT, "between", False)
    shown.add(0, messages.OUT, "", False)
    shown.add(0, messages.OUT, "", False)
    shown.add(0, messages.OUT, "next", False)
    assert capsys.readouterr().out == "[0] whole\n[1] between\n[0] \n[0] next\n"


def test_long_lines_of_two_ranks_are_not_mixed(capsys, monkeypatch):
    sent = {}
    for number in range(2):
        rank, lines = rank_process._Rank(number), []
        monkeypatch.setattr(os, "write", lambda _, data, to=lines: to.append(data))
        rank.send(messages.OUT, str(number) * 2500)
        rank.send(messages.END, json.dumps(Ended(number, 1, [str(number) * 2500])))
        sent[number] = lines
    monkeypatch.undo()
    ranks = watching.WatchedRanks(2)
    for pair in zip(sent[0], sent[1]):
        for message in pair:
            ranks.hear(message.rstrip(b"\n"))
    assert len(sent[0]) == 6
    assert capsys.readouterr().out == "[0] {}\n[1] {}\n".format("0" * 2500, "1" * 2500)
    assert [end.traceback for end in ranks.ended] == [["0" * 2500], ["1" * 2500]]


@pytest.mark.parametrize("rests", [True, False])
def test_a_progress_bar_is_shown_while_it_grows(job, tmp_path, rests):
    """Keras redraws its own with each batch, so that it may never rest."""
    seen = tmp_path / "seen"
    process = job(
        """
        if rank == 0:
            print("000/400", end="\\r", flush=True)
            for step in range(1, 400):
                if not {}:
                    print("%03d/400" % step, end="\\r", flush=True)
                time.sleep(0.05)
                if os.path.exists({!r}):
                    break
            print("ended")
        """.format(rests, str(seen))
    )
    begin = b""
    while (b"000/400" if rests else b"005/400") not in begin and process.poll() is None:
        begin += os.read(process.stdout.fileno(), 1000)
    seen.write_text("")
    out, err = process.communicate(timeout=60)
    assert not process.returncode, err
    shown = (begin + out).decode()
    if rests:
        assert shown == "[0] 000/400\r[0] ended\n"
    assert "399/400" not in shown and shown.endswith("\r[0] ended\n")
    assert rests or shown.startswith("[0] 000/400\r[0] 001/400\r[0] 002/400\r")


def test_a_traceback_that_comes_in_pieces_is_told_as_a_whole(monkeypatch):
    monkeypatch.setattr(rank_process, "_UNSHOWN", 0)
    rank = rank_process._Rank(1)
    rank.send = lambda *message: None
    stream = rank_process._Stream(rank, messages.ERR)
    for piece in b"Traceback (most recent call last)", b":\n  File x\nValueError", b": one":
        stream.take(piece)
        stream.show_unfinished()
    stream.end()
    lines = ["Traceback (most recent call last):", "  File x", "ValueError: one"]
    assert rank.traceback.lines == lines


def test_what_a_rank_prints_as_it_ends_is_sent():
    """Even if it does so just after it was looked for."""
    reading, writing = os.pipe()

    class Ending:
        """Prints, and has ended, when it is asked whether it has."""

        def poll(self):
            nonlocal writing
            if writing:
                os.write(writing, b"last words")
                os.close(writing)
                writing = None
            return 0

    rank, sent = rank_process._Rank(0), []
    rank.send = lambda kind, text, mark: sent.append((kind, text))
    with os.fdopen(reading, "rb", 0) as stream:
        rank.forward({stream: messages.OUT}, Ending())
    assert sent == [(messages.OUT, "last words")]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own rule")
def test_nobody_but_a_rank_that_listens_gets_the_port_of_the_rendezvous(finished):
    """Not while a rank still imports its framework, which takes seconds."""
    status, out, err = finished(
        """
        import errno, socket
        from compat._ranks import place, rendezvous
        if rank == 0:
            host, port = os.environ["COMPAT_RENDEZVOUS"].split(":")
            with socket.socket() as other:
                try:
                    other.bind((host, int(port)))
                except OSError as error:
                    print(errno.errorcode[error.errno])
            here = place.Place(0, 2, 0, 2, "compat run")
            with rendezvous.listen(here, host, int(port)) as listening:
                print(listening.getsockname() == (host, int(port)))
        """
    )
    assert (status, out) == (0, "[0] EADDRINUSE\n[0] True\n"), err


def test_a_line_of_many_megabytes_costs_what_its_bytes_cost(finished):
    """The job ends within ``finished``'s seconds; the square of its bytes would take minutes."""
    status, out, _ = finished("if rank == 0: sys.stdout.write('x' * 2 ** 23)")
    assert (status, len(out)) == (0, 2**23 + len("[0] \n"))


def test_a_rank_whose_own_process_gets_a_signal_is_named(finished):
    """As by ``kill``: a rank that is told to end takes its launcher for the sender."""
    status, _, err = finished(
        "time.sleep(0.5 * rank); os.kill(os.getppid(), 15 if rank == 1 else 0); time.sleep(60)"
    )
    assert status == 128 + signal.SIGTERM
    assert err == (
        "Rank 1 was the first to end, with exit status 143.\n"
        "compat run: the launcher ended with exit status 143; no rank failed.\n"
    )


def test_ranks_that_do_not_end_politely_are_killed(finished, tmp_path):
    mark = str(tmp_path / "here")
    status, _, _ = finished(
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({!r} + str(rank), "w").close()
        while rank == 1 and not all(os.path.exists({!r} + str(r)) for r in range(3)):
            time.sleep(0.1)
        sys.exit(3 if rank == 1 else time.sleep(60))
        """.format(mark, mark),
        size=3,
    )
    assert status == 3


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


def _ready(process):
    assert [process.stdout.readline()[3:] for _ in range(2)] == [b" ready\n"] * 2


@pytest.mark.parametrize("elsewhere", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ctrl_c_reaches_each_rank_once_and_all_may_save(job, elsewhere):
    """Rank 0 ends at once, which must not end rank 1 before it has saved."""
    process = job(SAVES.format(0.7), elsewhere=elsewhere)
    _ready(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    said = ["[{}] {}".format(rank, text) for rank in range(2) for text in ("interrupted", "saved")]
    assert sorted(out.decode().splitlines()) == said
    assert err.decode() == (
        "compat run: interrupted. The ranks are, too, and have up to 60 seconds to end; Ctrl-C "
        "again ends them at once.\n"
    )


def test_a_second_ctrl_c_ends_ranks_that_do_not(job):
    process = job(SAVES.format(60))
    _ready(process)
    process.send_signal(signal.SIGINT)
    assert {process.stdout.readline() for _ in range(3)} >= {b"[1] interrupted\n", b"[0] saved\n"}
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=watching.GRACE - 1)
    assert (process.returncode, out) == (130, b"")
    told = err.decode().splitlines()[1]
    assert told == "compat run: told to end by SIGINT; the ranks are ended."


def test_a_rank_may_end_as_it_likes_when_the_job_is_told_to(job):
    """What it prints then is heard, and the signal comes once."""
    process = job(
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *told: print("told", flush=True))
        print("ready", flush=True)
        time.sleep(0.7)
        """
    )
    _ready(process)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    out = b"".join(sorted(out.splitlines(True)))
    assert (process.returncode, out) == (143, b"[0] told\n[1] told\n")


def test_a_hangup_that_is_ignored_stays_so(job):
    """As under nohup."""
    process = job("print('ready', flush=True); time.sleep(0.5)", ignored=signal.SIGHUP)
    _ready(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_an_interrupt_that_comes_with_the_task_is_passed_on():
    """Ctrl-C while a machine's process starts."""
    names = ["COMPAT_RANK", "COMPAT_SIZE", "COMPAT_LOCAL_RANK", "COMPAT_LOCAL_SIZE"]
    place = dict(zip(names, "1212"))
    task = {"command": ["sleep", "60"], "directory": "/", "environ": {}, "ranks": [place]}
    process = subprocess.Popen(
        by_path.command("_ranks.launch.starter"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    process.stdin.write("{}\ninterrupt\n".format(json.dumps(task)).encode())
    process.stdin.flush()
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    told = process.communicate()[0].decode()
    assert told == "Rank 1 was the first to end, with exit status 130.\n"


LEAVES_BEHIND = """
import subprocess
if rank == 1:
    child = subprocess.Popen([sys.executable, "-S", "-c", {!r}], start_new_session={})
    print("left", child.pid)
    sys.exit({})
time.sleep({})
"""


@pytest.mark.parametrize(
    "status, daemon, stays", [(3, False, False), (3, True, True), (0, False, True)]
)
def test_what_a_rank_leaves_behind_is_ended_if_it_failed(finished, status, daemon, stays):
    """Workers of multiprocessing outlive a process that is killed, and hold memory of its GPU."""
    program = LEAVES_BEHIND.format(
        "import time; time.sleep(300)", daemon, status, 100 * bool(status)
    )
    done, out, _ = finished(program)
    assert done == status
    pid = int(re.search(r"left (\d+)", out).group(1))
    assert processes.runs(pid) == stays
    if stays:
        os.kill(pid, signal.SIGKILL)


LEAVES_A_THREAD = """
import threading
from compat import _ranks
from compat._ranks import left_threads
left_threads.end_with_main_thread(_ranks.own_place())
threading.Thread(target=time.sleep, args=({},), name="uploader").start()
{}
"""


def test_a_rank_whose_main_thread_has_failed_ends_whatever_threads_it_has_left(finished):
    began = time.monotonic()
    status, _, err = finished(LEAVES_A_THREAD.format(100, "if rank: raise ValueError('bad')"))
    assert status == 1 and time.monotonic() - began < 30  # not the thread's 100
    assert (
        "[1] compat: the main thread of rank 1 of 2 (compat run) has failed. Threads that it has "
        "left (uploader) still run after 5 seconds, and are ended. Make them daemons, or end them "
        "where the script fails.\n" in err
    )
    told = "compat run: rank 1 of 2 failed with exit status 1; the others were ended.\n"
    assert told in err and err.endswith("\nValueError: bad\n"), err


@pytest.mark.parametrize("end", ["", "if rank: raise ValueError('bad')"])
def test_threads_may_end_what_they_do(finished, end):
    """What a rank that has not failed leaves has all the time that it needs."""
    program = LEAVES_A_THREAD.format(1 if end else 7, end)
    program = program.replace("target=time.sleep", "target=work")
    program = "def work(s): time.sleep(s); print('done', flush=True)\n" + textwrap.dedent(program)
    status, out, err = finished(program)
    assert status == bool(end) and "[1] done\n" in out and "compat: " not in err


def test_what_a_rank_leaves_behind_may_write_for_ever(finished):
    writes = "import time\nwhile True: print('more' * 1000, flush=True); time.sleep(0.01)"
    done, out, _ = finished(LEAVES_BEHIND.format(writes, False, 0, 0))
    assert done == 0
    with contextlib.suppress(ProcessLookupError):  # nobody reads it any more
        os.kill(int(re.search(r"left (\d+)", out).group(1)), signal.SIGKILL)


def test_what_ranks_started_is_killed_with_them(job):
    """By the third signal, whoever ignores the first."""
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"
    process = job(
        """
        import signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen([sys.executable, "-S", "-c", {!r}]).pid, flush=True)
        time.sleep(60)
        """.format(ignores)
    )
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=30)
    assert not any(map(processes.runs, pids))


def test_a_rank_ends_when_nobody_listens_any_more(tmp_path):
    """As when the connection to its machine is lost, whatever else there goes on."""
    mark = tmp_path / "pid"
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen(
        by_path.command("_ranks.launch.rank_process") + [sys.executable, "-c", program, str(mark)],
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


EARLY = """\
import os, signal, subprocess, sys, time
from compat._ranks.launch import rank_process

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.{})

subprocess.Popen = Popen
sys.exit(rank_process.main(sys.argv[2:]))
"""
WITH_CHILD = """\
import os, sys, time
child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
with open(sys.argv[1] + "~", "w") as file:
    file.write(str(child))
os.replace(sys.argv[1] + "~", sys.argv[1])
time.sleep(60)
"""


@pytest.mark.parametrize("name", [pytest.param("SIGINT", marks=pytest.mark.slow), "SIGTERM"])
def test_a_signal_right_after_the_start_of_a_script_ends_all_of_it(tmp_path, name):
    """Not only the rank and its script, since the rank cannot handle the signal yet."""
    mark = str(tmp_path / "child")
    with subprocess.Popen(
        _bare([sys.executable, "-c", EARLY.format(name), mark])
        + _bare([sys.executable, "-c", WITH_CHILD, mark]),
        env=dict(os.environ, PYTHONPATH=ROOT, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                 LOCAL_WORLD_SIZE="2"),
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        kinds = [messages.START, messages.END]
        for line in process.stdout:
            if messages.decode(line.decode())[1] == kinds[0]:
                del kinds[0]
                if not kinds:
                    process.terminate()  # one that was interrupted waits for it
                    break
    assert not kinds
    with open(mark) as file:
        assert not processes.runs(int(file.read()))


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


@pytest.mark.parametrize("status, cause", [(1, 2), (128 + 15, None)])
def test_a_launcher_that_fails_by_itself_had_lost_the_rank_that_ended(status, cause):
    ended = [_ended("1 0 terminated"), _ended("2 0"), _ended("0 143 terminated")]
    end = watching.root_cause(ended, status)
    assert (end and end.rank) == cause


def test_where_ranks_only_lost_others_these_are_named():
    """As where the network between two machines is lost: all come to their ends by themselves."""
    assert watching._rank_ended(Ended(0, 1, [], lost="ranks 4 and 5"), 8) == (
        "rank 0 of 8 waited for ranks 4 and 5, which failed, ended or did not come"
    )
    assert watching._rank_ended(Ended(0, 1, [], lost=True), 8) == (
        "rank 0 of 8 failed with exit status 1"
    )
    ranks = watching.WatchedRanks(4)
    ranks.ended = [Ended(0, 1, [], lost=True), Ended(2, 143, [], lost=True, terminated=True)]
    assert ranks.failure(1) == (
        "rank 0 of 4 waited for ranks 1 and 3, which failed, ended or did not come"
    )


@pytest.mark.parametrize("absent", [[3], [1, 3], []])
def test_a_rank_tells_which_others_it_lost(absent):
    place = Place(0, 4, 0, 4, "compat run")
    error = errors.rank_lost(place, "for the others", absent, "it is over")
    (line,) = traceback.format_exception_only(type(error), error)
    found = rank_process._LOST.match(line).group(1)
    assert found == (errors.numbered_ranks(absent) if absent else None)


def test_a_traceback_is_found_behind_a_prefix():
    traceback = tracebacks.Traceback()
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
    traceback = tracebacks.Traceback()
    for line in lines[:3] + logged + lines[3:] + ["E1122 21:39:19.746755 1 x.cc:10] no"]:
        traceback.add(line)
    assert traceback.lines == lines


def test_messages_survive_launchers_that_put_something_in_front():
    line = "[1,0]<stdout>:{0}12{1}out{1}part{1}text\x1f".format(messages.BEGIN, messages.BETWEEN)
    assert messages.decode(line) == ["12", "out", "part", "text\x1f"]
    # horovodrun does so at each carriage return, too, as progress bars have.
    (sent,) = messages.encoded(1, messages.OUT, "\r1/8\b\b\b\r2/8\r", messages.UNFINISHED)
    passed_on = re.sub("(^|\r)", r"\1[1]<stdout>:", sent.decode())
    assert messages.decode(passed_on[:-1]) == ["1", "out", "unfinished", "\r1/8\b\b\b\r2/8\r"]
    for text in ("1", "x\x1fout\x1f\x1ftext", "1\x1fout\x1ftext"):
        assert messages.decode(messages.BEGIN + text) is None
    for line in ("", "text"):
        assert messages.decode(line) is None


def test_command_line(process, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))

    def said(*arguments):
        return refused("run", *(arguments + (script,)))

    assert said("-n", "0").endswith("argument -n: '0' is not a number of processes, 1 or more\n")
    assert "--timeout=x is not understood" in said("-n", "2", "--timeout", "x")
    assert said("-n", "3", "--hosts", "a:2") == (
        "compat run: -n 3: --hosts a:2 has room for 2. Use fewer ranks, or give the machines more: "
        "--hosts first:4,second:4.\n"
    )
    assert "--hosts a:x is not understood" in said("--hosts", "a:x")
    assert "--hosts  is not understood" in said("--hosts", "")
    assert said("--hosts", "a") == (
        "compat run: --hosts a:1 makes one rank, which has nobody to train with. Give the machines "
        "room for 2 or more, such as --hosts first:4,second:4, or run the script on that machine, "
        "without --hosts.\n"
    )
    theano = "--backend", "theano", "--python", sys.executable
    assert said("--gpus", "free:2", "--hosts", "a,b", *theano) == (
        "compat run: --gpus free:2 with --hosts: idle GPUs cannot be found on other machines from "
        "here. Use ids that are meant on each of them, such as --gpus 0,1, or leave --gpus out.\n"
    )
    assert said("-n", "2", "--backend", "cntk", "--python", sys.executable).endswith(
        "Ranks of Theano and CNTK are started by mpirun, which is not on PATH. Install the MPI "
        "that mpi4py was compiled with: on Debian and Ubuntu, apt-get install openmpi-bin.\n"
    )
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    for backend in "theano", "cntk":
        assert said("-n", "2", "--backend", backend, "--python", sys.executable).endswith(
            "Each rank needs mpi4py, which is not installed here, to train with the others. "
            "Install it for the MPI of the launcher: pip install mpi4py, which compiles it where "
            "there is no wheel (on Debian and Ubuntu that needs apt-get install libopenmpi-dev "
            "openmpi-bin).\n"
        )


def test_a_process_that_outlives_its_launcher_is_killed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
    processes.await_end([ended.pid, running.pid], 0.2)
    assert running.wait(timeout=10) == -signal.SIGKILL
    assert ended.wait() == 0
    began = time.monotonic()
    processes.await_end([ended.pid, running.pid], 30.0)
    assert time.monotonic() - began < 30.0  # nothing is left to wait for


# Signals at random moments --------------------------------------------------------------------

# Each is the child of the one before.
TARGETS = "compat run", "launcher", "machine's process", "rank's process", "script", "its child"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP
UNTIL_TOLD = """
    child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")
    while not os.path.exists(__file__ + ".end"):
        print("still here", flush=True)
        time.sleep(0.1)
    os.kill(child, 9)
"""


def _read(pid, name):
    with open("/proc/{}/{}".format(pid, name)) as file:
        return file.read()


def _found(process, target, rank):
    """Return the number of that process of a job, once it has replaced its parent's fork."""
    found = process.pid
    for kind in TARGETS[1 : TARGETS.index(target) + 1]:
        place, parent, children = rank if kind == "rank's process" else 0, found, []
        while len(children) <= place or _read(found, "cmdline") == _read(parent, "cmdline"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
            children = _read(parent, "task/{}/children".format(parent)).split()
            found = int((children[place:] or [parent])[0])
    return found


# What is said if that process gets a signal. While Python starts, SIGINT is any other error.
LAUNCHER = r"compat run: (the launcher|rank \d of {size}) "
VERDICTS = {
    "compat run": r"compat run: (interrupted\.|told to end by {name};)",
    "launcher": LAUNCHER,
    "machine's process": LAUNCHER,
    "rank's process": r"Rank {rank} was the first to end,|compat run: rank {rank} of {size} ",
    "script": r"rank {rank} of {size} (was killed by signal {number}|failed with exit status 1);",
}


def _jobs(cases):
    """How many ranks each job has, and the signals to its processes: SIGSTOP leaves it for more.

    Each process gets each signal, in a random order, and then all of them do again.
    """
    draw, size, signals, pairs = random.Random("signals"), 3, [], []
    for case in range(cases):
        pairs = pairs or draw.sample(list(itertools.product(TARGETS, SIGNALS)), 30)
        target, number = pairs.pop()
        moment = draw.choice([0, draw.uniform(0, 0.2), draw.uniform(0, 2)])
        signals.append((target, draw.randrange(size), number, moment))
        if number != signal.SIGSTOP or case == cases - 1:
            yield size, signals
            size, signals = draw.choice([2, 3]), []


def _signalled(folder, size, signals):
    """Start a job, send its processes the signals, and return what is not as it should be."""
    folder.mkdir()
    process = start(folder, UNTIL_TOLD, size, **{soak.VARIABLE: str(folder)})
    for target, rank, number, moment in signals:
        if target == "compat run":
            _found(process, "launcher", rank)  # it handles signals by then
        pid = _found(process, target, rank)
        time.sleep(moment)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
    verdict = VERDICTS.get(target, "").format(
        name=number.name, number=int(number), rank=rank, size=size
    )
    statuses = [128 + number]
    if number == signal.SIGSTOP or target == "its child":  # the job goes on
        (folder / "script.py.end").write_text("")
        verdict, statuses = r"\A\Z", [0]
    elif target != "compat run":
        statuses += [1, 128 + signal.SIGTERM]
    elif number == signal.SIGKILL:
        verdict, statuses = "", [-number]
    left = []
    for once_more in (number == signal.SIGINT and target != "compat run", False):
        try:
            said = process.communicate(timeout=30)
            break
        except subprocess.TimeoutExpired:
            if once_more:
                os.kill(pid, number)  # Python loses one that comes in a callback of its imports
    else:
        process.kill()
        said = process.communicate()
        left.append("it went on")
    out, err = (text.decode() for text in said)
    until = time.monotonic() + 10
    while soak.processes(folder) and time.monotonic() < until:
        time.sleep(0.1)
    left += [_read(pid, "cmdline") for pid in soak.processes(folder)]
    printed = {"[{}] still here".format(rank) for rank in range(size)}
    if (
        process.returncode in statuses
        and re.search(verdict, err)
        and printed.issuperset(out.splitlines())
        and not left
    ):
        return ""
    sent = [
        "{} of {} (rank {} of {}) after {:.2f} s".format(number.name, target, rank, size, moment)
        for target, rank, number, moment in signals
    ]
    return "\n".join(sent + ["status {}".format(process.returncode), err, out[-500:]] + left)


@pytest.mark.parametrize("cases", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_signals_at_random_moments(tmp_path, cases):
    """To any process of a job."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(_signalled, tmp_path / str(number), *job)
            for number, job in enumerate(_jobs(cases))
        ]
        wrong = [job.result() for job in jobs]
    assert not any(wrong), "\n".join(filter(None, wrong))


# ----------------------------------------------------------------------------------------------

ORPHAN = """\
import os, time
from compat._ranks.launch import processes
before_exec = processes.dies_with_this_process()
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
