"""Flags of blocks: ``with uncounted:``, and ``if uncounted:`` in code that runs within."""

from _thread import RLock, _local  # threading costs an import
from _weakref import ref
from typing import Any, List


class _LockOfThread(_local):
    """A lock for each thread, which no other one takes; ``locks`` gets a weak reference to it."""

    def __init__(self, locks: "List[Any]") -> None:
        self.lock: "Any" = RLock()
        locks.append(ref(self.lock, locks.remove))


class _LockMethod:
    """A method of the current thread's lock, which ``with`` takes before its block begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, flag: "Any", kind: "Any" = None) -> "Any":
        return self if flag is None else getattr(flag.of_thread.lock, self.name)

    def __call__(self, flag: "Any", *raised: object) -> "Any":
        return getattr(flag.of_thread.lock, self.name)(*raised)  # for an ExitStack


class Within:
    """A flag that is true within its blocks, on every thread, also where these are nested.

    Blocks begin and end by methods of a lock, which are not Python functions: Ctrl-C interrupts
    those even before their first line, and the flag would stay true.
    """

    def __init__(self) -> None:
        self.locks: "List[Any]" = []
        self.of_thread = _LockOfThread(self.locks)

    __enter__ = _LockMethod("__enter__")
    __exit__ = _LockMethod("__exit__")

    def here(self) -> bool:
        """Return whether the current thread is within such a block itself."""
        return bool(self.of_thread.lock._is_owned())

    def __bool__(self) -> bool:
        # Whether another thread holds its lock can only be read from the lock's text.
        return any(not repr(lock()).startswith(("<unlocked", "None")) for lock in list(self.locks))
