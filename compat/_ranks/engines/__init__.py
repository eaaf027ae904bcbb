"""What the ranks of a framework talk through: its part that carries numbers between processes.

Here is what all engines have in common; each is a subclass beside its backend.
"""

import collections
import contextlib
import os
import pickle
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from ... import errors
from ..._runtime.on_demand import numpy
from ..._runtime.process import process
from .. import left_threads, rendezvous, waiting
from ..place import Place


class Engine:
    """What the ranks of one framework talk through. Subclasses join the others when created.

    Every rank calls the same methods in the same order. A subclass has ``sum``, ``problem``, and
    ``broadcast`` or ``broadcast_bytes``, at least; ``Backend.distribute`` gets this process's
    engine from ``join(place)``.

    Arguments:
        place: this process's place among the ranks.

    Attributes:
        place: the same.
        others: the other ranks.
        timeout: how long this rank waits for the others, in seconds.
        steps: how many steps the ranks have done together since the last epoch began.
        totals: of the last step, the sums over all ranks of the numbers that ``share`` was given.
        unreached: the names of what replaces a framework's functions for the time of a step, and
            was not called in one.
        unexchanged: likewise of what has a step exchange gradients, if it did so without.
    """

    #: What errors call it; None for the name of its class.
    name: Optional[str] = None

    def __init__(self, place: Place) -> None:
        self.place = place
        self.others = [rank for rank in range(place.size) if rank != place.rank]
        self.timeout = waiting.timeout(os.environ)
        self.steps = 0
        self.totals = []  # type: Any
        self._exchanged = collections.Counter()  # type: Any  # by what was exchanged
        self.unreached = {}  # type: Any  # as a set that keeps its order
        self.unexchanged = {}  # type: Any  # likewise
        self.calls = None  # type: Any  # a ``calls.Calls``, where the ranks keep a store
        self.exchanges = 0  # since the last of these calls began
        # What for this rank waits, which exchange that is, and until when.
        self.inside = None  # type: Any

    @classmethod
    def join(cls, place: Place) -> Any:
        """Return this process's place in the engine, where it joins the others the first time."""
        if cls not in process.engines:
            left_threads.end_with_main_thread(place)
            process.engines[cls] = cls(place)
        return process.engines[cls]

    def rendezvous(self) -> Tuple[str, int]:
        """Return the host and the port of rank 0, for ranks whose launcher keeps no store.

        Raises:
            RankError: nothing tells where.
        """
        return rendezvous.require_rendezvous(self.place, self.name or type(self).__name__)

    def listen(self) -> Any:
        """Rank 0's socket, which listens there, and for no more machines than it must.

        Raises:
            RankError: as ``rendezvous``, or the port is taken.
        """
        return rendezvous.listen(self.place, *self.rendezvous())

    def check_size(self, size: int) -> None:
        """Refuse to train alone where the launcher started several processes."""
        if size != self.place.size:
            engine = self.name or type(self).__name__
            raise errors.RankError(
                f"{self.place.launcher} started this process as one of {self.place.size}, but "
                f"{engine} sees {size}: each would train alone. Start it with the launcher of "
                f"{engine}, or with compat run -n {self.place.size}."
            )

    def sum(self, values: Sequence[float]) -> Any:
        """Return the sum over all ranks of lists of float64 of one length, as an array."""
        raise NotImplementedError

    def gather(self, numbers: Sequence[int]) -> List[List[int]]:
        """Return each rank's list of whole numbers up to 2**24, in the order of ranks."""
        return self._gather_and_sum(numbers, [])[0]

    def gather_each(self, lists: Sequence[Sequence[int]]) -> List[List[List[int]]]:
        """As ``gather``, of several lists at once: what that gives for each of them."""
        rows = list(map(iter, self.gather([number for each in lists for number in each])))
        return [[[next(row) for _ in each] for row in rows] for each in lists]

    def gather_texts(self, text: str) -> List[str]:
        """Return each rank's text, in the order of ranks."""
        content = list(text.encode())
        sizes = [size for (size,) in self.gather([len(content)])]
        rows = self.gather(content + [0] * (max(sizes) - len(content)))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]

    def gather_and_sum(
        self, numbers: Sequence[int], values: Sequence[float], expected: int
    ) -> Tuple[List[List[int]], Any]:
        """As ``gather`` and as ``sum``, in one exchange if there are no more values than expected.

        Arguments:
            values: there may be more of them on some ranks than on others.
            expected: a number that is the same on all ranks.

        Returns:
            What ``gather`` gives, and the sums; None in their place where the ranks have different
            numbers of values.
        """
        padded = (list(values) + [0.0] * expected)[:expected]
        rows, sums = self._gather_and_sum([len(values), *numbers], padded)
        if len({count for count, *_ in rows}) > 1:
            sums = None
        elif len(values) > expected:
            sums = self.sum(values)
        else:
            sums = sums[: len(values)]
        return [numbers for _, *numbers in rows], sums

    def _gather_and_sum(self, numbers, values):
        """As ``gather_and_sum``, of as many values on all ranks."""
        mine = [flag * number for flag in self.flags(True) for number in numbers]
        sums, count = self.sum(mine + values), len(numbers)
        starts = [rank * count for rank in range(self.place.size)]
        return [list(map(int, sums[start : start + count])) for start in starts], sums[len(mine) :]

    def broadcast(self, value: Any) -> Any:
        """Return what rank 0 passes.

        Numbers, texts, arrays and lists of them.
        """
        content = pickle.dumps(value, 4) if self.place.rank == 0 else b""
        size = int(self.sum([len(content)])[0])
        content = numpy.frombuffer(content or bytes(size), "uint8")
        with self.waiting("for the broadcast from rank 0"):
            self.arrive()
            return pickle.loads(self.broadcast_bytes(content).tobytes())

    def broadcast_bytes(self, content: Any) -> Any:
        """Rank 0's array of uint8; what other ranks pass is as long, and all zeros."""
        raise NotImplementedError

    def state_besides(self, model: Any) -> List[Any]:
        """Variables that training a model of Keras' sets, and that are not among its weights."""
        return []

    def problem(self, error: Exception) -> Optional[str]:
        """Return the phrase in which this exception tells of a failure between ranks, or None.

        Arguments:
            error: what an operation within ``waiting`` has raised.
        """
        raise NotImplementedError

    def absent(self) -> List[int]:
        """Return the ranks known not to wait here as well, after such a failure."""
        return []

    def missing(self, has_come: Callable[[int], Any], seconds: float = 2.0) -> List[int]:
        """Return the other ranks that do not come in that time."""
        others, until = self.others, time.monotonic() + seconds
        while others and time.monotonic() < until:
            time.sleep(0.1)
            others = [rank for rank in others if not has_come(rank)]
        return others

    def agree(self, call: str) -> None:
        """Begin a call that all ranks make at once, and that is no step.

        Engines that compare each exchange, and those without a store, have nothing to do here.

        Raises:
            RankError: another rank is in another call.
        """
        if self.calls is not None:
            self.calls.begin(call)

    def count(self, what: str) -> None:
        """Count an exchange of "gradients" or "results", which a ``RanksCheck`` asks for."""
        self._exchanged[what] += 1

    def exchanged(self, what: str) -> int:
        """Return how often this rank has exchanged that with the others so far."""
        return int(self._exchanged[what])

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn the engine's own error within into the loss of a rank that it stands for.

        Arguments:
            what: what for, in a phrase.
        """
        self.exchanges += 1
        outer = self.inside
        self.inside = what, self.exchanges, time.monotonic() + self.timeout
        try:
            yield
        except Exception as error:
            problem = self.problem(error)
            if problem is None or isinstance(error, errors.RankError):  # which says so itself
                raise
            raise errors.rank_lost(self.place, what, self.absent(), problem) from error
        finally:
            self.inside = outer
            self.resume()

    def look_while_waiting(self, look: Callable[[Any], None], seconds: float) -> None:
        """From now on call ``look(self.inside)``, in a thread, as often as this rank waits."""

        def watch():
            while True:
                time.sleep(seconds)
                inside = self.inside
                if inside is not None:
                    look(inside)

        threading.Thread(target=watch, daemon=True).start()

    @contextlib.contextmanager
    def watched(self, what: str, seconds: float = 0.0, absent: Any = tuple) -> Iterator[None]:
        """Within, the main thread waits for others in a way that cannot be interrupted.

        After so many seconds this process ends, with the traceback of an error.

        Arguments:
            what: what for, in a phrase.
            seconds: 0: ``timeout``.
            absent: returns the ranks that are known to be missing; called after these seconds.
        """
        limit = seconds or self.timeout

        def end():
            problem = "{:g} seconds are over".format(limit)
            waiting.end_process(errors.rank_lost(self.place, what, absent(), problem))

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def arrive(self) -> None:
        """Called where this rank begins to wait for the others in a graph."""

    def resume(self) -> None:
        """Called where that wait has ended, and the step goes on, or any other wait."""

    def share(self, rows: int, numbers: Sequence[float] = ()) -> float:
        """Return this rank's share of the step that all ranks begin, where it has so many rows.

        Gradients times the shares sum up to the gradient of all rows.

        Arguments:
            numbers: more to sum up on the way, as many on all ranks: to ``totals``.

        Raises:
            RankLostError: other ranks have no more batches.
        """
        sums = self.sum([float(rows), *self.flags(False), *numbers])
        total, ended = self.rows_and_ended(sums)
        self.stepped(ended)
        return rows / total

    def stepped(self, ended: Sequence[int]) -> None:
        """Count a step. ``ended`` are the ranks that had no more batches.

        Raises:
            RankLostError: there are such ranks.
        """
        if ended:
            raise errors.RankLostError(
                f"Rank {self.place.rank} of {self.place.size} has more batches, but "
                f"{errors.numbered_ranks(ended)} ran out of them after {_batches(self.steps)}. "
                "Give every rank the same number: compat.shard() does."
            )
        self.steps += 1

    def close(self) -> None:
        """Say that this rank has no more batches in this epoch. All say so at once.

        Raises:
            RankError: other ranks have more.
        """
        ended, place = self._close(), self.place
        going_on = [rank for rank in range(place.size) if rank not in ended]
        if going_on:
            raise errors.RankError(
                f"Rank {place.rank} of {place.size} ran out of batches after "
                f"{_batches(self.steps)}, but {errors.numbered_ranks(going_on)} had more. Give "
                "every rank the same number: compat.shard() does."
            )
        self.steps = 0

    def _close(self, flag=True):
        """Return the ranks that have no more batches, this one among them, whose flag says so."""
        numbers = [0.0] * len(self.totals)  # as many as those that go on have
        return self.rows_and_ended(self.sum([0.0, *self.flags(flag), *numbers]))[1]

    def rows_and_ended(self, sums: Any) -> Tuple[float, List[int]]:
        """Return what was summed up in a step.

        All ranks' rows, and the ranks without more batches.
        """
        self.totals = sums[1 + self.place.size :]
        return float(sums[0]), [rank for rank in range(self.place.size) if sums[1 + rank]]

    def flags(self, flag: float) -> List[float]:
        """Return this rank's flag in its place, which sums up to all ranks' flags."""
        return [float(flag) * (rank == self.place.rank) for rank in range(self.place.size)]


def _batches(steps):
    return "1 batch" if steps == 1 else "{} batches".format(steps)
