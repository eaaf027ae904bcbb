"""What the ranks of a framework talk through: its part that carries numbers between processes.

Here is what all engines have in common; each is a subclass beside its backend.
"""

import contextlib
import sys
import threading
import traceback

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, List, Optional, Sequence

    from ._launchers import Ranks


class Engine:
    """What the ranks of one framework talk through. Subclasses join the others when created.

    Every rank calls the same methods in the same order.
    """

    _joined = None  # type: Any  # the one of this process

    def __init__(self, ranks: "Ranks") -> None:
        self.ranks = ranks
        self.steps = 0  # since the last epoch began
        self.more = []  # type: List[float]  # exchanged with each step's rows
        self.totals = None  # type: Any  # their sums

    @classmethod
    def join(cls, ranks: "Ranks") -> "Any":
        """This process's place in the engine, where it joins the others the first time."""
        if cls._joined is None:
            cls._joined = cls(ranks)
        return cls._joined

    def check_size(self, size: int) -> None:
        """Refuse to train alone where the launcher started several processes."""
        if size != self.ranks.size:
            raise errors.ranks_disagree(self.ranks, type(self).__name__, size)

    def sum(self, values: "Sequence[float]") -> "Any":
        """The sum over all ranks of lists of float64 of one length, as an array."""
        raise NotImplementedError

    def gather(self, numbers: "Sequence[int]") -> "List[List[int]]":
        """Each rank's list of whole numbers up to 2**24, of one length, in the order of ranks."""
        count = len(numbers)
        row = [0.0] * (count * self.ranks.size)
        start = count * self.ranks.rank
        row[start : start + count] = [float(number) for number in numbers]
        sums = [int(total) for total in self.sum(row)]
        return [sums[i * count : (i + 1) * count] for i in range(self.ranks.size)]

    def broadcast(self, value: "Any") -> "Any":
        """What rank 0 passes: numbers, texts, arrays and lists of them."""
        raise NotImplementedError

    def state_besides(self, model: "Any") -> "List[Any]":
        """Variables that training a model of Keras' sets, and that are not among its weights."""
        return []

    def problem(self, error: Exception) -> "Optional[str]":
        """The phrase in which this exception tells of a failure between ranks, or None."""
        raise NotImplementedError

    def absent(self) -> "List[int]":
        """The ranks that do not wait here as well, after such a failure, as far as is known."""
        return []

    @contextlib.contextmanager
    def waiting(self, what: str) -> "Iterator[None]":
        """Turn the engine's own error within into the loss of a rank that it stands for.

        Arguments:
            what: what for, in a phrase.
        """
        try:
            yield
        except Exception as error:
            problem = self.problem(error)
            if problem is None:
                raise
            raise errors.rank_lost(self.ranks, what, self.absent(), problem) from error

    def share(self, rows: int, numbers: "Sequence[float]" = ()) -> float:
        """This rank's share of the step that all ranks begin, where it has so many rows.

        Gradients times the shares sum up to the gradient of all rows.

        Arguments:
            numbers: more to sum up on the way, as many on all ranks: to ``totals``.

        Raises:
            RankLostError: other ranks have no more batches.
        """
        self.more = list(numbers)
        total, ended = self._agree(rows, False)
        self.stepped(ended)
        return rows / total

    def stepped(self, ended: "Sequence[int]") -> None:
        """Count a step. ``ended`` are the ranks that had no more batches.

        Raises:
            RankLostError: there are such ranks.
        """
        if ended:
            raise errors.out_of_step(self.ranks, ended, self.steps)
        self.steps += 1

    def close(self) -> None:
        """Say that this rank has no more batches in this epoch. All say so at once.

        Raises:
            RankError: other ranks have more.
        """
        ended = self._close()
        if len(ended) < self.ranks.size:
            raise errors.out_of_batches(self.ranks, ended, self.steps)
        self.steps = 0

    def _close(self):
        """The ranks that have no more batches, this one among them."""
        return self._agree(0, True)[1]

    def _agree(self, rows, closing):
        """The rows of all ranks, and the ranks that have no more."""
        total, flags = self._exchange(rows, float(closing))
        return total, [rank for rank, flag in enumerate(flags) if flag]

    def _exchange(self, rows, flag):
        """The rows of all ranks, and each rank's flag."""
        size = self.ranks.size
        sums = self.sum([float(rows)] + self.flags(flag) + self.more)
        self.more = [0.0] * len(self.more)  # of one that has no more batches
        self.totals = sums[1 + size :]
        return float(sums[0]), sums[1 : 1 + size]

    def flags(self, flag: float) -> "List[float]":
        """This rank's flag in its place, which sums up to all ranks' flags."""
        return [float(flag) * (rank == self.ranks.rank) for rank in range(self.ranks.size)]


def print_for_main_thread(error):
    """Print what the main thread, which waits in a framework's hands, would raise and die of."""
    frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore  # it runs
    lines = ["Traceback (most recent call last):\n"] + traceback.format_stack(frame)
    lines += traceback.format_exception_only(type(error), error)
    sys.stdout.flush()
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
