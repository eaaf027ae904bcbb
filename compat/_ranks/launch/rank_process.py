"""What a launcher starts in place of each rank's command, which stands behind it.

Runs the command and tells ``compat run``, on standard output and so through whatever launcher,
what it printed and how it ended. A message is a line: ``BEGIN``, the rank, the message's kind, a
mark, its text.
"""

import codecs
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Collection, Dict, List, Mapping, NamedTuple, Optional, Union

from ... import _ranks

# Characters that no program prints by chance: ASCII's record and unit separators.
BEGIN, BETWEEN = "\x1e", "\x1f"
# Kinds: the rank has started, with the numbers of this process and of the script's; a line of
# standard output, of standard error; how the rank ended, the values of an ``Ended``.
START, OUT, ERR, END = "start", "out", "err", "end"
# Names the file in which a rank leaves what ``compat run --report`` tells of it.
REPORT_VARIABLE = "COMPAT_REPORT"
# Marks. A part of a text too long for one message: what follows ends it soon. And the beginning of
# a line that is not printed to its end yet, such as a progress bar.
PART, UNFINISHED = "part", "unfinished"
# Characters of up to four bytes each: a write of 4096 bytes to a pipe is never torn apart (POSIX's
# PIPE_BUF, on Linux).
_PART = 1000
# How long a progress bar may stand unfinished before it is shown, in seconds.
_UNSHOWN = 0.1
# So many characters of a line are kept for the report of a failure.
_KEPT = 10000
# And so many wait at most for the end of their line.
_WAITING = 1000000
# Signals that are passed on to ranks, and to their scripts.
_SIGNALS = "SIGINT", "SIGTERM", "SIGHUP"  # Windows has no SIGHUP
PASSED_ON = tuple(getattr(signal, name) for name in _SIGNALS if hasattr(signal, name))
# How long a rank that was told to end may take.
_GRACE = 5.0
# How long a rank that only lost others delays its own end, so that theirs are reported first. One
# that does not know which ranks it lost waits for longer: the others that were waiting report that
# too, and compat run names a rank that did not.
_HOLD, _HOLD_UNKNOWN = 2.0, 5.0
# How long what a script has left behind is listened to, or may take to end.
_LEFT_BEHIND = 2.0
# How long ranks may take to end after Ctrl-C: they may be saving what they have.
INTERRUPT_GRACE = 60.0

# So many lines of a traceback are told.
_LONGEST = 500
# What begins the second part of a chained traceback.
_CHAINED = ("During handling of the above", "The above exception was the direct")
# What TensorFlow's and glog's lines of a log begin with, which other threads write, and compat's.
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[IWEF]\d{4} \d\d:\d\d:\d\d|compat: ")
# The error of a rank that lost others, and which ones, where it knows them.
_LOST = re.compile(
    r"compat\.errors\.RankLostError: (?:.*, but (ranks? \d.*) failed, ended or did not come)?"
)


def decode(line: str) -> Optional[List[str]]:
    """Return the rank, kind, mark and text of a message, or None.

    The launcher's own words.
    """
    message = line.partition(BEGIN)[2].split(BETWEEN, 3)  # launchers may put something in front
    return message if len(message) == 4 and message[0].isdecimal() else None


class Ended(NamedTuple):
    """How a rank ended: its exit status (128 + n for signal n), and the traceback it printed.

    ``lost``: only since another rank was not there, or which ones were not: "ranks 4 and 5";
    ``terminated``: since the launcher said so; ``aborted``: by the framework's own code, without a
    traceback. ``report``: what it has left for ``compat run --report``.
    """

    rank: int
    status: int
    traceback: List[str]
    lost: Union[bool, str] = False
    terminated: bool = False
    report: Any = None

    @property
    def aborted(self) -> bool:
        return self.status == 128 + signal.SIGABRT and not self.traceback


class Traceback:
    """The last traceback in what a program writes to standard error, its causes included."""

    def __init__(self) -> None:
        self.lines = []  # type: List[str]
        self.prefix = ""  # torch.distributed puts "[rank1]: " in front of each line
        self.ended = False  # a log follows

    def add(self, line: str) -> None:
        prefix, begin, _ = line.partition("Traceback (most recent call last)")
        if begin:
            self.prefix = prefix
            if not any(earlier.startswith(_CHAINED) for earlier in self.lines[-3:]):
                self.lines = []
        if begin or line.startswith(_CHAINED):
            self.ended = False
        elif _LOGGED.match(line):
            self.ended = True
        if begin or (self.lines and not self.ended):
            line = line[len(self.prefix) :] if line.startswith(self.prefix) else line
            self.lines = (self.lines + [line])[:_LONGEST]


