"""What each device has done: batches, counted where they are split.

Each backend calls ``count()`` at the one place where the replicas of a batch have run, so that
what is counted is what was computed, not what was configured. It costs an addition to a dictionary.
"""

from _thread import _local
from typing import Any, Dict, Mapping, Optional, Sequence

from .process import process
from .within import Within

#: Within, batches are computed for compat's own purposes, and do not count; for a graph that is
#: made within: what is computed by it later.
uncounted = Within()

_here = _local()  # ``batches``: those that this thread has counted


def count(devices: "Sequence[str]", sizes: "Optional[Sequence[int]]", training: bool) -> None:
    """Count a batch.

    Arguments:
        devices: those it was split over; of a rank, which is alone with its own, "".
        sizes: how many of its rows each has computed; None where that is not known.
        training: whether gradients were wanted.
    """
    if not uncounted:
        key = tuple(devices), None if sizes is None else tuple(sizes), bool(training)
        here = vars(_here).setdefault("batches", {})
        for counted in (process.batches, here):
            counted[key] = counted.get(key, 0) + 1


def undivided(devices: "Sequence[str]", rows: int) -> "Sequence[int]":
    """Return the sizes of a batch that the first device has computed alone."""
    return [rows] + [0] * (len(devices) - 1)


def batches() -> "Dict[Any, int]":
    """Return how many batches there were of each kind: those that Python saw, and those of graphs.

    A kind is the arguments of ``count()``: the devices, their sizes, and whether it was training.
    """
    return _with_graphs(process.batches)


def batches_of_thread() -> "Dict[Any, int]":
    """Return the batches that this thread has counted, and all of graphs: these know no threads."""
    return _with_graphs(vars(_here).get("batches", {}))


def _with_graphs(counted: "Mapping[Any, int]") -> "Dict[Any, int]":
    found = dict(counted)
    for read in process.graph_counters.values():
        for key, number in read():
            found[key] = found.get(key, 0) + number
    return found
