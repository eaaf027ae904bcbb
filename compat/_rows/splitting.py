"""How a batch is split over replicas, on every backend alike.

A batch of B rows on n devices is split evenly: replica i has rows ``i*B//n`` to
``(i+1)*B//n``, so sizes differ by one row at most. No replica ever runs without rows, since
an empty one kills convolutions and makes batch statistics NaN: where B < n, a replica without
rows of its own computes the row at its place, and its results are discarded.

The functions use only ``*``, ``//``, ``+`` and a ``maximum`` handed in, so that they work on
integers and on any framework's scalar tensors.
"""

from typing import Any, Callable, List, Tuple

from .._runtime.within import Within

#: Within, models that have replicas run unsplit, on this thread: in a replica, or where one device
#: is compared with all. ``unsplit.here()`` returns whether they do now.
unsplit = Within()


def bounds(rows: "Any", replicas: int, replica: int) -> "Tuple[Any, Any]":
    """Return the first row of a replica's shard of a batch, and the one after its last."""
    return replica * rows // replicas, (replica + 1) * rows // replicas


def run_bounds(
    rows: "Any", replicas: int, replica: int, maximum: "Callable[..., Any]" = max
) -> "Tuple[Any, Any]":
    """Return the rows a replica computes: its shard, or one row where the shard is empty."""
    start, stop = bounds(rows, replicas, replica)
    return start, maximum(stop, start + 1)


def sizes(rows: "Any", replicas: int) -> "List[Any]":
    """Return the number of rows of each replica's shard."""
    return [stop - start for start, stop in (bounds(rows, replicas, i) for i in range(replicas))]
