"""Work of each device: batches, counted where they are split.

Each backend calls ``count()`` at the one place where the replicas of a batch have run, so that
computed batches are counted, not configured ones. It costs an addition to a dictionary.
"""

from _thread import _local
from typing import Any, Dict, Mapping, Optional, Sequence

from .process import process
from .within import Within

#: Within, batches do not count, as in compat's own trials; nor do those of a graph made within.
uncounted = Within()

_here = _local()  # ``batches``: those that this thread has counted


def count(devices: "Sequence[str]", sizes: "Optional[Sequence[int]]", training: bool) -> None:
    """Count a batch.

    Arguments:
        devices: those it was split over; in a rank "".
        sizes: how many of its rows each has computed; None where that is unknown.
        training: whether gradients were wanted.
    """
    if not uncounted:
        key = tuple(devices), None if sizes is None else tuple(sizes), bool(training)
        here = vars(_here).setdefault("batches", {})
        for counted in (process.batches, here):
            counted[key] = counted.get(key, 0) + 1


def unsplit_sizes(devices: "Sequence[str]", rows: int) -> "Sequence[int]":
    """Return the sizes of a batch that the first device has computed alone."""
    return [rows] + [0] * (len(devices) - 1)


def batches() -> "Dict[Any, int]":
    """Return how many batches there were of each kind, those within graphs included.

    A kind is the arguments of ``count()``: the devices, their sizes, and whether it was training.
    """
    return _with_graphs(process.batches)


def batches_of_thread() -> "Dict[Any, int]":
    """Return the batches that this thread has counted, and all those within graphs."""
    return _with_graphs(vars(_here).get("batches", {}))


def _with_graphs(counted: "Mapping[Any, int]") -> "Dict[Any, int]":
    batches = dict(counted)
    for read in process.graph_counters.values():
        for key, number in read():
            batches[key] = batches.get(key, 0) + number
    return batches
