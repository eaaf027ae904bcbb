"""Starting processes that do not outlive their parent, signalling them and awaiting their end."""

import contextlib
import os
import signal
import subprocess
import time
from typing import Any, Callable, Collection, List, Mapping, Optional

# Signals that are passed on to ranks, and to their scripts.
_SIGNALS = "SIGINT", "SIGTERM", "SIGHUP"  # Windows has no SIGHUP
PASSED_ON = tuple(getattr(signal, name) for name in _SIGNALS if hasattr(signal, name))
#: How long ranks may take to end after Ctrl-C: they may be saving what they have.
INTERRUPT_GRACE = 60.0
#: How long what a script has left behind may run on, in seconds.
LEFT_BEHIND = 2.0


def die_with_parent(number: Optional[int] = None) -> None:
    """Have this process receive a signal when its parent ends in any way (on Linux).

    Arguments:
        number: of the signal; None: SIGKILL.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, number or signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_group(leader: int) -> None:
    """Terminate a process group: a script, and what it has started, such as workers.

    These would hold memory of GPUs. Processes in sessions of their own, such as daemons, stay.

    Arguments:
        leader: the number of the group's first process, which may have ended.
    """
    kill(-leader, signal.SIGTERM)
    await_end([-leader], LEFT_BEHIND)


def await_end(pids: Collection[int], seconds: float) -> None:
    """Wait until terminated processes have ended, and kill those that do not.

    Arguments:
        pids: their numbers; of a group that has the number n, -n.
        seconds: how long they may take.
    """
    until = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in filter(runs, pids):
        kill(pid, signal.SIGKILL)


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, or to a group, if it exists."""
    with contextlib.suppress(OSError):  # there is none, or none any more
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Return whether a process of this machine, or any of a group, is running."""
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
    """Return a ``preexec_fn`` by which a child process is killed when this one ends in any way.

    Arguments:
        mask: the signals that are to be blocked there; None: the same ones as here.
    """
    parent = os.getpid()

    def before_exec():
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        if os.getppid() != parent:  # it ended before that took effect
            os._exit(1)

    return before_exec


def started(command: List[str], environ: Mapping[str, str], stderr: int, mask: Any = None) -> Any:
    """Start a command whose output is read, and which is killed when this process ends.

    It has no input, and a process group to itself, by which its children are found.

    Arguments:
        command: the program and its arguments.
        environ: its environment variables.
        stderr: as ``subprocess.Popen`` takes it.
        mask: as ``dies_with_this_process`` takes it.
    """
    options: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
    options.update(start_new_session=True, preexec_fn=dies_with_this_process(mask))
    return subprocess.Popen(command, env=environ, **options)
