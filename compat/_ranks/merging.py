"""Merging of the values that ranks give to a variable into that of one process."""

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
    """The way in which the values of a variable on all ranks are merged after a step.

    Arguments:
        placement: that of the value over rows; ``Mixed`` counts as a mean.
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
            operations: those of the arrays' framework.
            before: the variable's value before the step.
            after: its value after the step.
            share: this rank's share of the step's rows.
            place: this rank's ``Place``.
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
        """Return one process's value, from that before the step and the sums of ``parts()``."""
        if self.is_extreme:
            choose = operations.maximum if self.placement == MAX else operations.minimum
            value = functools.reduce(choose, sums)
        else:
            (value,) = sums
        if not self.is_float:
            value = operations.cast(operations.round(value), before.dtype)
        return value if self.is_extreme else self.base(before) + value


def parts(merges, operations, before, after, share, place):
    """Return the arrays of floats of several variables that are to be summed up over all ranks."""
    return [
        part
        for merge, old, new in zip(merges, before, after)
        if merge.is_exchanged
        for part in merge.parts(operations, old, new, share, place)
    ]


def merged(merges, operations, before, after, sums, size, factor=1):
    """Return the values of one process, from the sums of ``parts()`` over all ranks.

    Arguments:
        merges: those of the variables.
        operations: those of the arrays' framework.
        before: the variables' values before the step.
        after: their values after the step, on this rank.
        sums: those of ``parts()``.
        size: the number of ranks.
        factor: a factor of all shares, if ``parts()`` got multiples of them.
    """
    sums, values = iter(sums), []
    for merge, old, new in zip(merges, before, after):
        if merge.is_exchanged:
            of_variable = [next(sums) for _ in range(merge.count(size))]
            if factor != 1 and merge.is_weighted:
                of_variable = [operations.scale(value, factor) for value in of_variable]
            new = merge.merged(operations, old, of_variable)
        values.append(new)
    return values
