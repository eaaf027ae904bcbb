"""Calls of several threads: one at a time for each model, and one first call at a time.

MXNet's engine may be used by several threads. Blocks that Gluon compiles and executors of graphs
may not (its documentation, "Multi Threaded Inference API"), nor may the copies that replicas share.
"""

import threading

#: Held while a trial or a new graph changes state of MXNet or Keras for all threads.
making = threading.RLock()


class CallLock:
    """A reentrant lock of one model's calls, since a model may call itself.

    A copy of the model gets a new one.
    """

    def __init__(self):
        self._lock = threading.RLock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *raised):
        self._lock.release()

    def __reduce__(self):
        return CallLock, ()
