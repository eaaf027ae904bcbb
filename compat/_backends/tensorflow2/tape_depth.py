"""The number of gradient tapes that record: gradients of gradients need more than one."""

import functools
import threading

import tensorflow as tf

from ..._runtime import patching


class _Depth(threading.local):
    """State of one thread: how many tapes record."""

    number = 0


_thread = _Depth()


def number() -> int:
    """Return how many tapes record in this thread."""
    return _thread.number


def watch_tapes() -> None:
    """Count the tapes that record, from now on."""
    if patching.find(tf.GradientTape, "_push_tape") is None:
        for name, change in (("_push_tape", 1), ("_pop_tape", -1)):
            plain = getattr(tf.GradientTape, name)
            patching.WatchingPatch(tf.GradientTape, name, _counting(plain, change))


def _counting(plain, change):
    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        _thread.number = max(0, _thread.number + change)

    return counted
