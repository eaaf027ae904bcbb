"""How the values that ranks give to one variable make up that of one process."""

import collections
import functools

import numpy as np

from .._rows.placements import REPLICATED, Partial

MEAN, SUM, MAX, MIN = [Partial(how) for how in ("mean", "sum", "max", "min")]

#: Functions of a framework, by numpy's names and arguments; ``cast`` takes an array and a type,
#: ``scale`` an array and a rank's share of the rows.
Operations = collections.namedtuple("Operations", "zeros_like maximum minimum round cast scale")


def operations_of(module):
    """Return the ``Operations`` of a module that has numpy's functions: numpy's, or JAX's."""
    return Operations(
        module.zeros_like,
        module.maximum,
        module.minimum,
        module.round,
        lambda array, dtype: array.astype(dtype),
        lambda array, share: array * module.asarray(share, array.dtype),
    )


NUMPY = operations_of(np)


class Merge:
    """How one process's value of a variable follows from those that a step gives it on each rank.

    Arguments:
        placement: of the value over rows; ``Mixed`` counts as a mean.
        is_float: whether the variable is one of floats.
        decay: the multiple of the old value to which a step adds a sum.
    """

    def __init__(self, placement=MEAN, is_float=True, decay=1):
        self.placement, self.is_float, self.decay = placement, is_float, decay
        self.is_exchanged = placement != REPLICATED
        self.is_extreme = placement in (MAX, MIN)
        self.is_weighted = is_float and not self.is_extreme and placement != SUM

    def base(self, before):
        """Return the part of the new value that counts once."""
        return before if self.decay == 1 else before * self.decay

    def parts(self, operations, before, after, share, place):
        """Return arrays of floats of this rank, whose sums over all ranks ``merged()`` takes.

        Arguments:
            before, after: the variable's values before and after the step.
            share: this rank's share of the step's rows.
        """
        value = after if self.is_extreme else after - self.base(before)
        value = value if self.is_float else operations.cast(value, "float32")
        if self.is_extreme:
            others = operations.zeros_like(value)
            return [value if rank == place.rank else others for rank in range(place.size)]
        if self.placement == SUM:
            return [value]
        if self.is_weighted:
            return [operations.scale(value, share)]
        return [operations.zeros_like(value) if place.rank else value]  # no mean: rank 0's

    def count(self, size):
        """Return how many arrays ``parts()`` returns on each of so many ranks."""
        return size if self.is_extreme else 1

    def merged(self, operations, before, sums):
        """Return one process's value."""
        if self.is_extreme:
            choose = operations.maximum if self.placement == MAX else operations.minimum
            value = functools.reduce(choose, sums)
        else:
            (value,) = sums
        if not self.is_float:
            value = operations.cast(operations.round(value), before.dtype)
        return value if self.is_extreme else self.base(before) + value


def parts(merges, operations, before, after, share, place):
    """Return what is to be summed up over all ranks, a list of arrays of floats."""
    return [
        part
        for merge, old, new in zip(merges, before, after)
        if merge.is_exchanged
        for part in merge.parts(operations, old, new, share, place)
    ]


def merged(merges, operations, before, after, sums, size, factor=1):
    """Return the values of one process, from the sums over so many ranks of ``parts()``.

    Arguments:
        factor: what shares are multiplied by, if ``parts()`` was given multiples of them.
    """
    sums, values = iter(sums), []
    for merge, old, new in zip(merges, before, after):
        if merge.is_exchanged:
            of_variable = [next(sums) for _ in range(merge.count(size))]
            if factor != 1 and merge.is_weighted:
                of_variable = [operations.scale(each, factor) for each in of_variable]
            new = merge.merged(operations, old, of_variable)
        values.append(new)
    return values
