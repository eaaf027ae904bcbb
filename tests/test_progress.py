"""The line about long work, as a person sees it on a terminal, and where there must be none.

Verification, Theano's functions and ``compat unwrap`` are seen in ``compat.testing`` and
``tests/backends``.
"""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, Site
from terminals import COMPAT, SOON, seen

WORK = SOON + (
    "import os, signal, threading, time\n"
    "def wait_for_line():\n"
    "    while not line.is_drawn:\n"
    "        time.sleep(0.01)\n"
)
TOLD = "reading a large file"


def test_it_stands_below_the_cursor_and_changes_nothing_else():
    """Also at the bottom of the screen; a progress bar is not at the end of its line."""
    bars = "1/2 [==>..]", "2/2 [=====] done"
    program = WORK + (
        "print('\\n' * {above} + {bars[0]!r}, end='', flush=True)\n"
        "with progress.shown({told!r}) as line:\n"
        "    wait_for_line()\n"
        "    print('\\r' + {bars[1]!r}, flush=True)\n"
        "    wait_for_line()\n"
        "print('end')\n"
    )
    for above in (0, 30):
        found = seen("-c", program.format(above=above, bars=bars, told=TOLD))
        lines = [screen.lstrip("\n").split("\n") for screen in found.screens]
        told = "compat: {} ... 0 s".format(TOLD)
        for expected in ([bars[0]], [bars[0], told], [bars[1]], [bars[1], "", told]):
            assert expected in lines, (expected, lines)
        assert lines[-1] == [bars[1], "end"]
        assert found.status == 0


def test_it_comes_after_two_seconds_of_silence_and_tells_the_whole_time():
    program = WORK.replace("progress.SILENCE, progress.INTERVAL = 0, 0.05\n", "") + (
        "assert (progress.SILENCE, progress.INTERVAL) == (2, 1)\n"
        "progress.SILENCE, progress.INTERVAL = 1.0, 0.2\n"
        "began = time.monotonic()\n"
        "with progress.shown('first') as line:\n"
        "    wait_for_line()\n"
        "    silent = [time.monotonic() - began]\n"
        "    printed = time.monotonic()\n"
        "    print('news', file=sys.stderr)\n"
        "    assert not line.is_drawn\n"
        "    with progress.shown('second'):\n"
        "        wait_for_line()\n"
        "        silent.append(time.monotonic() - printed)\n"
        "        time.sleep(0.8)\n"
        "        with progress.shown('short'):\n"
        "            time.sleep(0.3)\n"
        "    time.sleep(0.5)\n"
        "assert min(silent) >= 1.0, silent\n"
    )
    found = seen("-c", program)
    assert (found.lines(), found.last, found.status) == (["first", "second"], "news", 0)
    assert re.search("compat: first \\.\\.\\. [3-9] s", found.printed)


def test_a_long_text_keeps_its_seconds_and_to_one_line():
    program = WORK + "with progress.shown('x' * 200) as line:\n    wait_for_line()\n"
    found = seen("-c", program, columns=40)
    assert "\ncompat: " + "x" * 23 + " ... 0 s" in found.screens  # 39 columns


def test_an_exception_takes_it_away_and_no_thread_is_left():
    program = WORK + (
        "print(threading.active_count())\n"
        "try:\n"
        "    with progress.shown({!r}) as line:\n"
        "        wait_for_line()\n"
        "        raise KeyError('mine')\n"
        "finally:\n"
        "    print(threading.active_count(), vars(sys.stdout).get('write'))\n"
    ).format(TOLD)
    found = seen("-c", program)
    assert found.lines() == [TOLD]
    assert found.last.startswith("1\n1 None\nTraceback (most recent call last):\n  File ")
    assert found.last.endswith("\nKeyError: 'mine'")


def test_ctrl_c_and_a_signals_handler_that_prints():
    program = WORK + (
        "signal.signal(signal.SIGALRM, lambda *_: print('alarm'))\n"
        "with progress.shown('{}') as line:\n"
        "    wait_for_line()\n"
        "    with line.lock:\n"
        "        signal.raise_signal(signal.SIGALRM) if hasattr(signal, 'raise_signal') else "
        "os.kill(os.getpid(), signal.SIGALRM)\n"
        "    wait_for_line()\n"
        "    time.sleep(20)\n"
    ).format(TOLD)
    found = seen("-c", program, when="alarm\r\n", send=b"\x03")
    assert "\nalarm\n" in "\n" + found.last
    assert found.last.endswith("\nKeyboardInterrupt") and "compat: " not in found.last


