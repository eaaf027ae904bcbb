"""Values with rows of the batch that a model keeps from one call to the next.

A call leaves a hidden state, or its output, in an attribute, a list or a closure, with all rows of
the batch. In the next call of as many rows each replica reads its shard there.
"""

import collections
from typing import Any, Dict, Sequence, Tuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

from ... import _rows
from ..._runtime.containers import MISSING, owners_of
from .arguments import rows_of
from .graph import is_sharded, tag, tag_of


class CutOtherwise(Exception):
    """A call has shown that a value that it has read unsplit has rows."""


class FoundRows(collections.namedtuple("FoundRows", "place axis other")):
    """Values with rows in one place.

    Attributes:
        place: its description, the same for elements of a list, and for variables of a closure.
        axis: the dimension of the rows.
        other: None where there are as many as in the batch; or how many there are, which is how
            many a replica has of the batch: a comparison of the two has another result then.
    """


class KeptRows:
    """The places in which calls of a model have left rows."""

    def __init__(self) -> None:
        self.axes: "Dict[str, Any]" = {}  # by place

    def read(self, effects: Any, rows: int, sizes: "Sequence[int]") -> "Tuple[FoundRows, ...]":
        """Return the rows that are there before a call, which are a part of its kind.

        Arguments:
            effects: an ``Effects``, whose state is that before the call.
            rows: how many the batch has.
            sizes: how many each replica has.
        """
        found_rows = set()
        for owner, key, value in effects.held() if self.axes else ():
            place = place_of(owner, key)
            axis: Any = self.axes.get(place)
            for leaf in [] if axis is None else _leaves(value):
                size = leaf.shape[axis] if len(leaf.shape) > axis else None
                if size == rows or size in sizes:
                    found_rows.add(FoundRows(place, axis, None if size == rows else size))
        return tuple(sorted(found_rows, key=str))

    def note(self, owner, key, value, axis_of):
        """Note the places of rows in a value that a call has left.

        Arguments:
            owner: the owner of the value.
            key: its key there.
            value: the value.
            axis_of: a function that returns the dimension of an array's rows, or None.
        """
        pending, seen = [(owner, key, value)], {}
        while pending:
            owner, key, value = pending.pop()
            for leaf in _leaves(value):
                axis = axis_of(leaf)
                if axis is not None:
                    self.axes[place_of(owner, key)] = axis
            for part in _parts(value):
                if not is_leaf(part) and id(part) not in seen:
                    seen[id(part)] = part
                    pending += [(o, k, v) for o in owners_of(part) for k, v in o.read().items()]

    def misled(self, changes):
        """Note the places where a replica has replaced a value by its rows."""
        for change in changes:
            if change.before is not MISSING and _leaves(change.before):
                self.note(change.owner, change.key, change.after, _axis_of_tag)


def _axis_of_tag(leaf):
    return tag_of(leaf).axis if is_sharded(leaf) and tag_of(leaf).copies == 1 else None


def place_of(owner: Any, key: Any) -> str:
    """Return the description of a place, the same for all elements of a list."""
    is_list = isinstance(owner.held, (list, collections.deque))
    return owner.described(None if is_list else key)


def is_leaf(value: Any) -> bool:
    """Return whether a value is a tensor or an array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def _within(value):
    return not isinstance(value, tuple) or isinstance(value, PackedSequence)


def _parts(value):
    """List a value, or what nested tuples have."""
    return [value] if _within(value) else tree.tree_leaves(value, is_leaf=_within)


def _leaves(value):
    return [part for part in _parts(value) if is_leaf(part)]


class ReplicaRows:
    """Shards of one replica, in place of the values that its model has kept.

    Arguments:
        kept_rows: a ``KeptRows``.
        layout: that of the call.
        device: the replica's device.
        rows: the numbers of its rows.
        watched: whether the shards are tagged.
    """

    def __init__(self, kept_rows, layout, device, rows, watched):
        self.kept_rows, self.total = kept_rows, layout.rows
        self.axes = {kept.place: kept.axis for kept in layout.kept if kept.other is None}
        self.device, self.rows, self.watched = device, rows, watched
        self.shards = {}  # by id of the whole: it, its shard, and the version of that
        self.replaced = []  # owner, key, the whole, its shard

    def begin(self, effects):
        """Replace the values that an ``Effects`` reaches by their shards."""
        for owner, key, value in list(effects.held()) if self.axes else ():
            axis = self.axes.get(place_of(owner, key))
            if axis is not None and any(self._has_rows(leaf, axis) for leaf in _leaves(value)):
                shard = tree.tree_map(
                    lambda v, axis=axis: self._cut(v, axis), value, is_leaf=_within
                )
                self.replaced.append((owner, key, value, shard))
                owner.write(key, shard)

    def _has_rows(self, value, axis):
        return is_leaf(value) and len(value.shape) > axis and value.shape[axis] == self.total

    def _cut(self, value, axis):
        if not self._has_rows(value, axis):
            return value
        if id(value) not in self.shards:
            if isinstance(value, np.ndarray):
                shard = value.take(list(self.rows), axis)
                self.shards[id(value)] = value, shard, shard.copy()
            else:
                shard = rows_of(value, axis, self.rows).to(self.device, copy=True)
                self.shards[id(value)] = value, shard, shard._version
                if self.watched:
                    tag(shard, _rows.Sharded(axis))
        return self.shards[id(value)][1]

    def put_back(self):
        """Restore the values whose shards the call has left in place.

        Returns:
            An owner, a key and a shard for each of them.
        """
        shards = []
        for owner, key, value, shard in self.replaced:
            if owner.read().get(key) is shard:
                owner.write(key, value)
                shards.append((owner, key, shard))
        return shards

    def end(self):
        """Restore the values whose shards the call has left in place.

        Returns:
            Pairs of a value and its shard that was changed in place, by key.
        """
        self.put_back()
        return {
            ("effect", "in place", number): (whole, shard)
            for number, (whole, shard, was) in enumerate(self.shards.values())
            if (shard._version != was if isinstance(shard, torch.Tensor) else (shard != was).any())
        }


def set_whole(whole, value):
    """Set a tensor or an array that replicas have changed in place."""
    whole[...] = value
