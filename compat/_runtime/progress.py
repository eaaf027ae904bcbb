"""A line on the terminal that names an activity and its duration, while nothing is printed.

It stands below the cursor, which goes back to where it was: a progress bar stays as it is.
"""

import contextlib
import os
import sys
import time
from typing import Any, Callable, Iterator, List, Optional, Tuple, Union

from . import patching

#: Seconds of silence before the line appears.
SILENCE = 2.0
#: Seconds between updates.
INTERVAL = 1.0
#: "0" in this variable: no such line, in this process and in those that it starts.
VARIABLE = "COMPAT_PROGRESS"

# Activities and their start times; of those that take long, the innermost is shown.
_doing: "List[Tuple[Union[str, Callable[[], str]], float]]" = []

# As all terminals have it from DEC's: erase behind the cursor; make room for a line below it, write
# there, and go back.
_ERASE = "\x1b[J"
_BELOW = _ERASE + "\x1bD\x1bM" + "\x1b7" + "\x1bD\r{}" + "\x1b8"


@contextlib.contextmanager
def shown(doing: "Union[str, Callable[[], str]]") -> "Iterator[Optional[_Line]]":
    """Show a line within a block after two seconds of silence, until something is printed.

    Arguments:
        doing: the activity; or a function that returns it each time, "" for no line.

    Yields:
        The line; None where there is none, or one already.
    """
    entry = doing, time.monotonic()
    _doing.append(entry)
    try:
        if len(_doing) > 1 or not is_wanted():
            yield None
        else:
            with _Line().drawn() as line:
                yield line
    finally:
        _doing.remove(entry)


def is_wanted() -> bool:
    """Return whether standard error is a terminal that can and may show such a line."""
    if os.name != "posix" or os.environ.get("CI") or os.environ.get(VARIABLE) == "0":
        return False
    return os.environ.get("TERM", "dumb") != "dumb" and _is_terminal(sys.stderr)


def _is_terminal(stream: "Any") -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or something else
        return hasattr(stream, "__dict__") and os.isatty(stream.fileno())
    return False


class _Line:
    """A line, and the thread that draws it."""

    def __init__(self) -> None:
        import threading  # costs an import

        self.descriptor = os.dup(sys.stderr.fileno())  # the terminal, whatever becomes of 2
        self.process = os.getpid()
        self.lock = threading.RLock()  # a handler of a signal may print, too
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._draw_again, daemon=True)
        self.is_drawn = False
        self.printed = time.monotonic()

    @contextlib.contextmanager
    def drawn(self) -> "Iterator[_Line]":
        """Draw the line again and again within a block, while the terminal is silent."""
        self.thread.start()
        try:
            with contextlib.ExitStack() as stack:
                for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():
                    if _is_terminal(stream):
                        write = self._announced(stream.write)
                        stack.enter_context(patching.replaced(stream, write=write))
                yield self
        finally:
            if os.getpid() == self.process:
                self.over.set()
                self.thread.join()
                self.erase()
                os.close(self.descriptor)

    def erase(self) -> None:
        """Erase the line, before something is printed; a fork has none."""
        if os.getpid() == self.process:
            with self.lock:
                self.printed = time.monotonic()
                if self.is_drawn:
                    self.is_drawn = False
                    with contextlib.suppress(OSError):
                        os.write(self.descriptor, _ERASE.encode())

    def _announced(self, write: "Callable[[str], Any]") -> "Callable[[str], Any]":
        def announced_write(text: str) -> "Any":
            self.erase()
            return write(text)

        return announced_write

    def _draw_again(self) -> None:
        while not self.over.wait(INTERVAL):
            with self.lock, contextlib.suppress(OSError):  # the terminal is gone
                now = time.monotonic()
                long = [entry for entry in _doing if now - entry[1] >= SILENCE]
                if long and now - self.printed >= SILENCE:
                    self._draw(*long[-1])

    def _draw(self, doing: "Union[str, Callable[[], str]]", since: float) -> None:
        text = doing if isinstance(doing, str) else doing()
        if not text or not self._is_in_foreground():
            return
        text = "compat: " + "".join(filter(str.isprintable, text))
        seconds = f" ... {time.monotonic() - since:.0f} s"
        width = (os.get_terminal_size(self.descriptor).columns or 80) - 1
        self.is_drawn = True
        line = _BELOW.format(text[: width - len(seconds)] + seconds)
        # Not by the stream, whose lock a fork would take along.
        os.write(self.descriptor, line.encode(errors="replace"))

    def _is_in_foreground(self) -> bool:
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        return True  # not the terminal that controls this process: one that a program reads
