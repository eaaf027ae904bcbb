"""A script as several ranks, run and watched through the launcher of the backend's engine.

The launcher starts ``rank_process`` in each rank, which sends what the script prints and how it
ended through the launcher's own output. So the same code watches ranks under torchrun, mpirun
and horovodrun, on one machine and on several.
"""

import collections
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional, Tuple

from ... import errors
from ..._runtime import progress
from . import messages, output, processes
from .messages import Ended
from .processes import await_end, kill

# How long a launcher may take to end the other ranks, after one has failed, in seconds.
GRACE = 15.0
# How long the traceback of a rank that fails is held back, for the report of the job, in seconds.
HELD = 3.0


def root_cause(ended: List[Ended], status: int = 0) -> Optional[Ended]:
    """Return the rank for which a job failed, or None where none failed.

    Where ranks only lost another one, that is the first which ended as if all were done; else the
    one that had to be ended, since it never came. A rank that its engine aborted after another one
    had ended lost that one: Horovod 0.28's thread may do so.

    Arguments:
        ended: the ranks that have ended, in that order.
        status: the launcher's own. mpirun fails where a rank leaves without a word, and ends the
            others, which cannot know that they lost it.
    """
    failed = [end for end in ended if end.status and not end.terminated]
    early = [end for end in ended if not end.status]
    at_fault = [end for end in failed if not end.lost and not (end.aborted and early)]
    if at_fault:
        return at_fault[0]
    absent = [end for end in ended if end.terminated and not end.lost]
    if not failed:
        left = [end for end in early if not end.terminated]
        return left[0] if left and absent and 0 < status < 128 else None
    return (early + absent + failed)[0]


