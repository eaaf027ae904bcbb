"""Threads that run replicas of Gluon blocks, and are kept for later calls.

Each thread has memory and generators of random numbers of MXNet's. Its engine may still use these
when a thread has ended, and a new thread would draw the same numbers every time.
"""

import os
import threading
from typing import Any, Callable, Dict, List, Tuple

import mxnet as mx

from ..._runtime import patching

_lock = threading.Lock()
_idle: "Dict[Tuple[int, int], List[_Worker]]" = {}  # by process, and the replica's number
_seed = [0, 1]  # the one that the script has set last, and how often it was set

_BETWEEN = 1000003  # the seeds of replicas, which draw numbers of their own


class WorkerThread:
    """A call of a function in a thread that is kept, with the methods of ``threading.Thread``.

    Arguments:
        target: the function.
        replica: the number of the replica that it runs.
    """

    def __init__(self, target: "Callable[[], None]", replica: int) -> None:
        self.target, self.replica = target, replica
        self.ended = threading.Event()
        self._was_started = False

    def start(self) -> None:
        """Run the function in an idle thread, or in a new one."""
        with _lock:
            idle = _idle.setdefault((os.getpid(), self.replica), [])
            worker = idle.pop() if idle else _Worker(self.replica)
        worker.call = self
        worker.ready.release()
        self._was_started = True

    def is_alive(self) -> bool:
        """Return whether the function runs."""
        return self._was_started and not self.ended.is_set()

    def join(self, timeout: "Any" = None) -> None:
        """Wait until it has ended."""
        self.ended.wait(timeout)


class _Worker:
    """One of the threads."""

    call: Any = None

    def __init__(self, replica):
        self.replica, self.number = replica, 0  # of the seed
        self.ready = threading.Lock()
        self.ready.acquire()
        patch = patching.find(mx.random, "seed") or _follow_seeds()
        self.seed = patch.before
        name = f"compat worker {replica}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self):
        while True:
            self.ready.acquire()
            seed, number = _seed
            if self.number != number:
                self.number = number
                self.seed((seed + _BETWEEN * (self.replica + 1)) % 2**31)
            self.call.target()
            ended, self.call = self.call.ended, None
            with _lock:
                _idle[os.getpid(), self.replica].append(self)
            ended.set()


def _follow_seeds():
    plain = mx.random.seed

    def seed(seed_state, *args, **kwargs):
        _seed[:] = int(seed_state), _seed[1] + 1
        plain(seed_state, *args, **kwargs)

    return patching.Patch(mx.random, "seed", seed)