class _Stream:
    """One of the streams that a rank prints to, sent on line by line.

    What stands in a line that is not ended yet, such as a progress bar, is sent soon, too.
    """

    def __init__(self, rank: "_Rank", kind: str) -> None:
        self.rank, self.kind = rank, kind
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.unsent = ""  # the end of a line that is not ended yet
        self.since = 0.0  # when that began to wait
        self.line = ""  # of the same line what was sent, as far as it is kept

    def take(self, data: bytes) -> None:
        """Send on the lines that end in these bytes; none: the stream has ended."""
        *lines, rest = (self.unsent + self.decoder.decode(data, not data)).split("\n")
        for line in lines:
            self.send(line)
        if lines or not self.unsent:
            self.since = time.monotonic()
        self.unsent = rest

    def show_unfinished(self) -> None:
        waited = time.monotonic() - self.since >= _UNSHOWN
        if self.unsent and (waited or len(self.unsent) > _WAITING):
            self.send(self.unsent, UNFINISHED)
            self.unsent = ""

    def send(self, text: str, mark: str = "") -> None:
        self.line = (self.line + text)[:_KEPT]
        if not mark:
            if self.kind == ERR:
                self.rank.traceback.add(self.line)
            self.line = ""
        self.rank.send(self.kind, text, mark)

    def end(self) -> None:
        if self.unsent or self.line:
            self.send(self.unsent)


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.traceback = Traceback()
        self.script = 0  # its process
        self.terminated = False
        self.interrupted = False
        self.reader = select.poll()
        self.reader.register(1, 0)  # tells errors only

    def send(self, kind, text, mark=""):
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)] or [""]
        for number, part in enumerate(parts, 1):
            fields = str(self.rank), kind, mark if number == len(parts) else PART, part
            os.write(1, (BEGIN + BETWEEN.join(fields) + "\n").encode("utf-8", "replace"))

    def run(self, command: List[str]) -> int:
        """Run the command to its end, and tell of it. Returns the exit status."""
        environ, report = dict(os.environ, PYTHONUNBUFFERED="1", **_gpus(os.environ)), None
        with contextlib.ExitStack() as stack:
            if REPORT_VARIABLE in environ:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="compat-report-"))
                environ[REPORT_VARIABLE] = os.path.join(folder, "report.json")
            status = self.run_with(command, environ)
            # Nobody asked for one, or the script was killed.
            with contextlib.suppress(KeyError, FileNotFoundError):
                with open(environ[REPORT_VARIABLE], encoding="utf-8") as file:
                    report = json.load(file)
        return self.end(status, report)

    def run_with(self, command: List[str], environ: Dict[str, str]) -> int:
        # Before there are handlers, signals would end this process, and the script with it, but
        # not what the script may have started by then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            process = started(command, environ, subprocess.PIPE, mask)

            def terminate(signum, frame):
                self.terminated = True
                process.terminate()
                signal.signal(signal.SIGALRM, lambda *ignored: process.kill())
                signal.alarm(int(_GRACE))

            def interrupt(signum, frame):
                self.interrupted = True
                process.send_signal(signal.SIGINT)

            for number in PASSED_ON:
                signal.signal(number, interrupt if number == signal.SIGINT else terminate)
            self.script = process.pid
            self.send(START, "{} {}".format(os.getpid(), self.script))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.forward({process.stdout: OUT, process.stderr: ERR}, process)
        status = process.wait()
        return status if status >= 0 else 128 - status

    def forward(self, streams: Dict[Any, str], process: Any) -> None:
        """Send on what the program prints until it has ended.

        A process of its own that it leaves behind may hold the pipes open longer, and write to
        them: not waited for.

        Raises:
            BrokenPipeError: the output is read no more, as when the connection to this machine
                is lost. The program then dies with this process.
        """
        forwarded = {pipe: _Stream(self, kind) for pipe, kind in streams.items()}
        pipes, ended = list(forwarded), None
        while pipes:
            if process.poll() is not None:  # before select(), which still sees its last output
                ended = ended or time.monotonic()
            ready = select.select(pipes, [], [], _UNSHOWN)[0]
            for pipe in ready:
                data = os.read(pipe.fileno(), 65536)
                if not data:
                    pipes.remove(pipe)
                forwarded[pipe].take(data)
            for stream in forwarded.values():
                stream.show_unfinished()
            if not ready and self.reader.poll(0):
                raise BrokenPipeError("the output of rank {} is not read".format(self.rank))
            if ended and (not ready or time.monotonic() - ended > _LEFT_BEHIND):
                break
        for stream in forwarded.values():
            stream.end()

    def end(self, status: int, report: Any) -> int:
        lines = self.traceback.lines if status else []
        lost = next(filter(None, map(_LOST.match, lines)), None)
        others = lost is not None and (lost.group(1) or True)
        ended = Ended(self.rank, status, lines, others, self.terminated, report)
        self.send(END, json.dumps(ended))
        if status or self.terminated or self.interrupted:
            _end_group(self.script)
        if lost and not self.terminated:
            time.sleep(_HOLD if lost.group(1) else _HOLD_UNKNOWN)
        # ``compat run`` ends the launcher when all ranks have ended. A launcher that sees one end
        # would kill the others, which may still be saving.
        until = time.monotonic() + (INTERRUPT_GRACE if self.interrupted else 0)
        while not self.terminated and time.monotonic() < until and not self.reader.poll(0):
            time.sleep(0.05)
        return status


