"""What replicas and trials have made, value by value."""

import numpy as np
import torch

from . import batches
from .calls import RowCount, tag_of


class Outcome:
    """What one replica made.

    Attributes:
        rows: how many rows it computed.
        values: by key, each value of the result, each loss, each state, each attribute.
        unflatten, described: how the result is nested.
        given: by key, state as the replica was given it.
        numbers: those that were taken from a tensor, which stands in for them.
        arrays: those that are arrays of numpy's, for which tensors stand in.
        watch: the ``Watch`` that saw it, or None.
    """

    def __init__(self, rows, result, state, given, watch):
        self.rows, self.given, self.watch = rows, given, watch
        leaves, self.unflatten, self.described = batches.flatten(result)
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.values.update(state)
        items = {} if watch is None else watch.items
        self.numbers = {key for key, value in self.values.items() if id(value) in items}
        self.values.update((key, items[id(self.values[key])][1]) for key in self.numbers)
        self.arrays = {k for k, v in self.values.items() if isinstance(v, np.ndarray)}
        self.arrays = {key for key in self.arrays if self.values[key].dtype.kind in "biufc"}
        self.values.update((key, torch.from_numpy(self.values[key])) for key in self.arrays)


class PartsTrial:
    """What rows of the batch give: in parts, and together.

    Arguments:
        compute: gives the ``Outcome`` of a list of rows.
        parts: lists of rows, in the batch's order.
    """

    def __init__(self, compute, parts):
        self.compute, self.parts = compute, parts
        self.sizes = [len(part) for part in parts]
        self.all_rows = [row for part in parts for row in part]
        self._outcomes = None

    def outcomes(self):
        """That of all rows, and those of the parts."""
        if self._outcomes is None:
            self._outcomes = [self.compute(rows) for rows in [self.all_rows] + self.parts]
        return self._outcomes

    def finds_sequences(self):
        """Whether the rows are where layers of sequences have them."""
        return self._outcomes is not None and not any(o.watch.misplaced for o in self._outcomes)

    def values(self, key):
        """The parts' values and that of all rows; None where there are none."""
        found = [each.values[key] for each in self.outcomes() if key in each.values]
        return (found[1:], found[0]) if len(found) == len(self.outcomes()) else None

    def is_random(self):
        """Whether the same rows give something else each time."""
        whole, again = self.outcomes()[0].values, self.compute(self.all_rows).values
        same = list(whole) == list(again)
        return not (same and all(batches.close(whole[k], again[k]) for k in whole))


def untagged(value):
    """A value as the caller gets it."""
    if isinstance(value, torch.Tensor) and tag_of(value) is not None:
        del value._compat_rows
    if isinstance(value, batches.Unchanged):
        return value.value
    if isinstance(value, torch.Size):
        return torch.Size([int(size) for size in value])
    return int(value) if isinstance(value, RowCount) else value


def part_on(device, where, rows, value):
    """A replica's rows of an argument, on its device."""
    if where is None and not isinstance(value, torch.Tensor):
        return value
    mask = getattr(value, "_keras_mask", None)
    value = (value if where is None else batches.rows_of(value, where, rows)).to(device)
    if mask is not None:
        value = value.view_as(value)  # another object: the mask is not for the argument itself
        value._keras_mask = part_on(device, where, rows, mask)
    return value
