"""Results, losses and state of one replica, value by value."""

from typing import Any

import numpy as np
import torch

from .arguments import Unchanged
from .containers import flatten
from .graph import tag_of
from .row_counts import RowCount


class Outcome:
    """The values that one replica made.

    Arguments:
        rows: how many rows it computed.
        result: its result, nested.
        state: by key, state that it has set, and losses.
        initial_state: by key, state before it, on its device.
        propagation: the ``Propagation`` that saw it, or None.

    Attributes:
        values: by key, each value of the result, each loss, each state, each attribute.
        unflatten, described: how the result is nested.
        numbers: the keys of those that were taken from a tensor, which stands in for them.
        arrays: the keys of those that are arrays of numpy's, for which tensors stand in.
    """

    def __init__(self, rows, result, state, initial_state, propagation):
        self.rows, self.propagation = rows, propagation
        self.initial_state = initial_state
        leaves, self.unflatten, self.described = flatten(result)
        self.values = {("result", index): leaf for index, leaf in enumerate(leaves)}
        self.values.update(state)
        items = {} if propagation is None else propagation.items
        self.numbers = {key for key, value in self.values.items() if id(value) in items}
        self.values.update((key, items[id(self.values[key])][1]) for key in self.numbers)
        self.arrays = {k for k, v in self.values.items() if isinstance(v, np.ndarray)}
        self.arrays = {key for key in self.arrays if self.values[key].dtype.kind in "biufc"}
        self.values.update((key, torch.from_numpy(self.values[key])) for key in self.arrays)


def untagged(value: Any) -> Any:
    """Return a value for the caller, without tags and stand-ins."""
    if isinstance(value, torch.Tensor) and tag_of(value) is not None:
        del value._compat_rows
    if isinstance(value, Unchanged):
        return value.value
    if isinstance(value, torch.Size):
        return torch.Size([int(size) for size in value])
    return int(value) if isinstance(value, RowCount) else value