def test_a_fork_prints_and_ends_by_itself():
    """Whatever the thread, which it does not have, was doing at the time: it had the lock, say."""
    program = WORK + (
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"  # Python's, of forks where there are threads
        "def hold():\n"
        "    with line.lock:\n"
        "        held.set()\n"
        "        forked.wait()\n"
        "held, forked = threading.Event(), threading.Event()\n"
        "with progress.shown({!r}) as line:\n"
        "    wait_for_line()\n"
        "    threading.Thread(target=hold).start()\n"
        "    held.wait()\n"
        "    child = os.fork()\n"
        "    forked.set()\n"
        "    if child:\n"
        "        os.waitpid(child, 0)\n"
        "    print('parent' if child else 'child', flush=True)\n"
        "os._exit(0)\n"
    ).format(TOLD)
    found = seen("-c", program)
    assert (found.printed.count("child\r\n"), found.printed.count("parent\r\n")) == (1, 1)
    assert found.status == 0


@pytest.mark.parametrize(
    "environ",
    [{"CI": "true"}, {"TERM": "dumb"}, {"TERM": None}, {"COMPAT_PROGRESS": "0"}, {"NO_COLOR": "1"}],
)
def test_where_the_environment_speaks_against_it(environ):
    """No colour is used, so ``NO_COLOR`` changes nothing."""
    wait = "wait_for_line()" if "NO_COLOR" in environ else "time.sleep(0.2)"
    program = WORK + "with progress.shown('x') as line:\n    {}\n    print('end')\n".format(wait)
    printed = seen("-c", program, **environ).printed
    if "NO_COLOR" in environ:
        assert "compat: x ..." in printed and "\x1b[" in printed
        assert not [part for part in printed.split("\x1b[")[1:] if part[0] != "J"]
    else:
        assert printed == "end\r\n"


def test_not_in_a_pipe_nor_in_the_background():
    program = WORK + (
        "if sys.argv[1] == 'background':\n"
        "    signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
        "    os.setpgid(0, 0) if not os.fork() else os.wait() and os._exit(0)\n"
        "with progress.shown('x') as line:\n    time.sleep(0.2)\n    print('end')\n"
    )
    assert seen("-c", program, "background").printed == "end\r\n"
    environ = dict(os.environ, PYTHONPATH=ROOT, TERM="xterm")
    environ.pop("CI", None)
    completed = subprocess.run(
        [sys.executable, "-c", program, "pipe"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert completed.stdout == b"end\n"


# Commands --------------------------------------------------------------------------------------


def compat(*arguments, **options):
    return seen(*(COMPAT + list(arguments)), **options)


def test_ctrl_c_at_compat_test_of_a_script(tmp_path):
    Site(tmp_path).install("jax", "0.7.2", "jax")  # as far as can be told without an import
    script = tmp_path / "train.py"
    script.write_text(
        "import time\ntry:\n    print('begins', flush=True)\n    time.sleep(60)\n"
        "finally:\n    time.sleep(0.6)\n"  # it may save something
    )
    command = "test", "-n", "0", "--backend", "jax", script
    found = compat(*command, PYTHONPATH=str(tmp_path), when="begins\r\n", send=b"\x03")
    assert found.last.endswith("\nKeyboardInterrupt") and "compat: " not in found.last
    assert found.status == 130


def test_ranks_that_start(tmp_path):
    """Until one has printed something, and not again where all are silent later."""
    options = "--backend=jax", "--python", sys.executable, "-n", "2"
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\ntime.sleep(1)\nprint('begins', flush=True)\ntime.sleep(0.5)\n"
    )
    found = compat("run", *options + (script,))
    assert found.lines()[-1].endswith(" of 2 ranks have started, no output yet")
    before, _, after = found.printed.partition("begins")
    assert "ranks have started" in before and "ranks have started" not in after
    lines = found.last.splitlines()
    assert {"[0] begins", "[1] begins"} == set(lines[-2:]) and found.status == 0
    assert "compat: " not in found.last
    quiet = compat("run", *options + ("--quiet", script))
    assert quiet.lines() == [] and quiet.status == 0


def test_a_script_on_simulated_devices_starts_with_a_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import compat; compat.configure_gpu(); print(compat.size())\n")
    found = compat("run", "--simulate", "1", "--backend=numpy", script)
    lines = found.last.splitlines()
    assert lines[-2:] == [f"compat run: starting {script}; imports may take some seconds", "1"]


def test_quiet_is_for_a_script_alone_too(tmp_path):
    script = tmp_path / "verified.py"
    script.write_text(WORK + "with progress.shown('x') as line:\n    print(line)\n")
    for options, printed in (["-n", "1"], "_Line object"), (["-n", "1", "--quiet"], "None"):
        command = ["run", "--backend=jax", "--python", sys.executable] + options + [script]
        assert printed in compat(*command).last.splitlines()[-1]