def _gpus(environ):
    """Return the variables for the GPUs that ``compat run --hosts --gpus`` requested.

    Other machines may have more or fewer than the one where it was called. What is short, the
    script's ``configure_gpu()`` says.
    """
    if "COMPAT_GPUS" not in environ:
        return {}
    from ..._configuration import device_choice, gpu_selection  # for start-up time

    selection = gpu_selection.parse_gpus(environ["COMPAT_GPUS"])
    return device_choice.choose(selection, None, environ).environ(environ)


def die_with_parent(number: Optional[int] = None) -> None:
    """Get this signal (SIGKILL) when the process that started this one ends in any way. (Linux.)"""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, number or signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_group(leader):
    """End a script, if it still runs, and what it has started, such as multiprocessing's workers.

    They would hold memory of GPUs. What made a session of its own, as daemons do, stays.
    """
    kill(-leader, signal.SIGTERM)
    await_end([-leader], _LEFT_BEHIND)


def await_end(pids: Collection[int], seconds: float) -> None:
    """Wait until processes have ended that were told to, and kill those that do not.

    Arguments:
        pids: their numbers; of a group that has the number n, -n.
    """
    until = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in filter(runs, pids):
        kill(pid, signal.SIGKILL)


def kill(pid: int, number: int) -> None:
    """Send a process, or a group, a signal."""
    with contextlib.suppress(OSError):  # there is none, or none any more
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Return whether a process of this machine, or one of a group, has not ended."""
    try:
        os.kill(pid, 0)
        if pid < 0:
            return True
        with open("/proc/{}/stat".format(pid)) as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, or the process has just ended
        return not os.path.exists("/proc/self")


def dies_with_this_process(mask: Any = None) -> Callable[[], None]:
    """Return a ``preexec_fn``.

    What is started is killed when this process ends in any way.

    ``mask``: the signals that are to be blocked there, if not the same ones.
    """
    parent = os.getpid()

    def before_exec():
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        if os.getppid() != parent:  # it ended before it was asked for its death
            os._exit(1)

    return before_exec


def started(command: List[str], environ: Mapping[str, str], stderr: int, mask: Any = None) -> Any:
    """Return a process without input, whose output is read, and which is killed when this one ends.

    In a group of its own, by which to find what it starts. ``mask`` as ``dies_with_this_process``.
    """
    options: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
    options.update(start_new_session=True, preexec_fn=dies_with_this_process(mask))
    return subprocess.Popen(command, env=environ, **options)


def main(command: List[str]) -> int:
    place = _ranks.own_place()
    assert place is not None, "compat run starts this through a launcher"
    die_with_parent(signal.SIGTERM)  # not SIGKILL: what the script has started is to end, too
    rank = _Rank(place.rank)
    try:
        return rank.run(command)
    except Exception:  # the output is read no more: compat run was killed
        if rank.script:
            _end_group(rank.script)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
