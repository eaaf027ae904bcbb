"""The output of ranks: on the terminal, each line with its rank in front, and in a file each."""

import collections
import functools
import os
import shlex
import sys
import time
from typing import Any, Callable, List, Optional, Set, Tuple

from ... import errors
from ..._runtime import safe_files
from . import messages

# How many lines of dropped output are kept for the report of a failure.
TAIL = 20
# And of each line, so many characters.
_WIDEST = 10000


def say(text: str) -> None:
    """Print a line of ``compat run`` itself."""
    print(text, file=sys.stderr, flush=True)


class Lines:
    """Lines of several sources. One that is unfinished is ended before another source's begins."""

    def __init__(self) -> None:
        # Whose line is unfinished, and what writes to where it stands.
        self.unfinished: Optional[Tuple[Any, Callable[[str], Any]]] = None
        # Whose unfinished line was ended for another source's.
        self.ended: Set[Any] = set()

    def add(self, source, write, text, unfinished, prefix=""):
        """Write a text of a source, after the end of another's unfinished line.

        Arguments:
            source: anything that identifies it.
            write: a function that writes a text.
            text: a line, without its end.
            unfinished: whether the line goes on.
            prefix: a text in front of each line.
        """
        if self.unfinished is not None and self.unfinished[0] != source:
            self.ended.add(self.unfinished[0])
            self.end()
        if source in self.ended:
            self.ended.remove(source)
            if not text and not unfinished:  # only the end of that line was to come
                return
        begin = prefix if self.unfinished is None else ""
        # A progress bar goes back to the beginning of its line, where the prefix stands.
        text = begin + text.replace("\r", "\r" + prefix)
        self.unfinished = (source, write) if unfinished else None
        write(text if unfinished else text + "\n")

    def end(self):
        """End an unfinished line."""
        if self.unfinished is not None:
            self.unfinished[1]("\n")
            self.unfinished = None


def _shown_last(text):
    """Return the text that a terminal shows of a line: of a progress bar its last state."""
    line = text.rstrip("\r")
    return line.rpartition("\r")[2][-_WIDEST:] + text[len(line) :][:1]


class Output:
    """The output of the ranks of one start.

    Arguments:
        quiet: whether to drop the standard output of other ranks than rank 0, but the last lines.
        logs: files that get everything.
    """

    def __init__(self, quiet: bool = False, logs: "Optional[Logs]" = None) -> None:
        self.quiet = quiet
        self.logs = logs
        self.lines = Lines()
        # The last lines of each rank that were not shown, and what is unfinished.
        self.tails: Any = collections.defaultdict(lambda: collections.deque([""], TAIL + 1))

    def add(self, rank: int, kind: str, text: str, unfinished: bool) -> None:
        """Log and show what a rank has printed."""
        if self.logs is not None:
            self.logs.add(rank, kind, text, unfinished)
        self.show(rank, kind, text, unfinished)

    def show(self, rank: int, kind: str, text: str, unfinished: bool) -> None:
        """Show what a rank has printed, the rank in front of each line."""
        if self.quiet and rank and kind == messages.OUT:
            tail = self.tails[rank]
            tail[-1] = _shown_last(tail[-1] + text)
            if not unfinished:
                tail.append("")
            return
        stream = sys.stdout if kind == messages.OUT else sys.stderr
        write = functools.partial(print, end="", file=stream, flush=True)
        self.lines.add((rank, kind), write, text, unfinished, "[{}] ".format(rank))

    def end(self) -> None:
        """End the lines that are unfinished."""
        self.lines.end()
        if self.logs is not None:
            self.logs.end()

    def dropped(self, rank: int) -> List[str]:
        """Return the last lines of a rank that were not shown, for the report of a failure."""
        *lines, rest = [line.rstrip("\r") for line in self.tails[rank]]
        lines = (lines + [rest] * bool(rest))[-TAIL:]
        about = f"compat run: the last lines that rank {rank} printed to standard output:"
        return [about] + [f"[{rank}] {line}" for line in lines] if lines else []


class Logs:
    """A file for each rank, to which all that it prints is appended.

    A file that cannot be written any more, as on a full disk, stops no training.

    Arguments:
        folder: where they lie; made where it is not there.
        size: the number of ranks.
        command: the script and its arguments, for the line that each start begins with.

    Raises:
        InvalidArgumentError: the files cannot be written.
    """

    def __init__(self, folder: str, size: int, command: List[str]) -> None:
        self.folder = folder
        self.command = " ".join(map(shlex.quote, command))
        self.lines = [Lines() for _ in range(size)]
        self.paths = [os.path.join(folder, "rank-{}.log".format(rank)) for rank in range(size)]
        self.files: List[int] = []
        path = folder
        try:
            os.makedirs(folder, exist_ok=True)
            for path in self.paths:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | safe_files.NOFOLLOW
                self.files.append(safe_files.plain(path, flags))
        except OSError as error:
            self.close()
            raise errors.InvalidArgumentError(
                f"--log-dir {folder}: {path} cannot be written: {error.strerror}. Name a folder in "
                "which you may make files."
            ) from error

    def begin(self, restart: int) -> None:
        """Begin a start of the job with a line in each file."""
        header = "==== {}, rank {} of {}, restart {}: {}\n"
        now, size = time.strftime("%Y-%m-%dT%H:%M:%S%z"), len(self.paths)
        for rank in range(size):
            self._write(rank, header.format(now, rank, size, restart, self.command))

    def add(self, rank: int, kind: str, text: str, unfinished: bool) -> None:
        """Write a text to the file of a rank."""
        self.lines[rank].add(kind, lambda text: self._write(rank, text), text, unfinished)

    def end(self) -> None:
        """End the lines that are unfinished."""
        for lines in self.lines:
            lines.end()

    def close(self) -> None:
        """Close the files."""
        while self.files:
            os.close(self.files.pop())

    def _write(self, rank, text):
        data = text.encode("utf-8", "replace")
        try:
            while data and self.files:
                data = data[os.write(self.files[rank], data) :]
        except OSError as error:
            self.close()
            say(
                "compat run: {}: {}. The job goes on, but no more of its output is written to "
                "the files in {}.".format(self.paths[rank], error.strerror, self.folder)
            )
