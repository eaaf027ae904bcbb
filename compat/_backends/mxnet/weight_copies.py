"""Weights and gradients passed along a chain of contexts, from each one to its neighbour.

The first context alone would send the weights to all others, and receive all of their gradients.
Along the chain no context sends or receives more than the weights once, and the gradients once.
MXNet's engine executes the copies asynchronously, as soon as their arrays are there.
"""

import mxnet as mx

from .arrays import context_of, on_context
from .synchronization import wait_for_updates


def broadcast(arrays):
    """Copy the first array of a list to the others, to each one from its neighbour."""
    for source, target in zip(arrays, arrays[1:]):
        source.copyto(target)


def copies(array, contexts):
    """Return new copies of an array on all contexts, each made from its neighbour's."""
    made = []
    for context in contexts:
        array = array.copyto(context)
        made.append(array)
    return made


def reduced(arrays):
    """Return the sum of a list of arrays, on the context of the first one."""
    *others, total = arrays
    for array in reversed(others):
        total = mx.nd.add_n(array, total.as_in_context(array.context))
    return total


def unite(statistics, sizes):
    """Set the replicas' statistics to their means, weighted by shard size.

    Values that are the same in all replicas stay bitwise equal.

    Arguments:
        statistics: for each statistic, a list of the replicas' arrays.
        sizes: the shard sizes.
    """
    if statistics:
        wait_for_updates()
    for arrays in statistics:
        rows, mean = 0, arrays[0]
        for array, size in reversed(list(zip(arrays, sizes))):
            if size:
                rows += size
                others = on_context(context_of(array), mean) if rows > size else array
                mean = others + (array - others) * (float(size) / rows)
        mean.copyto(arrays[0])
        broadcast(arrays)
