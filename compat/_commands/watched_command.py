"""A command that prints to this terminal, with a line while it prints nothing."""

import os
import select
import subprocess
import sys
import time
from typing import Mapping, Sequence

from .._runtime import progress

# How long a command may take to end after Ctrl-C, as in subprocess.call(), in seconds.
_GRACE = 0.25


def call(command: Sequence[str], environ: Mapping[str, str], doing: str) -> int:
    """Run a command, and return its exit status, as ``subprocess.call()`` does.

    On a terminal the command gets another one, whose output is copied: else nobody could tell when
    it prints nothing.

    Arguments:
        doing: what the line says.
    """
    if not progress.is_wanted():
        return subprocess.call(command, env=environ)
    import tty  # not on Windows

    controller, terminal = (os.fdopen(number, "r+b", 0) for number in os.openpty())
    with controller:
        with terminal:
            # The user's own makes a carriage return of each newline.
            tty.setraw(terminal.fileno())
            stdout = terminal if os.isatty(1) else None
            process = subprocess.Popen(command, env=environ, stdout=stdout, stderr=terminal)
        with process, progress.shown(doing) as line:
            try:
                _show(process, controller, line)
                return process.wait()
            except KeyboardInterrupt:  # the command has got it, too
                _show(process, controller, line, time.monotonic() + _GRACE)
                raise
            finally:
                process.kill()  # unless it has ended


def _show(process, controller, line, until=None):
    """Show what a process prints to its terminal, until it has ended."""
    import fcntl  # not on Windows
    import termios

    while until is None or time.monotonic() < until:
        if until is None and process.poll() is not None:
            until = time.monotonic() + _GRACE  # what it leaves behind may print on and on
        size = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, b" " * 8)
        fcntl.ioctl(controller, termios.TIOCSWINSZ, size)
        if select.select([controller], [], [], 0.1)[0]:
            try:
                data = controller.read(65536)
            except OSError:  # nobody has it open any more
                return
            line.erase()
            while data:
                data = data[os.write(2, data) :]
        elif process.poll() is not None:
            return
