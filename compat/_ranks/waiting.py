"""Waiting for other ranks: for how long, and what ends a wait that cannot be interrupted."""

import os
import sys
import threading
import traceback

from .. import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List, Mapping, NoReturn, Optional

#: How long ranks wait for each other where the user sets nothing, in seconds.
TIMEOUT = 600.0


def timeout(environ: "Mapping[str, str]", name: str = "COMPAT_TIMEOUT") -> float:
    """Return how long a rank waits for the others, in seconds: ``COMPAT_TIMEOUT``, or ``TIMEOUT``.

    Arguments:
        environ: the environment.
        name: the name of the setting, for the error.
    """
    text = environ.get("COMPAT_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e9:  # more than engines and the system can wait
        raise errors.InvalidArgumentError(
            "{}={} is not understood. Use a number of seconds above 0, at most 1e9: how long a "
            "rank waits for the others.".format(name, text)
        )
    return seconds


def answer(question: "Callable[[], Any]", seconds: float, otherwise: "Any") -> "Any":
    """Return what ``question()`` returns, or ``otherwise`` if that takes longer.

    For requests to another process that have no limit of their own: one that is stopped (by
    SIGSTOP, or by a batch system) keeps its connections, and never answers.

    Arguments:
        question: a function, which is called in a thread.
        seconds: how long it may take.
        otherwise: the result in place of one that comes too late.
    """
    answers: "List[Any]" = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise


def end_process(error: Exception, last: "Optional[Callable[[], Any]]" = None) -> "NoReturn":
    """End this process, whose main thread waits in native code, as an uncaught error would.

    Arguments:
        error: the error, which is printed with the traceback of the main thread.
        last: a function that is called once it is printed.
    """
    frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore  # it runs
    lines = ["Traceback (most recent call last):\n"] + traceback.format_stack(frame)
    lines += traceback.format_exception_only(type(error), error)
    print(end="", flush=True)  # works, too, where a stream is closed
    print("".join(lines), end="", file=sys.stderr, flush=True)
    if last is not None:
        last()
    os._exit(1)
