"""Engines: the communication of a framework's ranks, which carries numbers between processes.

This is their base class. Each engine is a subclass in a module beside this one.
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
    """The communication of one framework's ranks. Subclasses join the others when created.

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
        totals: the sums over all ranks of the numbers that ``share`` got in the last step.
        unreached: the names of functions that replace a framework's during a step, and that a step
            did not call.
        unexchanged: likewise of those by which a step exchanges gradients, if it exchanged none.
    """

    #: Its name in errors; None for the name of its class.
    name: Optional[str] = None

    def __init__(self, place: Place) -> None:
        self.place = place
        self.others = [rank for rank in range(place.size) if rank != place.rank]
        self.timeout = waiting.timeout(os.environ)
        self.steps = 0
        self.totals: Any = []
        self._exchanged: Any = collections.Counter()  # by the kind of values
        self.unreached: Any = {}  # as a set that keeps its order
        self.unexchanged: Any = {}  # likewise
        self.calls: Any = None  # a ``calls.Calls``, where the ranks keep a store
        self.exchanges = 0  # since the last of these calls began
        # While this rank waits: a phrase for the wait, the number of the exchange, and a deadline.
        self.inside: Any = None

    @classmethod
    def join(cls, place: Place) -> Any:
        """Return this process's engine, which joins the others the first time."""
        if cls not in process.engines:
            left_threads.end_with_main_thread(place)
            process.engines[cls] = cls(place)
        return process.engines[cls]

    def rendezvous(self) -> Tuple[str, int]:
        """Return the host and the port of rank 0, for ranks whose launcher keeps no store.

        Raises:
            RankError: they are not known.
        """
        return rendezvous.require_rendezvous(self.place, self.name or type(self).__name__)

    def listen(self) -> Any:
        """Return rank 0's socket, which listens there on no more interfaces than it must.

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
        """Gather several lists at once, and return for each list those of all ranks."""
        rows = list(map(iter, self.gather([number for numbers in lists for number in numbers])))
        return [[[next(row) for _ in numbers] for row in rows] for numbers in lists]

    def gather_texts(self, text: str) -> List[str]:
        """Return each rank's text, in the order of ranks."""
        content = list(text.encode())
        sizes = [size for (size,) in self.gather([len(content)])]
        rows = self.gather(content + [0] * (max(sizes) - len(content)))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]

    def gather_and_sum(
        self, numbers: Sequence[int], values: Sequence[float], expected: int
    ) -> Tuple[List[List[int]], Any]:
        """Gather numbers and sum values, in one exchange if no more values than expected.

        Arguments:
            numbers: as ``gather`` takes them.
            values: numbers to sum up, of which some ranks may have more than others.
            expected: how many of them fit into the first exchange, the same on all ranks.

        Returns:
            The result of ``gather``; and the sums, or None where the ranks have different numbers
            of values.
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
        """Gather numbers and sum values, of which all ranks have as many."""
        mine = [flag * number for flag in self.flags(True) for number in numbers]
        sums, count = self.sum(mine + values), len(numbers)
        starts = [rank * count for rank in range(self.place.size)]
        return [list(map(int, sums[start : start + count])) for start in starts], sums[len(mine) :]

    def broadcast(self, value: Any) -> Any:
        """Return the value that rank 0 passes: numbers, texts, arrays, or lists of these."""
        content = pickle.dumps(value, 4) if self.place.rank == 0 else b""
        size = int(self.sum([len(content)])[0])
        content = numpy.frombuffer(content or bytes(size), "uint8")
        with self.waiting("for the broadcast from rank 0"):
            self.arrive()
            return pickle.loads(self.broadcast_bytes(content).tobytes())

    def broadcast_bytes(self, content: Any) -> Any:
        """Return rank 0's array of uint8. Other ranks pass zeros, as many."""
        raise NotImplementedError

    def state_besides(self, model: Any) -> List[Any]:
        """Return variables that training sets, and that are not among a Keras model's weights."""
        return []

    def problem(self, error: Exception) -> Optional[str]:
        """Return a phrase for the failure between ranks that an exception means, or None.

        Arguments:
            error: one that an operation within ``waiting`` has raised.
        """
        raise NotImplementedError

    def absent(self) -> List[int]:
        """Return the ranks that are known not to wait in the same exchange after a failure."""
        return []

    def missing(self, has_come: Callable[[int], Any], seconds: float = 2.0) -> List[int]:
        """Return the other ranks that do not come in time.

        Arguments:
            has_come: a function of a rank.
            seconds: how long they may take.
        """
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

    def count(self, kind: str) -> None:
        """Count an exchange of "gradients" or "results", for a ``RanksCheck``."""
        self._exchanged[kind] += 1

    def exchanged(self, kind: str) -> Optional[int]:
        """Return how often this rank has exchanged "gradients" or "results" so far."""
        return int(self._exchanged[kind])

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Wait for other ranks within; an error of the engine becomes that of a lost rank.

        Arguments:
            purpose: a phrase: "for the others' gradients".
        """
        self.exchanges += 1
        outer = self.inside
        self.inside = purpose, self.exchanges, time.monotonic() + self.timeout
        try:
            yield
        except Exception as error:
            problem = self.problem(error)
            if problem is None or isinstance(error, errors.RankError):  # which names the ranks
                raise
            raise errors.rank_lost(self.place, purpose, self.absent(), problem) from error
        finally:
            self.inside = outer
            self.resume()

    def look_while_waiting(self, look: Callable[[Any], None], seconds: float) -> None:
        """Call ``look(self.inside)`` in a thread, time and again, while this rank waits."""

        def watch():
            while True:
                time.sleep(seconds)
                inside = self.inside
                if inside is not None:
                    look(inside)

        threading.Thread(target=watch, daemon=True).start()

    @contextlib.contextmanager
    def watched(self, purpose: str, seconds: float = 0.0, absent: Any = tuple) -> Iterator[None]:
        """Limit a wait of the main thread within that cannot be interrupted.

        When time is over, this process ends with the traceback of an error.

        Arguments:
            purpose: that of the wait, a phrase.
            seconds: the limit; 0: ``timeout``.
            absent: a function that returns the ranks that are known to be missing.
        """
        limit = seconds or self.timeout

        def end():
            problem = "{:g} seconds are over".format(limit)
            waiting.end_process(errors.rank_lost(self.place, purpose, absent(), problem))

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def arrive(self) -> None:
        """Note that this rank begins to wait for the others in a graph."""

    def resume(self) -> None:
        """Note that this rank waits no longer, in a graph or elsewhere."""

    def share(self, rows: int, numbers: Sequence[float] = ()) -> float:
        """Return this rank's share of the step that all ranks begin.

        Gradients times the shares sum up to the gradient of all rows.

        Arguments:
            rows: those of this rank's batch.
            numbers: more to sum up on the way, as many on all ranks: to ``totals``.

        Raises:
            RankLostError: other ranks have no more batches.
        """
        sums = self.sum([float(rows), *self.flags(False), *numbers])
        total, ended = self.rows_and_ended(sums)
        self.stepped(ended)
        return rows / total

    def stepped(self, ended: Sequence[int]) -> None:
        """Count a step.

        Arguments:
            ended: the ranks that had no more batches.

        Raises:
            RankLostError: there are such ranks.
        """
        if ended:
            raise self.has_more_batches(ended)
        self.steps += 1

    def has_more_batches(self, ended: Sequence[int]) -> errors.RankLostError:
        """Return the error of this rank where others have run out of batches."""
        return errors.RankLostError(
            f"Rank {self.place.rank} of {self.place.size} has more batches, but "
            f"{errors.numbered_ranks(ended)} ran out of them after {_batches(self.steps)}. "
            "Give every rank the same number: compat.shard() does."
        )

    def close(self) -> None:
        """Report that this rank has no more batches in this epoch. All ranks do so at once.

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
        """Return the ranks that have no more batches, this one among them."""
        numbers = [0.0] * len(self.totals)  # as many as those that go on have
        return self.rows_and_ended(self.sum([0.0, *self.flags(flag), *numbers]))[1]

    def rows_and_ended(self, sums: Any) -> Tuple[float, List[int]]:
        """Return the rows of all ranks in a step, and the ranks without more batches.

        Arguments:
            sums: those of the numbers that ``share`` exchanges.
        """
        self.totals = sums[1 + self.place.size :]
        return float(sums[0]), [rank for rank in range(self.place.size) if sums[1 + rank]]

    def flags(self, flag: float) -> List[float]:
        """Return a list with this rank's flag in its place; all ranks' lists sum up to theirs."""
        return [float(flag) * (rank == self.place.rank) for rank in range(self.place.size)]


def _batches(steps):
    return "1 batch" if steps == 1 else "{} batches".format(steps)
