"""Values of the whole batch that replicas of a Gluon block need while they run.

The replicas run in threads that take turns: see ``_rows.replica_threads``. Autograd records the
copies between contexts, so that gradients pass through what the replicas have merged.
"""

from typing import Any, Callable, List, Sequence, Tuple

import mxnet as mx

from ..._rows.replica_threads import TurnTakingThreads, current_turn
from .arrays import context_of, on_context
from .thread_state import callers_state
from .worker_threads import WorkerThread


def run(functions: "Sequence[Callable[[], Any]]") -> "List[Any]":
    """Return the results of a function for each replica, which take turns."""
    threads = TurnTakingThreads(functions, callers_state())
    for turn in threads.turns:
        turn.thread = WorkerThread(turn.run, turn.index)
    with mx.engine.bulk(0):  # else MXNet would delay the operations of this thread
        return threads.run()


def merge(
    key: "Any",
    values: "Sequence[Any]",
    count: int,
    function: "Callable[[List[List[Any]], List[int]], List[Any]]",
) -> "Tuple[List[Any], int]":
    """Return values of the whole batch, on the context of this thread's replica.

    Arguments:
        key: the same in all replicas.
        values: arrays of this replica.
        count: how many elements they are made of.
        function: a function of the arrays of all replicas, all on one context, and of the counts.

    Returns:
        The results of the function, and the sum of the counts.
    """
    turn: "Any" = current_turn()
    modes = mx.autograd.is_recording(), mx.autograd.is_training()

    def merged(replicas):
        first = context_of(replicas[0][0][0])
        arrays = [[on_context(first, a) for a in values] for values, _ in replicas]
        counts = [count for _, count in replicas]
        with mx.autograd._RecordingStateScope(*modes):
            results = [function(arrays, counts)]
            for values, _ in replicas[1:]:  # each from its neighbour
                context = context_of(values[0])
                results.append([on_context(context, array) for array in results[-1]])
        return results, sum(counts)

    shapes = tuple(array.shape for array in values)
    results, total = turn.meet((key, modes, shapes), (values, count), merged)
    return results[turn.index], total
