"""Ranks in threads of one process."""

import threading

import numpy as np

import compat
from compat._ranks import engines
from compat._ranks.place import Place


class Threads(engines.Engine):
    """An engine between threads, which sums in float32 as the least precise do."""

    def __init__(self, place, barrier, box):
        super().__init__(place)
        self.barrier, self.box, self.exchanged = barrier, box, []

    def all(self, value):
        self.barrier.wait(20)
        self.box[self.place.rank] = value
        self.barrier.wait(20)
        return [self.box[rank] for rank in range(self.place.size)]

    def sum(self, values):
        self.exchanged.append(len(values))
        return np.sum(np.array(self.all(list(values)), "float32"), axis=0)

    def broadcast(self, value):
        return self.all(value)[0]


def together(size, call):
    """Return the results, or texts of errors, of an engine's ``call`` on each of several ranks."""
    barrier, box = threading.Barrier(size), {}
    outcomes = [None] * size  # type: list

    def run(rank):
        try:
            outcomes[rank] = call(Threads(Place(rank, size, rank, size, "test"), barrier, box))
        except compat.RankError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
