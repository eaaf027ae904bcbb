"""The process that a launcher starts for each rank: it runs the rank's command.

It sends ``compat run`` what the command prints and how it ends (see ``messages``), on standard
output and so through any launcher.
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
from typing import Any, Dict, List

from ... import _ranks
from . import messages, processes
from .messages import Ended
from .tracebacks import Traceback

# How long a progress bar may stand unfinished before it is shown, in seconds.
_UNSHOWN = 0.1
# So many characters of a line are kept for the report of a failure.
_KEPT = 10000
# And so many wait at most for the end of their line.
_WAITING = 1000000
# How long a rank that the launcher terminates may take.
_GRACE = 5.0
# How long a rank that only lost others delays its own end, so that theirs are reported first. One
# that does not know which ranks it lost waits for longer: the others that were waiting report that
# too, and compat run names a rank that did not.
_HOLD, _HOLD_UNKNOWN = 2.0, 5.0
# The error of a rank that lost others, and which ones, where it knows them.
_LOST = re.compile(
    r"compat\.errors\.RankLostError: (?:.*, but (ranks? \d.*) failed, ended or did not come)?"
)


class _Stream:
    """A stream that a rank prints to, forwarded line by line.

    A line that is not complete, such as a progress bar, is forwarded soon, too.
    """

    def __init__(self, rank: "_Rank", kind: str) -> None:
        self.rank, self.kind = rank, kind
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.unsent = ""  # the end of a line that is not ended yet
        self.since = 0.0  # when that began to wait
        self.line = ""  # of the same line what was sent, as far as it is kept
        self.is_held = False  # what is printed is the traceback with which the script ends

    def take(self, data: bytes) -> None:
        """Forward the lines that end in these bytes.

        Arguments:
            data: what was read; empty at the end of the stream.
        """
        *lines, rest = (self.unsent + self.decoder.decode(data, not data)).split("\n")
        for line in lines:
            self.send(line)
        if lines or not self.unsent:
            self.since = time.monotonic()
        self.unsent = rest

    def show_unfinished(self) -> None:
        """Forward the beginning of a line that has waited long for its end."""
        waited = time.monotonic() - self.since >= _UNSHOWN and not self.is_held
        if self.unsent and (waited or len(self.unsent) > _WAITING):
            self.send(self.unsent, messages.UNFINISHED)
            self.unsent = ""

    def send(self, text: str, mark: str = "") -> None:
        """Send a line, or the beginning of one, and keep it for the report of a failure."""
        if self.kind == messages.ERR and text.endswith((messages.HOLD, messages.RELEASE)):
            before, _, word = text.rpartition(messages.BEGIN)
            if before:  # printed by another thread
                self.send(before)
            self.is_held = messages.BEGIN + word == messages.HOLD
            return
        self.line = (self.line + text)[:_KEPT]
        if not mark:
            if self.kind == messages.ERR:
                self.rank.traceback.add(self.line)
            self.line = ""
        self.rank.send(self.kind, text, mark or messages.HELD * self.is_held)

    def end(self) -> None:
        """Forward what is left of the last line."""
        if self.unsent or self.line:
            self.send(self.unsent)


class _Rank:
    """A rank whose command runs behind this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.traceback = Traceback()
        self.script = 0  # its process
        self.terminated = False
        self.interrupted = False
        self.reader = select.poll()
        self.reader.register(1, 0)  # reports errors only

    def send(self, kind: str, text: str, mark: str = "") -> None:
        """Send a message to ``compat run``."""
        for line in messages.encoded(self.rank, kind, text, mark):
            os.write(1, line)

    def run(self, command: List[str]) -> int:
        """Run the command to its end, report it, and return the exit status."""
        environ, outcome = dict(os.environ, PYTHONUNBUFFERED="1", **_gpus(os.environ)), None
        with contextlib.ExitStack() as stack:
            if messages.OUTCOME_VARIABLE in environ:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="compat-outcome-"))
                environ[messages.OUTCOME_VARIABLE] = os.path.join(folder, "outcome.json")
            status = self.run_with(command, environ)
            # None was requested, or the script was killed.
            with contextlib.suppress(KeyError, FileNotFoundError):
                with open(environ[messages.OUTCOME_VARIABLE], encoding="utf-8") as file:
                    outcome = json.load(file)
        return self.end(status, outcome)

    def run_with(self, command: List[str], environ: Dict[str, str]) -> int:
        """Run the command, pass signals on to it, and return its exit status."""
        # Before there are handlers, signals would end this process, and the script with it, but
        # not what the script may have started by then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.PASSED_ON)
        try:
            process = processes.started(command, environ, subprocess.PIPE, mask)

            def terminate(signum, frame):
                self.terminated = True
                process.terminate()
                signal.signal(signal.SIGALRM, lambda *ignored: process.kill())
                signal.alarm(int(_GRACE))

            def interrupt(signum, frame):
                self.interrupted = True
                process.send_signal(signal.SIGINT)

            for number in processes.PASSED_ON:
                signal.signal(number, interrupt if number == signal.SIGINT else terminate)
            self.script = process.pid
            self.send(messages.START, "{} {}".format(os.getpid(), self.script))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.forward({process.stdout: messages.OUT, process.stderr: messages.ERR}, process)
        status = process.wait()
        return status if status >= 0 else 128 - status

    def forward(self, streams: Dict[Any, str], process: Any) -> None:
        """Forward what the program prints until it has ended.

        A process that it leaves behind may hold the pipes open longer, and write to them; that is
        not awaited.

        Arguments:
            streams: the kinds of messages by the program's pipes.
            process: the program, a ``Popen``.

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
            if ended and (not ready or time.monotonic() - ended > processes.LEFT_BEHIND):
                break
        for stream in forwarded.values():
            stream.end()

    def end(self, status: int, outcome: Any) -> int:
        """Report how the command ended, delay the end as far as it helps, and return the status."""
        lines = self.traceback.lines if status else []
        lost = next(filter(None, map(_LOST.match, lines)), None)
        others = lost is not None and (lost.group(1) or True)
        ended = Ended(self.rank, status, lines, others, self.terminated, outcome)
        self.send(messages.END, json.dumps(ended))
        if status or self.terminated or self.interrupted:
            processes.end_group(self.script)
        if lost and not self.terminated:
            time.sleep(_HOLD if lost.group(1) else _HOLD_UNKNOWN)
        # ``compat run`` ends the launcher when all ranks have ended. A launcher that sees one end
        # would kill the others, which may still be saving.
        until = time.monotonic() + (processes.INTERRUPT_GRACE if self.interrupted else 0)
        while not self.terminated and time.monotonic() < until and not self.reader.poll(0):
            time.sleep(0.05)
        return status


def _gpus(environ):
    """Return the variables for the GPUs that ``compat run --hosts --gpus`` requested.

    Other machines may have more or fewer than the one where it was called. The script's
    ``configure_gpu()`` warns where there are too few.
    """
    if "COMPAT_GPUS" not in environ:
        return {}
    from ..._configuration import device_choice, gpu_selection  # for start-up time

    selection = gpu_selection.parse_gpus(environ["COMPAT_GPUS"])
    return device_choice.choose(selection, None, environ).environ(environ)


def main(command: List[str]) -> int:
    """Run the command of this process's rank, and return its exit status."""
    place = _ranks.own_place()
    assert place is not None, "compat run starts this through a launcher"
    processes.die_with_parent(
        signal.SIGTERM
    )  # not SIGKILL: what the script has started is to end, too
    rank = _Rank(place.rank)
    try:
        return rank.run(command)
    except Exception:  # the output is read no more: compat run was killed
        if rank.script:
            processes.end_group(rank.script)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
