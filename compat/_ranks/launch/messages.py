"""Messages that the processes of ranks send to ``compat run``, through the launcher's output.

A message is a line: ``BEGIN``, the rank, the message's kind, a mark, its text.
"""

import signal
from typing import Any, Iterator, List, NamedTuple, Optional, Union

# Characters that no program prints by chance: ASCII's record, unit and group separators. The last
# stands for a carriage return, behind which horovodrun prints its own prefix.
BEGIN, BETWEEN, _RETURN = "\x1e", "\x1f", "\x1d"
# Kinds: the rank has started, with the numbers of its process and of the script's; a line of
# standard output, of standard error; how the rank ended, the values of an ``Ended``.
START, OUT, ERR, END = "start", "out", "err", "end"
# Marks. A part of a text too long for one message: what follows ends it soon. And the beginning of
# a line that is not printed to its end yet, such as a progress bar.
PART, UNFINISHED = "part", "unfinished"
# And a line of a traceback with which the script ends: ``compat run`` shows equal ones once.
HELD = "held"
# The lines on standard error between which a script prints that traceback.
HOLD, RELEASE = BEGIN + "hold", BEGIN + "release"
# Characters of up to four bytes each: a write of 4096 bytes to a pipe is never torn apart (POSIX's
# PIPE_BUF, on Linux).
_PART = 1000
#: Names the file in which a rank's script leaves its outcome for ``compat run``, a JSON object.
OUTCOME_VARIABLE = "COMPAT_OUTCOME"


def encoded(rank: int, kind: str, text: str, mark: str = "") -> Iterator[bytes]:
    """Yield the lines that send a text, each of which is to be written at once."""
    text = text.replace("\r", _RETURN)
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)] or [""]
    for number, part in enumerate(parts, 1):
        fields = str(rank), kind, mark if number == len(parts) else PART, part
        yield (BEGIN + BETWEEN.join(fields) + "\n").encode("utf-8", "replace")


def decode(line: str) -> Optional[List[str]]:
    """Return the rank, kind, mark and text of a message; None for what the launcher prints."""
    # Launchers may put something in front.
    message = line.partition(BEGIN)[2].replace(_RETURN, "\r").split(BETWEEN, 3)
    return message if len(message) == 4 and message[0].isdecimal() else None


class Ended(NamedTuple):
    """How a rank ended.

    Attributes:
        status: its exit status; 128 + n for signal n.
        traceback: the lines of the last traceback that it printed.
        lost: whether it failed only because other ranks were missing, or which ones, where it knows
            them: "ranks 4 and 5".
        terminated: whether the launcher terminated it.
        outcome: what its script has left for ``compat run``, if anything.
    """

    rank: int
    status: int
    traceback: List[str]
    lost: Union[bool, str] = False
    terminated: bool = False
    outcome: Any = None

    @property
    def aborted(self) -> bool:
        """Whether a framework's native code aborted the process, without a traceback."""
        return self.status == 128 + signal.SIGABRT and not self.traceback
