"""What each context executes, and when: from the record of MXNet's engine."""

import contextlib
import os

from ..._operations import Operation
from . import op_placement


@contextlib.contextmanager
def profiled(contexts):
    """What ``MXNet.profiled()`` returns, for the configured contexts."""
    operations = []  # type: list
    events = []  # type: list
    try:
        with op_placement.recorded() as events:
            yield operations
    finally:
        begun = {}  # type: dict
        for event in events:
            thread = event.get("pid"), event.get("tid")
            if event.get("cat") != "operator":
                continue
            if event["ph"] == "B":
                begun.setdefault(thread, []).append(event)
            elif event["ph"] == "E" and begun.get(thread):
                first = begun[thread].pop()
                device = _context(event["pid"], contexts)
                duration = event["ts"] - first["ts"]
                operations.append(Operation(device, first["name"], first["ts"], duration))


def _context(number, contexts):
    """The context that the record has under a number: CPUs come first, one for each core.

    There are CPU contexts beyond the cores, under the numbers of what comes next; but contexts are
    all CPUs, or all GPUs (MXNet's src/profiler/profiler.cc).
    """
    if contexts[0].startswith("cpu"):
        return "cpu({})".format(number)
    return "gpu({})".format(number - len(os.sched_getaffinity(0)))
