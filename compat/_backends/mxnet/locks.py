"""Calls of several threads: one at a time for each model, and one first call at a time.

MXNet's engine may be used by several threads. What Gluon compiles and the executors of graphs may
not (its documentation, "Multi Threaded Inference API"), nor may the copies that replicas share.
"""

import threading

#: Held where a trial or a new graph changes something of MXNet's or Keras' for all threads.
making = threading.RLock()


class CallLock:
    """A lock of one model's calls; a copy of the model has its own.

    A thread that holds it may take it again: a model may call itself.
    """

    def __init__(self):
        self._lock = threading.RLock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *raised):
        self._lock.release()

    def __reduce__(self):
        return CallLock, ()
