"""Replicas that need values of one another while they run: threads that take turns.

One thread runs at a time, in the order of the replicas, until it needs a value of the whole batch.
The caller's thread waits meanwhile and computes that value, so that Ctrl-C and errors end all.
"""

import contextlib
import threading
import time
from typing import Any, Callable, ContextManager, List, Optional, Sequence

# How often, each time for a hundredth of a second, a thread is waited for that may have started: it
# is not known where an interruption comes while it does.
_ATTEMPTS = 100


class OthersStopped(BaseException):
    """Another replica has failed, or the call was interrupted."""


class DifferentReductions(Exception):
    """Replicas have come to different reductions, or some of them to none."""


class _RunningTurn(threading.local):
    """State of one thread: the turn of the replica that it runs."""

    turn: "Optional[ReplicaTurn]" = None


_thread = _RunningTurn()


def current_turn() -> "Optional[ReplicaTurn]":
    """Return the ``ReplicaTurn`` of the replica that this thread runs, or None."""
    return _thread.turn


class ReplicaTurn:
    """One replica's thread.

    Attributes:
        index: the replica's.
        suspensions: functions that take out of the model what the replica has set up there, as
            another one is to run. Each returns a function that puts it back.
    """

    def __init__(self, index: int, threads: "TurnTakingThreads", function: "Callable[[], Any]"):
        self.index, self.threads, self.function = index, threads, function
        self.suspensions: "List[Callable[[], Callable[[], Any]]]" = []
        self.lock = _locked()
        self.outcome: "Any" = None
        self.error: "Optional[BaseException]" = None
        self.was_started = self.is_finished = False
        self.request: "Any" = None  # that it waits for: a key, a value, and a function of all
        name = f"compat replica {index}"
        self.thread: "Any" = threading.Thread(target=self.run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for its turn."""
        self.was_started = True
        try:
            self.thread.start()
        except RuntimeError as error:
            # An interruption may leave Python's own lock released there.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def run(self) -> None:
        """Run the function, when it is this replica's turn."""
        self.lock.acquire()
        try:
            if not self.threads.is_stopped:
                _thread.turn = self
                with self.threads.context():
                    self.outcome = self.function()
        except BaseException as error:
            self.error = error
        _thread.turn = None  # of a thread that may be kept
        self.is_finished = True
        _release(self.threads.returned)

    def check(self) -> None:
        """Check that the replicas go on.

        Raises:
            OthersStopped: they do not.
        """
        if self.threads.is_stopped:
            raise OthersStopped

    def meet(self, key: "Any", value: "Any", merge: "Callable[[List[Any]], Any]") -> "Any":
        """Return what ``merge`` returns for the values of all replicas.

        Arguments:
            key: the same in each of them.
            value: this replica's.
            merge: a function, which is called once, in the caller's thread.
        """
        put_back = [suspend() for suspend in reversed(self.suspensions)]
        self.request = key, value, merge
        _release(self.threads.returned)
        self.lock.acquire()
        self.request = None
        self.check()
        for function in reversed(put_back):
            function()
        return self.threads.merged


def _locked() -> "Any":
    """Return a lock that one thread acquires, and waits until another one releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: "Any") -> None:
    """Release a lock, which an interruption may have left released."""
    with contextlib.suppress(RuntimeError):
        lock.release()


class TurnTakingThreads:
    """The threads of one call's replicas.

    Arguments:
        functions: those that they run.
        context: returns the context of each thread: the framework's state of the caller's thread.
    """

    def __init__(
        self,
        functions: "Sequence[Callable[[], Any]]",
        context: "Callable[[], ContextManager[Any]]",
    ) -> None:
        self.is_stopped, self.merged, self.context = False, None, context
        self.returned = _locked()
        self.turns = [
            ReplicaTurn(index, self, function) for index, function in enumerate(functions)
        ]

    def run(self) -> "List[Any]":
        """Return what each function has returned; the first error ends all."""
        try:
            for turn in self.turns:
                turn.start()
            while not all(turn.is_finished for turn in self.turns):
                for turn in self.turns:
                    _release(turn.lock)
                    self.returned.acquire()
                    if turn.error is not None:
                        raise turn.error
                self._merge()
        finally:
            # Not in a function: an interruption may end one before its first line.
            interruption = None
            while True:
                try:
                    self._stop()
                    break
                except KeyboardInterrupt as error:  # one more of them
                    interruption = error
            if interruption is not None:
                raise interruption
        return [turn.outcome for turn in self.turns]

    def _merge(self) -> None:
        """Merge the values with which all replicas have come, or none."""
        requests = [turn.request for turn in self.turns if not turn.is_finished]
        if not requests:
            return
        keys, values, merges = zip(*requests)
        if len(requests) < len(self.turns) or any(key != keys[0] for key in keys):
            raise DifferentReductions
        self.merged = merges[0](list(values))

    def _stop(self) -> None:
        """End the threads that run: the one whose turn it is when it asks next, then the others."""
        self.is_stopped = True
        for turn in sorted(self.turns, key=lambda turn: turn.request is not None):
            attempts = _ATTEMPTS if turn.was_started and not turn.is_finished else 0
            while turn.thread.is_alive() or attempts and not turn.is_finished:
                _release(turn.lock)
                if turn.thread.is_alive():
                    turn.thread.join(0.01)
                else:
                    time.sleep(0.01)
                    attempts -= 1
            turn.error = None  # its traceback would keep the thread's frames
