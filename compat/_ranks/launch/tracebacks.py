"""The traceback with which a program ends, in what it writes to standard error."""

import re
from typing import List

# So many lines of a traceback are kept.
_LONGEST = 500
# What begins the second part of a chained traceback.
_CHAINED = ("During handling of the above", "The above exception was the direct")
# What TensorFlow's and glog's lines of a log begin with, which other threads write, and compat's.
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[IWEF]\d{4} \d\d:\d\d:\d\d|compat: ")


class Traceback:
    """The last traceback in what a program writes to standard error, its causes included."""

    def __init__(self) -> None:
        self.lines: List[str] = []
        self.prefix = ""  # torch.distributed puts "[rank1]: " in front of each line
        self.ended = False  # a log follows

    def add(self, line: str) -> None:
        """Take the next line that the program has written."""
        prefix, begin, _ = line.partition("Traceback (most recent call last)")
        if begin:
            self.prefix = prefix
            if not any(earlier.startswith(_CHAINED) for earlier in self.lines[-3:]):
                self.lines = []
        if begin or line.startswith(_CHAINED):
            self.ended = False
        elif _LOGGED.match(line):
            self.ended = True
        if begin or (self.lines and not self.ended):
            line = line[len(self.prefix) :] if line.startswith(self.prefix) else line
            self.lines = (self.lines + [line])[:_LONGEST]
