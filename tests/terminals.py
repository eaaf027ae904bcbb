"""Programs and tests on a terminal of their own, and what a person sees there."""

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time

from sources import ROOT

from compat import _verification
from compat._runtime import progress

# A program in which a line about long work appears at once.
SOON = (
    "import sys\n"
    "from compat._runtime import progress\n"
    "progress.SILENCE, progress.INTERVAL = 0, 0.05\n"
)
#: Begins a command line of compat's, of which that is true.
COMPAT = ["-c", SOON + "from compat.__main__ import main\nsys.exit(main(sys.argv[1:]))"]


class Screen:
    """The rows of a terminal, of what compat and Python print there."""

    def __init__(self, rows=24):
        self.rows = [""] * rows
        self.row = self.column = 0
        self.saved = 0, 0

    def feed(self, text):
        for part in re.findall("\x1b\\[[0-9;]*[A-Za-z]|\x1b.|[\r\n\b]|[^\x1b\r\n\b]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\b":
                self.column = max(self.column - 1, 0)
            elif part in ("\n", "\x1bD"):
                self.row += 1
                if self.row == len(self.rows):
                    self.row -= 1
                    self.rows = self.rows[1:] + [""]
            elif part == "\x1bM":
                assert self.row, "a line is moved in above: no program here needs that"
                self.row -= 1
            elif part == "\x1b7":
                self.saved = self.row, self.column
            elif part == "\x1b8":
                self.row, self.column = self.saved
            elif part == "\x1b[J":
                below = [""] * (len(self.rows) - self.row - 1)
                self.rows[self.row :] = [self.rows[self.row][: self.column]] + below
            else:
                assert part[0] != "\x1b" or part[-1] == "m", part
                if part[0] != "\x1b":  # else it is a colour
                    line = self.rows[self.row].ljust(self.column)
                    end = self.column + len(part)
                    self.rows[self.row] = line[: self.column] + part + line[end:]
                    self.column = end

    def seen(self):
        return "\n".join(self.rows).rstrip("\n")


class Seen:
    """What a program printed to its terminal, and its exit status.

    Attributes:
        screens: what was on the screen, each time that it changed, from the first to the last.
    """

    def __init__(self, printed, status):
        self.printed, self.status = printed, status
        screen, self.screens = Screen(), [""]
        for part in re.findall("\x1b.[^\x1b]*|[^\x1b]+", printed):
            screen.feed(part)
            if part[:2] != "\x1b7" and screen.seen() != self.screens[-1]:
                self.screens.append(screen.seen())

    @property
    def last(self):
        return self.screens[-1]

    def lines(self):
        """Return the lines on long work that were shown, without the seconds, each once."""
        found = re.findall("^compat: (.*) \\.\\.\\. \\d+ s$", "\n".join(self.screens), re.MULTILINE)
        return list(dict.fromkeys(found))


def _own_terminal():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def seen(*arguments, when=None, send=b"", columns=300, PYTHONPATH="", **environ):
    """Run Python on a new terminal.

    Arguments:
        *arguments: those of its command line.
        when: a text after which ``send`` is typed.
        send: bytes.
        columns: the width of the terminal.
        PYTHONPATH: the variable.
        **environ: variables that differ; None: it is not set.
    """
    variables = dict(
        os.environ, PYTHONPATH=os.pathsep.join(filter(None, [ROOT, PYTHONPATH])), TERM="xterm"
    )
    variables.update(environ, CI=environ.get("CI"))
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable] + list(map(str, arguments)),
        env={name: value for name, value in variables.items() if value is not None},
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(terminal)
    printed = b""
    with contextlib.suppress(OSError):  # nobody has the terminal open any more
        while select.select([controller], [], [], 60)[0] or process.kill() is None:
            printed += os.read(controller, 65536)
            if when and when in printed.decode(errors="replace"):
                os.write(controller, send)
                when = None
    os.close(controller)
    return Seen(printed.decode(), process.wait())


@contextlib.contextmanager
def terminal(monkeypatch):
    """Within, standard output and error are a terminal, where lines about long work come at once.

    No step is verified faster than they come.

    Yields:
        A list that gets, at the end, each such line, without the seconds, and last all the rest.
    """
    controller, descriptor = os.openpty()
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 300, 0, 0))
    data, printed = [], []  # type: list, list

    def read():
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            while True:
                data.append(os.read(controller, 65536))

    perturbed = _verification.verification._perturbed

    def perturbed_later(*given):
        time.sleep(0.05)
        return perturbed(*given)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    stream = open(descriptor, "w")
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.delenv("CI", raising=False)
        patch.setattr(progress, "SILENCE", 0.0)
        patch.setattr(progress, "INTERVAL", 0.005)
        patch.setattr(_verification.verification, "_perturbed", perturbed_later)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with stream:
            yield printed
    reader.join()
    os.close(controller)
    text = b"".join(data).decode()
    drawn = re.compile("\x1b\\[J(?:\x1bD\x1bM\x1b7\x1bD\rcompat: (.*?) \\.\\.\\. \\d+ s\x1b8)?")
    printed += dict.fromkeys(filter(None, drawn.findall(text)))
    printed.append(drawn.sub("", text).replace("\r\n", "\n"))
