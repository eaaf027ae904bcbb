"""A terminal for what a test prints, on which compat says what takes long."""

import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import threading
import time

from .._runtime import progress
from .._verification import verification


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

    moved = verification._moved

    def moved_later(*given):
        time.sleep(0.05)
        return moved(*given)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    stream = open(descriptor, "w")
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.delenv("CI", raising=False)
        patch.setattr(progress, "SILENCE", 0.0)
        patch.setattr(progress, "INTERVAL", 0.005)
        patch.setattr(verification, "_moved", moved_later)
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
