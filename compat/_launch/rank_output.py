"""What ranks print: shown with the rank in front of each line, and kept in a file for each rank."""

import collections
import contextlib
import os
import sys
import time

from .. import errors
from .rank_process import ERR, OUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, List, Optional, Tuple

# Of what --quiet does not show, so many lines are shown if the rank fails.
_LAST = 20


class RankOutput:
    """The standard output and standard error of all ranks.

    Arguments:
        quiet: show of the standard output that of rank 0 alone.
        log_files: of each rank one that gets all that it prints, from ``open_log_files()``; or
            none.
    """

    def __init__(self, quiet: bool = False, log_files: "Optional[List[Any]]" = None) -> None:
        self.quiet = quiet
        self.log_files = dict(enumerate(log_files or ()))
        # Whose line is unfinished, and on which stream.
        self.unfinished: "Optional[Tuple[int, str]]" = None
        self.not_shown: "Dict[int, Deque[str]]" = {}

    def begin(self, title: str) -> None:
        """Start the files' part for another start of the ranks."""
        self.not_shown.clear()
        for rank in sorted(self.log_files):
            self._log(rank, "==== {} {} ====\n".format(time.strftime("%Y-%m-%d %H:%M:%S"), title))

    def add(self, rank: int, kind: str, text: str, unfinished: bool) -> None:
        """Take a line of a rank, or the beginning of one that is not ended yet."""
        self._log(rank, text if unfinished else text + "\n")
        if self.quiet and rank and kind == OUT:
            lines = self.not_shown.setdefault(rank, collections.deque([""], maxlen=_LAST + 1))
            lines[-1] = (lines[-1] + text).rsplit("\r", 1)[-1]  # a progress bar's last state
            if not unfinished:
                lines.append("")
        else:
            self._show(rank, kind, text, unfinished)

    def _show(self, rank, kind, text, unfinished):
        stream = sys.stdout if kind == OUT else sys.stderr
        if self.unfinished not in (None, (rank, kind)):
            self.end_line()
        if self.unfinished is None:
            stream.write("[{}] ".format(rank))
        # A progress bar goes back to the beginning of its line, where the rank stands.
        stream.write(text.replace("\r", "\r[{}] ".format(rank)))
        self.unfinished = (rank, kind)
        if not unfinished:
            self.end_line()
        stream.flush()

    def _log(self, rank, text):
        file = self.log_files.get(rank)
        if file is None:
            return
        try:
            file.write(text)
        except OSError as error:
            del self.log_files[rank]
            with contextlib.suppress(OSError):
                file.close()
            self.end_line()
            print(
                "compat run: {} cannot be written any more: {}. The ranks go on without it.".format(
                    file.name, error.strerror
                ),
                file=sys.stderr,
                flush=True,
            )

    def end_line(self) -> None:
        """End a line that was shown without its end."""
        if self.unfinished is not None:
            stream = sys.stdout if self.unfinished[1] == OUT else sys.stderr
            stream.write("\n")
            stream.flush()
            self.unfinished = None

    def show_last_lines(self, rank: int) -> None:
        """Show the last lines of a rank that failed which were not shown, because of --quiet."""
        lines = [line for line in self.not_shown.pop(rank, ()) if line]
        if lines:
            print("compat run: the last lines that rank {} printed:".format(rank), file=sys.stderr)
            for line in lines:
                self._show(rank, ERR, line, unfinished=False)


def open_log_files(folder: str, size: int) -> "List[Any]":
    """Files ``rank-0.log`` and so on, to which what ranks print is appended.

    Arguments:
        folder: where they are; made if it is not there.
        size: how many ranks there are.

    Raises:
        InvalidArgumentError: one of them cannot be written.
    """
    files: "List[Any]" = []
    try:
        os.makedirs(folder, exist_ok=True)
        for rank in range(size):
            path = os.path.join(folder, "rank-{}.log".format(rank))
            # Written line by line: people read it while the ranks run.
            files.append(open(path, "a", buffering=1, encoding="utf-8", errors="replace"))
    except OSError as error:
        for file in files:
            file.close()
        raise errors.InvalidArgumentError(
            "--log-dir={}: {} cannot be written: {}. Name a folder that can be; nothing was "
            "started.".format(folder, error.filename, error.strerror)
        ) from None
    return files
