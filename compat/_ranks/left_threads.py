"""The end of a rank whose main thread has failed, whatever threads it has left.

At its end Python waits for all threads that are no daemons, such as one that writes checkpoints or
serves numbers. In a rank that has failed, the others would wait for it meanwhile, and whoever has
started it would take it for one that trains.
"""

import os
import sys
import threading

from .._runtime import patching
from .place import Place
from .waiting import timeout

# How long such threads may take to end, in seconds.
GRACE = 5.0


def end_with_main_thread(place: Place) -> None:
    """From now on, end this rank soon after its main thread has ended with an exception.

    After Ctrl-C, whoever has started the rank decides how long it may take.
    """
    if patching.find(threading, "_shutdown") is not None:
        return
    wait, owner = vars(threading)["_shutdown"], os.getpid()  # by which Python waits for threads
    seconds = min(GRACE, timeout(os.environ) / 2)  # before the others give up

    def end():
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        names = [thread.name for thread in threads if thread is not threading.main_thread()]
        print(end="", flush=True)
        print(
            f"compat: the main thread of {place} has failed. Threads that it has left "
            f"({', '.join(names)}) still run after {seconds:g} seconds, and are ended. Make them "
            "daemons, or end them where the script fails.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def wait_for_so_long():
        failure = getattr(sys, "last_type", None)  # Python sets it as it prints a traceback
        if os.getpid() != owner or failure is None or not issubclass(failure, Exception):
            wait()
            return
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            wait()
        finally:
            timer.cancel()

    patching.MendingPatch(threading, "_shutdown", wait_for_so_long)