class WatchedRanks:
    """The ranks of one start of a script: what they print, and how they end."""

    def __init__(self, size: int, shown=None) -> None:
        self.size = size
        self.output = shown or output.Output()
        self.ended: List[Ended] = []
        self.processes: Dict[int, int] = {}  # by rank, the one to be signalled
        self.scripts: Dict[int, int] = {}  # and the script's own
        self.launcher_said: List[str] = []
        self.is_starting = True  # nothing was printed yet
        # Of ranks that fail, the lines of the traceback, which may be another's as well, and since
        # when they are held back.
        self.held: Dict[int, List[str]] = {}
        self.held_since: Dict[int, float] = {}
        # Of texts too long for one message, what has come: other ranks' messages come between.
        self.parts: Dict[Tuple[int, str], List[str]] = collections.defaultdict(list)

    def starting(self) -> str:
        """Return how far the start has come, in words, or "" once something was printed."""
        started = len(self.processes)
        text = f"{started} of {self.size} ranks have started, no output yet"
        return text if self.is_starting else ""

    def hear(self, data: bytes) -> None:
        """Take a line of the launcher's output."""
        line = data.decode("utf-8", "replace")
        message = messages.decode(line)
        if message is None:
            self.launcher_said = self.launcher_said[-200:] + [line]
            return
        rank, (kind, mark, text) = int(message[0]), message[1:]
        parts = self.parts[rank, kind]
        parts.append(text)
        if mark == messages.PART:
            return
        text = "".join(parts)
        parts.clear()
        if kind == messages.START:
            self.processes[rank], self.scripts[rank] = map(int, text.split())
        elif mark == messages.HELD:
            self.is_starting = False
            if self.output.logs is not None:
                self.output.logs.add(rank, kind, text, False)
            self.held.setdefault(rank, []).append(text)
            self.held_since.setdefault(rank, time.monotonic())
        elif kind in (messages.OUT, messages.ERR):
            self.is_starting = False
            self.output.add(rank, kind, text, mark == messages.UNFINISHED)
        elif kind == messages.END:
            end = Ended(*json.loads(text))
            # An engine may end a rank by a signal when another has given up.
            if end.status > 128 and any(earlier.lost for earlier in self.ended):
                end = end._replace(terminated=True)
            self.ended.append(end)

    def show_held(self, seconds: float = 0.0) -> None:
        """Show the tracebacks that were held back for so long."""
        for rank in sorted(self.held):
            if time.monotonic() - self.held_since[rank] >= seconds:
                for line in self.held.pop(rank):
                    self.output.show(rank, messages.ERR, line, False)

    def _show_others(self, lines: List[str], blamed: int) -> List[int]:
        """Show the tracebacks that are held back and are not these lines.

        Arguments:
            lines: the traceback that the report of the failure has.
            blamed: the rank that has printed them.

        Returns:
            The other ranks with the same traceback, but for the number of the rank.
        """
        reported = _unnumbered(self.held.pop(blamed, lines))
        same = [rank for rank in sorted(self.held) if _unnumbered(self.held[rank]) == reported]
        for rank in same:
            del self.held[rank]
        self.show_held()
        return same

    def failure(self, status: int) -> Optional[str]:
        """Return how the job has failed, in a phrase, or None if it has not.

        Arguments:
            status: the launcher's own.
        """
        blame = root_cause(self.ended, status)
        if blame is not None:
            if blame.lost is True and self.silent():  # it could not know which
                blame = blame._replace(lost=errors.numbered_ranks(self.silent()))
            return _rank_ended(blame, self.size)
        return "the launcher ended with exit status {}".format(status) if status else None

    def silent(self) -> List[int]:
        """Return the ranks that have not reported their ends: their machines may have failed."""
        return sorted(set(range(self.size)) - {end.rank for end in self.ended})

    def outcomes(self) -> Dict[int, Any]:
        """Return what the ranks' scripts have left for ``compat run``, by rank."""
        return {end.rank: end.outcome for end in self.ended if end.outcome is not None}

    def conclude(self, status: int, then: str = "") -> int:
        """Print which rank failed, its traceback last, and return the job's exit status.

        Arguments:
            status: the launcher's own.
            then: a sentence to print behind that.
        """
        self.output.end()
        failure, blame = self.failure(status), root_cause(self.ended, status)
        if blame is None:
            self.show_held()
        if failure is None:
            return 0
        if blame is None:
            silent, heard = self.silent(), "no rank failed"
            if silent:
                heard = "nothing was heard of the end of " + errors.numbered_ranks(silent)
            report = self.launcher_said + ["compat run: {}; {}.{}".format(failure, heard, then)]
            report += sum(map(self.output.dropped, silent), [])
            output.say("\n".join(report))
            return status if 0 < status < 256 else 1
        report = ["compat run: {}; the others were ended.{}".format(failure, then)]
        shown = blame
        if not blame.status or blame.terminated:  # those that waited for it know what for
            shown = next((end for end in self.ended if end.lost or end.aborted), blame)
        # A SyntaxError has no traceback.
        lines = shown.traceback or self.held.get(shown.rank, [])
        same = self._show_others(lines, shown.rank)
        if same:
            report.append(f"compat run: {errors.numbered_ranks(same)} failed with the same error.")
        if shown is not blame and shown.aborted:
            aborted = _rank_ended(shown, self.size)
            report.append(f"compat run: then {aborted}; the others were ended.")
        report += sum(map(self.output.dropped, sorted({blame.rank, shown.rank})), [])
        output.say("\n".join(report + lines).rstrip("\n"))
        return shown.status or status or 1


def launch(command, environ, size, elsewhere=False, quiet=False, logs=None, max_restarts=0):
    """Run a launcher to its end. Signals that would end this process are passed on to the ranks.

    Arguments:
        command: the launcher, and the command that it starts in each rank.
        environ: its environment.
        size: the number of ranks.
        elsewhere: whether some of them may run on other machines.
        quiet: as ``output.Output`` takes it.
        logs: as ``output.Output`` takes it.
        max_restarts: how many more times a job that fails is started, at most.

    Returns:
        The exit status: the failing rank's, or 128 + the number of the signal. And the
        outcomes of the ranks of the last start, by rank: see ``messages.OUTCOME_VARIABLE``.
    """
    signals: List[int] = []
    # One that is ignored stays so: SIGHUP under nohup, SIGINT in the background of a shell script.
    numbers = [n for n in processes.PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: signals.append(number)) for n in numbers}
    try:
        for restart in range(max_restarts + 1):
            if logs is not None:
                logs.begin(restart)
            ranks = WatchedRanks(size, output.Output(quiet, logs))
            restarted = dict(environ, COMPAT_RESTART=str(restart))
            status = _run(command, restarted, ranks, signals, elsewhere)
            if signals:
                ranks.show_held()
                ranks.output.end()
                break
            failure, is_last, then = ranks.failure(status), restart == max_restarts, ""
            if is_last and max_restarts:
                then = " No restart is left (--max-restarts {}).".format(max_restarts)
            status = ranks.conclude(status, then)
            if failure is None or is_last:
                return status, ranks.outcomes()
            text = f"compat run: restart {restart + 1} of {max_restarts}, because {failure}."
            output.say(text)
            if not elsewhere:
                # A launcher does not always wait for what it has started; that must not meet what
                # is started next, as it may still hold a GPU's memory.
                await_end([*ranks.processes.values(), *ranks.scripts.values()], GRACE)
            if signals:
                break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + signals[0], ranks.outcomes()


def _run(command, environ, ranks, signals, elsewhere):
    """Run the launcher once, and return its exit status."""
    launcher = processes.started(command, environ, subprocess.STDOUT)
    with progress.shown(ranks.starting), launcher:
        try:
            _listen(launcher, ranks, signals, elsewhere)
        finally:
            _end(launcher)
    status = launcher.wait()
    if status and not elsewhere:
        # Ranks that were killed could not end what their scripts had started.
        for rank in set(ranks.scripts) - {end.rank for end in ranks.ended}:
            kill(-ranks.scripts[rank], signal.SIGKILL)
    return status


def _listen(launcher, ranks, signals, elsewhere):
    """Read the launcher's output until it ends, or shortly after a rank has failed or a signal.

    Arguments:
        launcher: its process.
        ranks: the ``WatchedRanks``.
        signals: those that this process has got, also later.
        elsewhere: as ``launch`` takes it.
    """
    rest, passed_on = b"", 0
    deadline: Optional[float] = None
    descriptor = launcher.stdout.fileno()
    while deadline is None or time.monotonic() < deadline:
        if len(signals) > passed_on:
            passed_on = len(signals)
            seconds = _pass_on(signals[:passed_on], launcher, ranks, elsewhere)
            deadline = time.monotonic() + seconds
        if signals and len(ranks.ended) == ranks.size:
            break
        ranks.show_held(HELD)
        if select.select([descriptor], [], [], 0.2)[0]:
            data = os.read(descriptor, 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                ranks.hear(line)
            if not data:
                break
        elif launcher.poll() is not None:
            break
        if deadline is None and any(end.status for end in ranks.ended):
            deadline = time.monotonic() + GRACE
    if rest:
        ranks.hear(rest)


def _pass_on(signals, launcher, ranks, elsewhere):
    """Pass the last signal on to the ranks, and return how long they may take, in seconds.

    Launchers make SIGTERM of SIGINT, or give the others little time once one rank has ended: so
    the ranks are interrupted directly. That is not possible on other machines, where
    ``compat._ranks.launch.starter`` does it, and other launchers do as they do.
    """
    ranks.output.end()
    ranks.is_starting = False
    running = set(ranks.processes) - {end.rank for end in ranks.ended}
    if signals == [signal.SIGINT] and (elsewhere or len(ranks.processes) == ranks.size):
        output.say(
            "compat run: interrupted. The ranks are, too, and have up to {:.0f} seconds to "
            "end; Ctrl-C again ends them at once.".format(processes.INTERRUPT_GRACE)
        )
        if elsewhere:
            launcher.send_signal(signal.SIGINT)
        for rank in [] if elsewhere else running:
            kill(ranks.processes[rank], signal.SIGINT)
        return processes.INTERRUPT_GRACE
    if len(signals) < 3:
        name = signal.Signals(signals[-1]).name
        output.say(f"compat run: told to end by {name}; the ranks are ended.")
        launcher.terminate()
        return GRACE
    kill(-launcher.pid, signal.SIGKILL)
    return 1.0


def _end(launcher):
    """End the launcher, and with it the ranks, if it has not ended."""
    if launcher.poll() is None:
        # To the launcher alone, which ends the ranks. In its group they would get it twice.
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(GRACE)
            return
        kill(-launcher.pid, signal.SIGKILL)


def _unnumbered(lines):
    """Return lines without the numbers of ranks."""
    return [re.sub(r"\b([Rr]ank) \d+\b", r"\1", line) for line in lines]


def _rank_ended(ended, size):
    """Return how the rank ended for which a job failed."""
    if not ended.status:
        how = "ended (exit status 0) while others were still training"
    elif ended.terminated:
        how = "did not come to the others, which waited for it"
    elif isinstance(ended.lost, str):
        how = "waited for {}, which failed, ended or did not come".format(ended.lost)
    elif ended.status > 128:
        how = "was killed by signal {}".format(ended.status - 128)
    else:
        how = "failed with exit status {}".format(ended.status)
    return "rank {} of {} {}".format(ended.rank, size, how)
